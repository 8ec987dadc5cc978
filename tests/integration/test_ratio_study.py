"""The study's one-process run: as old as it says, and complete."""

import sys
from pathlib import Path

import pytest

from tracerl.api.job import TraceRLJob

STUDY = Path(__file__).parents[2] / "benchmarks/ratio"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import lagged
    import study

    yield lagged, study
    for name in ("lagged", "study"):
        sys.modules.pop(name, None)


def test_trajectories_are_as_old_as_the_lags_say(study, tmp_path, monkeypatch):
    lagged, definitions = study
    document = definitions.job(definitions.trace(ratioFrom="Auto"), "0.0001", seed=1)
    document["spec"]["warmup"]["steps"] = 1
    document["spec"]["algorithm"] |= {"steps": 3, "promptsPerStep": 4, "samplesPerPrompt": 2}
    ages = []
    learn = lagged.Learner.step

    def step(self, groups, version, timer):
        outcome = learn(self, groups, version, timer)
        ages.append(dict(outcome.staleness_trajectories))
        return outcome

    monkeypatch.setattr(lagged.Learner, "step", step)
    result = lagged.run(TraceRLJob.model_validate(document), [0, 2], evaluate=4, cache=tmp_path)
    # Half of each batch is fresh; the other half waits until there is a version that old.
    assert ages == [{0: 8}, {0: 4, 1: 4}, {0: 4, 2: 4}]
    assert [step["missing"] for step in result["steps"]] == [0, 0, 0]
    assert all(step["gapGuided"] <= step["gapUnguided"] for step in result["steps"])
