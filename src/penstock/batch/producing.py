"""The way in: `produce` and `produce_many`, the only code that runs once per item.

It is plain Python, and the one module that may also be compiled (by mypyc, see `hatch_build.py`); either way it means
the same. That is why the annotations here name built-in lists, dictionaries and tuples: those the compiler knows.
"""

from collections.abc import Callable, Iterable
from operator import countOf
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.batch.drain import wake_owner

T = TypeVar("T")

if TYPE_CHECKING:
    from penstock.batch.admission import Admission
    from penstock.batch.handles import BatchProducer, Producer
    from penstock.batch.layout import Layout
    from penstock.batch.partition import Lane

try:
    from mypy_extensions import mypyc_attr
except ImportError:  # it only speaks to the compiler, so it is not needed at run time

    def mypyc_attr(*attrs: str, **kwattrs: object) -> Callable[[T], T]:
        return lambda cls: cls


COMPILED = not __file__.endswith((".py", ".pyc"))
"""Whether this module runs compiled."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Producing:
    """The producers' side of a queue.

    Threads: every method may be called from any thread.
    """

    def __init__(self, layout: "Layout", admission: "Admission") -> None:
        self._layout = layout
        self._admission = admission
        self._routes: dict[type, tuple[list[list[Any]], list[Any]]] = layout.routes
        self._homes: dict[type, Lane] = layout.homes

    def produce(self, item: object, timeout: float | None = None) -> bool:
        """Put `item` in; True if it will be consumed, False if it will not.

        Without `timeout` a full partition is met as the strategy says; with it, by waiting so many seconds.
        """
        try:
            credits, items = self._routes[type(item)]
            asleep = credits.pop()
            items.append(item)
        except KeyError:
            return self._produce_routed(item, timeout)
        except IndexError:
            return self._admission.admit(self._layout.lane_for(item), (item,), timeout) == 1
        except BaseException:
            self._admission.interrupted = True
            raise
        if asleep:
            wake_owner(asleep)
        return True

    def _produce_routed(self, item: object, timeout: float | None) -> bool:
        """The same for an item whose lane has to be found: the first of its type, or another lane for each item."""
        lane = self._layout.lane_for(item)
        credits, items = lane.route
        try:
            asleep = credits.pop()
            items.append(item)
        except IndexError:
            return self._admission.admit(lane, (item,), timeout) == 1
        except BaseException:
            self._admission.interrupted = True
            raise
        if asleep:
            wake_owner(asleep)
        return True

    def produce_many(self, items: Iterable[object], timeout: float | None = None) -> int:
        """Put `items` in; how many were accepted.

        Where a full partition is waited for, those are the first so many; otherwise each one that found room.
        """
        batch: list[object] = items if type(items) is list else listed(items)
        if not batch:
            return 0
        kind, count = type(batch[0]), len(batch)
        lane = self._homes.get(kind)
        # The last one tells most mixed batches at once.
        if lane is None or type(batch[-1]) is not kind or not _all_of(batch, kind):
            return self._produce_mixed(batch, timeout)
        partition = lane.partition
        if not partition.put_all(lane, batch, count):
            return self._admission.admit(lane, batch, timeout)
        if partition.asleep:
            wake_owner(partition.asleep)
        return count

    def _produce_mixed(self, batch: list[object], timeout: float | None) -> int:
        admission, routes = self._admission, self._routes
        admission.check_sizes(batch)
        deadline = admission.deadline(admission.patience(timeout))
        accepted = 0
        for item in batch:
            try:
                credits, items = routes[type(item)]
                asleep = credits.pop()
                items.append(item)
            except (KeyError, IndexError):
                if self._produce_routed(item, deadline.left()):
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


def one_by_one(lane: "Lane", admission: "Admission") -> "Producer[T]":
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


def in_batches(lane: "Lane", admission: "Admission") -> "BatchProducer[T]":
    """A `produce_many` that knows the lane."""

    def emit(items: Iterable[T], timeout: float | None = None) -> int:
        batch = items if type(items) is list or type(items) is tuple else listed(items)
        count = len(batch)
        partition = lane.partition
        if not count or not partition.put_all(lane, batch, count):
            return admission.admit(lane, batch, timeout) if count else 0
        if partition.asleep:
            wake_owner(partition.asleep)
        return count

    return emit


def listed(items: Iterable[T]) -> list[T]:
    """The items as a list; TypeError for a text, most likely one item that was to be listed."""
    if isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"produce_many takes a list of items, got one {type(items).__name__}: produce it, or list it")
    return list(items)


def _all_of(items: list[object], kind: type) -> bool:
    """Whether all are of exactly this kind."""
    if not COMPILED:
        return countOf(map(type, items), kind) == len(items)  # a tenth less than the loop
    for item in items:  # noqa: SIM110
        if type(item) is not kind:
            return False
    return True
