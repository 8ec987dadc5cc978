"""Entry point of a record store process: ``python -m tracerl.runtime.store_main <job.yaml> <name>``.

The store is imported inside: by then the process ends with its parent, and whatever goes wrong is explained.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracerl.api.resolved import ResolvedJob
from tracerl.runtime.child import run_process


def main(path: str, name: str) -> int:
    """Run the record store `name` of the resolved job at `path` until SIGTERM; returns the exit code."""

    def work(resolved: ResolvedJob) -> None:
        from tracerl.transport.store.process import serve  # noqa: PLC0415

        serve(resolved, name)

    return run_process(Path(path), name, work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
