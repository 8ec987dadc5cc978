"""Every query of the chart's dashboards and alerts asks for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tracerl.api.constants import METRICS, Role
from tracerl_monitoring.__main__ import files
from tracerl_monitoring.alerts import ALERTS
from tracerl_monitoring.series import TARGET_LABELS, series

ROOT = Path(__file__).parents[3]
FILES = ROOT / "charts/tracerl/files"
BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FILES.glob("dashboards/*.json"))
}
RULES: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
THRESHOLDS = yaml.safe_load((ROOT / "charts/tracerl/values.yaml").read_text())["alerts"]["thresholds"]
SPECS = {spec.name: spec for spec in METRICS}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> Iterator[tuple[str, str]]:
    """Where a query is, and what it is."""
    for name, board in BOARDS.items():
        for panel in panels(board):
            for target in panel.get("targets", ()):
                # Grafana's only variable where PromQL has no text.
                expr = target["expr"].replace("$__rate_interval", "5m")
                yield f"{name}: {panel['title']} {target['refId']}", expr
    for rule in RULES:
        expr = rule["expr"]
        for threshold, value in THRESHOLDS.items():
            expr = expr.replace(f"@{threshold}@", str(value))
        yield rule["alert"], expr


QUERIES = dict(queries())


def spec_of(name: str) -> Any:
    """The metric that a series is of, a histogram's by its three kinds of series."""
    histogram = SPECS.get(re.sub(r"_(bucket|sum|count)$", "", name))
    return SPECS.get(name) or (histogram if histogram and histogram.type == "histogram" else None)


def walk(expr: Any) -> Iterator[Any]:
    """An expression and all that it is made of."""
    yield expr
    for part in ("expr", "lhs", "rhs", "param", "vector_selector"):
        inner = getattr(expr, part, None)
        if inner is not None:
            yield from walk(inner)
    for argument in getattr(expr, "args", None) or ():
        yield from walk(argument)


def selectors(expr: Any) -> list[Any]:
    return [each for each in walk(expr) if isinstance(each, promql_parser.VectorSelector)]


def test_the_parser_sees_all_of_an_expression() -> None:
    text = (
        'sum by (a) (rate(b_total{c="d"}[5m])) / (1 - min_over_time(max(e)[6h:5m])) or topk(3, f) > vector(0)'
    )
    assert [each.name for each in selectors(promql_parser.parse(text))] == ["b_total", "e", "f"]


def faults(text: str) -> Iterator[str]:
    """What a query asks for that no metric has."""
    expr = promql_parser.parse(text)
    known = set(TARGET_LABELS)
    for selector in selectors(expr):
        spec = spec_of(selector.name)
        if spec is None:
            yield f"no metric {selector.name}"
            continue
        labels = {*spec.labels, *({"le"} if selector.name.endswith("_bucket") else ())}
        known |= labels
        listed = dict(zip(spec.labels, spec.values, strict=False))
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels | TARGET_LABELS:
                yield f"{selector.name} has no label {matcher.name}"
            elif (
                listed.get(matcher.name)
                and matcher.op
                in (
                    promql_parser.MatchOp.Equal,
                    promql_parser.MatchOp.NotEqual,
                )
                and matcher.value not in listed[matcher.name]
            ):
                yield f"{matcher.name} of {selector.name} is never {matcher.value}"
    for each in walk(expr):
        if isinstance(each, promql_parser.AggregateExpr) and each.modifier is not None:
            yield from (f"nothing has the label {label}" for label in set(each.modifier.labels) - known)


@pytest.mark.parametrize("where", QUERIES)
def test_a_query_asks_for_what_metrics_have(where: str) -> None:
    assert selectors(promql_parser.parse(QUERIES[where]))
    assert list(faults(QUERIES[where])) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rate(tracerl_stepp_total[5m])", "no metric tracerl_stepp_total"),
        ("tracerl_step_bucket", "no metric tracerl_step_bucket"),
        ('tracerl_step{layer="1"}', "tracerl_step has no label layer"),
        ('tracerl_staleness_versions{stat="median"}', "stat of tracerl_staleness_versions is never median"),
        ("sum by (stat) (tracerl_step)", "nothing has the label stat"),
    ],
)
def test_a_query_of_what_there_is_not_is_found(text: str, fault: str) -> None:
    assert list(faults(text)) == [fault]


