"""The comparison for a GPU, on CPU: a run that the budget stopped goes on as if it had not been."""

import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks/gpu"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    import compare

    tiny = {
        "model": "builtin://tiny-moe",
        "digits": 2,
        "warmup": {"steps": 1},
        "rates": ["0.001"],
        "steps": 4,
    }
    monkeypatch.setattr(compare, "SETTINGS", {"deep": tiny})
    base = compare.BASE["spec"]
    monkeypatch.setitem(base, "algorithm", base["algorithm"] | {"promptsPerStep": 4, "samplesPerPrompt": 2})
    monkeypatch.setitem(base, "task", base["task"] | {"heldOutPrompts": 8})
    monkeypatch.setitem(base, "model", {"dtype": "Float32"})
    yield compare
    for name in ("compare", "lagged"):
        sys.modules.pop(name, None)


def done(result):
    future = Future()
    future.set_result(result)
    return future


def test_a_stopped_run_goes_on_where_it_was(compare, tmp_path, monkeypatch):
    (run,) = (run for run in compare.rl_runs([3]) if run["arm"] == "TRACE 1 bit, half")
    whole = compare.one(run, tmp_path / "whole", "cpu", float("inf"))
    assert [step["missing"] for step in whole["steps"]] == [0, 0, 0, 0]

    clock = iter([0.0, 0.0, 2.0])
    with monkeypatch.context() as patch:
        patch.setattr(compare.time, "time", lambda: next(clock))
        assert compare.one(run, tmp_path / "cut", "cpu", 1.0) is None
    resumed = compare.one(run, tmp_path / "cut", "cpu", float("inf"))
    assert resumed["steps"] == whole["steps"]
    assert (resumed["heldOutStart"], resumed["heldOutEnd"]) == (whole["heldOutStart"], whole["heldOutEnd"])


def test_equal_weights_in_fp32_leave_no_gap_and_the_summary_says_so(compare, tmp_path):
    (run,) = (run for run in compare.equal_runs([3]) if run["arm"] == "QAT")
    run["job"]["spec"]["algorithm"] |= {"promptsPerStep": 4, "samplesPerPrompt": 2}
    out = tmp_path / "runs.jsonl"
    result = compare.one(run, tmp_path, "cpu", float("inf"))
    compare.keep([done(result), done(None)], out, {"cores": 2})
    assert set(compare.read_runs(out)) == {"equal-deep-QAT-seed3"}
    summary = compare.summarise(out)
    (row,) = summary["equal"]
    # As engines' tests have it: no code differs, log-probs within 1e-5.
    assert row["gap"]["mean"] < 1e-5
    assert row["mismatchRTN"] == [0.0] * 4
    assert row["gapBefore"] == 0.0332
    assert "| deep | QAT | 1 |" in compare.table(summary)
