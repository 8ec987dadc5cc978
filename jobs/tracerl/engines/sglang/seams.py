"""Every place in SGLang that the plugin hooks or calls, with the parameters that it relies on.

SGLang only logs when a hook's target is missing, and would then go on without it. So each seam is checked by
name before hooks are registered, and again, in the process that computes, when they should have taken.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from dataclasses import dataclass

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError

TESTED_VERSIONS = ("0.5.23",)
"""Versions of SGLang that the tests of this package passed with."""
_ROOT = "sglang.srt."


@dataclass(frozen=True)
class Seam:
    """A function or method of SGLang, by its path below sglang.srt."""

    path: str
    parameters: tuple[str, ...]
    """Names of parameters that are used, in any order."""

    @property
    def target(self) -> str:
        """Full path, as SGLang's hook registry takes it."""
        return _ROOT + self.path


_PROCESSOR = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."

CAPTURER = Seam("model_executor.model_runner.ModelRunner.init_routed_experts_capturer", ("self",))
EXPERTS = Seam("layers.moe.fused_moe_triton.layer.FusedMoE.run_moe_core", ("self", "dispatch_output"))
ATTENTION = Seam(
    "layers.radix_attention.RadixAttention.forward",
    ("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
)
FORWARD_END = Seam(
    "state_capturer.routed_experts.RoutedExpertsCapturer.on_forward_end",
    ("self", "forward_batch", "can_run_graph", "cuda_graph_batch", "no_copy_to_cpu"),
)
GATHER = Seam(
    "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", ("self", "model_runner")
)
"""Called with DP attention alone."""
RUN = Seam("managers.scheduler.Scheduler.run_batch", ("self", "batch"))
PREFILLED = Seam(_PROCESSOR + "process_batch_result_prefill", ("self", "batch", "result"))
DECODED = Seam(_PROCESSOR + "process_batch_result_decode", ("self", "batch", "result"))
COLLECT = Seam(_PROCESSOR + "_maybe_collect_routed_experts", ("self", "req"))
RELEASE = Seam("managers.schedule_batch.release_req", ("req", "req_to_token_pool"))
PAUSE = Seam("managers.scheduler.Scheduler.pause_generation", ("self", "recv_req"))
ADMIT = Seam("managers.scheduler.Scheduler.get_new_batch_prefill", ("self", "running_batch"))
FLUSH = Seam("managers.scheduler.Scheduler.flush_cache", ("self",))
BEGIN = Seam(_UPDATER + "begin_weight_update", ("self", "recv_req"))
FROM_DISK = Seam(_UPDATER + "update_weights_from_disk", ("self", "recv_req"))
FROM_DISTRIBUTED = Seam(_UPDATER + "update_weights_from_distributed", ("self", "recv_req"))
END = Seam(_UPDATER + "end_weight_update", ("self", "recv_req"))
SEEDED = Seam("layers.sampler.multinomial_with_seed", ("logprobs", "seed", "positions"))
"""Hooked where there is no CUDA."""
FUSED_KV = Seam("models.utils.enable_fused_set_kv_buffer", ("forward_batch",))

HOOKED = (
    CAPTURER,
    EXPERTS,
    ATTENTION,
    FORWARD_END,
    GATHER,
    RUN,
    PREFILLED,
    DECODED,
    COLLECT,
    RELEASE,
    PAUSE,
    ADMIT,
    FLUSH,
    BEGIN,
    FROM_DISK,
    FROM_DISTRIBUTED,
    END,
    FUSED_KV,
)
"""Seams that the Emulated back end hooks."""

_RUNNER_UPDATER = "model_executor.model_runner_components.weight_updater.WeightUpdater."
CALLED = (
    SEEDED,
    Seam(
        _RUNNER_UPDATER + "receive_weights_from_distributed",
        ("self", "names", "dtypes", "shapes", "group_name"),
    ),
    Seam(_UPDATER + "record_weight_version_after_update", ("self", "weight_version")),
    Seam("state_capturer.routed_experts.RoutedExpertsCapturer._get_local_slice", ("self", "forward_batch")),
    Seam("layers.dp_attention.dp_slot_in", ("per_rank",)),
    Seam("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode", ("forward_batch",)),
    Seam("mem_cache.memory_pool.KVWriteLoc.for_batch", ("forward_batch",)),
    Seam(
        "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v"),
    ),
    Seam("model_executor.forward_batch_info.ForwardMode.is_extend", ("self",)),
    Seam("runtime_context.RuntimeContext.override", ("self", "source")),
    Seam("layers.moe.fused_moe_native.moe_forward_native", ("layer", "x", "topk_output")),
    Seam("entrypoints.engine.Engine.__init__", ("self",)),
    Seam("managers.tokenizer_manager.TokenizerManager.generate_request", ("self", "obj", "request")),
    Seam("managers.tokenizer_manager.TokenizerManager.abort_request", ("self", "rid", "abort_all")),
    Seam("managers.tokenizer_manager.TokenizerManager.pause_generation", ("self", "obj")),
    Seam("managers.tokenizer_manager.TokenizerManager.continue_generation", ("self", "obj")),
)
"""Seams that are called, and whose parameters or results matter."""


def check_version() -> None:
    """Raise JobError unless the installed SGLang is a tested one."""
    version = importlib.metadata.version("sglang")
    if version not in TESTED_VERSIONS:
        raise JobError(
            Reason.CONFIGURATION,
            f"SGLang {version} is installed, but the plugin was tested with {', '.join(TESTED_VERSIONS)} "
            "alone; install that version",
        )


def check_seams(seams: tuple[Seam, ...]) -> None:
    """Raise JobError naming the first seam that is not there or lacks a parameter."""
    for seam in seams:
        try:
            function = pkgutil.resolve_name(seam.target)
            names = inspect.signature(function).parameters
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise JobError(
                Reason.CONFIGURATION,
                f"SGLang has no {seam.target} ({error}), which the plugin hooks; install SGLang "
                f"{TESTED_VERSIONS[-1]}",
            ) from None
        lacking = [name for name in seam.parameters if name not in names]
        if lacking:
            raise JobError(
                Reason.CONFIGURATION,
                f"SGLang's {seam.target} has no parameter {lacking[0]}, which the plugin uses; install "
                f"SGLang {TESTED_VERSIONS[-1]}",
            )


def check_hooks(seams: tuple[Seam, ...]) -> None:
    """Raise JobError naming the first seam whose hook did not take in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415

    for seam in seams:
        function = pkgutil.resolve_name(seam.target)
        if seam.target not in HookRegistry._patched or not hasattr(function, "__wrapped__"):
            raise JobError(
                Reason.CONFIGURATION,
                f"the hook of {seam.target} did not take; no other plugin may replace it, see SGLANG_PLUGINS",
            )
