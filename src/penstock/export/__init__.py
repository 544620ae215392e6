"""MOVER: from the durable queue to a destination.

SendQueue.push ─► LeaseSource ─► SendWorkers ──────► BatchDelivery ────────► Exporter
                  lease, ack     one batch each      prepare, send, settle   prepare, send, split
                                                     SendGate: may it go out now?
FastQueue ──────► LeaseSource ─► GroupWorker ──────────────────────────────► GroupExporter
                                 as many as wait                             send_group (segments, paced)
"""

from penstock.export.backoff import Backoff, BackoffConfig
from penstock.export.breaker import BreakerConfig, CircuitBreaker, CircuitState
from penstock.export.config import FailoverConfig, PipelineSplitConfig, SendQueueConfig
from penstock.export.exporter import Exporter, GroupExporter, PartialSuccess, Prepared
from penstock.export.scaler import AdaptiveWorkersConfig, WorkerScaler
from penstock.export.send_queue import SendQueue
from penstock.export.stats import SendQueueStats

__all__ = [
    "AdaptiveWorkersConfig",
    "Backoff",
    "BackoffConfig",
    "BreakerConfig",
    "CircuitBreaker",
    "CircuitState",
    "Exporter",
    "FailoverConfig",
    "GroupExporter",
    "PartialSuccess",
    "PipelineSplitConfig",
    "Prepared",
    "SendQueue",
    "SendQueueConfig",
    "SendQueueStats",
    "WorkerScaler",
]
