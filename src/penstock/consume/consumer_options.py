"""What a user says about one consumer, checked where it is said."""

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from penstock.consume.backoff_policy import BackoffPolicy
from penstock.consume.message import MAX_RETRY_DELAY, Message, Reject, Retry
from penstock.errors import ConfigError

WORKERS_PER_CPU = 4  # for handlers that wait: while one worker waits for a database, three others use the CPU
MAX_WORKERS = 200
PREFETCH_PER_WORKER = 10
MAX_AUTO_PREFETCH = 500
MAX_PREFETCH = 1000
LATENCY_PREFETCH_PER_WORKER = 2  # hides one broker round trip; more only ages messages in our memory
JOBS_PER_WORKER = 2
MAX_ATTEMPTS = 5
MAX_DELIVERIES = 20  # what RabbitMQ itself allows quorum queues since 4.0
RETRY = BackoffPolicy(first=1.0, limit=60.0)

Answer = Sequence[Retry | Reject | None] | None  # batches may answer for each message


class HandlerObject(Protocol):
    """A handler that is an object: `handle` takes a message, or the messages of a batch."""

    def handle(self, message: Any) -> Answer | Awaitable[Answer]: ...


Handler = (
    Callable[[Message], Awaitable[None] | None]
    | Callable[[Sequence[Message]], Answer | Awaitable[Answer]]
    | HandlerObject
)


class Execution(StrEnum):
    """Where handlers run."""

    THREAD = "thread"  # for handlers that wait for something: databases, HTTP
    ASYNC = "async"  # coroutines on one event loop
    PROCESS = "process"  # for handlers that compute; they must be importable by name


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """Where messages go that are given up; the routing key is the message's own unless one is named."""

    exchange: str
    routing_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """One handler for one event type of one queue. Options of the same queue share one consumer and its workers.

    Order: with workers=1, messages are handled one after the other in the queue's order, also when one is retried.
    Loss: a message is acknowledged when its handler has returned (with auto_ack: when a worker takes it).
    Threads: with more than one worker the handler is called from several threads at once.
    """

    queue: str
    handler: Handler
    consumer: str = ""  # the consumer's name in logs, metrics and at the broker; by default the queue's
    event_type: str | None = None  # None: every type that has no handler of its own
    event_type_header: str | None = None  # a header that names the type, instead of the `type` property
    workers: int = 0  # 0: CPU × 4, or one per CPU for processes
    prefetch_count: int = 0  # 0: workers × 10, at most 500
    prefetch: int | Literal["latency"] | None = None  # the same as a number, or "latency": workers × 2
    auto_ack: bool = False
    exclusive: bool = False
    execution: Execution | str | None = None  # None: ASYNC for coroutine functions, THREAD for others
    batch_size: int | None = None
    batch_timeout: float | None = None  # how long a batch may wait to be full; 1 s if it is not said
    max_attempts: int = MAX_ATTEMPTS
    max_deliveries: int = MAX_DELIVERIES
    retry: BackoffPolicy = RETRY
    dead_letter: DeadLetters | str | None = None  # an exchange; None: the queue's own dead-letter exchange
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mistakes = list(self._mistakes())
        if mistakes:
            raise ConfigError(f"consumer {self.name!r}: " + "; ".join(mistakes))

    def _mistakes(self) -> list[str]:
        found = []
        if not self.queue:
            found.append("queue must be named")
        if not callable(self.handler) and not callable(getattr(self.handler, "handle", None)):
            found.append(f"handler must be callable or have a method handle, got {self.handler!r}")
        elif inspect.isclass(self.handler):
            found.append(f"handler must be an instance, got the class {self.handler.__name__}")
        elif not handler_takes_one_message(self.call):
            found.append(f"handler must take one argument, the message; got {inspect.signature(self.call)}")
        if self.event_type == "":
            found.append('event_type must not be "" (None takes every type)')
        at_least = {"workers": 0, "prefetch_count": 0, "max_attempts": 1, "max_deliveries": 1}
        found += [
            f"{name} must be a whole number >= {bound}, got {value!r}"
            for name, bound in at_least.items()
            if not isinstance(value := getattr(self, name), int) or value < bound
        ]
        if self.prefetch is not None:
            if self.prefetch != "latency" and (not isinstance(self.prefetch, int) or self.prefetch < 1):
                found.append(f'prefetch must be "latency" or >= 1, got {self.prefetch!r}')
            elif self.prefetch_count:
                found.append(f"prefetch={self.prefetch} and prefetch_count={self.prefetch_count} say the same: set one")
        if self.batch_size is not None and self.batch_size < 1:
            found.append(f"batch_size must be >= 1, got {self.batch_size}")
        if self.batch_size is not None and self.batch_size > MAX_PREFETCH:
            found.append(f"batch_size must be <= {MAX_PREFETCH}, the largest prefetch, got {self.batch_size}")
        if self.batch_timeout is not None and (self.batch_timeout <= 0 or self.batch_size is None):
            found.append(f"batch_timeout must be > 0 and needs batch_size, got {self.batch_timeout}")
        if self.retry.limit > MAX_RETRY_DELAY:
            found.append(f"retry.limit must be <= {MAX_RETRY_DELAY} s, got {self.retry.limit}")
        if self.execution is not None and self.execution not in list(Execution):
            found.append(f"execution must be one of {', '.join(Execution)}, got {self.execution!r}")
        elif callable(self.call) and is_async_message_handler(self.call) != (self.runs_as is Execution.ASYNC):
            found.append("execution and handler disagree: a coroutine function runs as async, and nothing else does")
        return found

    @property
    def name(self) -> str:
        return self.consumer or self.queue

    @property
    def call(self) -> Callable[[Any], Any]:
        """The function that takes a message, or the messages of a batch."""
        call: Callable[[Any], Any] = getattr(self.handler, "handle", self.handler)  # type: ignore[arg-type]
        return call

    @property
    def runs_as(self) -> Execution:
        if self.execution is None:
            return Execution.ASYNC if is_async_message_handler(self.call) else Execution.THREAD
        return Execution(self.execution)

    @property
    def dead_letters(self) -> DeadLetters | None:
        return DeadLetters(exchange=self.dead_letter) if isinstance(self.dead_letter, str) else self.dead_letter


