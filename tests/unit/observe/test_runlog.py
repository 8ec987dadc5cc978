"""The run log keeps every whole line, whatever killed its writer, and never shows a step twice."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_runs import START, make_finish, make_start, make_step

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.resolved import RunLayout
from tracerl.observe.run import load_run
from tracerl.observe.runlog import RunLog, Tail, read_lines

STEPS = [make_step(step).model_dump(mode="json") for step in range(1, 5)]


def steps_in(directory: Path) -> list[int]:
    return [record["step"] for record in read_lines(RunLayout(directory).metrics)[0]]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    with RunLog(tmp_path, now=lambda: START) as log:
        log.write(make_start().model_dump(mode="json"))
        for record in STEPS:
            log.write(record)
        log.event("RolloutRestarted", "rollout-0 was started again", step=3)
        log.write(make_finish(step=4).model_dump(mode="json"))
    run = load_run(tmp_path)
    assert run.starts == (make_start(),)
    assert run.steps == tuple(make_step(step) for step in range(1, 5))
    assert run.finish == make_finish(step=4)
    assert [(event.time, event.step, event.reason) for event in run.events] == [
        (START, 3, "RolloutRestarted")
    ]
    assert run.unreadable == 0


def test_a_number_that_is_not_finite_becomes_null_and_the_line_stays_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"type": "step", "step": 1, "a": [float("nan"), {"b": float("inf")}], "c": 0.5})
    (record,), torn = read_lines(RunLayout(tmp_path).metrics)
    assert record["a"] == [None, {"b": None}]
    assert record["c"] == 0.5
    assert torn == 0


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 10**6))
def test_after_a_cut_at_any_byte_whole_lines_are_read_and_later_lines_are_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    path = RunLayout(directory).metrics
    lines = [json.dumps({"type": "step", "step": step}) + "\n" for step in range(1, 4)]
    content = "".join(lines).encode()
    cut %= len(content) + 1
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    torn = not content[:cut].endswith(b"\n") and cut > 0
    # The line end alone may be what is missing: then the line counts as torn until one follows.
    complete_but_for_its_end = torn and content[cut : cut + 1] == b"\n"
    assert read_lines(path) == ([{"type": "step", "step": step} for step in range(1, whole + 1)], int(torn))
    with RunLog(directory) as log:
        log.write({"type": "step", "step": 9})
    expected = [*range(1, whole + 1 + complete_but_for_its_end), 9]
    assert steps_in(directory) == expected
    assert read_lines(path)[1] == int(torn and not complete_but_for_its_end)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(make_start().model_dump(mode="json"))
        for record in STEPS:
            log.write(record)
    with RunLayout(tmp_path).metrics.open("ab") as file:
        file.write(b'{"type":"step","st')
    with RunLog(tmp_path) as log:
        log.write(make_start(resumed_from=2).model_dump(mode="json"))
        assert steps_in(tmp_path) == [1, 2]
        again = make_step(3, seed=2).model_dump(mode="json")
        log.write(again)
        log.sync()
    run = load_run(tmp_path)
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert run.steps[-1] == make_step(3, seed=2)
    assert [start.resumed_from for start in run.starts] == [0, 2]
    assert run.unreadable == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_a_run_that_starts_over_begins_with_an_empty_log(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLog(tmp_path) as log:
            log.write(make_start().model_dump(mode="json"))
            log.write(STEPS[0])
    assert steps_in(tmp_path) == [1]


def test_two_writers_of_events_do_not_mix_their_lines(tmp_path: Path) -> None:
    def write(reason: str) -> None:
        with RunLog(tmp_path) as log:
            for step in range(200):
                log.event(reason, "x" * 300, step=step)

    writers = [threading.Thread(target=write, args=(reason,)) for reason in ("A", "B")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = load_run(tmp_path).events
    for reason in ("A", "B"):
        assert [event.step for event in events if event.reason == reason] == list(range(200))


class TestTail:
    def test_gives_each_line_once_and_waits_for_its_end(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        tail = Tail(path)
        assert tail.poll() == []
        with path.open("wb", buffering=0) as file:
            file.write(b'{"step":1}\n{"ste')
            assert tail.poll() == [{"step": 1}]
            assert tail.poll() == []
            file.write(b'p":2}\n')
            assert tail.poll() == [{"step": 2}]
        tail.close()

    def test_reads_a_replaced_file_from_its_start(self, tmp_path: Path) -> None:
        tail = Tail(RunLayout(tmp_path).metrics)
        with RunLog(tmp_path) as log:
            for record in STEPS:
                log.write(record)
            assert [record["step"] for record in tail.poll()] == [1, 2, 3, 4]
            log.write(make_start(resumed_from=1).model_dump(mode="json"))
            log.write(STEPS[1])
            assert [record["step"] for record in tail.poll()] == [1, 2]
        tail.close()

    @pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b"nonsense", b'{"a":', b"17"])
    def test_counts_what_is_not_an_object(self, tmp_path: Path, line: bytes) -> None:
        path = tmp_path / "log"
        path.write_bytes(line + b"\n\n" + b'{"a":1}\n')
        assert read_lines(path) == ([{"a": 1}], 1)


def test_a_full_disk_is_one_sentence_that_names_the_file_and_the_way_on(tmp_path: Path) -> None:
    RunLayout(tmp_path).metrics.symlink_to("/dev/full")
    with RunLog(tmp_path) as log, pytest.raises(JobError) as failure:
        log.write(STEPS[0])
    assert failure.value.reason == Reason.RUN_LOG_FAILED
    assert str(failure.value) == (
        f"{tmp_path / 'metrics.jsonl'} cannot be written because the disk is full; free space there and "
        "resume the run, it continues from its last checkpoint"
    )


def test_a_run_directory_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(JobError, match=r"run cannot be written \(File exists\); give another run directory"):
        RunLog(tmp_path / "run")
