"""Which rows, layers, heads and experts of a batch's records a rank of a parallel layout computes with.

Pure index maths, without Megatron, of what Megatron's own code does; the tests compare the two. A site of a
record is one layer's; a row is one token of one trajectory; a group is a KV head (Key, Value) or an expert
slot (FC2Input).

    layout            rows                                   sites and groups
    data              its trajectories                       all
    context           chunks r and 2c-1-r of 2c              all
    sequence (TP)     ExpertInput, Routes: 1/t, contiguous   Key, Value: its heads, all rows
    expert            those of its own tokens                all; FC2Input follows them (`dispatch`)
    pipeline          all                                    those of its layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracerl.records.partial import Selection
from tracerl.records.sites import SiteKind, SiteSlice, SiteTable


@dataclass(frozen=True)
class Place:
    """A rank's place in a parallel layout: size and rank along each axis."""

    tensor: int = 1
    tensor_rank: int = 0
    context: int = 1
    context_rank: int = 0
    pipeline: int = 1
    pipeline_rank: int = 0
    expert: int = 1
    expert_rank: int = 0

    @property
    def first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether it has the output layer."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def multiple(self) -> int:
        """What a padded sequence length must be a multiple of, so that every rank holds equally much."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)

    def padded(self, longest: int) -> int:
        """Length that sequences are padded to, of which the longest has so many rows."""
        return -(-longest // self.multiple) * self.multiple


def context_positions(length: int, place: Place) -> Tensor:
    """Positions of a sequence that a context-parallel rank holds, in its order, int64 [length / context].

    The sequence is cut into 2c chunks and rank r holds chunks r and 2c-1-r: under a causal mask that is equal
    work for all.
    """
    if place.context == 1:
        return torch.arange(length)
    chunk = length // (2 * place.context)
    first, second = context_chunks(place.context_rank, place.context)
    steps = torch.arange(chunk)
    return torch.cat([first * chunk + steps, second * chunk + steps])


def context_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Numbers of the two chunks of a sequence that a context-parallel rank holds."""
    return rank, 2 * ranks - 1 - rank


def sequence_positions(length: int, place: Place) -> Tensor:
    """Positions whose residual stream a rank holds: of its context part 1/t, contiguous, by tensor rank.

    Megatron's sequence parallelism, which it demands of MoE layers under tensor parallelism.
    """
    held = context_positions(length, place)
    part = len(held) // place.tensor
    return held[place.tensor_rank * part : (place.tensor_rank + 1) * part]


def rows_of(kind: SiteKind, longest: int, place: Place) -> NDArray[np.bool_]:
    """Which positions of padded sequences a rank needs of a kind of site, bool [place.padded(longest)].

    ExactFrom of all: it says what rows attend.
    """
    length = place.padded(longest)
    needed = np.full(length, kind is SiteKind.EXACT_FROM)
    if kind in {SiteKind.KEY, SiteKind.VALUE}:
        needed[context_positions(length, place).numpy()] = True
    else:
        needed[sequence_positions(length, place).numpy()] = True
    return needed


def layers_of(layers: int, place: Place) -> range:
    """Layers of a pipeline rank, which holds equally many as the others, from 0."""
    held = layers // place.pipeline
    return range(place.pipeline_rank * held, (place.pipeline_rank + 1) * held)


def pieces_of(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Cut trajectories into `count` pieces for a pipeline; gives the numbers of each one's, maybe none.

    Those of about the same length go together, as they are padded to the longest, and the shortest first.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    size, more = divmod(len(order), count)
    bounds = [piece * size + min(piece, more) for piece in range(count + 1)]
    return [sorted(order[start:stop]) for start, stop in pairwise(bounds)]


def heads_of(heads: int, place: Place) -> range:
    """KV heads of a tensor-parallel rank; query heads follow their group."""
    held = heads // place.tensor
    return range(place.tensor_rank * held, (place.tensor_rank + 1) * held)


def experts_of(experts: int, place: Place) -> range:
    """Experts whose weights an expert-parallel rank holds."""
    held = experts // place.expert
    return range(place.expert_rank * held, (place.expert_rank + 1) * held)


def selection_of(table: SiteTable, layers: int, place: Place) -> Selection | None:
    """What a rank fetches of a record: its layers' sites, of Key and Value its heads, its rows; None is all.

    ExactFrom is of all layers.
    """
    mine = layers_of(layers, place)
    slices = []
    for index, site in enumerate(table.sites):
        if site.layer not in mine and site.kind is not SiteKind.EXACT_FROM:
            continue
        groups = range(site.groups)
        if site.kind in {SiteKind.KEY, SiteKind.VALUE}:
            groups = heads_of(site.groups, place)
        slices.append(SiteSlice(index, groups.start, groups.stop))
    apart = place.tensor * place.context > 1
    if not slices or (tuple(slices) == table.whole and not apart):
        return None
    return Selection(table, slices, partial(rows_of, place=place) if apart else None)


@dataclass(frozen=True)
class Held:
    """The rows of a batch's stream that lie on a rank, among the padded tokens [positions, B] that it has."""

    slots: Tensor
    """int64 [n]: place of each row in [positions * B]."""
    rows: Tensor | None
    """int64 [n]: its number in the stream; None when the rank has all of them, in their order."""
    size: int
    """positions * B."""

    @classmethod
    def of(cls, lengths: Sequence[int], positions: Tensor) -> Held:
        """Place trajectories of `lengths` rows in columns, one each; `positions` are those of the rank."""
        length_B = torch.tensor(lengths, dtype=torch.int64)
        batch, longest = len(lengths), max(int(positions.max()) + 1, int(length_B.max()))
        place_S = torch.full((longest,), -1, dtype=torch.int64)
        place_S[positions] = torch.arange(len(positions))
        trajectory_N = torch.repeat_interleave(torch.arange(batch), length_B)
        start_B = length_B.cumsum(0) - length_B
        position_N = torch.arange(len(trajectory_N)) - start_B[trajectory_N]
        local_N = place_S[position_N]
        rows = (local_N >= 0).nonzero().squeeze(1)
        slots = local_N[rows] * batch + trajectory_N[rows]
        whole = len(rows) == len(trajectory_N)
        return cls(slots, None if whole else rows, len(positions) * batch)

    @property
    def padded(self) -> bool:
        """Whether any place holds no row."""
        return len(self.slots) < self.size

    def take(self, x_PW: Tensor) -> Tensor:
        """Rows [n, W] out of padded places [P, W]."""
        return x_PW.index_select(0, self.slots)

    def put(self, x_PW: Tensor, rows_nW: Tensor) -> Tensor:
        """Places [P, W] with new values of their rows; padding keeps its own."""
        if self.padded:
            return x_PW.index_copy(0, self.slots, rows_nW)
        return rows_nW.new_empty(x_PW.shape).index_copy(0, self.slots, rows_nW)

    def to(self, device: torch.device) -> Held:
        """The same on a device."""
        return Held(self.slots.to(device), None if self.rows is None else self.rows.to(device), self.size)


def expert_order(ids_PK: Tensor, experts: range) -> Tensor:
    """Order in which a rank's experts get (token, slot) pairs: by expert, then by token; int64 [pairs here].

    That of Megatron's dispatchers, by all-gather and by all-to-all. Tokens are those of all ranks of the
    expert group, rank by rank; pair p * K + k is slot k of token p.
    """
    ids, order = ids_PK.reshape(-1).sort(stable=True)
    return order[(ids >= experts.start) & (ids < experts.stop)]
