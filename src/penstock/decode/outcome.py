"""What a body is, how it fared, and what its sender hears: the answer, and why points were refused."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MAX_REASONS = 10  # that one answer names
Ints = NDArray[np.int64]


class TooMany(Exception):
    """A request with more elements than any sender puts into one: it would fill our memory, or keep us busy."""


class Format(Enum):
    """What a body is."""

    OTLP = "otlp"  # ExportMetricsServiceRequest, protobuf
    OTLP_JSON = "otlp_json"
    REMOTE_WRITE = "remote_write"  # WriteRequest, protobuf
    EVENTS = "events"  # JSON


class Refusal(Enum):
    """Why a request or a point was not taken: the label `reason` of the metrics."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"  # a content type or encoding
    UNAUTHORIZED = "unauthorized"
    FULL = "full"  # the queue, or what may wait for it
    CLOSED = "closed"
    FAILED = "failed"  # the disk, after it was taken
    LABELS = "labels"  # too many or too long
    METRICS = "metrics"  # too many
    STREAMS = "streams"  # too many
    TIME = "time"  # none, or too far ahead
    VALUE = "value"  # none, or not a number
    SLOW = "slow"  # a client that took too long to send, or to read our answer
    ABORTED = "aborted"  # one that broke off
    CONNECTIONS = "connections"  # too many at a time


class Status(Enum):
    """How a body fared."""

    TAKEN = "taken"  # all of it, or all but `Answer.rejected` points
    BAD = "bad"  # it can never be taken
    TOO_LARGE = "too_large"  # the same, but parts of it might
    BUSY = "busy"  # it can be sent again, after a while
    BROKEN = "broken"  # the same, but the fault is on this side


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sender of one body hears."""

    status: Status
    message: str = ""
    rejected: int = 0  # points
    reasons: tuple[str, ...] = ()  # of the rejected points, the first few
    is_useless: bool = False  # all of its points are rejected, and it is not relayed


TAKEN = Answer(Status.TAKEN)


class RequestOutcomes:
    """How the requests of one group fared, by their numbers in it."""

    def __init__(self, requests: int) -> None:
        self.errors: dict[int, Answer] = {}  # of requests of which nothing can be taken
        self.reasons: Counter[Refusal] = Counter()
        self.rejected = np.zeros(requests, np.int64)
        self.messages: dict[int, list[str]] = {}
        self._taken: list[Ints] = []

    def fail(self, request: int, message: str, status: Status = Status.BAD) -> None:
        """Records that the request as a whole cannot be read, or cannot be taken now."""
        self.errors.setdefault(request, Answer(status, message))

    def reject(self, requests: Ints, reason: Refusal, message: str) -> None:
        """Records a refused point of each of these requests; an answer names the first few reasons."""
        if not len(requests):
            return
        self.reasons[reason] += len(requests)
        np.add.at(self.rejected, requests, 1)
        for request in np.unique(requests).tolist():
            self._add_message(request, message)

    def reject_one(self, request: int, reason: Refusal, message: str) -> None:
        """Records one refused point, without arrays."""
        self.reasons[reason] += 1
        self.rejected[request] += 1
        self._add_message(request, message)

    def _add_message(self, request: int, message: str) -> None:
        messages = self.messages.setdefault(request, [])
        if len(messages) < MAX_REASONS and message not in messages:
            messages.append(message)

    def take(self, requests: Ints) -> None:
        """Records that points of these requests are taken, also if they add nothing to what is known."""
        self._taken.append(requests)

    @cached_property
    def taken(self) -> set[int]:
        """The requests of which points are taken. Valid once all of them are decoded."""
        return set(np.unique(np.concatenate([*self._taken, np.zeros(0, np.int64)])).tolist())

    def answer(self, request: int) -> Answer:
        """Returns what its sender hears once the rest is safe."""
        if request in self.errors:
            return self.errors[request]
        if self.rejected[request]:
            messages, rejected = self.messages[request], int(self.rejected[request])
            return Answer(Status.TAKEN, "; ".join(messages), rejected, tuple(messages), request not in self.taken)
        return TAKEN
