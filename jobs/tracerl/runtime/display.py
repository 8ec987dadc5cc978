"""What `tracerl run` shows meanwhile: progress bars on a terminal, one line a step elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from tracerl.observe.run import Line
from tracerl.observe.runlog import Progress
from tracerl.rl.steprecord import EventRecord, StartRecord, StepRecord


class Display(Protocol):
    """Where progress goes. Calls raise OSError when the terminal or the reader of a pipe is gone."""

    def note(self, text: str) -> None:
        """Say something that happened, such as a restart."""

    def progress(self, stage: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show how far something before the first step has come, such as the warm-up."""

    def step(self, record: StepRecord) -> None:
        """Show a step that ended."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Quiet:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def progress(self, stage: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show nothing."""

    def step(self, record: StepRecord) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to leave."""


class Lines:
    """One line a step and one for every tenth of what comes before, for logs and pipes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._tenths: dict[str, int] = {}

    def note(self, text: str) -> None:
        """Say the text."""
        self._say(text)

    def progress(self, stage: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Print a line when another tenth is done."""
        tenth = 10 * done // max(total, 1)
        if tenth != self._tenths.get(stage):
            self._tenths[stage] = tenth
            self.note(f"{stage} {done}/{total}{_values(values)}")

    def step(self, record: StepRecord) -> None:
        """Print the step's figures."""
        self.note(f"step {record.step}/{record.steps}  {figures(record)}")

    def close(self) -> None:
        """Nothing to leave."""


class Bars:
    """Progress bars with the figures of the last step."""

    def __init__(self) -> None:
        self._progress = RichProgress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            # The bar gets what the figures leave of the width.
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
            refresh_per_second=4,
            expand=True,
        )
        self._bars: dict[str, TaskID] = {}
        self._starting = self._progress.add_task("starting", total=None, count="", figures="")
        self._progress.start()

    def note(self, text: str) -> None:
        """Print the text above the bars."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, stage: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Move the stage's bar."""
        self._move(stage, done, total, _values(values).strip())

    def step(self, record: StepRecord) -> None:
        """Move the bar of the steps."""
        self._move("steps", record.step, record.steps, figures(record))

    def close(self) -> None:
        """Stop drawing; the bars stay as they are."""
        # The terminal may be what has gone away.
        with contextlib.suppress(OSError):
            self._progress.stop()

    def _move(self, name: str, done: int, total: int, text: str) -> None:
        if name not in self._bars:
            self._progress.update(self._starting, visible=False)
            self._bars[name] = self._progress.add_task(name, total=total, count="", figures="")
        count = f"{done}/{total}"
        self._progress.update(self._bars[name], completed=done, total=total, count=count, figures=text)


def display_for(*, quiet: bool) -> Display:
    """Choose by what stdout is."""
    if quiet:
        return Quiet()
    return Bars() if sys.stdout.isatty() else Lines(partial(print, flush=True))


def show(line: Line | None, display: Display) -> None:
    """Show a line of the run log; None is not one."""
    match line:
        case StartRecord() as start:
            display.note(_started(start))
        case Progress() as progress:
            display.progress(progress.stage, progress.done, progress.total, progress.values)
        case EventRecord() as event:
            display.note(event.message)
        case StepRecord() as step:
            display.step(step)
        case _:
            pass


def _started(start: StartRecord) -> str:
    begin = f"continues after step {start.resumed_from}" if start.resumed_from else "starts"
    reward = "" if start.held_out_reward is None else f", held-out reward {start.held_out_reward:.3f}"
    return f"{start.method} {begin}: {start.parameters / 1e6:.2f} M parameters{reward}"


def figures(record: StepRecord) -> str:
    """Reward, gap in nats, generated tokens a second and seconds of a step, as text."""
    return (
        f"reward {record.reward.mean:.3f}  gap {record.gap_guided.mean:.4f}  "
        f"{record.tokens_per_second:,.0f} tok/s  {record.seconds.total:.2f} s"
    )


def _values(values: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.3g}" for name, value in values.items())
