"""Every key as a flag: click options, made from the schema when a command needs them."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from penstock.config.schema import NAME, ConfigKey, ConfigSection, KeyKind, KeyPath, flag_of_key

FLAGS = "penstock.flags"
_METAVARS = {
    KeyKind.BOOL: "true|false",
    KeyKind.INT: "NUMBER",
    KeyKind.FLOAT: "NUMBER",
    KeyKind.SIZE: "SIZE",
    KeyKind.DURATION: "DURATION",
    KeyKind.PATH: "PATH",
    KeyKind.TEXTS: "A,B",
    KeyKind.TABLE: "KEY=VALUE,…",
}


class ConfigFlagsCommand(click.Command):
    """A command that takes every key of the configuration as a flag; `given_flags` returns the flags of a call."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        taken = {spelled for param in own for spelled in param.opts}
        return [*own, *(option for option in self._key_options() if not taken & set(option.opts))]

    def _key_options(self) -> Iterable[click.Option]:
        schema = _schema()
        known = [key for key in (*schema.walk(), *schema.walk_old()) if NAME not in key.path]
        return [_option(key, flag) for key in known for flag in key.flags]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags: dict[str, str] = ctx.meta.setdefault(FLAGS, {})
        return super().parse_args(ctx, _take_open_ended_flags(args, flags))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options"):
            formatter.write_dl(_help_records(ctx, super().get_params(ctx)))
        with formatter.section("Every key of the configuration is a flag and an environment variable, too"):
            formatter.write_dl(
                [
                    ("--admin-listen ADDRESS", "the key admin.listen, or PENSTOCK_ADMIN_LISTEN"),
                    ("--queue-max-bytes SIZE", "short for --exporter-queue-max-bytes, as for all of exporter.queue"),
                    ("penstock config keys", "lists them all"),
                ]
            )


class ExporterFlagsCommand(ConfigFlagsCommand):
    """A command that takes the keys of `exporter` as flags. Its help lists the short flags of `exporter.queue`."""

    def _key_options(self) -> Iterable[click.Option]:
        return [_option(key, flag) for key in _exporter_keys() for flag in key.flags]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options"):
            formatter.write_dl(_help_records(ctx, click.Command.get_params(self, ctx)))
        with formatter.section("The queue"):
            formatter.write_dl(
                _help_records(ctx, [_option(key, flag) for key in _exporter_keys() if (flag := key.short_flag)])
            )
        with formatter.section("Every key of exporter is a flag and an environment variable, too"):
            formatter.write_dl(
                [("--exporter-tls-key-file PATH", "the key exporter.tls.key_file, or PENSTOCK_EXPORTER_TLS_KEY_FILE")]
            )


def given_flags(ctx: click.Context) -> Mapping[str, str]:
    """The configuration flags of this call, as `load` takes them."""
    flags: Mapping[str, str] = ctx.meta.get(FLAGS, {})
    return flags


def _help_records(ctx: click.Context, params: Iterable[click.Parameter]) -> list[tuple[str, str]]:
    return [record for param in params if (record := param.get_help_record(ctx))]


def _schema() -> ConfigSection:
    from penstock.config.schema import schema_of
    from penstock.config.tree import ServiceConfig

    return schema_of(ServiceConfig)


def _exporter_keys() -> list[ConfigKey]:
    return [key for key in _schema().walk() if key.path[0] == "exporter"]


def _option(key: ConfigKey, flag: str) -> click.Option:
    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            ctx.meta.setdefault(FLAGS, {})[flag] = value

    return click.Option(
        [flag],
        default=None,
        expose_value=False,
        callback=keep,
        metavar="|".join(key.choices) if key.choices else _METAVARS.get(key.kind, "TEXT"),
        help=key.doc or key.name,
        hidden=key.replaced_by is not None,
    )


def _take_open_ended_flags(args: list[str], flags: dict[str, str]) -> list[str]:
    """Move flags that no list of options can hold from `args` to `flags`; returns the rest. `load` checks them.

    These are flags of named sections, as `--exporters-backup-url URL`, and keys of refused sections.
    """
    heads = {_flag_prefix(key.path) for key in _schema().walk() if NAME in key.path}
    heads |= {flag_of_key(path) for path, _ in _schema().walk_refused()}
    left: list[str] = []
    words = iter(args)
    for word in words:
        if not word.startswith(tuple(heads)):
            left.append(word)
            continue
        flag, found, value = word.partition("=")
        if not found and (value := next(words, "")) == "":
            raise click.UsageError(f"{flag} needs a value")
        flags[flag] = value
    return left


def _flag_prefix(path: KeyPath) -> str:
    """The prefix of the flags of a named section: `--exporters-`."""
    return flag_of_key(path[: path.index(NAME)]) + "-"
