"""`penstock relay`: a queue folder, workers, a destination; with every setting of the queue as a flag."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from penstock.errors import ConfigError
from penstock.export.exporter import Exporter
from penstock.export.flags import FLAGS
from penstock.export.send_queue import SendQueue
from penstock.service.logs import HumanFormatter
from penstock.service.queue_folder import is_queue
from penstock.service.relay_settings import DESTINATIONS, DestinationFlags, queue_config
from penstock.spool.dead_letter_report import holds_dead_letters
from penstock.spool.dead_letters import FOLDER_NAME
from penstock.spool.examine import overview

if TYPE_CHECKING:
    from penstock.export.exporters.otlp_http_exporter import Signal

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def queue_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every flag of the queue; `relay_settings` makes the configuration of them."""
    for flag in reversed(FLAGS):
        option = click.option(f"--{flag.name}", default=None, metavar=flag.kind.__name__.upper(), help=flag.help)
        command = option(command)
    return command


def _require_queue(folder: Path) -> None:
    try:
        if not is_queue(folder):
            raise ConfigError(f"there is no queue in {folder}: name its folder with --queue-path")
        if holds_dead_letters(str(folder)):
            raise ConfigError(
                f"--queue-path {folder} holds dead letters, each wrapped with the reason that it was given up for: put "
                f"them back into their queue with `penstock queue replay {_replayed(folder)}`, and relay that"
            )
    except OSError as error:
        raise ConfigError(f"--queue-path {folder}: {error.strerror}") from error


def _replayed(letters: Path) -> str:
    """What `queue replay` is to be told so that it brings them back."""
    is_beside = letters.name == FOLDER_NAME and is_queue(letters.parent)
    return f"{letters.parent} --dead-letters" if is_beside else f"QUEUE --dead-letters --from {letters}"


@click.command()
@click.option("--to", type=click.Choice(DESTINATIONS), help="What the destination speaks.")
@click.option("--url", help="Where it is, as http://127.0.0.1:4318.")
@click.option("--token-file", type=_FILE, help="A bearer token; amqp: the password.")
@click.option("--ca-file", type=_FILE, help="Certificates that https:// and amqps:// trust; the system's otherwise.")
@click.option("--header", multiple=True, metavar="NAME:VALUE", help="HTTP: sent with every request.")
@click.option("--send-timeout", metavar="DURATION", help="HTTP: for one request, as 10s or 0.5.")
@click.option("--signal", help="otlp-http: metrics, traces or logs.")
@click.option("--compression", help="otlp-http: none, gzip or zstd.")
@click.option("--exchange", help="amqp: the exchange; without one --routing-key names a queue.")
@click.option("--routing-key", help="amqp: the routing key.")
@click.option(
    "--config",
    "-c",
    type=_FILE,
    help="A file as of penstock run: its exporter, where --to and --url are not given, and its exporter.queue.",
)
@click.option(
    "--timeout", default=30.0, show_default=True, type=click.FloatRange(0.0), help="Seconds that stopping may take."
)
@queue_options
def relay(config: Path | None, timeout: float, **given: Any) -> None:
    """Send what waits in a queue folder to a destination, with retries, breaker and dead letters, until it is empty.

    The folder must not be in use by another process. What the destination has taken leaves it, and what was printed by
    --to console was taken: `penstock queue inspect` looks and takes nothing. A destination that is down is waited for,
    for as long as it takes. SIGTERM or Ctrl-C ends it, and leaves the rest where it is; a second one kills it.

    Every key of `exporter.queue` in the configuration file is also a flag; a flag wins. Without --to and --url it is
    sent where `exporter` in the file says, with the headers, token and certificates that it says.

    The exit code is 0 if the destination has taken everything; 1 if batches wait, also after SIGTERM or Ctrl-C, or if
    dead letters lie in the folder, those from before included; 130 if Ctrl-C came before it had begun.

    \b
    Examples:
      penstock relay --to otlp-http --url http://127.0.0.1:4318 --queue-path ./queue
      penstock relay --to remote-write --url https://mimir.example/api/v1/push --header "X-Scope-OrgID: a"
      penstock relay --to console --queue-path ./queue --queue-workers 1
      penstock relay -c penstock.yaml
    """
    from penstock.service.relay_pipeline import make_exporter

    flags = DestinationFlags(**{name: given.pop(name) for name in DestinationFlags.__slots__})
    # Nothing is pushed here, so it costs next to nothing that a kill forgets no acknowledgement either.
    settings = queue_config(config, given, durability="disk")
    if settings.type != "disk" or not settings.enabled:
        raise ConfigError("relay empties a folder: type must be disk and enabled must be true")
    destination = flags.destination(config)
    _require_queue(Path(settings.path))
    exporter = make_exporter(destination, cast("Signal", flags.signal or "metrics"))
    lines = logging.StreamHandler()
    lines.setFormatter(HumanFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    sys.exit(_run(SendQueue.open(exporter, settings), exporter, str(settings.path), timeout))


def _run(sender: SendQueue, exporter: Exporter, folder: str, timeout: float) -> int:
    ending = threading.Event()

    def end(number: int, _: object) -> None:
        ending.set()
        for each in before:  # the next one kills, whichever it is
            signal.signal(each, signal.SIG_DFL)

    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, end)
    sender.start()
    try:
        while not ending.is_set() and not sender.flush(0.1):
            if getattr(exporter, "is_broken", False):  # the console's reader has gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor can Python flush it at exit
                break
    finally:
        late = sender.close(timeout)
        for number, handler in before.items():
            signal.signal(number, handler)
    stats = sender.stats()
    fresh = stats.queue.dead_lettered
    letters = max(overview(folder).dead_letters, fresh)  # some may have had to go, for want of room
    earlier = f", {letters - fresh} of them from before" if letters > fresh else ""
    click.echo(
        f"sent {stats.exported_batches} batches, {stats.exported_bytes} bytes; {stats.queue.size} wait; "
        f"{letters} dead letters{earlier}; {sum(stats.errors.values())} failed sends",
        err=True,
    )
    if letters:
        click.echo(f"penstock queue inspect {folder} says why there are dead letters", err=True)
    if late:
        click.echo(f"not ended in time, to be sent again: {', '.join(late)}", err=True)
    return 1 if stats.queue.size or letters else 0
