"""The whole service: the edge in this process or in several, the Spark job in its own, the admin port over all of it.

Start: admin (so that the start can be observed), Spark, then the edge back to front.
Stop: the edge front to back, Spark after its batch, admin last; one deadline for all of it.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from penstock import __version__
from penstock.clock import Clock, SystemClock
from penstock.config.load import LoadedConfig
from penstock.config.show import config_as_yaml, config_entries
from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError, PenstockError
from penstock.receive.config import ListenerConfig
from penstock.service.admin import AdminGuard, AdminServer
from penstock.service.child import ChildProcess
from penstock.service.definition_watch import DefinitionWatch
from penstock.service.edge import Edge
from penstock.service.orphan_queues import OrphanQueues
from penstock.service.queues import LOCK_PATIENCE
from penstock.service.receiver_set import make_service_receivers
from penstock.service.status import status_page_flow
from penstock.service.stream_handover import distribute_files_to_processes
from penstock.service.trends import QueueTrends
from penstock.telemetry import Sample, Telemetry
from penstock.units import format_address, parse_address

log = logging.getLogger(__name__)
START_TIMEOUT = 60.0
RELOADABLE = ("logging.level", "logging.format", "definitions")


class Service:
    """Everything that `penstock run` runs.

    Threads: `start`, `close` and `reload` from one thread at a time; the others from any.
    """

    def __init__(
        self, loaded: LoadedConfig[ServiceConfig], *, clock: Clock | None = None, began: float | None = None
    ) -> None:
        self.loaded = self._given = loaded
        self.config = config = loaded.config
        self._clock: Clock = clock or SystemClock()
        self.telemetry = Telemetry()
        self.telemetry.watch(self._own_samples)
        self._started_at = time.time() if began is None else began
        self._edge: Edge | None = None
        self._workers: list[ChildProcess] = []
        self._spark: ChildProcess | None = None
        self._admin: AdminServer | None = None
        self._guard: AdminGuard | None = None
        self._orphan_queues = OrphanQueues(config, self.telemetry, clock=self._clock)
        self._definition_watch = DefinitionWatch(
            self.telemetry.values, float(config.definitions_warn_after), config.definitions_path, clock=self._clock
        )
        self._is_stopping = False
        self._trends = QueueTrends(self.telemetry.values, self._clock)
        self._held: list[socket.socket] = []  # ports that the workers share
        if config.processes == 1:
            self._edge = Edge(config, self.telemetry, partial(make_service_receivers, began=self._started_at))
        if config.spark.enabled and config.pipelines.rollup:
            self._spark = self._child("spark", "penstock.service.spark_process", lambda: {"config": self._text()})

    def _child(self, name: str, module: str, first: Callable[[], dict[str, Any]], **labels: str) -> ChildProcess:
        child = ChildProcess(name, module, first, clock=self._clock)
        self.telemetry.watch(child.samples)
        self.telemetry.watch_values(child.values, **labels)
        return child

    def _text(self) -> str:
        return config_as_yaml(self.loaded, with_secrets=True)

    # -- start and stop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Return when all receivers listen. If a part fails, those that run are closed and its error is raised."""
        config = self.config
        if config.admin.enabled:
            host, port = parse_address(config.admin.listen, "admin.listen")
            try:
                self._guard = AdminGuard(config.admin)
                self._admin = AdminServer(host, port, self, self._guard)
            except OSError as error:
                raise PenstockError(
                    f"admin.listen {config.admin.listen}: {error.strerror}; if another penstock runs here, "
                    "choose another port: --admin-listen 127.0.0.1:PORT"
                ) from error
            self._admin.start()
            log.info("Admin port listens. host=%s port=%d", host, self._admin.port)
        try:
            if self._spark is not None:
                self._spark.start()
            self._orphan_queues.start()
            self._orphan_queues.wait_for_ordered_destinations()
            distribute_files_to_processes(self.config)
            if self._edge is not None:
                self._edge.start()
            else:
                self._start_workers()
            self._definition_watch.start()
        except BaseException:
            self.close(timeout=5.0)
            raise
        self._trends.start()
        log.info("Penstock runs. version=%s processes=%d", __version__, config.processes)

    def _start_workers(self) -> None:
        self.loaded = replace(self.loaded, config=self._with_shared_ports())
        for index in range(self.config.processes):
            self._workers.append(
                self._child(
                    f"receiver-{index}",
                    "penstock.service.receiver_process",
                    partial(self._first_message, index),
                    process=str(index),
                )
            )
        for worker in self._workers:
            worker.start()
        deadline = self._clock.monotonic() + START_TIMEOUT
        pause = threading.Event()
        for worker in self._workers:
            while _ask(worker, "unready") != []:
                if worker.has_ended or self._clock.monotonic() > deadline or not worker.is_up:
                    raise PenstockError(f"{worker.name} did not start: its messages above say why")
                pause.wait(0.02)

    def _first_message(self, index: int) -> dict[str, Any]:
        """What a worker needs to begin. A restarted worker does not know what the one before it counted."""
        began = self._started_at if not self._workers[index].restarts else None
        return {"config": self._text(), "index": index, "began": began}

    def _with_shared_ports(self) -> ServiceConfig:
        """Ports that all processes listen on; one that is 0 is chosen here, once for all of them."""
        receivers = self.config.receivers
        changed: dict[str, Any] = {}
        for name, one in receivers.enabled().items():
            if isinstance(one, ListenerConfig):
                host, port = one.address
                if port:
                    _check_free(f"receivers.{name}", host, port)
                listen = format_address(host, port or self._reserve_port(host))
                changed[name] = replace(one, listen=listen, reuse_port=True)
        self.config = replace(self.config, receivers=replace(receivers, **changed))
        return self.config

    def _reserve_port(self, host: str) -> int:
        """A free port, reserved: bound and never listened on, so that no request goes there."""
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, 0))
        self._held.append(held)
        port: int = held.getsockname()[1]
        return port

    def close(self, timeout: float | None = None) -> list[str]:
        """Stop front to back within `timeout` seconds (`shutdown.timeout`); what was not done in time."""
        timeout = float(self.config.shutdown.timeout) if timeout is None else timeout
        deadline = self._clock.monotonic() + timeout
        self._is_stopping = True
        self._definition_watch.close()
        self._trends.close()
        died = {worker.name for worker in self._workers if not worker.is_up}
        for worker in self._workers:
            worker.stop()
        late: list[str] = []
        if self._edge is not None and self._edge.state != "stopped":
            late += self._edge.close(deadline)
        killed = {worker.name for worker in self._workers if not worker.join(self._left(deadline))}
        late += [f"{name} was killed" for name in sorted(killed)]
        # One that was started again a moment ago may end before it has opened its queue.
        died |= {worker.name for worker in self._workers if worker.has_died} - killed
        late += [f"{name} had died: what its queue holds waits for the next start" for name in sorted(died)]
        late += [f"{worker.name} was not done, see its messages" for worker in self._workers if worker.was_late]
        late += self._orphan_queues.close(deadline)
        if self._spark is not None:
            self._spark.stop()
            if not self._spark.join(max(1.0, self._left(deadline))):
                log.warning("Spark was killed in the middle of a batch, which it will run again. timeout=%.0f", timeout)
        if self._admin is not None:
            self._admin.close()
        for held in self._held:
            held.close()
        return late

    def kill(self) -> None:
        """End the processes at once. What is durable stays."""
        for child in (*self._workers, *([self._spark] if self._spark else [])):
            child.kill()

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    # -- reload --------------------------------------------------------------------------------------------------------

    def reload(self, fresh: LoadedConfig[ServiceConfig]) -> list[str]:
        """Take over what can change while everything runs; the keys that need a restart.

        Raises ConfigError or OSError if something cannot be read: then the old settings hold, all of them.
        """
        before, after = ({name: value for name, value, _ in config_entries(one)} for one in (self._given, fresh))
        changed = [name for name in after if before.get(name) != after[name]]
        changed += [name for name in before if name not in after]
        text = config_as_yaml(_reloaded(self.loaded, fresh), with_secrets=True)
        config = _reloaded(self.loaded, fresh).config
        if self._guard is not None:
            self._guard.check_secrets()
        if self._edge is not None:
            self._edge.check(config)
        for worker in self._workers:
            if problem := _ask(worker, "check", config=text):
                raise ConfigError(problem)
        self._given, self.loaded, self.config = _reloaded(self._given, fresh), _reloaded(self.loaded, fresh), config
        if self._guard is not None:
            self._guard.reload()
        if self._spark is not None:  # before the edge: a level must not receive metrics that it does without
            _ask(self._spark, "reload", config=text)
        if self._edge is not None:
            self._edge.reload(config)
        for worker in self._workers:
            if problem := _ask(worker, "reload", config=text):
                raise ConfigError(f"{worker.name}: {problem}")
        self._definition_watch.on_reload(config.definitions_path)
        return [name for name in changed if name not in RELOADABLE]

    # -- how it goes: for the admin port -------------------------------------------------------------------------------

    def metrics(self) -> bytes:
        return self.telemetry.render()

    def unhealthy(self) -> list[str]:
        """What is dead inside, and would live again after a start. What dies as a process is started again by us."""
        if self._is_stopping:
            return []
        dead = [("", name) for name in (self._edge.dead_threads() if self._edge is not None else ())]
        dead += [(f"{one.name}: ", name) for one in self._workers for name in _ask(one, "dead_threads") or ()]
        gone = [f"{one.name} has ended and stays ended" for one in self._workers if one.has_ended]
        return [f"{process}thread {name} has died" for process, name in dead] + gone

    def unready(self) -> list[str]:
        if self._is_stopping:
            return ["stopping"]
        if self._edge is not None:
            return self._edge.unready()
        if not self._workers:
            return ["starting"]
        return [f"{worker.name}: {reason}" for worker in self._workers for reason in _unready_reasons(worker)]

    def notes(self) -> list[str]:
        """Problems that are no reason to send requests elsewhere."""
        problem = self._spark.problem() if self._spark is not None else None
        waiting = [f"{problem}; what is received waits in {self.config.segments.location}"] if problem else []
        notes = self._edge.notes() if self._edge is not None else []
        notes += [f"{one.name}: {note}" for one in self._workers for note in _ask(one, "notes") or ()]
        return waiting + notes + self._trends.notes() + self._orphan_queues.notes()

    def status(self) -> dict[str, Any]:
        reasons = self.unready()
        return {
            "version": __version__,
            "time": time.time(),
            "ready": not reasons,
            "reasons": reasons + self.notes(),
            "flow": status_page_flow(self.telemetry.values()),
        }

    def ports(self) -> dict[str, int]:
        """Where everything listens."""
        admin = {"admin": self._admin.port} if self._admin is not None else {}
        if self._edge is not None:
            return {**self._edge.ports(), **admin}
        found = _ask(self._workers[0], "ports") if self._workers else None
        return {**(found or {}), **admin}

    def _own_samples(self) -> list[Sample]:
        return [
            Sample("penstock_service_info", 1, (__version__,)),
            Sample("penstock_service_start_time_seconds", self._started_at),
        ]


