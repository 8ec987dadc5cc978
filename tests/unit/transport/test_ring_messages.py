"""Messages survive the wire, and bytes that are none are a ProtocolError and nothing else."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.transport.base import TransportError, Usage
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.segments import Commit, ProtocolError

U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SEQS = st.lists(U64, max_size=20)
FAULTS = st.sampled_from(["missing", "full", "permission", "foreign", "damaged", "failed"])

MESSAGES = st.one_of(
    st.builds(m.Hello, TEXT, TEXT, st.sampled_from(["producer", "reader", "control"]), TEXT, TEXT),
    st.builds(m.Welcome, TEXT, TEXT, U64, U64),
    st.builds(m.LeaseRequest, U32, U32),
    st.builds(m.Leased, U32, U64),
    st.builds(m.Commits, st.lists(st.builds(Commit, U64, U64, U64, TEXT), max_size=10)),
    st.builds(m.Pin, SEQS),
    st.builds(
        m.Pinned,
        st.lists(st.builds(m.PinAnswer, st.sampled_from(list(m.PinState)), U32, U64, U64), max_size=10),
    ),
    st.builds(m.Unpin, SEQS),
    st.builds(m.Fetch, st.lists(st.builds(m.Piece, U64, U64, U64), max_size=10)),
    st.builds(m.Fetched, st.lists(st.one_of(st.just(""), FAULTS), max_size=10), TEXT),
    st.builds(m.Retain, SEQS),
    st.builds(m.Release, SEQS),
    st.builds(m.Present, SEQS),
    st.builds(m.Presence, st.lists(st.integers(0, 1), max_size=20)),
    st.builds(m.Forget, st.lists(TEXT, max_size=10)),
    st.builds(m.StartRun),
    st.builds(m.UsageRequest),
    st.builds(Usage, U64, U64, U64, U64, st.booleans(), st.dictionaries(TEXT, U64, max_size=5)),
    st.builds(m.Nudge),
    st.builds(m.Done),
    st.builds(m.Refused, FAULTS, TEXT),
)


@given(MESSAGES)
@settings(max_examples=300, deadline=None)
def test_a_message_comes_back_as_it_was(message: m.Message) -> None:
    data = m.encode(message)
    assert len(data) <= m.MAX_MESSAGE
    assert m.decode(memoryview(data)) == message


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        message = m.decode(memoryview(data))
    except ProtocolError:
        return
    assert m.decode(memoryview(m.encode(message))) == message


@given(MESSAGES, st.data())
@settings(max_examples=500, deadline=None)
def test_a_changed_message_is_a_message_or_a_protocol_error(message: m.Message, data: st.DataObject) -> None:
    wire = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(wire)))
        wire[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with contextlib.suppress(ProtocolError):
        m.decode(memoryview(wire))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b"9" * 60_000,
        b"\xff",
        json.dumps({"store": "s", "instance": "\ud800", "segment_bytes": 1, "segments": 1}).encode(),
        json.dumps({"store": "s", "instance": "i", "segment_bytes": True, "segments": 1}).encode(),
        json.dumps({"store": "s", "instance": "i", "segment_bytes": 1.0, "segments": 1}).encode(),
        json.dumps({"store": "s", "instance": "i", "segment_bytes": 1, "segments": 1, "more": 1}).encode(),
    ],
)
def test_json_that_is_no_welcome(body: bytes) -> None:
    number = m.encode(m.Welcome("s", "i", 1, 1))[:1]
    with pytest.raises(ProtocolError):
        m.decode(memoryview(number + body))


def test_lists_and_messages_have_a_greatest_length() -> None:
    pin = m.encode(m.Pin([1]))[:1]
    assert len(m.decode(memoryview(pin + bytes(8 * m.MAX_PINS))).seqs) == m.MAX_PINS  # type: ignore[union-attr]
    for data in (b"", pin + bytes(8 * m.MAX_PINS + 8), pin + bytes(7), b"\xff", bytes(m.MAX_MESSAGE + 1)):
        with pytest.raises(ProtocolError):
            m.decode(memoryview(data))
    m.encode(m.Release([0] * m.MAX_SEQS))
    with pytest.raises(ValueError, match="no message is that long"):
        m.encode(m.Release([0] * 9_000))
    for message in (m.Release([-1]), m.Release([2**64]), m.Forget(["x" * 70_000])):
        with pytest.raises(ValueError, match=type(message).__name__):
            m.encode(message)


def test_a_name_is_utf8_and_of_some_length() -> None:
    forget = m.encode(m.Forget(["ab"]))
    assert m.decode(memoryview(forget)) == m.Forget(["ab"])
    longest = m.Forget(["x" * m.MAX_NAME_BYTES])
    assert m.decode(memoryview(m.encode(longest))) == longest
    for data in (
        forget[:-1],
        forget[:-2] + b"\xff\xff",
        m.encode(m.Forget(["x" * (m.MAX_NAME_BYTES + 1)])),
    ):
        with pytest.raises(ProtocolError):
            m.decode(memoryview(data))


def test_handles_of_a_ring() -> None:
    handle = m.name_frame("store-0", "0123456789abcdef", 17, 5, 0xAB)
    assert handle == "rec://store-0/0123456789abcdef/17?len=5&xxh3=00000000000000ab"
    assert m.find_frame(handle, "store-0", "0123456789abcdef") == (17, 5)
    for other in (
        m.name_frame("store-1", "0123456789abcdef", 17, 5, 0),
        m.name_frame("store-0", "fedcba9876543210", 17, 5, 0),
        m.name_frame("store-0", "0123456789abcdef", -1, 5, 0),
        handle.replace("/17?", "/x?"),
        handle.replace("/17?", "/18446744073709551616?"),
        handle.replace("/17?", "?"),
        "nonsense",
    ):
        with pytest.raises(TransportError) as caught:
            m.find_frame(other, "store-0", "0123456789abcdef")  # type: ignore[arg-type]
        assert caught.value.fault == "missing"
