"""What the trainer exposes is what METRICS says, no less and no more."""

from __future__ import annotations

import http.client
import threading

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sample_runs import job_of, make_start, make_step

from tracerl.api.constants import METRICS, OPEN_LABELS, Role
from tracerl.api.job import RatioFrom
from tracerl.observe.metrics import MetricsServer, StepExporter
from tracerl.rl.ratio import importance, rollout_corr
from tracerl.rl.steprecord import Baseline, BaselineOverhead, Records, Staleness, StepRecord

TRAINER = {spec.name: spec for spec in METRICS if spec.source is Role.TRAINER}


BASELINE = Baseline(
    recorded_seconds=2.1,
    bare_seconds=2.0,
    step_seconds=2.2,
    bare_first=True,
    so_far=BaselineOverhead(ratio=0.05, low=0.03, high=0.07, pairs=6),
)


def measured_corr() -> dict[str, float]:
    """All of the ratio's own metrics, computed by the ratio."""
    rollout = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]])
    mask = torch.ones_like(rollout, dtype=torch.bool)
    lag = torch.zeros_like(rollout, dtype=torch.int64)
    weights = importance(rollout, rollout + 0.1, None, lag, mask, ratio_from=RatioFrom.GUIDED, upper=5.0)
    return rollout_corr(rollout, weights, mask, upper=5.0)


def scrape(exporter: StepExporter) -> dict[str, tuple[str, list[tuple[dict[str, str], float]]]]:
    registry = CollectorRegistry()
    registry.register(exporter)
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            _, samples = found.setdefault(sample.name, (family.type, []))
            samples.append((dict(sample.labels), sample.value))
    return found


def test_every_trainer_metric_is_exported_with_its_type_and_labels_and_nothing_else() -> None:
    exporter = StepExporter(job_of())
    exporter.observe(make_step(10, rollout_corr=measured_corr(), baseline=BASELINE))
    exporter.observe(make_step(12, rollout_corr=measured_corr()))
    found = scrape(exporter)
    assert set(found) == set(TRAINER)
    bounds = {labels["bound"]: value for labels, value in found["tracerl_baseline_overhead_ratio"][1]}
    assert bounds == {"estimate": 0.05, "low": 0.03, "high": 0.07}
    for name, (kind, samples) in found.items():
        assert kind == TRAINER[name].type
        assert all(set(labels) == set(TRAINER[name].labels) for labels, _ in samples)


def test_the_ratio_measures_exactly_what_the_list_has() -> None:
    listed = {name for name in TRAINER if name.startswith("tracerl_rollout_corr_")}
    assert listed == {f"tracerl_rollout_corr_{key}" for key in measured_corr()}


def test_before_the_first_step_counters_are_zero_and_what_a_step_shows_is_not_there() -> None:
    found = scrape(StepExporter(job_of("QAT")))
    counters = {spec.name: spec for spec in TRAINER.values() if spec.type == "counter"}
    assert set(found) == {"tracerl_info", "tracerl_staleness_limit_versions", *counters}
    for name, spec in counters.items():
        labels = {tuple(labels.values()) for labels, value in found[name][1] if value == 0.0}
        assert labels == set(spec.listed())


def test_restarts_are_counted_from_the_start_of_this_process() -> None:
    """A checkpoint brings those of earlier processes; shown again, they would count twice in Prometheus."""
    exporter = StepExporter(job_of())
    exporter.start(make_start(resumed_from=10).model_copy(update={"restarts": 3}))
    exporter.observe(make_step(11, restarts=3))
    assert scrape(exporter)["tracerl_restarts_total"][1] == [({"restarted": "rollout"}, 0.0)]
    exporter.observe(make_step(12, restarts=5))
    assert scrape(exporter)["tracerl_restarts_total"][1] == [({"restarted": "rollout"}, 2.0)]


@pytest.mark.parametrize("step", [make_step(10), make_step(3, "BF16"), make_step(4, "QAT")])
def test_every_label_value_is_one_that_is_listed_or_bounded(step: StepRecord) -> None:
    exporter = StepExporter(job_of(step.method))
    exporter.observe(step)
    for name, (_, samples) in scrape(exporter).items():
        spec = TRAINER[name]
        assert len(samples) <= spec.most_series
        for label, values in zip(spec.labels, spec.values, strict=True):
            shown = {labels[label] for labels, _ in samples}
            assert shown <= set(values) if values else len(shown) <= OPEN_LABELS[label].most


