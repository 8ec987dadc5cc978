"""Entry point of a rollout process: ``python -m tracerl.runtime.rollout_main <job.yaml> <name>``.

The engine is imported inside, since torch takes seconds and may be broken: by then the process ends with its
parent, and whatever goes wrong is explained. The processes that SGLang starts import this module again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tracerl.api.job import RolloutEngine
from tracerl.api.resolved import ResolvedJob
from tracerl.runtime.child import run_process
from tracerl.runtime.interpreters import require_here


def main(path: str, name: str) -> int:
    """Serve the rollout `name` of the resolved job at `path` until SIGTERM; returns the exit code."""

    def work(resolved: ResolvedJob) -> None:
        spec = resolved.job.spec
        require_here(spec, "rollout")
        if spec.rollout.engine is RolloutEngine.SGLANG:
            os.environ.update(sglang_environment(path, gpus=spec.rollout.gpus_per_node))
            from tracerl.engines.sglang.server import serve  # noqa: PLC0415
        else:
            from tracerl.engines.reference.server import serve  # noqa: PLC0415

        serve(resolved, [endpoint.name for endpoint in resolved.endpoints.rollout].index(name))

    return run_process(Path(path), name, work)


def sglang_environment(path: str, *, gpus: int) -> dict[str, str]:
    """What SGLang and our plugin read from the environment when they are imported, in every process of it."""
    environment = {
        # Of the plugins that are installed, ours alone; it reads the job at `path`.
        "SGLANG_PLUGINS": "tracerl",
        "TRACERL_JOB": str(Path(path).absolute()),
    }
    return environment if gpus else environment | {"SGLANG_USE_CPU_ENGINE": "1"}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
