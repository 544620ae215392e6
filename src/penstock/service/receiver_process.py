"""One of several receiving processes: `python -m penstock.service.receiver_process DESCRIPTOR`, by the service only."""

import logging
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.clock import SystemClock
from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError, MissingRequirement, PenstockError
from penstock.service.child_channel import ChildAnswers
from penstock.service.edge import Edge
from penstock.service.exit_codes import FINAL, LATE
from penstock.service.logs import set_up_logs
from penstock.service.receiver_set import make_service_receivers
from penstock.service.signals import call_on_signals
from penstock.telemetry import Telemetry

ORPHAN_TIMEOUT = 1.0  # seconds: what is under way is answered, nothing is drained
log = logging.getLogger("penstock.service.receiver_process")  # by name: as a program it is called __main__


def main(descriptor: int) -> int:
    """Run until a stop is requested or the service is gone; the exit code says whether a restart may help."""
    stopping, orphaned = threading.Event(), threading.Event()

    def let_go() -> None:
        orphaned.set()
        stopping.set()

    answerer = ChildAnswers(descriptor, let_go)
    call_on_signals(lambda _: stopping.set(), signal.SIGTERM, signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the service sends what to reload over the channel
    first = answerer.first()
    config = load(ServiceConfig, text=first["config"]).config
    set_up_logs(config.logging.number, config.logging.format)
    telemetry = Telemetry()
    receivers = partial(make_service_receivers, index=first["index"], began=first["began"])
    edge = Edge(config, telemetry, receivers, index=first["index"])

    def check(message: dict[str, Any]) -> str:
        return _problem(lambda: edge.check(load(ServiceConfig, text=message["config"]).config))

    def reload(message: dict[str, Any]) -> str:
        fresh = load(ServiceConfig, text=message["config"]).config
        set_up_logs(fresh.logging.number, fresh.logging.format)
        return _problem(lambda: edge.reload(fresh))

    answerer.start(
        {
            "values": lambda _: list(telemetry.values()),
            "unready": lambda _: edge.unready(),
            "notes": lambda _: edge.notes(),
            "dead_threads": lambda _: edge.dead_threads(),
            "ports": lambda _: edge.ports(),
            "check": check,
            "reload": reload,
        }
    )
    try:
        edge.start()
    except (ConfigError, MissingRequirement) as error:
        log.error("A receiving process cannot start. process=%d reason=%s", first["index"], error)
        return FINAL
    except (PenstockError, OSError) as error:
        log.error("A receiving process cannot start now. process=%d reason=%s", first["index"], error)
        return 1
    stopping.wait()
    # An orphan lets go of its queues: the next start needs them, and goes on with what they hold.
    timeout = ORPHAN_TIMEOUT if orphaned.is_set() else float(config.shutdown.timeout)
    late = edge.close(SystemClock().monotonic() + timeout)
    for text in late:
        log.warning("Not done in time. process=%d what=%s", first["index"], text)
    return LATE if late else 0


def _problem(act: Callable[[], None]) -> str:
    """What goes wrong in it, "" if nothing does."""
    try:
        act()
    except (PenstockError, OSError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
