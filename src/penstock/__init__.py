"""Penstock takes telemetry in, holds it under pressure without losing any, and turns it into tables on Spark."""

from importlib.metadata import version as _version

from penstock.batch import (
    BatchQueue,
    BatchQueueConfig,
    BatchQueueManager,
    BatchQueueStats,
    BufferStrategy,
    DrainBalancer,
    HandlerConsumer,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
    queues,
)
from penstock.errors import PenstockError

__version__ = _version("penstock")
__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueStats",
    "BufferStrategy",
    "DrainBalancer",
    "HandlerConsumer",
    "PartitionPolicy",
    "PartitionSelector",
    "PenstockError",
    "ThreadPolicy",
    "__version__",
    "queues",
]
