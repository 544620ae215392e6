"""What the pages about exporting and alarms say is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.decode.outcome import PointRefusal
from penstock.spool import FastQueue, FastQueueConfig
from tests.docs.pages import DOCS, ROOT, snippets
from tests.export.misbehaving import Misbehaving

OPERATE = (DOCS / "how-to" / "operate.md").read_text()


def section(heading: str) -> str:
    return OPERATE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_an_alarm_of_lost_data_is_silent_where_the_caller_was_told(tmp_path: Path) -> None:
    alarms = [row.split(" | ") for row in section("What to alarm on").splitlines() if "dropped_total" in row]
    lost = {row[1] for row in alarms if "(#data-is-lost)" in row[2]}
    told = re.findall(r"^\| `(\w+)`", section("Batches are turned away"), re.MULTILINE)
    with FastQueue(tmp_path, FastQueueConfig()) as queue:
        assert {"oldest", *told} == set(queue.stats().dropped)
    assert lost == {'`increase(penstock_queue_dropped_total{reason="oldest"}[5m]) > 0`'}


def test_every_alarm_says_where_to_go() -> None:
    rows = re.findall(r"(?m)^\| [a-z].*`(?:increase|predict|penstock).*$", section("What to alarm on"))
    assert len(rows) == 24
    assert all(row.rstrip("| ").rpartition(" | ")[2] for row in rows)


def test_every_reason_of_a_refusal_has_a_row_and_an_alarm() -> None:
    reasons = {reason.value for reason in PointRefusal}
    rows = re.findall(r"^\| `(\w+)` \|", section("Requests or points are refused"), re.MULTILINE)
    assert set(rows) == reasons
    alarms = re.findall(r'refused_total\{reason=~?"([^"]+)"', section("What to alarm on"))
    assert {reason for alarm in alarms for reason in alarm.replace("\\", "").split("|")} == reasons


def test_the_first_snippet_of_the_send_queue_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = snippets(DOCS / "how-to" / "use-the-send-queue.md")[0][1]
    server = Misbehaving()
    with server.running():
        assert "http://127.0.0.1:4318" in snippet
        exec(snippet.replace("http://127.0.0.1:4318", server.url), {"serialised_export_request": b"a request"})
    assert [request.body for request in server.requests] == [b"a request"]
    assert (tmp_path / "queue").is_dir()


def test_the_example_of_an_exporter_runs_as_it_is() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "resilient_export.py")],
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
