"""The examples run as they are, on a real broker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import RabbitMQ

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "consumers_auto_scaling.py": "100 orders by ",
    "consumers_sequential.py": "in order: True",
    "consumers_high_concurrency.py": "996 imported, 4 dead-lettered",
}


@pytest.mark.server
def test_the_examples_run(shared_rabbitmq: RabbitMQ) -> None:
    running = {
        name: subprocess.Popen(
            [sys.executable, EXAMPLES / name, shared_rabbitmq.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in SAYS
    }
    for name, process in running.items():
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        assert SAYS[name] in out.decode()


def test_every_consumer_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("consumers_*.py")} == set(SAYS)
