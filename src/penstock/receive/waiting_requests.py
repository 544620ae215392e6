"""Requests that wait: to be decoded, bounded in bytes and taken in groups; and then for their answers."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.decode.outcome import Answer, Format
from penstock.receive.bodies import Encoding
from penstock.receive.request_group import UnderWay

_GATHER = 0.025  # seconds that requests wait for a group to be safe, so that they are decoded together

Deliver = Callable[[list[tuple[object, Answer]]], None]


@dataclass(slots=True, eq=False)
class Request:
    """A body that waits for its answer: `deliver` is called once, with `token` and it, from any thread."""

    kind: Format
    body: bytes
    encoding: Encoding
    most: int  # bytes that it may have once decompressed
    token: object
    deliver: Deliver
    is_ours: bool = True  # it came to us, and not to another process which handed it over


class WaitingRoom:
    """Holds requests from their coming to their answers; what comes from other processes has a room of its own.

    Threads: every method may be called from any thread; one takes groups.
    """

    def __init__(self, max_held: int, max_group: int, clock: Clock) -> None:
        self._clock = clock
        self._max_held = max_held
        self._max_group = max_group
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._handed_to_us = 0  # of those that wait: another process waits for them
        self._gathering_since: float | None = None
        self._in_flight = 0  # groups that are not safe yet
        self._returned: deque[UnderWay] = deque()  # of which all other processes have answered
        self._held = {True: 0, False: 0}  # bytes; of those that are ours, and of the others
        self._unanswered = {True: 0, False: 0}
        self.is_closed = False  # to senders
        self._is_ending = False  # to other processes, too

    # -- in ------------------------------------------------------------------------------------------------------------

    def enter(self, requests: Sequence[Request]) -> bool:
        """Let in requests of one origin, all or none; False if too much is held already, or if it is closed."""
        is_ours, size = requests[0].is_ours, sum(len(request.body) for request in requests)
        with self._lock:
            # What others hand over is decompressed, and may be larger than all that may wait: then it comes alone.
            is_full = self._held[is_ours] + size > self._max_held and (is_ours or self._held[is_ours] > 0)
            if is_full or (self.is_closed if is_ours else self._is_ending):
                return False
            self._held[is_ours] += size
            self._unanswered[is_ours] += len(requests)
            is_first = not self._waiting
            self._waiting.extend(requests)
            self._count_locked(requests, 1)
            if is_first or not is_ours or self._waiting_bytes >= self._max_group:
                self._changed.notify_all()
        return True

    def put_back(self, requests: Sequence[Request]) -> None:
        """They are the next to be taken again."""
        with self._lock:
            self._waiting.extendleft(reversed(requests))
            self._count_locked(requests, 1)

    def _count_locked(self, requests: Sequence[Request], sign: int) -> None:
        self._waiting_bytes += sign * sum(len(request.body) for request in requests)
        self._handed_to_us += sign * sum(not request.is_ours for request in requests)

    # -- groups --------------------------------------------------------------------------------------------------------

    def next_group(self, patience: float) -> list[Request] | None:
        """Requests of one format to decode together; none when it is time to look around, None at the end."""
        with self._lock:
            if not self._waiting and not self._returned and not self._is_ending:
                self._changed.wait(patience)
            if not self._waiting and not self._returned:
                return None if self._is_ending else []
            if self._waiting and self._gathering_since is None:
                self._gathering_since = self._clock.monotonic()
            waited = self._clock.monotonic() - (self._gathering_since or 0.0)
            self._changed.wait_for(self._is_enough_locked, max(0.0, _GATHER - waited))
            if self._returned:  # they come first, and those who wait do not wait longer for it
                return []
            self._gathering_since = None
            group = [self._waiting.popleft()]
            size = len(group[0].body)
            while self._waiting and self._waiting[0].kind is group[0].kind and size < self._max_group:
                size += len(self._waiting[0].body)
                group.append(self._waiting.popleft())
            self._count_locked(group, -1)
            return group

    def _is_enough_locked(self) -> bool:
        """Whether it is no use to wait for more requests to come."""
        is_full = self._waiting_bytes >= self._max_group
        return not self._in_flight or is_full or self.is_closed or bool(self._returned) or self._handed_to_us > 0

    def sent_on(self) -> None:
        """A group was decoded and is not safe yet."""
        with self._lock:
            self._in_flight += 1

    def settled(self) -> None:
        """It is safe, or will not be."""
        with self._lock:
            self._in_flight -= 1
            self._changed.notify_all()

    def heard(self, group: UnderWay, answers: Mapping[int, Answer]) -> None:
        """Another process has answered for its part of a group."""
        with self._lock:
            group.heard.append(answers)
            group.awaited -= 1
            if not group.awaited:
                self._returned.append(group)
                self._changed.notify_all()

    def next_returned(self) -> UnderWay | None:
        """A group of which all other processes have answered."""
        with self._lock:
            return self._returned.popleft() if self._returned else None

    # -- out -----------------------------------------------------------------------------------------------------------

    def answered(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self._held[request.is_ours] -= len(request.body)
                self._unanswered[request.is_ours] -= 1
            if self.is_closed:
                self._changed.notify_all()

    def close(self) -> None:
        """Let no senders in any more."""
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Nor other processes."""
        with self._lock:
            self.is_closed = self._is_ending = True
            self._changed.notify_all()

    def wait_until_answered(self, timeout: float, *, also_others: bool) -> bool:
        """Whether everybody was answered within that time, or all who are ours."""
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._unanswered[True] and not (also_others and self._unanswered[False]), timeout
            )

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @property
    def unanswered(self) -> int:
        """Of those that are ours."""
        return self._unanswered[True]
