"""`penstock run`: the service from one file, until a signal ends it."""

import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from penstock.errors import ConfigError, PenstockError
from penstock.service.config.options import ConfigCommand
from penstock.service.config_commands import config_option, load_config
from penstock.service.exit_codes import LATE

log = logging.getLogger(__name__)
SAME_SIGNAL = 0.5  # seconds: some tools signal the process and then its group, which is one wish and not two


@click.command(cls=ConfigCommand)
@config_option
@click.pass_context
def run(ctx: click.Context, file: Path | None) -> None:
    """Receive, hold, relay and roll up, as the configuration says; without one, OTLP and Prometheus into tables.

    SIGTERM (or Ctrl-C) stops taking, answers everybody, drains and ends; a second one ends at once, and what is durable
    stays. SIGHUP reads configuration, metric definitions, tokens and certificates anew and says what needs a restart.

    \b
    Exit codes: 0 ended in good order, 1 could not start, 2 the configuration is wrong, 4 not everything was drained
    in time (it stays in the durable queues).
    \b
    Examples:
      penstock run
      penstock run -c penstock.yaml
      penstock run -c penstock.yaml --processes 4 --spark-enabled false
      penstock run --exporter-type otlp_http --exporter-url http://127.0.0.1:4418
    """
    loaded = load_config(ctx, file)
    sys.exit(_run(ctx, file, loaded))


def _run(ctx: click.Context, file: Path | None, loaded: Any) -> int:
    from penstock.service.logs import set_up_logs
    from penstock.service.service import Service
    from penstock.service.signals import hear

    set_up_logs(loaded.config.logging.number, loaded.config.logging.format)
    for note in (*loaded.warnings, *loaded.config.notes()):
        log.warning("A setting deserves a look. note=%s", note)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    hear(signals.put, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    service = Service(loaded, began=process_began())
    try:
        service.start()
    except (PenstockError, OSError) as error:
        log.error("Penstock cannot start. reason=%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    while (received := signals.get()) == signal.SIGHUP:
        _reload(ctx, file, service)
    log.info("Stopping. signal=%s timeout=%s", signal.Signals(received).name, loaded.config.shutdown.timeout)
    return _stop(service, signals)


def process_began() -> float:
    """When this process was started: loading our modules takes seconds on a busy machine. Now, where nobody says."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time()


def _stop(service: Any, signals: "queue.SimpleQueue[int]") -> int:
    """Close in another thread, so that a second signal is heard."""
    late: list[str] = []

    def close() -> None:
        try:
            late.extend(service.close())
        except Exception as error:
            log.exception("Stopping failed.")
            late.append(str(error))

    closing = threading.Thread(target=close, name="penstock-closing", daemon=True)
    closing.start()
    began = time.monotonic()
    while closing.is_alive():
        closing.join(0.05)
        try:
            if signals.get_nowait() != signal.SIGHUP and time.monotonic() - began > SAME_SIGNAL:
                log.warning("Stopped at once by a second signal, what is durable stays.")
                service.kill()
                logging.shutdown()
                os._exit(LATE)
        except queue.Empty:
            pass
    for text in late:
        log.warning("Not done in time. what=%s", text)
    log.info("Penstock has ended.")
    return LATE if late else 0


def _reload(ctx: click.Context, file: Path | None, service: Any) -> None:
    from penstock.service.logs import set_up_logs

    try:
        fresh = load_config(ctx, file)
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
