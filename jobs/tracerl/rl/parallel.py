"""Training over one or several processes: rank 0 drives, the others follow its calls.

Rank 0 runs the loop on a `LeadingEngine`, which deals the trajectories of every micro-batch out over the
units of ranks: each computes with its own, and the ranks of one unit with the same. The others run `follow`.
A rank gets the entries of its trajectories and loads what it needs of their records by itself. Losses stay on
rank 0: the first rank of a unit sends its log-probs and all get their gradient back, so a loss may be any
function of the whole micro-batch. Engines sum gradients over units in `update`.

Ranks of a sharded engine compute every pass together and wait for each other in each layer of it. So they
begin when all have their records, and rank 0 asks each for what it holds of weights and state. A checkpoint
whose state is sharded they write and read themselves, in a directory that all of them see.

Messages are a JSON object and tensors as raw bytes, over the default process group (gloo).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError, TraceRLError
from tracerl.api.frames import HandleError, parse_handle
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import (
    GROUP_BACKENDS,
    Batch,
    EngineStats,
    Loss,
    RecordCounts,
    SiteCounts,
    TrainerEngine,
    Trajectory,
)
from tracerl.records.pairing import count_faults, read_entries
from tracerl.rl.checkpoint import Measure, StoredTensors, measure_all, shard_name, write_tensors
from tracerl.rl.dealing import deal
from tracerl.rl.loading import NoRecords, RecordLoader, open_loader

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32)
}
_LEADER = 0
_HERE = "tracerl/here/"
"""Keys of the ranks that have come."""
# Others wait for rank 0 while it generates. One that is gone is noticed at once, by its closed connection.
_PATIENCE = timedelta(days=1)
_ANSWERED = ("forward", "accumulate", "stats", "share", "save_shard", "load_shards", "measure")
_SHARE_BYTES = 32 * 2**20
"""About how much of its weights or state a rank sends at once."""
Message = tuple[dict[str, Any], list[Tensor]]


def join(meeting: Path | str, *, rank: int, ranks: int, seconds: float = 300.0, device: str = "cpu") -> None:
    """Meet the other trainer processes, which compute on this type of `device`.

    On one machine through a file that was not there before; elsewhere at rank 0, whose address is then
    ``host:port`` and may be unknown for a while. JobError when not all of them come within `seconds`.
    """
    patience = timedelta(seconds=seconds)
    try:
        if isinstance(meeting, Path):
            meeting.parent.mkdir(parents=True, exist_ok=True)
            store: Store = FileStore(str(meeting), ranks)
        else:
            host, _, port = meeting.rpartition(":")
            # Rank 0 need not wait until its own name is known.
            host = "127.0.0.1" if rank == _LEADER else host
            store = TCPStore(host, int(port), ranks, rank == _LEADER, patience, wait_for_workers=False)
        # Before the group, which would wait for the others as long as for anything else.
        store.set(f"{_HERE}{rank}", "")
        store.wait([f"{_HERE}{other}" for other in range(ranks)], patience)
        dist.init_process_group(
            GROUP_BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=_PATIENCE
        )
    except (OSError, RuntimeError) as error:
        raise JobError(
            Reason.TRAINER_LOST,
            f"trainer-{rank} did not meet the other {ranks - 1} trainers through {meeting} "
            f"({str(error).splitlines()[0]}); see their logs",
        ) from None


# -- messages ---------------------------------------------------------------------------------------------


def _send(rank: int, message: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
    tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
    described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = json.dumps([message, described]).encode()
    body = b"".join([head, *(t.view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)])
    with _Peer(rank):
        dist.send(torch.tensor([len(head), len(body)]), rank)
        dist.send(torch.frombuffer(bytearray(body), dtype=torch.uint8), rank)


def _receive(rank: int) -> Message:
    sizes = torch.zeros(2, dtype=torch.int64)
    with _Peer(rank):
        dist.recv(sizes, rank)
        body = torch.zeros(int(sizes[1]), dtype=torch.uint8)
        dist.recv(body, rank)
    start = int(sizes[0])
    message, described = json.loads(body[:start].numpy().tobytes())
    tensors = []
    for name, shape in described:
        dtype = _DTYPES[name]
        tensor = torch.empty(shape, dtype=dtype)
        stop = start + tensor.numel() * dtype.itemsize
        tensor.view(-1).view(torch.uint8).copy_(body[start:stop])
        tensors.append(tensor)
        start = stop
    return message, tensors


class _Peer:
    """Turns what gloo raises when a process is gone or too slow into a sentence."""

    def __init__(self, rank: int | None = None) -> None:
        self._who = "another trainer process" if rank is None else f"trainer-{rank}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            raise JobError(
                Reason.TRAINER_LOST,
                f"{self._who} is gone or took too long ({str(error).splitlines()[0]}); see its log, then "
                "resume the run",
            ) from None


def _pack(trajectories: Sequence[Trajectory]) -> Message:
    described = [
        {
            "id": t.id,
            "prompt_tokens": t.prompt_tokens,
            "token_versions": t.token_versions,
            "longest": t.longest,
            "entries": [entry.to_json() for entry in t.entries],
        }
        for t in trajectories
    ]
    tensors = [tensor for t in trajectories for tensor in (t.tokens, t.logp_rollout)]
    return {"trajectories": described}, tensors


def _unpack(message: Message) -> list[Trajectory]:
    described, tensors = message[0]["trajectories"], iter(message[1])
    return [
        Trajectory(
            tokens=next(tensors),
            logp_rollout=next(tensors),
            entries=read_entries(fields.pop("entries")),
            **fields,
        )
        for fields in described
    ]


# -- rank 0 -----------------------------------------------------------------------------------------------


class LeadingEngine:
    """`TrainerEngine` of rank 0 over all ranks, that loads the records of what goes through it.

    `nodes` has the node of every rank, `units` its unit (None: each is its own), and `homes` the node of
    every record store by name, as far as they are known. With one rank there is no process group. Use it from
    one thread at a time; `close` lets the other ranks end.
    """

    def __init__(
        self,
        engine: TrainerEngine,
        loader: RecordLoader | NoRecords,
        *,
        run_id: str,
        nodes: Sequence[str | None] = (None,),
        units: Sequence[int] | None = None,
        homes: Mapping[str, str | None] | None = None,
    ) -> None:
        self._engine, self._loader = engine, loader
        self._homes = homes or {}
        self._others = range(1, len(nodes))
        self._units = range(len(nodes)) if units is None else units
        self._firsts = [self._units.index(unit) for unit in range(max(self._units) + 1)]
        """The rank of each unit that gives its log-probs."""
        # Ranks of a unit on other nodes read there what they need.
        self._nodes = [nodes[rank] for rank in self._firsts]
        self.shape = engine.shape
        # To its callers it is the whole model.
        self.sharded, self.selections = False, (None, None)
        self._tell("start", run_id=run_id)

    def _tell(self, op: str, **values: Any) -> None:
        for rank in self._others:
            _send(rank, {"op": op, **values})

    def _deal(self, batch: Batch) -> tuple[list[list[int]], list[list[Trajectory]]]:
        """By rank, positions in the batch of its trajectories, and these.

        The same batch is always dealt alike.
        """
        lengths = [len(trajectory.tokens) for trajectory in batch.trajectories]
        dealt = deal([self._home(trajectory) for trajectory in batch.trajectories], self._nodes, lengths)
        hands = [dealt[unit] for unit in self._units]
        longest = max(lengths, default=1) - 1
        every = [replace(trajectory, longest=longest) for trajectory in batch.trajectories]
        return hands, [[every[index] for index in hand] for hand in hands]

    def _home(self, trajectory: Trajectory) -> str | None:
        """Node that has the trajectory's own rows: what it shares comes first."""
        try:
            return self._homes.get(parse_handle(trajectory.entries[-1].handle).store)
        except (IndexError, HandleError):
            return None

    def announce(self, batches: Sequence[Batch]) -> None:
        """Name the micro-batches that passes will use, in order; records of earlier ones are dropped."""
        parts: list[list[list[Trajectory]]] = [[] for _ in self._units]
        for batch in batches:
            for part, trajectories in zip(parts, self._deal(batch)[1], strict=True):
                part.append(trajectories)
        for rank in self._others:
            message, tensors = _pack([t for part in parts[rank] for t in part])
            sizes = [len(part) for part in parts[rank]]
            _send(rank, {"op": "announce", "sizes": sizes, **message}, tensors)
        self._loader.announce(parts[_LEADER])

    def _start(self, op: str, batch: Batch, **values: Any) -> tuple[list[list[int]], Batch]:
        """Send every other rank its trajectories; returns the deal and those of this rank, with records."""
        hands, trajectories = self._deal(batch)
        for rank in self._others:
            message, tensors = _pack(trajectories[rank])
            _send(rank, {"op": op, "speaks": rank in self._firsts, **message, **values}, tensors)
        mine = trajectories[_LEADER]
        own = Batch(self._loader.load(mine), partial(self._loader.upcoming, mine))
        if self._engine.sharded:
            # One that failed would not come into the pass, where the others would wait for it.
            for rank in self._others:
                _answer(rank)
            for rank in self._others:
                _send(rank, {})
        return hands, own

    def _gather(self, batch: Batch, hands: Sequence[Sequence[int]], own: Tensor) -> Tensor:
        """Put this rank's log-probs and the others' together, in the order of the batch."""
        logp = own.new_zeros(len(batch.trajectories), batch.max_response)
        for rank in self._firsts:
            part = own.detach() if rank == _LEADER else _answer(rank)[1][0]
            logp[hands[rank], : part.shape[1]] = part
        return logp

    def forward(self, batch: Batch, *, guided: bool, temperature: float, version: int) -> Tensor:
        """Log-probs (`TrainerEngine.forward`)."""
        how: dict[str, Any] = {"guided": guided, "temperature": temperature, "version": version}
        hands, own = self._start("forward", batch, **how)
        logp = torch.zeros(0, 0)
        if own.trajectories or self._engine.sharded:
            with _together(self._engine):
                logp = self._engine.forward(own, **how)
        return self._gather(batch, hands, logp)

    def accumulate(
        self, batch: Batch, loss: Loss, *, guided: bool, temperature: float, version: int
    ) -> Tensor:
        """Log-probs, and the loss's gradient added on every rank (`TrainerEngine.accumulate`)."""
        how: dict[str, Any] = {"guided": guided, "temperature": temperature, "version": version}
        hands, own = self._start("accumulate", batch, **how)
        whole: list[Tensor] = []

        def own_loss(logp: Tensor) -> Tensor:
            joined = self._gather(batch, hands, logp).requires_grad_()
            (gradient,) = torch.autograd.grad(loss(joined), joined)
            whole.append(joined.detach())
            for rank in self._others:
                _send(rank, {}, [gradient[hands[rank]]])
            return _with_gradient(logp, gradient[hands[_LEADER]])

        if own.trajectories or self._engine.sharded:
            with _together(self._engine):
                self._engine.accumulate(own, own_loss, **how)
        else:
            own_loss(torch.zeros(0, 0))
        for rank in self._others:
            _answer(rank)
        return whole[0]

    def update(self) -> float:
        """Clip and step on every rank (`TrainerEngine.update`)."""
        self._tell("update")
        with _Peer():
            return self._engine.update()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next updates on every rank."""
        self._tell("set_learning_rate", learning_rate=learning_rate)
        self._engine.set_learning_rate(learning_rate)

    def supervised_step(self, tokens: Tensor, loss_mask: Tensor) -> float:
        """One warm-up update on every rank (`TrainerEngine.supervised_step`)."""
        units = len(self._firsts)
        for rank in self._others:
            part = slice(self._units[rank], None, units)
            _send(rank, {"op": "supervised_step"}, [tokens[part], loss_mask[part]])
        with _Peer():
            return self._engine.supervised_step(tokens[::units], loss_mask[::units])

    def reset_optimizer(self) -> None:
        """Forget moments on every rank."""
        self._tell("reset_optimizer")
        self._engine.reset_optimizer()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Weights: the same on every rank, or of a sharded engine what each of them holds."""
        return self._whole(chain(self._engine.export(), self._shares("export")))

    def state(self) -> dict[str, Tensor]:
        """State (`TrainerEngine.state`), put together like weights."""
        return dict(self._whole(chain(self._engine.state().items(), self._shares("state"))))

    def cut(self, name: str) -> None:
        """What it gives is whole (`TrainerEngine.cut`)."""

    def _whole(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Put tensors together that ranks hold apart."""
        parts: dict[str, list[Tensor]] = {}
        for name, tensor in tensors:
            cut = self._engine.cut(name)
            if cut is None:
                yield name, tensor
                continue
            parts.setdefault(name, []).append(tensor)
            if len(parts[name]) == cut.parts:
                yield name, torch.cat(parts.pop(name), dim=cut.axis)

    def _shares(self, what: str) -> Iterator[tuple[str, Tensor]]:
        """What the other ranks of a sharded engine hold; a caller may stop in the middle of it."""
        if not self._engine.sharded:
            return
        for rank in self._others:
            more, first = True, True
            while more:
                _send(rank, {"op": "share", "what": what, "first": first})
                message, tensors = _answer(rank)
                more, first = message["more"], False
                yield from zip(message["names"], tensors, strict=True)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state` on every rank."""
        for rank in self._others:
            _send(rank, {"op": "load_state", "names": list(state)}, list(state.values()))
        self._engine.load_state(state)

    def save_shards(self, directory: Path) -> dict[str, Measure]:
        """Have every rank write what it holds of the state into a directory; JobError, also of others.

        Returns the measure of each file. No rank gets another's part.
        """
        self._tell("save_shard", directory=str(directory))
        files = _save_shard(self._engine, directory, _LEADER)
        for rank in self._others:
            files |= _answer(rank)[0]["files"]
        return files

    def measure(self, paths: Sequence[Path]) -> list[Measure]:
        """Measure files that all ranks see, each its share of them. OSError, and JobError of others."""
        ranks = len(self._units)
        for rank in self._others:
            _send(rank, {"op": "measure", "paths": [str(path) for path in paths[rank::ranks]]})
        try:
            own = measure_all(paths[::ranks])
        finally:
            # The next question is not to get these answers.
            others = [_answer(rank)[0]["measures"] for rank in self._others]
        parts = [own, *others]
        return [parts[index % ranks][index // ranks] for index in range(len(paths))]

    def load_shards(self, stored: StoredTensors) -> None:
        """Continue from a checkpoint's files, of which each rank reads what it needs; JobError of others."""
        self._tell("load_shards", paths=[str(path) for path in stored.paths])
        self._engine.load_state(stored)
        for rank in self._others:
            _answer(rank)

    def gpu_seconds(self) -> float:
        """Of this process (`TrainerEngine.gpu_seconds`)."""
        return self._engine.gpu_seconds()

    def stats(self) -> EngineStats:
        """Counts summed over all ranks; seconds of the rank that took longest, since ranks work at once."""
        self._tell("stats")
        total = _stats(self._engine, self._loader)
        records = {self._units[_LEADER]: [dict(vars(total.records))]}
        for rank in self._others:
            other = _answer(rank)[0]
            for layer, kind, counts in other.pop("sites"):
                _add(total.sites.setdefault((layer, kind), SiteCounts()), counts)
            records.setdefault(self._units[rank], []).append(other.pop("records"))
            _add(total, other)
        total.records = RecordCounts()
        for unit in records.values():
            # What all of its ranks have to do with counts once.
            total.records.missing += _missing([counts.pop("missing_rows") for counts in unit])
            for counts in unit:
                again = {} if counts is unit[0] else {"rows": 0, "frames": 0}
                _add(total.records, counts | again | {"missing": {}})
        return total

    def close(self) -> None:
        """Let the other ranks end, also those that are gone already; not while anything else is called."""
        for rank in self._others:
            with contextlib.suppress(JobError):
                _send(rank, {"op": "stop"})


def _missing(ranks: Iterable[Mapping[str, Sequence[tuple[int, int, int]]]]) -> Counter[str]:
    """Count rows that any rank of a unit misses (`RecordCounts.missing_rows`), each once.

    The reason is that of the first of these ranks.
    """
    runs: dict[str, list[tuple[int, int, int]]] = {}
    for rank in ranks:
        for id, found in rank.items():
            runs.setdefault(id, []).extend(found)
    missing: Counter[str] = Counter()
    for found in runs.values():
        faults: NDArray[np.uint8] = np.zeros(max(stop for _, stop, _ in found), np.uint8)
        for start, stop, fault in found:
            faults[start:stop] = np.where(faults[start:stop] == 0, fault, faults[start:stop])
        missing += count_faults(faults)
    return missing


def _answer(rank: int) -> Message:
    message, tensors = _receive(rank)
    if "error" in message:
        raise JobError(message["reason"], message["error"])
    return message, tensors


def _together(engine: TrainerEngine) -> contextlib.AbstractContextManager[None]:
    """Say which process is gone when a pass of several ends for that."""
    return _Peer() if engine.sharded else contextlib.nullcontext()


def _with_gradient(logp: Tensor, gradient: Tensor) -> Tensor:
    """Return a scalar whose gradient by `logp` [B, R'] is `gradient` [B, R >= R'], zero beyond R'."""
    return (logp * gradient[:, : logp.shape[1]].to(logp.device)).sum()


def _stats(engine: TrainerEngine, loader: RecordLoader | NoRecords) -> EngineStats:
    return replace(engine.stats(), records=loader.take_counts())


def _add(total: EngineStats | SiteCounts | RecordCounts, other: dict[str, Any]) -> None:
    for name, value in other.items():
        own = getattr(total, name)
        if isinstance(own, Counter):
            own.update(value)
        else:
            setattr(total, name, max(own, value) if name.endswith("_seconds") else own + value)


# -- the other ranks --------------------------------------------------------------------------------------


def follow(engine: TrainerEngine, resolved: ResolvedJob, name: str) -> None:
    """Do what rank 0 says until it says stop; JobError when it is gone.

    An error of the engine is told to rank 0 with the next answer, and ends the job there: at any other time
    rank 0 does not listen.
    """
    started, _ = _receive(_LEADER)
    shares = _Shares(engine)
    with open_loader(resolved, engine.shape, started["run_id"], name, engine.selections) as (loader, _source):
        failure: dict[str, Any] | None = None
        while True:
            message, tensors = _receive(_LEADER)
            if message["op"] == "stop":
                return
            answers = message["op"] in _ANSWERED
            try:
                if failure is None:
                    _obey(engine, loader, shares, message, tensors)
            except TraceRLError as error:
                reason = error.reason if isinstance(error, JobError) else Reason.UNEXPECTED
                failure = {"error": str(error), "reason": reason}
            if failure is not None and answers:
                _send(_LEADER, failure)


def _obey(
    engine: TrainerEngine,
    loader: RecordLoader,
    shares: _Shares,
    message: dict[str, Any],
    tensors: list[Tensor],
) -> None:
    match message["op"]:
        case "announce":
            trajectories = iter(_unpack((message, tensors)))
            loader.announce([list(islice(trajectories, size)) for size in message["sizes"]])
        case "forward" | "accumulate" as op:
            batch = Batch(loader.load(_unpack((message, tensors))))
            how = {name: message[name] for name in ("guided", "temperature", "version")}
            if engine.sharded:
                _send(_LEADER, {})
                _receive(_LEADER)
            absent = not batch.trajectories and not engine.sharded
            if absent:
                _send(_LEADER, {}, [torch.zeros(0, 0)])
            elif op == "forward":
                with _together(engine):
                    logp = engine.forward(batch, **how)
                if message["speaks"]:
                    _send(_LEADER, {}, [logp])
            else:
                with _together(engine):
                    engine.accumulate(batch, partial(_remote_loss, speaks=message["speaks"]), **how)
            if op == "accumulate":
                if absent:
                    _receive(_LEADER)
                _send(_LEADER, {})
        case "update":
            engine.update()
        case "set_learning_rate":
            engine.set_learning_rate(message["learning_rate"])
        case "supervised_step":
            engine.supervised_step(*tensors)
        case "reset_optimizer":
            engine.reset_optimizer()
        case "share":
            shares.send(message["what"], first=message["first"])
        case "load_state":
            engine.load_state(dict(zip(message["names"], tensors, strict=True)))
        case "save_shard":
            with _seen():
                files = _save_shard(engine, Path(message["directory"]), dist.get_rank())
            _send(_LEADER, {"files": files})
        case "measure":
            with _seen():
                measures = measure_all([Path(path) for path in message["paths"]])
            _send(_LEADER, {"measures": measures})
        case "load_shards":
            with _seen():
                stored = StoredTensors([Path(path) for path in message["paths"]])
            engine.load_state(stored)
            _send(_LEADER, {})
        case "stats":
            stats = _stats(engine, loader)
            sites = [[layer, kind, vars(counts)] for (layer, kind), counts in stats.sites.items()]
            _send(_LEADER, {**vars(stats), "sites": sites, "records": vars(stats.records)})
        case op:
            raise JobError(Reason.UNEXPECTED, f"trainer-0 asked for {op!r}, which this version does not know")


def _save_shard(engine: TrainerEngine, directory: Path, rank: int) -> dict[str, Measure]:
    """Write what no rank before holds of the state; OSError, SafetensorError."""
    state = engine.state() if engine.sharded or rank == _LEADER else {}
    if not state:
        return {}
    found = {name: engine.cut(name) for name in state}
    cuts = {name: cut for name, cut in found.items() if cut is not None}
    name = shard_name(rank)
    return {name: write_tensors(directory / name, state, cuts)}


@contextlib.contextmanager
def _seen() -> Iterator[None]:
    """Say what this rank could not do with a file of a checkpoint, which trainer-0 sees."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise JobError(
            Reason.CHECKPOINT_FAILED,
            f"trainer-{dist.get_rank()} cannot use the checkpoint ({error}); with "
            "spec.trainer.checkpoint.state: Sharded all trainers need one directory with room: give "
            "spec.output.uri a volume that all nodes share, or write Full",
        ) from None


class _Shares:
    """Sends what a rank holds of weights or state to rank 0, piece by piece."""

    def __init__(self, engine: TrainerEngine) -> None:
        self._engine = engine
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def send(self, what: str, *, first: bool) -> None:
        """Send the next piece; `first` begins again."""
        if first:
            self._left = iter(self._engine.state().items()) if what == "state" else self._engine.export()
        names, tensors, size = [], [], 0
        for name, tensor in self._left:
            names.append(name)
            tensors.append(tensor)
            size += tensor.nbytes
            if size >= _SHARE_BYTES:
                break
        _send(_LEADER, {"names": names, "more": bool(names)}, tensors)


def _remote_loss(logp: Tensor, *, speaks: bool) -> Tensor:
    """Rank 0's loss, of which this rank only learns the gradient; the first of its unit `speaks` for it."""
    if speaks:
        _send(_LEADER, {}, [logp])
    return _with_gradient(logp, _receive(_LEADER)[1][0])
