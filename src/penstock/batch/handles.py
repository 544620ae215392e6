"""What handles for producers of one type look like: `produce` and `produce_many` with nothing to look up."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


class Producer(Protocol[T_contra]):
    """What `BatchQueue.producer` gives: `produce` for one type."""

    def __call__(self, item: T_contra, timeout: float | None = None) -> bool: ...


class BatchProducer(Protocol[T_contra]):
    """What `BatchQueue.batch_producer` gives: `produce_many` for one type."""

    def __call__(self, items: Iterable[T_contra], timeout: float | None = None) -> int: ...
