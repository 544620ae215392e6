"""Where received points and bodies go: the seams to L1 and to the relay."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.decode.outcome import Format
from penstock.model.point import Chunk

Done = Callable[[BaseException | None], None]
DoneByPlace = Callable[[BaseException | Mapping[int, BaseException] | None], None]


class Sink(Protocol):
    """Takes points: L1."""

    def submit(self, chunks: Sequence[Chunk], done: Done, requests: bytes = b"") -> bool:
        """Takes all of them or, with False, none: it is full or closed. `requests` are the digests of what they are of.

        If True, `done` is called exactly once, from any thread: with None when the points are as safe as the configured
        durability says, with an error if they are not and will not be.
        """
        ...


class RawSink(Protocol):
    """Takes bodies as they came, decompressed: the relay."""

    def takes(self, kind: Format) -> bool:
        """Says whether bodies of that format have a destination."""
        ...

    def submit_raw(self, kind: Format, bodies: Sequence[bytes], done: DoneByPlace) -> bool:
        """Does as `Sink.submit`, for a format that it takes; OTLP that came as JSON comes as protobuf.

        `done` may get the errors of single bodies, by their places: then the others are safe.
        """
        ...
