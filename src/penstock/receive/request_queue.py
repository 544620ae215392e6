"""Requests that wait to be decoded, bounded in bytes, taken in groups by fair turns, held until they are answered."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.decode.outcome import DecodeAnswer
from penstock.receive.fair_turns import FairRequestTurns
from penstock.receive.request_group import ReceivedRequest, RequestGroup

_GATHER = 0.025  # seconds that requests wait for a group to be safe, so that they are decoded together


@dataclass(slots=True)
class _Load:
    """What is held of one origin."""

    bytes_held: int = 0
    unanswered: int = 0

    def add(self, requests: Sequence[ReceivedRequest], sign: int) -> None:
        self.bytes_held += sign * sum(len(request.body) for request in requests)
        self.unanswered += sign * len(requests)


class RequestQueue:
    """Holds requests until they are answered. Those that other processes hand over have a bound of their own.

    Threads: every method may be called from any thread; one takes groups.
    """

    def __init__(self, max_held: int, max_group: int, clock: Clock) -> None:
        self._clock = clock
        self._max_held = max_held
        self._max_group = max_group
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = FairRequestTurns()
        self._waiting_bytes = 0
        self._waiting_from_peers = 0
        self._gathering_since: float | None = None
        self._in_flight = 0  # groups that are not safe yet
        self._answered_by_peers: deque[RequestGroup] = deque()
        self._from_senders = _Load()
        self._from_peers = _Load()
        self.is_closed = False  # to senders
        self._is_closed_to_peers = False

    # -- in ------------------------------------------------------------------------------------------------------------

    def push(self, requests: Sequence[ReceivedRequest]) -> bool:
        """Takes requests of one origin, all or none; False if too much is held already, or if it is closed."""
        is_from_peer, size = requests[0].is_from_peer, sum(len(request.body) for request in requests)
        load = self._load_of(requests[0])
        with self._lock:
            # Handed over bodies are decompressed, and may be larger than all that may wait: then they come alone.
            is_full = load.bytes_held + size > self._max_held and not (is_from_peer and load.bytes_held == 0)
            if is_full or (self._is_closed_to_peers if is_from_peer else self.is_closed):
                return False
            load.add(requests, 1)
            is_first = not self._waiting
            for request in requests:
                self._waiting.add(request)
            self._count_waiting_locked(requests, 1)
            if is_first or is_from_peer or self._waiting_bytes >= self._max_group:
                self._changed.notify_all()
        return True

    def put_back(self, requests: Sequence[ReceivedRequest]) -> None:
        """Lets them wait again, in their old places."""
        with self._lock:
            for request in requests:
                self._waiting.put_back(request)
            self._count_waiting_locked(requests, 1)

    def _count_waiting_locked(self, requests: Sequence[ReceivedRequest], sign: int) -> None:
        self._waiting_bytes += sign * sum(len(request.body) for request in requests)
        self._waiting_from_peers += sign * sum(request.is_from_peer for request in requests)

    def _load_of(self, request: ReceivedRequest) -> _Load:
        return self._from_peers if request.is_from_peer else self._from_senders

    # -- groups --------------------------------------------------------------------------------------------------------

    def next_work(self, patience: float) -> RequestGroup | list[ReceivedRequest] | None:
        """Returns a group to resume, for whose parts all other processes have answered, or requests to decode together.

        They are of one format; none after `patience` seconds without any. None at the end.
        """
        with self._lock:
            if not self._waiting and not self._answered_by_peers and not self._is_closed_to_peers:
                self._changed.wait(patience)
            if not self._waiting and not self._answered_by_peers:
                return None if self._is_closed_to_peers else []
            if self._waiting and self._gathering_since is None:
                self._gathering_since = self._clock.monotonic()
            waited = self._clock.monotonic() - (self._gathering_since or 0.0)
            self._changed.wait_for(self._is_enough_locked, max(0.0, _GATHER - waited))
            if self._answered_by_peers:  # it goes first, and what gathers does not wait longer for it
                return self._answered_by_peers.popleft()
            self._gathering_since = None
            group = [self._waiting.pop()]
            size = len(group[0].body)
            while self._waiting and self._waiting.next().kind is group[0].kind and size < self._max_group:
                group.append(self._waiting.pop())
                size += len(group[-1].body)
            self._count_waiting_locked(group, -1)
            return group

    def _is_enough_locked(self) -> bool:
        """Says whether it is no use to wait for more requests to come."""
        is_full = self._waiting_bytes >= self._max_group
        is_urgent = bool(self._answered_by_peers) or self._waiting_from_peers > 0
        return not self._in_flight or is_full or self.is_closed or is_urgent

    def charge(self, decoded: Sequence[tuple[ReceivedRequest, int]]) -> None:
        """Counts the bytes that requests had once they were decompressed: their senders' next turns are later."""
        with self._lock:
            self._waiting.charge(decoded)

    def group_sent(self) -> None:
        """Counts a group that was decoded and is not safe yet."""
        with self._lock:
            self._in_flight += 1

    def group_settled(self) -> None:
        """Counts a group that is safe, or will not be."""
        with self._lock:
            self._in_flight -= 1
            self._changed.notify_all()

    def on_peer_answer(self, group: RequestGroup, answers: Mapping[int, DecodeAnswer]) -> None:
        """Records what another process answers for its part of a group."""
        with self._lock:
            group.peer_answers.append(answers)
            group.awaited -= 1
            if not group.awaited:
                self._answered_by_peers.append(group)
                self._changed.notify_all()

    # -- out -----------------------------------------------------------------------------------------------------------

    def release(self, requests: Sequence[ReceivedRequest]) -> None:
        """Frees the room of requests that are answered."""
        with self._lock:
            for request in requests:
                self._load_of(request).add([request], -1)
            if self.is_closed:
                self._changed.notify_all()

    def close_to_senders(self) -> None:
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Takes nothing more, also not from other processes."""
        with self._lock:
            self.is_closed = self._is_closed_to_peers = True
            self._changed.notify_all()

    def wait_until_answered(self, timeout: float, *, with_peers: bool) -> bool:
        """Says whether all senders, or all processes too, were answered within that time."""
        with self._lock:
            return self._changed.wait_for(
                lambda: not self.unanswered and not (with_peers and self._from_peers.unanswered), timeout
            )

    @property
    def held_bytes(self) -> int:
        return self._from_senders.bytes_held + self._from_peers.bytes_held

    @property
    def fullness(self) -> float:
        """The share of `max_held` that requests of senders take."""
        return self._from_senders.bytes_held / self._max_held

    @property
    def unanswered(self) -> int:
        """Requests of senders."""
        return self._from_senders.unanswered
