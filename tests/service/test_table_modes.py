"""Readers of the tables: modes of the files that the job and its folds have really made."""

import os
import stat
import urllib.request
from pathlib import Path

import pytest

from penstock.testing import wait_until
from tests.service.running import HEADERS, Running, orders

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
TEXT = """
spark: {master: 'local[1]', trigger: 500ms, conf: {spark.driver.memory: 512m}}
tables: {fold_every: 1s, readable_by: %s, location: '%s'}
"""


@pytest.mark.parametrize(
    ("kind", "readers", "of_files", "of_folders"),
    [("", "group", 0o640, 0o750), ("parquet:", "all", 0o644, 0o755)],
    ids=["delta", "parquet"],
)
def test_tables_are_readable_as_the_setting_says_folds_included(
    tmp_path: Path, kind: str, readers: str, of_files: int, of_folders: int
) -> None:
    tables = tmp_path / "tables"
    with Running(tmp_path, TEXT % (readers, f"{kind}{tables}")) as running:
        url = f"http://127.0.0.1:{running.port}/v1/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, orders(10), HEADERS)) as answer:
            assert answer.status == 200
        wait_until(lambda: any("/final-" in folder and files for folder, _, files in os.walk(tables)), 240)
        running.stop()
        paths = [path for path in (tables, *tables.rglob("*")) if not path.name.startswith(".")]
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}

    wrong = {
        str(path): oct(mode) for path, mode in modes.items() if mode != (of_folders if path.is_dir() else of_files)
    }
    assert any(path.suffix == ".parquet" for path in modes)
    assert not wrong
