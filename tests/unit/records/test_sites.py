"""The site table: which sites a job records, how large they are, and that both sides get the same digest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from record_builders import make_shape, make_spec

from tracerl.api.errors import InputError
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.records.sites import SiteKind, SiteSlice, SiteTable, audit_table, site_table

# Qwen3.5-35B-A3B: every fourth of 40 layers has full attention, 2 KV heads of 256.
MODEL_35B = ModelShape(
    layers=40,
    hidden=2048,
    heads=16,
    kv_heads=2,
    head_dim=256,
    experts=256,
    top_k=8,
    expert_hidden=512,
    vocab=151_936,
    context=262_144,
    moe_layers=tuple(range(40)),
    full_attention_layers=tuple(range(3, 40, 4)),
)


def bytes_by_kind(table: SiteTable) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for site in table.sites:
        sizes[site.kind.value] += site.row_bytes
    return dict(sizes)


def layers(table: SiteTable, kind: SiteKind) -> list[int]:
    return [site.layer for site in table.sites if site.kind is kind]


def test_bytes_a_token_of_the_35b_model() -> None:
    table = site_table(MODEL_35B, make_spec())
    # 20 layers x 2048 values x (1 + 3/16) bit; 5 layers x K and V x 512 values x (1 + 3/16) bit; 40 x 8 ids.
    assert bytes_by_kind(table) == {"ExpertInput": 6080, "Key": 380, "Value": 380, "Routes": 320}
    assert table.row_bytes == 7160


@pytest.mark.parametrize(
    ("method", "targets", "recorded"),
    [
        ("TRACE", ["KVCache"], True),
        ("QAT", ["RoutedExperts", "KVCache"], True),
        ("TRACE", ["RoutedExperts"], False),
        ("Vanilla", ["KVCache"], False),
        ("BF16", ["KVCache"], False),
    ],
)
def test_where_the_starts_of_passes_are_recorded(method: str, targets: list[str], recorded: bool) -> None:
    """By methods whose trainer quantises keys and values, once for all layers; four bytes a row."""
    spec = make_spec(method=method, targets=targets, prefillAttends="Exact")
    with_, without = (
        site_table(MODEL_35B, spec),
        site_table(MODEL_35B, make_spec(method=method, targets=targets)),
    )
    assert layers(with_, SiteKind.EXACT_FROM) == ([3] if recorded else [])
    assert with_.row_bytes - without.row_bytes == (4 if recorded else 0)
    assert (with_.digest != without.digest) is recorded
    kept = tuple(site for site in with_.sites if site.kind is not SiteKind.EXACT_FROM)
    assert kept == without.sites


def test_bytes_a_token_of_everything() -> None:
    # The paper's 50.6 KiB: 2048 x 40 x 4.5 bit and 2 x 512 x 10 x 4.5 bit.
    assert bytes_by_kind(audit_table(MODEL_35B, make_spec())) == {
        "ExpertInput": 46_080,
        "Key": 2_880,
        "Value": 2_880,
    }


def test_the_papers_eight_bit_scales() -> None:
    table = site_table(MODEL_35B, make_spec(replay=False, targets=["RoutedExperts"], trace={"scaleBits": 8}))
    assert table.row_bytes == 2048 * 20 * 3 // 16  # 7.5 KiB: 1.5 bit a value


def test_last_half_counts_experts_over_all_layers_and_kv_over_full_attention() -> None:
    table = site_table(MODEL_35B, make_spec())
    assert layers(table, SiteKind.EXPERT_INPUT) == list(range(20, 40))
    assert layers(table, SiteKind.KEY) == layers(table, SiteKind.VALUE) == [23, 27, 31, 35, 39]
    assert layers(table, SiteKind.ROUTES) == list(range(40))


def mixed(moe: tuple[int, ...], attention: tuple[int, ...]) -> ModelShape:
    return ModelShape(**{**make_shape(5).model_dump(), "moe_layers": moe, "full_attention_layers": attention})


@pytest.mark.parametrize(
    ("policy", "expert", "key"),
    [
        ({"policy": "All"}, [1, 3, 4], [0, 1, 4]),
        ({"policy": "LastHalf"}, [3, 4], [1, 4]),
        ({"policy": "Last", "last": 1}, [4], [4]),
        ({"policy": "Last", "last": 99}, [1, 3, 4], [0, 1, 4]),
        ({"policy": "List", "indices": [0, 1, 7]}, [1], [0, 1]),
    ],
)
def test_layer_policies(policy: dict[str, Any], expert: list[int], key: list[int]) -> None:
    table = site_table(mixed((1, 3, 4), (0, 1, 4)), make_spec(trace={"layers": policy}))
    assert layers(table, SiteKind.EXPERT_INPUT) == expert
    assert layers(table, SiteKind.KEY) == layers(table, SiteKind.VALUE) == key
    assert layers(table, SiteKind.ROUTES) == [1, 3, 4]


EVERYTHING = {"ExpertInput", "FC2Input", "Key", "Value"}


@pytest.mark.parametrize(
    ("method", "options", "recorded", "audited"),
    [
        ("TRACE", {}, {"ExpertInput", "Key", "Value"}, {"ExpertInput", "Key", "Value"}),
        ("TRACE", {"targets": ["RoutedExperts"]}, {"ExpertInput"}, {"ExpertInput"}),
        ("TRACE", {"targets": ["KVCache"], "secondInput": "Recorded"}, {"Key", "Value"}, {"Key", "Value"}),
        ("TRACE", {"secondInput": "Recorded"}, EVERYTHING, EVERYTHING),
        ("TRACE", {"secondInput": "BF16"}, {"ExpertInput", "Key", "Value"}, {"ExpertInput", "Key", "Value"}),
        ("QAT", {}, set(), {"ExpertInput", "Key", "Value"}),
        ("Vanilla", {"targets": ["KVCache"]}, set(), {"Key", "Value"}),
        ("BF16", {}, set(), set()),
    ],
)
@pytest.mark.parametrize("replay", [True, False])
def test_kinds_follow_method_and_targets(
    method: str, options: dict[str, Any], recorded: set[str], audited: set[str], replay: bool
) -> None:
    spec = make_spec(method=method, replay=replay, **options)
    table = site_table(make_shape(4), spec)
    assert {site.kind.value for site in table.sites} == recorded | ({"Routes"} if replay else set())
    audit = audit_table(make_shape(4), spec)
    assert {site.kind.value for site in audit.sites} == audited
    assert all((site.code_bits, site.scale_bits) == (4, 8) for site in audit.sites)
    assert all(len(layers(audit, SiteKind(kind))) == 4 for kind in audited)


def test_second_input_rows_follow_the_expert_slots() -> None:
    table = site_table(MODEL_35B, make_spec(replay=False, secondInput="Recorded"))
    site = table.find(39, SiteKind.FC2_INPUT)
    assert site is not None
    assert (site.dim, site.groups, site.blocks) == (8 * 512, 8, 256)


@pytest.mark.parametrize(("experts", "size", "name"), [(256, 1, "U8"), (257, 2, "U16")])
def test_width_of_expert_ids(experts: int, size: int, name: str) -> None:
    table = site_table(make_shape(1, experts=experts, top_k=5), make_spec(method="BF16"))
    assert [(site.format, site.row_bytes) for site in table.sites] == [(name, 5 * size)]


def test_offsets_lay_sites_side_by_side() -> None:
    table = site_table(BUILTIN_MODELS["tiny-moe"], make_spec())
    at = 0
    for index, site in enumerate(table.sites):
        assert (table.index(site), table.offset(site)) == (index, at)
        assert table.find(site.layer, site.kind) is site
        at += site.row_bytes
    assert at == table.row_bytes == 58
    assert table.find(0, SiteKind.KEY) is None
    with pytest.raises(KeyError):
        table.offset(site_table(make_shape(4), make_spec()).sites[-2])


def test_every_part_of_the_contract_changes_the_digest() -> None:
    specs = [
        make_spec(),
        make_spec(replay=False),
        make_spec(format="MXFP4"),
        make_spec(order="TorchAO"),
        make_spec(tensorScale="PerToken"),
        make_spec(tensorScale="PerVersion"),
        make_spec(trace={"codeBits": 2}),
        make_spec(trace={"scaleBits": 2}),
        make_spec(trace={"layers": {"policy": "All"}}),
        make_spec(targets=["KVCache"]),
        make_spec(dtype="Float32"),
    ]
    wide = make_shape(2, head_dim=32, hidden=64, expert_hidden=32)
    digests = [site_table(wide, spec).digest for spec in specs]
    digests += [audit_table(wide, make_spec(trace={"layers": {"policy": "All"}})).digest]
    digests += [site_table(make_shape(2, kv_heads=2, head_dim=64), make_spec()).digest]
    assert len(set(digests)) == len(digests)


def test_what_the_trainer_alone_decides_does_not_change_the_digest() -> None:
    shape = make_shape(2)
    other = make_spec(trace={"ratioFrom": "Unguided", "driftBand": "0.1", "maxGuidedVersionDiff": 1})
    assert site_table(shape, other).digest == site_table(shape, make_spec()).digest


@pytest.mark.parametrize("dimension", ["hidden", "head_dim"])
def test_a_width_that_has_no_whole_blocks_is_refused(dimension: str) -> None:
    with pytest.raises(InputError, match=r"24 values a group.*blocks of 16"):
        site_table(make_shape(2, **{dimension: 24}), make_spec())


@pytest.mark.parametrize("parts", range(1, 10))
def test_parts_hold_every_group_once(parts: int) -> None:
    table = site_table(make_shape(2, kv_heads=4), make_spec(secondInput="Recorded"))
    held: Counter[tuple[int, int]] = Counter()
    for part in range(parts):
        for piece in table.select(part, parts):
            held.update((piece.site, group) for group in range(piece.start, piece.stop))
    assert held == {(i, group): 1 for i, site in enumerate(table.sites) for group in range(site.groups)}


def test_more_ranks_than_heads() -> None:
    table = site_table(make_shape(2, kv_heads=2), make_spec(replay=False, targets=["KVCache"]))
    chosen = [table.select(part, 4) for part in range(4)]
    assert chosen == [
        (SiteSlice(0, 0, 1), SiteSlice(1, 0, 1)),
        (),
        (SiteSlice(0, 1, 2), SiteSlice(1, 1, 2)),
        (),
    ]
