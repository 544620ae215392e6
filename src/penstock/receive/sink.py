"""Where what was received goes: the seams to L1 and to the relay, and what a sender is told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.model.point import Chunk

Done = Callable[[BaseException | None], None]
DoneByPlace = Callable[[BaseException | Mapping[int, BaseException] | None], None]


class Format(Enum):
    """What a body is."""

    OTLP = "otlp"  # ExportMetricsServiceRequest, protobuf
    OTLP_JSON = "otlp_json"
    REMOTE_WRITE = "remote_write"  # WriteRequest, protobuf
    EVENTS = "events"  # JSON


class Sink(Protocol):
    """Takes points: L1."""

    def submit(self, chunks: Sequence[Chunk], done: Done) -> bool:
        """All of them or, with False, none: it is full or closed.

        If True, `done` is called exactly once, from any thread: with None when the points are as safe as the configured
        durability says, with an error if they are not and will not be.
        """
        ...


class RawSink(Protocol):
    """Takes bodies as they came, decompressed: the relay."""

    def takes(self, kind: Format) -> bool:
        """Whether bodies of that format go anywhere."""
        ...

    def submit_raw(self, kind: Format, bodies: Sequence[bytes], done: DoneByPlace) -> bool:
        """As `Sink.submit`, of a format that it takes; OTLP that came as JSON comes as protobuf.

        `done` may be told what became of single bodies, by their places: then the others are safe.
        """
        ...


class Refusal(Enum):
    """Why something was not taken: the label `reason` of our metrics."""

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
    BROKEN = "broken"  # the same, but it is our fault


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sender of one body is told."""

    status: Status
    message: str = ""
    rejected: int = 0  # points
    reasons: tuple[str, ...] = ()  # of those, the first few
    is_useless: bool = False  # nothing of it is taken: those are all that it has, and it is not relayed


TAKEN = Answer(Status.TAKEN)
