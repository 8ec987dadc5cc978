"""`tracerl plan`: what a job's records will take, worked out from its manifest and the model's shape.

Nothing is started and no weights are read, so it answers for models and engines that do not run here. Every
number is an upper bound where the manifest gives a limit (tokens) and exact where it gives a value (bits).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from tracerl.api.errors import InputError
from tracerl.api.job import (
    Colocation,
    MethodName,
    RolloutEngine,
    Spec,
    Spill,
    Trace,
    TraceRLJob,
    quantity_bytes,
)
from tracerl.api.load import load_job
from tracerl.api.model import ModelShape
from tracerl.api.ring import segment_size
from tracerl.api.shapes import planning_shape
from tracerl.observe.text import number, seconds, size
from tracerl.records.frame import frame_bytes
from tracerl.records.sites import SiteKind, SiteTable, audit_table, site_table
from tracerl.transport.ring.segments import ALIGNMENT

_NAME_BYTES = 112
"""Job UID, run id and trajectory id of a frame, as `tracerl run` makes them."""
_BESIDE_ROW, _BESIDE_SLOT = 5, 24
"""Bytes that the recorder of SGLang keeps beside each row of a slot, and once for all rows of it."""
_MIB = 2**20
_USED = 7 / 8
"""Share of a ring's segments that frames fill: a store moves cold ones away before fewer are free."""
_EVERYTHING = (SiteKind.EXPERT_INPUT, SiteKind.KEY, SiteKind.VALUE)


@dataclass(frozen=True)
class Load:
    """How a job is used, beyond what its manifest says; None means not known.

    `prompt_tokens` and `response_tokens` are means, by default the limits of spec.algorithm. Rates count
    generated tokens of all rollouts; `bandwidth` is bytes a second.
    """

    prompt_tokens: float | None = None
    response_tokens: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class KindBytes:
    """What one kind of site takes: `layers` recorded, `values` a layer and token, `bytes` a token in all."""

    kind: str
    layers: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Token:
    """Bytes of one token's row."""

    kinds: tuple[KindBytes, ...]
    record: int
    audit: float
    """Mean over all trajectories, of which every spec.records.auditEvery-th is audited."""
    everything: int
    """Whole codes and scales of all that is quantised in all layers: what a record saves."""


@dataclass(frozen=True)
class Step:
    """One step's batch. Bytes are of whole frames with headers where nothing else is said."""

    trajectories: int
    tokens: int
    generated_tokens: int
    frames: int
    record_bytes: int
    audit_bytes: int
    shared_prompt_bytes: int
    """Part of `record_bytes` that is not written when the samples of a prompt share its prefill."""
    everything_bytes: int
    """Of the same rows with whole codes, without frame headers."""
    seconds: float | None
    """How long a step takes, as given or by the given rate."""
    transfer_seconds: float | None
    """How long all records of a step take over one link of the given bandwidth."""
    everything_transfer_seconds: float | None


@dataclass(frozen=True)
class Residency:
    """Records that live at once, from when a row is computed to the end of the step that trains on it."""

    windows: int
    """Batches that are generated, waiting or trained on at once: maxVersionDiff + 1."""
    tokens: int
    bytes: int
    node_bytes: int
    """Of one rollout node, when trajectories are spread evenly."""


@dataclass(frozen=True)
class Store:
    """The record store of one node; all 0 with onlyObject."""

    ring_bytes: int
    segment_bytes: int
    frame_rows: int
    """Most rows of a frame: chunkTokens, or what a segment holds."""
    usable_bytes: int
    """Of frames, when segments are filled with whole frames and an eighth of them stays free."""
    wanted_ring_bytes: int
    """Ring that never spills: what lives, and one batch more that ended segments still hold."""
    spilled_bytes: int
    spill_limit_bytes: int | None
    """What spillPath and object store take together; None where nothing limits it."""
    homeless_bytes: int
    """What neither ring nor spill takes: the loop then waits, with fewer batches ahead."""
    fits_batch: bool
    """Whether ring and spill hold one batch, without which no step can be trained."""