def handler_takes_one_message(call: Callable[..., Any]) -> bool:
    try:
        inspect.signature(call).bind(None)
    except TypeError:
        return False
    except ValueError:  # native code that does not say
        return True
    return True


def is_async_message_handler(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 - asks what kind it is, not whether


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many workers a consumer has, and how much the broker may send ahead."""

    workers: int
    prefetch: int
    caps: tuple[str, ...] = ()  # what was asked for and not given, for the log

    @property
    def buffer(self) -> int:
        """How many jobs may be with the workers at least: one each and the buffer behind them."""
        return self.workers * (1 + JOBS_PER_WORKER)


def cpus_for_consumers() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def pool_size(options: ConsumerOptions, batch_size: int = 1, cpu_count: int | None = None) -> PoolSize:
    """The size that the options ask for. `batch_size`: the largest of the consumer's handlers."""
    cpu_count = cpu_count or cpus_for_consumers()
    caps = []
    workers = options.workers or cpu_count * (1 if options.runs_as is Execution.PROCESS else WORKERS_PER_CPU)
    if workers > MAX_WORKERS:
        caps.append(f"workers {workers} -> {MAX_WORKERS}")
        workers = MAX_WORKERS
    asked = options.prefetch or options.prefetch_count
    if asked == "latency":
        prefetch = workers * LATENCY_PREFETCH_PER_WORKER
    elif asked:
        prefetch = asked
    elif batch_size > 1:
        prefetch = min(workers * max(PREFETCH_PER_WORKER, batch_size), MAX_PREFETCH)  # a batch for every worker
    else:
        prefetch = min(workers * PREFETCH_PER_WORKER, MAX_AUTO_PREFETCH)
    if prefetch > MAX_PREFETCH:
        caps.append(f"prefetch {prefetch} -> {MAX_PREFETCH}")
        prefetch = MAX_PREFETCH
    # A batch that the broker may not fill would always wait for its timeout.
    if asked and batch_size > prefetch:
        caps.append(f"prefetch {prefetch} -> {batch_size}, the size of a batch")
    return PoolSize(workers, max(prefetch, batch_size), tuple(caps))
