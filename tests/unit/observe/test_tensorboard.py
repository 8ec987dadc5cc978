"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_runs import job_of, make_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tracerl.observe.metrics import StepExporter
from tracerl.observe.tensorboard import EventFiles


def write(directory: Path, steps: range, resumed_from: int = 0, **changes: Any) -> None:
    """What a trainer process writes that does these steps."""
    exporter = StepExporter(job_of())
    files = EventFiles(directory, exporter)
    files.started(resumed_from)
    for number in steps:
        record = make_step(number, **changes)
        exporter.observe(record)
        files.step(record)
    files.close()


def read(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(directory: Path, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in read(directory).Scalars(tag)}


def test_every_metric_that_a_scrape_shows_is_there_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    exporter = StepExporter(job_of())
    for number in range(1, 4):
        exporter.observe(make_step(number))
    shown = {}
    for family in exporter.collect():
        for sample in family.samples:
            labels = "/".join(f"{name}={value}" for name, value in sample.labels.items())
            shown[f"{sample.name}/{labels}".removesuffix("/")] = sample.value
    assert set(read(tmp_path).Tags()["scalars"]) == set(shown)
    for tag, value in shown.items():
        assert scalars(tmp_path, tag)[3] == pytest.approx(value, rel=1e-6), tag
    rewards = {number: make_step(number).reward.mean for number in range(1, 4)}
    assert scalars(tmp_path, "tracerl_reward_mean") == pytest.approx(rewards, rel=1e-6)
    assert [event.wall_time for event in read(tmp_path).Scalars("tracerl_step")] == [
        make_step(number).time for number in range(1, 4)
    ]


def test_a_step_can_be_seen_at_once(tmp_path: Path) -> None:
    exporter = StepExporter(job_of())
    files = EventFiles(tmp_path, exporter)
    exporter.observe(make_step(1))
    files.step(make_step(1))
    assert scalars(tmp_path, "tracerl_step") == {1: 1.0}
    files.close()


def test_steps_that_are_computed_again_replace_those_of_before(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), seed=1)
    first = next(tmp_path.iterdir())
    # TensorBoard reads files in the order of the second they were made in, which is in their names.
    first.rename(first.with_name(first.name.replace("tfevents.", "tfevents.0")))
    write(tmp_path, range(4, 7), resumed_from=3, seed=2)
    rewards = {number: make_step(number, seed=1 if number < 4 else 2).reward.mean for number in range(1, 7)}
    assert scalars(tmp_path, "tracerl_reward_mean") == pytest.approx(rewards, rel=1e-6)


def test_it_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tensorboard.summary.writer.event_file_writer import EventFileWriter\n"
        f"EventFileWriter({str(tmp_path)!r}).close()\n"
        "print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_where_the_package_is_missing_a_sentence_says_so() -> None:
    code = "import sys\nsys.modules['tensorboard'] = None\nimport tracerl.observe.tensorboard\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "JobError: spec.observe.tensorboard needs the package tensorboard" in done.stderr
    assert (
        "pip install '.[tensorboard]'), on a cluster name an image that has it, or leave the field out"
        in done.stderr
    )
