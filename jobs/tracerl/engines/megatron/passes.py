"""A pass of Megatron's model over sequences, which goes through the pipeline's stages piece by piece.

Ranks that compute together agree on the number of pieces, what they are padded to, and how a pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor

from tracerl.engines.guided import Treatments, pass_mask
from tracerl.engines.megatron.layers import Piece, Seat
from tracerl.engines.megatron.slicing import (
    Held,
    Place,
    context_positions,
    layers_of,
    pieces_of,
    sequence_positions,
)
from tracerl.engines.megatron.stages import Stages
from tracerl.numerics import NonFiniteError
from tracerl.records.sites import SiteKind

_NAME_BYTES = 128
"""Of a site, between ranks."""


@dataclass(frozen=True)
class Rows:
    """Sequences one after the other, and what follows some of their rows."""

    tokens: Tensor
    """int64 [N]."""
    lengths: list[int]
    """Rows of each sequence."""
    predicting: Tensor
    """int64 [M]: rows that predict."""
    targets: Tensor
    """int64 [M]: the tokens behind them."""
    treatments: Treatments | None = None
    """What is done to the values of its sites; None in a warm-up."""
    longest: int = 1
    """Rows of the longest sequence that these are padded with, on any rank."""


@dataclass(frozen=True)
class Passed:
    """A piece that has gone through this rank's layers forward, and can go back."""

    piece: Piece
    came: Tensor | None
    """Hidden states [positions, B, hidden] from the stage before."""
    left: Tensor
    """Log-probs [M] on the last stage, hidden states on the others."""


class _Layout(NamedTuple):
    """What a piece is padded to, and what any of the ranks does to it."""

    longest: int
    """Tokens of a sequence, padded."""
    batch: int
    """Sequences; at least one, which may be all padding."""
    fc2_treated: bool
    fc2_audited: bool


