"""The rollout's scheduler: one thread that prefills what came in, decodes all that runs, and records both.

Everything about a running request that changes with each token lies in arrays by cache slot, so that a decode
step costs a fixed number of calls, not a number that grows with the sequences. Requests are Python objects
only when they come, are retracted, and go. Other threads reach it by `submit`, `abort` and `call`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tracerl.api.constants import Reason
from tracerl.engines.frames import FrameRows, FrameWriter, TrajectoryFrames, frame_ranges
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer, SavedRows
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.passes import Draw, Passed, Stream, passes_on
from tracerl.engines.reference.sampling import uniform
from tracerl.engines.rollout_http import Broken, Finished
from tracerl.numerics import NonFiniteError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Bounds the activations of one prefill; longer queues are prefilled in several steps.
_PREFILL_TOKENS = 16_384


_STOPPED = Broken(Reason.INTERRUPTED, "the rollout is being stopped")


@dataclass(eq=False)
class Request:
    """One sequence to generate. `deliver` is called once, on some thread, and must not block."""

    id: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    """0 .. 2**64 - 1."""
    stop_token_ids: tuple[int, ...]
    deliver: Callable[[Finished | Broken], None]
    recorded: bool = True
    audited: bool = False
    submission: int = -1
    """Which call of `submit` it came with: whoever made that loses all of its requests or none."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token that it sampled)."""
    seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    """capture and pack."""
    saved: _Saved | None = None
    frames: TrajectoryFrames = field(init=False)

    def __post_init__(self) -> None:
        self.frames = TrajectoryFrames(self.id)

    @property
    def tokens(self) -> list[int]:
        """Prompt and what was generated before a retraction: what a prefill takes in."""
        return self.prompt if self.saved is None else self.saved.tokens


@dataclass(frozen=True)
class _Saved:
    """What a retracted request keeps."""

    tokens: list[int]
    logp: list[float]
    rows: list[SavedRows]


@dataclass(frozen=True)
class _Ended:
    """A request that is in no slot and no queue any more."""

    request: Request
    tokens: list[int]
    logp: list[float]
    reason: dict[str, Any]

    def finished(self) -> Finished:
        """Make the outcome, once the writer has nothing of the request left."""
        starts = [start for _, start in self.request.spans] + [len(self.tokens)]
        spans = [
            (version, start, end)
            for (version, start), end in zip(self.request.spans, starts[1:], strict=True)
            if start < end
        ]
        (capture, pack), frames = self.request.seconds.tolist(), self.request.frames
        seconds = {"capture": capture, "pack": pack + frames.pack_seconds, "put": frames.put_seconds}
        return Finished(self.tokens, self.logp, self.reason, spans, list(frames.entries), seconds)


@dataclass
class Stats:
    """Counters since the start; written by the scheduler's thread alone."""

    generated_tokens: int = 0
    retracted: Counter[str] = field(default_factory=Counter)
    """Requests by cause: memory or weights."""
    reprefilled_rows: Counter[str] = field(default_factory=Counter)
    """Rows computed again, under the version that computed them first (memory) or a newer one (weights)."""
    admission_stalls: int = 0
    """Times that nothing was admitted because frames wait to be written."""


