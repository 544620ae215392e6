"""Penstock takes telemetry in, holds it under pressure without losing any, and turns it into tables on Spark."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from penstock.errors import (
    BlockTooLarge,
    CircuitOpen,
    ConfigError,
    DiskFailed,
    DiskFull,
    ErrorClass,
    ExportError,
    NoHandler,
    PayloadTooLarge,
    PenstockError,
    PermanentExportError,
    QueueClosed,
    QueueConflict,
    QueueError,
    QueueExists,
    QueueFull,
    QueueLocked,
    TransientExportError,
)

if TYPE_CHECKING:
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
    from penstock.export.exporters.amqp_exporter import AmqpConfig, AmqpExporter
    from penstock.export.exporters.console_exporter import ConsoleExporter
    from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
    from penstock.export.exporters.remote_write_exporter import RemoteWriteConfig, RemoteWriteExporter
    from penstock.export.exporters.segment_exporter import SegmentExporter
    from penstock.export.http_client import TlsConfig
    from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior, Lease, MemoryQueue

    __version__: str

# The rest is loaded when it is asked for: a program that uses one part needs neither time nor extras for the others.
_HOMES = {
    "penstock.batch": (
        "BatchQueue BatchQueueConfig BatchQueueManager BatchQueueStats BufferStrategy DrainBalancer "
        "HandlerConsumer PartitionPolicy PartitionSelector ThreadPolicy queues"
    ),
    "penstock.export": (
        "AdaptiveWorkersConfig Backoff BackoffConfig BreakerConfig CircuitBreaker CircuitState Exporter "
        "FailoverConfig GroupExporter PartialSuccess PipelineSplitConfig Prepared SendQueue SendQueueConfig "
        "SendQueueStats WorkerScaler"
    ),
    "penstock.export.exporters.amqp_exporter": "AmqpConfig AmqpExporter",
    "penstock.export.exporters.console_exporter": "ConsoleExporter",
    "penstock.export.exporters.otlp_http_exporter": "OtlpHttpConfig OtlpHttpExporter",
    "penstock.export.exporters.remote_write_exporter": "RemoteWriteConfig RemoteWriteExporter",
    "penstock.export.exporters.segment_exporter": "SegmentExporter",
    "penstock.export.http_client": "TlsConfig",
    "penstock.spool": "Durability FastQueue FastQueueConfig FullBehavior Lease MemoryQueue",
}
_EXTRAS = {"penstock.export.exporters.amqp_exporter": "amqp", "penstock.export.exporters.segment_exporter": "spark"}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(_home_of(name), name)
    elif name == "__version__":
        value = _import_module("importlib.metadata").version("penstock")
    else:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    globals()[name] = value
    return value


def _home_of(name: str) -> object:
    home = _HOME[name]
    try:
        return _import_module(home)
    except ModuleNotFoundError as error:
        if home not in _EXTRAS:
            raise
        from penstock.machine import how_to_install

        advice = f"which is not installed: {how_to_install(_EXTRAS[home])}"
        raise ModuleNotFoundError(f"penstock.{name} needs {error.name}, {advice}", name=error.name) from error


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
    "NoHandler",
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
    "QueueConflict",
    "QueueError",
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
    "TlsConfig",
    "TransientExportError",
    "WorkerScaler",
    "__version__",
    "queues",
]
