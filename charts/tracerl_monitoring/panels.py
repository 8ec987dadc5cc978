"""What is on a dashboard, as data, and Grafana's JSON of it, by Grafana's own types."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models import text as text_models

from tracerl.api.constants import MetricSpec
from tracerl_monitoring.series import quantile, rate, series, total

TAG = "tracerl"
WIDTH = 24
_HEIGHT = 8
_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
_RATE_UNITS = {"seconds": "percentunit", "bytes": "Bps"}


class Kind(StrEnum):
    """How a panel draws its series."""

    LINES = "timeseries"
    STACK = "stack"
    NUMBER = "stat"
    NAMES = "names"
    HEAT_MAP = "heatmap"
    TABLE = "table"


_SMALL = (Kind.NUMBER, Kind.NAMES)


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and how its series are called; in a table, the column of its values."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `alerts` are the names of those that watch what it shows; their runbooks are linked to.

    `unit` is one of Grafana's, `step` the least distance of its points. Of a table, `link` is where a click
    leads, and `hidden` are columns that are left out.
    """

    title: str
    queries: tuple[Query, ...]
    text: str
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 8
    alerts: tuple[str, ...] = ()
    step: str | None = None
    link: str | None = None
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: the values of a label of a metric's series; without `label`, that of its name."""

    name: str
    metric: str
    scope: str = ""
    label: str = ""
    several: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard; `page` is the documentation's page of it."""

    name: str
    title: str
    text: str
    page: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterable[Panel]:
        """All panels, those of collapsed rows as well."""
        return [panel for row in self.rows for panel in row.panels]


def shown_plainly(spec: MetricSpec, scope: str) -> Panel:
    """Show a metric for which nobody drew a panel, by its labels."""
    by = ", ".join(spec.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in spec.labels) or spec.name
    unit = _UNITS.get(spec.unit, "short")
    queries: tuple[Query, ...]
    if spec.type == "histogram":
        shares = ("0.5", "0.99")
        queries = tuple(
            Query(quantile(share, spec.name, scope, by=by), f"{legend} {share}") for share in shares
        )
    elif spec.type == "counter":
        unit = _RATE_UNITS.get(spec.unit, "cps")
        queries = (Query(total(rate(spec.name, scope), by), legend),)
    else:
        more = f"{by}, pod" if by else "pod"
        queries = (Query(f"max by ({more}) ({series(spec.name, scope)})", f"{legend} {{{{pod}}}}"),)
    return Panel(spec.name, queries, spec.help, unit=unit)


# -- Grafana's JSON ---------------------------------------------------------------------------------------


