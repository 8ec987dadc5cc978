"""The trainer's metrics as TensorBoard event files, beside the run log.

Tags are the metrics' own names with their labels, as in ``tracerl_step_part_seconds/part=optimizer``, and
values those that a scrape after the step shows. Needs the package tensorboard, neither torch nor TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError, how_to_install
from tracerl.observe.metrics import StepExporter
from tracerl.rl.steprecord import StepRecord

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError:
    raise JobError(
        Reason.CONFIGURATION,
        "spec.observe.tensorboard needs the package tensorboard, which the trainer's environment does not "
        f"have; {how_to_install('tensorboard')}, on a cluster name an "
        "image that has it, or leave the field out",
    ) from None


class EventFiles:
    """Writes one event a step into a new file of `directory`.

    After a resume the steps behind the checkpoint are computed again: TensorBoard is told to forget them.
    """

    def __init__(self, directory: Path, exporter: StepExporter) -> None:
        """Write what `exporter` shows, which observes each step before it is written here."""
        self._exporter = exporter
        self._writer = EventFileWriter(str(directory))

    def started(self, resumed_from: int) -> None:
        """Begin, or go on from a checkpoint."""
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(session_log=session, wall_time=time.time(), step=resumed_from + 1))

    def step(self, record: StepRecord) -> None:
        """Write the metrics of a step, so that a reader sees them at once. JobError when that fails."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in self._values()])
        try:
            self._writer.add_event(Event(summary=summary, wall_time=record.time, step=record.step))
            self._writer.flush()
        except OSError as error:
            raise JobError(
                Reason.RUN_LOG_FAILED,
                f"TensorBoard's event file cannot be written ({error.strerror}); make room there and resume",
            ) from error

    def _values(self) -> Iterator[tuple[str, float]]:
        for family in self._exporter.collect():
            for sample in family.samples:
                labels = "/".join(f"{name}={value}" for name, value in sample.labels.items())
                yield (f"{sample.name}/{labels}" if labels else sample.name), sample.value

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._writer.close()
