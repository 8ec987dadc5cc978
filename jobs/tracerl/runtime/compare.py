"""`tracerl compare`: one job under several methods and seeds, one run after the other.

Every run has a directory of its own under one output directory, so that a comparison that was stopped goes on
where it was: runs that are complete are not run again, others are resumed. Warm-ups are shared by the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracerl.api.errors import InputError, JobError
from tracerl.api.job import MethodName, TraceRLJob
from tracerl.observe.run import Ending
from tracerl.runtime.display import Display
from tracerl.runtime.local import Request, load_local_job, run_local
from tracerl.runtime.rundir import has_begun


@dataclass(frozen=True)
class Arm:
    """One run of a comparison."""

    label: str
    job: TraceRLJob
    directory: Path


def parse_methods(text: str) -> list[MethodName]:
    """Read a comma-separated list of methods; InputError names what is not one."""
    known = {method.value.lower(): method for method in MethodName}
    methods: list[MethodName] = []
    for word in text.split(","):
        method = known.get(word.strip().lower())
        if method is None:
            raise InputError(
                f"--methods: {word.strip()!r} is not a method; choose from {', '.join(MethodName)}"
            )
        if method in methods:
            raise InputError(f"--methods: {method} is named twice; name each method once")
        methods.append(method)
    return methods


def plan_arms(
    manifest: Path, overrides: Sequence[str], methods: Sequence[MethodName], seeds: int, out: Path
) -> list[Arm]:
    """Make the runs of a comparison, method by method; InputError when one of the jobs is not valid.

    Seeds count up from the manifest's. What a method has no use for is left out: `spec.expect`, which was
    written for one method, audits under BF16, and what only TRACE has.
    """
    first = load_local_job(manifest, overrides).spec.algorithm.seed
    arms = []
    for method in methods:
        for seed in range(first, first + seeds):
            changes = [f"spec.method.name={method}", f"spec.algorithm.seed={seed}", "spec.expect={}"]
            if method is not MethodName.TRACE:
                changes += ["spec.method.trace=null", "spec.quantization.secondInput=RTN"]
                changes.append("spec.observe.baselineEvery=0")
            if method is MethodName.BF16:
                changes.append("spec.records.auditEvery=0")
            try:
                job = load_local_job(manifest, [*overrides, *changes])
            except InputError as error:
                raise InputError(f"under method {method}, {error}", error.faults) from None
            arms.append(Arm(f"{method}, seed {seed}", job, out / f"{method.lower()}-seed{seed}"))
    return arms


def run_arms(
    arms: Sequence[Arm], display: Callable[[], Display], command: str
) -> tuple[Ending | None, list[str]]:
    """Run what is not complete; returns the ending of a run that was stopped, and a sentence a failed run.

    After a stop (Ctrl-C) no further run is started. `command` is what the user types to go on.
    """
    failures: list[str] = []
    for number, arm in enumerate(arms, start=1):
        resume = has_begun(arm.directory)
        shown = display()
        try:
            title = f"run {number} of {len(arms)}: {arm.label}"
            ending = run_local(Request(arm.job, arm.directory, resume, title, command), shown)
        except JobError as error:
            failures.append(f"{arm.label}: {error}")
            continue
        finally:
            shown.close()
        if ending.state == "Stopped":
            return ending, failures
    return None, failures
