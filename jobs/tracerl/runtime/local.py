"""One job on this machine: record stores, rollouts and trainers, restarted within the job's budget.

Several nodes are several sets of these processes: a trainer reads the records of another node over HTTP, as
on a cluster, though both are here. The parent holds no weights and no records: it starts, watches, restarts
and stops, shows what the run log says, and leaves the run directory tidy however the run ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError, TraceRLError
from tracerl.api.job import TraceRLJob
from tracerl.api.load import load_job
from tracerl.api.machine import Machine
from tracerl.api.resolved import ResolvedJob, RunLayout
from tracerl.observe.run import Ending, parse_line
from tracerl.observe.runlog import RunLog, Tail
from tracerl.rl.steprecord import EventRecord, StartRecord, StepRecord
from tracerl.runtime.display import Display, show
from tracerl.runtime.interpreters import interpreter, require_packages
from tracerl.runtime.processes import ProcessSpec, StopSignals, module_arguments
from tracerl.runtime.rundir import (
    allow_open_files,
    claimed,
    disk_errors,
    read_ending,
    refuse,
    remove_dead_rings,
    remove_objects,
    resume_run,
    start_run,
    tidy,
    write_ending,
    write_token,
)
from tracerl.runtime.supervise import Supervisor
from tracerl.transport.base import TransportError

TRAINER = "trainer-0"
"""The process that runs the loop."""


@dataclass(frozen=True)
class Request:
    """What `tracerl run` was asked for."""

    job: TraceRLJob
    directory: Path
    resume: bool
    title: str
    """Shown when it starts."""
    resume_command: str
    """What the user types to go on after it stopped."""


def run_directory(job: TraceRLJob, out: Path | None) -> Path:
    """Where a local run goes: `--out`, else a file:// `spec.output.uri`, else ``./runs/<name>``."""
    if out is not None:
        return out.expanduser().absolute()
    uri = job.spec.output.uri
    if uri is None:
        return Path("runs", job.metadata.name).absolute()
    if not uri.startswith("file://"):
        raise InputError(f"spec.output.uri: {uri} is not on this machine; give a directory with --out")
    return Path(uri.removeprefix("file://")).absolute()


def load_local_job(manifest: Path, overrides: Sequence[str]) -> TraceRLJob:
    """Read a manifest that is to start on this machine, now; InputError lists all faults."""
    job = load_job(manifest, overrides, machine=Machine.here())
    require_packages(job.spec)
    return job


def run_local(request: Request, display: Display) -> Ending:
    """Run the job to its end, or until Ctrl-C, SIGTERM or SIGHUP, and say how it ended.

    A run that is complete already is not run again. InputError (nothing was started, or a process refused its
    input) and JobError are raised after everything stopped and was removed; the run can be taken up again.
    """
    directory = request.directory
    refuse(directory, resume=request.resume)
    allow_open_files()
    with StopSignals() as signals, claimed(directory) as lock:
        with disk_errors(directory):
            refuse(directory, resume=request.resume)
            again = not request.resume and RunLayout(directory).job.exists()
            resolved = (resume_run if request.resume else start_run)(request.job, directory)
        before = read_ending(resolved.layout)
        if before is not None and before.state == "Complete":
            display.note(f"{request.title}: complete already")
            return before
        display.note(request.title)
        if again:
            display.note("the run that was here ended before its first step; starting it anew")
        try:
            with disk_errors(directory):
                resolved.layout.result.unlink(missing_ok=True)
                tidy(resolved)
                write_token(resolved.layout)
                remove_dead_rings()
            with RunLog(directory) as log:
                ending = _supervise(request, resolved, log, display, signals, lock=lock)
        except BaseException:
            # Why the run failed is the one sentence to say, and often why nothing can be removed.
            _remove_what_is_left(resolved)
            raise
        problem = _remove_what_is_left(resolved)
        if problem is not None:
            with contextlib.suppress(OSError):  # nobody reads the output any more
                display.note(f"records may be left in {resolved.records_uri} ({problem})")
        return ending


def _remove_what_is_left(resolved: ResolvedJob) -> TransportError | None:
    """Remove what only running processes need, as far as that is possible; give why records are left."""
    with contextlib.suppress(OSError):
        tidy(resolved)
    try:
        remove_objects(resolved)
    except TransportError as error:
        return error
    return None


