"""Penstock takes telemetry in, holds it under pressure without losing any, and turns it into tables on Spark."""

from importlib.metadata import version as _version

from penstock.errors import BlockTooLarge, DiskFailed, DiskFull, PenstockError, QueueClosed, QueueFull, QueueLocked
from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior, Lease, MemoryQueue

__version__ = _version("penstock")
__all__ = ["PenstockError", "__version__"]
__all__ += ["Durability", "FastQueue", "FastQueueConfig", "FullBehavior", "Lease", "MemoryQueue"]
__all__ += ["BlockTooLarge", "DiskFailed", "DiskFull", "QueueClosed", "QueueFull", "QueueLocked"]
