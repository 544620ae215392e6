"""The topology that a service needs (exchanges, queues, bindings) and its consumers, as data.

Declared before anything is connected, checked as a whole, and declared at the broker at each (re)connect.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.consume.backoff_policy import BackoffPolicy
from penstock.consume.consumer_options import (
    MAX_ATTEMPTS,
    MAX_DELIVERIES,
    RETRY,
    ConsumerOptions,
    DeadLetters,
    Execution,
    Handler,
)
from penstock.errors import ConfigError

ExchangeKind = Literal["direct", "fanout", "topic", "headers", "x-delayed-message", "x-consistent-hash"]
QueueKind = Literal["classic", "quorum", "stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An exchange. `passive` says that it exists and is owned elsewhere."""

    name: str
    kind: ExchangeKind = "topic"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    passive: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue. `passive` says that it exists and is owned elsewhere."""

    name: str
    kind: QueueKind = "classic"
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    passive: bool = False
    dead_letter: DeadLetters | str | None = None  # an exchange
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dead_letters(self) -> DeadLetters | None:
        if isinstance(self.dead_letter, DeadLetters):
            return self.dead_letter
        exchange = self.dead_letter if self.dead_letter is not None else self.args.get("x-dead-letter-exchange")
        if exchange is None:
            return None
        return DeadLetters(exchange=exchange, routing_key=self.args.get("x-dead-letter-routing-key"))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as the broker takes them."""
        arguments = dict(self.args)
        if self.kind != "classic":
            arguments["x-queue-type"] = self.kind
        if self.dead_letters is not None and self.kind != "stream":
            arguments["x-dead-letter-exchange"] = self.dead_letters.exchange
            if self.dead_letters.routing_key is not None:
                arguments["x-dead-letter-routing-key"] = self.dead_letters.routing_key
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Messages of `exchange` whose key matches go to `queue`."""

    exchange: str
    queue: str
    routing_key: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Consumer:
    """The options of one queue: a handler per event type over one pool of workers."""

    name: str
    queue: Queue
    options: tuple[ConsumerOptions, ...]

    @property
    def pool(self) -> ConsumerOptions:
        """The options that speak for the pool."""
        return self.options[0]


# What options of one consumer must agree on, since they share it.
_SHARED = ("workers", "prefetch_count", "prefetch", "auto_ack", "exclusive", "args", "event_type_header")


class Declarations:
    """Collects what a service needs from the broker. Not thread-safe: build it, then start with it."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.queues: list[Queue] = []
        self.bindings: list[Binding] = []
        self._options: list[ConsumerOptions] = []

    def exchange(
        self,
        name: str,
        kind: ExchangeKind = "topic",
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        passive: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> Exchange:
        """Declare an exchange, by the fields of `Exchange`."""
        self.exchanges.append(
            Exchange(
                name=name,
                kind=kind,
                durable=durable,
                auto_delete=auto_delete,
                internal=internal,
                passive=passive,
                args=args or {},
            )
        )
        return self.exchanges[-1]

    def queue(
        self,
        name: str,
        kind: QueueKind = "classic",
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        passive: bool = False,
        dead_letter: DeadLetters | str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> Queue:
        """Declare a queue, by the fields of `Queue`."""
        self.queues.append(
            Queue(
                name=name,
                kind=kind,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                passive=passive,
                dead_letter=dead_letter,
                args=args or {},
            )
        )
        return self.queues[-1]

    def bind(self, queue: str, exchange: str, routing_key: str = "", **args: Any) -> Binding:
        """Let what `exchange` gets under `routing_key` go to `queue`."""
        self.bindings.append(Binding(exchange=exchange, queue=queue, routing_key=routing_key, args=args))
        return self.bindings[-1]

    def consumer(
        self,
        options: ConsumerOptions | None = None,
        *,
        queue: str = "",
        handler: Handler | None = None,
        consumer: str = "",
        event_type: str | None = None,
        event_type_header: str | None = None,
        workers: int = 0,
        prefetch_count: int = 0,
        prefetch: int | Literal["latency"] | None = None,
        auto_ack: bool = False,
        exclusive: bool = False,
        execution: Execution | str | None = None,
        batch_size: int | None = None,
        batch_timeout: float | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        max_deliveries: int = MAX_DELIVERIES,
        retry: BackoffPolicy = RETRY,
        dead_letter: DeadLetters | str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> ConsumerOptions:
        """Declare a consumer by `options`, or by the fields of them: then `queue` and `handler` must be set.

        Raises ConfigError if they make no sense.
        """
        if options is None:
            if handler is None:
                raise ConfigError(f"consumer {consumer or queue!r}: handler must be set, got None")
            options = ConsumerOptions(
                queue=queue,
                handler=handler,
                consumer=consumer,
                event_type=event_type,
                event_type_header=event_type_header,
                workers=workers,
                prefetch_count=prefetch_count,
                prefetch=prefetch,
                auto_ack=auto_ack,
                exclusive=exclusive,
                execution=execution,
                batch_size=batch_size,
                batch_timeout=batch_timeout,
                max_attempts=max_attempts,
                max_deliveries=max_deliveries,
                retry=retry,
                dead_letter=dead_letter,
                args=args or {},
            )
        elif queue or handler is not None:
            raise ConfigError(f"consumer {options.name!r}: options and single fields were given: give one of the two")
        self._options.append(options)
        return options

    def consumers(self) -> list[Consumer]:
        """One consumer per queue, in the order of declaration."""
        queues = {queue.name: queue for queue in self.queues}
        return [Consumer(found[0].name, queues[queue], tuple(found)) for queue, found in self._by_queue().items()]

    def _by_queue(self) -> dict[str, list[ConsumerOptions]]:
        found: dict[str, list[ConsumerOptions]] = {}
        for options in self._options:
            found.setdefault(options.queue, []).append(options)
        return found

    def validate(self) -> None:
        """Raise one ConfigError that names every mistake."""
        mistakes = [*self._topology_mistakes(), *self._consumer_mistakes()]
        if mistakes:
            raise ConfigError(f"{len(mistakes)} mistake(s) in the declarations:\n  - " + "\n  - ".join(mistakes))

    def _topology_mistakes(self) -> Iterator[str]:
        yield from _duplicates("exchange", self.exchanges)
        yield from _duplicates("queue", self.queues)
        exchanges = {exchange.name for exchange in self.exchanges}
        queues = {queue.name for queue in self.queues}

        def known(exchange: str) -> bool:
            return exchange in exchanges or exchange.startswith("amq.")

        for exchange in self.exchanges:
            if not exchange.name or (exchange.name.startswith("amq.") and not exchange.passive):
                yield f"exchange {exchange.name!r}: the name is the broker's own"
            if exchange.kind not in ("direct", "fanout", "topic", "headers") and not exchange.kind.startswith("x-"):
                yield (
                    f"exchange {exchange.name!r}: kind must be direct, fanout, topic, headers or a plugin's x-..., "
                    f"got {exchange.kind!r}"
                )
        for queue in self.queues:
            yield from _queue_mistakes(queue)
        for binding in self.bindings:
            if not binding.exchange or not known(binding.exchange):
                yield f"binding of queue {binding.queue!r}: exchange {binding.exchange!r} is not declared"
            if binding.queue not in queues:
                yield f"binding of exchange {binding.exchange!r}: queue {binding.queue!r} is not declared"
        senders = [(f"queue {queue.name!r}", queue.dead_letters) for queue in self.queues]
        senders += [(f"consumer {options.name!r}", options.dead_letters) for options in self._options]
        for sender, dead in senders:
            if dead is not None and dead.exchange and not known(dead.exchange):
                yield f"{sender}: dead-letter exchange {dead.exchange!r} is not declared"

    def _consumer_mistakes(self) -> Iterator[str]:
        queues = {queue.name: queue for queue in self.queues}
        for options in self._options:
            if options.queue not in queues:
                yield f"consumer {options.name!r}: queue {options.queue!r} is not declared (passive=True if it exists)"
            elif queues[options.queue].kind == "stream" and options.exclusive:
                yield f"consumer {options.name!r}: a stream has no exclusive consumer"
            if options.runs_as is Execution.PROCESS and not _importable(options.handler):
                yield f"consumer {options.name!r}: a handler that runs in a process must be importable by name"
        names: dict[str, str] = {}
        for queue, found in self._by_queue().items():
            first = found[0]
            if names.setdefault(first.name, queue) != queue:
                yield f"consumer {first.name!r}: the name is used for queues {names[first.name]!r} and {queue!r}"
            for other in found[1:]:
                yield from _disagreements(queue, first, other)
            types = [options.event_type for options in found]
            for event_type in dict.fromkeys(event_type for event_type in types if types.count(event_type) > 1):
                yield f"queue {queue!r}: {types.count(event_type)} handlers for event type {event_type!r}"


def _duplicates(what: str, declared: list[Exchange] | list[Queue]) -> Iterator[str]:
    seen: dict[str, Exchange | Queue] = {}
    for item in declared:
        if seen.setdefault(item.name, item) != item:
            yield f"{what} {item.name!r} is declared twice, in different ways"


def _queue_mistakes(queue: Queue) -> Iterator[str]:
    if not queue.name:
        yield "queue '': a queue must be named, or it is another one after each reconnect"
    if queue.kind not in ("classic", "quorum", "stream"):
        yield f"queue {queue.name!r}: kind must be classic, quorum or stream, got {queue.kind!r}"
    elif queue.kind != "classic" and (not queue.durable or queue.exclusive or queue.auto_delete):
        yield f"queue {queue.name!r}: a {queue.kind} queue is durable, and neither exclusive nor auto_delete"
    if queue.dead_letter is not None and "x-dead-letter-exchange" in queue.args:
        yield f"queue {queue.name!r}: dead_letter and x-dead-letter-exchange in args say the same: set one"
    if queue.args.get("x-queue-type", queue.kind) != queue.kind:
        yield f"queue {queue.name!r}: x-queue-type in args says {queue.args['x-queue-type']!r}, kind {queue.kind!r}"


def _disagreements(queue: str, first: ConsumerOptions, other: ConsumerOptions) -> Iterator[str]:
    if other.name != first.name:
        yield (
            f"queue {queue!r}: consumers {first.name!r} and {other.name!r} would take each other's messages; "
            "one consumer per queue dispatches by event type"
        )
    differing = [name for name in _SHARED if getattr(first, name) != getattr(other, name)]
    if first.runs_as is not other.runs_as:
        differing.append("execution")
    for name in differing:
        yield f"consumer {first.name!r}: its handlers share one pool, but differ in {name}"


def _importable(handler: Handler) -> bool:
    try:
        pickle.dumps(handler)
    except Exception:  # noqa: BLE001 - pickle raises whatever the object's own methods raise
        return False
    return True
