"""HOLDER: a partitioned in-process queue that drains itself and dispatches by type."""

from penstock.batch.balancer import DrainBalancer
from penstock.batch.config import BatchQueueConfig, BufferStrategy, HandlerConsumer
from penstock.batch.manager import BatchQueueManager, queues
from penstock.batch.policies import PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.batch.queue import BatchQueue
from penstock.batch.stats import BatchQueueStats, PartitionStats, TypeStats

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
    "PartitionStats",
    "ThreadPolicy",
    "TypeStats",
    "queues",
]
