"""What the pages about receiving say is so: calls work as printed, limits and reasons are all there."""

import re
import subprocess
from dataclasses import fields

from penstock.decode.config import IntakeConfig
from penstock.decode.outcome import PointRefusal
from penstock.receive.config import HttpLimits
from penstock.receive.http_receiver import HttpReceiver
from tests.docs.pages import DOCS
from tests.receive.support import KeepingSink

TEXT = (DOCS / "reference" / "receivers.md").read_text()


def test_the_calls_work_as_printed(http: HttpReceiver, sink: KeepingSink) -> None:
    calls = re.findall(r"```sh\n(curl .*?)```", (DOCS / "how-to" / "send-curl.md").read_text(), re.DOTALL)
    for call in calls:
        printed = call.replace(":4318/", f":{http.port}/").replace("curl -sS", "curl -sS --fail-with-body")
        ran = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, timeout=20, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    assert len(calls) == 3
    assert sink.values("orders") == [129.9]
    assert sink.values("order.value") == [129.9]
    assert sink.points("queue.depth")[0]["labels"] == {"service.name": "shop", "queue": "mail"}


def test_every_limit_and_every_reason_is_there() -> None:
    for setting in (*fields(HttpLimits), *fields(IntakeConfig)):
        if setting.name.startswith("max_") and setting.name not in ("max_group", "max_future"):
            assert f"{setting.name}`" in TEXT, setting.name
    for reason in PointRefusal:
        assert f"`{reason.value}`" in TEXT, reason
