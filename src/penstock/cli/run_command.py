"""`penstock run`: the service from one file, until a signal ends it."""

import logging
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from penstock.cli.config_command import config_option, load_config_for_command
from penstock.config.command_options import ConfigFlagsCommand
from penstock.errors import ConfigError, PenstockError
from penstock.service.exit_codes import LATE

log = logging.getLogger(__name__)
SAME_SIGNAL = 0.2  # seconds: some tools signal the process and then its group, which is one wish and not two


@click.command("run", cls=ConfigFlagsCommand)
@config_option
@click.pass_context
def run_command(ctx: click.Context, file: Path | None) -> None:
    """Receive, hold, relay and roll up, as the configuration says; without one, OTLP and Prometheus into tables.

    SIGTERM (or Ctrl-C) stops receiving, answers what is under way, drains and ends. A second one ends at once, also
    while it starts; what is durable stays. SIGHUP reads configuration, metric definitions, tokens and certificates
    anew and says what needs a restart.

    \b
    Exit codes: 0 ended in good order, 1 could not start, 2 the configuration is wrong, 4 not everything was drained
    in time (what is durable stays, what was only in memory is counted as lost in the last messages), 130 interrupted
    before it had begun to start.
    \b
    Examples:
      penstock run
      penstock run -c penstock.yaml
      penstock run -c penstock.yaml --processes 4 --spark-enabled false
      penstock run --exporter-type otlp_http --exporter-url http://127.0.0.1:4418
    """
    from penstock.service.doctor import require_extra

    require_extra("receive", "aiohttp", "grpc", "numpy", "opentelemetry.proto", "pyarrow")
    loaded = load_config_for_command(ctx, file)
    sys.exit(_run(ctx, file, loaded))


def _run(ctx: click.Context, file: Path | None, loaded: Any) -> int:
    from penstock.service.logs import set_up_logs
    from penstock.service.service import Service
    from penstock.service.signals import call_on_signals

    set_up_logs(loaded.config.logging.number, loaded.config.logging.format)
    with suppress(OSError, ValueError):  # no core dumps, of children neither: they would hold every secret
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for note in (*loaded.warnings, *loaded.config.notes()):
        log.warning("A setting deserves a look. note=%s", note)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    call_on_signals(signals.put, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    service = Service(loaded, began=run_command_began())
    requests = _StopRequests(service, signals)
    try:
        requests.run_while_listening(service.start, "starting")
    except (PenstockError, OSError) as error:
        log.error("Penstock cannot start. reason=%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    while requests.next() == signal.SIGHUP:
        _reload(ctx, file, service)
    log.info("Stopping. timeout=%s", loaded.config.shutdown.timeout)
    return _stop(service, requests)


def run_command_began() -> float:
    """When this process was started: loading its modules takes seconds on a busy machine. Now, without /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time()


class _StopRequests:
    """Signals as requests: the first SIGTERM or SIGINT stops in good order, another one stops at once."""

    def __init__(self, service: Any, signals: "queue.SimpleQueue[int]") -> None:
        self._service = service
        self._signals = signals
        self._waiting: deque[int] = deque()  # signals that came while something else was done
        self._stop_requested_at: float | None = None

    def next(self) -> int:
        """The next signal, when it comes."""
        received = self._waiting.popleft() if self._waiting else self._signals.get()
        if received != signal.SIGHUP and self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
        return received

    def run_while_listening(self, work: Callable[[], None], name: str) -> None:
        """Do the work in another thread, and handle signals until it ends. Raises what it raises."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=run, name=f"penstock-{name}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            with suppress(queue.Empty):
                self._on_signal(self._signals.get_nowait(), name)
        if failures:
            raise failures[0]

    def _on_signal(self, received: int, name: str) -> None:
        if received != signal.SIGHUP and self._stop_requested_at is not None:
            if time.monotonic() - self._stop_requested_at > SAME_SIGNAL:
                log.warning("Stopped at once by a second signal, what is durable stays.")
                self._service.kill()
                logging.shutdown()
                os._exit(LATE)
            return
        self._waiting.append(received)
        if received != signal.SIGHUP:
            self._stop_requested_at = time.monotonic()
            log.info("Stopping when this is done, or at once if asked once more. signal=%s doing=%s", received, name)


def _stop(service: Any, requests: _StopRequests) -> int:
    late: list[str] = []
    try:
        requests.run_while_listening(lambda: late.extend(service.close()), "stopping")
    except Exception as error:
        log.exception("Stopping failed.")
        late.append(str(error))
    for text in late:
        log.warning("Not done in time. what=%s", text)
    log.info("Penstock has ended.")
    return LATE if late else 0


def _reload(ctx: click.Context, file: Path | None, service: Any) -> None:
    from penstock.service.logs import set_up_logs

    try:
        fresh = load_config_for_command(ctx, file)
    except PenstockError as error:
        log.error("Not reloaded, the old settings hold. reason=%s", error)
        return
    try:
        needing = service.reload(fresh)
    except (PenstockError, OSError) as error:  # an SSLError is an OSError
        log.error("Not reloaded, the old settings hold. reason=%s", error)
        return
    set_up_logs(fresh.config.logging.number, fresh.config.logging.format)
    if needing:
        log.warning("Reloaded, but for what needs a restart. keys=%s", ", ".join(needing))
    else:
        log.info("Reloaded.")
