"""Tables are kept small while the service runs."""

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.model.definition import Definition, Definitions
from penstock.model.definition_file import parse_definitions
from penstock.model.function import AVG
from penstock.model.level import Level
from penstock.service.current_definitions import CurrentDefinitions
from penstock.service.spark_process import spark_process_job_config
from penstock.tables.delta import DeltaTables
from penstock.tables.maintenance import Maintenance, expire_tables
from tests.cli.test_query import NOW, add, partials

DAY = 86400.0
KEEP = {"minute": 7 * DAY, "hour": 30 * DAY, "day": 365 * DAY, "top_n": 3 * DAY}


@pytest.fixture
def tables(tmp_path: Path) -> DeltaTables:
    made = DeltaTables(tmp_path / "tables")
    for part in ("first", "second"):  # the same series and minutes, in two batches
        add(made, "minute", partials("cpu", AVG), part)
    return made


def test_rows_of_one_series_and_bucket_become_one_and_no_answer_changes(tables: DeltaTables) -> None:
    before = sum(tables.partials(Level.MINUTE)["count"].to_pylist())
    maintenance = Maintenance(tables, 3600.0, KEEP, Definitions)
    maintenance.once(NOW)

    assert tables.describe("minute").rows == 40
    assert ("penstock_tables_folded_rows_total", 40) in [(one.name, one.value) for one in maintenance.samples()]
    assert sum(tables.partials(Level.MINUTE)["count"].to_pylist()) == before == 80


def test_what_is_too_old_goes_and_a_metrics_own_lifetime_counts(tables: DeltaTables) -> None:
    later = NOW + timedelta(days=8)
    own = Definitions((Definition(name="cpu", source="cpu", ttl={Level.MINUTE: 9 * DAY}),))

    assert dict(expire_tables(tables, KEEP, own, later))["minute"] == 0
    assert dict(expire_tables(tables, KEEP, Definitions(), later))["minute"] == 80
    assert tables.describe("minute").rows == 0


def test_nothing_is_done_where_it_is_switched_off(tables: DeltaTables) -> None:
    maintenance = Maintenance(tables, 0.0, KEEP, Definitions)
    maintenance.start()
    assert not maintenance._thread.is_alive()


def test_levels_and_lifetimes_of_new_definitions_hold_from_the_next_batch_on(tmp_path: Path) -> None:
    def defined_as(levels: list[str], ttl: str) -> Definitions:
        return parse_definitions({"metrics": [{"name": "m", "source": "s", "levels": levels, "ttl": ttl}]})

    defined = CurrentDefinitions(defined_as(["minute"], "1d"))
    job = spark_process_job_config(load(ServiceConfig, text=f"data_dir: {tmp_path}").config, defined)
    assert [job.not_at[level] for level in Level] == [(), ("m",), ("m",)]

    defined.take(defined_as(["hour", "day"], "2d"))

    assert [job.not_at[level] for level in Level] == [("m",), (), ()]
    assert defined.definitions.ttls(Level.HOUR) == {"m": 2 * DAY}


def test_a_step_that_fails_is_counted_and_skips_no_other(tables: DeltaTables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that is restarted, a table that another process writes: the next time it may be well."""
    maintenance = Maintenance(tables, 3600.0, KEEP, Definitions)

    def failing(*_: object) -> None:
        raise RuntimeError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(tables, "compact", failing)
        maintenance.once(NOW + timedelta(days=8))
    values = {(sample.name, sample.labels): sample.value for sample in maintenance.samples()}
    assert values["penstock_tables_maintenance_failures_total", ("fold",)] == 4  # one for each table
    assert values["penstock_tables_maintenance_failures_total", ("expire",)] == 0
    assert values["penstock_tables_expired_rows_total", ()] == 80

    maintenance.once(NOW)
    assert {sample.value for sample in maintenance.samples() if sample.labels == ("fold",)} == {4}
