"""Records of values that another rank computes: they go where Megatron sends the tokens.

An expert's second input is a value of (token, expert slot), computed by the rank that holds the expert; its
record is with the rank that has the token. So every rank of the expert group shows the others what its
records say of its slots, and each takes what belongs to the pairs that its experts got.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tracerl.engines.guided import Recorded, rows_of
from tracerl.engines.megatron.slicing import Held, expert_order
from tracerl.numerics import Guide, TensorScale, pack_bits, unpack_bits

_WHOLE_CODE, _WHOLE_SCALE = 4, 8
"""Bits of an audit's codes and scales."""


@dataclass(frozen=True)
class Arrivals:
    """Which (token, slot) pairs the experts of a rank get in one layer, and how records follow them there."""

    held: Held
    ids: Tensor
    """int64 [P, top_k]: experts of this rank's padded tokens."""
    experts: range
    """Those that this rank holds."""
    group: dist.ProcessGroup | None
    """Ranks whose experts compute each other's tokens; None for a rank that holds all experts."""
    width: int
    """Values of a pair."""
    blocks: int

    def records(self, recorded: Recorded, *, audited: bool) -> Recorded:
        """Turn records of the rows that this rank has into those of the pairs that it computes, in order.

        `audited` says whether any rank of the group knows whole codes. All ranks of a group call this
        together, with guides of the same widths.
        """
        guide, whole, mine = recorded.guide, None, None
        if guide is None and not audited:
            return recorded
        order = expert_order(self._gathered(self.ids), self.experts)
        if guide is not None:
            guide = self._moved(guide, order)
        if audited:
            every = self._moved(self._spread(recorded), order)
            assert every.present is not None
            mine = every.present.nonzero().squeeze(1)
            whole = rows_of(every, mine)
        return Recorded(guide, mine, whole)

    def _gathered(self, own: Tensor) -> Tensor:
        """Put the tensors [P, ...] of all ranks of the group together, rank by rank."""
        if self.group is None:
            return own
        found = own.new_empty(self.group.size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(found, own.contiguous(), group=self.group)
        return found

    def _moved(self, guide: Guide, order: Tensor) -> Guide:
        """Give the guide of pairs, of one of rows: a pair's fields travel as whole bytes."""
        rows, slots = len(self.held.slots), self.ids.shape[1]
        pairs = rows * slots
        codes = guide.codes.reshape(pairs, self.width * guide.code_bits // 8)
        scales = unpack_bits(guide.scales, guide.scale_bits, slots * self.blocks)
        scales = pack_bits(scales.reshape(pairs, self.blocks), guide.scale_bits)
        zero = codes.new_zeros(pairs, self.blocks)
        if guide.zero_blocks is not None:
            zero = guide.zero_blocks.reshape(zero.shape).to(torch.uint8)
        present = codes.new_ones(rows)
        if guide.present is not None:
            present = guide.present.to(torch.uint8)
        fields = (codes, scales, zero, present.repeat_interleave(slots).unsqueeze(1))
        width = sum(field.shape[1] for field in fields)
        bytes_nW = torch.cat(fields, dim=1).view(rows, slots * width)
        places_PW = self.held.put(bytes_nW.new_zeros(self.held.size, slots * width), bytes_nW)
        found = self._gathered(places_PW).view(-1, width).index_select(0, order)
        codes, scales, zero, present = torch.split(found, [field.shape[1] for field in fields], dim=1)
        return Guide(
            codes,
            scales,
            guide.code_bits,
            guide.scale_bits,
            guide.tensor_scale,
            zero_blocks=zero.bool(),
            present=present.squeeze(1).bool(),
        )

    def _spread(self, recorded: Recorded) -> Guide:
        """Give whole codes of all rows of this rank, absent where nothing is known."""
        rows, slots = len(self.held.slots), self.ids.shape[1]
        byte = torch.zeros(rows, 1, dtype=torch.uint8, device=self.ids.device)
        codes = byte.repeat(1, slots * self.width * _WHOLE_CODE // 8)
        scales, present = byte.repeat(1, slots * self.blocks), byte.squeeze(1).bool()
        if recorded.audited is not None and recorded.whole is not None:
            codes = codes.index_copy(0, recorded.audited, recorded.whole.codes)
            scales = scales.index_copy(0, recorded.audited, recorded.whole.scales)
            present = present.index_fill(0, recorded.audited, value=True)
        return Guide(codes, scales, _WHOLE_CODE, _WHOLE_SCALE, TensorScale.one(), present=present)