@dataclass(frozen=True)
class Node:
    """One node of the rollout, and of the trainer where they share it. Host memory and rates in bytes."""

    rollout_rows_bytes: int
    """Rows of running sequences that are not yet in frames; with SGLang of every slot of its KV cache."""
    trainer_rows_bytes: int
    """Rows of two micro-batches a rank: one that computes, one that is fetched."""
    memory_bytes: int
    """Ring and both; weights, cache and activations are not counted."""
    written_per_second: float | None
    read_per_second: float | None
    """By the ranks of one trainer node, each of which reads the frames that hold any of its rows."""
    network_per_second: tuple[float, float] | None
    """Least and most of what a trainer node reads over the network."""


@dataclass(frozen=True)
class Objects:
    """Traffic with the object store when all frames go there; bytes are as in the step."""

    objects: int
    """A step's objects: so many uploads, and at least as many reads."""
    upload_per_second: float | None
    """Bytes a second of one rollout node."""


@dataclass(frozen=True)
class Plan:
    """Everything that `tracerl plan` says of a job."""

    job: str
    model: str
    method: str
    rollout_nodes: int
    trainer_nodes: int
    pods: int
    gpus: int
    token: Token
    step: Step
    residency: Residency
    store: Store
    node: Node
    objects: Objects | None
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Names in camelCase, sizes in bytes, times in seconds."""
        document: dict[str, Any] = _camel(dataclasses.asdict(self))
        return document


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {to_camel(key): _camel(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_camel(member) for member in value]
    return value


# -- working it out ---------------------------------------------------------------------------------------


def plan(manifest: Path, overrides: Sequence[str] = (), *, model: str | None = None, load: Load) -> Plan:
    """Plan the job of a manifest; `model` is a config.json or a known name, by default spec.model.uri.

    InputError when the manifest is wrong, or the model's shape is not known.
    """
    shapes: list[ModelShape] = []

    def shape_of(uri: str) -> ModelShape:
        shapes.append(planning_shape(uri if model is None else model))
        return shapes[-1]

    job = load_job(manifest, overrides, shape_of=shape_of)
    return plan_job(job, shapes[-1], load, model=model)


@dataclass(frozen=True)
class _Facts:
    """What the figures are worked out from."""

    spec: Spec
    table: SiteTable
    audit: SiteTable
    prompt: float
    response: float
    parts: int
    segment: int
    frame_rows: int


def plan_job(job: TraceRLJob, shape: ModelShape, load: Load, *, model: str | None = None) -> Plan:
    """Plan a job for the shape of `model`, None: the job's; InputError when the load contradicts the job."""
    spec = job.spec
    table, audit = site_table(shape, spec), audit_table(shape, spec)
    prompt, response = _lengths(spec, load)
    segment, frame_rows = _frame_rows(spec, table)
    parts = spec.rollout.parallelism.tensor
    facts = _Facts(spec, table, audit, prompt, response, parts, segment, frame_rows)
    token = _token(facts)
    step = _step(facts, token, load)
    residency = _residency(spec, step)
    store = _store(facts, step, residency)
    node = _node(facts, token, step)
    trainer_pods = 0 if spec.placement.colocation is Colocation.POD else spec.trainer.nodes
    objects = None
    if spec.transport.only_object:
        count = math.ceil(step.record_bytes / quantity_bytes(spec.transport.object.batch_size))
        objects = Objects(count, node.written_per_second)
    return Plan(
        job=job.metadata.name,
        model=spec.model.uri if model is None else model,
        method=_method(spec),
        rollout_nodes=spec.rollout.nodes,
        trainer_nodes=spec.trainer.nodes,
        pods=spec.rollout.nodes + trainer_pods,
        gpus=spec.rollout.nodes * spec.rollout.gpus_per_node
        + spec.trainer.nodes * spec.trainer.gpus_per_node,
        token=token,
        step=step,
        residency=residency,
        store=store,
        node=node,
        objects=objects,
        advice=tuple(_advice(spec, step, residency, store)),
    )


def _method(spec: Spec) -> str:
    if spec.method.name is not MethodName.TRACE:
        return spec.method.name.value
    trace = spec.method.trace or Trace()
    return f"TRACE, {trace.code_bits}-bit codes, {trace.scale_bits}-bit scales, {trace.layers.policy}"


