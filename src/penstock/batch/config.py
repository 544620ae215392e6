"""What a user sets: the queue's configuration, its strategies and the handler's interface."""

import enum
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.batch.balancer import DrainBalancer
from penstock.batch.policies import PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.errors import ConfigError

T = TypeVar("T")


class BufferStrategy(enum.Enum):
    """What `produce` does when the partition is full."""

    BLOCKING = "blocking"
    """It waits for room."""
    IF_POSSIBLE = "if_possible"
    """It answers False at once and counts a drop."""


class HandlerConsumer(Protocol[T]):
    """What is registered for a type. Derive from it to inherit an `on_idle` that does nothing."""

    def consume(self, batch: list[T]) -> object:
        """Process the batch; the list is the handler's to keep."""
        ...

    def on_idle(self) -> object:
        """There was nothing to consume for a while: the time to flush what was gathered."""
        return None


Handler = HandlerConsumer[Any] | Callable[[list[Any]], object]
ErrorHandler = Callable[[list[Any], BaseException], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQueueConfig:
    """One queue type, one configuration, two scheduler modes.

    threads           drain threads of its own; exactly one of `threads` and `shared_scheduler` is set
    shared_scheduler  (name, policy): the manager's scheduler of that name, made on first use
    partitions        how many buffers
    selector          which buffer an item goes to; by default by type, or in turn where one `consumer` takes all
    buffer_size       the most items that a partition holds
    buffer_bytes      the most bytes that a partition holds, as `size_of` (by default `len`) counts them
    strategy          what a full partition does to its producer
    consumer          takes whole batches of all types; without it, batches go to the handlers by exact type
    error_handler     gets (batch, error) of a batch that a handler failed on, or that has no handler
    min_idle          the pause before `on_idle` after data; it doubles up to max_idle while nothing comes
    max_batch         the most items in one `consume`
    balancer          moves partitions between threads every `balance_interval` seconds
    shutdown_timeout  how long `close` waits for what is held to be consumed
    """

    threads: ThreadPolicy | None = None
    shared_scheduler: tuple[str, ThreadPolicy] | None = None
    partitions: PartitionPolicy = PartitionPolicy.fixed(1)  # noqa: RUF009 - frozen, so one may serve all
    selector: PartitionSelector | None = None
    buffer_size: int = 10_000
    buffer_bytes: int | None = None
    size_of: Callable[[Any], int] = len
    strategy: BufferStrategy = BufferStrategy.BLOCKING
    consumer: Handler | None = None
    error_handler: ErrorHandler | None = None
    min_idle: float = 0.001
    max_idle: float = 0.05
    max_batch: int | None = None
    balancer: DrainBalancer | None = None
    balance_interval: float | None = None
    shutdown_timeout: float = 10.0

    def __post_init__(self) -> None:
        self._check_kinds()
        for field in ("buffer_size", "buffer_bytes", "max_batch"):
            count = getattr(self, field)
            if count is not None and (type(count) is not int or count < 1):
                raise ConfigError(f"{field} must be a whole number >= 1, got {count!r}")
        for field in ("min_idle", "max_idle", "shutdown_timeout", "balance_interval"):
            seconds = getattr(self, field)
            if seconds is not None and (not isinstance(seconds, (int, float)) or not math.isfinite(seconds)):
                raise ConfigError(f"{field} must be a number of seconds, got {seconds!r}")
        if not self.min_idle > 0:
            raise ConfigError(f"min_idle must be > 0 seconds, got {self.min_idle}")
        if not self.max_idle >= self.min_idle:
            raise ConfigError(f"max_idle must be >= min_idle ({self.min_idle}), got {self.max_idle}")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"shutdown_timeout must be >= 0 seconds, got {self.shutdown_timeout}")
        if (self.balancer is None) != (self.balance_interval is None):
            raise ConfigError("balancer and balance_interval go together: set both or neither")
        if self.balance_interval is not None and not self.balance_interval > 0:
            raise ConfigError(f"balance_interval must be > 0 seconds, got {self.balance_interval}")
        keyed = self.selector is not None and self.selector.kind == "by_key"
        if keyed and self.partitions.kind == "adaptive":
            raise ConfigError("adaptive partitions grow with the handlers, which would move keys: fix their number")

    def _check_kinds(self) -> None:
        """Refuse what a type checker would: later it would fail in a drain thread."""
        if (self.threads is None) == (self.shared_scheduler is None):
            raise ConfigError("exactly one of threads and shared_scheduler must be set")
        _require("threads", self.threads, ThreadPolicy, "a ThreadPolicy, like ThreadPolicy.fixed(4)")
        _require("partitions", self.partitions, PartitionPolicy, "a PartitionPolicy, like PartitionPolicy.fixed(4)")
        _require(
            "selector", self.selector, PartitionSelector, "a PartitionSelector, like PartitionSelector.type_hash()"
        )
        _require("strategy", self.strategy, BufferStrategy, "BufferStrategy.BLOCKING or BufferStrategy.IF_POSSIBLE")
        _require("balancer", self.balancer, DrainBalancer, "a DrainBalancer, like DrainBalancer.throughput_weighted()")
        match self.shared_scheduler:
            case None | (str(), ThreadPolicy()):
                pass
            case other:
                raise ConfigError(
                    f'shared_scheduler must be like ("IO_POOL", ThreadPolicy.cpu_cores(0.5)), got {other!r}'
                )
        if self.consumer is not None:
            check_handler("consumer", self.consumer)
        for field in ("error_handler", "size_of"):
            _check_function(field, getattr(self, field))

    @property
    def resolved_selector(self) -> PartitionSelector:
        """A lone consumer takes every type, so by default its items are spread over all partitions."""
        if self.selector is not None:
            return self.selector
        return PartitionSelector.type_hash() if self.consumer is None else PartitionSelector.round_robin()


def _require(field: str, value: object, kind: type, what: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{field} must be {what}, got {value!r}")


def check_handler(field: str, handler: object) -> None:
    """ConfigError unless batches can be given to it."""
    if isinstance(handler, type) and hasattr(handler, "consume"):
        raise ConfigError(
            f"{field} must be an object, and {handler.__qualname__} is a class: {handler.__qualname__}()?"
        )
    consume = getattr(handler, "consume", handler)
    if not callable(consume):
        raise ConfigError(f"{field} must be a function or have a method consume(batch), got {handler!r}")
    _check_function(field if consume is handler else f"{field}.consume", consume)
    _check_function(f"{field}.on_idle", getattr(handler, "on_idle", None))


def _check_function(field: str, function: object) -> None:
    if function is not None and not callable(function):
        raise ConfigError(f"{field} must be a function, got {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{field} must not be a coroutine function, it would never be awaited: got {function!r}")
