"""The configuration refuses nonsense where it is declared, and says which field, which value, which bound."""

from typing import Any

import pytest

from penstock import BatchQueue, BatchQueueConfig, DrainBalancer, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.errors import ConfigError

ONE = ThreadPolicy.fixed(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of threads and shared_scheduler"),
        ({"threads": ONE, "shared_scheduler": ("io", ONE)}, "exactly one of threads and shared_scheduler"),
        ({"threads": ONE, "buffer_size": 0}, "buffer_size must be >= 1, got 0"),
        ({"threads": ONE, "buffer_bytes": 0}, "buffer_bytes must be >= 1, got 0"),
        ({"threads": ONE, "max_batch": 0}, "max_batch must be >= 1, got 0"),
        ({"threads": ONE, "min_idle": 0.0}, "min_idle must be > 0 seconds, got 0.0"),
        ({"threads": ONE, "min_idle": 0.1}, "max_idle must be >= min_idle"),
        ({"threads": ONE, "shutdown_timeout": -1.0}, "shutdown_timeout must be"),
        ({"threads": ONE, "shutdown_timeout": float("inf")}, "shutdown_timeout must be"),
        ({"threads": ONE, "balancer": DrainBalancer.cost_weighted()}, "balancer and balance_interval go together"),
        ({"threads": ONE, "balance_interval": 1.0}, "balancer and balance_interval go together"),
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
