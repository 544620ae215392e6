"""Penstock takes telemetry in, holds it under pressure without losing any, and turns it into tables on Spark."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

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
    CircuitOpen,
    ConfigError,
    DiskFailed,
    DiskFull,
    ErrorClass,
    ExportError,
    PayloadTooLarge,
    PenstockError,
    PermanentExportError,
    QueueClosed,
    QueueExists,
    QueueFull,
    QueueLocked,
    TransientExportError,
)
from penstock.export import (
    AdaptiveWorkersConfig,
    Backoff,
    BackoffConfig,
    BreakerConfig,
    CircuitBreaker,
    CircuitState,
    Exporter,
    FailoverConfig,
    GroupExporter,
    PartialSuccess,
    PipelineSplitConfig,
    Prepared,
    SendQueue,
    SendQueueConfig,
    SendQueueStats,
    WorkerScaler,
)
from penstock.export.exporters.console import ConsoleExporter
from penstock.export.exporters.otlp_http import OtlpHttpConfig, OtlpHttpExporter
from penstock.export.exporters.remote_write import RemoteWriteConfig, RemoteWriteExporter
from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior, Lease, MemoryQueue

if TYPE_CHECKING:
    from penstock.export.exporters.amqp import AmqpConfig, AmqpExporter
    from penstock.export.exporters.segments import SegmentExporter

# These need an extra, and are loaded when they are asked for.
_LAZY = {
    "AmqpConfig": "penstock.export.exporters.amqp",
    "AmqpExporter": "penstock.export.exporters.amqp",
    "SegmentExporter": "penstock.export.exporters.segments",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


__version__ = _version("penstock")
__all__ = [
    "AdaptiveWorkersConfig",
    "AmqpConfig",
    "AmqpExporter",
    "Backoff",
    "BackoffConfig",
    "BatchQueue",
    "BatchQueueConfig",
    "BatchQueueManager",
    "BatchQueueStats",
    "BlockTooLarge",
    "BreakerConfig",
    "BufferStrategy",
    "CircuitBreaker",
    "CircuitOpen",
    "CircuitState",
    "ConfigError",
    "ConsoleExporter",
    "DiskFailed",
    "DiskFull",
    "DrainBalancer",
    "Durability",
    "ErrorClass",
    "ExportError",
    "Exporter",
    "FailoverConfig",
    "FastQueue",
    "FastQueueConfig",
    "FullBehavior",
    "GroupExporter",
    "HandlerConsumer",
    "Lease",
    "MemoryQueue",
    "OtlpHttpConfig",
    "OtlpHttpExporter",
    "PartialSuccess",
    "PartitionPolicy",
    "PartitionSelector",
    "PayloadTooLarge",
    "PenstockError",
    "PermanentExportError",
    "PipelineSplitConfig",
    "Prepared",
    "QueueClosed",
    "QueueExists",
    "QueueFull",
    "QueueLocked",
    "RemoteWriteConfig",
    "RemoteWriteExporter",
    "SegmentExporter",
    "SendQueue",
    "SendQueueConfig",
    "SendQueueStats",
    "ThreadPolicy",
    "TransientExportError",
    "WorkerScaler",
    "__version__",
    "queues",
]
