"""The examples run as they are and show what they say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines_of(example: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / example)], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def test_metrics_are_aggregated_without_loss() -> None:
    lines = lines_of("metrics_aggregation.py")

    assert lines[0].startswith("ServiceCalls: 15000 in 3 entities")
    assert lines[1].startswith("EndpointCalls: 15000 in 30 entities")
    assert lines[2].startswith("MeterReading: 3000 in 3 entities")
    assert lines[3] == "dropped: 0"


def test_the_top_n_are_exact_in_random_order() -> None:
    assert lines_of("top_n.py") == [
        "sql: SELECT 10000 10000 ms, SELECT 9999 9999 ms, SELECT 9998 9998 ms",
        "cache: GET 10000 1000.0 ms, GET 9999 999.9 ms, GET 9998 999.8 ms",
    ]


def test_io_queues_share_threads_and_lose_nothing() -> None:
    lines = lines_of("io_queues.py")

    assert lines[:2] == ["peers received: 2000", "rows written: 2000"]
    assert lines[2].startswith("threads for all peers: ")
