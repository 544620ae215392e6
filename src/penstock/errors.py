"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ConfigError            a setting that makes no sense (also a ValueError)
    ├── MissingRequirement     Java, an extra or a server that is not there, and what to do about it
    │   └── StoreUnavailable   the tables' server does not answer now: it may be back later
    ├── UndeclaredMetric       telemetry under a name that `penstock.telemetry` does not declare
    ├── BrokerError            the broker, or the way to it, refused what we need
    ├── ExportError            a destination did not take what was sent; `error_class` says what kind of failure
    │   ├── TransientExportError   it may take the same batch later, at `retry_after` if it said when
    │   ├── PermanentExportError   it will never take this batch
    │   │   └── PayloadTooLarge    but it might take its halves
    │   └── CircuitOpen        it was not even asked, because it keeps failing
    ├── SegmentVanished        a segment that a batch must have is gone: the batch cannot be repeated exactly
    ├── StreamDataLost         offsets that a batch must have are gone from a stream
    ├── TableConflict          a batch that does not follow what a table holds: adding it would lose or repeat points
    │   ├── TableOvertaken     another job has added some of it: go on from what the table holds now
    │   └── TableBusy          other commits came first each time: try again later
    ├── TablesOutdated         tables of another format: they have to be converted first
    ├── RowsMissing            what tasks report is not what was read, or not where the driver sees it
    └── QueueError             what both holders can say
        ├── QueueExists        the name is taken
        ├── QueueConflict      the queue of that name works in another mode
        ├── QueueClosed        it takes nothing any more
        ├── NoHandler          no handler is registered for items of this type
        ├── QueueFull          no room, and the policy is not to wait longer
        ├── QueueLocked        another process has the directory
        ├── BlockTooLarge      one block that could never fit
        ├── DiskFull           the disk has no room for a new block; what was accepted is safe
        └── DiskFailed         the disk failed a write or a sync; what was accepted before is safe

Decide by type, never by text.
"""

from enum import Enum


class PenstockError(Exception):
    """The root of the tree."""


class ConfigError(PenstockError, ValueError):
    """A setting that makes no sense; the text names the field, the value and the bound.

    `field` is the setting's name, as `limits.max_body`; empty where no single one is wrong. `problem` is the text
    without it.
    """

    def __init__(self, problem: str, *, field: str = "") -> None:
        super().__init__(f"{field} {problem}" if field else problem)
        self.field = field
        self.problem = problem

    def within(self, section: str) -> "ConfigError":
        """The same error with its field named from outside that section."""
        return ConfigError(self.problem, field=f"{section}.{self.field}" if self.field else section)


class MissingRequirement(PenstockError):
    """Something outside the program that it needs; the message says how to get it."""


class StoreUnavailable(MissingRequirement):
    """The server that has the tables does not answer, or was lost on the way: it may be back later."""


class UndeclaredMetric(PenstockError, KeyError):
    """A metric name that `penstock.telemetry` does not declare."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the message in quotes


class BrokerError(PenstockError):
    """The broker, or the way to it, refused what we need; the message says what and why, and holds no secret."""


class ErrorClass(Enum):
    """What kind of failure an export met: the label `error_type` of the metrics."""

    AUTH = "auth"
    RATE_LIMIT = "rate_limit"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    NETWORK = "network"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class ExportError(PenstockError):
    """A destination did not take what was sent."""

    def __init__(self, message: str, error_class: ErrorClass = ErrorClass.UNKNOWN) -> None:
        super().__init__(message)
        self.error_class = error_class


class TransientExportError(ExportError):
    """The same batch may be taken later: in `retry_after` seconds, if the destination said when."""

    def __init__(
        self, message: str, error_class: ErrorClass = ErrorClass.UNKNOWN, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message, error_class)
        self.retry_after = retry_after


class PermanentExportError(ExportError):
    """The destination will never take this batch."""

    def __init__(self, message: str, error_class: ErrorClass = ErrorClass.CLIENT_ERROR) -> None:
        super().__init__(message, error_class)


class PayloadTooLarge(PermanentExportError):
    """The batch is too large for the destination; its halves may not be."""


class CircuitOpen(ExportError):
    """The destination keeps failing and was not even asked."""


class SegmentVanished(PenstockError):
    """A segment that a batch must have is gone; the message says which."""


class StreamDataLost(PenstockError):
    """Offsets of a RabbitMQ stream that were still to be read are gone; the message names them."""


class TableConflict(PenstockError):
    """A batch that does not follow what a table holds; the message says how the two can be reconciled."""


class TableOvertaken(TableConflict):
    """Another job has added part of the batch: this one goes on from what the table holds, once it is alone."""


class TableBusy(TableConflict):
    """Other commits came first each time; a later attempt finds its turn."""


class TablesOutdated(PenstockError):
    """Tables whose format this version does not write; the message says how they are converted."""


class RowsMissing(PenstockError):
    """Rows that were read and are not in what the tasks report, or not where the driver sees them: nothing is added."""


class QueueError(PenstockError):
    """What went wrong with a queue."""


class QueueExists(QueueError):
    """A queue of that name exists already."""


class QueueConflict(QueueError):
    """The queue of that name works in another mode than the one asked for."""


class QueueClosed(QueueError):
    """The queue takes nothing any more."""


class NoHandler(QueueError):
    """No handler is registered for items of this type."""


class QueueFull(QueueError):
    """There is no room and the policy is not to wait any longer."""


class QueueLocked(QueueError):
    """Another process holds the queue's directory."""


class BlockTooLarge(QueueError):
    """One block larger than the queue could ever hold."""


class DiskFull(QueueError):
    """The disk has no room for a new block. Everything accepted before is safe."""


class DiskFailed(QueueError):
    """The disk failed a write or a sync of a new block. Everything accepted before is safe."""
