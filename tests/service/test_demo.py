"""`penstock demo`: every generated point is accounted for, or the exit code says so."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import demo_screen
from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.service import demo
from penstock.service.demo import claim_demo_folder
from penstock.service.generator import DemoDay, generate_demo_points
from penstock.tables.delta import DeltaTables

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_tables.py"


@pytest.mark.spark
def test_the_demo_accounts_for_every_point_and_finds_the_one_that_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    ran = CliRunner().invoke(main, ["demo", "--points", "20000", "--dir", str(folder)])

    assert ran.exit_code == 0, ran.output
    assert "Every point is accounted for" in ran.output
    assert f"--tables {folder}/tables --by service --since 2d --plot\n" in ran.output  # however narrow the terminal
    assert {path.name for path in (folder / "tables").iterdir()} == {"minute", "hour", "day", "top_n", "metrics"}

    # The same tables, but one point more is said to have been generated.
    tables = DeltaTables(folder / "tables")
    counts = demo.demo_counts_of(tables)["minute"]
    metric = next(iter(counts))
    assert demo.demo_differences(tables, counts) == []
    assert demo.demo_differences(tables, {**counts, metric: counts[metric] + 1}) == [
        f"{level} table: {metric} has {counts[metric]} points, generated {counts[metric] + 1}"
        for level in ("minute", "hour", "day")
    ]

    # The example reads them, and a pipe gets a chart without escape codes.
    command = [sys.executable, str(EXAMPLE), str(folder / "tables")]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert "mean by hour\n" in read.stdout
    assert "█" in read.stdout
    assert "\x1b" not in read.stdout


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["minute table: cpu has 1 points, generated 2"], 1)])
def test_the_exit_code_says_whether_every_point_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str], code: int
) -> None:
    outcome = demo.DemoOutcome(tmp_path, DeltaTables(tmp_path), {"cpu": 2}, 1, 1, 1.0, 1.0, problems)
    monkeypatch.setattr(demo, "run_demo", lambda *_: outcome)
    monkeypatch.setattr(demo_screen, "demo_summary_on_screen", lambda *_: None)

    ran = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path / "demo")])

    assert ran.exit_code == code, ran.output


def test_a_folder_that_is_not_a_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")

    with pytest.raises(ConfigError, match="not a demo"), claim_demo_folder(tmp_path):
        pass

    assert (tmp_path / "precious").read_text() == "mine"


def test_an_earlier_demo_is_replaced_also_behind_a_link(tmp_path: Path) -> None:
    folder, link = tmp_path / "demo", tmp_path / "link"
    with claim_demo_folder(folder):
        (folder / "tables").mkdir()
        (folder / "old").touch()
    link.symlink_to(folder)

    with claim_demo_folder(link):
        assert [entry.name for entry in folder.iterdir()] == [demo.MARK]


def test_a_demo_that_is_running_is_left_alone(tmp_path: Path) -> None:
    with claim_demo_folder(tmp_path / "demo"):
        (tmp_path / "demo" / "running").touch()
        with pytest.raises(ConfigError, match="in use"), claim_demo_folder(tmp_path / "demo"):
            pass
        assert (tmp_path / "demo" / "running").exists()


def test_a_folder_that_cannot_be_made_is_one_line_and_no_traceback() -> None:
    ran = CliRunner().invoke(main, ["demo", "--dir", "/proc/no/such"])
    assert ran.exit_code == 1
    assert "--dir" in ran.output
    assert len(ran.output.splitlines()) == 1


def test_the_generator_repeats_itself_and_comes_near_the_number_asked_for() -> None:
    day = DemoDay(points=50_000)
    first, again = ([chunk.points for chunk in generate_demo_points(day, end=1e9)] for _ in range(2))

    assert all(a.equals(b) for a, b in zip(first, again, strict=True))
    assert sum(points.num_rows for points in first) == pytest.approx(50_000, rel=0.1)
