"""Consume RabbitMQ with a pool of workers (extra `[amqp]`): see docs/how-to/consume-rabbitmq.md.

declarations = Declarations()
declarations.queue("orders")
declarations.consumer(queue="orders", handler=handle)
ConsumerRegistry("amqp://localhost/", declarations).run()
"""

from penstock.broker import Tls
from penstock.consume.backoff_policy import BackoffPolicy
from penstock.consume.consumer_options import ConsumerOptions, DeadLetters, Execution, PoolSize, pool_size
from penstock.consume.declarations import Binding, Declarations, Exchange, Queue
from penstock.consume.into_queue import TakesBlocks, TakesManyBlocks, batches_into_queue, into_queue
from penstock.consume.message import Message, Reject, Retry
from penstock.consume.registry import ConsumerRegistry
from penstock.consume.stats import ConsumerStats, Health, RegistryStats, RouteStats

__all__ = [
    "BackoffPolicy",
    "Binding",
    "ConsumerOptions",
    "ConsumerRegistry",
    "ConsumerStats",
    "DeadLetters",
    "Declarations",
    "Exchange",
    "Execution",
    "Health",
    "Message",
    "PoolSize",
    "Queue",
    "RegistryStats",
    "Reject",
    "Retry",
    "RouteStats",
    "TakesBlocks",
    "TakesManyBlocks",
    "Tls",
    "batches_into_queue",
    "into_queue",
    "pool_size",
]
