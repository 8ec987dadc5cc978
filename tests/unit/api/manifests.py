"""The shortest manifest that runs."""

from typing import Any

MINIMAL: dict[str, Any] = {
    "apiVersion": "tracerl.dev/v1alpha1",
    "kind": "TraceRLJob",
    "metadata": {"name": "canary"},
    "spec": {
        "model": {"uri": "builtin://tiny-moe"},
        "task": {"name": "builtin/chain_sum"},
        "algorithm": {"steps": 30, "promptsPerStep": 16, "samplesPerPrompt": 8},
        "method": {"name": "TRACE"},
    },
}
