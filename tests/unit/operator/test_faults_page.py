"""Every fault of docs/reference/faults.md names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_fault_is_shown_by_a_test() -> None:
    page = (ROOT / "docs/reference/faults.md").read_text()
    rows = [
        line.strip(" |").split("|") for line in page.partition("## Edits")[0].splitlines() if line[:2] == "| "
    ]
    faults = [row for row in rows if row[0].strip() not in ("fault", "---")]
    assert len(faults) > 30
    files = {path.name: ast.parse(path.read_text()) for path in ROOT.glob("tests/**/test_*.py")}
    for row in faults:
        last = None
        # A test without a file is in that of the test before it.
        named = re.findall(r"`(?:(test_\w+\.py)::)?((?:Test\w+::)?test_\w+)`", row[-1])
        assert named, row[0]
        for file, name in named:
            last = file or last
            assert last is not None, row[0]
            found = {
                node.name
                for node in ast.walk(files[last])
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
            assert set(name.split("::")) <= found, f"{last} has no {name}"
