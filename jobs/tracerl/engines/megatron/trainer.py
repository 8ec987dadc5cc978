"""`TrainerEngine` on Megatron-Core: its model, its parallel ranks, optimizer and checkpoints.

It runs on a CPU, in one process or several over gloo: data, tensor, context, pipeline and expert parallel; on
"cuda" in one process or, each of these by itself, in two over NCCL. How a micro-batch goes through the model
is in `passes`, which records a rank needs in `slicing`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tracerl.api.errors import InputError, first_line
from tracerl.api.job import DType, Optimizer, PrefillAttends, Spec, TensorScaleRule
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, Cut, EngineStats, Loss
from tracerl.engines.device import Uploads
from tracerl.engines.expert_weights import DOWN, GATE_UP, fake_quantise_expert_weights, weights_site
from tracerl.engines.guided import MicroBatch, Treatments
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
from tracerl.engines.megatron.passes import Passed, Passes, Rows
from tracerl.engines.megatron.slicing import layers_of, selection_of
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
from tracerl.records.sites import audit_table, site_table

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Taken:
    """A micro-batch that has gone through the model."""

    logp: Tensor
    """float32 [B, R]."""
    parts: list[list[int]]
    """Its trajectories in each piece."""
    micros: list[MicroBatch]
    passed: list[Passed]

    def of_pieces(self, x_BR: Tensor) -> list[Tensor]:
        """Each piece's values [M] out of those of all."""
        return [
            x_BR[part, : micro.size[1]].flatten().index_select(0, micro.places_M)
            for part, micro in zip(self.parts, self.micros, strict=True)
        ]


class MegatronTrainer:
    """`TrainerEngine` on Megatron-Core's GPTModel.

    Several processes are data parallel: each sees its own trajectories, and `update` sums gradients over
    them, so a loss must be divided by what all of them hold together. They must have met
    (`torch.distributed`) before they are constructed. Each holds the whole model, unless it is tensor or
    expert parallel, or a pipeline stage. Tensor, context and pipeline parallel ranks see the same
    trajectories, and each gives the same log-probs of all of them. An expert-parallel rank holds some
    experts, which compute the tokens of all ranks of its expert group. Ranks that need each other do every
    pass together and fail together when a value of one of them is not finite.

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
        self._passes = Passes(shape.hidden, shape.layers, self._place, self._seat, self._device)
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
            taken = self._take(batch, guided=guided, temperature=temperature, version=version)
        self._seat.piece = None
        self._stats.forward_seconds += time.perf_counter() - started
        return taken.logp

    def accumulate(
        self, batch: Batch, loss: Loss, *, guided: bool, temperature: float, version: int
    ) -> Tensor:
        """Log-probs, and the loss's gradient added (`TrainerEngine.accumulate`).

        With activation recompute the backward pass computes layers again, from the same records.
        """
        started = time.perf_counter()
        with host(self._device):
            taken = self._take(batch, guided=guided, temperature=temperature, version=version)
            logp = taken.logp.requires_grad_()
            (gradient,) = torch.autograd.grad(loss(logp), logp)
            middle = time.perf_counter()
            self._passes.backward(taken.passed, taken.of_pieces(gradient.to(self._device)))
        self._seat.piece = None
        self._stats.forward_seconds += middle - started
        self._stats.backward_seconds += time.perf_counter() - middle
        return logp.detach()

    def _take(self, batch: Batch, *, guided: bool, temperature: float, version: int) -> _Taken:
        passes = self._passes
        with passes.agreed():
            self._refresh()
        started = time.perf_counter()
        parts = passes.cut([len(one.tokens) for one in batch.trajectories])
        uploads = Uploads(self._device)
        micros = [
            MicroBatch([batch.trajectories[i] for i in part], self._table, self._audit_table, uploads)
            for part in parts
        ]
        uploads.join()
        self._stats.unpack_seconds += time.perf_counter() - started
        # Where ranks have rows apart, records were loaded of those that this one has with this padding.
        by_rows = self._place.multiple > 1
        longest = max((one.longest or 1 for one in batch.trajectories if by_rows), default=1)

        def pieces(*, check: bool) -> list[Rows]:
            how: dict[str, Any] = {"guided": guided, "version": version, "check": check}
            return [
                Rows(
                    micro.tokens_N,
                    micro.lengths,
                    micro.predicting_M,
                    micro.targets_M,
                    Treatments(self._plan, self.spec.quantization, micro, self._stats, **how),
                    longest,
                )
                for micro in micros
            ]

        logps_M, passed = passes.forward(self._model, pieces(check=False), temperature)
        (failed,) = passes.largest(not all(bool(logp_M.isfinite().all()) for logp_M in logps_M))
        if failed:
            with torch.no_grad():
                passes.forward(self._model, pieces(check=True), temperature)
            raise NonFiniteError("the logits")
        width = max(micro.size[1] for micro in micros)
        logp = torch.zeros(len(batch.trajectories), width, device=self._device)
        for part, micro, logp_M in zip(parts, micros, logps_M, strict=True):
            rows, own = micro.size
            flat = logp_M.new_zeros(rows * own).index_put((micro.places_M,), logp_M)
            logp[part, :own] = flat.view(rows, own)
        # Losses are computed where the loop is.
        return _Taken(logp.cpu(), parts, micros, passed)

    def supervised_step(self, tokens: Tensor, loss_mask: Tensor) -> float:
        """One unquantised FP32 update (`TrainerEngine.supervised_step`)."""
        batch, length = tokens.shape
        model = self._plain_model()
        with host(self._device):
            pieces = []
            for part in self._passes.cut([length - 1] * batch):
                own, mask = tokens[part].to(self._device), loss_mask[part].to(self._device)
                chosen = mask[:, 1:].reshape(-1).nonzero().squeeze(1)
                targets_M = own[:, 1:].reshape(-1).index_select(0, chosen)
                pieces.append(Rows(own[:, :-1].reshape(-1), [length - 1] * len(part), chosen, targets_M))
            logps_M, passed = self._passes.forward(model, pieces)
            sums = [-float(torch.cat(logps_M).sum()), sum(len(logp_M) for logp_M in logps_M)]
            totals = torch.tensor(sums, dtype=torch.float64)
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
            each = float(-1 / totals[1])
            self._passes.backward(passed, [torch.full_like(logp_M, each) for logp_M in logps_M])
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
            with host_optimizer(self._device), quiet():
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
        if getattr(self._named[parameter.name], "shared", False):
            return False  # Megatron's mark of a tied embedding's second copy, on the last stage
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
            value = self._master_value(parameter).to(self._dtype).cpu()
            for name, tensor in to_hf(parameter, value, self.shape):
                yield name, tensor.contiguous()

    def _refresh(self) -> None:
        """Put quantised values into the experts, once a version: of what was exported, in its dtype."""
        if self._exact or self._plan.weights_trainer is Treatment.UNQUANTIZED:
            return
        for layer in layers_of(self.shape.layers, self._place):
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
