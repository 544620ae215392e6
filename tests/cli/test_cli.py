"""The command line as a whole: every command explains itself, with examples; completion; the quick benchmark."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.cli import main as cli
from penstock.cli.main import main
from penstock.cli.spark_options import lifetimes_by_options, pauses_by_options
from penstock.spool import FastQueue


def commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))


COMMANDS = sorted(commands())


def test_the_commands_are_those_that_the_documentation_names() -> None:
    names = {path[0] for path in COMMANDS if path}
    wanted = {
        "bench",
        "completion",
        "config",
        "definitions",
        "demo",
        "doctor",
        "query",
        "queue",
        "relay",
        "run",
        "spark",
        "tables",
    }
    assert names == wanted


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "penstock")
def test_every_command_has_help_with_examples_that_it_accepts(path: tuple[str, ...]) -> None:
    ran = CliRunner().invoke(main, [*path, "--help"])

    assert ran.exit_code == 0, ran.output
    assert "Examples:" in ran.output
    examples = ran.output.split("Examples:")[1]
    assert " ".join(("penstock", *path)).strip() in examples


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "penstock")
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    silent = [param.name for param in command.params if isinstance(param, click.Option) and not param.help]
    assert silent == []


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "penstock")
def test_the_examples_name_only_options_that_there_are(path: tuple[str, ...]) -> None:
    examples = CliRunner().invoke(main, [*path, "--help"]).output.split("Examples:")[1].split("Options:")[0]
    for line in examples.splitlines():
        words = line.split()
        if not words or words[0] != "penstock" or "<" in line:
            continue
        command: click.Command = main
        rest = words[1:]
        while rest and isinstance(command, click.Group) and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        context = click.Context(command)
        known = {spelled for param in command.get_params(context) for spelled in (*param.opts, *param.secondary_opts)}
        given = (
            {word.partition("=")[0] for word in rest[: rest.index("--")] if "--" in rest}
            if "--" in rest
            else {word.partition("=")[0] for word in rest}
        )
        unknown = {word for word in given if word.startswith("--")} - known
        assert not unknown, f"{line.strip()}: {unknown}"


def test_the_exit_codes_are_explained_where_people_look() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    for code in ("0", "1", "2", "4", "130"):
        assert f"\n    {code}  " in text
        assert f"\n  {code}  " in (cli.__doc__ or "")


def test_an_interrupt_ends_a_command_without_a_word_and_with_the_shells_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.service.doctor.examine_for_doctor", interrupted)
    ran = CliRunner().invoke(main, ["doctor"])

    assert ran.exit_code == 130
    assert ran.output == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    ran = CliRunner().invoke(main, ["completion", shell])
    assert ran.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in ran.output


def test_flags_made_from_the_configuration_are_completed(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": "penstock run --receivers-http-l",
        "COMP_CWORD": "2",
    }
    program = "from penstock.cli.main import main; main(prog_name='penstock')"
    ran = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert "--receivers-http-listen" in ran.stdout


@pytest.mark.parametrize("module", ["penstock.cli", "click", "penstock.export", "penstock.spool"])
def test_ctrl_c_while_the_command_is_loaded_is_as_quiet_as_later_on(module: str) -> None:
    program = """
import os, signal, sys
from importlib.metadata import entry_points
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
(command,) = entry_points(group="console_scripts", name="penstock")
sys.exit(command.load()())
"""
    ran = subprocess.run([sys.executable, "-c", program, module], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_the_quick_benchmark_measures_queue_and_ingest() -> None:
    ran = CliRunner().invoke(main, ["bench", "--seconds", "0.1", "--json"])
    assert ran.exit_code == 0, ran.output
    found = {one["name"]: one["rate"] for one in json.loads(ran.stdout)}
    assert found.keys() == {"queue, memory", "queue, disk", "queue, fsync", "ingest, disk"}
    assert all(rate > 0 for rate in found.values())


def test_a_benchmark_that_there_is_not_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = CliRunner().invoke(main, ["bench", "nothing"])
    assert ran.exit_code == 1
    assert "durable_queue" in ran.output


def test_segments_that_are_waited_for_in_a_folder_that_is_not_there_are_noted(tmp_path: Path) -> None:
    there = ["spark", "run", "--segments", str(tmp_path / "none"), "--tables", str(tmp_path / "tables")]
    ran = CliRunner().invoke(main, [*there, "--conf", "nonsense"])  # ends before Spark is started

    assert ran.exit_code == 2
    assert f"note: there is no folder {tmp_path / 'none'} yet" in ran.output


def test_a_file_says_where_tables_segments_and_queues_are(tmp_path: Path) -> None:
    text = f"data_dir: {tmp_path}\nexporter: {{type: console}}\ntables: {{location: parquet:tables}}\n"
    (tmp_path / "penstock.yaml").write_text(text)
    (tmp_path / "tables").mkdir()
    with FastQueue(tmp_path / "queue") as queue:
        queue.push(b"one")
    file = str(tmp_path / "penstock.yaml")
    for command in (["queue", "inspect", "relay"], ["queue", "check", "relay"]):
        ran = CliRunner().invoke(main, [*command, "-c", file])
        assert (ran.exit_code, "1 " in ran.output) == (0, True), ran.output
    for command in (["spark", "compact"], ["spark", "expire"], ["spark", "tables"]):
        ran = CliRunner().invoke(main, [*command, "-c", file])
        assert (ran.exit_code, "minute" in ran.output) == (0, True), ran.output
    ran = CliRunner().invoke(main, ["spark", "compact"])
    assert ran.exit_code == 2
    assert "--tables must be set, or -c FILE for tables.location" in ran.output
    days = ["--from", "2026-01-01", "--to", "2026-01-02"]
    ran = CliRunner().invoke(main, ["spark", "backfill", "--tables", str(tmp_path / "tables"), *days])
    assert "--segments must be set, or -c FILE for segments.location" in ran.output


def test_a_file_says_how_often_and_how_long_where_the_command_does_not(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("tables: {fold_every: 0, maintain_every: 2h, keep: {minute: 3d}}\n")
    with click.Context(main):
        assert pauses_by_options(None, None, file) == (0.0, 7200.0)
        assert pauses_by_options(60.0, None, file) == (60.0, 7200.0)
        assert pauses_by_options(None, None, None) == (300.0, 3600.0)
        kept = lifetimes_by_options(("hour=1d",), file)
    assert (kept["minute"], kept["hour"]) == (3 * 86400.0, 86400.0)
