"""A rank that needs some sites reads those sections alone, from a ring in place and from another node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from record_stores import JOB_UID, RUN_ID, ThreadStore, shared_directory

from tracerl.api.job import Reprefill, Spec
from tracerl.api.model import BUILTIN_MODELS
from tracerl.engines.base import Trajectory
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.pairing import RecordEntry
from tracerl.records.partial import Selection
from tracerl.records.sites import SiteKind, SiteSlice, audit_table, site_table
from tracerl.rl.loading import RecordLoader

ROWS = 300
SHAPE = BUILTIN_MODELS["tiny-moe"]
SPEC = Spec.model_validate(
    {
        "model": {"uri": "builtin://tiny-moe"},
        "task": {"name": "builtin/chain_sum"},
        "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2},
        "method": {"name": "TRACE"},
    }
)


@pytest.mark.parametrize("where", ["near", "far"])
def test_a_rank_reads_its_layer(where: str, tmp_path: Path) -> None:
    table = site_table(SHAPE, SPEC)
    layer = table.sites[-1].layer
    slices = [
        SiteSlice(index, 0, site.groups)
        for index, site in enumerate(table.sites)
        if site.layer == layer and site.kind is not SiteKind.EXPERT_INPUT
    ]
    selection = Selection(table, slices)
    assert selection.sparse()
    rng = np.random.default_rng(0)
    with shared_directory() as directory:
        store = ThreadStore(directory / "store-0")
        sink, source = store.sink(), getattr(store, where)()
        trajectories, rows = [], {}
        for id in ("a", "b"):
            # Any bits will do, but for expert ids, which must exist.
            rows[id] = rng.integers(0, 2, (ROWS, table.row_bytes), dtype=np.uint8)
            header = FrameHeader(
                job_uid=JOB_UID,
                run_id=RUN_ID,
                trajectory=id,
                part=0,
                parts=1,
                row_start=0,
                row_stop=ROWS,
                version=0,
                table_digest=table.digest,
            )
            handle = sink.put(encode_frame(header, table, rows[id]), header.key)
            trajectories.append(
                Trajectory(
                    id=id,
                    tokens=torch.zeros(ROWS + 1, dtype=torch.int64),
                    prompt_tokens=1,
                    logp_rollout=torch.zeros(ROWS),
                    token_versions=[0] * ROWS,
                    entries=[RecordEntry(handle, 0, 1, 0, ROWS)],
                )
            )
        loader = RecordLoader(
            source,
            table,
            audit_table(SHAPE, SPEC),
            job_uid=JOB_UID,
            run_id=RUN_ID,
            reprefill=Reprefill.AS_SAMPLED,
            selections=(selection, None),
        )
        loaded = loader.load(trajectories)
        counts = loader.take_counts()
        loader.close()
        source.close()
        sink.close()
        store.close()
    columns = np.concatenate(
        [np.arange(table.columns[piece.site], table.columns[piece.site + 1]) for piece in slices]
    )
    for trajectory in loaded:
        assert trajectory.records is not None
        assert trajectory.records.missing == {}
        assert np.array_equal(trajectory.records.rows.numpy(), rows[trajectory.id][:, columns])
    wanted = 2 * ROWS * selection.table.row_bytes
    assert wanted < counts.bytes <= wanted + 2 * 2 * selection.preamble_guess
    assert counts.bytes < 2 * ROWS * table.row_bytes / 2
