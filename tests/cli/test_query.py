"""`penstock query`: the tables' answers equal what the points say, and a wrong question gets a helpful one back."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.cli.query_screen import plot_on_screen
from penstock.model.chunk_partials import KEPT, LATEST, Kept, newest_of_chunks, partials_of_chunks
from penstock.model.finals import nearest_rank
from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.model.partial import merged, partials_of_columns
from penstock.model.point import Chunk, PointKind, chunk_type, entity_of
from penstock.tables import delta
from penstock.tables.port import TOP_N, TableBatch, Tables, open_tables
from penstock.tables.query import QueryRow, Question, answer_from_tables, grouped_for_query, metrics_in_tables
from penstock.tables.table_rows import RECORDS
from tests.decode.support import decode, decoder, histogram
from tests.receive.support import NOW as OTLP_NOW
from tests.receive.support import SECOND, request
from tests.tables.adding import land

NOW = datetime(2026, 3, 16, 12, 0, 30, tzinfo=UTC)
HOSTS = ("a", "b")
PATHS = ("/", "/pay")


def points() -> Iterator[tuple[dict[str, str], datetime, float]]:
    """Ten minutes of two hosts and two paths, each with a value of its own."""
    for minute in range(10):
        for h, host in enumerate(HOSTS):
            for p, path in enumerate(PATHS):
                yield {"host": host, "path": path}, NOW - timedelta(minutes=minute), 1.0 + minute + 10 * h + 100 * p


def partials(metric: str, function: Function) -> pa.Table:
    rows = list(points())
    times = pa.array([moment for _, moment, _ in rows], pa.timestamp("us", tz="UTC"))
    entities = pa.array([entity_of(labels) for labels, _, _ in rows])
    return merged(partials_of_columns(metric, function, entities, times, pa.array([value for _, _, value in rows])))


def add(tables: delta.DeltaTables, name: str, rows: pa.Table, part: str) -> None:
    """As the job does: files first, then a commit of what was reported."""
    tables.append(name, land(tables, name, rows), TableBatch(part, {}, {"edge": 0}))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    made = delta.DeltaTables(tmp_path_factory.mktemp("query") / "tables")
    latency = partials("latency", Function.parse("percentile"))
    cpu = partials("cpu", AVG)
    for level in Level:
        rows = pa.concat_tables([cpu, latency])
        add(made, level.value, rows, "one")
    record = {
        "level": ["minute"] * 2,
        "metric": ["slow"] * 2,
        "function": ["top_n(20)"] * 2,
        "bucket": [NOW.replace(second=0)] * 2,
        "entity": [entity_of({"host": "a"})] * 2,
        "record": [entity_of({"statement": text}) for text in ("select 1", "select 2")],
        "max": [5.0, 9.0],
    }
    add(made, TOP_N, pa.table([record[name] for name in RECORDS.names], schema=RECORDS), "one")
    return open_tables(made.location)


def ask(tables: Tables, metric: str = "cpu", **more: Any) -> list[Any]:
    return answer_from_tables(tables, Question(metric=metric, since=timedelta(hours=1), **more), NOW)


def test_without_labels_every_bucket_is_one_row_of_all_series(tables: Tables) -> None:
    rows = ask(tables)

    assert [row.time for row in rows] == [NOW.replace(second=0) - timedelta(minutes=n) for n in reversed(range(10))]
    newest = [value for _, moment, value in points() if moment == NOW]
    assert (rows[-1].points, rows[-1].value) == (4, sum(newest) / 4)
    assert (rows[-1].min, rows[-1].max) == (min(newest), max(newest))


def test_by_a_label_the_points_of_its_values_are_merged(tables: Tables) -> None:
    rows = ask(tables, by=("host",))

    assert {row.group["host"] for row in rows} == {"a", "b"}
    newest = {row.group["host"]: row.value for row in rows if row.time == NOW.replace(second=0)}
    assert newest == {"a": (1 + 101) / 2, "b": (11 + 111) / 2}


def test_by_all_labels_every_series_stands_by_itself(tables: Tables) -> None:
    assert len(ask(tables, by=("*",))) == 10 * 4


def test_a_label_that_a_series_does_not_have_is_empty() -> None:
    entities = pa.table({"entity": [entity_of({"host": "a"}), entity_of({"host": "a", "zone": "z"})]})
    assert grouped_for_query(entities, ("zone",))["entity"].to_pylist() == ['{"zone":""}', '{"zone":"z"}']


def test_only_what_is_recent_enough_counts(tables: Tables) -> None:
    rows = answer_from_tables(tables, Question(metric="cpu", since=timedelta(minutes=3)), NOW)
    assert len(rows) == 4  # three whole minutes and the one that has begun


def test_the_top_is_taken_over_the_whole_time(tables: Tables) -> None:
    rows = ask(tables, by=("path",), top=1)

    assert [(row.group, row.points) for row in rows] == [({"path": "/pay"}, 20)]
    values = [value for labels, _, value in points() if labels["path"] == "/pay"]
    assert rows[0].value == pytest.approx(sum(values) / 20)


def test_percentiles_are_those_of_all_points_together(tables: Tables) -> None:
    (row,) = ask(tables, "latency", ranks=(50.0, 99.9), top=5)

    values = [value for _, _, value in points()]
    assert row.ranks["p50"] == pytest.approx(nearest_rank(values, 50), rel=0.0055)
    assert row.ranks["p99_9"] == pytest.approx(nearest_rank(values, 99.9), rel=0.0055)


def test_records_of_a_top_n_metric_are_groups(tables: Tables) -> None:
    rows = ask(tables, "slow", by=("statement",), top=1)
    assert [(row.group, row.value) for row in rows] == [({"statement": "select 2"}, 9.0)]


def test_the_level_follows_how_far_back_the_question_goes() -> None:
    levels = [Question(metric="x", since=timedelta(hours=hours)).level_read() for hours in (1, 24, 24 * 30)]
    assert levels == [Level.MINUTE, Level.HOUR, Level.DAY]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cpuu"], "no metric is called 'cpuu'; did you mean cpu?"),
        (["nothing.like.it"], "`penstock query` alone lists what there is"),
        (["cpu", "--since", "1s", "--level", "minute"], "its newest minute is 2026-03-16 12:00 UTC"),
        (["cpu", "--since", "900d", "--percentile", "95"], "cpu is kept as avg, which has no percentiles"),
        (["cpu", "--since", "900d", "--by", "hsot"], "cpu has no label 'hsot' in that time; it has host, path"),
        (["cpu", "--plot", "--csv"], "exclude each other"),
        (["cpu", "--since", "yesterday"], "--since must be a duration like"),
    ],
)
def test_a_wrong_question_gets_a_helpful_answer(tables: Tables, arguments: list[str], expected: str) -> None:
    ran = CliRunner().invoke(main, ["query", *arguments, "--tables", tables.location])
    assert ran.exit_code in (1, 2)
    assert expected in " ".join(ran.output.split()), ran.output


def test_where_there_are_no_tables_it_says_how_to_make_them(tmp_path: Path) -> None:
    for metric in ([], ["cpu"]):
        ran = CliRunner().invoke(main, ["query", *metric, "--tables", str(tmp_path / "none")])
        assert ran.exit_code == 1
        assert "penstock run" in ran.output


def test_json_and_csv_say_the_same(tables: Tables) -> None:
    arguments = ["query", "cpu", "--by", "host", "--since", "9000d", "--level", "minute", "--tables", tables.location]
    as_json = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    as_csv = list(csv.DictReader(io.StringIO(CliRunner().invoke(main, [*arguments, "--csv"]).stdout)))

    assert len(as_json) == 20
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in as_json] == as_csv
    assert as_json[0].keys() == {"host", "time", "function", "points", "value", "min", "max", "last"}


def test_the_help_names_every_column_of_csv_in_its_place(tables: Tables) -> None:
    words = ["query", "latency", "--percentile", "95", "--since", "9000d", "--csv", "--tables", tables.location]
    header = CliRunner().invoke(main, words).stdout.splitlines()[0]
    explained = CliRunner().invoke(main, ["query", "--help"]).stdout.partition("Columns of --csv")[2]
    named = explained.partition("Examples:")[0]

    assert re.findall(r"(?m)^    ([a-z]\w*)  ", named) == header.split(",")


def of_chunks(folder: Path, chunks: list[Chunk], kept: Kept = KEPT) -> str:
    """Tables that hold these chunks as metrics without a definition."""
    made = delta.DeltaTables(folder / "tables")
    rows = pa.concat_tables([partials_of_chunks(chunks, kept), newest_of_chunks(chunks, kept)])
    add(made, "minute", merged(rows), "one")
    return made.location


def asked_of(location: str, *arguments: str) -> Any:
    return CliRunner().invoke(
        main, ["query", *arguments, "--since", "9000d", "--level", "minute", "--tables", location]
    )


def test_the_last_value_stands_beside_the_average_where_a_group_is_one_series(tmp_path: Path) -> None:
    hosts = [entity_of({"host": host}) for host in ("a", "a", "a", "b")]
    times = [NOW + timedelta(seconds=second) for second in (0, 2, 1, 3)]
    cpu = chunk_type("cpu").of(hosts, [round(time.timestamp() * 1e6) for time in times], [1.0, 5.0, 9.0, 7.0])
    location = of_chunks(tmp_path, [cpu], {**KEPT, PointKind.GAUGE: (AVG, LATEST)})

    for _ in range(2):
        by_host = json.loads(asked_of(location, "cpu", "--by", "host", "--json").stdout)
        assert [(row["host"], row["points"], row["value"], row["last"]) for row in by_host] == [
            ("a", 3, 5.0, 5.0),
            ("b", 1, 7.0, 7.0),
        ]
        open_tables(location).compact("minute")  # and the same of final rows
    (both,) = json.loads(asked_of(location, "cpu", "--json").stdout)
    assert (both["points"], both["last"]) == (4, None)
    assert "last" in asked_of(location, "cpu", "--by", "host").stdout
    listed = metrics_in_tables(open_tables(location), NOW)
    assert [(one.metric, one.function, one.points) for one in listed] == [("cpu", "avg", 4)]


def test_a_counter_has_no_percentiles_and_nothing_advises_to_make_some(tmp_path: Path) -> None:
    orders = chunk_type("orders", PointKind.COUNTER).of(["{}"], [round(NOW.timestamp() * 1e6)], [750.0])

    ran = asked_of(of_chunks(tmp_path, [orders]), "orders", "--percentile", "95")

    assert ran.exit_code == 1
    assert "a counter has no percentiles" in ran.output
    assert "function: percentile" not in ran.output


@pytest.mark.parametrize(("bounds", "is_said"), [((5.0, 10.0), True), ((0.51, 0.52, 0.53, 0.54), False)])
def test_a_percentile_that_the_senders_buckets_cannot_resolve_says_so(
    tmp_path: Path, bounds: tuple[float, ...], *, is_said: bool
) -> None:
    counts = [0] * (len(bounds) + 1)
    counts[sum(bound < 0.523 for bound in bounds)] = 20
    using = decoder(initial_value="keep")
    decoded = decode(request(histogram(OTLP_NOW + SECOND, counts, 20 * 0.194, bounds=bounds)), using=using)
    location = of_chunks(tmp_path, decoded.chunks)

    for shape in ([], ["--json"], ["--csv"]):
        ran = asked_of(location, "h", "--percentile", "95", *shape)
        assert ("p95 lies between 0 and 5: the sender's buckets are too wide" in ran.stderr) is is_said
    (row,) = json.loads(asked_of(location, "h", "--percentile", "95", "--json").stdout)
    assert (row["p95_low"], row["p95_high"]) == ((0.0, 5.0) if is_said else (row["p95_low"], row["p95_high"]))


@pytest.mark.parametrize("arguments", [[], ["--by", "host"], ["--by", "host", "--plot"], ["--plot"], ["--top", "3"]])
def test_a_terminal_is_shown_a_table_or_a_plot(tables: Tables, arguments: list[str]) -> None:
    ran = CliRunner().invoke(main, ["query", "cpu", "--since", "9000d", "--tables", tables.location, *arguments])
    assert ran.exit_code == 0, ran.output
    assert "cpu by day" in ran.output


def test_without_a_metric_all_of_them_are_listed(tables: Tables) -> None:
    ran = CliRunner().invoke(main, ["query", "--json", "--tables", tables.location])
    assert json.loads(ran.stdout) == [
        {"metric": "cpu", "function": "avg", "points": 40, "series": 4},
        {"metric": "latency", "function": "percentile(6)", "points": 40, "series": 4},
    ]


def test_a_metric_that_days_do_without_is_listed_too(tmp_path: Path) -> None:
    made = delta.DeltaTables(tmp_path / "tables")
    for level, metric in ((Level.DAY, "kept"), (Level.HOUR, "hourly"), (Level.MINUTE, "fleeting")):
        add(made, level.value, partials(metric, AVG), "one")

    assert [one.metric for one in metrics_in_tables(made, NOW)] == ["fleeting", "hourly", "kept"]
    assert [one.metric for one in metrics_in_tables(made, NOW + timedelta(hours=8))] == ["hourly", "kept"]


def test_the_tables_are_those_of_the_configuration_unless_named(tables: Tables, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"tables: {{location: {tables.location}}}")
    for command in (["query"], ["spark", "tables"]):
        ran = CliRunner().invoke(main, [*command, "--json", "-c", str(file)])
        assert ran.exit_code == 0, ran.output


def test_a_command_that_changes_tables_wants_to_be_told_which(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.yaml").write_text(f"tables: {{location: {tables.location}}}")
    for command in (["spark", "compact"], ["spark", "expire"], ["tables", "upgrade"]):
        ran = CliRunner().invoke(main, command)
        assert ran.exit_code == 2
        assert "--tables must be set, or -c FILE" in ran.output
    assert CliRunner().invoke(main, ["tables", "upgrade", "-c", "penstock.yaml"]).exit_code == 0


def test_no_java_is_started_and_pyspark_is_not_even_imported(tables: Tables) -> None:
    program = (
        "import sys; from penstock.cli.main import main\n"
        f"main(['query', 'cpu', '--since', '9000d', '--tables', {tables.location!r}], standalone_mode=False)\n"
        "assert not [name for name in sys.modules if name.startswith('pyspark')], 'pyspark was imported'\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_plot_draws_each_function_of_a_metric_for_itself() -> None:
    mixed = {"avg": 129.9, "sum": 750.0}
    rows = [QueryRow(NOW, {"shop": "north"}, function, 1, value, value, value) for function, value in mixed.items()]
    drawn = plot_on_screen(rows, "orders", 80)

    assert "north (avg)" in drawn
    assert "north (sum)" in drawn
    assert "750" in drawn


def test_a_plot_paints_no_background_and_tells_lines_apart_with_and_without_colour() -> None:
    rows = [
        QueryRow(NOW + timedelta(minutes=minute), {"shop": shop}, "avg", 1, value, value, value)
        for shop, value in (("north", 1.0), ("south", 2.0))
        for minute in range(5)
    ]
    coloured, plain = plot_on_screen(rows, "orders", 80, has_colour=True), plot_on_screen(rows, "orders", 80)

    assert "\x1b[48;" not in coloured
    assert len(set(re.findall(r"\x1b\[38;5;\d+m", coloured))) == 2
    assert "\x1b[38;" not in plain
    assert "o south" in plain
    assert "+ north" in plain


@pytest.mark.parametrize("arguments", [[], ["--by", "host"], ["--by", "host", "--plot"]])
def test_a_pipe_gets_no_escape_codes(tables: Tables, arguments: list[str]) -> None:
    ran = CliRunner().invoke(main, ["query", "cpu", "--since", "9000d", "--tables", tables.location, *arguments])
    assert "\x1b" not in ran.output