def _supervise(
    request: Request, resolved: ResolvedJob, log: RunLog, display: Display, signals: StopSignals, *, lock: int
) -> Ending:
    spec, layout = resolved.job.spec, resolved.layout
    follower = Follower(layout, display)
    supervisor = Supervisor(
        processes=process_specs(resolved),
        leader=TRAINER,
        max_restarts=spec.failure_policy.max_restarts,
        deadline_seconds=spec.active_deadline_seconds,
        resume_command=request.resume_command,
        follow=follower.show,
        announce=lambda text: log.event(Reason.RESTARTED, text, step=follower.step),
    )
    try:
        ending = supervisor.run(signals, keep_open=lock)
    except TraceRLError as error:
        reason = error.reason if isinstance(error, JobError) else Reason.INVALID_SPEC
        # A full disk may be why the run failed; the sentence about that is the one to show.
        with contextlib.suppress(OSError):
            write_ending(layout, supervisor.ending("Failed", reason, str(error)))
        raise
    with disk_errors(layout.root):
        write_ending(layout, ending)
    return ending


def process_specs(resolved: ResolvedJob) -> list[ProcessSpec]:
    """Give the processes of a local run in the order in which they are started.

    InputError when the interpreter of a role is named and not there.
    """
    layout, spec = resolved.layout, resolved.job.spec
    gpus = _gpus(resolved, Machine.here().gpu_names)

    def process(name: str, group: str, threads: int, *leaves: Path) -> ProcessSpec:
        role = name.partition("-")[0]
        return ProcessSpec(
            name,
            group,
            module_arguments(f"tracerl.runtime.{role}_main", str(layout.job), name, python=interpreter(role)),
            layout.log(name),
            {**_environment(threads), **gpus.get(name, {})},
            # A server that comes back listens elsewhere: nobody must ask whoever has the old port by then.
            leaves=[layout.endpoints / f"{name}.json", *leaves],
        )

    def store(name: str) -> ProcessSpec:
        # A ring takes its memory from the next one, which may not find room beside it.
        place = resolved.store_place(name)
        return process(name, name, 1, place.socket, place.ring)

    return [
        *(store(endpoint.name) for endpoint in resolved.endpoints.store),
        *(process(e.name, e.name, spec.rollout.threads) for e in resolved.endpoints.rollout),
        *(
            process(e.name, "trainer", spec.trainer.threads, *([layout.meeting] if e.name == TRAINER else []))
            for e in resolved.endpoints.trainer
        ),
    ]


def _gpus(resolved: ResolvedJob, visible: Sequence[str]) -> dict[str, dict[str, str]]:
    """The environment that shows each process its GPUs: rollouts the first ones, then trainers one each.

    Where there are fewer than are asked for, which only the Reference engines may, rollouts share them with
    trainers, never trainers with each other.
    """
    spec, endpoints, taken = resolved.job.spec, resolved.endpoints, 0
    asked = [(endpoint.name, spec.rollout.gpus_per_node) for endpoint in endpoints.rollout]
    asked += [(endpoint.name, min(1, spec.trainer.gpus_per_node)) for endpoint in endpoints.trainer]
    found = {}
    for name, count in asked:
        if count and visible:
            mine = [visible[(taken + index) % len(visible)] for index in range(count)]
            found[name] = {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
            taken += count
    return found


def _environment(threads: int) -> Mapping[str, str]:
    # Huge pages for malloc halve the time of a step of the reference engine on a CPU.
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = f"{tunables}:glibc.malloc.hugetlb=1".lstrip(":")
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # Process groups of one machine listen on nothing that another machine reaches.
    return {
        "GLIBC_TUNABLES": tunables,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **dict.fromkeys(pools, str(threads)),
    }


class Follower:
    """Reads what the processes write into the run log, and shows what is new since it was made."""

    def __init__(self, layout: RunLayout, display: Display) -> None:
        self._display = display
        self._events, self._steps = Tail(layout.events), Tail(layout.metrics)
        self._events.poll()
        self.step = max((int(line.get("step", 0)) for line in self._steps.poll()), default=0)
        """Last step that was shown, or was in the log before."""

    def show(self) -> None:
        """Hand new lines to the display; OSError when it is gone."""
        display = self._display
        for line in (*self._events.poll(), *self._steps.poll()):
            match parsed := parse_line(line):
                case StartRecord() as start:
                    # Steps behind the checkpoint are computed, and shown, again.
                    self.step = start.resumed_from
                case EventRecord() as event if event.reason == Reason.ROLLOUT_RESTARTED:
                    # The supervisor announced that restart already, with why and with its count.
                    continue
                case StepRecord() as record:
                    if record.step <= self.step:
                        continue
                    self.step = record.step
                case _:
                    pass
            show(parsed, display)
