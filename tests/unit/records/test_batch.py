"""Batching: padded guides and routes of several trajectories, against the trajectories one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from record_builders import JOB, RUN, TRAJECTORY, Store, make_header, make_shape, make_spec

from tracerl.api.job import Spec
from tracerl.numerics import Guide, Quantized, TensorScale, guided_quantize, quantize, unpack_bits
from tracerl.records.batch import batch_guide, batch_routes
from tracerl.records.frame import encode_frame
from tracerl.records.pairing import RecordEntry, TrajectoryRecords, assemble
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import SiteKind, SiteTable, site_table

SHAPE = make_shape(2, experts=300)


def recorded(
    table: SiteTable, n: int, seed: int, lost: tuple[int, int] | None = None, scale: float = 1.0
) -> tuple[TrajectoryRecords, dict[tuple[int, SiteKind], Any]]:
    """A trajectory of n rows as a rollout would record it, and what it recorded; `lost` rows never arrive."""
    rng = torch.Generator().manual_seed(seed)
    rows, zero, truth = np.zeros((n, table.row_bytes), np.uint8), [], {}
    scales = {}
    for index, site in enumerate(table.sites):
        columns = slice(table.offset(site), table.offset(site) + site.row_bytes)
        if site.kind is SiteKind.ROUTES:
            ids = torch.randint(0, site.experts, (n, site.dim), generator=rng)
            truth[site.layer, site.kind] = ids
            rows[:, columns] = pack_routes(site, ids).numpy()
            continue
        x = torch.randn(n, site.dim, generator=rng)
        x[torch.rand(n, generator=rng) < 0.3, :16] = 0
        tensor_scale = TensorScale.one()
        if site.tensor_scale == "PerToken":
            tensor_scale = TensorScale(0.5 + torch.rand(n, 1, generator=rng), "encode")
        if site.tensor_scale == "PerVersion":
            tensor_scale = TensorScale(torch.tensor(scale), "encode")
            scales[index] = scale
        quantized = quantize(x, tensor_scale=tensor_scale)
        truth[site.layer, site.kind] = quantized
        packed, blocks = pack_rows(site, quantized)
        rows[:, columns] = packed.numpy()
        zero += [[row, index, block] for row, block in blocks.tolist()]
    store, entries = Store(), []
    spans = [(0, n)] if lost is None else [(0, lost[0]), (lost[1], n)]
    for start, stop in spans:
        inside = np.array([[r - start, i, b] for r, i, b in zero if start <= r < stop], np.int64).reshape(
            -1, 3
        )
        data = encode_frame(
            make_header(table, start, stop), table, rows[start:stop], inside, tensor_scales=scales
        )
        entries.append(RecordEntry(store.put(data), 0, 1, start, stop))
    records = assemble(
        entries,
        store.get,
        table,
        tokens=n + 1,
        prompt_tokens=2,
        token_versions=[3] * (n - 1),
        job_uid=JOB,
        run_id=RUN,
        trajectory=TRAJECTORY,
    )
    return records, truth


def specs() -> list[Spec]:
    return [
        make_spec(),
        make_spec(trace={"codeBits": 4, "scaleBits": 8}),
        make_spec(trace={"codeBits": 0, "scaleBits": 2}),
        make_spec(secondInput="Recorded", tensorScale="PerToken"),
        make_spec(tensorScale="PerVersion"),
    ]


@pytest.mark.parametrize("spec", specs())
def test_a_batched_guide_guides_every_row_as_its_own_record_would(spec: Spec) -> None:
    table = site_table(SHAPE, spec)
    lengths, rows = (7, 4, 5), 9
    made = [recorded(table, n, seed=n, lost=(2, 4) if n == 7 else None, scale=0.5 * n) for n in lengths]
    records = [made[0][0], None, made[1][0], made[2][0]]
    truths = [made[0][1], None, made[1][1], made[2][1]]
    rng = torch.Generator().manual_seed(9)
    for site in table.sites:
        if site.kind is SiteKind.ROUTES:
            continue
        guide = batch_guide(records, site, rows, "cpu")
        assert guide.codes.shape == (4, rows, site.code_bytes)
        assert guide.scales.shape == (4, rows, site.scale_bytes)
        present = [
            [b != 1 and r < n and not (b == 0 and r in {2, 3}) for r in range(rows)]
            for b, n in enumerate((7, 0, 4, 5))
        ]
        assert guide.present is not None
        assert guide.present.tolist() == present
        x = torch.randn(4, rows, site.dim, generator=rng)
        batched = guided_quantize(x, guide)
        for b, truth in enumerate(truths):
            if truth is None:
                continue
            whole: Quantized = truth[site.layer, site.kind]
            n = len(whole.codes)
            own = Guide.of(whole, site.code_bits, site.scale_bits)
            alone = guided_quantize(x[b, :n], own)
            here = torch.tensor(present[b][:n])
            assert torch.equal(batched.codes[b, :n][here], alone.codes[here])
            assert torch.equal(batched.scales[b, :n][here], alone.scales[here])


def test_zero_blocks_stay_with_their_rows() -> None:
    table = site_table(SHAPE, make_spec())
    made = [recorded(table, n, seed=n) for n in (7, 4)]
    site = table.find(1, SiteKind.KEY)
    assert site is not None
    guide = batch_guide([records for records, _ in made], site, 8)
    wanted = torch.zeros(2, 8, site.blocks, dtype=torch.bool)
    for b, (_, truth) in enumerate(made):
        zero = truth[1, SiteKind.KEY].scales == 0
        wanted[b, : len(zero)] = zero
    assert wanted.any()
    assert guide.zero_blocks is not None
    assert torch.equal(guide.zero_blocks, wanted)


def test_a_mask_takes_rows_out() -> None:
    table = site_table(SHAPE, make_spec())
    records, truth = recorded(table, 4, seed=1)
    site = table.find(1, SiteKind.EXPERT_INPUT)
    assert site is not None
    mask = torch.tensor([[True, False, True, True, True, True]])
    guide = batch_guide([records], site, 6, mask=mask)
    assert guide.present is not None
    assert guide.present.tolist() == [[True, False, True, True, False, False]]
    low = unpack_bits(guide.codes, 1, site.dim)
    assert torch.equal(low[0, :4], truth[1, SiteKind.EXPERT_INPUT].codes & 1)


def test_routes_of_a_batch() -> None:
    table = site_table(SHAPE, make_spec())
    made = [recorded(table, n, seed=n, lost=(1, 2) if n == 5 else None) for n in (5, 3)]
    site = table.find(0, SiteKind.ROUTES)
    assert site is not None
    ids, present = batch_routes([made[0][0], made[1][0], None], site, 6)
    assert (ids.shape, ids.dtype) == ((3, 6, 2), torch.int64)
    assert present.tolist() == [[True, False, True, True, True, False], [True] * 3 + [False] * 3, [False] * 6]
    for b, (_, truth) in enumerate(made):
        wanted = torch.where(present[b, : len(truth[0, SiteKind.ROUTES]), None], truth[0, SiteKind.ROUTES], 0)
        assert torch.equal(ids[b, : len(wanted)], wanted)
    assert not batch_routes([None, None], site, 6)[1].any()


def test_what_does_not_fit_is_refused() -> None:
    table = site_table(SHAPE, make_spec())
    records, _ = recorded(table, 4, seed=1)
    site, routes = table.find(1, SiteKind.KEY), table.find(1, SiteKind.ROUTES)
    assert site is not None
    assert routes is not None
    with pytest.raises(ValueError, match="4 rows, more than the 3"):
        batch_guide([records], site, 3)
    with pytest.raises(ValueError, match="layer 1 Routes is not quantised"):
        batch_guide([records], routes, 4)
    other = site_table(SHAPE, make_spec(trace={"codeBits": 2})).find(1, SiteKind.KEY)
    assert other is not None
    with pytest.raises(KeyError):
        batch_guide([records], other, 4)
