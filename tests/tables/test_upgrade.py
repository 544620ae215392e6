"""Tables of format 1 are converted exactly, whatever cuts the conversion off, and the job goes on in them."""

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from penstock.cli.main import main
from penstock.errors import TablesOutdated
from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.tables import upgrade
from penstock.tables.port import SCHEMAS, TableBatch, open_tables, read_level, read_top_n
from tests.servers import PostgreSQL
from tests.tables.adding import add
from tests.tables.test_layout import DAY, _close, partials_of, some_points

FUNCTIONS = ("percentile", "avg", "latest", "histogram(5,50)")
PARTIAL_ROWS = PARTIALS.remove(PARTIALS.get_field_index("record"))
TOP_ROWS = pa.schema([PARTIALS.field(name) for name in upgrade.OLD_TOP])
GUARD = "penstock/src/w"


def old_rows(name: str, number: int) -> pa.Table:
    if name != "top_n":
        return partials_of(some_points(number), *FUNCTIONS).select(PARTIAL_ROWS.names)
    moments, count = [DAY] * 3, 3
    columns = [["slow"] * count, ["top_n(2)"] * count, moments, ["x"] * count, [None, "r1", "r2"], [9.0, number, 5.0]]
    return pa.table(columns, schema=TOP_ROWS)


def make_delta(folder: Path) -> str:
    for name in SCHEMAS:
        for number in range(3):
            guard = CommitProperties(app_transactions=[Transaction(GUARD, number)])
            write_deltalake(str(folder / name), old_rows(name, number), mode="append", commit_properties=guard)
        if name == "minute":
            DeltaTable(str(folder / name)).create_checkpoint()
    return str(folder)


def make_parquet(folder: Path) -> str:
    for name in SCHEMAS:
        for number in range(3):
            place = folder / name / f"batch-{number}"
            place.mkdir(parents=True)
            pq.write_table(old_rows(name, number), place / "part-0.parquet")
            (place / "_guard.json").write_text(json.dumps({"versions": {GUARD: number}, "replaces": []}))
        dead = folder / name / "batch-dead"
        dead.mkdir()
        pq.write_table(old_rows(name, 7), dead / "part-0.parquet")
        (dead / "_guard.json").write_text(json.dumps({"versions": {}, "replaces": []}))
        (folder / name / "batch-2" / "_guard.json").write_text(
            json.dumps({"versions": {GUARD: 2}, "replaces": ["batch-dead"]})
        )
    return f"parquet:{folder}"


def make_postgres(server: PostgreSQL) -> str:
    types = {"string": "text", "int64": "bigint", "double": "double precision", "timestamp[us, tz=UTC]": "timestamptz"}
    with psycopg.connect(server.url) as connection:
        connection.execute(
            "create table penstock_guard (table_name text, application text, version bigint, "
            "primary key (table_name, application))"
        )
        for name in SCHEMAS:
            schema = TOP_ROWS if name == "top_n" else PARTIAL_ROWS
            columns = ", ".join(f"{field.name} {types[str(field.type)]}" for field in schema)
            connection.execute(f"create table penstock_{name} ({columns})")
            for number in range(3):
                with connection.cursor() as cursor:
                    marks = ", ".join(["%s"] * len(schema))
                    values = [tuple(row.values()) for row in old_rows(name, number).to_pylist()]
                    cursor.executemany(f"insert into penstock_{name} values ({marks})", values)
            connection.execute("insert into penstock_guard values (%s, %s, 2)", (name, GUARD))
    return server.url


@pytest.fixture(params=["delta", "parquet", pytest.param("postgres", marks=pytest.mark.server)])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param != "postgres":
        yield {"delta": make_delta, "parquet": make_parquet}[request.param](tmp_path / "tables")
        return
    with PostgreSQL(tmp_path / "postgres") as server:
        yield make_postgres(server)


def test_tables_of_format_1_are_refused_then_converted_and_the_job_goes_on(location: str) -> None:
    tables = open_tables(location)
    for use in (lambda: tables.held("minute", [GUARD]), lambda: read_level(tables, Level.MINUTE)):
        with pytest.raises(TablesOutdated, match=r"has format 1, .* `penstock tables upgrade`"):
            use()

    ran = CliRunner().invoke(main, ["tables", "upgrade", "--tables", location])
    assert ran.exit_code == 0, ran.output
    assert "minute" in ran.output
    again = CliRunner().invoke(main, ["tables", "upgrade", "--tables", location])
    assert again.output == "all tables have the format of this version\n"

    check(location)


def check(location: str) -> None:
    tables = open_tables(location)
    for folded in (False, True):
        for name in SCHEMAS:
            assert tables.held(name, [GUARD]) == {GUARD: 2}
            if folded:
                tables.compact(name)
        for level in Level:
            points = [point for number in range(3) for point in some_points(number)]
            # Rows of a level are of the minutes that they were given: any bucket is right for a test of sums.
            assert _close(read_level(tables, level), with_finals(partials_of(points, *FUNCTIONS), level))
        records = read_top_n(tables, 5, Level.DAY)
        records = records.filter(pa.compute.equal(records["metric"], "slow"))
        assert records.select(["record", "max"]).to_pylist() == [
            {"record": "r2", "max": 5.0},
            {"record": "r1", "max": 2.0},
        ]
    late = partials_of(some_points(9, 5), "avg")
    assert not add(tables, "minute", late, TableBatch("src", {"w": 1}, {"w": 2}))
    assert add(tables, "minute", late, TableBatch("src", {"w": 2}, {"w": 3}))


class Cut(Exception):
    """The end of the process."""


@pytest.mark.parametrize("calls", range(1, 10))
def test_a_conversion_that_is_cut_off_anywhere_is_finished_by_the_next(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = make_delta(tmp_path / "tables") if calls % 2 else make_parquet(tmp_path / "tables")
    rename, left = Path.rename, calls

    def cut(path: Path, target: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise Cut
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut)
        try:
            list(upgrade.upgrade_tables(open_tables(location)))
        except Cut:
            pass
    list(upgrade.upgrade_tables(open_tables(location)))

    check(location)
    assert not (tmp_path / "tables" / ".format-1").exists()
    assert not (tmp_path / "tables" / ".upgrade").exists()