def _lengths(spec: Spec, load: Load) -> tuple[float, float]:
    algorithm = spec.algorithm
    prompt = algorithm.max_prompt_tokens if load.prompt_tokens is None else load.prompt_tokens
    response = algorithm.max_response_tokens if load.response_tokens is None else load.response_tokens
    for option, given, limit, name in (
        ("--prompt-tokens", prompt, algorithm.max_prompt_tokens, "maxPromptTokens"),
        ("--response-tokens", response, algorithm.max_response_tokens, "maxResponseTokens"),
    ):
        if not 1 <= given <= limit:
            raise InputError(f"{option} is {given:.10g}; write 1 to {limit}, which is algorithm.{name}")
    if load.step_seconds is not None and load.tokens_per_second is not None:
        raise InputError("--step-seconds and --tokens-per-second say the same; give one of them")
    for option, rate in (
        ("--step-seconds", load.step_seconds),
        ("--tokens-per-second", load.tokens_per_second),
        ("--bandwidth", load.bandwidth),
    ):
        if rate is not None and not 0 < rate < math.inf:
            raise InputError(f"{option} is {rate}; write a positive number")
    return prompt, response


def _frame_size(table: SiteTable, rows: int, parts: int) -> int:
    """Bytes that the frames of all parts of `rows` rows take where each is aligned."""
    total = 0
    for part in range(parts):
        slices = table.select(part, parts)
        if slices:
            length = frame_bytes(table, rows, slices, names=_NAME_BYTES)
            total += math.ceil(length / ALIGNMENT) * ALIGNMENT
    return total


