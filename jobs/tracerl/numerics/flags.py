"""What kernels find wrong with a site's values, kept on the device until a pass is over.

On CPU a value that is NaN or Inf raises where it is found. On CUDA to ask would stop the queue of kernels, so
a site is marked instead, and an engine asks once a pass.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

import torch
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError

NON_FINITE = 1
"""Mark of a site that holds NaN or Inf."""
NO_SCALE = 256
"""Mark of a site whose record holds a whole block scale that is not a finite one."""


class NonFiniteError(JobError):
    """A value to quantise is NaN or Inf; it never becomes a code."""

    def __init__(self, site: str) -> None:
        super().__init__(
            Reason.NON_FINITE,
            f"{named(site)} holds NaN or Inf; check the model's weights, "
            "or lower spec.trainer.optimizer.learningRate",
        )
        self.site = site


class NonFiniteFlags:
    """A mark for every site, on one CUDA device.

    Within ``with flags:`` calls of this thread with CUDA tensors mark their site, without synchronisation;
    outside they check at once, as calls with CPU tensors always do. A CUDA graph that was captured within
    marks the same places whenever it is replayed. Threads that autograd starts are outside.
    """

    def __init__(self, device: torch.device | str, capacity: int = 4096) -> None:
        """Hold marks for `capacity` sites."""
        self.marks = torch.zeros(capacity, dtype=torch.int32, device=device)
        """int32 [capacity], one a site in the order of their first calls; 0 is a site without fault."""
        self._slots: dict[str, int] = {}
        self._entered: list[Token[NonFiniteFlags | None]] = []

    def __enter__(self) -> NonFiniteFlags:
        self._entered.append(_CURRENT.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._entered.pop())

    def slot(self, site: str) -> int:
        """Give the place of a site's mark; ValueError when all are taken."""
        if site not in self._slots and len(self._slots) == len(self.marks):
            raise ValueError(f"{named(site)} has no mark left of {len(self.marks)}; give a larger capacity")
        return self._slots.setdefault(site, len(self._slots))

    def check(self, marks: Tensor | None = None) -> None:
        """Wait for the device, and forget all marks if there are any.

        Args:
            marks: int32 [capacity], a copy of `marks` made after the pass, to wait for nothing.

        Raises:
            NonFiniteError: A site held NaN or Inf; the first one is named.
            ValueError: A record held a whole scale that is not a finite one.
        """
        found: list[int] = (self.marks if marks is None else marks)[: len(self._slots)].tolist()
        if not any(found):
            return
        self.clear()
        for site, mark in zip(self._slots, found, strict=True):
            if mark & NON_FINITE:
                raise NonFiniteError(site)
            if mark & NO_SCALE:
                raise no_scale_error(site)

    def clear(self) -> None:
        """Forget all marks, after whatever the device is doing."""
        self.marks.zero_()


_CURRENT: ContextVar[NonFiniteFlags | None] = ContextVar("non_finite_flags", default=None)


class Mark:
    """Where a call on a device marks its site: in the flags around it, or in some of its own."""

    def __init__(self, site: str, device: torch.device) -> None:
        flags = _CURRENT.get()
        self._own = flags is None or flags.marks.device != device
        self._flags = NonFiniteFlags(device, 1) if flags is None or self._own else flags
        self.marks = self._flags.marks
        self.slot = self._flags.slot(site)

    def settle(self) -> None:
        """Raise what was found, as `NonFiniteFlags.check`, unless flags around the call will."""
        if self._own:
            self._flags.check()


def refuse(wrong: Tensor, what: int, site: str) -> None:
    """Raise when `wrong`, bool [], is true, or mark the site with `what` where that would stop a device."""
    if not wrong.is_cuda:
        if wrong:
            raise NonFiniteError(site) if what == NON_FINITE else no_scale_error(site)
        return
    mark = Mark(site, wrong.device)
    mark.marks[mark.slot].bitwise_or_(wrong.int() * what)
    mark.settle()


def no_scale_error(site: str) -> ValueError:
    """Say that a record is damaged."""
    return ValueError(
        f"the record of {named(site)} holds a whole block scale that is no finite number; discard the record"
    )


def named(site: str) -> str:
    """Give the subject of a sentence about a site."""
    return site or "a tensor to quantise"