def render(board: Board) -> str:
    """Give a dashboard as the text of its file."""
    made = (
        builders.Dashboard(board.title)
        .uid(f"{TAG}-{board.name}")
        .tags([TAG])
        .description(board.text)
        .timezone("browser")
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("TraceRL")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    number = 1
    position = 0
    about = (
        text.Panel()
        .title("")
        .mode(text_models.TextMode.MARKDOWN)
        .content(f"{board.text} [How to read it](@docs:{board.page}@) · [Runbooks](@docs:runbooks/README@)")
    )
    made = made.with_panel(
        about.transparent(True).id(number).grid_pos(dashboard.GridPos(h=2, w=WIDTH, x=0, y=0))
    )
    position += 2
    for row in board.rows:
        number += 1
        header = builders.Row(row.title).id(number).grid_pos(dashboard.GridPos(h=1, w=WIDTH, x=0, y=position))
        position += 1
        x, last = 0, 0
        drawn = []
        for panel in row.panels:
            number += 1
            height = 4 if panel.kind in _SMALL else _HEIGHT
            if x + panel.width > WIDTH:
                x, position = 0, position + last
            place = dashboard.GridPos(h=height, w=panel.width, x=x, y=position)
            drawn.append(_panel(panel).id(number).grid_pos(place))
            x, last = x + panel.width, height
        position += last
        if row.collapsed:
            for one in drawn:
                header = header.with_panel(one)
        made = made.with_row(header)
        if not row.collapsed:
            for one in drawn:
                made = made.with_panel(one)
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(variable: Variable) -> Any:
    label = variable.label or variable.name
    query = f"label_values({series(variable.metric, variable.scope)}, {label})"
    made = (
        builders.QueryVariable(variable.name)
        .label(label.capitalize())
        .datasource(_SOURCE)
        .query({"query": query, "refId": variable.name})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    if variable.several:
        every = dashboard.VariableOption(text="All", value="$__all", selected=True)
        made = made.multi(True).include_all(True).all_value(".*").current(every)
    return made


def _panel(panel: Panel) -> Any:
    made = _DRAWN[panel.kind](panel)
    runbooks = " · ".join(f"[{name}](@docs:runbooks/{name}@)" for name in panel.alerts)
    made = made.title(panel.title).datasource(_SOURCE).unit(panel.unit)
    made = made.description(f"{panel.text} Alerts: {runbooks}" if runbooks else panel.text)
    if panel.step is not None:
        made = made.interval(panel.step)
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        made = made.with_target(_target(panel, query, letter))
    return made


def _target(panel: Panel, query: Query, letter: str) -> Any:
    made = prometheus.Dataquery().ref_id(letter).expr(query.expr).datasource(_SOURCE)
    if panel.kind is Kind.TABLE:
        return made.instant().format(prometheus_models.PromQueryFormat.TABLE)
    if query.legend:
        made = made.legend_format(query.legend)
    return made.instant() if panel.kind in _SMALL else made.range()


def _lines(_: Panel) -> Any:
    legend = common_builders.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST)
    legend = legend.placement(common.LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    made = timeseries.Panel().legend(legend).tooltip(tooltip.sort(common.SortOrder.DESCENDING))
    # A run has a value a step; a line goes on to the next one.
    return made.line_width(1).show_points(common.VisibilityMode.AUTO).span_nulls(False)


def _stack(panel: Panel) -> Any:
    stacking = common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
    return _lines(panel).stacking(stacking).fill_opacity(40).min(0)


def _number(panel: Panel) -> Any:
    last = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    named = common.BigValueTextMode.VALUE_AND_NAME if len(panel.queries) > 1 else common.BigValueTextMode.AUTO
    return (
        stat.Panel()
        .reduce_options(last)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.NONE)
        .text_mode(named)
    )


def _names(panel: Panel) -> Any:
    return _number(panel).text_mode(common.BigValueTextMode.NAME)


def _heat_map(panel: Panel) -> Any:
    colours = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges")
    colours = colours.steps(64).scale(heatmap_models.HeatmapColorScale.EXPONENTIAL).exponent(0.5).min(0)
    rows = heatmap.RowsHeatmapOptions().layout(common.HeatmapCellLayout.UNKNOWN)
    return (
        heatmap.Panel()
        .calculate(False)
        .rows_frame(rows)
        .color(colours)
        # Nothing is hidden: 0 is a mismatch of nothing, and not the absence of a figure.
        .filter_values(heatmap.FilterValueRange().le(-1))
        .cell_values(heatmap.CellValues().unit(panel.unit))
        .y_axis(heatmap.YAxisConfig().axis_label("layer").reverse(True))
        .show_legend()
    )


def _table(panel: Panel) -> Any:
    names = {
        f"Value #{letter}": query.legend
        for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
    }
    hidden = dict.fromkeys(("Time", *panel.hidden), True)
    made = table.Panel().with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    made = made.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize", options={"excludeByName": hidden, "renameByName": names}
        )
    )
    if panel.link is not None:
        link = {"title": "The job", "url": panel.link}
        made = made.override_by_name("job", [dashboard.DynamicConfigValue(id_val="links", value=[link])])
    for query in panel.queries:
        unit = {"overhead": "percentunit"}.get(query.legend)
        if unit is not None:
            made = made.override_by_name(
                query.legend, [dashboard.DynamicConfigValue(id_val="unit", value=unit)]
            )
    return made


_DRAWN = {
    Kind.LINES: _lines,
    Kind.STACK: _stack,
    Kind.NUMBER: _number,
    Kind.NAMES: _names,
    Kind.HEAT_MAP: _heat_map,
    Kind.TABLE: _table,
}
