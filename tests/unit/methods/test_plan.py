"""What each method does at each site, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from tracerl.api.job import RatioFrom, Spec
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.methods import MethodPlan, Treatment, plan
from tracerl.records.sites import SiteKind

U, R, G = Treatment.UNQUANTIZED, Treatment.RTN, Treatment.GUIDED
SHAPE = BUILTIN_MODELS["tiny-moe"]
# The first layer is dense, and only every second layer attends to the whole context.
MIXED = SHAPE.model_copy(update={"moe_layers": (1, 2, 3), "full_attention_layers": (1, 3)})


def make(method: dict[str, Any], shape: ModelShape = SHAPE, **fields: Any) -> MethodPlan:
    document = {
        "model": {"uri": "builtin://tiny-moe"},
        "task": {"name": "builtin/chain_sum"},
        "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2},
        "method": method,
    }
    for path, value in fields.items():
        section, field = path.split("__")
        document.setdefault(section, {})[field] = value
    return plan(Spec.model_validate(document), shape)


def treatments(found: MethodPlan, kind: SiteKind, layers: int = 4) -> list[tuple[str, str, bool]]:
    sites = [found.site(layer, kind) for layer in range(layers)]
    return [(site.rollout, site.trainer, site.recorded) for site in sites]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("BF16", [(U, U, False)] * 4),
        ("Vanilla", [(R, U, False)] * 4),
        ("QAT", [(R, R, False)] * 4),
        ("TRACE", [(R, R, False)] * 2 + [(R, G, True)] * 2),
    ],
)
def test_experts_input_keys_and_values(method: str, expected: list[tuple[str, str, bool]]) -> None:
    found = make({"name": method})
    for kind in (SiteKind.EXPERT_INPUT, SiteKind.KEY, SiteKind.VALUE):
        assert treatments(found, kind) == expected
    assert found.guided is (method == "TRACE")
    assert found.weights_rollout == (U if method == "BF16" else R)
    assert found.weights_trainer == (R if method in {"QAT", "TRACE"} else U)


def test_routes_are_recorded_by_every_method_that_replays_them() -> None:
    for method in ("BF16", "Vanilla", "QAT", "TRACE"):
        replay = make({"name": method})
        assert treatments(replay, SiteKind.ROUTES) == [(U, U, True)] * 4
        alone = make({"name": method}, algorithm__routingReplay=False)
        assert treatments(alone, SiteKind.ROUTES) == [(U, U, False)] * 4


@pytest.mark.parametrize(
    ("second_input", "method", "expected"),
    [
        ("BF16", "TRACE", [(U, U, False)] * 4),
        ("RTN", "TRACE", [(R, R, False)] * 4),
        ("RTN", "Vanilla", [(R, U, False)] * 4),
        ("RTN", "BF16", [(U, U, False)] * 4),
        ("Recorded", "QAT", [(R, R, False)] * 4),
        ("Recorded", "TRACE", [(R, R, False)] * 2 + [(R, G, True)] * 2),
    ],
)
def test_second_input(second_input: str, method: str, expected: list[tuple[str, str, bool]]) -> None:
    found = make({"name": method}, quantization__secondInput=second_input)
    assert treatments(found, SiteKind.FC2_INPUT) == expected


def test_targets() -> None:
    experts = make({"name": "TRACE"}, quantization__targets=["RoutedExperts"])
    assert treatments(experts, SiteKind.KEY) == [(U, U, False)] * 4
    assert treatments(experts, SiteKind.EXPERT_INPUT)[3] == (R, G, True)
    cache = make({"name": "TRACE"}, quantization__targets=["KVCache"])
    assert treatments(cache, SiteKind.EXPERT_INPUT) == [(U, U, False)] * 4
    assert treatments(cache, SiteKind.VALUE)[3] == (R, G, True)
    assert (cache.weights_rollout, cache.weights_trainer) == (U, U)


def test_layers_that_have_no_such_site_are_untouched() -> None:
    found = make({"name": "TRACE", "trace": {"layers": {"policy": "All"}}}, shape=MIXED)
    nothing = (U, U, False)
    assert treatments(found, SiteKind.EXPERT_INPUT) == [nothing] + [(R, G, True)] * 3
    assert treatments(found, SiteKind.KEY) == [nothing, (R, G, True), nothing, (R, G, True)]
    # LastHalf counts K and V among the full-attention layers.
    half = make({"name": "TRACE"}, shape=MIXED)
    assert treatments(half, SiteKind.KEY) == [nothing, (R, R, False), nothing, (R, G, True)]


def test_knobs_of_trace() -> None:
    trace = {"driftBand": "0.1", "maxGuidedVersionDiff": 2, "ratioFrom": "Exact"}
    found = make({"name": "TRACE", "trace": trace})
    assert (found.band, found.max_guided_version_diff, found.ratio_from) == (0.1, 2, RatioFrom.EXACT)
    default = make({"name": "TRACE"})
    assert (default.band, default.max_guided_version_diff, default.ratio_from) == (None, None, RatioFrom.AUTO)
    assert make({"name": "QAT"}).ratio_from is RatioFrom.UNGUIDED
