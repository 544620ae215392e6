"""One process of the edge: its stages assembled from the configuration, started back to front, closed front to back.

receivers ─┬─► relay ─► a send queue for each destination
           └─► L1 ─► segment queue ─► segments
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.clock import Clock, SystemClock
from penstock.config.tree import ServiceConfig
from penstock.errors import PenstockError
from penstock.export.paced_exporter import PacedExporter
from penstock.export.send_queue import SendQueue
from penstock.service.queues import (
    SEGMENTS,
    SegmentStageQueue,
    config_for_process,
    open_stage_relay_queue,
    wait_until_stages_drained,
)
from penstock.service.receiver_set import MakeReceiverSet, ServiceReceivers
from penstock.service.relay_pipeline import RelayPipeline
from penstock.service.stage_health import stage_notes_of_queues, stage_refusals_of_l1, stage_refusals_of_queues
from penstock.spool import Durability
from penstock.telemetry import Telemetry

if TYPE_CHECKING:  # these bring pyarrow, which a relay does without
    from penstock.aggregate.l1 import L1
    from penstock.model.definition import Definitions

log = logging.getLogger(__name__)
SEAL_TIMEOUT = 10.0  # seconds of a start: the blocks of the last run take one, unless the disk fails
CLOSED = "Queue is closed. queue=%s left=%d"


class Edge:
    """The stages of one process. `index` tells those of several processes apart: each has its own queues and writer.

    Loss: no request that was answered is lost, as far as the durability of the queues says, whenever the process dies.
    Threads: `start` and `close` once, from one thread; the others from any.
    """

    def __init__(
        self,
        config: ServiceConfig,
        telemetry: Telemetry,
        make_receivers: MakeReceiverSet,
        *,
        index: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.config = config_for_process(config, index)
        self._telemetry = telemetry
        self._make_receivers = make_receivers
        self._clock: Clock = clock or SystemClock()
        self._senders: dict[str, SendQueue] = {}
        self._relay: RelayPipeline | None = None
        self._l1: L1 | None = None
        self._defined: Definitions | None = None
        self._pace: PacedExporter | None = None
        self._receivers: ServiceReceivers | None = None
        self.state = "starting"

    # -- start: back to front ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start each stage after its consumer. If one fails, those that run are closed and its error is raised."""
        try:
            self._start_relay()
            if self.config.pipelines.rollup:
                self._start_l1()
            self._receivers = self._make_receivers(self.config, self._l1, self._relay)
            self._receivers.start()
            self._telemetry.watch(self._receivers.samples)
        except BaseException:
            self.close(self._clock.monotonic() + 5.0)
            raise
        self.state = "running"

    def _start_relay(self) -> None:
        relays = self.config.relays()
        for name in relays:
            self._senders[name] = open_stage_relay_queue(self.config, name).start()
            self._telemetry.watch(self._senders[name].samples, queue=name)
        if relays:
            self._relay = RelayPipeline(
                {name: (self._senders[name], section.formats) for name, section in relays.items()}
            )

    def _start_l1(self) -> None:
        from penstock.aggregate.l1 import L1

        self._defined = _read_definitions(self.config)
        opened = SegmentStageQueue.open(self.config)
        self._pace = opened.pace
        self._senders[SEGMENTS] = opened.sender.start()
        if float(self.config.intake.repeat_window):
            self._wait_until_sealed(opened.sender)
        self._telemetry.watch(opened.sender.samples, queue=SEGMENTS)
        self._telemetry.watch(opened.samples)
        settings = replace(self.config.l1, durability=Durability(self.config.segments.queue.durability))
        l1 = self._l1 = L1.with_own_queue("l1", opened.queue.push_many, settings, definitions=self._defined)
        self._telemetry.watch(l1.samples)
        self._telemetry.watch(lambda: l1.queue.stats().samples())

    def _wait_until_sealed(self, sender: SendQueue) -> None:
        """Wait for the blocks that the last run left: their segments say which requests need not be counted again."""
        deadline, pause = self._clock.monotonic() + SEAL_TIMEOUT, threading.Event()
        while len(sender) and self._clock.monotonic() < deadline:
            pause.wait(0.01)
        if len(sender):
            log.warning("Blocks of the last run wait: requests that come again may count twice. blocks=%d", len(sender))

    # -- stop: front to back -------------------------------------------------------------------------------------------

    def close(self, deadline: float) -> list[str]:
        """Refuse new requests, answer those under way, drain the queues until `deadline`; returns what was not done.

        What a durable queue still holds then is not lost: the next start goes on with it. What is lost is in the list.
        """
        self.state = "stopping"
        late: list[str] = []
        if self._pace is not None:
            self._pace.skip_pauses()
        if self._receivers is not None:
            self._close_stage(late, "receivers", partial(self._close_receivers, self._receivers, late, deadline))
        if self._relay is not None:
            self._relay.close()
        if self._l1 is not None:
            self._close_stage(late, "L1", partial(self._l1.close, self._left(deadline)))
        late += wait_until_stages_drained(self._senders, deadline, self._clock)
        for name, sender in self._senders.items():
            self._close_stage(late, name, partial(sender.close, self._left(deadline)))
            if lost := sender.lost:
                late.append(f"queue {name} lost {lost} batches that were in memory only")
            log.log(logging.WARNING if len(sender) else logging.INFO, CLOSED, name, len(sender))
        self.state = "stopped"
        return late

    def _close_receivers(self, receivers: ServiceReceivers, late: list[str], deadline: float) -> None:
        if not receivers.close(self._left(deadline)):
            late.append("not every request was answered: its sender will send it again")

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    @staticmethod
    def _close_stage(late: list[str], name: str, close: Callable[[], object]) -> None:
        """One stage that fails to close must not keep the next from closing."""
        try:
            close()
        except (PenstockError, OSError) as error:
            late.append(f"{name}: {error}")
            log.error("A stage did not close in good order. stage=%s reason=%s", name, error)

    def check(self, fresh: ServiceConfig) -> None:
        """Read what `reload` would take over; ConfigError or OSError if it cannot be had."""
        if self._l1 is not None:
            _read_definitions(fresh)
        if self._receivers is not None:
            self._receivers.check_secrets()

    def reload(self, fresh: ServiceConfig) -> None:
        """Take over definitions, tokens and certificates as they are now. Exporters read theirs at every connect."""
        defined = _read_definitions(fresh) if self._l1 is not None else None
        if self._receivers is not None:
            self._receivers.reload()
        if self._l1 is not None and defined is not None and defined != self._defined:
            self._l1.redefine(defined)
            self._defined = defined
            log.info("Definitions are reloaded, for points that come from now on. metrics=%d", len(defined.metrics))

    # -- how it goes ---------------------------------------------------------------------------------------------------

    def ports(self) -> dict[str, int]:
        return self._receivers.ports() if self._receivers is not None else {}

    def unready(self) -> list[str]:
        """Why requests should not be sent here now: they would be refused. Empty if they would not."""
        if self.state != "running":
            return [self.state]
        taken = self._receivers.unready() if self._receivers is not None else []
        return [*stage_refusals_of_queues(self._senders), *stage_refusals_of_l1(self._l1), *taken]

    def notes(self) -> list[str]:
        """What needs an operator, and is no reason to send requests elsewhere."""
        if self.state != "running":
            return []
        return [
            *stage_notes_of_queues(self._senders),
            *(self._receivers.notes() if self._receivers is not None else ()),
        ]

    def dead_threads(self) -> list[str]:
        """The threads that have ended though the process runs: starting it again would help."""
        if self.state != "running":
            return []
        stages = (self._receivers, self._l1, *self._senders.values())
        return [name for stage in stages if stage is not None for name in stage.dead_threads()]


def _read_definitions(config: ServiceConfig) -> "Definitions":
    from penstock.service.current_definitions import (
        read_service_definitions,  # brings pyarrow, which a relay does without
    )

    return read_service_definitions(config)
