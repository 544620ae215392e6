"""`penstock relay`: a queue folder, workers, a destination; with every setting of the queue as a flag."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from penstock.config.command_options import ExporterFlagsCommand, given_flags
from penstock.config.destinations import DESTINATIONS, ExporterSection
from penstock.errors import ConfigError
from penstock.export.exporter import Exporter
from penstock.export.send_queue import SendQueue
from penstock.service.logs import HumanFormatter
from penstock.service.queue_folder import is_queue_folder
from penstock.spool.dead_letter_report import holds_dead_letters
from penstock.spool.dead_letters import FOLDER_NAME
from penstock.spool.examine import overview_of_spool

if TYPE_CHECKING:
    from penstock.export.exporters.otlp_http_exporter import Signal

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# The options that set a key of `exporter`; each is also there under the key's own name, as --exporter-timeout.
_KEYS = {
    "to": ("exporter", "type"),
    "url": ("exporter", "url"),
    "token_file": ("exporter", "token_file"),
    "ca_file": ("exporter", "tls", "ca_file"),
    "header": ("exporter", "headers"),
    "send_timeout": ("exporter", "timeout"),
    "compression": ("exporter", "compression"),
    "exchange": ("exporter", "exchange"),
    "routing_key": ("exporter", "routing_key"),
}
_NAMES = [name.replace("_", "-") for name in DESTINATIONS]


def read_relay_options(file: Path | None, given: Mapping[str, Any], key_flags: Mapping[str, str]) -> ExporterSection:
    """The destination and its queue: `exporter` as `penstock run` reads it, with the options of this command on top.

    The file's destination does not count where --to or --url names another one: a token for the one must not reach
    the other. Nor does it count that the file has switched the queue off: its folder is what this command is for.
    """
    from penstock.config.load import GivenValue, load
    from penstock.config.tree import ServiceConfig

    whole = load(ServiceConfig, file, environ=os.environ)
    names_destination = given.get("to") or given.get("url") or {"--exporter-type", "--exporter-url"} & key_flags.keys()
    beneath = {
        path: one
        for path, one in whole.given.items()
        if path[0] == "exporter" and path[1:] not in (("queue", "enabled"), ("queue", "type"))
        if path[1:2] == ("queue",) or not names_destination
    }
    folder = ("exporter", "queue", "path")
    if ("data_dir",) in whole.given:  # as `penstock run` takes it; a flag is taken from here
        path = whole.config.resolved(whole.config.exporter.queue.path)
        beneath[folder] = GivenValue(str(path), whole.given[("data_dir",)].origin)
    headers = ("exporter", "headers")
    if lines := given.get("header"):
        before = beneath[headers].value if headers in beneath else {}
        beneath[headers] = GivenValue({**before, **_headers(lines)}, "--header")
    flags = {_flag(name): str(given[name]) for name in _KEYS if given.get(name) is not None and name != "header"}
    if "--to" in flags:
        flags["--to"] = flags["--to"].replace("-", "_")
    return load(
        ExporterSection,
        flags={**key_flags, **flags},
        path=("exporter",),
        beneath=beneath,
        aliases={_flag(name): path for name, path in _KEYS.items()},
    ).config


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _spelled(kind: str) -> str:
    """A destination as --to has it."""
    return kind.replace("_", "-")


def _headers(lines: Sequence[str]) -> dict[str, str]:
    pairs = [line.partition(":") for line in lines]
    if not all(colon and name.strip() for name, colon, _ in pairs):
        raise ConfigError("must look like 'Name: value'", field="--header")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _check_options(to: str, given: Mapping[str, Any]) -> None:
    """Refuse an option that the destination does not read: it would do nothing."""
    for name in (*_KEYS, "signal"):
        option = _KEYS[name][1] if name in _KEYS else name
        if given.get(name) and option != "type" and option not in DESTINATIONS[to].options:
            known = [_spelled(one) for one, kind in DESTINATIONS.items() if option in kind.options]
            raise ConfigError(f"is for {', '.join(known)}, not for {_spelled(to)}", field=_flag(name))


def _require_queue(folder: Path) -> None:
    try:
        if not is_queue_folder(folder):
            raise ConfigError(f"there is no queue in {folder}: name its folder with --queue-path")
        if holds_dead_letters(str(folder)):
            raise ConfigError(
                f"--queue-path {folder} holds dead letters, each wrapped with the reason that it was given up for: put "
                f"them back into their queue with `penstock queue replay {_replay_arguments(folder)}`, and relay that"
            )
    except OSError as error:
        raise ConfigError(f"--queue-path {folder}: {error.strerror}") from error


def _replay_arguments(letters: Path) -> str:
    """The arguments of `queue replay` that bring them back."""
    is_beside = letters.name == FOLDER_NAME and is_queue_folder(letters.parent)
    return f"{letters.parent} --dead-letters" if is_beside else f"QUEUE --dead-letters --from {letters}"


@click.command("relay", cls=ExporterFlagsCommand)
@click.option("--to", type=click.Choice(_NAMES), help="What the destination speaks.")
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
@click.pass_context
def relay_command(ctx: click.Context, /, config: Path | None, timeout: float, **given: Any) -> None:
    """Send what waits in a queue folder to a destination, with retries, breaker and dead letters, until it is empty.

    The folder must not be in use by another process. What the destination has taken leaves it, and what was printed by
    --to console was taken: `penstock queue inspect` looks and takes nothing. A destination that is down is waited for,
    for as long as it takes. SIGTERM or Ctrl-C ends it, and leaves the rest where it is; a second one kills it.

    It reads `exporter` of the configuration as `penstock run` does: a flag wins over the environment, the environment
    over the file. Without --to and --url batches go where `exporter` says, with its headers, token and certificates.

    The exit code is 0 if the destination has taken everything; 1 if batches wait, also after SIGTERM or Ctrl-C, or if
    dead letters lie in the folder, those from before included; 130 if Ctrl-C came before it had begun.

    \b
    Examples:
      penstock relay --to otlp-http --url http://127.0.0.1:4318 --queue-path ./queue
      penstock relay --to remote-write --url https://mimir.example/api/v1/push --header "X-Scope-OrgID: a"
      penstock relay --to console --queue-path ./queue --queue-workers 1
      penstock relay -c penstock.yaml
    """
    from penstock.service.relay_pipeline import make_stage_exporter

    destination = read_relay_options(config, given, given_flags(ctx))
    if destination.type == "none":
        where = f"{config} sets no exporter.type" if config is not None else "or a file that does, with -c"
        raise ConfigError(f"must say what the destination speaks: {', '.join(_NAMES)}; {where}", field="--to")
    _check_options(destination.type, given)
    settings = destination.queue
    if settings.type != "disk" or not settings.enabled:
        raise ConfigError("relay empties a folder: type must be disk and enabled must be true")
    _require_queue(Path(settings.path))
    exporter = make_stage_exporter(destination, cast("Signal", given["signal"] or "metrics"))
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
    letters = max(overview_of_spool(folder).dead_letters, fresh)  # some may have had to go, for want of room
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
