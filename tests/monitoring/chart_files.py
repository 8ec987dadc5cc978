"""The chart's dashboards and rules, as an installation with default values has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/tracerl"
NAMESPACE = "tracerl-system"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def alert_rules(namespace: str = NAMESPACE) -> dict[str, Any]:
    """The rules with the chart's thresholds, as Prometheus reads them."""
    text = (CHART / "files/alerts.yaml").read_text().replace("@namespace@", namespace)
    for name, threshold in VALUES["alerts"]["thresholds"].items():
        text = text.replace(f"@{name}@", str(threshold))
    document: dict[str, Any] = yaml.safe_load(text)
    for rule in document["groups"][0]["rules"]:
        rule["annotations"]["runbook_url"] = f"docs/runbooks/{rule['alert']}.md"
    return document


@dataclass(frozen=True)
class ShownQuery:
    """A query of a panel."""

    board: str
    panel: str
    kind: str
    letter: str
    expr: str
    legend: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel} {self.letter}"


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, those of folded rows as well."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def boards() -> dict[str, dict[str, Any]]:
    """The dashboards by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(CHART.glob("files/dashboards/*.json"))}


def shown_queries() -> list[ShownQuery]:
    """Every query of every panel."""
    return [
        ShownQuery(
            name,
            panel["title"],
            panel["type"],
            target["refId"],
            target["expr"],
            target.get("legendFormat", ""),
        )
        for name, board in boards().items()
        for panel in panels(board)
        for target in panel.get("targets", ())
    ]