class Passes:
    """What a rank's passes go through, and the ranks that it does them with."""

    def __init__(self, hidden: int, layers: int, place: Place, seat: Seat, device: torch.device) -> None:
        """`hidden` and `layers` are the whole model's."""
        self._hidden, self._layers = hidden, layers_of(layers, place)
        self._place, self._seat, self._device = place, seat, device
        self._stages = Stages(place.pipeline)

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Numbers of the sequences of each piece; ranks that compute together have equally many pieces."""
        (most,) = self.largest(len(lengths))
        return pieces_of(lengths, self._stages.pieces(most))

    def forward(
        self, model: GPTModel, pieces: Sequence[Rows], temperature: float = 1.0
    ) -> tuple[list[Tensor], list[Passed]]:
        """Log-probs float32 [M] of the tokens behind each piece's rows, detached, and what `backward` takes.

        The seat keeps the last piece. All ranks of a unit give the same log-probs. Raises `NonFiniteError` on
        all ranks that compute together.
        """
        passed = []
        layouts = self._layouts(pieces)
        with self.agreed():
            for rows, layout in zip(pieces, layouts, strict=True):
                passed.append(self._piece(model, rows, layout, temperature))
            self._stages.settle()
        if self._stages.last:
            logp_M = torch.cat([one.left.detach() for one in passed])
        else:
            logp_M = torch.empty(sum(len(rows.targets) for rows in pieces), device=self._device)
        logp_M = self._stages.share(logp_M)
        return list(torch.split(logp_M, [len(rows.targets) for rows in pieces])), passed

    def backward(self, passed: list[Passed], gradients: Sequence[Tensor]) -> None:
        """Add the gradient of each piece's log-probs [M] to the parameters'; empties `passed`."""
        for gradient_M in reversed(gradients):
            one = passed.pop()
            self._seat.piece = one.piece
            if one.piece.treatments is not None:
                one.piece.treatments.repeat()
            last = self._stages.last
            torch.autograd.backward(
                one.left, gradient_M if last else self._stages.receive(one.left, onward=False)
            )
            if one.came is not None:
                assert one.came.grad is not None
                self._stages.send(one.came.grad, onward=False)
        self._stages.settle()

    def _layouts(self, pieces: Sequence[Rows]) -> list[_Layout]:
        """Layouts of pieces, in which ranks that compute together are alike."""
        asked: list[int] = []
        for rows in pieces:
            longest = max([rows.longest, *rows.lengths])
            asked += [self._place.padded(longest), max(len(rows.lengths), 1)]
            treatments = rows.treatments
            asked += [
                treatments is not None and treatments.touches(SiteKind.FC2_INPUT, self._layers),
                treatments is not None and treatments.audits,
            ]
        found = iter(self.largest(*asked))
        return [
            _Layout(longest, batch, bool(treated), bool(audited))
            for longest, batch, treated, audited in zip(found, found, found, found, strict=True)
        ]

    def _piece(self, model: GPTModel, rows: Rows, layout: _Layout, temperature: float) -> Passed:
        place, device = self._place, self._device
        longest, batch = layout.longest, layout.batch
        lengths = [*rows.lengths, *[0] * (batch - len(rows.lengths))]
        every = Held.of(lengths, torch.arange(longest)).to(device)
        position_P = context_positions(longest, place)
        attended = Held.of(lengths, position_P).to(device)
        sequence = Held.of(lengths, sequence_positions(longest, place)).to(device)
        starts_N = None if rows.treatments is None else rows.treatments.exact_from()
        mask = None
        if starts_N is not None:
            # Padding attends what is stored: nothing that counts sees it.
            after_P1 = torch.arange(1, longest + 1, device=device).repeat_interleave(batch).unsqueeze(1)
            starts_P1 = every.put(after_P1, starts_N.unsqueeze(1))
            mask = pass_mask(starts_P1.view(longest, batch).t()).unsqueeze(1)
        piece = Piece(rows.treatments, sequence, attended, layout.fc2_treated, layout.fc2_audited, mask)
        self._seat.piece = piece
        came = None
        if not self._stages.first:
            shape = (sequence.size // batch, batch, self._hidden)
            like = torch.empty(shape, dtype=model.config.pipeline_dtype, device=device)
            came = self._stages.receive(like, onward=True).requires_grad_()
            model.set_input_tensor(came)
        tokens_P1 = every.put(rows.tokens.new_zeros(every.size, 1), rows.tokens.unsqueeze(1))
        position_P = position_P.to(device)
        tokens_BP = tokens_P1.view(longest, batch).t().index_select(1, position_P)
        # Keys are in the order of the context-parallel ranks.
        key_S = torch.cat(
            [context_positions(longest, replace(place, context_rank=rank)) for rank in range(place.context)]
        ).to(device)
        future_PS = key_S > position_P.unsqueeze(1)
        out: Tensor = model(tokens_BP, position_P.expand(batch, -1), future_PS[None, None])
        if self._stages.last:
            return Passed(piece, came, self._logp(out, rows, attended, temperature))
        self._stages.send(out, onward=True)
        return Passed(piece, came, out)

    def _logp(self, logits_BPV: Tensor, rows: Rows, attended: Held, temperature: float) -> Tensor:
        """Log-probs [M]; tensor and context parallel ranks give the same."""
        batch, positions = logits_BPV.shape[:2]
        # Of the rows that predict, those whose logits are here.
        place_N = torch.full((len(rows.tokens),), -1, dtype=torch.int64, device=self._device)
        place_N[slice(None) if attended.rows is None else attended.rows] = attended.slots
        place_M = place_N.index_select(0, rows.predicting)
        here_K = (place_M >= 0).nonzero().squeeze(1)
        place_K = place_M.index_select(0, here_K)
        at_K = (place_K % batch) * positions + place_K // batch
        logits_KV = logits_BPV.flatten(0, 1).index_select(0, at_K).float() / temperature
        logp_K: Tensor = -vocab_parallel_cross_entropy(logits_KV, rows.targets.index_select(0, here_K))
        context = self._seat.context
        if context is None:
            return logp_K
        logp_M = logp_K.new_zeros(len(rows.predicting)).index_put((here_K,), logp_K)
        found: Tensor = reduce_from_tensor_model_parallel_region(logp_M, group=context)
        return found

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks that compute together."""
        group = self._seat.unit
        if group is None:
            return list(values)
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        largest: list[int] = found.tolist()
        return largest

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Fail behind the block on all ranks that compute together, when a value of any was not finite."""
        group, seat = self._seat.unit, self._seat
        if group is None:
            yield
            return
        seat.failure = None
        try:
            yield
        except NonFiniteError as error:
            seat.failure = error
        # The first of the ranks that failed names its site, in numbers: no rank unpickles what another sends.
        turn = 0 if seat.failure is None else group.size() - group.rank()
        (first,) = self.largest(turn)
        if first == 0:
            return
        site = seat.failure.site if seat.failure is not None and turn == first else ""
        codes = self.largest(*site.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"))
        raise NonFiniteError(bytes(codes).rstrip(b"\0").decode(errors="replace"))
