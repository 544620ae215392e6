"""What an exporter is: the seam between the send queue and a destination."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from penstock.spool import Lease


class Prepared(NamedTuple):
    """A batch in the form in which it travels: compressed, and the headers that go with it."""

    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PartialSuccess:
    """The destination took the batch but for `rejected` of its items, and said why. Sending again would not help."""

    rejected: int
    message: str


class Exporter(Protocol):
    """Brings batches to one destination.

    Errors: `send` raises TransientExportError or PermanentExportError; anything else it raises is classified by its
        type and taken as transient, and so is a result that is neither None nor a PartialSuccess. What `prepare` raises
        makes the batch a dead letter, but for a TransientExportError, which counts as one of `send`.
    Threads: `prepare`, `send` and `split` are called from many threads at once.
    """

    in_order: bool
    """Whether the destination refuses what comes after something younger: then one worker sends, unless the
    configuration says how many, and a batch that failed holds up the others."""

    # An exporter may also have a `destination`, a text that log lines call it by.

    def prepare(self, batch: bytes) -> Prepared:
        """The part that costs processor time; with the pipeline split it runs on threads of its own."""
        ...

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        """The part that waits for the network. Returns when the destination has the batch."""
        ...

    def split(self, batch: bytes) -> list[bytes] | None:
        """The batch in smaller ones that make up the same, None if it cannot be split further. Always the same ones."""
        ...

    def close(self) -> None:
        """End what is under way and let go of connections."""
        ...


def check_send_result(result: object) -> None:
    """TypeError if the result is none that `Exporter.send` may return: a False may stand for a failure."""
    if result is not None and not isinstance(result, PartialSuccess):
        raise TypeError(f"send must return None or a PartialSuccess, or raise; it returned {type(result).__name__}")


@runtime_checkable
class GroupExporter(Protocol):
    """An exporter that takes many blocks at a time, strictly in the order of their sequences: one worker serves it."""

    max_blocks: int
    max_bytes: int
    """Together at most, unless one block alone is larger."""

    def begin(self, queue_id: str) -> None:
        """Called once, before the first group, with the queue's id; ConfigError if it has blocks of another queue."""
        ...

    def send_group(self, leases: Sequence[Lease]) -> list[tuple[Lease, str]]:
        """Bring all of them there; those that can never be, with the reason. Raises as `Exporter.send` does."""
        ...

    def close(self) -> None: ...
