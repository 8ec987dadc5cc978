"""What a job's processes and the operator must agree on beyond the resolved job, each said once."""

from __future__ import annotations

from tracerl.api.job import Colocation, Spec, WeightSync

JOB_DIRECTORY = "/etc/tracerl"
"""Where a pod finds the resolved job, and below it what else is mounted for it."""
REWARD_DIRECTORY = f"{JOB_DIRECTORY}/reward"
"""Where the config map of `spec.task.source.configMap` is mounted."""

PROGRESS_KEY = "progress"
"""The one key of the config map of a job's progress."""

EXIT_FAILED, EXIT_INPUT, EXIT_UNEXPECTED = 1, 2, 70  # the last is EX_SOFTWARE of sysexits.h
FINAL_EXIT_CODES = (EXIT_FAILED, EXIT_INPUT, EXIT_UNEXPECTED)
"""A process that ends so would end so again after a restart; codes above 128 are of signals."""


def progress_map(job: str) -> str:
    """Name of the config map that trainer 0 writes a job's progress into."""
    return f"{job}-progress"


def weights_by_disk(spec: Spec, *, one_machine: bool) -> bool:
    """Whether weights travel through the run's directory: Auto means so on one machine and in one pod."""
    if spec.trainer.weight_sync is WeightSync.AUTO:
        return one_machine or (spec.placement.colocation is Colocation.POD and spec.rollout.nodes == 1)
    return spec.trainer.weight_sync is WeightSync.DISK
