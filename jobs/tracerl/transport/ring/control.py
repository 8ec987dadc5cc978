"""What a client tells and asks its store about references, on a connection of its own.

A request here may fail as a metrics reader's patience ends, and none of that touches the connection that
holds a reader's pins or a producer's lease.

What drops references is never lost as long as the store's process lives: what could not be sent is kept, and
sent with the next call that reaches the store. When another process answers, its frames are gone anyway.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from tracerl.api.frames import Handle, HandleError, parse_handle
from tracerl.transport.base import TransportError, Usage
from tracerl.transport.retry import Deadline
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.channel import Channel, LostError, Session

_USAGE_SECONDS = 1.0
"""How long `usage` waits for a store that is down: metrics ask for it, whose reader does not wait long."""
_TELL_SECONDS = 5.0
"""How long `release` and `forget` wait for a store that is down, before they leave it to a later call."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer", bound=m.Message)


class Control:
    """References of the frames of one store. Use it from several threads."""

    def __init__(
        self, path: Path, *, store: str, job_uid: str, run_id: str, token: str, name: str, timeout: float
    ) -> None:
        """Prepare to connect to the store whose directory is `path`; `timeout` is what its callers wait."""
        self._store, self._timeout = store, timeout
        self._channel = Channel(path, m.Hello(job_uid, run_id, "control", token, name), store)
        self._lock = threading.Lock()
        """Guards what follows."""
        self._released: dict[str, Counter[int]] = {}
        """By the store's process: references that are to be dropped, and were not yet."""
        self._forgotten: dict[str, None] = {}
        """Trajectories that the store is to forget, and was not yet told."""

    def connect(self, deadline: Deadline) -> None:
        """Connect to the store if that is not done. TransportError."""
        self._session(deadline)

    def nudge(self) -> None:
        """Have the store listen to its producers. If that does not reach it, it does so a little later."""
        self._channel.nudge()

    def retain(self, handles: Iterable[Handle]) -> None:
        """Add a reference each. TransportError ``missing`` when one is gone; no reference is added then."""
        handles = list(handles)
        deadline = Deadline(self._timeout)
        while True:
            session = self._session(deadline)
            instance = session.welcome.instance
            seqs = [m.find_frame(each, self._store, instance)[0] for each in handles]
            done: list[int] = []
            try:
                for part in parts(seqs, m.MAX_SEQS):
                    late = partial(self._undo_retain, session, part)
                    session.ask(m.Retain(part), m.Done, deadline, late)
                    done += part
                return
            except (LostError, TransportError) as error:
                self._keep(instance, done)
                if isinstance(error, TransportError):
                    self.catch_up()
                    raise
                # It may come back. If it is the same process, what was being asked when the connection was
                # lost counts as not done: a reference too many is better than a frame that is gone too early.

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each; releasing what is gone does nothing. TransportError if not let in."""
        by_instance: dict[str, list[int]] = {}
        for handle in handles:
            try:
                instance = parse_handle(handle).name.partition("/")[0]
                seq, _ = m.find_frame(handle, self._store, instance)
            except (HandleError, TransportError):
                continue  # names no frame of this store
            by_instance.setdefault(instance, []).append(seq)
        for instance, seqs in by_instance.items():
            self._keep(instance, seqs)
        self._tell(_TELL_SECONDS)

    def forget(self, trajectories: Iterable[str]) -> None:
        """Drop all references of the run's frames that were put under these trajectories until now."""
        with self._lock:
            self._forgotten |= dict.fromkeys(trajectories)
        self._tell(_TELL_SECONDS)

    def present(self, handles: Sequence[Handle]) -> list[bool]:
        """Tell which frames could be read now: none of a store that is down. TransportError."""
        deadline = Deadline(self._timeout)
        while True:
            try:
                session = self._session(deadline)
                known: dict[int, Handle] = {}
                for handle in handles:
                    try:
                        known[m.find_frame(handle, self._store, session.welcome.instance)[0]] = handle
                    except TransportError:
                        continue
                present: set[int] = set()
                for part in parts(list(known), m.MAX_SEQS):
                    answer = session.ask(m.Present(part), m.Presence, deadline)
                    present |= {seq for seq, there in zip(part, answer.present, strict=True) if there}
                there = {known[seq] for seq in present}
                return [handle in there for handle in handles]
            except LostError:
                continue
            except TransportError as error:
                if error.fault != "failed":
                    raise
                return [False] * len(handles)

    def start_run(self) -> None:
        """Make the client's run the only one. TransportError."""
        self._ask(m.StartRun(), m.Done, self._timeout)

    def usage(self) -> Usage:
        """Count what the store holds; the counters are its own. TransportError."""
        return self._ask(m.UsageRequest(), Usage, _USAGE_SECONDS)

    def catch_up(self) -> None:
        """Send what was kept, if there is anything and the store can be reached at once."""
        if self._released or self._forgotten:
            self._tell(0.0)

    def close(self) -> None:
        """Send what was kept, if that can be done at once, and let go of the connection."""
        with contextlib.suppress(TransportError):  # the store lets this client in no more
            self.catch_up()
        self._channel.close()

    def _ask(self, message: m.Message, kind: type[_Answer], timeout: float) -> _Answer:
        deadline = Deadline(timeout)
        while True:
            session = self._session(deadline)
            try:
                return session.ask(message, kind, deadline)
            except LostError:
                continue

    def _tell(self, timeout: float) -> None:
        try:
            self._session(Deadline(timeout))
        except TransportError as error:
            if error.fault != "failed":
                raise

    def _session(self, deadline: Deadline) -> Session:
        """Give the session, on which all that was kept for its process is sent."""
        session = self._channel.session(deadline)
        session.receive_late()
        self._send_kept(session, deadline)
        return session

    def _send_kept(self, session: Session, deadline: Deadline) -> None:
        instance = session.welcome.instance
        with self._lock:
            # What is for earlier processes went with them.
            released, self._released = self._released.get(instance, Counter()), {}
            forgotten, self._forgotten = self._forgotten, {}
        unsent: list[m.Release | m.Forget] = [
            *map(m.Release, parts(list(released.elements()), m.MAX_SEQS)),
            *map(m.Forget, parts(list(forgotten), m.MAX_MESSAGE // (2 + m.MAX_NAME_BYTES))),
        ]
        try:
            while unsent:
                session.tell(unsent[0], deadline)
                del unsent[0]
        except (LostError, TransportError):
            pass  # what follows meets the same, and has somebody to tell
        finally:
            for message in unsent:
                if isinstance(message, m.Release):
                    self._keep(instance, message.seqs)
                else:
                    with self._lock:
                        self._forgotten |= dict.fromkeys(message.trajectories)

    def _undo_retain(self, session: Session, seqs: Sequence[int], answer: m.Message) -> None:
        """Drop the references again that were added after the caller was told that this failed."""
        if isinstance(answer, m.Done):
            self._keep(session.welcome.instance, seqs)
            self._send_kept(session, Deadline(0))

    def _keep(self, instance: str, seqs: Sequence[int]) -> None:
        if seqs:
            with self._lock:
                self._released.setdefault(instance, Counter()).update(seqs)


def parts(items: Sequence[_Item], most: int) -> Iterator[list[_Item]]:
    """Split a list into lists of at most `most` items."""
    for first in range(0, len(items), most):
        yield list(items[first : first + most])
