"""The operator's queue, in a time that passes only while nothing is to be done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tracerl_operator.shell.workqueue import FIRST_BACKOFF, LAST_BACKOFF, WorkQueue


class _SkippingLoop(asyncio.SelectorEventLoop):
    """Time goes on to the next timer at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def timeless(test: Callable[[WorkQueue[str]], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in such a time, with a queue that lets keys out."""

    async def run() -> None:
        queue = WorkQueue[str]()
        queue.run(True)
        async with asyncio.timeout(10_000):
            await test(queue)

    def wrapper() -> None:
        with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
            runner.run(run())

    wrapper.__name__ = test.__name__
    return wrapper


def now() -> float:
    return asyncio.get_running_loop().time()


async def empty(queue: WorkQueue[str], seconds: float = 0.5) -> bool:
    """Whether nothing comes in that time."""
    try:
        await asyncio.wait_for(queue.get(), seconds)
    except TimeoutError:
        return True
    return False


@timeless
async def test_a_key_is_worked_on_once_at_a_time(queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert await empty(queue)
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert await empty(queue)


@timeless
async def test_keys_do_not_wait_for_each_other(queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.add("b")
    assert [await queue.get(), await queue.get()] == ["a", "b"]


@timeless
async def test_errors_are_tried_again_ever_later(queue: WorkQueue[str]) -> None:
    queue.add("a")
    pauses = []
    for _ in range(9):
        await queue.get()
        began = now()
        queue.failed("a")
        queue.add("a")  # its own changes shorten nothing
        await queue.get()
        pauses.append(now() - began)
        queue.add("a")
        queue.failed("a")
        began = now()
    expected = [min(FIRST_BACKOFF * 2 ** (2 * number), LAST_BACKOFF) for number in range(9)]
    assert all(0.8 * e <= p <= 1.2 * e for p, e in zip(pauses, expected, strict=True)), pauses


@timeless
async def test_success_begins_anew(queue: WorkQueue[str]) -> None:
    queue.add("a")
    for _ in range(5):
        await queue.get()
        queue.failed("a")
    await queue.get()
    queue.done("a")
    queue.add("a")
    await queue.get()
    assert queue.failed("a") <= 1.2 * FIRST_BACKOFF


@timeless
async def test_what_is_urgent_does_not_wait_for_an_error(queue: WorkQueue[str]) -> None:
    for while_working in (True, False):
        queue.add("a")
        await queue.get()
        if while_working:
            queue.add("a", urgent=True)
        queue.failed("a")
        if not while_working:
            queue.add("a", urgent=True)
        began = now()
        assert await queue.get() == "a"
        assert now() == began
        queue.done("a")


@timeless
async def test_of_two_times_the_first_counts(queue: WorkQueue[str]) -> None:
    queue.add_after("a", 60)
    queue.add_after("a", 20)
    queue.add_after("a", 40)
    await queue.get()
    assert now() == pytest.approx(20)
    queue.done("a")
    assert await empty(queue, 100)


@timeless
async def test_a_time_in_the_past_is_not_at_once(queue: WorkQueue[str]) -> None:
    queue.add_after("a", -5)
    await queue.get()
    assert now() == pytest.approx(1)


@timeless
async def test_a_key_that_always_comes_back_is_slowed_down(queue: WorkQueue[str]) -> None:
    queue.add("a")
    for _ in range(100):
        await queue.get()
        queue.add("a")
        queue.done("a")
    assert now() > 70 * 3
    # Others go on.
    queue.add("b")
    began = now()
    assert await queue.get() == "b"
    assert now() == began


@timeless
async def test_what_is_urgent_is_slowed_down_like_all_else(queue: WorkQueue[str]) -> None:
    queue.add("a")
    for _ in range(100):
        await queue.get()
        queue.add("a", urgent=True)
        queue.failed("a")
    assert now() > 70 * 3


@timeless
async def test_a_queue_that_does_not_run_keeps_its_keys(queue: WorkQueue[str]) -> None:
    queue.run(False)
    queue.add("a")
    assert await empty(queue)
    queue.run(True)
    assert await queue.get() == "a"


@timeless
async def test_what_is_forgotten_comes_back_when_it_changed_meanwhile(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await queue.get()
    queue.forget("a")
    assert await empty(queue)
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.forget("a")
    assert await queue.get() == "a"
