"""Keep the processes of a run alive within its restart budget, until the leader is done or has to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError
from tracerl.observe.run import Ending
from tracerl.runtime.processes import Children, Ended, ProcessSpec, StopSignals
from tracerl.runtime.rundir import disk_errors

State = Literal["Complete", "Failed", "Stopped"]

GRACE_SECONDS = 5.0
"""What a process may take to remove its endpoint and close its files after SIGTERM."""
_POLL_SECONDS = 0.1


@dataclass
class Supervisor:
    """Supervises one run.

    The run is complete when `leader` ends with exit code 0, which the rest of its group may do before. A
    process that a signal killed is started again together with its group, at most `max_restarts` times a
    group; an exit code other than 0 fails the run, since it would come back.
    """

    processes: Sequence[ProcessSpec]
    """Started in this order."""
    leader: str
    max_restarts: int
    deadline_seconds: int | None
    resume_command: str
    """What the user types to take up the run again."""
    follow: Callable[[], None]
    """Called a few times a second, to show what is new; OSError when nobody reads it any more."""
    announce: Callable[[str], None]
    """Called with a sentence about a restart."""
    restarts: dict[str, int] = field(default_factory=dict)

    def run(self, signals: StopSignals, *, keep_open: int | None = None) -> Ending:
        """Run to the end; no process is left when it returns or raises.

        InputError when a process refused its input, JobError when the run failed. `keep_open` is a descriptor
        that every process inherits.
        """
        deadline = time.monotonic() + (self.deadline_seconds or float("inf"))
        with Children(grace_seconds=GRACE_SECONDS, hurry=signals.hurry, keep_open=keep_open) as children:
            for process in self.processes:
                self._start(children, process)
            while not signals.stop.wait(_POLL_SECONDS):
                if not self._following():
                    return self._stopped("nobody reads its output")
                ended = children.ended()
                if any(one.name == self.leader and one.status == 0 for one in ended):
                    self._following()
                    return self.ending("Complete", Reason.COMPLETED, "all steps are done")
                for group in dict.fromkeys(process.group for process in self.processes):
                    self._look_after(children, group, ended)
                if time.monotonic() > deadline:
                    raise JobError(
                        Reason.DEADLINE_EXCEEDED,
                        f"the job ran longer than spec.activeDeadlineSeconds ({self.deadline_seconds} s); "
                        f"raise it and continue with {self.resume_command}",
                    )
        return self._stopped(signals.why)

    def ending(self, state: State, reason: str, message: str) -> Ending:
        """How the run ended, with its restarts."""
        return Ending(state=state, reason=reason, message=message, restarts=dict(self.restarts))

    def _start(self, children: Children, process: ProcessSpec) -> None:
        with disk_errors(process.log.parent):
            children.start(process)

    def _following(self) -> bool:
        try:
            self.follow()
        except OSError:
            return False
        return True

    def _look_after(self, children: Children, group: str, ended: Sequence[Ended]) -> None:
        """Start a group again when one of its processes ended and may come back; raise when it may not."""
        processes = [process for process in self.processes if process.group == group]
        names = [process.name for process in processes]
        lost = [one for one in ended if one.name in names and (one.status or self.leader not in names)]
        if not lost:
            return
        # Whoever missed another one ended because of that: what counts is why the other one did.
        for one in [*lost, *children.stop(names)]:
            self._raise_if_final(one)
        count = sum(self.restarts.get(name, 0) for name in names)
        first = next((one for one in lost if one.killed), lost[0])
        if count >= self.max_restarts:
            log = processes[names.index(first.name)].log
            raise JobError(
                Reason.RESTARTS_EXHAUSTED,
                f"{first}, {count} restarts were made and failurePolicy.maxRestarts is "
                f"{self.max_restarts}; see {log}, then continue with {self.resume_command}",
            )
        self.restarts[first.name] = self.restarts.get(first.name, 0) + 1
        what = "it" if len(names) == 1 else f"all {len(names)} {group}s"
        self.announce(f"{first}; starting {what} again ({count + 1} of {self.max_restarts})")
        for process in processes:
            self._start(children, process)

    def _raise_if_final(self, ended: Ended) -> None:
        """Raise what a process explained, or did not explain, unless that may pass."""
        note = ended.note
        log = next(process.log for process in self.processes if process.name == ended.name)
        if note is None:
            if ended.status > 0:
                raise JobError(Reason.UNEXPECTED, f"{ended} and no explanation; see {log}")
        elif note.reason == Reason.UNEXPECTED:
            raise JobError(note.reason, f"{note.message}; see {log}")
        elif ended.status == 2:
            raise InputError(note.message)
        elif note.reason != Reason.TRAINER_LOST:
            raise JobError(note.reason, note.message)

    def _stopped(self, why: str) -> Ending:
        message = f"stopped ({why}); to go on: {self.resume_command}"
        return self.ending("Stopped", Reason.INTERRUPTED, message)
