"""What tasks report is committed only where the driver sees exactly that."""

import shutil
from pathlib import Path

import pytest

from penstock.errors import RowsMissing
from penstock.model.function import AVG
from penstock.tables.landing import TableFileLanding, WrittenTableFile
from penstock.tables.port import TableBatch, Tables, open_tables
from tests.cli.test_query import partials
from tests.tables.adding import add, as_increments, land

ROWS = partials("cpu", AVG)


@pytest.fixture(params=["", "parquet:"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return open_tables(f"{request.param}{tmp_path / 'tables'}")


def test_a_worker_that_does_not_see_the_folder_of_the_tables_refuses_with_a_reason(tables: Tables) -> None:
    landing = tables.landing("test")
    assert isinstance(landing, TableFileLanding)
    shutil.rmtree(landing.folders["minute"])
    with pytest.raises(RowsMissing, match=r"an executor does not see .* must be mounted under the same path"):
        landing.writer("minute").write(as_increments("minute", ROWS))


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_that_the_driver_does_not_see_whole_is_not_committed(tables: Tables, damage: str) -> None:
    (written,) = land(tables, "minute", ROWS)
    path = Path(written.place)
    path.write_bytes(path.read_bytes()[:-1]) if damage == "cut" else path.unlink()
    with pytest.raises(RowsMissing, match=r"40 rows of table 'minute' .* on the driver it .* Nothing was committed"):
        tables.append("minute", [written], TableBatch("src", {}, {"w": 0}))

    assert tables.describe("minute").rows == 0
    assert add(tables, "minute", ROWS, TableBatch("src", {}, {"w": 0}))


def test_what_no_report_names_is_in_no_table_and_vacuum_removes_it(tables: Tables) -> None:
    landing = tables.landing("test")
    found: list[WrittenTableFile] = []
    for _ in range(2):  # the second attempt is one that Spark has given up
        writer = landing.writer("minute")
        writer.write(as_increments("minute", ROWS))
        found += writer.close()
    tables.append("minute", found[:1], TableBatch("src", {}, {"w": 0}))
    assert tables.describe("minute").rows == 40

    tables.vacuum(0)
    assert not Path(found[1].place).exists()
    assert tables.describe("minute").rows == 40
