"""The receivers that the configuration enables, and the intake behind them."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.clock import Clock, SystemClock
from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError
from penstock.receive.sink import RawSink, Sink
from penstock.service.doctor import require_extra
from penstock.service.queues import make_private_folder, path_for_process
from penstock.service.stream_handover import MEMORY
from penstock.spool import Durability
from penstock.telemetry import Buckets, Sample

if TYPE_CHECKING:
    from penstock.receive.config import GrpcReceiverConfig, HttpReceiverConfig, RabbitReceiverConfig
    from penstock.receive.intake import Intake
    from penstock.receive.peers import Peers
    from penstock.receive.recent_requests import RecentRequests

log = logging.getLogger(__name__)
REQUESTS = "requests.table"  # in the data folder: the requests of late, of all processes
PEERS = "peers"  # in the data folder: where the processes hand cumulative points to the owner of their stream


class ServiceReceiver(Protocol):
    """Takes requests in: HTTP, gRPC or RabbitMQ."""

    port: int

    def start(self) -> object: ...

    def stop_accepting(self) -> None: ...

    def close(self, timeout: float) -> object: ...

    def check_secrets(self) -> object:
        """Read what `reload` would take over; ConfigError or OSError if it cannot be had."""
        ...

    def reload(self) -> object: ...

    def dead_threads(self) -> list[str]:
        """The threads that have ended though they should not."""
        ...

    def samples(self) -> Iterable[Sample | Buckets]: ...


class AnsweringStage(Protocol):
    """Answers the requests of all receivers: the intake."""

    def start(self) -> object: ...

    def close(self, timeout: float) -> bool: ...

    def unready(self) -> list[str]:
        """Why requests would be refused now."""
        ...

    def notes(self) -> list[str]:
        """What needs an operator."""
        ...

    def dead_threads(self) -> list[str]:
        """The threads that have ended though they should not."""
        ...

    def samples(self) -> Iterable[Sample | Buckets]: ...


class ServiceReceivers:
    """Receivers before one intake, started and closed in the right order."""

    def __init__(
        self, intake: AnsweringStage, receivers: dict[str, ServiceReceiver], clock: Clock | None = None
    ) -> None:
        self._intake = intake
        self.receivers = receivers
        self._clock: Clock = clock or SystemClock()

    def start(self) -> None:
        self._intake.start()
        for receiver in self.receivers.values():
            receiver.start()

    def close(self, timeout: float) -> bool:
        """Refuse new requests, answer those under way; returns whether all were answered in time."""
        deadline = self._clock.monotonic() + timeout
        for receiver in self.receivers.values():
            receiver.stop_accepting()
        # The intake first: it answers requests on connections that the receivers still hold open.
        is_done = self._intake.close(max(0.0, deadline - self._clock.monotonic()))
        for receiver in self.receivers.values():
            receiver.close(max(0.5, deadline - self._clock.monotonic()))
        return is_done

    def check_secrets(self) -> None:
        """Whether `reload` would find everything: one receiver must not go on with new secrets and another with old."""
        for name, receiver in self.receivers.items():
            with _naming_section(name):
                receiver.check_secrets()

    def reload(self) -> None:
        for receiver in self.receivers.values():
            receiver.reload()

    def ports(self) -> dict[str, int]:
        return {name: receiver.port for name, receiver in self.receivers.items() if receiver.port}

    def unready(self) -> list[str]:
        """Why requests would be refused now."""
        return self._intake.unready()

    def notes(self) -> list[str]:
        """What needs an operator."""
        return self._intake.notes()

    def dead_threads(self) -> list[str]:
        """The threads that have ended though they should not."""
        of_receivers = [name for one in self.receivers.values() for name in one.dead_threads()]
        return self._intake.dead_threads() + of_receivers

    def samples(self) -> Iterator[Sample | Buckets]:
        """For `Telemetry.watch`."""
        yield from self._intake.samples()
        for receiver in self.receivers.values():
            yield from receiver.samples()


@contextmanager
def _naming_section(name: str) -> Iterator[None]:
    """Name the section in a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise error.within(f"receivers.{name}") from error


