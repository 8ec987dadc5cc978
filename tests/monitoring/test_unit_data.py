"""The panels that a canary has nothing for, with figures worked out by hand, by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from chart_files import ShownQuery
from test_alert_rules import promtool
from test_queries import QUERIES, chosen, is_produced

_JOB = 'namespace="team",job="canary",pod="canary-node-0-0"'
_DURATION = "tracerl_object_request_duration_seconds"
# A minute apart: 60 writes, 45 of which took no longer than 0.25 s and all no longer than 0.5 s; 30 reads,
# all within 0.1 s; one read in two failed.
SERIES = {
    f'tracerl_object_requests_total{{{_JOB},operation="write",result="ok"}}': "0+60x20",
    f'tracerl_object_requests_total{{{_JOB},operation="write",result="failed"}}': "0+0x20",
    f'tracerl_object_requests_total{{{_JOB},operation="read",result="ok"}}': "0+15x20",
    f'tracerl_object_requests_total{{{_JOB},operation="read",result="failed"}}': "0+15x20",
    **{
        f'{_DURATION}_bucket{{{_JOB},operation="{operation}",le="{bound}"}}': f"0+{n}x20"
        for operation, counts in {"write": (0, 45, 60, 60), "read": (30, 30, 30, 30)}.items()
        for bound, n in zip(("0.1", "0.25", "0.5", "+Inf"), counts, strict=True)
    },
    f'tracerl_object_uploads_total{{{_JOB},result="ok"}}': "0+6x20",
    f'tracerl_object_uploads_total{{{_JOB},result="failed"}}': "0+1x20",
    f"tracerl_object_uploaded_bytes_total{{{_JOB}}}": "0+6000x20",
    f"tracerl_object_retries_total{{{_JOB}}}": "0+3x20",
    f'tracerl_baseline_overhead_ratio{{{_JOB},bound="low"}}': "0.01+0x20",
    f'tracerl_baseline_overhead_ratio{{{_JOB},bound="estimate"}}': "0.04+0x20",
    f'tracerl_baseline_overhead_ratio{{{_JOB},bound="high"}}': "0.07+0x20",
    f"tracerl_baseline_pairs{{{_JOB}}}": "1+1x20",
}
EXPECTED = {
    # Values lie evenly in their bucket: the 30th of 60 two thirds up from 0.1 to 0.25, the 15th of 30 half
    # way to 0.1.
    "S3 latency A": {'{operation="write"}': 0.2, '{operation="read"}': 0.05},
    # The 59.4th of 60 is 14.4 of 15 up from 0.25 to 0.5, the 29.7th of 30 99 of 100 up to 0.1.
    "S3 latency B": {'{operation="write"}': 0.49, '{operation="read"}': 0.099},
    "Requests A": {
        '{operation="write",result="ok"}': 1,
        '{operation="write",result="failed"}': 0,
        '{operation="read",result="ok"}': 0.25,
        '{operation="read",result="failed"}': 0.25,
    },
    "Overhead by steps without records A": {
        '{bound="low"}': 0.01,
        '{bound="estimate"}': 0.04,
        '{bound="high"}': 0.07,
    },
    # After 15 minutes, one more in each.
    "Steps done without records as well A": {"{}": 16},
    "Uploads A": {'{result="ok"}': 30, '{result="failed"}': 5},
    "Uploads B": {"{}": 15},
    "tracerl_object_uploaded_bytes_total A": {"{}": 100},
}
NOT_SHOWN_BY_A_CANARY = {
    str(query).partition(": ")[2]: query for query in QUERIES if not is_produced(query.expr)
}


def test_every_such_panel_has_figures() -> None:
    assert NOT_SHOWN_BY_A_CANARY.keys() == EXPECTED.keys()


@pytest.mark.parametrize("query", NOT_SHOWN_BY_A_CANARY.values(), ids=str)
def test_a_panel_shows_the_figures(query: ShownQuery, tmp_path: Path) -> None:
    expected = EXPECTED[str(query).partition(": ")[2]]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in SERIES.items()],
        "promql_expr_test": [
            {
                "expr": chosen(query.expr).replace("[10s]", "[5m]"),
                "eval_time": "15m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", path)
