"""Batching: guides and routes of a stream of trajectories, against the trajectories one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from record_builders import JOB, RUN, TRAJECTORY, Store, make_header, make_shape, make_spec

from tracerl.api.job import Spec
from tracerl.numerics import Guide, TensorScale, guided_quantize, quantize, unpack_bits
from tracerl.records.batch import RecordStream
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


def stream(
    table: SiteTable, records: list[TrajectoryRecords | None], lengths: tuple[int, ...]
) -> tuple[RecordStream, list[slice]]:
    """The stream of trajectories, and where each of them lies in it."""
    starts = np.cumsum([0, *lengths])
    spans = [slice(int(a), int(b)) for a, b in pairwise(starts)]
    return RecordStream(table, records, lengths), spans


@pytest.mark.parametrize("spec", specs())
def test_a_streams_guide_guides_every_row_as_its_own_record_would(spec: Spec) -> None:
    table = site_table(SHAPE, spec)
    made = [recorded(table, n, seed=n, lost=(2, 4) if n == 7 else None, scale=0.5 * n) for n in (7, 4, 5)]
    records = [made[0][0], None, made[1][0], made[2][0]]
    truths = [made[0][1], None, made[1][1], made[2][1]]
    every, spans = stream(table, records, (7, 3, 4, 5))
    present = [True] * 2 + [False] * 2 + [True] * 3 + [False] * 3 + [True] * 9
    rng = torch.Generator().manual_seed(9)
    for site in table.sites:
        if site.kind is SiteKind.ROUTES:
            continue
        guide = every.guide(site)
        assert guide.codes.shape == (19, site.code_bytes)
        assert guide.scales.shape == (19, site.scale_bytes)
        assert guide.present is not None
        assert guide.present.tolist() == present
        x = torch.randn(19, site.dim, generator=rng)
        together = guided_quantize(x, guide)
        for span, truth in zip(spans, truths, strict=True):
            if truth is None:
                continue
            own = Guide.of(truth[site.layer, site.kind], site.code_bits, site.scale_bits)
            alone = guided_quantize(x[span], own)
            here = guide.present[span]
            assert torch.equal(together.codes[span][here], alone.codes[here])
            assert torch.equal(together.scales[span][here], alone.scales[here])


def test_zero_blocks_stay_with_their_rows() -> None:
    table = site_table(SHAPE, make_spec())
    made = [recorded(table, n, seed=n) for n in (7, 4)]
    site = table.find(1, SiteKind.KEY)
    assert site is not None
    every, _ = stream(table, [records for records, _ in made], (7, 4))
    wanted = torch.cat([truth[1, SiteKind.KEY].scales == 0 for _, truth in made])
    assert wanted.any()
    zero_blocks = every.guide(site).zero_blocks
    assert zero_blocks is not None
    assert torch.equal(zero_blocks, wanted)


def test_a_mask_takes_rows_out() -> None:
    table = site_table(SHAPE, make_spec())
    records, truth = recorded(table, 4, seed=1)
    site = table.find(1, SiteKind.EXPERT_INPUT)
    assert site is not None
    every, _ = stream(table, [records], (4,))
    guide = every.guide(site, torch.tensor([True, False, True, True]))
    assert guide.present is not None
    assert guide.present.tolist() == [True, False, True, True]
    low = unpack_bits(guide.codes, 1, site.dim)
    assert torch.equal(low, truth[1, SiteKind.EXPERT_INPUT].codes & 1)


def test_routes_of_a_stream() -> None:
    table = site_table(SHAPE, make_spec())
    made = [recorded(table, n, seed=n, lost=(1, 2) if n == 5 else None) for n in (5, 3)]
    site = table.find(0, SiteKind.ROUTES)
    assert site is not None
    every, _ = stream(table, [made[0][0], None, made[1][0]], (5, 2, 3))
    ids, present = every.routes(site)
    assert (ids.shape, ids.dtype) == ((10, 2), torch.int64)
    assert present.tolist() == [True, False, True, True, True, False, False, True, True, True]
    wanted = torch.cat([made[0][1][0, SiteKind.ROUTES], torch.zeros(2, 2), made[1][1][0, SiteKind.ROUTES]])
    assert torch.equal(ids[present], wanted[present].long())


def test_records_of_another_table_or_length_are_absent() -> None:
    table = site_table(SHAPE, make_spec())
    records, _ = recorded(table, 4, seed=1)
    other, _ = recorded(site_table(SHAPE, make_spec(trace={"codeBits": 2})), 4, seed=1)
    every, spans = stream(table, [other, records, records], (4, 3, 4))
    assert every.present.any(dim=1).tolist() == [False] * 7 + [True] * 4
    assert every.versions.tolist() == [-1] * 7 + [3] * 4
    assert torch.equal(every.rows[spans[2]], records.rows)


def test_what_has_no_guide_is_refused() -> None:
    table = site_table(SHAPE, make_spec())
    records, _ = recorded(table, 4, seed=1)
    routes = table.find(1, SiteKind.ROUTES)
    other = site_table(SHAPE, make_spec(trace={"codeBits": 2})).find(1, SiteKind.KEY)
    assert routes is not None
    assert other is not None
    every, _ = stream(table, [records], (4,))
    with pytest.raises(ValueError, match="layer 1 Routes is not quantised"):
        every.guide(routes)
    with pytest.raises(KeyError):
        every.guide(other)
