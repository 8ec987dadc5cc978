"""Tables, rows and frames that the record tests share; rows hold random but valid bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracerl.api.frames import Handle, format_handle
from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.pairing import RecordEntry
from tracerl.records.sites import SiteTable

JOB, RUN, TRAJECTORY = "job-uid", "run-1", "t-0"


def make_spec(
    *,
    method: str = "TRACE",
    replay: bool = True,
    dtype: str = "BFloat16",
    trace: dict[str, Any] | None = None,
    **q: Any,
) -> Spec:
    return Spec.model_validate(
        {
            "model": {"uri": "builtin://tiny-moe", "dtype": dtype},
            "task": {"name": "builtin/chain_sum"},
            "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2, "routingReplay": replay},
            "quantization": q,
            "method": {"name": method, "trace": trace},
        }
    )


def make_shape(layers: int = 2, **dimensions: int) -> ModelShape:
    sizes = {
        "hidden": 32,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "experts": 8,
        "top_k": 2,
        "expert_hidden": 16,
        "vocab": 64,
        "context": 128,
    }
    return ModelShape.uniform(layers, **{**sizes, **dimensions})


def random_rows(table: SiteTable, n: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows whose unused bits are 0 and whose expert ids and whole scales are possible."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((n, table.row_bytes), np.uint8)
    for site in table.sites:
        at = table.offset(site)
        if site.experts:
            ids = rng.integers(0, site.experts, (n, site.dim))
            raw = ids.astype("u1" if site.format == "U8" else "<u2").view(np.uint8).reshape(n, -1)
            rows[:, at : at + site.row_bytes] = raw
            continue
        for count, bits, high in ((site.dim, site.code_bits, 16), (site.blocks, site.scale_bits, 127)):
            values = rng.integers(0, high, (n, count)) & ((1 << bits) - 1)
            packed = [sum(int(v) << (i * bits) for i, v in enumerate(row)) for row in values]
            size = (count * bits + 7) // 8
            for t, number in enumerate(packed):
                rows[t, at : at + size] = np.frombuffer(number.to_bytes(size, "little"), np.uint8)
            at += size
        if site.tensor_scale == "PerToken":
            rows[:, at : at + 4] = rng.uniform(0.5, 2, (n, 1)).astype("<f4").view(np.uint8)
    return rows


def slice_rows(table: SiteTable, rows: NDArray[np.uint8], part: int, parts: int) -> NDArray[np.uint8]:
    """What one rank holds of whole rows, bit by bit through Python integers."""
    columns = []
    for piece in table.select(part, parts):
        site, offset = table.sites[piece.site], table.offset(table.sites[piece.site])
        whole = rows[:, offset : offset + site.row_bytes]
        if piece.stop - piece.start == site.groups:
            columns.append(whole)
            continue
        width, held = site.dim // site.groups, piece.stop - piece.start
        fields = (
            (0, site.code_bytes, width * site.code_bits),
            (site.code_bytes, site.scale_bytes, width // site.block * site.scale_bits),
        )
        for at, size, bits in fields:
            numbers = [int.from_bytes(row[at : at + size].tobytes(), "little") for row in whole]
            cut = [(number >> (bits * piece.start)) & ((1 << (bits * held)) - 1) for number in numbers]
            length = (bits * held + 7) // 8
            columns.append(
                np.array([list(number.to_bytes(length, "little")) for number in cut], np.uint8).reshape(
                    -1, length
                )
            )
        columns.append(whole[:, site.code_bytes + site.scale_bytes :])
    return np.concatenate([np.zeros((len(rows), 0), np.uint8), *columns], axis=1)


def make_header(table: SiteTable, start: int, stop: int, **changes: Any) -> FrameHeader:
    values = {
        "job_uid": JOB,
        "run_id": RUN,
        "trajectory": TRAJECTORY,
        "part": 0,
        "parts": 1,
        "row_start": start,
        "row_stop": stop,
        "version": 3,
        "table_digest": table.digest,
        "audit": table.audit,
    }
    return FrameHeader(**{**values, **changes})


def handle_of(data: bytes, name: str) -> Handle:
    return format_handle("store", name, len(data), xxhash.xxh3_64_intdigest(data))


class Store:
    """Frames by handle, as a transport would hold them."""

    def __init__(self) -> None:
        self.frames: dict[Handle, bytes] = {}

    def put(self, data: bytes) -> Handle:
        handle = handle_of(data, f"{len(self.frames)}.trec")
        self.frames[handle] = data
        return handle

    def get(self, handle: Handle) -> memoryview:
        try:
            return memoryview(self.frames[handle])
        except KeyError:
            raise FileNotFoundError(handle) from None


def write_frames(
    store: Store,
    table: SiteTable,
    rows: NDArray[np.uint8],
    versions: Sequence[int],
    *,
    chunk: int = 8,
    parts: int = 1,
    **changes: Any,
) -> list[RecordEntry]:
    """Frames of at most `chunk` rows and one version, for every part that holds anything."""
    entries = []
    for part in range(parts):
        slices = table.select(part, parts)
        if not slices:
            continue
        held = slice_rows(table, rows, part, parts)
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and stop - start < chunk and versions[stop] == versions[start]:
                stop += 1
            header = make_header(
                table, start, stop, part=part, parts=parts, version=versions[start], **changes
            )
            data = encode_frame(header, table, held[start:stop], slices=slices)
            entries.append(RecordEntry(store.put(data), part, parts, start, stop, table.audit))
            start = stop
    return entries
