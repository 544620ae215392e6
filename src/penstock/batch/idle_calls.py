"""The `on_idle` functions of handlers: which are to be called, alone where several threads may consume."""

import logging
from collections.abc import Callable, Iterator
from types import MethodType

from penstock.batch.partition import Lane, Registration

log = logging.getLogger("penstock.batch")

IdleCalls = tuple[tuple[Callable[[], object], ...], tuple[Lane, ...]]  # `on_idle` functions, and the lanes they are of
NO_CALLS: IdleCalls = ((), ())


def call_on_idle(registration: Registration, queue_name: str) -> None:
    """Once, if nobody consumes; an error is logged."""
    if registration.on_idle is None:
        return
    try:
        idle_call(registration)()
    except BaseException:  # noqa: BLE001 - whatever a handler raises, the drain thread must go on
        _log_failure(queue_name, registration)


def side_by_side(functions: tuple[Callable[[], object], ...]) -> Iterator[Callable[[], object]]:
    """The same, with the methods of handlers made anew: so they lie together in memory, which is quicker to read."""
    for function in functions:
        yield MethodType(function.__func__, function.__self__) if type(function) is MethodType else function


def of_absent(calls: IdleCalls) -> Iterator[Callable[[], object]]:
    """Those whose lanes got no data since the last time we looked."""
    for function, lane in zip(*calls):
        was_absent, lane.idle_mark = lane.idle_mark == lane.taken and not lane.items, lane.taken
        if was_absent:
            yield function


def idle_call(registration: Registration) -> Callable[[], object]:
    """Its `on_idle`; where several threads may consume, one that does nothing while they do."""
    on_idle, gate = registration.on_idle, registration.gate
    assert on_idle is not None
    if gate is None:
        return on_idle

    def call_alone() -> None:
        if gate.try_alone():
            try:
                on_idle()
            finally:
                gate.leave_alone()

    return call_alone


def log_idle_failure(queue_name: str, calls: IdleCalls, on_idle: Callable[[], object]) -> None:
    functions, lanes = calls
    _log_failure(queue_name, lanes[functions.index(on_idle)].registration)


def _log_failure(queue_name: str, registration: Registration) -> None:
    log.exception("on_idle failed. queue=%s type=%s", queue_name, registration.type)
