"""Exactness as a property: whatever happens on the way, the tables are those of one plain aggregation of all points.

Points of any age, merged and sealed in any grouping, batches of any size, power cuts at any commit, lost checkpoints,
compaction in between and cut off as well, segments that were cleaned up and come back. The engine is a model (see
`engine`), everything else is the job's own code; the long campaign repeats it on PostgreSQL and, with fewer examples,
in real Spark.
"""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.errors import TableConflict
from penstock.model.function import Function
from penstock.model.level import Level
from penstock.tables.port import SCHEMAS, Tables, open_tables
from tests.examples import examples
from tests.servers import PostgreSQL
from tests.spark.engine import Engine, PowerCut, faults
from tests.spark.pipeline import Edge, Job, Key, assert_exact, assert_same_values, contents, final_contents

FUNCTIONS = tuple(map(Function.parse, ("avg", "latest", "percentile", "histogram(-5,0,5)")))
TIMES = {"deadline": None, "suppress_health_check": list(HealthCheck)}

commits = st.tuples(st.sampled_from(tuple(SCHEMAS)), st.sampled_from(("before", "after")))
steps = st.one_of(
    st.tuples(st.just("seal"), st.sampled_from(("edge", "other", "third")), st.integers(1, 40)),
    st.tuples(st.just("run"), st.integers(1, 4), st.none() | commits | st.just("plan")),
    st.tuples(st.just("forget")),
    st.tuples(st.just("compact"), st.none() | commits),
    st.tuples(st.just("vacuum")),
    st.tuples(st.just("clean")),
    st.tuples(st.just("redefine"), st.sampled_from(("sum", "histogram(0)", "histogram(1)"))),
    st.tuples(st.just("run_another"), st.integers(1, 4)),
)
lives = st.tuples(st.integers(0, 2**32), st.lists(steps, min_size=4, max_size=14))


class Life:
    """What happens to a job, step by step."""

    def __init__(self, folder: Path, tables: Tables, seed: int) -> None:
        # Of days, or of so few minutes that tasks take shares of the series in place of stretches of time; which some
        # segments keep apart.
        minutes = 3000 if seed % 2 else 3
        self.edge = Edge(folder / "segments", seed, FUNCTIONS, minutes, keeps_shares=seed % 4 == 0)
        self.tables = tables
        self._final: dict[Level, dict[Key, dict[str, Any]]] = {}  # what was held at the last fold
        self._copies = folder / "copies"
        self._engine = Engine(folder / "segments", tables)
        self._another = Engine(folder / "segments", tables)

    def seal(self, writer: str, points: int) -> None:
        self.edge.seal(writer, points)

    def run(self, max_files: int, cut: Any) -> None:
        with faults() as fault:
            fault.armed = cut if isinstance(cut, tuple) else None
            try:
                self._engine.run(cut_after_plan=cut == "plan", max_files=max_files)
            except (PowerCut, TableConflict):
                pass

    def run_another(self, max_files: int) -> None:
        """A second query on the same tables, with a checkpoint of its own."""
        try:
            self._another.run(max_files=max_files)
        except TableConflict:
            pass

    def redefine(self, function: str) -> None:
        """From now on the metrics are taken with another function too."""
        self.edge.functions = (*FUNCTIONS, Function.parse(function))

    def forget(self) -> None:
        self._engine.forget()

    def compact(self, cut: tuple[str, str] | None) -> None:
        """Final rows are what the tables held at their fold, until the next."""
        self.check_final()
        held = {level: contents(self.tables, level) for level in Level}
        with faults() as fault:
            fault.armed = cut
            try:
                for name in SCHEMAS:
                    self.tables.compact(name)
            except PowerCut:
                self._final = {}
                return
        self._final = held
        self.check_final()

    def check_final(self) -> None:
        for level, expected in self._final.items():
            assert_same_values(final_contents(self.tables, level), expected)

    def vacuum(self) -> None:
        self.tables.vacuum(24)

    def clean(self) -> None:
        """Everything is worked off and cleaned up, and then somebody restores the segments from a copy."""
        shutil.copytree(self.edge.folder, self._copies, dirs_exist_ok=True)
        for _ in range(2):  # what a batch has done is cleaned up with the next
            self._finish(retain_segments=-3600.0)
        shutil.copytree(self._copies, self.edge.folder, dirs_exist_ok=True)

    def _finish(self, **changes: Any) -> None:
        try:
            self._engine.run(**changes)
        except TableConflict:  # the other query was there: the tables know how far
            self.forget()
            self._engine.run(**changes)

    def end(self) -> None:
        self._finish(max_files=3)
        assert_exact(self.tables, self.edge)
        self.seal("edge", 1)  # so that there is something to fold, also after a compaction that was cut off
        self._finish()
        self.compact(None)
        assert_exact(self.tables, self.edge)


def live(life: Life, history: list[tuple[Any, ...]]) -> None:
    for verb, *arguments in history:
        getattr(life, verb)(*arguments)
    life.end()


def lived(place: Callable[[Path], str], seed: int, history: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live(Life(folder, open_tables(place(folder)), seed), history)


@settings(max_examples=examples(12), **TIMES)  # type: ignore[arg-type]
@given(lives, st.sampled_from(("", "parquet:")))
def test_whatever_happens_the_tables_are_those_of_one_plain_aggregation(
    life: tuple[int, list[tuple[Any, ...]]], kind: str
) -> None:
    lived(lambda folder: f"{kind}{folder / 'tables'}", *life)


@pytest.mark.soak
@pytest.mark.timeout(1800)  # five times what it took on a machine with a load of 10
@settings(max_examples=400, **TIMES)  # type: ignore[arg-type]
@given(lives, st.sampled_from(("", "parquet:")))
def test_it_holds_for_many_lives(life: tuple[int, list[tuple[Any, ...]]], kind: str) -> None:
    lived(lambda folder: f"{kind}{folder / 'tables'}", *life)


@pytest.mark.soak
@pytest.mark.server
@pytest.mark.timeout(1800)
def test_it_holds_on_postgresql(tmp_path: Path) -> None:
    import psycopg

    with PostgreSQL(tmp_path / "postgres") as server:

        @settings(max_examples=40, **TIMES)  # type: ignore[arg-type]
        @given(lives)
        def check(life: tuple[int, list[tuple[Any, ...]]]) -> None:
            with psycopg.connect(server.url) as connection:
                connection.execute("drop schema if exists penstock cascade")
                for name in (*SCHEMAS, "guard", "metrics"):
                    connection.execute(f"drop table if exists penstock_{name} cascade")
            lived(lambda _: server.url, *life)

        check()


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_it_holds_in_real_spark(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(4)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        edge, job = Edge(folder / "segments", number, FUNCTIONS, 3000 if number % 2 else 3), Job(spark, folder)
        for _ in range(4):
            for _ in range(rng.randrange(1, 4)):
                edge.seal(rng.choice(("edge", "other")), rng.randrange(1, 200))
            with faults() as fault:
                fault.armed = (rng.choice(tuple(SCHEMAS)), rng.choice(("before", "after")))
                with pytest.raises(Exception, match=r"before|after"):
                    job.run(max_files=rng.randrange(1, 4))
            if rng.random() < 0.3:
                shutil.rmtree(folder / "checkpoint")
        job.run()
        assert_exact(job.tables, edge)
