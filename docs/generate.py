"""The pages of the reference that are made from the code: `python -m docs.generate` writes them anew."""

from collections.abc import Iterator
from pathlib import Path

import click

from penstock.cli.main import main
from penstock.config.reference import render_config_reference as configuration
from penstock.telemetry import DECLARATIONS, Declaration

HERE = Path(__file__).parent / "reference"
MADE = "<!-- Made by `python -m docs.generate`; change the code, not this. -->"

COMMAND_LINE = f"""\
# Command line

{MADE}

Every command of `penstock`, with its options. `penstock COMMAND --help` prints the same.

| exit code | means |
|---|---|
| 0 | done; `run`: ended in good order |
| 1 | it ran and something is wrong: a point or a requirement is missing, a queue is damaged, a port is taken |
| 2 | the call or the configuration is wrong: nothing was done |
| 4 | `run`: not everything was drained in time; it stays in the durable queues |
| 130 | interrupted with Ctrl-C before the command could end in good order |
"""

METRICS = f"""\
# Metrics

{MADE}

Every metric that `/metrics` of the admin port shows. With several processes each value has a label `process` as well,
and what belongs to one of several queues has a label `queue`. [Operate](../how-to/operate.md) says which to alarm on.
"""
GROUPS = {
    "Receivers": ("penstock_receive_", "penstock_handover_"),
    "L1": ("penstock_points_", "penstock_l1_"),
    "Batch queue": ("penstock_batch_queue_",),
    "Durable queue": ("penstock_queue_", "penstock_fastqueue_"),
    "Export": ("penstock_export_", "penstock_circuit_breaker_", "penstock_failover_"),
    "Segments and Spark": ("penstock_segment", "penstock_spark_"),
    "Tables": ("penstock_tables_",),
    "Service": ("penstock_service_",),
    "Consumer pool": ("penstock_amqp_",),
}


def pages() -> dict[str, str]:
    """Each page's text under its file name."""
    return {"configuration.md": configuration(), "command-line.md": command_line(), "metrics.md": metrics()}


def command_line() -> str:
    out = [COMMAND_LINE]
    for path, command in _commands(main, ("penstock",)):
        context = click.Context(command, info_name=" ".join(path), max_content_width=100, terminal_width=100)
        out.append(f"## `{' '.join(path)}`\n\n```text\n{_unwrapped(command.get_help(context))}\n```\n")
    return "\n".join(out)


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from _commands(inner, (*path, name))


def _unwrapped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def metrics() -> str:
    out = [METRICS]
    for title, stems in GROUPS.items():
        rows = [_row(one) for one in DECLARATIONS.values() if one.name.startswith(stems)]
        out += [f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(out)


def _row(one: Declaration) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.name}` | {one.kind} | {labels} | {one.help} |"


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text)