def _reloaded(loaded: LoadedConfig[ServiceConfig], fresh: LoadedConfig[ServiceConfig]) -> LoadedConfig[ServiceConfig]:
    """With what a reload takes over."""
    taken = replace(loaded.config, logging=fresh.config.logging, definitions=fresh.config.definitions)
    return replace(loaded, config=taken)


def _check_free(key: str, host: str, port: int) -> None:
    """PenstockError if the port stays in use: with SO_REUSEPORT our processes would share it with a foreign one."""
    deadline, pause = time.monotonic() + LOCK_PATIENCE, threading.Event()
    while time.monotonic() < deadline:  # processes of the last run may still be ending
        try:
            _bind_once(host, port)
        except OSError:
            pause.wait(0.1)
        else:
            return
    try:
        _bind_once(host, port)
    except OSError as error:
        raise PenstockError(
            f"{key} cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
        ) from error


def _bind_once(host: str, port: int) -> None:
    where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = where[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are over do not count
        probe.bind(address)


def _ask(child: ChildProcess, what: str, **more: Any) -> Any:
    """The child's answer; None if it has none to give now."""
    try:
        return child.ask(what, **more)
    except OSError:
        return None


def _unready_reasons(worker: ChildProcess) -> list[str]:
    problem = worker.problem()
    if problem:
        return ["down"]
    answer = _ask(worker, "unready")
    return ["no answer"] if answer is None else list(answer)
