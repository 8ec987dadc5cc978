"""`TrainerEngine` on Megatron-Core: its model, its parallel ranks, optimizer and checkpoints.

It runs on a CPU, in one process or several over gloo: data, tensor, context and expert parallel. On "cuda"
one process ran; several, over NCCL, never did. Pipeline parallelism is refused: the loop's loss is of a whole
micro-batch, and a schedule would want it piece by piece. Which records a rank needs is in `slicing`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tracerl.api.errors import InputError, first_line
from tracerl.api.job import DType, Optimizer, PrefillAttends, Spec, TensorScaleRule
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, Cut, EngineStats, Loss
from tracerl.engines.device import Uploads
from tracerl.engines.expert_weights import DOWN, GATE_UP, fake_quantise_expert_weights, weights_site
from tracerl.engines.guided import MicroBatch, Treatments, pass_mask
from tracerl.engines.hf import check_names, check_weights, hf_shapes, initial_weights
from tracerl.engines.megatron import checkpoint
from tracerl.engines.megatron.host import (
    check_version,
    host,
    host_optimizer,
    join_groups,
    join_unit,
    quiet,
)
from tracerl.engines.megatron.layers import Seat
from tracerl.engines.megatron.model import build, check_shape, transformer_config
from tracerl.engines.megatron.slicing import Held, context_positions, selection_of, sequence_positions
from tracerl.engines.megatron.weights import (
    Parameter,
    check_coverage,
    cut_axis,
    parameters,
    to_hf,
    to_megatron,
)
from tracerl.methods import Treatment, plan
from tracerl.numerics import NonFiniteError
from tracerl.records.sites import SiteKind, audit_table, site_table

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NAME_BYTES = 128
"""Of a site, between ranks."""


@dataclass(frozen=True)
class _Rows:
    """Sequences one after the other, and what follows some of their rows."""

    tokens: Tensor
    """int64 [N]."""
    lengths: list[int]
    """Rows of each sequence."""
    predicting: Tensor
    """int64 [M]: rows that predict."""
    targets: Tensor
    """int64 [M]: the tokens behind them."""


class MegatronTrainer:
    """`TrainerEngine` on Megatron-Core's GPTModel.

    Several processes are data parallel: each sees its own trajectories, and `update` sums gradients over
    them, so a loss must be divided by what all of them hold together. They must have met
    (`torch.distributed`) before they are constructed. Each holds the whole model, unless it is tensor or
    expert parallel. Tensor and context parallel ranks see the same trajectories, and each gives the same
    log-probs of all of them. An expert-parallel rank holds some experts, which compute the tokens of all
    ranks of its expert group. Ranks that need each other do every pass together and fail together when a
    value of one of them is not finite.

    Checkpoints have two forms of the same content. `state` and `load_state` are the loop's: FP32 masters,
    both moments and the number of updates by Hugging Face's names, of which each rank gives what no rank
    before holds; the same as the reference trainer's, so that one engine continues what the other began.
    `save_sharded` and `load_sharded` are Megatron's distributed checkpoint, for its own tools.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: Spec,
        weights: Mapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`weights` by Hugging Face's names; None draws them from `warmup.seed`.

        InputError for what this engine does not compute, a model too large for the machine, weights of
        another model, and a version of Megatron-Core that is not tested.
        """
        check_version()
        _check_spec(spec)
        self.shape, self.spec = shape, spec
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if spec.model.dtype is DType.BFLOAT16 else torch.float32
        self._plan = plan(spec, shape)
        self._place = join_groups(spec.trainer.parallelism, self._device)
        check_shape(shape, self._place)
        tables = site_table(shape, spec), audit_table(shape, spec)
        mine, audited = (selection_of(table, shape.layers, self._place) for table in tables)
        self.selections = (mine, audited)
        self._table, self._audit_table = (
            table if selection is None else selection.table
            for table, selection in zip(tables, self.selections, strict=True)
        )
        initial = dict(initial_weights(shape, spec.warmup.seed)) if weights is None else weights
        check_weights(hf_shapes(shape), initial, "the initial weights")

        unit = join_unit(spec.trainer.parallelism)
        self.sharded = unit is not None
        self._seat = Seat(
            unit,
            experts=parallel_state.get_expert_model_parallel_group() if self._place.expert > 1 else None,
            context=parallel_state.get_context_parallel_group() if self._place.context > 1 else None,
        )
        self._stats = EngineStats()
        self._updates = 0
        self._plain: GPTModel | None = None
        """An FP32 model over the optimizer's masters, during a warm-up of a BF16 job alone."""
        self._exact: dict[str, Tensor] = {}
        """By parameter: the values as exported, while the parameter holds what their codes stand for."""
        settings = spec.trainer.optimizer
        try:
            with host_optimizer(self._device), quiet():
                config = self._config(self._dtype)
                self._model = build(shape, self._place, config, self._seat, self._device)
                self._ddp = DistributedDataParallel(
                    config,
                    DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
                    self._model,
                )
                self._optimizer = get_megatron_optimizer(
                    _optimizer_config(settings, self._dtype), [self._ddp], use_gloo_process_groups=False
                )
        except RuntimeError as error:
            raise InputError(
                f"there is no memory for the model of {spec.model.uri}, its gradients and its optimizer "
                f"({first_line(error)}); use a smaller model or a machine with more memory"
            ) from None
        for group in self._optimizer.param_groups:
            # What Megatron's scheduler would do at every step: vectors do not decay.
            group["weight_decay"] = float(settings.weight_decay) * group["wd_mult"]
        self._model.train()
        self._named = dict(self._model.named_parameters())
        check_coverage(shape, self._place, self._named)
        self._parameters = parameters(shape, self._place)
        self._given = [parameter for parameter in self._parameters if self._gives(parameter)]
        """What this rank exports."""
        self._write_masters(initial)

    def _config(self, dtype: torch.dtype) -> TransformerConfig:
        extra = self.spec.trainer.engine_args
        return transformer_config(self.shape, self._place, dtype, self._device, extra)

    # -- forward and backward -------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Batch, *, guided: bool, temperature: float, version: int) -> Tensor:
        """Log-probs (`TrainerEngine.forward`)."""
        started = time.perf_counter()
        with host(self._device):
            logp, _ = self._logp(batch, guided=guided, temperature=temperature, version=version)
        self._seat.treatments = None
        self._stats.forward_seconds += time.perf_counter() - started
        return logp

    def accumulate(
        self, batch: Batch, loss: Loss, *, guided: bool, temperature: float, version: int
    ) -> Tensor:
        """Log-probs, and the loss's gradient added (`TrainerEngine.accumulate`).

        With activation recompute the backward pass computes layers again, from the same records.
        """
        started = time.perf_counter()
        with host(self._device):
            logp, treatments = self._logp(batch, guided=guided, temperature=temperature, version=version)
            value = loss(logp)
            middle = time.perf_counter()
            treatments.repeat()
            value.backward()  # type: ignore[no-untyped-call]
        self._seat.treatments = None
        self._stats.forward_seconds += middle - started
        self._stats.backward_seconds += time.perf_counter() - middle
        return logp.detach()

    def _logp(
        self, batch: Batch, *, guided: bool, temperature: float, version: int
    ) -> tuple[Tensor, Treatments]:
        with self._agreed():
            self._refresh()
        started = time.perf_counter()
        micro = MicroBatch(batch.trajectories, self._table, self._audit_table, Uploads(self._device))
        micro.arrive()
        self._stats.unpack_seconds += time.perf_counter() - started
        how = (self._plan, self.spec.quantization, micro, self._stats)
        treatments = Treatments(*how, guided=guided, version=version)
        rows = _Rows(micro.tokens_N, micro.lengths, micro.predicting_M, micro.targets_M)
        logp_M = self._predict(self._model, rows, treatments, temperature)
        (failed,) = self._largest(not bool(logp_M.isfinite().all()))
        if failed:
            checking = Treatments(*how, guided=guided, version=version, check=True)
            with torch.no_grad():
                self._predict(self._model, rows, checking, temperature)
            raise NonFiniteError("the logits")
        batch_size, width = micro.size
        logp = logp_M.new_zeros(batch_size * width).index_put((micro.places_M,), logp_M)
        # Losses are computed where the loop is.
        return logp.view(batch_size, width).cpu(), treatments

    def _predict(
        self,
        model: GPTModel,
        rows: _Rows,
        treatments: Treatments | None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probs float32 [M] of the tokens behind rows of sequences, which are padded here.

        The seat keeps the treatments, for a backward pass that computes layers again. Tensor and context
        parallel ranks give the same.
        """
        lengths, predicting_M = rows.lengths, rows.predicting
        place, multiple = self._place, self._place.multiple
        seat = self._seat
        seat.treatments = treatments
        fc2_treated = treatments is not None and treatments.touches(
            SiteKind.FC2_INPUT, range(self.shape.layers)
        )
        # Ranks that compute together pad alike.
        longest, batch, treated, audited = self._largest(
            -(-max(lengths, default=1) // multiple) * multiple,
            len(lengths),
            fc2_treated,
            treatments is not None and treatments.audits,
        )
        seat.fc2_treated, seat.fc2_audited = bool(treated), bool(audited)
        lengths = [*lengths, *[0] * (batch - len(lengths))]
        every = Held.of(lengths, torch.arange(longest)).to(self._device)
        position_P = context_positions(longest, place)
        attended = Held.of(lengths, position_P).to(self._device)
        seat.sequence = Held.of(lengths, sequence_positions(longest, place)).to(self._device)
        seat.attended = attended
        starts_N = None if treatments is None else treatments.exact_from()
        seat.pass_mask = None
        if starts_N is not None:
            # Padding attends what is stored: nothing that counts sees it.
            after_P1 = torch.arange(1, longest + 1, device=self._device).repeat_interleave(batch).unsqueeze(1)
            starts_P1 = every.put(after_P1, starts_N.unsqueeze(1))
            seat.pass_mask = pass_mask(starts_P1.view(longest, batch).t()).unsqueeze(1)
        tokens_P1 = every.put(rows.tokens.new_zeros(every.size, 1), rows.tokens.unsqueeze(1))
        position_P = position_P.to(self._device)
        tokens_BP = tokens_P1.view(longest, batch).t().index_select(1, position_P)
        # Keys are in the order of the context-parallel ranks.
        key_S = torch.cat(
            [context_positions(longest, replace(place, context_rank=rank)) for rank in range(place.context)]
        ).to(self._device)
        future_PS = key_S > position_P.unsqueeze(1)
        with self._agreed():
            logits_BPV: Tensor = model(tokens_BP, position_P.expand(batch, -1), future_PS[None, None])
        # Of the rows that predict, those whose logits are here.
        place_N = torch.full((len(rows.tokens),), -1, dtype=torch.int64, device=self._device)
        place_N[slice(None) if attended.rows is None else attended.rows] = attended.slots
        place_M = place_N.index_select(0, predicting_M)
        here_K = (place_M >= 0).nonzero().squeeze(1)
        place_K = place_M.index_select(0, here_K)
        at_K = (place_K % batch) * len(position_P) + place_K // batch
        logits_KV = logits_BPV.flatten(0, 1).index_select(0, at_K).float() / temperature
        logp_K: Tensor = -vocab_parallel_cross_entropy(logits_KV, rows.targets.index_select(0, here_K))
        if seat.context is None:
            return logp_K
        logp_M = logp_K.new_zeros(len(predicting_M)).index_put((here_K,), logp_K)
        found: Tensor = reduce_from_tensor_model_parallel_region(logp_M, group=seat.context)
        return found

    def _largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks that compute together."""
        group = self._seat.unit
        if group is None:
            return list(values)
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        largest: list[int] = found.tolist()
        return largest

    @contextmanager
    def _agreed(self) -> Iterator[None]:
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
        (first,) = self._largest(turn)
        if first == 0:
            return
        site = seat.failure.site if seat.failure is not None and turn == first else ""
        codes = self._largest(*site.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"))
        raise NonFiniteError(bytes(codes).rstrip(b"\0").decode(errors="replace"))

    def supervised_step(self, tokens: Tensor, loss_mask: Tensor) -> float:
        """One unquantised FP32 update (`TrainerEngine.supervised_step`)."""
        batch, length = tokens.shape
        model = self._plain_model()
        with host(self._device):
            taken = tokens[:, :-1].reshape(-1).to(self._device)
            chosen = loss_mask[:, 1:].reshape(-1).nonzero().squeeze(1).to(self._device)
            targets_M = tokens[:, 1:].reshape(-1).to(self._device).index_select(0, chosen)
            rows = _Rows(taken, [length - 1] * batch, chosen, targets_M)
            loss = -self._predict(model, rows, None).sum()
            totals = torch.tensor([float(loss.detach()), float(len(chosen))], dtype=torch.float64)
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
            (loss / float(totals[1])).backward()  # type: ignore[no-untyped-call]
        if model is not self._model:
            for name, plain in model.named_parameters():
                if plain.grad is not None:
                    self._named[name].main_grad.add_(plain.grad)
                    plain.grad = None
        self.update()
        return float(totals[0] / totals[1])

    def _plain_model(self) -> GPTModel:
        """The model in FP32 with exact weights: itself in an FP32 job, else one that shares the masters."""
        self._restore()
        if self._dtype is torch.float32:
            return self._model
        if self._plain is None:
            with host(self._device), quiet():
                self._plain = build(
                    self.shape, self._place, self._config(torch.float32), self._seat, self._device
                )
            self._plain.train()
            for name, plain in self._plain.named_parameters():
                plain.data = self._master(self._named[name]).data
        return self._plain

    # -- update and weights ---------------------------------------------------------------------------------

    def update(self) -> float:
        """Clip and step (`TrainerEngine.update`); a gradient that is not finite changes no weight."""
        started = time.perf_counter()
        self._restore()
        with host_optimizer(self._device):
            finalize_model_grads([self._ddp])
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            if norm < float("inf"):
                self._optimizer.step()
                self._updates += 1
            self._optimizer.zero_grad()
            self._ddp.zero_grad_buffer()
        self._stats.update_seconds += time.perf_counter() - started
        return norm

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next updates."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def reset_optimizer(self) -> None:
        """Start it afresh (`TrainerEngine.reset_optimizer`)."""
        self._updates = 0
        self._plain = None
        for optimizer in _inner(self._optimizer):
            optimizer.state.clear()

    def _gives(self, parameter: Parameter) -> bool:
        """Whether this rank is the first one that holds a parameter or its shard, or holds all of them."""
        if not self.sharded:
            return True
        if parameter.expert:
            return bool(parallel_state.get_expert_data_parallel_rank() == 0)
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return bool(first and (parameter.axis is not None or self._place.tensor_rank == 0))

    def cut(self, name: str) -> Cut | None:
        """How tensor-parallel ranks hold a tensor apart (`TrainerEngine.cut`)."""
        axis, parts = cut_axis(name), self._place.tensor
        return None if axis is None or parts == 1 else Cut(axis, parts)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face's names, in compute dtype: what the rollout gets and the trainer uses."""
        for parameter in self._given:
            value = self._master_value(parameter).to(self._dtype)
            for name, tensor in to_hf(parameter, value, self.shape):
                yield name, tensor.contiguous()

    def _refresh(self) -> None:
        """Put quantised values into the experts, once a version: of what was exported, in its dtype."""
        if self._exact or self._plan.weights_trainer is Treatment.UNQUANTIZED:
            return
        for layer in range(self.shape.layers):
            for matrix, gate_up in ((GATE_UP, True), (DOWN, False)):
                mine = [
                    p for p in self._parameters if p.expert and p.expert[0] == layer and p.gate_up is gate_up
                ]
                values = torch.stack([self._named[p.name].data for p in mine])
                site = weights_site(layer, matrix)
                quantised = fake_quantise_expert_weights(values, self.spec.quantization, site=site)
                for parameter, value in zip(mine, quantised, strict=True):
                    held = self._named[parameter.name]
                    self._exact[parameter.name], held.data = held.data, value

    def _restore(self) -> None:
        """Put exact values back, before anything reads or writes parameters."""
        for name, value in self._exact.items():
            self._named[name].data = value
        self._exact.clear()

    def _master(self, held: torch.nn.Parameter) -> Tensor:
        """FP32 values of a parameter: the optimizer's copy in a BF16 job, else itself."""
        master: Tensor = getattr(held, "main_param", held)
        return master

    def _master_value(self, parameter: Parameter) -> Tensor:
        held = self._named[parameter.name]
        if self._dtype is torch.float32:
            value: Tensor = self._exact.get(parameter.name, held.data)
            return value
        return self._master(held).data

    @torch.no_grad()
    def _write_masters(self, tensors: Mapping[str, Tensor]) -> None:
        self._restore()
        for parameter in self._parameters:
            held = self._named[parameter.name]
            value = to_megatron(parameter, tensors, self.shape, self._place)
            self._master(held).data.copy_(value)
            held.data.copy_(self._master(held).data)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """FP32 weights, both moments, and the number of updates, by Hugging Face's names under a prefix.

        Of tensors on the host.
        """
        first = not self.sharded or dist.get_rank() == 0
        state = {"updates": torch.tensor(self._updates)} if first else {}
        for parameter in self._given:
            value = self._master_value(parameter)
            parts = {"weights": value} | {
                moment: found if found is not None else torch.zeros_like(value)
                for moment, found in self._moments(parameter).items()
            }
            for prefix, tensor in parts.items():
                for name, part in to_hf(parameter, tensor, self.shape):
                    state[f"{prefix}/{name}"] = torch.empty(part.shape, dtype=part.dtype).copy_(part)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state` (`TrainerEngine.load_state`)."""
        if "updates" not in state:
            raise InputError("the checkpoint has no number of updates; resume from another checkpoint")
        sizes = hf_shapes(self.shape)
        mine = {name for parameter in self._parameters for name in parameter.hf}
        read = {prefix: _Part(state, prefix) for prefix in ("weights", *_MOMENTS)}
        for prefix, tensors in read.items():
            where = f"the checkpoint's {prefix}"
            check_names(sizes, tensors, where)
            # What other ranks hold alone is theirs to read: it may be more than there is memory for.
            for name in mine:
                check_weights({name: sizes[name]}, {name: tensors[name]}, where)
        self._write_masters(read["weights"])
        self._updates = int(state["updates"])
        for optimizer in _inner(self._optimizer):
            optimizer.state.clear()
        if not self._updates:
            return
        owners = {
            id(held): optimizer
            for optimizer in _inner(self._optimizer)
            for group in optimizer.param_groups
            for held in group["params"]
        }
        for parameter in self._parameters:
            master = self._master(self._named[parameter.name])
            moments = {
                moment: to_megatron(parameter, read[moment], self.shape, self._place)
                .to(self._device, torch.float32)
                .clone(memory_format=torch.contiguous_format)
                for moment in _MOMENTS
            }
            step = torch.tensor(float(self._updates))
            owners[id(master)].state[master] = {"step": step, **moments}

    def save_sharded(self, directory: Path) -> None:
        """Write Megatron's distributed checkpoint into an empty directory; all ranks call this together."""
        self._restore()
        with host_optimizer(self._device):
            checkpoint.save(directory, self._model, self._optimizer, self._updates)

    def load_sharded(self, directory: Path) -> None:
        """Continue from `save_sharded`; all ranks call this together. InputError: other parallelism."""
        self._restore()
        with host_optimizer(self._device):
            self._updates = checkpoint.load(directory, self._model, self._optimizer)

    def _moments(self, parameter: Parameter) -> dict[str, Tensor | None]:
        master = self._master(self._named[parameter.name])
        for optimizer in _inner(self._optimizer):
            if master in optimizer.state:
                return {moment: optimizer.state[master][moment] for moment in _MOMENTS}
        return dict.fromkeys(_MOMENTS)

    def gpu_seconds(self) -> float:
        """Not measured: no baseline asks for it (`TrainerEngine.gpu_seconds`)."""
        return 0.0

    def stats(self) -> EngineStats:
        """Sums since the last call."""
        stats, self._stats = self._stats, EngineStats()
        return stats


class _Part(Mapping[str, Tensor]):
    """The tensors of a state under a prefix."""

    def __init__(self, state: Mapping[str, Tensor], prefix: str) -> None:
        self._state, self._prefix = state, prefix + "/"

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (name[start:] for name in self._state if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _check_spec(spec: Spec) -> None:
    if spec.quantization.tensor_scale is not TensorScaleRule.FIXED:
        raise InputError(
            f"spec.quantization.tensorScale: the Megatron trainer does not compute "
            f"{spec.quantization.tensor_scale}; use Fixed"
        )
    parallelism = spec.trainer.parallelism
    if parallelism.pipeline > 1:
        raise InputError(
            f"spec.trainer.parallelism.pipeline is {parallelism.pipeline}, but the loop's loss is of a whole "
            "micro-batch, which a pipeline would want piece by piece; use tensor, context, expert and data"
        )
    if parallelism.context > 1 and spec.quantization.prefill_attends is PrefillAttends.EXACT:
        raise InputError(
            "spec.quantization.prefillAttends is Exact, which the Megatron trainer does not compute with "
            "spec.trainer.parallelism.context above 1; use Quantized"
        )


def _optimizer_config(settings: Optimizer, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=float(settings.learning_rate),
        min_lr=0.0,
        weight_decay=float(settings.weight_decay),
        adam_beta1=float(settings.beta1),
        adam_beta2=float(settings.beta2),
        adam_eps=float(settings.epsilon),
        clip_grad=0.0 if settings.gradient_clip is None else float(settings.gradient_clip),
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )


def _inner(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's: one for experts' parameters and one for all others."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if one.optimizer is not None]
