"""The chart's files agree with what they copy or describe; tests/cluster renders and installs them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/tracerl"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Values without parts."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def test_definition_is_that_of_the_models() -> None:
    copy = (CHART / "files/tracerljobs.yaml").read_text()
    assert copy == (ROOT / "crds/tracerljobs.yaml").read_text(), "run make crds"


def test_the_canary_is_that_of_the_examples() -> None:
    copy = (CHART / "files/canary.yaml").read_text()
    assert copy == (ROOT / "jobs/examples/canary.yaml").read_text(), "run make crds"


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]


def test_readme_has_every_value_with_its_default() -> None:
    rows = [line.split("|") for line in (CHART / "README.md").read_text().splitlines() if line[:3] == "| `"]
    table = {row[1].strip().strip("`"): yaml.safe_load(row[2].strip().strip("`")) for row in rows}
    assert table == dict(leaves(VALUES))


def properties(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """What the schema knows, down to what it leaves to Kubernetes."""
    for key, member in schema["properties"].items():
        below = list(properties(member, f"{path}{key}.")) if "properties" in member else []
        yield from below or [f"{path}{key}"]


def test_schema_has_the_values_and_no_others() -> None:
    known = set(properties(json.loads((CHART / "values.schema.json").read_text())))
    # These hold what a pod has, of which values.yaml sets a part.
    pods = ("resources", "canary.resources")
    pod = {f"{whose}.{part}" for whose in pods for part in ("requests", "limits", "claims")}
    ours = {path for path, _ in leaves(VALUES) if not path.startswith(tuple(f"{whose}." for whose in pods))}
    assert known == ours | pod | {"global"}


@pytest.mark.parametrize("name", ["", "image", "crds", "nodeRing", "serviceMonitor", "resources"])
def test_schema_refuses_what_it_does_not_know(name: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert (schema["properties"][name] if name else schema)["additionalProperties"] is False