def _peers(config: ServiceConfig, index: int) -> "Peers":
    from penstock.decode.stream_owners import StreamOwners
    from penstock.receive.peers import Peers

    return Peers(
        make_private_folder(config.resolved(PEERS)), StreamOwners(index, config.processes), int(config.intake.max_held)
    )


def _recent_requests(config: ServiceConfig, index: int) -> "RecentRequests | None":
    """The requests of late; None where `intake.repeat_window` is 0. Before the process takes any."""
    window = float(config.intake.repeat_window)
    if not window:
        return None
    from penstock.receive.recent_requests import RecentRequests
    from penstock.receive.request_memory import restore_recent_requests

    table = make_private_folder(config.resolved(".")) / REQUESTS
    try:
        recent = RecentRequests(table, config.intake.max_remembered, window, index)
    except OSError as error:  # a service whose disk is full must come up: only then its queues are emptied
        log.warning("Requests that come again are not recognised until the next start. path=%s reason=%s", table, error)
        return None
    recent.forget_own(unanswered_only=_is_durable(config))
    if config.pipelines.rollup:
        folder = config.resolved(config.segments.location)
        found = restore_recent_requests(recent, folder, config.segments.writer, window)
        log.info("Requests of the last run are known. requests=%d", found)
    return recent


def _is_durable(config: ServiceConfig) -> bool:
    """Whether what was answered outlives the process: else it must be taken again."""
    queues = [section.queue for section in config.relays().values()]
    is_relayed = all(one.enabled and one.type == "disk" and one.durability is not Durability.MEMORY for one in queues)
    return is_relayed and (not config.pipelines.rollup or config.segments.queue.durability is not Durability.MEMORY)


MakeReceiverSet = Callable[[ServiceConfig, Sink | None, RawSink | None], ServiceReceivers]


def make_service_receivers(
    config: ServiceConfig,
    sink: Sink | None,
    relay: RawSink | None,
    *,
    began: float | None = None,
    index: int = 0,
) -> ServiceReceivers:
    """What the configuration enables, not yet started. Imports only what it needs.

    `began`: when the service did (now). Streams that began later are new, also those that had to wait for it to listen.
    `index` tells several processes apart.
    """
    require_extra("receive", "numpy")
    from penstock.receive.intake import Intake

    memory = peers = None
    if sink is not None:  # otherwise nothing is counted
        memory = Path(path_for_process(config.resolved(MEMORY), index))
        peers = _peers(config, index) if config.processes > 1 else None
    recent = _recent_requests(config, index)
    intake = Intake(sink, relay, config.intake, began=began, memory=memory, peers=peers, recent=recent)
    receivers: dict[str, ServiceReceiver] = {}
    for name, section in config.receivers.enabled().items():
        kind = RECEIVERS[name]
        require_extra(*kind.extra)
        with _naming_section(name):
            receivers[name] = kind.make(section, intake)
    return ServiceReceivers(intake, receivers)


@dataclass(frozen=True, slots=True)
class ReceiverKind:
    """What a section of `receivers` stands for."""

    make: Callable[[Any, "Intake"], ServiceReceiver]
    """The receiver of its section, not yet started."""
    extra: tuple[str, ...]
    """The extra that it needs, and the modules that the extra brings."""


def _http(config: "HttpReceiverConfig", intake: "Intake") -> ServiceReceiver:
    from penstock.receive.http_receiver import HttpReceiver

    return HttpReceiver(config, intake)


def _grpc(config: "GrpcReceiverConfig", intake: "Intake") -> ServiceReceiver:
    # Its core writes a line of its own kind for every client that speaks no TLS; it asks when it is first used.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from penstock.receive.grpc_receiver import GrpcReceiver

    return GrpcReceiver(config, intake)


def _amqp(config: "RabbitReceiverConfig", intake: "Intake") -> ServiceReceiver:
    from penstock.receive.rabbitmq_receiver import RabbitReceiver

    return RabbitReceiver(config, intake)


# One entry for each section of `receivers`, under the section's name.
RECEIVERS: Mapping[str, ReceiverKind] = {
    "http": ReceiverKind(_http, ("receive", "aiohttp")),
    "grpc": ReceiverKind(_grpc, ("receive", "grpc")),
    "amqp": ReceiverKind(_amqp, ("amqp", "pika")),
}
