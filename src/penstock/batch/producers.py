"""Handles for producers of one type: `produce` and `produce_many` with nothing to look up and nothing to check."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from penstock.batch.admission import Admission
from penstock.batch.drain import rouse
from penstock.batch.partition import Lane

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Producer(Protocol[T_contra]):
    """What `BatchQueue.producer` gives: `produce` for one type."""

    def __call__(self, item: T_contra, timeout: float | None = None) -> bool: ...


class BatchProducer(Protocol[T_contra]):
    """What `BatchQueue.batch_producer` gives: `produce_many` for one type."""

    def __call__(self, items: Iterable[T_contra], timeout: float | None = None) -> int: ...


def one_by_one(lane: Lane, admission: Admission) -> Producer[T]:
    credits, items = lane.route

    def emit(item: T, timeout: float | None = None) -> bool:
        try:
            asleep = credits.pop()
            items.append(item)
        except IndexError:
            return admission.admit(lane, (item,), timeout) == 1
        except BaseException:
            admission.interrupted = True
            raise
        if asleep:
            rouse(asleep)
        return True

    return emit


def in_batches(lane: Lane, admission: Admission) -> BatchProducer[T]:
    def emit(items: Iterable[T], timeout: float | None = None) -> int:
        batch = items if type(items) is list or type(items) is tuple else listed(items)
        count = len(batch)
        partition = lane.partition
        if not count or not partition.put_all(lane, batch, count):
            return admission.admit(lane, batch, timeout) if count else 0
        if partition.asleep:
            rouse(partition.asleep)
        return count

    return emit


def listed(items: Iterable[T]) -> list[T]:
    """The items as a list; TypeError for a text, which somebody forgot to put into one."""
    if isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"produce_many takes a list of items, got one {type(items).__name__}: produce it, or list it")
    return list(items)
