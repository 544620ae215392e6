"""`penstock config …`: check a configuration, see what holds and why, get a file to begin with."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from penstock.config.command_options import ConfigFlagsCommand, given_flags
from penstock.config.schema import PREFIX
from penstock.errors import ConfigError

FILE = "penstock.yaml"


def config_option(command: Any) -> Any:
    """`-c FILE`, as every command that reads the configuration takes it."""
    return _file_option(f"The configuration file, or PENSTOCK_CONFIG [default: {FILE}, if it is there].")(command)


def named_config_option(command: Any) -> Any:
    """`-c FILE` for commands that change something: no file is read that was not named."""
    return _file_option("A configuration file, or PENSTOCK_CONFIG: what it says where this command is not told.")(
        command
    )


def _file_option(text: str) -> Any:
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--config", "-c", "file", envvar="PENSTOCK_CONFIG", type=kind, help=text)


def write_command_output(out: Path, text: str) -> None:
    """Writes what `--out` asks for; ConfigError rather than over a file."""
    try:
        with open(out, "x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out {out} exists: name another file, or move that one away") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def load_config_for_command(ctx: click.Context, file: Path | None) -> Any:
    """The configuration that the file, the environment and the flags of this command give, with its origins."""
    from penstock.config.load import load
    from penstock.config.tree import ServiceConfig

    return load(ServiceConfig, file or default_command_file(), environ=os.environ, flags=given_flags(ctx))


def default_command_file() -> Path | None:
    """The file that is read where none is named."""
    return Path(FILE) if Path(FILE).exists() else None


def tables_of_command(file: Path | None) -> str:
    """Where the tables are. Loading the configuration is slow: it is read only where it can matter."""
    if file is None and not Path(FILE).exists() and "PENSTOCK_TABLES_LOCATION" not in os.environ:
        return "./tables"
    location: str = load_config_for_command(click.get_current_context(), file).config.tables_location
    return location


@click.group("config")
def config_command() -> None:
    """The configuration: one file, and every key also a flag and an environment variable.

    \b
    A flag wins over the environment, the environment over the file, the file over the default.
    \b
    Examples:
      penstock config init --out penstock.yaml
      penstock config check -c penstock.yaml
      penstock config show -c penstock.yaml --origin
      penstock config keys
    """


@config_command.command("check", cls=ConfigFlagsCommand)
@config_option
@click.pass_context
def config_check_command(ctx: click.Context, file: Path | None) -> None:
    """Say whether the configuration can be used; every problem with its key, value, bound and line.

    The exit code is 0 if it can, 2 if it cannot.

    \b
    Examples:
      penstock config check -c penstock.yaml
      penstock config check -c penstock.yaml --processes 4
    """
    loaded = load_config_for_command(ctx, file)
    for note in (*loaded.warnings, *loaded.config.notes(), *_definitions(loaded.config)):
        click.echo(f"note: {note}", err=True)
    click.echo(f"{file or default_command_file() or 'no file'}: fine, {_describe_sources(loaded)}")


def _describe_sources(loaded: Any) -> str:
    """How many keys the file sets, and which variables set others: those are easily forgotten."""
    origins = [one.origin for path, one in loaded.given.items() if not _is_heading(path, loaded.given)]
    variables = [origin for origin in origins if origin.startswith(f"{PREFIX}_")]
    flags = [origin for origin in origins if origin.startswith("--")]
    in_file = len(origins) - len(variables) - len(flags)
    parts = [f"{in_file} in the file"] if in_file else []
    parts += [f"{len(variables)} by the environment ({', '.join(variables)})"] if variables else []
    parts += [f"{len(flags)} by flags ({', '.join(flags)})"] if flags else []
    return f"keys set: {', '.join(parts)}; the others have their defaults" if parts else "every key has its default"


def _is_heading(path: Any, given: Any) -> bool:
    """Whether it is only the name of a section, as `exporters.backup`."""
    return any(other[: len(path)] == path and other != path for other in given)


def _definitions(configured: Any) -> list[str]:
    """Read the metric definitions, too: ConfigError names their mistakes. A file that is elsewhere is only noted."""
    path = configured.definitions_path
    if path is None:
        return []
    if not path.exists():
        return [f"definitions {path}: not here; it must be where the service runs"]
    from penstock.model.definition_file import load_definitions

    load_definitions(path)
    return []


@config_command.command("show", cls=ConfigFlagsCommand)
@config_option
@click.option("--origin", is_flag=True, help="Say beside each key where its value comes from.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read: key, value, origin.")
@click.pass_context
def config_show_command(ctx: click.Context, file: Path | None, origin: bool, as_json: bool) -> None:
    """Show every key as it holds: file, environment, flags and defaults put together. Secrets are masked.

    \b
    Examples:
      penstock config show
      penstock config show -c penstock.yaml --origin
      PENSTOCK_PROCESSES=4 penstock config show --origin
    """
    from penstock.config.show import config_as_yaml, config_entries

    loaded = load_config_for_command(ctx, file)
    if as_json:
        rows = [{"key": name, "value": value, "origin": where} for name, value, where in config_entries(loaded)]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(config_as_yaml(loaded, with_origin=origin), nl=False)


@config_command.command("init")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to write it; not over a file.")
@click.option("--full", is_flag=True, help="With every key there is, commented out, at its default.")
def config_init_command(out: Path | None, full: bool) -> None:
    """Write a configuration file to begin with: one machine, OTLP and Prometheus in, tables out.

    \b
    Examples:
      penstock config init
      penstock config init --out penstock.yaml
      penstock config init --full --out penstock.yaml
    """
    from penstock.config.show import config_template
    from penstock.config.tree import ServiceConfig

    text = config_template(ServiceConfig) if full else Path(__file__).with_name("penstock.yaml").read_text()
    if out is None:
        click.echo(text, nl=False)
        return
    write_command_output(out, text)
    click.echo(f"{out} is written: penstock config check -c {out}, then penstock run -c {out}", err=True)


@config_command.command("keys")
@click.argument("text", default="")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def config_keys_command(text: str, as_json: bool) -> None:
    """List every key with its default, its flag and its environment variable; only those that contain TEXT.

    \b
    Examples:
      penstock config keys
      penstock config keys max_bytes
    """
    from penstock.config.show import config_key_list
    from penstock.config.tree import ServiceConfig

    found = [(key, default) for key, default in config_key_list(ServiceConfig) if text.lower() in key.name]
    if not found:
        click.echo(f"no key contains {text!r}", err=True)
        sys.exit(1)
    if as_json:
        rows = [
            {
                "key": key.name,
                "default": default,
                "kind": key.describes,
                "flags": list(key.flags),
                "variable": key.variable,
                "doc": key.doc,
            }
            for key, default in found
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for key, default in found:
        click.echo(f"{key.name}: {default}")
        if key.doc:
            click.echo(f"    {key.doc}")
        click.echo(f"    {', '.join(key.flags)}   {key.variable}")
