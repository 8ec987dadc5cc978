"""Handles, names of metrics and reasons, and the reference pages that are made of them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracerl.api.constants import METRICS, OPEN_LABELS, ConditionType, Reason
from tracerl.api.docs import PAGES
from tracerl.api.frames import HandleError, format_handle, parse_handle

ROOT = Path(__file__).parents[3]
_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


def test_handle() -> None:
    handle = format_handle("rollout-0", "traj 1/part-0", 4096, 0xAB)
    assert handle == "rec://rollout-0/traj%201/part-0?len=4096&xxh3=00000000000000ab"
    assert parse_handle(handle) == ("rollout-0", "traj 1/part-0", 4096, 0xAB)


@given(_text, _text, st.integers(0, 2**62), st.integers(0, 2**64 - 1))
def test_handles_round_trip(store: str, name: str, length: int, xxh3: int) -> None:
    assert parse_handle(format_handle(store, name, length, xxh3)) == (store, name, length, xxh3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rec://s/n",
        "rec://s/n?len=1&xxh3=0",
        "rec://s/n?len=-1&xxh3=0000000000000000",
        "rec:///n?len=1&xxh3=0000000000000000",
        "rec://s/n?len=1&xxh3=0000000000000000\n",
        "file://s/n?len=1&xxh3=0000000000000000",
        "rec://s/n?len=1&xxh3=00000000000000AB",
    ],
)
def test_text_that_is_no_handle(text: str) -> None:
    with pytest.raises(HandleError):
        parse_handle(text)


@pytest.mark.parametrize(
    ("store", "name", "length", "xxh3"), [("", "n", 1, 1), ("s", "n", -1, 1), ("s", "n", 1, 2**64)]
)
def test_handle_that_cannot_be_made(store: str, name: str, length: int, xxh3: int) -> None:
    with pytest.raises(HandleError):
        format_handle(store, name, length, xxh3)


# What a PodMonitor and Prometheus add, by which every series would get a second label of that name.
TAKEN = {"namespace", "job", "role", "pod", "container", "endpoint", "instance", "le", "quantile"}


def test_metric_names() -> None:
    """Prometheus conventions: our prefix, base units, counters end in _total, labels are few."""
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"tracerl_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert not re.search(r"_(ms|milliseconds|kib|mb|percent)(_|$)", metric.name)
        assert not set(metric.labels) & TAKEN
        assert metric.help.endswith(".")


def test_a_process_shows_a_bounded_number_of_series() -> None:
    """Every label has a list of values or a bound, so that none grows with jobs, pods or trajectories."""
    used = set()
    for metric in METRICS:
        assert len(metric.values) == len(metric.labels), metric.name
        for label, values in zip(metric.labels, metric.values, strict=True):
            assert len(values) == len(set(values))
            if not values:
                used.add(label)
        buckets = 15 if metric.type == "histogram" else 1
        layered = "layer" in metric.labels
        # Only audits have layers; the operator counts its requests alone by three labels.
        most = 1024 if layered else 17_000 if metric.name == "tracerl_operator_api_requests_total" else 128
        assert metric.most_series * buckets <= most, metric.name
    assert used == OPEN_LABELS.keys()


def test_reasons_are_camel_case_and_documented() -> None:
    for member in (*ConditionType, *Reason):
        assert re.fullmatch(r"[A-Z][A-Za-z]+", member)
        assert member.doc.endswith(".")


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_those_of_the_code(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run `python -m tracerl.api.docs`"
