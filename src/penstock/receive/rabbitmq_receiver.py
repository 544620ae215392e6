"""The RabbitMQ receiver: the consumer pool in front of the intake, started and stopped as a receiver.

broker ─► a batch of messages ─► intake ─► answers ─┬─ taken: ack
                                                    ├─ nothing of it can be taken: dead letter, with the reason
                                                    └─ no room, closing: again later, for as long as it takes
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Self

from penstock.broker import Tls
from penstock.consume.declarations import Declarations
from penstock.consume.registry import ConsumerRegistry
from penstock.decode.outcome import Format
from penstock.errors import BrokerError
from penstock.receive.config import RabbitReceiverConfig
from penstock.receive.intake import Intake
from penstock.receive.message_intake import batches_into_intake
from penstock.telemetry import Buckets, Sample

_STOP = 10.0  # seconds for what is in hand: milliseconds, unless the disk hangs


class RabbitReceiver:
    """Consumes one queue until `close`.

    Loss: none. A message is acknowledged only when the intake has said that it is safe; until then the broker has it.
    Threads: every method may be called from any thread.
    """

    port = 0  # it listens nowhere

    def __init__(self, config: RabbitReceiverConfig, intake: Intake) -> None:
        declarations = Declarations()
        declarations.queue(config.queue, durable=True, passive=not config.declare)
        if config.dead_letter_exchange:
            declarations.exchange(config.dead_letter_exchange, passive=True)
        declarations.consumer(
            queue=config.queue,
            handler=batches_into_intake(intake, None if config.format == "auto" else Format(config.format)),
            workers=config.workers,
            batch_size=config.batch_size,
            batch_timeout=float(config.batch_timeout),
            dead_letter=config.dead_letter_exchange or None,
        )
        for problem in config.problems():
            raise problem
        tls = Tls(**{name: _text(value) for name, value in asdict(config.tls).items()}) if config.tls else None
        self._registry = ConsumerRegistry(config.url, declarations, password_file=_text(config.password_file), tls=tls)

    def start(self) -> Self:
        """Consumes; BrokerError if the broker cannot be reached or refuses. A connection lost later is made again."""
        try:
            self._registry.start()
        except BrokerError as error:
            raise BrokerError(f"receivers.amqp cannot consume from {error}") from error
        return self

    def stop_accepting(self) -> None:
        """Gives back messages that were not begun, finishes the others: the intake must still answer."""
        self._registry.stop(_STOP)

    def close(self, timeout: float = 30.0) -> None:
        self._registry.stop(timeout)

    def check_secrets(self) -> None:
        """Nothing to do, as for `reload`."""

    def reload(self) -> None:
        """Nothing to do: password and certificates are read at every connect."""

    def samples(self) -> Iterable[Sample | Buckets]:
        """For `Telemetry.watch`."""
        return self._registry.samples()


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
