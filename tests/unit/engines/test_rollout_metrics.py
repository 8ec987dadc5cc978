"""What a scrape of a rollout shows of its sink, also while the sink cannot answer."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tracerl.api.constants import METRICS, Role
from tracerl.engines.metrics import sink_state, sink_values
from tracerl.engines.sglang.server import _values as sglang_values
from tracerl.transport.base import TransportError, Usage
from tracerl.transport.exposition import Values, exposition

ROLLOUT = {spec.name: spec for spec in METRICS if spec.source is Role.ROLLOUT}
Shown = dict[str, dict[tuple[str, ...], float]]


def shown(values: Values) -> Shown:
    rest: Values = {name: {} for name in ROLLOUT if name not in values}
    text = exposition(Role.ROLLOUT, {**rest, **values}).decode()
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: {
            tuple(sample.labels.values()): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def increase(scrapes: Iterable[float | None]) -> float:
    """What Prometheus' `increase` adds up, without its extrapolation: a fall is a start from 0."""
    total, before = 0.0, None
    for value in scrapes:
        if value is None:
            continue
        if before is not None:
            total += value - before if value >= before else value
        before = value
    return total


class Writer:
    """The part of a frame writer that a scrape asks, with the answers of a store that comes and goes."""

    def __init__(self, answers: Iterable[Usage | TransportError | None]) -> None:
        self._answers = iter(answers)

    def usage(self) -> Usage | None:
        answer = next(self._answers)
        if isinstance(answer, TransportError):
            raise answer
        return answer


def test_a_sink_that_cannot_say_has_no_samples_and_nothing_counts_twice() -> None:
    """With 0 in the gap, Prometheus would take it for a start and count all 70 lost frames again."""
    gone = TransportError("failed", "the store is gone")
    known = [Usage(0, 0, 0, 9, counters={"lost_frames": lost, "uploads_ok": 2 * lost}) for lost in (50, 70)]
    writer: Any = Writer([None, known[0], gone, known[1]])
    scrapes = [shown(sink_values(sink_state(writer), {"full": 3})) for _ in range(4)]
    lost = [scrape["tracerl_records_dropped_total"].get(("lost",)) for scrape in scrapes]
    assert lost == [0.0, 50.0, None, 70.0]
    assert increase(lost) == 70.0
    assert [scrape["tracerl_object_uploads_total"].get(("ok",)) for scrape in scrapes] == [0, 100, None, 140]
    assert [scrape["tracerl_records_held_bytes"].get(()) for scrape in scrapes] == [0, 9, None, 9]


def test_requests_to_the_object_store_are_counted_by_operation() -> None:
    counters = {"read_ok": 4, "write_ok": 3, "write_failed": 1}
    found = shown(sink_values((0, counters), {}))
    requests = found["tracerl_object_requests_total"]
    assert {labels: value for labels, value in requests.items() if value} == {
        ("read", "ok"): 4.0,
        ("write", "ok"): 3.0,
        ("write", "failed"): 1.0,
    }
    assert len(requests) == 8


def test_the_time_of_requests_is_a_histogram_by_operation() -> None:
    """Three writes, of 4, 5 and 300 ms: two took no longer than 5 ms, all no longer than half a second."""
    counters = {"write_within_0.005": 2, "write_within_0.5": 1, "write_nanoseconds": 309_000_000}
    values: Values = {name: {} for name in ROLLOUT} | sink_values((0, counters), {})
    family = next(
        family
        for family in text_string_to_metric_families(exposition(Role.ROLLOUT, values).decode())
        if family.name == "tracerl_object_request_duration_seconds"
    )
    assert family.type == "histogram"
    found = {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
        for sample in family.samples
        if sample.labels["operation"] == "write"
    }
    assert found == {
        **dict.fromkeys(("0.005", "0.01", "0.025", "0.05", "0.1", "0.25"), 2.0),
        **dict.fromkeys(("0.5", "1.0", "2.5", "5.0", "10.0", "+Inf"), 3.0),
        "count": 3.0,
        "sum": 0.309,
    }
    assert {sample.labels["operation"] for sample in family.samples} == {"read", "write", "delete", "list"}


def test_counters_have_all_listed_values_from_the_start() -> None:
    found = shown({"tracerl_records_dropped_total": {"full": 2}})
    reasons = ROLLOUT["tracerl_records_dropped_total"].values[0]
    assert found["tracerl_records_dropped_total"] == {(r,): 2.0 if r == "full" else 0.0 for r in reasons}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tracerl_records_dropped_total": {("full", "x"): 1}}, "has labels"),
        ({"tracerl_generated_tokens_total": {"x": 1}}, "has labels"),
        ({"tracerl_step": {"": 1}}, "no metric of a rollout"),
    ],
)
def test_values_that_are_not_of_the_list_are_refused(change: Values, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shown(change)


def test_a_metric_that_an_exporter_forgot_is_an_error() -> None:
    with pytest.raises(KeyError):
        exposition(Role.ROLLOUT, {})


def test_sglangs_schedulers_are_summed_and_without_an_answer_not_known() -> None:
    """What each rank counts for itself is added; what those of one unit count alike is taken once."""
    server: Any = SimpleNamespace(generated_tokens=90, running=2, queued=0, version=4)

    def rank(uploads: int, part: int) -> dict[str, Any]:
        return {
            "part": part,
            "sink": [512, {"uploads_ok": uploads, "lost_frames": 1}],
            "dropped": {"full": 2},
            "written": {"record": 100},
            "kv_tokens": 7,
            "retracted": {"memory": 3},
            "reprefilled_rows": {"weights": 5},
            "stalls": 1,
        }

    found = shown(sglang_values(server, [rank(4, 0), rank(6, 1)]))
    assert found["tracerl_object_uploads_total"] == {("ok",): 10.0, ("failed",): 0.0}
    assert found["tracerl_records_dropped_total"]["full",] == 4.0
    assert found["tracerl_records_dropped_total"]["lost",] == 2.0
    assert found["tracerl_records_written_bytes_total"] == {("record",): 200.0, ("audit",): 0.0}
    assert found["tracerl_records_held_bytes"] == {(): 512.0}
    assert found["tracerl_rollout_retracted_total"] == {("memory",): 3.0, ("weights",): 0.0}
    assert found["tracerl_rollout_admission_stalls_total"] == {(): 1.0}
    units = shown(sglang_values(server, [rank(1, part) for part in (0, 1, 0, 1)]))
    assert units["tracerl_object_uploads_total"]["ok",] == 4.0
    assert units["tracerl_rollout_kv_cache_tokens"] == {(): 14.0}
    assert units["tracerl_rollout_retracted_total"]["memory",] == 6.0
    assert units["tracerl_rollout_reprefilled_rows_total"]["weights",] == 10.0
    assert units["tracerl_rollout_admission_stalls_total"] == {(): 2.0}

    silent = shown(sglang_values(server, []))
    known = {name for name, samples in silent.items() if samples}
    assert known == {
        *("tracerl_generated_tokens_total", "tracerl_rollout_running_requests"),
        *("tracerl_rollout_queued_requests", "tracerl_rollout_weight_version"),
    }
    # One rank whose sink cannot say: their sum is not known either.
    half = shown(sglang_values(server, [rank(4, 0), {**rank(6, 1), "sink": None}]))
    assert half["tracerl_object_uploads_total"] == half["tracerl_records_dropped_total"] == {}
    assert half["tracerl_records_written_bytes_total"]["record",] == 200.0
