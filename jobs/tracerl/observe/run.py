"""Load a run directory, also one of a run that failed, was killed, or has not finished its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tracerl.api.errors import InputError
from tracerl.api.job import TraceRLJob
from tracerl.api.resolved import RunLayout, read_yaml
from tracerl.observe.runlog import Progress, read_lines
from tracerl.rl.steprecord import EventRecord, FinishRecord, StartRecord, StepRecord

Line = StartRecord | StepRecord | EventRecord | FinishRecord | Progress
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


class Ending(BaseModel):
    """How the processes of the run ended, as `tracerl run` wrote it in `result.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Literal["Complete", "Failed", "Stopped"]
    reason: str
    message: str
    restarts: dict[str, int] = {}


@dataclass(frozen=True)
class Run:
    """What a run directory holds.

    `document` is `job.yaml` as it stands, `job` the same as a model or None when it is not one. `steps` has
    each step once, in order. `finish` is the loop's own end, `ending` the end of all processes; None where
    it did not come. `unreadable` counts lines of the two logs that are torn or of another version.
    """

    directory: Path
    document: dict[str, Any]
    job: TraceRLJob | None
    starts: tuple[StartRecord, ...]
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    finish: FinishRecord | None
    ending: Ending | None
    unreadable: int

    @property
    def path(self) -> str:
        """The directory as text."""
        return _readable(str(self.directory))

    @cached_property
    def name(self) -> str:
        """The job's name, or the directory's when there is no job document."""
        return self.job.metadata.name if self.job else _readable(self.directory.resolve().name)

    @cached_property
    def method(self) -> str:
        """The method by the job, else by the log; empty when neither says."""
        if self.job:
            return self.job.spec.method.name.value
        return self.steps[-1].method if self.steps else self.starts[-1].method if self.starts else ""


def _readable(name: str) -> str:
    # A file name need not be UTF-8, but what is written about it must be.
    return name.encode("utf-8", "replace").decode()


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its directory's, or the whole path where two have the same."""
    names = [_readable(run.directory.resolve().name) for run in runs]
    if len(set(names)) < len(names):
        return [run.path for run in runs]
    return names


def parse_line(line: dict[str, Any]) -> Line | None:
    """One line of either log as a record, or None when it is of another version."""
    try:
        return _LINE.validate_python(line, strict=False)
    except ValidationError:
        return None


def load_run(directory: Path) -> Run:
    """Read a run directory. InputError when nothing in it is of a run."""
    layout = RunLayout(directory)
    document = _document(layout.job)
    step_lines, torn_steps = _lines(layout.metrics)
    event_lines, torn_events = _lines(layout.events)
    if not (document or step_lines or event_lines):
        raise InputError(
            f"{directory} is not a run directory (no {layout.job.name}, {layout.metrics.name} or "
            f"{layout.events.name}); give the directory that tracerl run named or was given with --out"
        )
    parsed = [parse_line(line) for line in (*step_lines, *event_lines)]
    # The last line of a step counts, should a log hold one twice.
    steps = {record.step: record for record in parsed if isinstance(record, StepRecord)}
    finishes = [record for record in parsed if isinstance(record, FinishRecord)]
    starts = tuple(record for record in parsed if isinstance(record, StartRecord))
    # A run that was started again after its end has not ended.
    ended = bool(finishes) and (not starts or finishes[-1].time >= starts[-1].time)
    return Run(
        directory=directory,
        document=document,
        job=_job(document),
        starts=starts,
        steps=tuple(steps[step] for step in sorted(steps)),
        events=tuple(record for record in parsed if isinstance(record, EventRecord)),
        finish=finishes[-1] if ended else None,
        ending=_ending(layout.result),
        unreadable=torn_steps + torn_events + sum(record is None for record in parsed),
    )


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    try:
        return read_lines(path)
    except NotADirectoryError:
        raise InputError(f"{path.parent} is not a directory; give a run directory") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); restore it or give another run"
        ) from None


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_yaml(path)
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        raise InputError(f"{path.parent} is not a directory; give a run directory") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        detail = str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read ({detail}); restore it or give another run") from None
    return document if isinstance(document, dict) else {}


def _job(document: dict[str, Any]) -> TraceRLJob | None:
    try:
        return TraceRLJob.model_validate(document.get("job", document))
    except ValidationError:
        return None


def _ending(path: Path) -> Ending | None:
    try:
        return Ending.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
