"""Which engine arguments of a job SGLang is given, and which are refused; no engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SHAPE, spec_of

from tracerl.api.errors import InputError
from tracerl.engines.sglang.settings import engine_arguments, write_config


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("speculative_algorithm", "drafted tokens"),
        ("enable_hierarchical_cache", "leave the device"),
        ("disaggregation_mode", "two servers"),
        ("kv_cache_dtype", "the plugin quantises"),
        ("dtype", "the job says it elsewhere"),
        ("load_format", "the job says it elsewhere"),
    ],
)
def test_engine_arguments_that_are_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"engineArgs\.{name} .*{why}.*remove it"):
        engine_arguments(spec_of(rollout={"engineArgs": {name: "x"}}), SHAPE, tmp_path)


def test_an_engine_argument_that_sglang_does_not_have(tmp_path: Path) -> None:
    spec = spec_of(rollout={"engineArgs": {"chunked_prefil_size": 64}})
    sentence = r"engineArgs\.chunked_prefil_size is no argument of SGLang's; write chunked_prefill_size"
    with pytest.raises(InputError, match=sentence):
        engine_arguments(spec, SHAPE, tmp_path)


def test_units_share_the_cache_and_sglang_divides_the_chunk(tmp_path: Path) -> None:
    """SGLang's tensor-parallel size counts all ranks; its cache is one unit's, its chunk all units'."""
    sizes = {"tensor": 2, "data": 3, "expert": 6}
    arguments = engine_arguments(
        spec_of(rollout={"parallelism": sizes, "kvCacheTokens": 3000}), SHAPE, tmp_path
    )
    found = {name: arguments[name] for name in ("tp_size", "attn_dp_size", "ep_size", "chunked_prefill_size")}
    assert found == {"tp_size": 6, "attn_dp_size": 3, "ep_size": 6, "chunked_prefill_size": 3000}
    assert 1000 <= arguments["max_total_tokens"] < 1100
    assert arguments["dist_init_addr"].startswith("127.0.0.1:")


def test_engine_arguments_that_are_passed_on(tmp_path: Path) -> None:
    spec = spec_of(rollout={"engineArgs": {"schedule_conservativeness": 0.5, "chunked_prefill_size": 64}})
    arguments = engine_arguments(spec, SHAPE, tmp_path)
    assert arguments["schedule_conservativeness"] == 0.5
    assert arguments["chunked_prefill_size"] == 64


def test_no_token_ends_a_sequence_but_those_that_are_asked_for(tmp_path: Path) -> None:
    """A sequence may also be as long as the model's context, of which SGLang keeps some for itself."""
    import json

    write_config(SHAPE, tmp_path, "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] is None
    assert config["max_position_embeddings"] > SHAPE.context
