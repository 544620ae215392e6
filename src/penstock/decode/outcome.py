"""What a body is, and the answer to it: whether it is taken, and why points were refused."""

from dataclasses import dataclass
from enum import Enum

MAX_REASONS = 10  # that one answer names


class TooMany(Exception):
    """A request with more elements than any sender puts into one: it would fill our memory, or keep us busy."""


class Format(Enum):
    """What a body is."""

    OTLP = "otlp"  # ExportMetricsServiceRequest, protobuf
    OTLP_JSON = "otlp_json"
    REMOTE_WRITE = "remote_write"  # WriteRequest, protobuf
    EVENTS = "events"  # JSON

    @property
    def relayed_as(self) -> "Format":
        """The format in which a body is relayed."""
        return Format.OTLP if self is Format.OTLP_JSON else self


class PointRefusal(Enum):
    """Why a request or a point was not taken: the label `reason` of the metrics."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"  # a content type or encoding
    UNAUTHORIZED = "unauthorized"
    ORIGIN = "origin"  # a web page of a site that is not allowed
    FULL = "full"  # the queue, or what may wait for it
    CLOSED = "closed"
    FAILED = "failed"  # the disk, after it was taken
    LABELS = "labels"  # too many or too long
    METRICS = "metrics"  # too many
    STREAMS = "streams"  # too many
    QUOTA = "quota"  # too many of one metric or of one sender
    TIME = "time"  # none, or too far ahead
    VALUE = "value"  # none, or not a number
    SLOW = "slow"  # a client that took too long to send, or to read our answer
    ABORTED = "aborted"  # one that broke off
    CONNECTIONS = "connections"  # too many at a time


class DecodeStatus(Enum):
    """What became of a body."""

    TAKEN = "taken"  # all of it, or all but `DecodeAnswer.rejected` points
    BAD = "bad"  # it can never be taken
    TOO_LARGE = "too_large"  # the same, but parts of it might
    BUSY = "busy"  # it can be sent again, after a while
    BROKEN = "broken"  # the same, but the fault is on this side


@dataclass(frozen=True, slots=True)
class DecodeAnswer:
    """The answer to the sender of one body."""

    status: DecodeStatus
    message: str = ""
    rejected: int = 0  # points
    reasons: tuple[str, ...] = ()  # of the rejected points, the first few
    is_useless: bool = False  # all of its points are rejected, and it is not relayed

    @property
    def label(self) -> str:
        """What it is counted as: one that takes only some of the points, or none, is told from a whole success."""
        if self.status is not DecodeStatus.TAKEN or not self.rejected:
            return self.status.value
        return "rejected" if self.is_useless else "partly_taken"


TAKEN = DecodeAnswer(DecodeStatus.TAKEN)


class RefusedStreams(Exception):
    """Raised for a point, or for all points of a stream, that cannot be taken; says why."""

    def __init__(self, reason: PointRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason
