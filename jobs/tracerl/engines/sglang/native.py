"""Codes as Blackwell's own kernels make them: the `Native` back end. NOT RUN: it needs FP4 arithmetic units.

SGLang quantises the experts' input in `quantize_hidden_states_fp4` and keys and values in
`NVFP4KVQuantizeUtil.quantize`; hooks behind both see the very codes and scales that are computed with. They
are packed on the device into buffers that never move, by operations that wait for nothing, so that CUDA
graphs can hold them. Tests check that these functions are there and take what is used here, and what is
packed, with codes of `tracerl.numerics` in place of the kernels'.

Two things are different from the Emulated back end. Kernels do not show the second input, so that it cannot
be recorded. And the scale above the block scales has to be 1, as the site table says: `check_input_scales`
refuses a model whose layers were calibrated to something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.engines.capture import Captured, HeldSite
from tracerl.engines.frames import NO_ZERO_BLOCKS
from tracerl.engines.sglang.seams import Seam
from tracerl.numerics import pack_bits
from tracerl.records.sites import SiteKind

EXPERT_CODES = Seam(
    "layers.moe.moe_runner.flashinfer_trtllm.quantize_hidden_states_fp4",
    ("hidden_states", "input_scale_quant"),
)
KV_STORE = Seam(
    "mem_cache.memory_pool.MHATokenToKVPool._set_quantized_kv_buffer",
    ("self", "layer_id", "global_layer_id", "loc_info", "cache_k", "cache_v"),
)
KV_CODES = Seam("layers.quantization.kvfp4_tensor.NVFP4KVQuantizeUtil.quantize", ("tensor", "global_scale"))
HOOKED = (EXPERT_CODES, KV_STORE, KV_CODES)
"""Seams that this back end hooks besides those of the Emulated one."""


class NativeCapture:
    """Static device buffers of packed rows; in the place of a `SiteCapture`."""

    rounds_fc2 = False
    capture_seconds = 0.0
    """Nothing is computed for records alone but packing, which runs on the device."""
    pack_seconds = 0.0

    def __init__(self, held: Sequence[HeldSite], rows: int, device: torch.device | str) -> None:
        """`rows` bounds the tokens of a pass."""
        self._held = list(held)
        self._at = {(one.site.layer, one.site.kind): index for index, one in enumerate(held)}
        widths = [one.site.row_bytes for one in held]
        blocks = [one.site.blocks for one in held]
        self._column = np.cumsum([0, *widths])
        self._block = np.cumsum([0, *blocks])
        self._rows = torch.zeros((rows, int(self._column[-1])), dtype=torch.uint8, device=device)
        self._zero = torch.zeros((rows, int(self._block[-1])), dtype=torch.bool, device=device)
        self.kv_layer: int | None = None
        """Whose keys, then values, are quantised next."""
        self._kv_kind = SiteKind.KEY

    def begin_key_value(self, layer: int) -> None:
        """Say whose keys and values are stored next."""
        self.kv_layer, self._kv_kind = layer, SiteKind.KEY

    def expert_input(self, layer: int, packed: Tensor, scales: Tensor) -> None:
        """Keep codes [T, hidden / 2], two a byte with the even one low, and block scales [T, hidden / 16]."""
        self._put(layer, SiteKind.EXPERT_INPUT, packed, scales)

    def key_value(self, packed: Tensor, scales: Tensor) -> None:
        """Keep codes [T, heads, head_dim / 2] and scales of keys, and at the next call of values."""
        if self.kv_layer is None:
            return
        self._put(self.kv_layer, self._kv_kind, packed.flatten(1), scales.flatten(1))
        self._kv_kind = SiteKind.VALUE

    def routes(self, layer: int, ids: Tensor) -> None:
        """Keep the experts [N, top_k] that were chosen."""
        index = self._at.get((layer, SiteKind.ROUTES))
        if index is None:
            return
        low = (ids & 0xFF).to(torch.uint8)
        if self._held[index].site.format != "U8":
            low = torch.stack((low, (ids >> 8).to(torch.uint8)), dim=-1).flatten(-2)
        self._rows[: len(ids), self._columns(index)] = low

    def finish(self, rows: int) -> tuple[Captured, None]:
        """Rows with a tail that tells zero blocks; `complete` makes both of it on the host."""
        tail = pack_bits(self._zero[:rows].to(torch.uint8), 1)
        return Captured(torch.cat([self._rows[:rows], tail], dim=1), NO_ZERO_BLOCKS), None

    def complete(self, captured: Captured) -> Captured:
        """Take the tail off rows that are on the host."""
        rows = captured.rows.numpy()
        width, blocks = int(self._column[-1]), int(self._block[-1])
        bits = np.unpackbits(rows[:, width:], axis=1, count=blocks, bitorder="little")
        row, block = np.nonzero(bits)
        site = np.searchsorted(self._block, block, side="right") - 1
        first = np.array([one.first_block for one in self._held])[site]
        index = np.array([one.index for one in self._held])[site]
        zero = np.stack([row, index, block - self._block[site] + first], axis=1).astype(np.int64)
        return Captured(torch.from_numpy(rows[:, :width]), zero)

    def reset(self) -> None:
        """Do nothing: every pass writes all that it reads."""

    def _put(self, layer: int, kind: SiteKind, packed: Tensor, scales: Tensor) -> None:
        index = self._at.get((layer, kind))
        if index is None:
            return
        site = self._held[index].site
        packed, scale_codes = packed.view(torch.uint8), scales.view(torch.uint8)
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        row = torch.cat([pack_bits(codes, site.code_bits), pack_bits(scale_codes, site.scale_bits)], dim=-1)
        n = len(row)
        self._rows[:n, self._columns(index)] = row
        self._zero[:n, int(self._block[index]) : int(self._block[index + 1])] = scale_codes == 0

    def _columns(self, index: int) -> slice:
        return slice(int(self._column[index]), int(self._column[index + 1]))


def check_input_scales(layers: Sequence[Any]) -> None:
    """Raise JobError when an expert layer scales its input before it is quantised."""
    for layer in layers:
        scale = getattr(layer, "w13_input_scale_quant", None)
        if scale is not None and not bool((scale == 1).all()):
            raise JobError(
                Reason.CONFIGURATION,
                f"layer {layer.layer_id} scales its experts' input by {float(scale.max()):g} before it is "
                "quantised, but the site table has fixed tensor scales of 1; use a checkpoint without input "
                "scales",
            )
