"""Entry point of a pod of several trainers: ``python -m tracerl.runtime.trainer_pod_main JOB.YAML POD``.

A rank is a process (`tracerl.runtime.trainer_main`), with a GPU of its own where there are any. The pod's
first rank is this process, which the kubelet sees; it starts the others and ends the pod when one of them
fails: collective operations on GPUs would wait for it. They end with it, as it alone is asked to stop.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from tracerl.api.errors import InputError
from tracerl.api.resolved import ResolvedJob
from tracerl.runtime import trainer_main

log = logging.getLogger(__name__)


def main(path: str, pod: str) -> int:
    """Run the ranks of a pod; returns the first one's exit code, and ends at once when another one fails."""
    try:
        trainer = ResolvedJob.read(Path(path)).job.spec.trainer
    except InputError:
        return trainer_main.main(path, pod)  # which says so where it is seen
    ranks = trainer.parallelism.ranks // trainer.nodes
    first = int(pod.removeprefix("trainer-")) * ranks
    watchers = [
        threading.Thread(target=_watch, args=(f"trainer-{rank}", _start(path, rank)), daemon=True)
        for rank in range(first + 1, first + ranks)
    ]
    for watcher in watchers:
        watcher.start()
    code = trainer_main.main(path, f"trainer-{first}")
    if code == 0:
        for watcher in watchers:
            watcher.join()
    return code


def _start(path: str, rank: int) -> subprocess.Popen[bytes]:
    module = [sys.executable, "-P", "-m", "tracerl.runtime.trainer_main"]
    return subprocess.Popen([*module, path, f"trainer-{rank}"])  # noqa: S603  this program


def _watch(name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for a rank, and end the pod when it failed."""
    status = process.wait()
    if status:
        # Of a process that a signal ended it is minus its number.
        code = status if status > 0 else 128 - status
        log.error("%s ended with exit code %d, and this pod with it", name, code)
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
