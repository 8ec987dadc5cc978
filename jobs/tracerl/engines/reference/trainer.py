"""The reference training engine: whole sequences through the model, FP32 masters, gradients straight to them.

All masters lie in one flat FP32 buffer, and so do the working copies that the model computes with and both
kinds of gradient. A step is then a few passes over flat memory, and data parallelism one all-reduce.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tracerl.api.errors import InputError, first_line
from tracerl.api.job import DType, Optimizer, Spec, TensorScaleRule
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, EngineStats, Loss, Trajectory
from tracerl.engines.device import GpuTime, Uploads
from tracerl.engines.guided import MicroBatch, Treatments
from tracerl.engines.reference.model import MoEModel, PlainHooks, WholeSequences
from tracerl.engines.reference.quantised import TrainerHooks, quantise_experts
from tracerl.engines.reference.weights import copy_weights, hf_views, initialise
from tracerl.methods import plan
from tracerl.numerics import NonFiniteError, NonFiniteFlags
from tracerl.records.sites import audit_table, site_table


class _FlatParameters:
    """A model whose parameters and gradients are views of two flat buffers, matrices first, vectors last."""

    def __init__(self, model: MoEModel, values: Tensor, gradient: Tensor) -> None:
        self.model, self.values, self.gradient = model, values, gradient
        for (_, parameter), (part, part_gradient) in zip(
            _in_order(model), zip(_split(model, values), _split(model, gradient), strict=True), strict=True
        ):
            parameter.data = part
            parameter.grad = part_gradient


def _in_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(model.named_parameters(), key=lambda named: named[1].ndim == 1)


def _split(model: nn.Module, flat: Tensor) -> list[Tensor]:
    parameters = [parameter for _, parameter in _in_order(model)]
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


class _AdamW:
    """AdamW (as torch's) on one flat buffer, with decay for its first `matrices` values alone.

    Written out because making a `torch.optim.Optimizer` imports the whole compiler: seconds of every start.
    """

    def __init__(self, values: Tensor, matrices: int, settings: Optimizer) -> None:
        self._values, self._matrices = values, matrices
        self._betas = float(settings.beta1), float(settings.beta2)
        self._epsilon, self._decay = float(settings.epsilon), float(settings.weight_decay)
        self.learning_rate = float(settings.learning_rate)
        self.updates = 0
        self.exp_avg = torch.zeros_like(values)
        self.exp_avg_sq = torch.zeros_like(values)

    def reset(self) -> None:
        """Forget moments and the number of updates."""
        self.updates = 0
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Change the values."""
        self.updates += 1
        (beta1, beta2), rate = self._betas, self.learning_rate
        self.exp_avg.lerp_(gradient, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = self.exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**self.updates)).add_(self._epsilon)
        self._values[: self._matrices].mul_(1 - rate * self._decay)
        self._values.addcdiv_(self.exp_avg, spread, value=-rate / (1 - beta1**self.updates))


