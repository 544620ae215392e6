"""Power cuts around every commit point of every place: each batch is in each table once. No JVM."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psycopg
import pytest

from penstock.model.function import Function
from penstock.tables.port import SCHEMAS, Tables, open_tables
from tests.servers import PostgreSQL
from tests.spark.engine import Engine, PowerCut, faults
from tests.spark.pipeline import Edge, assert_exact

FUNCTIONS = tuple(map(Function.parse, ("avg", "latest", "percentile")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    with PostgreSQL(tmp_path_factory.mktemp("postgres")) as running:
        yield running


@pytest.fixture(params=["delta", "parquet", pytest.param("postgres", marks=pytest.mark.server)])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tables]:
    if request.param != "postgres":
        yield open_tables({"delta": "", "parquet": "parquet:"}[request.param] + str(tmp_path / "tables"))
        return
    server: PostgreSQL = request.getfixturevalue("server")
    yield open_tables(server.url)
    with psycopg.connect(server.url) as connection:
        connection.execute("drop schema if exists penstock cascade")
        for name in (*SCHEMAS, "guard", "metrics"):
            connection.execute(f"drop table if exists penstock_{name} cascade")


def test_a_power_cut_around_any_commit_adds_everything_once(tables: Tables, tmp_path: Path) -> None:
    edge = Edge(tmp_path / "segments", functions=FUNCTIONS)
    engine = Engine(tmp_path / "segments", tables)
    with faults() as fault:
        for number, (table, when) in enumerate(product(SCHEMAS, ("before", "after"))):
            edge.seal(points=20)
            edge.seal("other", points=20)
            fault.armed = (table, when)
            with pytest.raises(PowerCut, match=f"{when} {table}"):
                engine.run()
            if number % 4 in (1, 2):  # of both kinds
                engine.forget()
    edge.seal(points=20)
    engine.run(max_files=1)

    assert_exact(tables, edge)


def test_a_power_cut_between_plan_and_batch_repeats_the_plan(tables: Tables, tmp_path: Path) -> None:
    edge = Edge(tmp_path / "segments")
    engine = Engine(tmp_path / "segments", tables)
    edge.seal(points=20)
    with pytest.raises(PowerCut, match="after the plan"):
        engine.run(cut_after_plan=True)
    edge.seal(points=20)
    engine.run()

    assert_exact(tables, edge)
