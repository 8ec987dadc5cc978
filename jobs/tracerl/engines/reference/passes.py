"""Forward passes of the rollout: what the scheduler asks the model for, on a CPU or on a GPU.

`EagerPasses` calls the model and waits where the caller does. On a GPU a step of decoding is a `GraphPasses`'
instead: model, capture and sampling are one CUDA graph for every size of batch, for which sizes are rounded
up; what it reads and writes lies still, and the host waits once a step, for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracerl.engines.capture import Arriving, Captured, gpu_seconds
from tracerl.engines.device import GpuTime, to_device
from tracerl.engines.reference.capture import CaptureHooks
from tracerl.engines.reference.model import Decode, KVCache, MoEModel, Prefill, seen
from tracerl.engines.reference.sampling import sample
from tracerl.numerics import NonFiniteError, NonFiniteFlags

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """Tokens that go through the model together: row i is token tokens[i] at positions[i] of slots[i]."""

    tokens: Ints
    slots: Ints
    positions: Ints
    lengths: list[int] | None = None
    """Of the whole sequences that follow each other (a prefill); None: one token of each of slots 0..N-1."""


@dataclass(frozen=True)
class Draw:
    """How a token is drawn after some rows of a stream."""

    temperature: npt.NDArray[np.float32]
    noise: Tensor
    """float64 [B], of `sampling.uniform`."""
    rows: Ints | None = None
    """None: after every row."""


@dataclass(frozen=True)
class Passed:
    """A pass that was made, or is being computed."""

    drawn: Callable[[], tuple[Ints, npt.NDArray[np.float32]]]
    """Waits for the tokens [B] and their log-probs [B], of the hidden states as they were when it is called.

    NonFiniteError when there are none.
    """
    record: Captured | Arriving | None = None
    audit: Captured | None = None
    capture_seconds: float = 0.0
    pack_seconds: float = 0.0


class Passes(Protocol):
    """Makes forward passes, and moves what they keep."""

    def run(
        self, stream: Stream, draw: Draw, *, recording: bool = True, audited: Ints | None = None
    ) -> Passed:
        """Make a pass; `audited` rows of the stream go into the audit too. NonFiniteError if it is seen."""
        ...

    def copy(self, source: Ints, target: Ints, tokens: int) -> None:
        """Give slots the first keys and values of other slots."""
        ...

    @property
    def gpu_seconds(self) -> float:
        """What passes that were waited for took of the GPU; none on a CPU. For any thread."""
        ...


def passes_on(model: MoEModel, cache: KVCache, hooks: CaptureHooks) -> Passes:
    """Choose by where the cache is."""
    eager = EagerPasses(model, cache, hooks)
    return GraphPasses(model, cache, hooks, eager) if cache.k.is_cuda else eager


class EagerPasses:
    """One call of the model a pass."""

    def __init__(self, model: MoEModel, cache: KVCache, hooks: CaptureHooks) -> None:
        self._model, self._cache, self._hooks = model, cache, hooks
        self._device = cache.k.device
        self._flags, self.gpu_time = NonFiniteFlags(self._device), GpuTime(self._device)

    def run(
        self, stream: Stream, draw: Draw, *, recording: bool = True, audited: Ints | None = None
    ) -> Passed:
        """Make a pass (`Passes.run`)."""
        hooks, rows = self._hooks, len(stream.tokens)
        capture, pack = hooks.capture_seconds, hooks.pack_seconds
        hooks.begin(None if audited is None else self._there(audited), recording=recording)
        with self._flags, self.gpu_time.timed():
            hidden: Tensor = self._model(self._there(stream.tokens), self._attention(stream), hooks)
            record, audit = hooks.finish(rows) if recording else (None, None)
        return Passed(
            lambda: self._drawn(hidden, draw),
            record,
            audit,
            hooks.capture_seconds - capture,
            hooks.pack_seconds - pack,
        )

    def _there(self, numbers: Ints) -> Tensor:
        return to_device(torch.from_numpy(numbers), self._device)

    def _attention(self, stream: Stream) -> Prefill | Decode:
        if stream.lengths is None:
            slots, positions = self._there(stream.slots), self._there(stream.positions)
            return Decode(self._cache, slots, positions, span=seen(self._cache, int(stream.positions.max())))
        starts = np.cumsum([0, *stream.lengths[:-1]])
        return Prefill(self._cache, torch.from_numpy(stream.slots[starts]), stream.lengths)

    def _drawn(self, hidden: Tensor, draw: Draw) -> tuple[Ints, npt.NDArray[np.float32]]:
        token, logp = sample(
            self._model.logits(hidden if draw.rows is None else hidden[self._there(draw.rows)]),
            to_device(torch.from_numpy(draw.temperature), self._device),
            to_device(draw.noise, self._device),
            greedy=bool((draw.temperature == 0).any()),
        )
        out = token.cpu().numpy(), logp.cpu().numpy()
        self.gpu_time.settle()
        self._flags.check()
        return _checked(*out)

    @property
    def gpu_seconds(self) -> float:
        """What passes took (`Passes.gpu_seconds`)."""
        return self.gpu_time.seconds

    def copy(self, source: Ints, target: Ints, tokens: int) -> None:
        """Copy keys and values (`Passes.copy`)."""
        source_C, target_C = self._there(source), self._there(target)
        for cached in (self._cache.k, self._cache.v):
            for layer in cached:
                layer[target_C, :, :tokens] = layer[source_C, :, :tokens]


def _checked(token: Ints, logp: npt.NDArray[np.float32]) -> tuple[Ints, npt.NDArray[np.float32]]:
    if not np.isfinite(logp).all():
        raise NonFiniteError("logits")
    return token, logp


_TOKEN, _POSITION, _NOISE, _TEMPERATURE = range(4)


class GraphPasses:
    """Steps of decoding as CUDA graphs, everything else by `EagerPasses`.

    A step is a graph of its own for each power of two of sequences and of tokens that are looked at, with and
    without recording, captured when it is first needed.
    """

    def __init__(self, model: MoEModel, cache: KVCache, hooks: CaptureHooks, eager: EagerPasses) -> None:
        self._step = DecodeStep(model, cache, hooks)
        self._cache, self._hooks, self._eager = cache, hooks, eager
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        # They run one after the other, and what they leave lies elsewhere.
        self._pool = torch.cuda.graph_pool_handle()
        self.copy = eager.copy

    def run(
        self, stream: Stream, draw: Draw, *, recording: bool = True, audited: Ints | None = None
    ) -> Passed:
        """Make a pass (`Passes.run`)."""
        if stream.lengths is not None or audited is not None:
            return self._eager.run(stream, draw, recording=recording, audited=audited)
        rows, longest = len(stream.tokens), int(stream.positions.max())
        size = (_rounded(rows, 1, self._cache.slots), _rounded(longest + 1, 64, self._cache.capacity))
        self._step.give(stream, draw, size[0])
        graph = self._graphs.get((*size, recording))
        if graph is None:
            graph = self._graphs[*size, recording] = self._captured(*size, recording=recording)
        self._hooks.begin(None, recording=recording)
        with self._eager.gpu_time.timed():
            graph.replay()
        record = self._hooks.finish(rows)[0] if recording else None
        seconds = graph.recording_seconds if recording else 0.0
        taken = self._step.taken(rows)

        def drawn() -> tuple[Ints, npt.NDArray[np.float32]]:
            found = taken()
            self._eager.gpu_time.settle()
            return found

        return Passed(drawn, record, capture_seconds=seconds)

    @property
    def gpu_seconds(self) -> float:
        """What passes took (`Passes.gpu_seconds`)."""
        return self._eager.gpu_seconds

    def _captured(self, rows: int, span: int, *, recording: bool) -> _Graph:
        """Capture a step, and time it beside one that does not record; they change nothing but this step."""
        self._hooks.begin(None, recording=recording)
        graph = _Graph(lambda: self._step.compute(rows, span), self._pool)
        if recording:
            self._hooks.begin(None, recording=False)
            bare = _Graph(lambda: self._step.compute(rows, span), self._pool)
            self._graphs[rows, span, False] = bare
            graph.recording_seconds = max(0.0, gpu_seconds(graph.replay) - gpu_seconds(bare.replay))
        return graph


def _rounded(count: int, least: int, most: int) -> int:
    """Round up to a power of two times `least`, as far as `most`."""
    while least < count:
        least *= 2
    return min(least, most)


class DecodeStep:
    """One step of decoding whose inputs and outputs lie still: nothing in `compute` waits for the device."""

    def __init__(self, model: MoEModel, cache: KVCache, hooks: CaptureHooks) -> None:
        self._model, self._cache, self._hooks = model, cache, hooks
        device, gpu = cache.k.device, cache.k.is_cuda
        self._flags = NonFiniteFlags(device)
        self._given = torch.zeros((4, cache.slots), dtype=torch.int64, pin_memory=gpu)
        self._input = torch.zeros((4, cache.slots), dtype=torch.int64, device=device)
        self._output = torch.zeros((2, cache.slots), dtype=torch.float64, device=device)
        self._result = torch.zeros((2, cache.slots), dtype=torch.float64, pin_memory=gpu)
        self._marks = torch.zeros_like(self._flags.marks, device="cpu", pin_memory=gpu)
        self._slots = torch.arange(cache.slots, device=device)

    def give(self, stream: Stream, draw: Draw, size: int) -> None:
        """Send what a step needs; up to `size` rows are computed, the others with token 0 in free slots."""
        given, rows = self._given.numpy(), len(stream.tokens)
        given[:, rows:size] = 0
        given[_TOKEN, :rows], given[_POSITION, :rows] = stream.tokens, stream.positions
        given[_NOISE].view(np.float64)[:rows] = draw.noise.numpy()
        given[_TEMPERATURE].view(np.float64)[:rows] = draw.temperature
        self._input.copy_(self._given, non_blocking=True)

    def compute(self, rows: int, span: int) -> None:
        """Compute the step of slots 0..rows-1, looking at `span` tokens of each."""
        given = self._input[:, :rows]
        positions = given[_POSITION]
        with self._flags:
            attention = Decode(self._cache, self._slots[:rows], positions, span=span)
            hidden = self._model(given[_TOKEN], attention, self._hooks)
        noise, temperature = given[_NOISE].view(torch.float64), given[_TEMPERATURE].view(torch.float64)
        token, logp = sample(self._model.logits(hidden), temperature.float(), noise, greedy=True)
        self._output[:, :rows] = torch.stack([token.double(), logp.double()])

    def taken(self, rows: int) -> Callable[[], tuple[Ints, npt.NDArray[np.float32]]]:
        """Ask for the tokens and log-probs of the step; the function that is given waits for them."""
        self._result.copy_(self._output, non_blocking=True)
        self._marks.copy_(self._flags.marks, non_blocking=True)
        done = torch.cuda.current_stream().record_event() if self._output.is_cuda else None

        def take() -> tuple[Ints, npt.NDArray[np.float32]]:
            if done is not None:
                done.synchronize()
            self._flags.check(self._marks)
            token, logp = self._result.numpy()[:, :rows]
            return _checked(token.astype(np.int64), logp.astype(np.float32))

        return take


class _Graph:
    """A function of the current device as a CUDA graph."""

    def __init__(self, function: Callable[[], object], pool: Any) -> None:
        """`pool` of `torch.cuda.graph_pool_handle` holds its memory."""
        self.recording_seconds = 0.0
        """What recording takes of it."""
        function()  # once before, for what libraries allocate and compile at first
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            function()

    def replay(self) -> None:
        """Compute it again."""
        self._graph.replay()