class Scheduler:
    """Owner of the model, the KV cache and everything that runs; see the module's docstring."""

    def __init__(
        self,
        model: MoEModel,
        cache: KVCache,
        hooks: CaptureHooks,
        buffers: Sequence[RowBuffer],
        writer: FrameWriter,
        *,
        instance: str,
        kv_tokens: int,
        chunk_tokens: int,
        audit_every: int,
    ) -> None:
        """`buffers` holds the record's rows, then, if any are audited, the audit's, as large as the cache.

        `instance` is unique to this scheduler, for the names of prefixes. `kv_tokens` bounds the tokens that
        are cached at any time over all sequences.
        """
        slots, capacity = cache.slots, cache.capacity
        self._cache, self._passes = cache, passes_on(model, cache, hooks)
        self._buffers, self._writer = list(buffers), writer
        self._instance, self._fills = instance, itertools.count()
        self._kv_tokens, self._chunk, self._audit_every = kv_tokens, chunk_tokens, audit_every
        self.stats = Stats()
        self.version: int | None = None
        self.failure: Broken | None = None

        # -- state by slot; what runs is in slots 0 .. count-1, so that a step works on slices and views
        self._count = 0
        self._requests: list[Request | None] = [None] * slots
        self._order: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        """Number of the request's admission: the newest is retracted first."""
        self._tokens = torch.zeros((slots, capacity), dtype=torch.int64)
        self._logp = torch.zeros((slots, capacity), dtype=torch.float32)
        self._length: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        """Tokens, of which the last one is not in the KV cache yet."""
        self._limit: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self._seed: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self._temperature: npt.NDArray[np.float32] = np.ones(slots, np.float32)
        self._stop: npt.NDArray[np.int64] = np.full((slots, 1), -1)
        """Stop tokens, padded with -1."""
        self._recorded: npt.NDArray[np.bool_] = np.ones(slots, np.bool_)
        self._audited: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._seconds: npt.NDArray[np.float64] = np.zeros((slots, 2))
        """capture and pack."""
        self._waiting: deque[Request] = deque()

        # -- what other threads hand in
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._paused = self._updating = self._stopping = self._stalled = False
        self._submitted, self._enqueued, self._admitted = (itertools.count() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    # -- other threads ------------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt and response together, that a request may have."""
        return min(self._cache.capacity, self._kv_tokens)

    @property
    def running(self) -> int:
        """Sequences being decoded."""
        return self._count

    @property
    def queued(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache."""
        count = self._count
        return int(self._length[:count].sum()) - count

    @property
    def gpu_seconds(self) -> float:
        """What passes took of the GPU so far."""
        return self._passes.gpu_seconds

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests of at most `max_tokens` tokens each."""
        self._post(lambda: self._enqueue(requests))

    def abort(self, ids: Iterable[str] | None, *, deliver: bool) -> None:
        """End requests (None: all). Without `deliver` nobody waits for what they made so far."""
        chosen = None if ids is None else set(ids)
        self._post(lambda: self._abort(chosen, deliver=deliver))

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function between two steps, for example `pause` or `begin_update`."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  handed to the caller, who waits for it
                future.set_exception(error)

        self._post(run)
        return future

    def stop(self) -> None:
        """Break what runs, and end the thread after its current step."""

        def stop() -> None:
            self._break(_STOPPED)
            self._stopping = True

        self._post(stop)
        self._thread.join()

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # -- by `call` ----------------------------------------------------------------------------------------

    def pause(self, *, abort: bool) -> None:
        """Stop generating; what runs is aborted, or retracted with its tokens kept."""
        self._paused = True
        if abort:
            self._abort(None, deliver=True)
        else:
            # Newest first, so that the queue keeps the order in which requests came.
            self._retract(np.argsort(-self._order[: self._count]), "weights")

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def begin_update(self) -> str | None:
        """Stop generating until `end_update`; returns why that is not possible, None when it is.

        A second call starts the update anew, since a trainer may have died in the middle of one.
        """
        if self._count:
            return (
                f"{self._count} requests are being generated; call /pause_generation with mode retract or "
                "abort first"
            )
        self._updating = True
        return None

    def end_update(self, load: Callable[[], None], version: int) -> None:
        """Let `load` change the model's weights, or raise and not change them; generate as `version` then."""
        load()
        self.version = version
        self._updating = False

    def new_run(self) -> None:
        """Forget everything of the run before: another trainer took over."""
        self._abort(None, deliver=True)
        self.version = None

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                with self._wake:
                    self._wake.wait_for(lambda: bool(self._inbox) or self._has_work())
                try:
                    # Those that came until now: callers that call again must not keep a step from being made.
                    for _ in range(len(self._inbox)):
                        self._inbox.popleft()()
                    if self._has_work():
                        self._step()
                except NonFiniteError as error:
                    self._break(Broken(error.reason, str(error)))
                except Exception as error:  # noqa: BLE001  a bug: answer what waits instead of hanging
                    _log.exception("the scheduler failed")
                    message = f"the rollout engine failed ({type(error).__name__}: {error}); see its log"
                    self._break(Broken(Reason.ROLLOUT_FAILED, message))

    def _has_work(self) -> bool:
        if (
            self._paused
            or self._updating
            or self._stopping
            or self.failure is not None
            or self.version is None
        ):
            return False
        return self._count > 0 or (len(self._waiting) > 0 and not self._stalled)

    def _step(self) -> None:
        if batch := self._admit():
            self._prefill(batch)
        elif self._count:
            while int(self._length[: self._count].sum()) > self._kv_tokens:
                self._retract(np.array([self._order[: self._count].argmax()]), "memory")
            self._decode()

    def _enqueue(self, requests: Sequence[Request]) -> None:
        submission = next(self._submitted)
        for request in requests:
            if self.failure or self._stopping:
                request.deliver(self.failure or _STOPPED)
                continue
            if self._audit_every and request.recorded:
                request.audited = next(self._enqueued) % self._audit_every == 0
            request.submission = submission
            self._waiting.append(request)

    # -- admission ----------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Take waiting requests that fit: slots, KV tokens (one more for each), tokens of one prefill."""
        if not self._waiting:
            return []
        if self._writer.full:
            self.stats.admission_stalls += 1
            self._stalled = True
            self._writer.call(lambda: self._post(self._unstall))
            return []
        batch: list[Request] = []
        cached = int(self._length[: self._count].sum())
        prefill = 0
        while self._waiting and self._count + len(batch) < self._cache.slots:
            tokens = len(self._waiting[0].tokens)
            if cached + tokens + 1 > self._kv_tokens or (batch and prefill + tokens > _PREFILL_TOKENS):
                break
            cached += tokens + 1
            prefill += tokens
            batch.append(self._waiting.popleft())
        return batch

    def _unstall(self) -> None:
        self._stalled = False

    def _open(self, request: Request, slot: int) -> None:
        """Write what a slot needs to know about its request before the first step."""
        tokens = request.tokens
        self._requests[slot] = request
        self._order[slot] = next(self._admitted)
        self._length[slot] = len(tokens)
        self._limit[slot] = len(request.prompt) + request.max_new_tokens
        self._seed[slot] = request.seed
        self._temperature[slot] = request.temperature
        self._recorded[slot], self._audited[slot] = request.recorded, request.audited
        self._seconds[slot] = 0
        stops = request.stop_token_ids
        if (more := len(stops) - self._stop.shape[1]) > 0:
            self._stop = np.pad(self._stop, ((0, 0), (0, more)), constant_values=-1)
        self._stop[slot] = -1
        self._stop[slot, : len(stops)] = stops
        generated = len(tokens) - len(request.prompt)
        if not request.spans or request.spans[-1][0] != self._now:
            request.spans.append((self._now, generated))
        for buffer in self._buffers:
            buffer.open(slot)
        if request.saved is not None:
            self._logp[slot, len(request.prompt) : len(tokens)] = torch.tensor(request.saved.logp)

    @property
    def _now(self) -> int:
        """The version that a step computes with."""
        assert self.version is not None, "no step is made before the first weight update"
        return self.version

    def _request(self, slot: int) -> Request:
        request = self._requests[slot]
        assert request is not None, "only slots below count are asked for"
        return request

    def _generated(self, slot: int) -> tuple[list[int], list[float]]:
        """Tokens of the response so far, and their log-probs."""
        response = slice(len(self._request(slot).prompt), int(self._length[slot]))
        return self._tokens.numpy()[slot, response].tolist(), self._logp.numpy()[slot, response].tolist()

    def _retract(self, slots: npt.NDArray[np.int64], cause: str) -> None:
        """Free slots and queue their requests, each before the one retracted earlier, with what they made."""
        for slot in slots.tolist():
            request = self._request(slot)
            tokens, logp = self._generated(slot)
            rows = len(request.prompt) + len(tokens) - 1
            request.saved = _Saved(
                request.prompt + tokens,
                logp,
                [buffer.save(slot, rows) for buffer in self._buffers_of(request)],
            )
            self._waiting.appendleft(request)
        self.stats.retracted[cause] += len(slots)
        self._free(slots)

    def _free(self, slots: npt.NDArray[np.int64]) -> None:
        """End the stay of requests in slots; what runs in the last slots moves into the holes."""
        for slot in slots.tolist():
            self._request(slot).seconds += self._seconds[slot]
        kept = np.ones(self._count, np.bool_)
        kept[slots] = False
        count = int(kept.sum())
        holes = np.flatnonzero(~kept[:count])
        movers = np.flatnonzero(kept[count:]) + count
        if len(holes):
            for state in (
                self._order,
                self._length,
                self._limit,
                self._seed,
                self._temperature,
                self._stop,
                self._recorded,
                self._audited,
                self._seconds,
            ):
                state[holes] = state[movers]
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                self._requests[hole] = self._requests[mover]
            self._copy(movers, holes)
        self._requests[count : self._count] = [None] * (self._count - count)
        self._count = count

    def _buffers_of(self, request: Request) -> list[RowBuffer]:
        """Where the rows of a request are: its records', and its audit's."""
        return self._buffers[: request.recorded + request.audited]

    # -- steps --------------------------------------------------------------------------------------------

    def _prefill(self, batch: Sequence[Request]) -> None:
        slots = np.arange(self._count, self._count + len(batch))
        for request, slot in zip(batch, slots.tolist(), strict=True):
            self._open(request, slot)
        self._count += len(batch)

        # Samples of one prompt share their prefill and its frames: it is computed in the first one's slot and
        # copied. Those that came together, that is: frames are forgotten with the requests of a lost call.
        first: dict[tuple[int, bool, bool, tuple[int, ...]], int] = {}
        source = np.array(
            [
                first.setdefault(
                    (request.submission, request.recorded, request.audited, tuple(request.prompt)), index
                )
                if request.saved is None
                else index
                for index, request in enumerate(batch)
            ]
        )
        computed = np.unique(source)
        lengths = [len(batch[index].tokens) for index in computed]
        stream = Stream(
            np.array([token for index in computed for token in batch[index].tokens]),
            slots[computed].repeat(lengths),
            np.concatenate([np.arange(length) for length in lengths]),
            lengths,
        )
        self._tokens.numpy()[stream.slots, stream.positions] = stream.tokens
        last = np.cumsum(lengths) - 1
        draw = self._draw(slots, last[np.searchsorted(computed, source)])
        passed = self._pass(stream, draw)
        copies = np.flatnonzero(source != np.arange(len(batch)))
        if len(copies):
            self._copy(slots[source[copies]], slots[copies])
        # Waits, and finds what is not finite before anybody gets a row of it.
        drawn = passed.drawn()
        if len(copies):
            self._writer.put(
                [
                    one
                    for index in np.unique(source[copies])
                    for one in self._prefix_frames(slots[source == index])
                ]
            )
        for request, slot in zip(batch, slots.tolist(), strict=True):
            if request.saved is not None:
                self._restore(request, slot, request.saved)
                request.saved = None
        self._advance(slots, *drawn)

    def _copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        """Give slots the tokens, log-probs, keys, values and rows of other slots of the same state."""
        longest = int(self._length[target].max())
        source_C, target_C = torch.from_numpy(source), torch.from_numpy(target)
        for state in (self._tokens, self._logp):
            state[target_C, :longest] = state[source_C, :longest]
        self._passes.copy(source, target, longest)
        if (recorded := self._recorded[target]).any():
            self._buffers[0].copy(source[recorded], target[recorded], longest)
        if (audited := self._audited[target]).any():
            self._buffers[1].copy(source[audited], target[audited], longest)

    def _restore(self, request: Request, slot: int, saved: _Saved) -> None:
        for buffer, rows in zip(self._buffers_of(request), saved.rows, strict=True):
            again = int((rows.versions == self._now).sum())
            if buffer is self._buffers[0]:
                self.stats.reprefilled_rows["memory"] += again
                self.stats.reprefilled_rows["weights"] += len(rows.versions) - again
            if not buffer.restore(slot, rows, self._now):
                self._writer.forget(request.frames, buffer.table)

    def _decode(self) -> None:
        slots = np.arange(self._count)
        position = self._length[slots] - 1
        stream = Stream(self._tokens.numpy()[slots, position], slots, position)
        self._advance(slots, *self._pass(stream, self._draw(slots)).drawn())

    def _draw(self, slots: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None) -> Draw:
        """How the next tokens of slots are drawn, each after one of the rows of a stream (None: all)."""
        return Draw(self._temperature[slots], uniform(self._seed[slots], self._length[slots]), rows)

    def _pass(self, stream: Stream, draw: Draw) -> Passed:
        """Run the model over a stream of tokens and store the rows.

        Rows are stored when any of them is recorded; those of other requests go into no frame.
        """
        slots, buffers = stream.slots, self._buffers
        if not self._recorded[slots].any():
            return self._passes.run(stream, draw, recording=False)
        audited = np.flatnonzero(self._audited[slots])
        passed = self._passes.run(stream, draw, audited=audited if len(audited) else None)
        assert passed.record is not None, "a pass that records gives rows"
        started = time.thread_time()
        buffers[0].store(slots, stream.positions, passed.record, self._now)
        if passed.audit is not None:
            buffers[1].store(slots[audited], stream.positions[audited], passed.audit, self._now)
        capture = passed.capture_seconds + time.thread_time() - started
        # Every row of the stream has the same share in what the step's recording cost.
        np.add.at(self._seconds, slots, np.array([capture, passed.pack_seconds]) / len(slots))
        return passed

    def _advance(
        self,
        slots: npt.NDArray[np.int64],
        token: npt.NDArray[np.int64],
        logp: npt.NDArray[np.float32],
    ) -> None:
        """Add the next token of each slot, and end what is finished."""
        position = self._length[slots]
        self._tokens.numpy()[slots, position] = token
        self._logp.numpy()[slots, position] = logp
        self._length[slots] = position + 1
        self.stats.generated_tokens += len(slots)

        stopped = (token[:, None] == self._stop[slots]).any(axis=1)
        ended = stopped | (position + 1 >= self._limit[slots])
        self._emit(slots[~ended])
        if ended.any():
            self._finish(slots[ended], stopped[ended])

    def _emit(self, slots: npt.NDArray[np.int64]) -> None:
        """Hand whole chunks of rows to the writer, unless it has more than enough: they can wait here."""
        if self._writer.full:
            return
        frames: list[FrameRows] = []
        for buffer in self._buffers:
            # An audited request's whole codes are in the second buffer.
            having = slots[(self._recorded if buffer is self._buffers[0] else self._audited)[slots]]
            due = having[self._length[having] - 1 - buffer.emitted[having] >= self._chunk]
            for slot in due.tolist():
                frames += self._frames(slot, buffer, whole_chunks=True)
        self._writer.put(frames)

    def _frames(self, slot: int, buffer: RowBuffer, *, whole_chunks: bool) -> Iterator[FrameRows]:
        """Cut the rows of a slot that are in no frame yet into frames."""
        stop = int(self._length[slot]) - 1
        yield from self._cut([self._request(slot).frames], slot, buffer, stop, whole_chunks=whole_chunks)

    def _prefix_frames(self, slots: npt.NDArray[np.int64]) -> Iterator[FrameRows]:
        """Cut the rows that slots have just got from one prefill into frames that they share."""
        first = int(slots[0])
        owners = [self._request(slot).frames for slot in slots.tolist()]
        prefix = f"{self._instance}/{next(self._fills)}"
        for buffer in self._buffers_of(self._request(first)):
            stop = int(self._length[first])
            yield from self._cut(owners, first, buffer, stop, whole_chunks=False, prefix=prefix)
            buffer.emitted[slots] = buffer.emitted[first]

    def _cut(
        self,
        owners: Sequence[TrajectoryFrames],
        slot: int,
        buffer: RowBuffer,
        stop: int,
        *,
        whole_chunks: bool,
        prefix: str | None = None,
    ) -> Iterator[FrameRows]:
        if not buffer.table.row_bytes:
            return
        versions = buffer.versions(slot, stop)
        start = int(buffer.emitted[slot])
        for first, last in frame_ranges(versions, start, self._chunk, whole_chunks=whole_chunks):
            rows, zero_blocks = buffer.take(slot, first, last)
            yield FrameRows(owners, buffer.table, first, int(versions[first]), rows, zero_blocks, prefix)
            buffer.emitted[slot] = last

    def _finish(self, slots: npt.NDArray[np.int64], stopped: npt.NDArray[np.bool_]) -> None:
        ended: list[_Ended] = []
        frames: list[FrameRows] = []
        for slot, by_token in zip(slots.tolist(), stopped.tolist(), strict=True):
            request = self._request(slot)
            for buffer in self._buffers_of(request):
                frames += self._frames(slot, buffer, whole_chunks=False)
            tokens, logp = self._generated(slot)
            reason: dict[str, Any] = {"type": "length", "length": len(tokens)}
            if by_token:
                reason = {"type": "stop", "matched": tokens[-1]}
            ended.append(_Ended(request, tokens, logp, reason))
        self._free(slots)
        self._writer.put(frames)
        self._deliver(ended)

    def _deliver(self, ended: Sequence[_Ended]) -> None:
        """Answer requests when others can read the frames that were handed in before."""

        def deliver() -> None:
            for one in ended:
                one.request.deliver(one.finished())

        self._writer.settle(deliver)

    # -- ends ---------------------------------------------------------------------------------------------

    def _abort(self, ids: set[str] | None, *, deliver: bool) -> None:
        ended = self._take(ids)
        for one in ended:
            self._writer.forget(one.request.frames)
        if deliver:
            self._deliver(ended)

    def _break(self, broken: Broken) -> None:
        """Answer everything with an error, now and from now on."""
        self.failure = self.failure or broken
        for one in self._take(None):
            self._writer.forget(one.request.frames)
            one.request.deliver(broken)

    def _take(self, ids: set[str] | None) -> list[_Ended]:
        """Remove requests (None: all) from the cache and the queue, with what they have so far."""
        aborted = {"type": "abort", "message": "the request was aborted"}
        slots = [slot for slot in range(self._count) if ids is None or self._request(slot).id in ids]
        taken = [_Ended(self._request(slot), *self._generated(slot), aborted) for slot in slots]
        self._free(np.array(slots, dtype=np.int64))
        keep: deque[Request] = deque()
        for request in self._waiting:
            if ids is None or request.id in ids:
                generated = request.tokens[len(request.prompt) :]
                taken.append(_Ended(request, generated, request.saved.logp if request.saved else [], aborted))
            else:
                keep.append(request)
        self._waiting = keep
        return taken
