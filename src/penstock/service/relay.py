"""`penstock relay`: a queue folder, workers, a destination; with every setting of the queue as a flag."""

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from penstock.errors import ConfigError
from penstock.export.config import SendQueueConfig
from penstock.export.exporter import Exporter
from penstock.export.flags import FLAGS, merged
from penstock.export.send_queue import SendQueue

DESTINATIONS = ("otlp-http", "remote-write", "amqp", "console")


def queue_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every flag of the queue; `queue_config` makes the configuration of them."""
    for flag in reversed(FLAGS):
        option = click.option(f"--{flag.name}", default=None, metavar=flag.kind.__name__.upper(), help=flag.help)
        command = option(command)
    return command


def queue_config(file: Path | None, given: Mapping[str, str | None]) -> SendQueueConfig:
    """`exporter.queue` of the file, if there is one, with the flags that were given on top."""
    section: Any = {}
    if file is not None:
        document = yaml.safe_load(file.read_text()) or {}
        section = (document.get("exporter") or {}).get("queue") or {}
    flags = [(flag, text) for flag in FLAGS if (text := given.get(flag.name.replace("-", "_"))) is not None]
    return SendQueueConfig.from_mapping(merged(section, flags))


def make_exporter(to: str, url: str | None, routing_key: str, token_file: Path | None) -> Exporter:
    """The exporter of that name. Imports only what it needs."""
    if to == "console":
        from penstock.export.exporters.console import ConsoleExporter

        return ConsoleExporter()
    if url is None:
        raise ConfigError(f"--url must say where {to} sends to")
    if to == "otlp-http":
        from penstock.export.exporters.otlp_http import OtlpHttpConfig, OtlpHttpExporter

        return OtlpHttpExporter(OtlpHttpConfig(url=url, token_file=token_file))
    if to == "remote-write":
        from penstock.export.exporters.remote_write import RemoteWriteConfig, RemoteWriteExporter

        return RemoteWriteExporter(RemoteWriteConfig(url=url, token_file=token_file))
    from penstock.service.doctor import require_extra

    require_extra("amqp", "pika")
    from penstock.export.exporters.amqp import AmqpConfig, AmqpExporter

    return AmqpExporter(AmqpConfig(url=url, routing_key=routing_key, password_file=token_file))


@click.command()
@click.option("--to", type=click.Choice(DESTINATIONS), required=True, help="What the destination speaks.")
@click.option("--url", help="Where it is, as http://127.0.0.1:4318.")
@click.option("--routing-key", default="", help="amqp: the queue.")
@click.option("--token-file", type=click.Path(path_type=Path), help="A bearer token; amqp: the password.")
@click.option("--config", "-c", type=click.Path(exists=True, path_type=Path), help="A file with exporter.queue.")
@click.option("--follow", is_flag=True, help="Go on when the queue is empty, until SIGTERM or SIGINT.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds that stopping may take.")
@queue_options
def relay(
    to: str,
    url: str | None,
    routing_key: str,
    token_file: Path | None,
    config: Path | None,
    follow: bool,
    timeout: float,
    **given: str | None,
) -> None:
    """Send what waits in a queue folder to a destination, with retries, breaker and dead letters.

    Every key of `exporter.queue` in the configuration file is also a flag; a flag wins.

    \b
    Examples:
      penstock relay --to otlp-http --url http://127.0.0.1:4318 --queue-path ./queue
      penstock relay --to console --queue-path ./queue --queue-workers 1
    """
    settings = queue_config(config, given)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    sender = SendQueue.open(make_exporter(to, url, routing_key, token_file), settings).start()
    try:
        while not ending.wait(0.05) and (follow or len(sender)):
            pass
    finally:
        late = sender.close(timeout)
    stats = sender.stats()
    click.echo(
        f"sent {stats.exported_batches} batches, {stats.exported_bytes} bytes; {stats.queue.size} wait; "
        f"{stats.queue.dead_lettered} dead letters; {sum(stats.errors.values())} failed sends",
        err=True,
    )
    if late:
        click.echo(f"not ended in time, to be sent again: {', '.join(late)}", err=True)
