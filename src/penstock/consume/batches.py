"""Messages that wait to be handled together."""

from collections.abc import Callable
from typing import Protocol

from penstock.consume.delivery import Delivery, Job
from penstock.consume.routes import ConsumerRoute

DEFAULT_BATCH_TIMEOUT = 1.0  # seconds that a batch may wait to be full


class DeliveryTimers(Protocol):
    """What calls back later, on the I/O thread."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> object: ...

    def cancel(self, timer: object) -> None: ...


class MessageBatcher:
    """Collects the deliveries of each route with batches until one is full or its first message has waited enough.

    I/O thread only.
    """

    def __init__(self, timers: DeliveryTimers, emit: Callable[[Job], None]) -> None:
        self._timers = timers
        self._emit = emit
        self._batches: dict[ConsumerRoute, Job] = {}
        self._deadlines: dict[ConsumerRoute, object] = {}

    def add(self, delivery: Delivery) -> None:
        route = delivery.route
        if not route.batch_size or delivery.message.attempt > 1:
            # What failed before, alone or among others, can alone fail no other message.
            self.flush(route)
            self._emit([delivery])
            return
        batch = self._batches.setdefault(route, [])
        batch.append(delivery)
        if len(batch) >= route.batch_size:
            self.flush(route)
        elif len(batch) == 1:
            timeout = route.options.batch_timeout or DEFAULT_BATCH_TIMEOUT
            self._deadlines[route] = self._timers.call_later(timeout, lambda: self.flush(route))

    def flush(self, route: ConsumerRoute) -> None:
        """Hand over what has come together."""
        batch = self._take(route)
        if batch:
            self._emit(batch)

    def clear(self) -> Job:
        """Everything that waits, no longer to be handed over."""
        return [delivery for route in list(self._batches) for delivery in self._take(route)]

    def _take(self, route: ConsumerRoute) -> Job:
        timer = self._deadlines.pop(route, None)
        if timer is not None:
            self._timers.cancel(timer)
        return self._batches.pop(route, [])
