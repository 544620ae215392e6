"""The examples run as they are, on a real broker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import RabbitMQ

pytestmark = pytest.mark.server
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("consumers_auto_scaling.py", "100 orders by "),
        ("consumers_sequential.py", "in order: True"),
        ("consumers_high_concurrency.py", "996 imported, 4 dead-lettered"),
    ],
)
def test_an_example_runs(shared_rabbitmq: RabbitMQ, name: str, says: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), shared_rabbitmq.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ran.returncode == 0, ran.stderr
    assert says in ran.stdout


def test_every_consumer_example_is_run() -> None:
    tested = {"consumers_auto_scaling.py", "consumers_sequential.py", "consumers_high_concurrency.py"}

    assert {path.name for path in EXAMPLES.glob("consumers_*.py")} == tested
