"""The page about the GPU shows the figures that are committed."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/gpu.md").read_text(encoding="utf-8")


def results(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    import compare
    import run

    yield run, compare
    for name in ("run", "compare"):
        sys.modules.pop(name, None)


def test_its_tables_are_those_of_the_results(gpu):
    run, compare = gpu
    measured = results("gpu-h200.json")
    tables = [
        run.kernels_markdown(measured["kernels"]),
        run.steps_markdown(measured),
        run.compiled_markdown(results("gpu-compiled.json")),
        *compare.table(results("gpu-h200-compare.json")).split("\n\n"),
    ]
    for table in tables:
        assert table in PAGE


def test_results_are_not_replaced_by_those_of_no_runs(gpu, monkeypatch, tmp_path):
    _, compare = gpu
    result = tmp_path / "result.json"
    result.write_text("{}", encoding="utf-8")
    nowhere = str(tmp_path / "runs.jsonl")
    monkeypatch.setattr(sys, "argv", ["compare.py", "summarise", "--out", nowhere, "--result", str(result)])
    with pytest.raises(SystemExit, match="holds no runs; make some"):
        compare.main()
    assert result.read_text(encoding="utf-8") == "{}"
