"""The tutorial, followed to the letter: every command that it prints is run, in its order."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.testing import wait_until
from tests.docs.pages import DOCS, ROOT
from tests.servers import free_port

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.timeout(300)]
TUTORIAL = (DOCS / "tutorial.md").read_text()
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.DOTALL) for line in block.splitlines()]
SERVICE = "$ .venv/bin/penstock run"
RESTARTED = "$ .venv/bin/penstock config check"  # then the reader starts the service anew
ELSEWHERE = ("$ make setup", "$ .venv/bin/penstock demo --points 50000")  # made already; tests/service/test_demo
START = 120.0  # seconds: a busy machine takes its time


class Reader:
    """Does what the tutorial says, in a folder that looks like the clone, on ports that are free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "definitions.yaml").write_text(re.findall(r"```yaml\n(.*?)```", TUTORIAL, re.DOTALL)[0])
        http = free_port()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PENSTOCK_RECEIVERS_HTTP_LISTEN": f"127.0.0.1:{http}",
            "PENSTOCK_RECEIVERS_GRPC_LISTEN": f"127.0.0.1:{free_port()}",
            "PENSTOCK_ADMIN_LISTEN": f"127.0.0.1:{free_port()}",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{http}",
            "COLUMNS": "120",
        }
        self.service: subprocess.Popen[bytes] | None = None

    def type(self, command: str) -> str:
        ran = subprocess.run(
            ["bash", "-c", command.removeprefix("$ ")],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}\n{self.log()}"
        return ran.stdout

    def start_service(self) -> None:
        with open(self.folder / "log", "wb") as log:
            self.service = subprocess.Popen(
                [self.folder / ".venv/bin/penstock", "run"], cwd=self.folder, env=self.environment, stderr=log
            )
        wait_until(lambda: "Penstock runs" in self.log(), START)

    def stop_service(self) -> int | None:
        if self.service is None:
            return None
        self.service.send_signal(signal.SIGINT)
        return self.service.wait(60)

    def log(self) -> str:
        log = self.folder / "log"
        return log.read_text() if log.exists() else ""

    def answer(self, question: str) -> str:
        """What is printed once the tables have it."""
        printed: list[str] = []

        def is_there() -> bool:
            ran = subprocess.run(
                ["bash", "-c", question.removeprefix("$ ")],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            printed.append(ran.stdout)
            return ran.returncode == 0

        wait_until(is_there, START)  # Spark may still be starting
        return printed[-1]


def test_every_command_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    answers: dict[str, str] = {}
    try:
        for command in COMMANDS:
            if command in ELSEWHERE:
                continue
            if command == SERVICE:
                reader.start_service()
            elif " query" in command:
                answers[command.partition(" query")[2].strip()] = reader.answer(command)
            else:
                answers[command] = reader.type(command)
                if command == RESTARTED:
                    assert reader.stop_service() == 0, reader.log()
                    reader.start_service()
        assert reader.stop_service() == 0, reader.log()
    finally:
        if reader.service is not None and reader.service.poll() is None:
            reader.service.kill()

    assert {"orders", "order.duration"} <= set(answers[""].split())
    assert re.search(r"north .* 750 ", answers["orders --by shop"])
    assert re.search(r"south .* 250 ", answers["orders --by shop"])
    assert "p95" in answers["order.duration --by shop --percentile 95"]
    assert re.search(r"0\.7[45]", answers["order_apdex"]), answers["order_apdex"]
