"""The documents name only metrics and settings that exist, and name all of them; the example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.export.flags import FLAGS
from penstock.spool import FastQueue, FastQueueConfig
from penstock.telemetry import DECLARATIONS
from tests.export.misbehaving import Misbehaving

DOCS = Path(__file__).parents[2] / "docs"


def metrics_named(text: str) -> set[str]:
    """Full names, and those that follow one in a table as `_suffix`."""
    found = set()
    for run in re.findall(r"`penstock_[a-z_]+[^|\n]*", text):
        names = re.findall(r"`((?:penstock)?_[a-z_]+)", run)
        stem = names[0]
        for name in names:
            if name.startswith("penstock"):
                stem = name
                found.add(name)
            else:
                parts = stem.split("_")
                stems = ["_".join(parts[:cut]) for cut in range(len(parts), 1, -1)]
                found.add(next((s + name for s in stems if s + name in DECLARATIONS), stem + " + " + name))
    return found


@pytest.mark.parametrize("name", ["export.md", "operations.md"])
def test_every_metric_that_a_document_names_exists(name: str) -> None:
    named = metrics_named((DOCS / name).read_text())
    assert named
    assert named <= set(DECLARATIONS), named - set(DECLARATIONS)


def test_every_flag_that_a_document_names_exists() -> None:
    text = (DOCS / "export.md").read_text() + (DOCS / "operations.md").read_text()
    assert set(re.findall(r"--(queue-[a-z-]+|memory-[a-z-]+)", text)) <= {flag.name for flag in FLAGS}


def test_every_setting_is_documented() -> None:
    text = (DOCS / "export.md").read_text()
    for flag in FLAGS:
        key = flag.key.rpartition(".")[2]
        assert f"`{flag.key}`" in text or f"`.{key}`" in text, flag.key


def test_the_table_of_metrics_has_every_one_of_them_with_its_type_and_labels() -> None:
    table = (DOCS / "operations.md").read_text().partition("## All metrics of the export side")[2]
    rows = [row.split(" | ") for row in re.findall(r"^\| `penstock.*", table, re.MULTILINE)]
    told = {(name, kind) for names, kind, _ in rows for name in metrics_named(names)}
    ours = [
        one
        for one in DECLARATIONS.values()
        if re.match(r"penstock_(export|circuit|failover|queue|fastqueue)_", one.name)
    ]
    assert told == {(one.name, one.kind) for one in ours}
    labels = {label for one in ours for label in one.labels}
    assert labels == set(re.findall(r"\{(\w+)\}", table))


def section(heading: str) -> str:
    """What stands below a heading of the operations document."""
    return (DOCS / "operations.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_an_alarm_of_lost_data_is_silent_where_whoever_pushed_was_told(tmp_path: Path) -> None:
    alarms = [row.split(" | ") for row in section("What to alarm on").splitlines() if "dropped_total" in row]
    lost = {row[1] for row in alarms if "(#data-is-lost)" in row[2]}
    told = re.findall(r"^\| `(\w+)`", section("Batches are turned away"), re.MULTILINE)
    with FastQueue(tmp_path, FastQueueConfig()) as queue:
        assert {"oldest", *told} == set(queue.stats().dropped)
    assert lost == {'`increase(penstock_queue_dropped_total{reason="oldest"}[5m]) > 0`'}


def test_every_alarm_goes_where_something_is_written() -> None:
    anchors = re.findall(r"\(#([a-z-]+)\)", (DOCS / "operations.md").read_text())
    headings = re.findall(r"^## (.+)$", (DOCS / "operations.md").read_text(), re.MULTILINE)
    assert set(anchors) <= {re.sub(r"[^a-z -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_first_snippet_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = re.findall(r"```python\n(.*?)```", (DOCS / "export.md").read_text(), re.DOTALL)[0]
    server = Misbehaving()
    with server.running():
        assert "http://127.0.0.1:4318" in snippet
        exec(snippet.replace("http://127.0.0.1:4318", server.url), {"serialised_export_request": b"a request"})
    assert [request.body for request in server.requests] == [b"a request"]
    assert (tmp_path / "queue").is_dir()


def test_the_example_runs_as_it_is() -> None:
    ran = subprocess.run(
        [sys.executable, str(DOCS.parent / "examples" / "resilient_export.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "circuit open, 4 batches wait",
        "taken: [b'one', b'two', b'three'], dead letters: 1",
    ]
