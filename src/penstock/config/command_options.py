"""Every key as a flag: click options that are made from the schema when a command needs them, not before."""

from collections.abc import Mapping
from typing import Any

import click

from penstock.config.schema import NAME, Key, Kind

FLAGS = "penstock.flags"
_METAVARS = {
    Kind.BOOL: "true|false",
    Kind.INT: "NUMBER",
    Kind.FLOAT: "NUMBER",
    Kind.SIZE: "SIZE",
    Kind.DURATION: "DURATION",
    Kind.PATH: "PATH",
    Kind.TEXTS: "A,B",
    Kind.TABLE: "KEY=VALUE,…",
}


class ConfigCommand(click.Command):
    """A command that takes every key of the configuration as a flag; `given_flags` are those that were given."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        taken = {spelled for param in own for spelled in param.opts}
        return [*own, *(option for option in _options() if not taken & set(option.opts))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags: dict[str, str] = ctx.meta.setdefault(FLAGS, {})
        return super().parse_args(ctx, _without_named(args, flags))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [record for param in super().get_params(ctx) if (record := param.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(records)
        with formatter.section("Every key of the configuration is a flag and an environment variable, too"):
            formatter.write_dl(
                [
                    ("--admin-listen ADDRESS", "the key admin.listen, or PENSTOCK_ADMIN_LISTEN"),
                    ("--queue-max-bytes SIZE", "short for --exporter-queue-max-bytes, as for all of exporter.queue"),
                    ("penstock config keys", "lists them all"),
                ]
            )


def given_flags(ctx: click.Context) -> Mapping[str, str]:
    """The flags of the configuration that were given, as `load` takes them."""
    flags: Mapping[str, str] = ctx.meta.get(FLAGS, {})
    return flags


def short_flags() -> dict[str, str]:
    """The key of each flag that the queue's users know: `--queue-max-bytes`."""
    from penstock.export.flags import FLAGS as QUEUE_FLAGS

    return {f"--{flag.name}": f"exporter.queue.{flag.key}" for flag in QUEUE_FLAGS}


def _keys() -> list[Key]:
    from penstock.config.schema import schema_of
    from penstock.config.tree import ServiceConfig

    return list(schema_of(ServiceConfig).walk())


def _options() -> list[click.Option]:
    shorts: dict[str, list[str]] = {}
    for short, name in short_flags().items():
        shorts.setdefault(name, []).append(short)
    return [_option(key, shorts.get(key.name, [])) for key in _keys() if NAME not in key.path]


def _option(key: Key, shorts: list[str]) -> click.Option:
    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            ctx.meta.setdefault(FLAGS, {})[key.flag] = value

    return click.Option(
        [key.flag, *shorts],
        default=None,
        expose_value=False,
        callback=keep,
        metavar="|".join(key.choices) if key.choices else _METAVARS.get(key.kind, "TEXT"),
        help=key.doc or key.name,
    )


def _without_named(args: list[str], flags: dict[str, str]) -> list[str]:
    """`args` without the flags of named sections, as `--exporters-backup-url URL`: their names are the user's."""
    heads = {key.flag.partition(NAME)[0] for key in _keys() if NAME in key.path}
    left: list[str] = []
    words = iter(args)
    for word in words:
        if not any(word.startswith(head) for head in heads):
            left.append(word)
            continue
        flag, found, value = word.partition("=")
        if not found and (value := next(words, "")) == "":
            raise click.UsageError(f"{flag} needs a value")
        flags[flag] = value
    return left
