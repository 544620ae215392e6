"""The configuration refuses nonsense where it is declared, and says which field, which value, which bound."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock import BatchQueue, BatchQueueConfig, DrainBalancer, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.errors import ConfigError
from tests.batch.support import open_queue

ONE = ThreadPolicy.fixed(1)


async def later(*batch: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of threads and shared_scheduler"),
        ({"threads": ONE, "shared_scheduler": ("io", ONE)}, "exactly one of threads and shared_scheduler"),
        ({"threads": ONE, "buffer_size": 0}, "buffer_size must be a whole number >= 1, got 0"),
        ({"threads": ONE, "buffer_bytes": 0}, "buffer_bytes must be a whole number >= 1, got 0"),
        ({"threads": ONE, "max_batch": 0}, "max_batch must be a whole number >= 1, got 0"),
        ({"threads": ONE, "min_idle": 0.0}, "min_idle must be > 0 seconds, got 0.0"),
        ({"threads": ONE, "min_idle": 0.1}, "max_idle must be >= min_idle"),
        ({"threads": ONE, "shutdown_timeout": -1.0}, "shutdown_timeout must be"),
        ({"threads": ONE, "shutdown_timeout": float("inf")}, "shutdown_timeout must be"),
        ({"threads": ONE, "balancer": DrainBalancer.cost_weighted()}, "balancer and balance_interval go together"),
        ({"threads": ONE, "balance_interval": 1.0}, "balancer and balance_interval go together"),
        ({"threads": 4}, r"threads must be a ThreadPolicy, like ThreadPolicy.fixed\(4\), got 4"),
        ({"threads": ONE, "partitions": 4}, "partitions must be a PartitionPolicy"),
        ({"threads": ONE, "selector": "type_hash"}, "selector must be a PartitionSelector"),
        ({"threads": ONE, "strategy": "blocking"}, "strategy must be BufferStrategy.BLOCKING or .* got 'blocking'"),
        ({"threads": ONE, "balancer": "items", "balance_interval": 1.0}, "balancer must be a DrainBalancer"),
        ({"threads": ONE, "consumer": 5}, r"consumer must be a function or have a method consume\(batch\), got 5"),
        ({"threads": ONE, "consumer": later}, "consumer must not be a coroutine function"),
        ({"threads": ONE, "error_handler": later}, "error_handler must not be a coroutine function"),
        ({"threads": ONE, "error_handler": 5}, "error_handler must be a function, got 5"),
        ({"threads": ONE, "size_of": 5}, "size_of must be a function, got 5"),
        ({"shared_scheduler": "IO_POOL"}, "shared_scheduler must be like .* got 'IO_POOL'"),
        ({"shared_scheduler": (ONE, "IO_POOL")}, "shared_scheduler must be like"),
        ({"threads": ONE, "buffer_size": 1.5}, "buffer_size must be a whole number >= 1, got 1.5"),
        ({"threads": ONE, "buffer_size": "10"}, "buffer_size must be a whole number >= 1, got '10'"),
        ({"threads": ONE, "min_idle": "1ms"}, "min_idle must be a number of seconds, got '1ms'"),
        ({"threads": ONE, "max_idle": float("nan")}, "max_idle must be a number of seconds, got nan"),
        (
            {"threads": ONE, "balancer": DrainBalancer.cost_weighted(), "balance_interval": 0.0},
            "balance_interval must be > 0",
        ),
        (
            {"threads": ONE, "partitions": PartitionPolicy.adaptive(), "selector": PartitionSelector.by_key(len)},
            "would move keys",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchQueueConfig(**settings)


class Handler:
    def consume(self, batch: list[Any]) -> None:
        pass


class Later:
    consume = later


class LaterIdle(Handler):
    on_idle = later


class NeverIdle(Handler):
    on_idle = 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, print), "type must be a class, the exact one of the items, got 5"),
        (("int", print), "type must be a class"),
        ((int, None), "handler must be a function or have a method consume"),
        ((int, Handler), r"Handler is a class: Handler\(\)\?"),
        ((int, later), "handler must not be a coroutine function, it would never be awaited: got"),
        ((int, partial(later, 1)), "handler must not be a coroutine function"),
        ((int, Later()), "handler.consume must not be a coroutine function"),
        ((int, LaterIdle()), "handler.on_idle must not be a coroutine function"),
        ((int, NeverIdle()), "handler.on_idle must be a function, got 5"),
        ((int, print, 0), "weight must be a number > 0, got 0"),
        ((int, print, "x"), "weight must be a number > 0, got 'x'"),
        ((int, print, float("inf")), "weight must be a number > 0, got inf"),
    ],
)
def test_a_handler_that_could_never_work_is_refused_at_once(arguments: Any, message: str) -> None:
    with open_queue() as queue, pytest.raises(ConfigError, match=message):
        queue.add_handler(*arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThreadPolicy.fixed(2.5), r"threads must be a whole number >= 1, got fixed\(2.5\)"),  # type: ignore[arg-type]
        (lambda: ThreadPolicy.io_bound(True), "threads must be a whole number"),
        (lambda: ThreadPolicy.cpu_cores(float("inf")), "threads per core must be a number > 0, got inf"),
        (lambda: ThreadPolicy.cpu_cores_with_base(-1, 1.0), "base must be a whole number >= 0, got -1"),
        (lambda: PartitionPolicy.fixed("4"), r"partitions must be a whole number >= 1, got fixed\('4'\)"),  # type: ignore[arg-type]
        (lambda: PartitionSelector.by_key("id"), "by_key takes a function of the item, got 'id'"),  # type: ignore[arg-type]
        (lambda: BatchQueue("test", {}), "config must be a BatchQueueConfig"),  # type: ignore[arg-type]
        (lambda: BatchQueue("", BatchQueueConfig(threads=ONE)), "name must be a text, got ''"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_one_text_is_not_taken_for_many_items() -> None:
    with open_queue() as queue, pytest.raises(TypeError, match="takes a list of items, got one str"):
        queue.produce_many("order")


def test_an_item_without_a_length_says_what_counts_bytes() -> None:
    with open_queue(buffer_bytes=10) as queue:
        with pytest.raises(TypeError) as caught:
            queue.produce(5)
        assert "size_of" in caught.value.__notes__[0]
        assert not queue._admission.interrupted  # no slot was taken, so `close` has none to look for


def test_the_defaults_are_those_of_the_documents() -> None:
    config = BatchQueueConfig(threads=ONE)

    assert (config.buffer_size, config.min_idle, config.max_idle) == (10_000, 0.001, 0.05)
    assert config.strategy.name == "BLOCKING"
    assert config.partitions == PartitionPolicy.fixed(1)
    assert config.resolved_selector == PartitionSelector.type_hash()


def test_a_lone_consumer_is_fed_from_all_partitions_unless_told_otherwise() -> None:
    assert BatchQueueConfig(threads=ONE, consumer=print).resolved_selector == PartitionSelector.round_robin()
    chosen = BatchQueueConfig(threads=ONE, consumer=print, selector=PartitionSelector.type_hash())
    assert chosen.resolved_selector == PartitionSelector.type_hash()


def test_a_queue_on_a_shared_scheduler_needs_a_manager() -> None:
    with pytest.raises(ConfigError, match="created by a BatchQueueManager"):
        BatchQueue("lonely", BatchQueueConfig(shared_scheduler=("io", ONE)))
