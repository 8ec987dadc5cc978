"""A rollout without a server: decoding through the KV cache, recording codes and expert ids by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import Trajectory
from tracerl.engines.reference.model import Decode, KVCache, MoEModel, PlainHooks, Prefill
from tracerl.engines.reference.quantised import quantise_experts
from tracerl.engines.reference.weights import copy_weights, hf_views
from tracerl.methods import Treatment, plan
from tracerl.numerics import Quantized, dequantize, quantize
from tracerl.records.pairing import TrajectoryRecords
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import BLOCK_FORMATS, SiteKind, SiteTable, audit_table, site_table


def spec_of(
    method: str,
    *,
    dtype: str = "Float32",
    algorithm: dict | None = None,
    trainer: dict | None = None,
    quantization: dict | None = None,
    seed: int = 1,
    **trace: object,
) -> Spec:
    return Spec.model_validate(
        {
            "model": {"uri": "builtin://tiny-moe", "dtype": dtype},
            "task": {"name": "builtin/chain_sum"},
            "warmup": {"seed": seed},
            "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2} | (algorithm or {}),
            "quantization": quantization or {},
            "method": {"name": method} | ({"trace": trace} if method == "TRACE" else {}),
            "trainer": trainer or {},
        }
    )


class RecordingHooks(PlainHooks):
    """Rounds what the rollout rounds and keeps everything, by (layer, kind)."""

    def __init__(self, shape: ModelShape, spec: Spec) -> None:
        super().__init__(shape)
        self.plan, self.spec = plan(spec, shape), spec
        self.seen: dict[tuple[int, SiteKind], list[Quantized | Tensor]] = {}

    def _round(self, layer: int, kind: SiteKind, x: Tensor) -> Tensor:
        if self.plan.site(layer, kind).rollout is Treatment.UNQUANTIZED:
            return x
        q = quantize(x, BLOCK_FORMATS[self.spec.quantization.format], order=self.spec.quantization.order)
        self.seen.setdefault((layer, kind), []).append(q)
        return dequantize(q, x.dtype)

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        return self._round(layer, SiteKind.EXPERT_INPUT, x)

    def key(self, layer: int, k: Tensor) -> Tensor:
        return self._round(layer, SiteKind.KEY, k)

    def value(self, layer: int, v: Tensor) -> Tensor:
        return self._round(layer, SiteKind.VALUE, v)

    def fc2_input(self, layer: int, x: Tensor) -> Tensor:
        return self._round(layer, SiteKind.FC2_INPUT, x)

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        ids = super().routes(layer, logits)
        self.seen.setdefault((layer, SiteKind.ROUTES), []).append(ids)
        return ids


@torch.no_grad()
def roll_out(
    shape: ModelShape,
    spec: Spec,
    weights: dict[str, Tensor],
    prompts: list[list[int]],
    new_tokens: list[int],
    *,
    version: int = 0,
    audited: bool = False,
    seed: int = 0,
) -> list[Trajectory]:
    """Prefill all prompts together, then decode all that still run, one token each."""
    dtype = torch.bfloat16 if spec.model.dtype == "BFloat16" else torch.float32
    model = MoEModel(shape, dtype)
    copy_weights(hf_views(shape, dict(model.named_parameters())), weights, "the exported weights")
    quantise_experts(model, plan(spec, shape).weights_rollout, spec.quantization)
    hooks = RecordingHooks(shape, spec)
    generator = torch.Generator().manual_seed(seed)
    n = len(prompts)
    cache = KVCache(shape, slots=n + 3, capacity=shape.context, dtype=dtype)
    slots = torch.randperm(n + 3, generator=generator)[:n]
    temperature = float(spec.algorithm.temperature)
    tokens = [list(p) for p in prompts]
    logp: list[list[float]] = [[] for _ in prompts]
    owners: list[Tensor] = []  # trajectory of every row seen, in order

    def step(hidden: Tensor, running: list[int]) -> None:
        logits = model.logits(hidden) / temperature
        chosen = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        values = torch.log_softmax(logits, -1).gather(1, chosen)
        for i, token, value in zip(running, chosen[:, 0].tolist(), values[:, 0].tolist(), strict=True):
            tokens[i].append(token)
            logp[i].append(value)

    lengths = [len(p) for p in prompts]
    hidden = model(torch.tensor([t for p in prompts for t in p]), Prefill(cache, slots, lengths), hooks)
    owners.append(torch.arange(n).repeat_interleave(torch.tensor(lengths)))
    step(hidden[torch.tensor(lengths).cumsum(0) - 1], list(range(n)))
    while running := [i for i in range(n) if len(logp[i]) < new_tokens[i]]:
        last = torch.tensor([tokens[i][-1] for i in running])
        position = torch.tensor([len(tokens[i]) - 1 for i in running])
        hidden = model(last, Decode(cache, slots[running], position), hooks)
        owners.append(torch.tensor(running))
        step(hidden, running)

    owner = torch.cat(owners)
    records = _records(site_table(shape, spec), hooks, owner, tokens, version)
    audits = _records(audit_table(shape, spec), hooks, owner, tokens, version) if audited else [None] * n
    return [
        Trajectory(
            id=f"t{i}",
            tokens=torch.tensor(tokens[i]),
            prompt_tokens=len(prompts[i]),
            logp_rollout=torch.tensor(logp[i]),
            token_versions=[version] * len(logp[i]),
            records=records[i],
            audit=audits[i],
        )
        for i in range(n)
    ]


def _records(
    table: SiteTable, hooks: RecordingHooks, owner: Tensor, tokens: list[list[int]], version: int
) -> list[TrajectoryRecords]:
    rows = torch.zeros((len(owner), table.row_bytes), dtype=torch.uint8)
    zero = []
    for index, site in enumerate(table.sites):
        seen = hooks.seen[site.layer, site.kind]
        columns = slice(table.offset(site), table.offset(site) + site.row_bytes)
        if site.kind is SiteKind.ROUTES:
            rows[:, columns] = pack_routes(site, torch.cat(seen))
            continue
        whole = Quantized(
            torch.cat([q.codes for q in seen]),
            torch.cat([q.scales for q in seen]),
            seen[0].tensor_scale,
            seen[0].fmt,
        )
        rows[:, columns], blocks = pack_rows(site, whole)
        zero += [(int(row), index, int(block)) for row, block in blocks]
    out = []
    for i, sequence in enumerate(tokens):
        mine = (owner == i).nonzero().squeeze(1)
        place = {int(row): t for t, row in enumerate(mine)}
        n = len(sequence) - 1
        assert len(mine) == n
        out.append(
            TrajectoryRecords(
                table=table,
                n_rows=n,
                rows=rows[mine],
                present=torch.ones((n, len(table.sites)), dtype=torch.bool),
                versions=torch.full((n,), version, dtype=torch.int32),
                zero_blocks=torch.tensor(
                    sorted((place[r], s, b) for r, s, b in zero if r in place), dtype=torch.int64
                ).reshape(-1, 3),
                tensor_scales=None,
                faults=np.zeros(n, dtype=np.uint8),
                bytes=rows[mine].numel(),
                mixed=0,
            )
        )
    return out