def test_the_parts_of_the_overhead_are_its_sum() -> None:
    exporter, steps = StepExporter(job_of()), [make_step(10), make_step(11)]
    for step in steps:
        exporter.observe(step)
    found = {
        name: {tuple(k.values()): v for k, v in samples} for name, (_, samples) in scrape(exporter).items()
    }
    whole = found["tracerl_step_overhead_ratio"][()]
    assert whole == pytest.approx(sum(found["tracerl_step_overhead_part_ratio"].values()))
    seconds = sum(found["tracerl_step_overhead_seconds_total"].values())
    path = found["tracerl_step_critical_path_seconds_total"][()]
    ours = sum(s.overhead.records + s.overhead.guided_kernels + s.overhead.extra_forward for s in steps)
    assert (seconds, path) == pytest.approx((ours, sum(s.overhead.critical_path for s in steps)))


def test_a_step_without_guidance_records_or_evaluation_has_no_made_up_values() -> None:
    exporter = StepExporter(job_of("BF16"))
    exporter.observe(make_step(1, "BF16"))
    found = scrape(exporter)
    assert "tracerl_evaluation_reward_mean" not in found
    assert "tracerl_code_mismatch_ratio" not in found
    assert "tracerl_records_bytes_per_token" not in found
    forwards = {labels["forward"] for labels, _ in found["tracerl_train_rollout_logprob_abs_diff"][1]}
    assert forwards == {"guided"}


def test_counters_add_up_over_steps_and_gauges_show_the_last() -> None:
    exporter = StepExporter(job_of())

    def records(missing: dict[str, int]) -> Records:
        return Records(
            bytes=1000,
            audit_bytes=10,
            rows=50,
            rows_missing=sum(missing.values()),
            missing_by_reason=missing,
            bytes_per_token=20.0,
            frames=5,
        )

    lag = Staleness(trajectories={0: 1, 2: 3}, tokens={0: 10, 1: 30}, groups_dropped=2)
    exporter.observe(make_step(10, records=records({"missing": 2}), staleness=lag))
    exporter.observe(make_step(11, records=records({"missing": 1, "checksum": 4}), staleness=lag))
    found = {name: samples for name, (_, samples) in scrape(exporter).items()}
    assert found["tracerl_step"] == [({}, 11.0)]
    assert found["tracerl_records_bytes_total"] == [({"kind": "record"}, 2000.0), ({"kind": "audit"}, 20.0)]
    missing = {labels["reason"]: value for labels, value in found["tracerl_records_missing_total"]}
    assert missing == {"missing": 3.0, "checksum": 4.0, "version": 0.0, "site_table": 0.0, "shape": 0.0}
    assert found["tracerl_groups_dropped_total"] == [({}, 4.0)]
    assert found["tracerl_staleness_versions"] == [({"stat": "mean"}, 1.5), ({"stat": "max"}, 2.0)]
    assert found["tracerl_record_version_lag"] == [({"stat": "mean"}, 0.75), ({"stat": "max"}, 1.0)]
    # The last evaluation stays until there is another.
    assert found["tracerl_evaluation_reward_mean"] == [({}, pytest.approx(0.61))]


def asked(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def test_the_server_answers_metrics_and_health_and_nothing_else() -> None:
    exporter = StepExporter(job_of())
    exporter.observe(make_step(1))
    with MetricsServer(exporter) as server:
        answers = {path: asked(server.port, path) for path in ("/metrics", "/health", "/else")}
    assert answers["/health"] == (200, b"ok\n")
    assert answers["/else"][0] == 404
    assert answers["/metrics"][0] == 200
    assert b"\ntracerl_step 1.0\n" in answers["/metrics"][1]


def test_with_a_token_metrics_are_for_who_shows_it() -> None:
    with MetricsServer(StepExporter(job_of()), host=None, token="right") as server:
        for given, status in ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"X": "right"}, 401):
            assert asked(server.port, "/metrics", **given)[0] == status
        assert b"tracerl_info" in asked(server.port, "/metrics", Authorization="Bearer right")[1]
        assert asked(server.port, "/health") == (200, b"ok\n")


def test_a_port_that_is_taken_is_an_error_and_leaves_no_thread() -> None:
    exporter = StepExporter(job_of())
    with MetricsServer(exporter) as server:
        before = threading.active_count()
        with pytest.raises(OSError, match="in use"):
            MetricsServer(exporter, port=server.port)
        assert threading.active_count() == before
