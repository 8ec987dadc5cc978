"""Where an engine computes, and how tensors get there without waiting for what is being computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tracerl.api.errors import InputError, first_line

_CPU = torch.device("cpu")


def device_of(gpus: int, field: str, index: int = 0) -> torch.device:
    """Give the CPU for no GPUs, and else one of those that this process sees, from now on its current one.

    `field` is the manifest's that asks for them. InputError when the process does not see so many.
    """
    if not gpus:
        return _CPU
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else ": this PyTorch is built without CUDA"
        raise InputError(
            f"{field} is {gpus}, but PyTorch {torch.__version__} sees no GPU here{build}; write 0, or use a "
            "machine with an NVIDIA GPU, its driver and PyTorch for CUDA"
        )
    here = torch.cuda.device_count()
    if index >= here:
        raise InputError(
            f"{field} is {gpus}, and this process is to compute on GPU {index} (from 0), but there are "
            f"{here} here; write fewer, or give the container as many"
        )
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise InputError(
            f"{field} is {gpus}, but GPU {index} cannot be used ({first_line(error)}); see with nvidia-smi "
            "who has it, or write 0"
        ) from None
    return device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Give a host tensor on a device, behind what that computes; on the CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """Make a stream of a GPU; None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def timing_event() -> torch.cuda.Event:
    """Make an event that keeps the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GpuTime:
    """Time that what is timed takes of a GPU, by CUDA events; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds = 0.0
        """So far, as of the last `settle`."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time between what the block asks for first and last, on the current stream."""
        if not self.on_gpu:
            yield
            return
        start, end = timing_event(), timing_event()
        start.record()
        yield
        end.record()
        self._pending.append((start, end))

    def settle(self) -> None:
        """Wait for all that was timed, and count it; call it where it was waited for anyway."""
        for start, end in self._pending:
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1000
        self._pending.clear()


class Uploads:
    """Host tensors on their way to a device, beside what it computes: page-locked, on a stream of their own.

    What `put` gives may be used after `join`. On a CPU tensors stay where they are.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = stream_on(self.device)
        self._pending: list[Tensor] = []

    def put(self, *parts: Tensor) -> Tensor:
        """Begin to copy tensors [n, …], one behind the other along their rows.

        What is page-locked is copied from where it is; the rest is copied on the host before.
        """
        if self._stream is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        size = sum(len(part) for part in parts), *parts[0].shape[1:]
        with torch.cuda.stream(self._stream):
            there = torch.empty(size, dtype=parts[0].dtype, device=self.device)
            start = 0
            for part in parts:
                there[start : start + len(part)].copy_(part.pin_memory(), non_blocking=True)
                start += len(part)
        self._pending.append(there)
        return there

    def join(self) -> None:
        """Let what the current stream computes from now on wait for the copies."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in self._pending:
            tensor.record_stream(current)
        self._pending.clear()