class ReferenceTrainer:
    """`TrainerEngine` on the reference model.

    With `torch.distributed` initialised, every process holds the whole model and sees its own trajectories:
    `update` sums gradients over processes, so a loss must be divided by what all processes hold together.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: Spec,
        weights: Mapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`weights` by Hugging Face's names; None draws them from `warmup.seed`.

        InputError for a shape or a tensor-scale rule that this engine does not compute, or a model too large.
        """
        if spec.quantization.tensor_scale is not TensorScaleRule.FIXED:
            raise InputError(
                f"spec.quantization.tensorScale: the Reference engine does not compute "
                f"{spec.quantization.tensor_scale}; use Fixed"
            )
        self.shape, self.spec, self.sharded = shape, spec, False
        self.selections = (None, None)
        self._device = torch.device(device)
        self._uploads, self._flags = Uploads(self._device), NonFiniteFlags(self._device)
        self._gpu_time, self._guided_time = GpuTime(self._device), GpuTime(self._device)
        self._ahead: MicroBatch | None = None
        """The micro-batch of the next pass, already on its way to the device."""
        self._plan = plan(spec, shape)
        self._table, self._audit_table = site_table(shape, spec), audit_table(shape, spec)
        self._dtype = torch.bfloat16 if spec.model.dtype is DType.BFLOAT16 else torch.float32
        settings = spec.trainer.optimizer
        try:
            full = MoEModel(shape, torch.float32, self._device)
            size = sum(p.numel() for p in full.parameters())
            matrices = sum(p.numel() for p in full.parameters() if p.ndim > 1)

            def buffer(dtype: torch.dtype) -> Tensor:
                return torch.zeros(size, dtype=dtype, device=self._device)

            self._master = _FlatParameters(full, buffer(torch.float32), buffer(torch.float32))
            self._working = _FlatParameters(
                MoEModel(shape, self._dtype, self._device), buffer(self._dtype), buffer(self._dtype)
            )
            self._optimizer = _AdamW(self._master.values, matrices, settings)
        except RuntimeError as error:
            raise InputError(
                f"there is no memory for the model of {spec.model.uri}, its gradients and its optimizer "
                f"({first_line(error)}); use a smaller model or a machine with more memory"
            ) from None
        self._stale = True
        if weights is None:
            initialise(shape, dict(full.named_parameters()), spec.warmup.seed)
        else:
            copy_weights(self._hf(self._master.values), weights, "the initial weights")

        self._clip = None if settings.gradient_clip is None else float(settings.gradient_clip)
        self._stats = EngineStats()

    # -- forward and backward -------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Batch, *, guided: bool, temperature: float, version: int) -> Tensor:
        """Log-probs (`TrainerEngine.forward`)."""
        started = time.perf_counter()
        with self._gpu_time.timed():
            logp = self._logp(batch, guided=guided, temperature=temperature, version=version)
        self._stats.forward_seconds += time.perf_counter() - started
        return logp

    def accumulate(
        self, batch: Batch, loss: Loss, *, guided: bool, temperature: float, version: int
    ) -> Tensor:
        """Log-probs, and the loss's gradient added (`TrainerEngine.accumulate`)."""
        started = time.perf_counter()
        with self._gpu_time.timed():
            logp = self._logp(batch, guided=guided, temperature=temperature, version=version)
        value = loss(logp)
        middle = time.perf_counter()
        with self._gpu_time.timed():
            self._working.gradient.zero_()
            value.backward()  # type: ignore[no-untyped-call]
            # Straight through rounding: what the working copy gets is the master's.
            self._master.gradient.add_(self._working.gradient)
        self._stats.forward_seconds += middle - started
        self._stats.backward_seconds += time.perf_counter() - middle
        return logp.detach()

    def _logp(self, batch: Batch, *, guided: bool, temperature: float, version: int) -> Tensor:
        self._refresh()
        started = time.perf_counter()
        micro = self._micro_batch(batch.trajectories)
        micro.arrive()
        self._stats.unpack_seconds += time.perf_counter() - started
        how = (self._plan, self.spec.quantization, micro, self._stats)
        guided_time = self._guided_time if self._guided_time.on_gpu else None
        treatments = Treatments(*how, guided=guided, version=version, guided_time=guided_time)
        attention = WholeSequences(self.shape, micro.lengths, self._device)
        model = self._working.model
        with self._flags:
            hidden_NH = model(micro.tokens_N, attention, TrainerHooks(self.shape, treatments))
        logits_MV = model.logits(hidden_NH.index_select(0, micro.predicting_M)) / temperature
        logp_M = -functional.cross_entropy(logits_MV, micro.targets_M, reduction="none")
        batch_size, width = micro.size
        logp = logp_M.new_zeros(batch_size * width).index_put((micro.places_M,), logp_M)
        self._look_ahead(micro, batch)
        logp = logp.view(batch_size, width).cpu()  # losses are the host's, which waits here
        self._flags.check()
        if not bool(logp.isfinite().all()):
            self._explain(micro, Treatments(*how, guided=guided, version=version, check=True))
        return logp

    def _micro_batch(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Take what was looked ahead for, if these are the same trajectories."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.holds(trajectories):
            return ahead
        return MicroBatch(trajectories, self._table, self._audit_table, self._uploads)

    def _look_ahead(self, micro: MicroBatch, batch: Batch) -> None:
        """While the GPU computes this pass, copy there what the next one takes."""
        if self._device.type != "cuda" or not (upcoming := batch.upcoming()):
            return
        self._ahead = micro if micro.holds(upcoming) else self._micro_batch(upcoming)

    @torch.no_grad()
    def _explain(self, micro: MicroBatch, treatments: Treatments) -> None:
        """Find the first site that is not finite, by a second forward pass; always raises."""
        attention = WholeSequences(self.shape, micro.lengths, self._device)
        self._working.model(micro.tokens_N, attention, TrainerHooks(self.shape, treatments))
        raise NonFiniteError("the logits")

    def supervised_step(self, tokens: Tensor, loss_mask: Tensor) -> float:
        """One unquantised FP32 update (`TrainerEngine.supervised_step`)."""
        batch, length = tokens.shape
        model = self._master.model
        attention = WholeSequences(self.shape, [length - 1] * batch, self._device)
        hidden_NH = model(tokens[:, :-1].reshape(-1).to(self._device), attention, PlainHooks(self.shape))
        chosen = loss_mask[:, 1:].reshape(-1).nonzero().squeeze(1).to(self._device)
        targets_M = tokens[:, 1:].reshape(-1).to(self._device).index_select(0, chosen)
        logits_MV = model.logits(hidden_NH.index_select(0, chosen))
        totals = torch.tensor([0.0, float(len(chosen))], dtype=torch.float64)
        loss = functional.cross_entropy(logits_MV, targets_M, reduction="sum")
        totals[0] = float(loss.detach())
        if _distributed():
            dist.all_reduce(totals)
        (loss / float(totals[1])).backward()  # type: ignore[no-untyped-call]
        self.update()
        return float(totals[0] / totals[1])

    # -- update and weights ---------------------------------------------------------------------------------

    def update(self) -> float:
        """Clip and step (`TrainerEngine.update`); a gradient that is not finite changes no weight."""
        started = time.perf_counter()
        gradient = self._master.gradient
        if _distributed():
            dist.all_reduce(gradient)
        with self._gpu_time.timed():
            norm = float(torch.linalg.vector_norm(gradient))
            if norm < float("inf"):
                if self._clip is not None and norm > self._clip:
                    gradient.mul_(self._clip / norm)
                self._optimizer.step(gradient)
                self._stale = True
            gradient.zero_()
        self._gpu_time.settle()
        self._stats.update_seconds += time.perf_counter() - started
        return norm

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next updates."""
        self._optimizer.learning_rate = learning_rate

    def reset_optimizer(self) -> None:
        """Start it afresh (`TrainerEngine.reset_optimizer`)."""
        self._optimizer.reset()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face's names, in compute dtype: what the rollout gets and the trainer uses."""
        yield from self._hf(self._master.values.to(self._dtype).cpu()).items()

    def _refresh(self) -> None:
        """Bring the working copy up to date, once a version: round to compute dtype, then quantise that."""
        if self._stale:
            self._working.values.copy_(self._master.values)
            quantise_experts(self._working.model, self._plan.weights_trainer, self.spec.quantization)
            self._stale = False

    def _hf(self, flat: Tensor) -> dict[str, Tensor]:
        model = self._master.model
        names = [name for name, _ in _in_order(model)]
        return hf_views(self.shape, dict(zip(names, _split(model, flat), strict=True)))

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """FP32 weights, both moments, and the number of updates, by Hugging Face's names under a prefix.

        Of tensors on the host.
        """
        state = {"updates": torch.tensor(self._optimizer.updates)}
        for prefix, flat in self._flat_state().items():
            host = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
            state |= {f"{prefix}/{name}": view.clone() for name, view in self._hf(host).items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state` (`TrainerEngine.load_state`)."""
        if "updates" not in state:
            raise InputError("the checkpoint has no number of updates; resume from another checkpoint")
        read = {prefix: torch.zeros_like(flat, device="cpu") for prefix, flat in self._flat_state().items()}
        for prefix, flat in read.items():
            named = {
                name.removeprefix(prefix + "/"): tensor
                for name, tensor in state.items()
                if name.startswith(prefix + "/")
            }
            copy_weights(self._hf(flat), named, f"the checkpoint's {prefix}")
        for prefix, flat in self._flat_state().items():
            flat.copy_(read[prefix])
        self._optimizer.updates = int(state["updates"])
        self._stale = True

    def _flat_state(self) -> dict[str, Tensor]:
        """The flat buffers of a checkpoint."""
        optimizer = self._optimizer
        return {
            "weights": self._master.values,
            "exp_avg": optimizer.exp_avg,
            "exp_avg_sq": optimizer.exp_avg_sq,
        }

    def cut(self, name: str) -> None:
        """Every rank holds all weights whole (`TrainerEngine.cut`)."""

    def gpu_seconds(self) -> float:
        """What passes and updates took of the GPU (`TrainerEngine.gpu_seconds`)."""
        self._gpu_time.settle()
        return self._gpu_time.seconds

    def stats(self) -> EngineStats:
        """Sums since the last call."""
        before = self._guided_time.seconds
        self._guided_time.settle()
        self._stats.guided_seconds += self._guided_time.seconds - before
        stats, self._stats = self._stats, EngineStats()
        return stats


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
