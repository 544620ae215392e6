"""What docs/receivers.md says is so: its calls work as printed, its metrics and settings exist."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

from penstock.decode.config import IntakeConfig
from penstock.decode.outcome import Refusal
from penstock.receive.config import Limits
from penstock.receive.http_receiver import HttpReceiver
from penstock.telemetry import DECLARATIONS
from tests.export.test_docs import metrics_named
from tests.receive.support import KeepingSink

TEXT = (Path(__file__).parents[2] / "docs" / "receivers.md").read_text()
OURS = ("penstock_receive_", "penstock_handover_")


def test_the_calls_work_as_printed(http: HttpReceiver, sink: KeepingSink) -> None:
    calls = re.findall(r"```sh\n(curl .*?)```", TEXT, re.DOTALL)
    for call in calls:
        printed = call.replace(":4318/", f":{http.port}/").replace("curl -sS", "curl -sS --fail-with-body")
        ran = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, timeout=20, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    assert len(calls) == 2
    assert sink.values("order.value") == [129.9]
    assert sink.points("queue.depth")[0]["labels"] == {"service.name": "shop", "queue": "mail"}


def test_every_metric_of_the_receivers_is_there_and_no_other() -> None:
    named = {name for name in metrics_named(TEXT) if name.startswith(OURS)}

    assert named == {name for name in DECLARATIONS if name.startswith(OURS)}


def test_every_limit_is_there() -> None:
    for setting in (*fields(Limits), *fields(IntakeConfig)):
        if setting.name.startswith("max_") and setting.name not in ("max_group", "max_future"):
            assert f"{setting.name}`" in TEXT, setting.name
    for reason in Refusal:
        assert f"`{reason.value}`" in TEXT, reason