def _frame_rows(spec: Spec, table: SiteTable) -> tuple[int, int]:
    """Bytes of a segment (0 without a ring), and most rows of a frame."""
    chunk = spec.records.chunk_tokens
    if spec.transport.only_object or not table.sites:
        return 0, chunk
    segment = segment_size(quantity_bytes(spec.transport.ring.size))
    whole = table.select(0, spec.rollout.parallelism.tensor)
    header = frame_bytes(table, 1, whole, names=_NAME_BYTES) - _row_bytes(table, whole)
    # Padding before sections depends on the rows, by less than this.
    room = segment - header - 16 * len(whole)
    return segment, max(1, min(chunk, room // _row_bytes(table, whole)))


def _row_bytes(table: SiteTable, slices: Sequence[Any]) -> int:
    return sum(table.layout(tuple(slices)).widths)


def _token(facts: _Facts) -> Token:
    table, audit = facts.table, facts.audit
    layers: Counter[SiteKind] = Counter()
    sizes: Counter[SiteKind] = Counter()
    values: dict[SiteKind, int] = {}
    for site in table.sites:
        layers[site.kind] += 1
        sizes[site.kind] += site.row_bytes
        values[site.kind] = site.dim
    kinds = tuple(
        KindBytes(kind.value, layers[kind], values[kind], sizes[kind]) for kind in SiteKind if layers[kind]
    )
    every = facts.spec.records.audit_every
    return Token(
        kinds=kinds,
        record=table.row_bytes,
        audit=audit.row_bytes / every if every else 0.0,
        everything=sum(site.row_bytes for site in audit.sites if site.kind in _EVERYTHING),
    )


def _step(facts: _Facts, token: Token, load: Load) -> Step:
    spec, table, prompt, response = facts.spec, facts.table, facts.prompt, facts.response
    algorithm, parts = spec.algorithm, facts.parts
    trajectories = algorithm.prompts_per_step * algorithm.samples_per_prompt
    # The last token of a trajectory is never taken in.
    rows = prompt + response - 1
    frames_each = math.ceil(rows / facts.frame_rows) if table.sites else 0
    every = spec.records.audit_every
    audited = math.ceil(trajectories / every) if every else 0
    shared = algorithm.prompts_per_step * (algorithm.samples_per_prompt - 1)
    generated = round(trajectories * response)
    duration = load.step_seconds
    if load.tokens_per_second is not None:
        duration = generated / load.tokens_per_second
    record = round(trajectories * _frames_bytes(facts, table, rows))
    everything = round(trajectories * rows * token.everything)
    link = load.bandwidth
    return Step(
        trajectories=trajectories,
        tokens=round(trajectories * (prompt + response)),
        generated_tokens=generated,
        frames=trajectories * frames_each * sum(bool(table.select(part, parts)) for part in range(parts)),
        record_bytes=record,
        audit_bytes=round(audited * _frames_bytes(facts, facts.audit, rows)),
        shared_prompt_bytes=round(shared * (prompt - 1) * table.row_bytes),
        everything_bytes=everything,
        seconds=duration,
        transfer_seconds=None if link is None else record / link,
        everything_transfer_seconds=None if link is None else everything / link,
    )


def _frames_bytes(facts: _Facts, table: SiteTable, rows: float) -> float:
    """Bytes of one trajectory's frames; of a mean length, of the two whole ones around it in proportion."""
    if not table.sites:
        return 0
    least = math.floor(rows)
    more = rows - least
    size = (1 - more) * _whole_frames_bytes(facts, table, least)
    return size + (more * _whole_frames_bytes(facts, table, least + 1) if more else 0)


def _whole_frames_bytes(facts: _Facts, table: SiteTable, rows: int) -> int:
    whole, rest = divmod(rows, facts.frame_rows)
    size = whole * _frame_size(table, facts.frame_rows, facts.parts)
    return size + (_frame_size(table, rest, facts.parts) if rest else 0)


def _residency(spec: Spec, step: Step) -> Residency:
    windows = spec.algorithm.max_version_diff + 1
    held = windows * (step.record_bytes + step.audit_bytes)
    return Residency(
        windows=windows,
        tokens=windows * step.tokens,
        bytes=held,
        node_bytes=math.ceil(held / spec.rollout.nodes),
    )


def _store(facts: _Facts, step: Step, residency: Residency) -> Store:
    spec, segment, frame_rows = facts.spec, facts.segment, facts.frame_rows
    transport = spec.transport
    if transport.only_object or not segment:
        return Store(0, 0, frame_rows, 0, 0, 0, None, 0, fits_batch=True)
    ring = quantity_bytes(transport.ring.size)
    # What is left behind the last whole frame of a segment is lost.
    frame = _frame_size(facts.table, frame_rows, 1)
    fill = max(1, segment // frame) * frame / segment
    usable = int(ring // segment * segment * _USED * fill)
    batch = math.ceil((step.record_bytes + step.audit_bytes) / spec.rollout.nodes)
    # Segments hold frames of neighbouring batches, and are free when all of them are.
    mixed = batch if residency.windows > 1 else 0
    over = max(0, residency.node_bytes - usable)
    limit: int | None
    if transport.spill is Spill.OBJECT_STORE:
        limit = None
    elif transport.spill_path is None:
        limit = 0
    else:
        limit = None if transport.spill_limit is None else quantity_bytes(transport.spill_limit)
    return Store(
        ring_bytes=ring,
        segment_bytes=segment,
        frame_rows=frame_rows,
        usable_bytes=usable,
        wanted_ring_bytes=math.ceil((residency.node_bytes + mixed) / _USED / fill / segment) * segment,
        spilled_bytes=over if limit is None else min(over, limit),
        spill_limit_bytes=limit,
        homeless_bytes=0 if limit is None else max(0, over - limit),
        fits_batch=limit is None or batch <= usable + limit,
    )


def _reads(facts: _Facts, token: Token, split: int) -> float:
    """How often the trainer reads a byte of a record, `split` of which a token are split by heads.

    Ranks share the rows of a trajectory; of a frame in which one's rows end, both its neighbours read theirs.
    """
    sizes = facts.spec.trainer.parallelism
    frames = (facts.prompt + facts.response) / facts.frame_rows
    context = 2 * (sizes.context - 1)
    by_heads = min(sizes.context, 1 + context / frames)
    by_rows = min(sizes.context * sizes.tensor, 1 + (context + sizes.context * (sizes.tensor - 1)) / frames)
    return (split * by_heads + (token.record - split) * by_rows) / token.record if token.record else 0.0


def _node(facts: _Facts, token: Token, step: Step) -> Node:
    spec, rollout, trainer = facts.spec, facts.spec.rollout, facts.spec.trainer
    rows = _rollout_rows(facts, token)
    sizes = trainer.parallelism
    ranks = sizes.ranks
    split = sum(s.row_bytes for s in facts.table.sites if s.kind in {SiteKind.KEY, SiteKind.VALUE})
    copies = split + sizes.tensor * (token.record - split)
    # A micro-batch belongs to a model-parallel group; its pipeline stages hold their layers alone. Rows that
    # other ranks compute are not read, but have their place.
    held = 2 * trainer.micro_batch_tokens * copies * ranks // (sizes.tensor * sizes.pipeline)
    loaded = math.ceil(held / trainer.nodes)
    together = spec.placement.colocation is not Colocation.NONE and trainer.nodes == rollout.nodes
    ring = 0 if spec.transport.only_object else quantity_bytes(spec.transport.ring.size)
    written = read = network = None
    if step.seconds is not None:
        written = (step.record_bytes + step.audit_bytes) / rollout.nodes / step.seconds
        read = step.record_bytes * _reads(facts, token, split) / trainer.nodes / step.seconds
        away = 1.0 if not together or spec.transport.only_object else 1 - 1 / rollout.nodes
        network = (0.0 if together and not spec.transport.only_object else read, read * away)
    return Node(
        rollout_rows_bytes=rows,
        trainer_rows_bytes=loaded,
        memory_bytes=ring + rows + (loaded if together else 0),
        written_per_second=written,
        read_per_second=read,
        network_per_second=network,
    )


def _rollout_rows(facts: _Facts, token: Token) -> int:
    rollout = facts.spec.rollout
    if rollout.engine is RolloutEngine.SGLANG:
        # Every tensor-parallel rank knows the versions, and what a row cost; the row itself is split.
        tables = [token.record] if token.record else []
        if facts.spec.records.audit_every:
            tables.append(facts.audit.row_bytes)
        ranks = rollout.parallelism.tensor
        known = ranks * (_BESIDE_ROW * len(tables) + _BESIDE_SLOT) if tables else 0
        return math.ceil(rollout.kv_cache_tokens / rollout.nodes_per_replica * (sum(tables) + known))
    running = min(rollout.kv_cache_tokens, rollout.max_running_requests * (facts.prompt + facts.response))
    return math.ceil(running / rollout.nodes_per_replica * token.record)


def _advice(spec: Spec, step: Step, residency: Residency, store: Store) -> list[str]:
    transport = spec.transport
    if transport.only_object or not step.record_bytes:
        return []
    wanted = _quantity(store.wanted_ring_bytes)
    if not store.fits_batch:
        batch, room = (
            residency.node_bytes / residency.windows,
            store.usable_bytes + (store.spill_limit_bytes or 0),
        )
        return [
            f"one batch takes {size(batch)} a node, ring and spill hold {size(room)}: no step could be "
            f"trained; write transport.ring.size: {wanted}, or a transport.spillPath"
        ]
    if store.homeless_bytes:
        return [
            f"{size(store.homeless_bytes)} a node have no place: generation will wait for the trainer, with "
            f"fewer than {residency.windows} batches at once; write transport.ring.size: {wanted}, or let "
            "more spill"
        ]
    if store.spilled_bytes:
        where = []
        if transport.spill_path is not None:
            where.append(transport.spill_path)
        if transport.spill is Spill.OBJECT_STORE:
            where.append(transport.object.uri or "the object store")
        return [
            f"{size(store.spilled_bytes)} a node spill to {', then '.join(where)}; with transport.ring.size: "
            f"{wanted} nothing would"
        ]
    if store.wanted_ring_bytes > store.ring_bytes:
        return [
            f"the ring is just large enough; {wanted} leaves room for segments that wait for their last frame"
        ]
    return []


def _quantity(count: int) -> str:
    """A Kubernetes quantity of at least so many bytes."""
    unit, name = (2**30, "Gi") if count >= 16 * 2**30 else (_MIB, "Mi")
    return f"{math.ceil(count / unit)}{name}"


# -- saying it --------------------------------------------------------------------------------------------


def render(plan: Plan) -> str:
    """Write a plan as text: sections of a title and aligned lines."""
    token, step, residency, store, node = plan.token, plan.step, plan.residency, plan.store, plan.node
    lines: list[tuple[str, str, str]] = [(f"{plan.job}: {plan.method}, {plan.model}", "", "")]

    def section(title: str) -> None:
        lines.extend([("", "", ""), (title, "", "")])

    def add(name: str, value: str, note: str = "") -> None:
        lines.append((f"  {name}", value, note))

    section("A token")
    for kind in token.kinds:
        layers = f"{kind.layers} layer{'s' if kind.layers > 1 else ''} of {kind.values:,}"
        add(kind.kind, f"{kind.bytes:,} B", layers)
    add("record", f"{token.record:,} B", size(token.record) if token.record >= 1024 else "")
    if token.audit:
        add("audit", f"{number(token.audit)} B", "mean over all trajectories")
    if token.everything:
        times = f", {number(token.everything / token.record)} times the record" if token.record else ""
        add("whole codes of all layers", f"{token.everything:,} B", f"for comparison{times}")

    section("A step")
    add("trajectories", f"{step.trajectories:,}")
    add("tokens", f"{step.tokens:,}", f"{step.tokens // step.trajectories:,} a trajectory")
    add("frames", f"{step.frames:,}", f"of at most {store.frame_rows:,} rows")
    add("records", size(step.record_bytes), _decimal(step.record_bytes))
    if step.shared_prompt_bytes:
        add("of that, shared prompts", size(step.shared_prompt_bytes), "not written when a prefill is shared")
    if step.audit_bytes:
        add("audits", size(step.audit_bytes), _decimal(step.audit_bytes))
    if step.everything_bytes:
        decimal = _decimal(step.everything_bytes)
        note = "without frame headers"
        add(
            "whole codes of all layers",
            size(step.everything_bytes),
            f"{decimal}, {note}" if decimal else note,
        )
    if step.transfer_seconds is not None:
        add("records over the link", seconds(step.transfer_seconds))
        add("whole codes over the link", seconds(step.everything_transfer_seconds))
    if step.seconds is not None:
        add("duration", seconds(step.seconds))

    section("At once")
    add("batches", str(residency.windows), "maxVersionDiff + 1")
    add("tokens in flight", f"{residency.tokens:,}")
    add("records", size(residency.bytes), f"{size(residency.node_bytes)} a rollout node")

    pods = f"{plan.pods} pod{'s' if plan.pods > 1 else ''}"
    section(f"A node ({plan.rollout_nodes} rollout, {plan.trainer_nodes} trainer; {pods})")
    if store.ring_bytes:
        add("ring", size(store.ring_bytes), f"segments of {size(store.segment_bytes)}")
        add("ring that never spills", size(store.wanted_ring_bytes))
        add("spilled", size(store.spilled_bytes))
        if store.homeless_bytes:
            add("without a place", size(store.homeless_bytes))
    if plan.objects is not None:
        add("objects a step", f"{plan.objects.objects:,}", "at least, of all nodes")
    add("rows the rollout holds", size(node.rollout_rows_bytes), "host memory of the rollout")
    add("rows of two micro-batches", size(node.trainer_rows_bytes), "host memory of the trainer")
    add("host memory for records", size(node.memory_bytes))
    if node.written_per_second is not None and node.network_per_second is not None:
        low, high = node.network_per_second
        add("written", _rate(node.written_per_second))
        add("read by the trainer", _rate(node.read_per_second))
        add(
            "of that, over the network", _rate(high), "" if low == high else f"at most; at least {_rate(low)}"
        )

    names = max(len(name) for name, value, _ in lines if value)
    values = max(len(value) for _, value, _ in lines)
    text = [
        f"{name:<{names}}  {value:>{values}}{'  ' + note if note else ''}".rstrip() if value else name
        for name, value, note in lines
    ]
    text += [f"\n{sentence[:1].upper()}{sentence[1:]}." for sentence in plan.advice]
    # Numbers must not part from their units in a page; a terminal's lines are copied.
    return "\n".join(text).replace("\N{NO-BREAK SPACE}", " ")


def _decimal(count: int) -> str:
    """Bytes in powers of ten, as networks and object stores count them."""
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if count >= factor:
            return f"{number(count / factor)} {unit}"
    return ""


def _rate(per_second: float | None) -> str:
    return "0 B/s" if not per_second else f"{size(per_second)}/s"
