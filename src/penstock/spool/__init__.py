"""HOLDER: the durable queue: memory first, disk behind it, nothing accepted is lost."""

from penstock.spool.config import Durability, DurabilitySetting, FastQueueConfig, FullBehavior, FullBehaviorSetting
from penstock.spool.dead_letters import DeadLetter
from penstock.spool.fast_queue import FastQueue
from penstock.spool.lease import Lease
from penstock.spool.memory_queue import MemoryQueue
from penstock.spool.stats import QueueStats

__all__ = [
    "DeadLetter",
    "Durability",
    "DurabilitySetting",
    "FastQueue",
    "FastQueueConfig",
    "FullBehavior",
    "FullBehaviorSetting",
    "Lease",
    "MemoryQueue",
    "QueueStats",
]
