"""One source over several stores, of which some fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from record_stores import RUN_ID, TOKEN, ThreadStore, frames_of, key, shared_directory, wanted

from tracerl.api.frames import Handle
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.remote import RemoteSource
from tracerl.transport.sources import RecordSources, Route

_SEED = 5


@pytest.fixture
def ring_dir() -> Iterator[Path]:
    with shared_directory() as directory:
        yield directory


@pytest.fixture
def stores(ring_dir: Path) -> Iterator[list[ThreadStore]]:
    stores = [ThreadStore(ring_dir / f"store-{number}", name=f"store-{number}") for number in range(2)]
    yield stores
    for store in stores:
        store.close()


def put(store: ThreadStore, count: int, trajectory: str = "t-0") -> list[Handle]:
    sink = store.sink()
    handles = [sink.put(frame, key(trajectory)) for frame in frames_of(_SEED, range(1, count + 1))]
    sink.close()
    return handles


def pins(store: ThreadStore) -> int:
    return store.ring.status().counts.pins


def test_a_store_that_is_gone_fails_alone(stores: list[ThreadStore]) -> None:
    nowhere = RemoteSource("store-2", lambda: None, token=TOKEN, run_id=RUN_ID, timeout=0.1)
    source = RecordSources(
        {
            "store-0": Route("ring", stores[0].near()),
            "store-1": Route("http", stores[1].far()),
            "store-2": Route("http", nowhere),
        }
    )
    here, there = put(stores[0], 2), put(stores[1], 2)
    lost = Handle("rec://store-2/0123456789abcdef/0?len=1&xxh3=0000000000000000")
    asked = [lost, there[0], here[0], Handle("none"), there[1], here[1]]
    with source.borrow(wanted(asked)) as borrowed:
        found = [
            piece.fault if isinstance(piece, TransportError) else len(piece[0]) for piece in borrowed.pieces
        ]
    assert found == ["failed", 1, 1, "missing", 2, 2]
    assert source.present(asked) == [False, True, True, False, True, True]
    usage = source.usage()
    assert usage.congested
    assert (usage.frames, usage.counters["silent_stores"]) == (4, 1)
    # Those that answer are asked all the same.
    with pytest.raises(TransportError, match="store-2 did not answer"):
        source.release([lost, here[0], there[0]])
    with pytest.raises(TransportError, match="store-2 did not answer"):
        source.forget(["t-0"])
    with pytest.raises(TransportError, match="store-2 did not answer"):
        source.start_run()
    assert source.usage().frames == 0
    source.close()


def test_views_end_together_and_pins_with_them(stores: list[ThreadStore]) -> None:
    source = RecordSources({store.name: Route("ring", store.near()) for store in stores})
    handles = put(stores[0], 3) + put(stores[1], 3)
    borrowed = source.borrow(wanted(handles))
    assert [pins(store) for store in stores] == [3, 3]
    array = np.frombuffer(borrowed.pieces[4][0], np.uint8)
    with pytest.raises(TransportError, match="still in use by arrays"):
        borrowed.release()
    assert sum(pins(store) for store in stores) > 0
    assert bytes(array) == frames_of(_SEED, [1, 2])[1]
    del array
    borrowed.release()
    borrowed.release()
    with pytest.raises(ValueError, match="released"):
        bytes(borrowed.pieces[0][0])
    assert source.present(handles) == [True] * 6  # by now the unpins, sent before, have arrived
    assert [pins(store) for store in stores] == [0, 0]
    source.close()


def test_a_wrong_range_leaves_no_pins(stores: list[ThreadStore]) -> None:
    source = RecordSources(
        {"store-0": Route("ring", stores[0].near()), "store-1": Route("http", stores[1].far())}
    )
    here, there = put(stores[0], 2), put(stores[1], 2)
    for bad in (here[1], there[1]):
        with pytest.raises(ValueError, match="frame of 2 bytes"):
            source.borrow([Wanted(here[0]), Wanted(there[0]), Wanted(bad, ((0, 3),))])
    assert source.present(here) == [True, True]
    assert pins(stores[0]) == 0
    source.close()
