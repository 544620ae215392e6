"""How items get into their lanes: `produce_many`, and the handles for items of one type."""

from collections.abc import Iterable
from operator import countOf
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.batch.drain import wake_owner

if TYPE_CHECKING:
    from penstock.batch.admission import ProduceAdmission
    from penstock.batch.layout import PartitionLayout
    from penstock.batch.partition import Lane
    from penstock.batch.queue import BatchProducer, Producer

T = TypeVar("T")


def produce_many_into(
    layout: "PartitionLayout", admission: "ProduceAdmission", items: Iterable[object], timeout: float | None
) -> int:
    """Put `items` in; how many were accepted."""
    batch: list[object] = items if type(items) is list else produced_as_list(items)
    if not batch:
        return 0
    kind, count = type(batch[0]), len(batch)
    lane = layout.homes.get(kind)
    # The last one tells most mixed batches at once.
    if lane is None or type(batch[-1]) is not kind or not _all_of(batch, kind):
        return _put_mixed(layout, admission, batch, timeout)
    partition = lane.partition
    if not partition.put_all(lane, batch, count):
        return admission.admit(lane, batch, timeout)
    if partition.asleep:
        wake_owner(partition.asleep)
    return count


def _put_mixed(
    layout: "PartitionLayout", admission: "ProduceAdmission", batch: list[object], timeout: float | None
) -> int:
    """The same for items of several types, or of one type that goes to several partitions."""
    routes: dict[type, tuple[list[list[Any]], list[Any]]] = layout.routes
    admission.check_sizes(batch)
    deadline = admission.deadline(admission.patience(timeout))
    accepted = 0
    for item in batch:
        try:
            credits, items = routes[type(item)]
            asleep = credits.pop()
            items.append(item)
        except (KeyError, IndexError):
            if produce_without_route(layout, admission, item, deadline.left()):
                accepted += 1
            elif deadline.patience != 0:  # time is up, or the queue has closed
                admission.refuse_all(batch[accepted + 1 :])
                break
        except BaseException:
            admission.interrupted = True
            raise
        else:
            accepted += 1
            if asleep:
                wake_owner(asleep)
    return accepted


def produce_without_route(
    layout: "PartitionLayout", admission: "ProduceAdmission", item: object, timeout: float | None
) -> bool:
    """Put `item` in: the first of its type, one that goes to another lane each time, or one that found no credit."""
    lane = layout.lane_for(item)
    credits, items = lane.route
    try:
        asleep = credits.pop()
        items.append(item)
    except IndexError:
        return admission.admit(lane, (item,), timeout) == 1
    except BaseException:
        admission.interrupted = True
        raise
    if asleep:
        wake_owner(asleep)
    return True


def producer_of(lane: "Lane", admission: "ProduceAdmission") -> "Producer[T]":
    """A `produce` that knows the lane."""
    credits: list[list[Any]] = lane.route[0]
    items: list[Any] = lane.route[1]

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
            wake_owner(asleep)
        return True

    return emit


def batch_producer_of(lane: "Lane", admission: "ProduceAdmission") -> "BatchProducer[T]":
    """A `produce_many` that knows the lane."""

    def emit(items: Iterable[T], timeout: float | None = None) -> int:
        batch = items if type(items) is list or type(items) is tuple else produced_as_list(items)
        count = len(batch)
        partition = lane.partition
        if not count or not partition.put_all(lane, batch, count):
            return admission.admit(lane, batch, timeout) if count else 0
        if partition.asleep:
            wake_owner(partition.asleep)
        return count

    return emit


def produced_as_list(items: Iterable[T]) -> list[T]:
    """The items as a list; TypeError for a text, most likely one item that was to be listed."""
    if isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"produce_many takes a list of items, got one {type(items).__name__}: produce it, or list it")
    return list(items)


def _all_of(items: list[object], kind: type) -> bool:
    """Whether all are of exactly this kind."""
    return countOf(map(type, items), kind) == len(items)
