"""`kill -9` within a fold, an expiry, a vacuum or an upgrade: the tables are exact, and the next one ends it."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from penstock.model.level import Level
from penstock.tables.port import SCHEMAS, TableBatch, Tables, open_tables, read_level
from penstock.tables.upgrade import upgrade_tables
from tests.servers import PostgreSQL
from tests.tables.adding import add
from tests.tables.test_truth import START, Point, answer_of, assert_equal, batch_answer, partials_of, some_points
from tests.tables.test_upgrade import check, make_delta, make_parquet, make_postgres

DAYS = 4
BEFORE = START + timedelta(days=2)
CHILD = [sys.executable, "-m", "tests.tables.kill_child"]
ROOT = Path(__file__).parents[2]
KILLS = [pytest.param(1, id="once"), pytest.param(25, id="often", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
PLACES = ["delta", "parquet", pytest.param("postgres", marks=pytest.mark.server)]
Place = Callable[[int], str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    with PostgreSQL(tmp_path_factory.mktemp("postgres")) as running:
        yield running


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where the tables of the n-th attempt are."""
    if request.param != "postgres":
        kind = "" if request.param == "delta" else "parquet:"
        return lambda number: f"{kind}{tmp_path / f'tables{number}'}"
    server: PostgreSQL = request.getfixturevalue("server")

    def emptied(_: int) -> str:
        with psycopg.connect(server.url) as connection:
            connection.execute("drop schema if exists penstock cascade")
            for name in (*SCHEMAS, "guard", "metrics"):
                connection.execute(f"drop table if exists penstock_{name} cascade")
                connection.execute(f"drop table if exists penstock_{name}_format_1 cascade")
        return server.url

    return emptied


def killed(location: str, step: str, within: float) -> bool:
    """Whether the step was still at work when it was killed, so many seconds after it began."""
    command = [*CHILD, location, step, BEFORE.isoformat()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        try:
            assert child.wait(within) == 0
        except subprocess.TimeoutExpired:
            child.kill()
            return True
    return False


def filled(tables: Tables, rng: random.Random) -> list[Point]:
    """Batches of any days, some of them folded."""
    points: list[Point] = []
    for number in range(6):
        some = [point for _ in range(4) for point in some_points(rng, range(DAYS))]
        add(tables, "minute", partials_of(some), TableBatch("src", {"w": number - 1} if number else {}, {"w": number}))
        points += some
        if number == 3:
            tables.compact("minute")
    return points


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("step", ["fold", "expire", "vacuum"])
def test_a_step_that_is_killed_leaves_exact_tables(place: Place, step: str, kills: int) -> None:
    rng, hits = random.Random(step), 0
    for number in range(kills):
        location = place(number)
        tables = open_tables(location)
        points = filled(tables, rng)
        hits += killed(location, step, rng.uniform(0.0, 0.15))
        later = [point for point in points if point[2] >= BEFORE]
        there = open_tables(location)
        if step == "expire":  # a day goes as a whole, metric by metric
            found = answer_of(read_level(there, Level.MINUTE))
            assert batch_answer(later).keys() <= found.keys() <= batch_answer(points).keys()
            there.expire("minute", BEFORE)
        assert_equal(answer_of(read_level(there, Level.MINUTE)), batch_answer(later if step == "expire" else points))
        there.compact("minute")
        there.vacuum(0)
        assert_equal(answer_of(read_level(there, Level.MINUTE)), batch_answer(later if step == "expire" else points))
        assert there.describe("minute").rows == len(batch_answer(later if step == "expire" else points))
        assert there.held("minute", ["penstock/src/w"]) == {"penstock/src/w": 5}
    assert hits or kills == 1


@pytest.mark.parametrize("kills", KILLS)
def test_an_upgrade_that_is_killed_is_finished_by_the_next(
    place: Place, kills: int, request: pytest.FixtureRequest
) -> None:
    rng, hits = random.Random(8), 0
    for number in range(kills):
        location = place(number)
        if location.startswith("postgresql:"):
            make_postgres(request.getfixturevalue("server"))
        elif location.startswith("parquet:"):
            make_parquet(Path(location.removeprefix("parquet:")))
        else:
            make_delta(Path(location))
        hits += killed(location, "upgrade", rng.uniform(0.0, 0.3))
        list(upgrade_tables(open_tables(location)))
        check(location)
    assert hits or kills == 1
