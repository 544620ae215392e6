"""`penstock query` on unusual names and numbers: senders may call things anything."""

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from rich.console import Console

from penstock.cli.main import main
from penstock.cli.query_screen import metrics_on_screen, plot_on_screen, rows_on_screen
from penstock.model.function import AVG
from penstock.model.level import Level
from penstock.model.partial import merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.tables import delta
from penstock.tables.query import QueryRow
from tests.cli.test_query import add

NOON = datetime(2026, 3, 16, 12, tzinfo=UTC)
ODD = {
    "[red]": "[/red]",  # markup of the library that draws tables
    "\x1b[2Jname": "\x1b]0;title\x07\x9b31m",  # what a terminal obeys
    "two\nlines": "a\nb\tc\r\u2028\u202e",
    "time": "noon",
    "value": "high",
    "": "nameless",
    'quo"te,comma': "{}",
}


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = delta.DeltaTables(tmp_path_factory.mktemp("odd") / "tables")
    now = datetime.now(UTC)  # not when the file was loaded: in a long run, all would be too old by now
    times = pa.array([now] * 2, pa.timestamp("us", tz="UTC"))
    entities = pa.array([entity_of(ODD), entity_of({"host": "a"})])
    rows = merged(partials_of_columns("[bold]odd", AVG, entities, times, pa.array([1.0, 3.0])))
    for level in Level:
        add(made, level.value, rows, "one")
    return made.location


def ran(location: str, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["query", *arguments, "--tables", location], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def by_all() -> list[str]:
    return [argument for name in ODD for argument in ("--by", name)]


def is_harmless(text: str) -> bool:
    return all(sign == "\n" or sign.isprintable() for sign in text)


@pytest.mark.parametrize("more", [[], ["--plot"], ["--top", "5"]])
def test_a_terminal_is_shown_names_as_they_are_and_obeys_none(location: str, more: list[str]) -> None:
    for by in ([], ["--by", "*"], by_all()):
        output = ran(location, "[bold]odd", *by, *more)
        assert is_harmless(output)
        assert "[bold]odd" in output


def test_nothing_of_a_name_is_taken_for_markup() -> None:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(rows_on_screen([QueryRow(NOON, ODD, "avg", 1, 1.0, 1.0, 1.0)], "[bold]odd", is_top=False))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[red]", "[/red]", "[bold]odd", r"\x1b", "noon", "nameless"):
        assert text in shown
    assert is_harmless(shown)
    drawn = plot_on_screen([QueryRow(NOON, ODD, "avg", 1, 1.0, 1.0, 1.0)], "\x1bodd", 80)
    assert r"\x1bodd" in drawn
    assert "\x1bodd" not in drawn
    assert "\x07" not in drawn
    assert metrics_on_screen([]).row_count == 0


def test_programs_are_output_names_exactly(location: str) -> None:
    of_json = json.loads(ran(location, "[bold]odd", "--by", "*", "--json"))
    rows = list(csv.DictReader(io.StringIO(ran(location, "[bold]odd", "--by", "*", "--csv"), newline="")))
    expected = {f"label_{name}" if name in ("time", "value") else name: value for name, value in ODD.items()}
    assert next(row for row in of_json if "[red]" in row).items() >= expected.items()
    assert next(row for row in rows if row["[red]"]).items() >= expected.items()


@pytest.mark.parametrize("since", ["0", "1ms", "99999999d", "1e300", "-1h", "nan"])
def test_a_time_that_nobody_means_is_an_answer_or_a_sentence(location: str, since: str) -> None:
    done = CliRunner().invoke(main, ["query", "[bold]odd", "--since", since, "--tables", location])
    assert done.exit_code in (0, 1, 2)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output


def test_tables_that_are_something_else_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no table")
    (tmp_path / "broken/minute/_delta_log").mkdir(parents=True)
    (tmp_path / "broken/minute/_delta_log/00000000000000000000.json").write_text("no log")
    for location in (str(tmp_path / "broken"), str(tmp_path / "file"), "postgresql://127.0.0.1:1/none"):
        done = CliRunner().invoke(main, ["query", "cpu", "--tables", location])
        assert done.exit_code in (1, 2), (location, done.output, done.exception)
        assert isinstance(done.exception, SystemExit)
        assert "Error" in done.output


@pytest.mark.parametrize("arguments", [[], ["cpu"]])
def test_a_folder_that_may_not_be_read_is_not_called_empty(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("penstock.tables.query.os.listdir", refused)  # as root, nothing else would be refused
    done = CliRunner().invoke(main, ["query", *arguments, "--tables", str(tmp_path)])
    assert done.exit_code == 1
    assert "cannot be read" in done.output
    assert "Permission denied" in done.output