@pytest.mark.parametrize("where", [where for where in QUERIES if ": " in where])
def test_a_counter_is_shown_by_how_it_grows(where: str) -> None:
    """A number that grows for ever says nothing in a line; only restarts of this run are a sum."""
    expr = promql_parser.parse(QUERIES[where])
    grown = Counter(
        each.vector_selector.name for each in walk(expr) if isinstance(each, promql_parser.MatrixSelector)
    )
    plain = Counter(selector.name for selector in selectors(expr)) - grown
    assert {name for name in plain if spec_of(name).type == "counter"} <= {"tracerl_restarts_total"}
    assert all(spec_of(name).type != "gauge" for name in grown)


def test_every_metric_is_on_a_dashboard() -> None:
    sources = {"job": {Role.TRAINER, Role.ROLLOUT, Role.STORE}, "operator": {Role.OPERATOR}}
    for name, roles in sources.items():
        exprs = [
            promql_parser.parse(expr) for where, expr in QUERIES.items() if where.startswith(f"{name}: ")
        ]
        shown = {spec_of(selector.name).name for expr in exprs for selector in selectors(expr)}
        missing = {spec.name for spec in METRICS if spec.source in roles} - shown
        # The fleet's are of all jobs together, and not of the operator's work.
        assert missing <= {
            "tracerl_operator_longest_not_ready_seconds",
            "tracerl_operator_canary_end_timestamp_seconds",
        }


def test_files_are_what_is_written() -> None:
    for path, text in files().items():
        assert path.read_text(encoding="utf-8") == text, "run make dashboards"
    assert {*FILES.glob("dashboards/*")} == {path for path in files() if path.parent.name == "dashboards"}


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_one_by_grafanas_types(name: str) -> None:
    """What Grafana's own types read is what is there, so that no field is misspelt or lost."""
    read = Dashboard.from_json(BOARDS[name])
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == BOARDS[name]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_places_of_their_own(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in panels(BOARDS[name])]
    assert len(numbers) == len(set(numbers))
    for panel in panels(BOARDS[name]):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_variables_reach_every_query() -> None:
    choices = {
        "fleet": {"datasource", "namespace", "job"},
        "job": {"datasource", "namespace", "job", "site"},
        "operator": {"datasource", "operator_namespace"},
    }
    for name, board in BOARDS.items():
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert variables == choices[name]
        for panel in panels(board):
            for target in panel.get("targets", ()):
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "1"}
                assert used <= variables
                assert target["datasource"]["uid"] == "${datasource}"
                if "tracerl_operator_" not in target["expr"]:
                    assert {"namespace", "job"} <= used, target["expr"]
    assert BOARDS["job"]["uid"] in json.dumps(BOARDS["fleet"])


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_fits_a_config_map(name: str) -> None:
    assert (FILES / f"dashboards/{name}.json").stat().st_size < 2**20 // 2


def test_alerts_have_runbooks_by_their_names() -> None:
    names = [alert.name for alert in ALERTS]
    pages = sorted(path.stem for path in (ROOT / "docs/runbooks").glob("TraceRL*.md"))
    assert pages == sorted(names)
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"@docs:runbooks/{rule['alert']}@"
    linked = set(re.findall(r"@docs:([^@]+)@", "".join(map(json.dumps, (*BOARDS.values(), RULES)))))
    assert [page for page in linked if not (ROOT / f"docs/{page}.md").exists()] == []
    watched = {name for name in names if f"runbooks/{name}@" in json.dumps(BOARDS)}
    assert watched == set(names), "every alert is named on a panel that shows what it watches"


def test_thresholds_are_values_and_all_are_used() -> None:
    text = (FILES / "alerts.yaml").read_text()
    assert set(re.findall(r"@(\w+)@", text)) == {*THRESHOLDS, "namespace"}


@pytest.mark.parametrize(
    ("name", "label", "message"),
    [
        ("tracerl_stepp", "", "METRICS has no tracerl_stepp"),
        ("tracerl_step_count", "", "METRICS has no tracerl_step_count"),
        ("tracerl_step", "layer", "tracerl_step has no label layer in METRICS, but none"),
        ("tracerl_staleness_versions", "layer", "has no label layer in METRICS, but stat"),
    ],
)
def test_a_query_of_what_there_is_not_is_not_made(name: str, label: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        series(name, **{label: "0"} if label else {})


def test_no_metric_has_a_label_that_a_scrape_gives() -> None:
    """It would come out as exported_role; tracerl_info's method is the same one, and its copy is dropped."""
    clashes = {(spec.name, label) for spec in METRICS for label in spec.labels if label in TARGET_LABELS}
    assert clashes == {("tracerl_info", "method")}
