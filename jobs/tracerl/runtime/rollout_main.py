"""Entry point of a rollout process: ``python -m tracerl.runtime.rollout_main <job.yaml> <name>``.

The engine is imported inside, since torch takes seconds and may be broken: by then the process ends with its
parent, and whatever goes wrong is explained.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracerl.api.resolved import ResolvedJob
from tracerl.runtime.child import run_process


def main(path: str, name: str) -> int:
    """Serve the rollout `name` of the resolved job at `path` until SIGTERM; returns the exit code."""

    def work(resolved: ResolvedJob) -> None:
        from tracerl.engines.reference.server import serve  # noqa: PLC0415

        serve(resolved, [endpoint.name for endpoint in resolved.endpoints.rollout].index(name))

    return run_process(Path(path), name, work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
