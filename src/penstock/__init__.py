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
from penstock.errors import (
    BlockTooLarge,
    ConfigError,
    DiskFailed,
    DiskFull,
    PenstockError,
    QueueClosed,
    QueueExists,
    QueueFull,
    QueueLocked,
)
from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior, Lease, MemoryQueue

__version__ = _version("penstock")
__all__ = [
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueStats",
    "BlockTooLarge",
    "BufferStrategy",
    "ConfigError",
    "DiskFailed",
    "DiskFull",
    "DrainBalancer",
    "Durability",
    "FastQueue",
    "FastQueueConfig",
    "FullBehavior",
    "HandlerConsumer",
    "Lease",
    "MemoryQueue",
    "PartitionPolicy",
    "PartitionSelector",
    "PenstockError",
    "QueueClosed",
    "QueueExists",
    "QueueFull",
    "QueueLocked",
    "ThreadPolicy",
    "__version__",
    "queues",
]
