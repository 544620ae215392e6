"""Tables: one contract that each of the three places keeps. No JVM."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError, MissingRequirement, TableConflict, TablesOutdated
from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.model.name import LONGEST_NAME
from penstock.model.partial import merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.tables import parquet, postgres, postgres_rows
from penstock.tables.delta import DeltaTables
from penstock.tables.labels import table_labels_of_entity
from penstock.tables.parquet import ParquetTables
from penstock.tables.port import SCHEMAS, TOP_N, TableBatch, Tables, open_tables, read_level, read_top_n
from penstock.tables.table_rows import RECORDS
from tests.servers import PostgreSQL
from tests.tables.adding import add, as_increments, land

DAY = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture(params=["delta", "parquet", pytest.param("postgres", marks=pytest.mark.server)])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    if request.param == "postgres":
        server: PostgreSQL = request.getfixturevalue("postgres_server")
        return open_tables(server.url)
    return open_tables({"delta": "", "parquet": "parquet:"}[request.param] + str(tmp_path / "tables"))


@pytest.fixture(scope="module")
def shared_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    with PostgreSQL(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture
def postgres_server(shared_postgres: PostgreSQL) -> Iterator[PostgreSQL]:
    yield shared_postgres
    with psycopg.connect(shared_postgres.url) as connection:
        connection.execute("drop schema if exists penstock cascade")
        for name in (*SCHEMAS, "guard", "metrics"):
            connection.execute(f"drop table if exists penstock_{name} cascade")


def rows(value: float, day: int = 0, metric: str = "m", function: str = "avg", second: int = 0) -> Any:
    moment = int((DAY + timedelta(days=day, seconds=second)).timestamp() * 1_000_000)
    times = pa.array([moment], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    made = partials_of_columns(metric, Function.parse(function), pa.array(["e"]), times, pa.array([value]))
    return merged(made)


def batch(number: int) -> TableBatch:
    """Batch n holds sequence n of one writer."""
    return TableBatch("src", {"w": number - 1} if number else {}, {"w": number})


def sums(tables: Tables) -> list[float]:
    found: list[float] = read_level(tables, Level.MINUTE)["sum"].to_pylist()
    return found


def test_a_table_that_is_not_there_holds_nothing(tables: Tables) -> None:
    assert tables.held("minute", ["q"]) == {}
    assert sums(tables) == []
    assert tables.describe("minute").rows == 0
    assert tables.compact("minute").rows_after == 0
    assert tables.expire("minute", DAY) == 0


def test_a_batch_is_added_once(tables: Tables) -> None:
    assert add(tables, "minute", rows(1.0), batch(0))
    assert add(tables, "minute", rows(2.0), batch(1))
    assert not add(tables, "minute", rows(1.0), batch(0))
    assert not add(tables, "minute", rows(2.0), batch(1))

    assert sums(tables) == [3.0]
    assert tables.held("minute", ["penstock/src/w", "other"]) == {"penstock/src/w": 1}


def test_what_another_query_has_added_is_not_added_again(tables: Tables) -> None:
    add(tables, "minute", rows(1.0), batch(0))
    assert not add(tables, "minute", rows(1.0), batch(0))

    overlapping = TableBatch("src", {}, {"w": 1})
    with pytest.raises(TableConflict, match="another query has added some of it"):
        add(tables, "minute", rows(2.0), overlapping)
    with pytest.raises(TableConflict, match="was never added"):
        add(tables, "minute", rows(2.0), batch(5))
    assert sums(tables) == [1.0]


def test_of_many_who_add_the_same_batch_at_once_one_does(tables: Tables) -> None:
    add(tables, "minute", rows(1.0), batch(0))
    start, outcomes = threading.Barrier(4), list[bool]()

    def race() -> None:
        start.wait()
        try:
            outcomes.append(add(tables, "minute", rows(2.0), batch(1)))
        except TableConflict:
            outcomes.append(False)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sums(tables) == [3.0]
    assert outcomes.count(True) == 1


def test_compaction_folds_rows_and_changes_no_answer(tables: Tables) -> None:
    for n in range(5):
        add(tables, "minute", rows(float(n), second=n, function="latest" if n % 2 else "avg"), batch(n))
    before = read_level(tables, Level.MINUTE)
    done = tables.compact("minute")

    assert read_level(tables, Level.MINUTE).equals(before)
    assert done.rows_after == tables.describe("minute").rows == 2
    assert not add(tables, "minute", rows(4.0), batch(4))
    assert add(tables, "minute", rows(9.0), batch(5))


def test_compaction_while_batches_are_added_loses_and_repeats_nothing(tables: Tables) -> None:
    add(tables, "minute", rows(1.0), batch(0))
    stop = threading.Event()

    def compact() -> None:
        while not stop.is_set():
            try:
                tables.compact("minute")
            except TableConflict:
                pass

    threads = [threading.Thread(target=compact) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(1, 20):
        add(tables, "minute", rows(1.0), batch(n))
    stop.set()
    for thread in threads:
        thread.join()

    assert sums(tables) == [20.0]


def test_a_compaction_that_dies_while_it_clears_up_leaves_parquet_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = open_tables(f"parquet:{tmp_path / 'tables'}")
    for n in range(3):
        add(tables, "minute", rows(1.0), batch(n))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ParquetTables, "_sweep", dies)
        with pytest.raises(KeyboardInterrupt):
            tables.compact("minute")

    assert sums(tables) == [3.0]
    assert not add(tables, "minute", rows(1.0), batch(2))


def test_what_a_dead_compaction_left_behind_does_not_come_back_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = open_tables(f"parquet:{tmp_path / 'tables'}")
    for n in range(3):
        add(tables, "minute", rows(1.0), batch(n))

    def dies(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_remove", dies)
        with pytest.raises(KeyboardInterrupt):
            tables.compact("minute")
    add(tables, "minute", rows(1.0), batch(3))
    tables.compact("minute")

    assert sums(tables) == [4.0]


def test_a_batch_that_is_added_while_dead_folders_are_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = ParquetTables(str(tmp_path / "tables"))
    add(tables, "minute", rows(1.0), batch(0))
    folders, added = tables._folders, threading.Thread(target=lambda: add(tables, "minute", rows(1.0), batch(1)))

    def overtaken(name: str) -> list[Path]:
        found = folders(name)
        if name == "minute" and not added.ident:
            monkeypatch.undo()
            added.start()
            added.join(0.2)  # it has either added its batch by now, or waits for its turn
        return found

    monkeypatch.setattr(tables, "_folders", overtaken)
    tables.vacuum(24)
    added.join()

    assert sums(tables) == [2.0]


def test_scratch_of_writers_that_died_is_removed_once_it_is_old(tmp_path: Path) -> None:
    tables = ParquetTables(str(tmp_path / "tables"))
    add(tables, "minute", rows(1.0), batch(0))
    scratch = [tables.folder / "minute" / f".{name}" for name in ("old", "young")]
    for folder in scratch:
        folder.mkdir()
        (folder / "part-0.parquet").write_bytes(b"half")
    os.utime(scratch[0], (1000, 1000))

    assert tables.vacuum(24) == 1
    assert [folder.exists() for folder in scratch] == [False, True]
    assert sums(tables) == [1.0]


@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_what_others_read_through_deltalake_may_be_filtered_by_any_column(tmp_path: Path, place: str) -> None:
    tables = open_tables(place.format(tmp_path / "tables"))
    long = "e" * 10_000  # longer than what Parquet keeps statistics of
    for n, (entity, value) in enumerate([("e", 1.0), (long, -2.0), ("ü" * 100, float("inf"))]):
        made = rows(value, metric=f"m{n}")
        made = made.set_column(made.schema.get_field_index("entity"), "entity", pa.array([entity]))
        add(tables, "minute", made, batch(n))
        add(tables, TOP_N, _top(entity, "r" if n else "s", value), batch(n))

    def found(name: str, wanted: Any) -> list[str]:
        dataset = DeltaTable(str(tmp_path / "tables" / name)).to_pyarrow_dataset()
        names: list[str] = dataset.to_table(filter=wanted)["metric"].to_pylist()
        return names

    assert found("minute", pc.field("metric") == "m1") == ["m1"]
    assert found("minute", pc.field("series") == table_labels_of_entity(long)[1]) == ["m1"]
    assert found("minute", pc.field("series") == table_labels_of_entity("ü" * 100)[1]) == ["m2"]
    assert found("minute", pc.field("sum") < 0) == ["m1"]
    assert sorted(found("minute", pc.field("count") == 1)) == ["m0", "m1", "m2"]
    assert sorted(found("minute", (pc.field("date") == DAY.date()) & ~pc.field("is_final"))) == ["m0", "m1", "m2"]
    assert found("minute", pc.field("is_final")) == found("minute", pc.field("p95") > 0) == []
    assert found(TOP_N, pc.field("rank").is_null() & (pc.field("value") == 1.0)) == ["m"]
    assert found(TOP_N, (pc.field("record_id") == table_labels_of_entity("r")[1]) & (pc.field("value") < 1.0)) == ["m"]


def _top(entity: str, record: str, value: float) -> pa.Table:
    return pa.table([["minute"], ["m"], ["top_n(2)"], [entity], [DAY], [record], [value]], schema=RECORDS)


def test_what_delta_writes_of_old_commits_goes_and_the_guard_stays(tmp_path: Path) -> None:
    """A batch every two seconds is 43,000 commits a day, and opening a table lists them all."""
    tables = DeltaTables(tmp_path / "tables")
    log = tables.path("minute") / "_delta_log"
    for n in range(5):
        add(tables, "minute", rows(1.0), batch(n))
    old = time.time() - 3 * 86_400
    for path in log.glob("*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = int(old * 1000)
        path.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
        os.utime(path, (old, old))
    add(tables, "minute", rows(1.0), batch(5))
    DeltaTable(str(tables.path("minute"))).create_checkpoint()  # as deltalake does it every hundred commits
    DeltaTable(str(tables.path("minute"))).cleanup_metadata()

    assert len(list(log.glob("*.json"))) <= 2
    assert sums(tables) == [6.0]
    assert not add(tables, "minute", rows(1.0), batch(5))


def test_an_expiry_with_nothing_to_delete_commits_nothing(tmp_path: Path) -> None:
    tables = DeltaTables(tmp_path / "tables")
    add(tables, "minute", rows(1.0, metric="a"), batch(0))
    before = DeltaTable(str(tables.path("minute"))).version()
    assert tables.expire("minute", DAY + timedelta(days=3), ("b",)) == 0
    assert DeltaTable(str(tables.path("minute"))).version() == before


def test_no_more_of_a_top_n_is_read_than_is_kept(tables: Tables) -> None:
    for n, record in enumerate(["r1", "r2", "r3"]):
        add(tables, TOP_N, _top("x", record, 1.0), batch(n))
    moments = pa.array([DAY] * 12, pa.timestamp("us", tz="UTC"))
    entities = pa.array([f"e{n:02}" for n in range(12)])
    add(tables, "minute", merged(partials_of_columns("m", AVG, entities, moments, pa.array([1.0] * 12))), batch(0))

    found = read_top_n(tables, 15)
    assert found.filter(pc.is_null(found["record"]))["entity"].to_pylist() == [f"e{n:02}" for n in range(10)]
    assert found.filter(pc.is_valid(found["record"]))["record"].to_pylist() == ["r1", "r2"]


def test_names_of_any_length_and_kind_can_be_kept(tables: Tables) -> None:
    """A statement of many kilobytes, a metric with a NUL in its name: no batch may be stopped for good by them."""
    rng = random.Random(5)
    long = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000))
    for n in range(2):
        made = rows(1.0, metric="a\0b")
        made = made.set_column(made.schema.get_field_index("entity"), "entity", pa.array([long]))
        assert add(tables, "minute", made, batch(n))
        assert add(tables, TOP_N, _top(long, long[::-1], 1.0), batch(n))

    (row,) = read_level(tables, Level.MINUTE).to_pylist()
    assert (row["entity"], row["count"]) == (long, 2)
    assert read_top_n(tables, 2)["record"].to_pylist() == [None, long[::-1]]


def test_odd_names_are_kept_apart_and_exactly(tables: Tables) -> None:
    """The longest name is of characters of four bytes in no order that could be compressed: PostgreSQL indexes it."""
    rng = random.Random(7)
    longest = "".join(chr(0x20000 + rng.randrange(40_000)) for _ in range(LONGEST_NAME))
    names = ["../a/../b", "\u00e9", "e\u0301", "a'b\"c\\d", "\\N", "%00", "\ufffd", " ", longest]
    labels = [{"a\0b": "c\0d"}, {"": "\u2028\uffff"}, {"\u00e9": "x"}, {"e\u0301": "x"}, {"../a": "\\N\t\n"}]
    times = pa.array([DAY] * len(labels), pa.timestamp("us", tz="UTC"))
    for n in range(2):
        made = [
            partials_of_columns(
                name, AVG, pa.array([entity_of(some) for some in labels]), times, pa.array([1.0] * len(labels))
            )
            for name in names
        ]
        assert add(tables, "minute", merged(pa.concat_tables(made)), batch(n))

    kept = read_level(tables, Level.MINUTE).to_pylist()
    found = [(row["metric"], json.loads(row["entity"]), row["count"]) for row in kept]
    assert len(found) == len(names) * len(labels)
    assert all((name, some, 2) in found for name in names for some in labels)


@pytest.mark.server
def test_no_staging_table_outlives_its_batch(postgres_server: PostgreSQL) -> None:
    """Neither of a table that gets no rows, nor of a batch that was never committed."""
    tables = open_tables(postgres_server.url)

    def staged() -> int:
        with psycopg.connect(postgres_server.url) as connection:
            found = connection.execute("select count(*) from pg_tables where tablename like 'penstock_staged%'")
            return int((found.fetchone() or (0,))[0])

    before = staged()  # of tests that did not close theirs
    tables.landing("failed").close()
    landing = tables.landing("test")
    assert staged() == before + len(SCHEMAS)
    writer = landing.writer("minute")
    writer.write(as_increments("minute", rows(1.0)))
    written = writer.close()
    for name in SCHEMAS:
        assert tables.append(name, written if name == "minute" else [], batch(0))

    landing.close()
    assert staged() == before
    assert sums(tables) == [1.0]


@pytest.mark.server
def test_tables_of_an_earlier_format_are_refused_with_the_remedy(postgres_server: PostgreSQL) -> None:
    with psycopg.connect(postgres_server.url) as connection:
        connection.execute("create table penstock_minute (metric text, function text, entity text)")
    tables = open_tables(postgres_server.url)
    with pytest.raises(TablesOutdated, match=r"'minute' .* has format 1, .* `penstock tables upgrade`"):
        tables.describe("minute")


def test_a_database_that_goes_in_the_middle_is_one_that_is_missing(
    postgres_server: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job waits for what is missing; anything else would end it."""
    tables = open_tables(postgres_server.url)
    add(tables, "minute", rows(1.0), batch(0))
    held = postgres_rows.held_guards

    def cut_off(connection: Any, *rest: Any) -> dict[str, int]:
        connection.execute("select pg_terminate_backend(pg_backend_pid())")
        return held(connection, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(postgres, "held_guards", cut_off)
        for use in (lambda: tables.held("minute", ["q"]), lambda: add(tables, "minute", rows(2.0), batch(1))):
            with pytest.raises(MissingRequirement, match=r"PostgreSQL at .*\*\*\*@.* failed: "):
                use()
    assert sums(tables) == [1.0]


def test_who_may_only_read_a_database_can_read_it(postgres_server: PostgreSQL) -> None:
    owner = open_tables(postgres_server.url)
    for name in SCHEMAS:
        owner.describe(name)
    add(owner, "minute", rows(1.0), batch(0))
    with psycopg.connect(postgres_server.url) as connection:
        connection.execute("drop role if exists reader")
        connection.execute("create role reader login password 'x' in role pg_read_all_data")
        connection.execute("revoke create on schema public from public")
    reader = open_tables(f"{postgres_server.url}?user=reader&password=x")

    assert sums(reader) == [1.0]
    assert reader.describe("minute").rows == 1
    assert reader.held("minute", ["penstock/src/w"]) == {"penstock/src/w": 0}


def test_what_is_too_old_goes_and_the_rest_stays(tables: Tables) -> None:
    for n, metric in enumerate(["a", "b", "a", "b"]):
        add(tables, "minute", rows(float(n), day=n, metric=metric), batch(n))

    assert tables.expire("minute", DAY + timedelta(days=3), but_not=("a", "b")) == 0
    assert tables.expire("minute", DAY + timedelta(days=3), ("a",)) == 2
    assert sums(tables) == [1.0, 3.0]
    assert tables.expire("minute", DAY + timedelta(days=2)) == 1
    assert sums(tables) == [3.0]
    tables.vacuum(0)
    assert sums(tables) == [3.0]
    assert tables.held("minute", ["penstock/src/w"]) == {"penstock/src/w": 3}


def test_a_range_is_replaced_and_the_rest_stays(tables: Tables) -> None:
    for n in range(3):
        add(tables, "minute", rows(float(n + 1), day=n), batch(n))
    tables.replace(
        "minute", land(tables, "minute", rows(50.0, day=1)), DAY + timedelta(days=1), DAY + timedelta(days=2)
    )

    assert sums(tables) == [1.0, 50.0, 3.0]
    assert tables.held("minute", ["penstock/src/w"]) == {"penstock/src/w": 2}


def test_a_replacement_that_is_overtaken_changes_nothing(tables: Tables) -> None:
    add(tables, "minute", rows(1.0), batch(0))

    def check() -> None:
        raise TableConflict("overtaken")

    with pytest.raises(TableConflict, match="overtaken"):
        tables.replace("minute", land(tables, "minute", rows(50.0)), DAY, DAY + timedelta(days=1), check)
    assert sums(tables) == [1.0]


def test_reading_may_be_limited_to_a_range(tables: Tables) -> None:
    for n in range(3):
        add(tables, "minute", rows(float(n), day=n), batch(n))

    found = read_level(tables, Level.MINUTE, DAY + timedelta(days=1), DAY + timedelta(days=2))
    assert found["sum"].to_pylist() == [1.0]


def test_ties_in_a_top_n_go_to_what_sorts_first_and_compaction_keeps_what_is_asked_for(tables: Tables) -> None:
    for n, record in enumerate(["r2", "r1", "r3"]):
        add(tables, TOP_N, _top("x", record, 1.0), batch(n))
    tables.compact(TOP_N)

    assert tables.describe(TOP_N).rows == 2
    assert read_top_n(tables, 2)["record"].to_pylist() == ["r1", "r2"]


@pytest.mark.parametrize("place", ["s3://bucket/tables", "parquet:hdfs://name/tables", "file://elsewhere/tables"])
def test_a_place_that_is_not_reached_is_refused_rather_than_made_a_folder_of_that_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"tables must be a path or a file:// URI, got '\w+://"):
        open_tables(place)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["", "parquet:"])
def test_a_uri_of_a_folder_is_that_folder(kind: str, tmp_path: Path) -> None:
    tables = open_tables(f"{kind}{(tmp_path / 'my tables').as_uri()}")
    assert add(tables, "minute", rows(1.0), batch(0))
    assert sums(open_tables(f"{kind}{tmp_path / 'my tables'}")) == [1.0]


def test_a_password_is_not_shown() -> None:
    assert open_tables("postgresql://me:secret@host/db").location == "postgresql://me:***@host/db"
    assert open_tables("postgresql://host/db?user=me&password=secret&sslmode=require").location == (
        "postgresql://host/db?user=me&password=***&sslmode=require"
    )
