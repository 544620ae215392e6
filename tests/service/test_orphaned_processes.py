"""Processes whose service was killed let go at once, and the next start goes on; a stop counts those that had died."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving
from tests.servers import has_ended
from tests.service.running import HEADERS, Running, orders, sealed_sum

SLOW = 30.0  # seconds: half of what a stop in good order may take here


def test_a_start_after_the_main_process_was_killed_does_not_wait_for_a_slow_destination(tmp_path: Path) -> None:
    destination = Misbehaving()
    destination.usually = destination.silent
    leftover = tmp_path / "segments" / ".edge-0000000000000001-0000000000000002.arrow"
    with destination.running():
        text = f"spark: {{enabled: false}}\nexporter: {{type: otlp_http, url: '{destination.url}', timeout: 60s}}\n"
        running = Running(tmp_path, text, processes="2", shutdown_timeout="60s")
        with running:
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
            for _ in range(20):
                connection.request("POST", "/v1/metrics", orders(1), HEADERS)
                assert connection.getresponse().read() is not None
            leftover.parent.mkdir(exist_ok=True)
            leftover.touch()
            assert running.process is not None
            os.kill(running.process.pid, signal.SIGKILL)  # its processes are orphans
            running.process.wait()
            began = time.monotonic()
            running.start()
            assert time.monotonic() - began < SLOW
            assert not leftover.exists()
            running.kill()
    assert "Traceback" not in running.text()


def test_a_stop_says_that_a_process_had_died_and_the_next_start_seals_what_it_held(tmp_path: Path) -> None:
    text = "spark: {enabled: false}\nsegments: {interval: 1h}\n"  # nothing is sealed but at a stop and at a start
    with Running(tmp_path, text, processes="2") as running:
        for number in range(20):  # each over a connection of its own, which reaches either process
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
            connection.request("POST", "/v1/metrics", orders(1, number), HEADERS)
            assert connection.getresponse().status == 200
            connection.close()
        (victim,) = running.workers()[1:]
        victim.kill()
        wait_until(lambda: has_ended(victim))
        assert running.stop() == 4, running.text()
        assert "receiver-1 had died: what its queue holds waits for the next start" in running.text()
        assert sealed_sum(tmp_path / "segments", "orders") < 20
        running.start()
        assert running.stop() == 0, running.text()
    assert sealed_sum(tmp_path / "segments", "orders") == 20


def test_a_process_whose_service_is_gone_before_it_began_ends_without_a_traceback() -> None:
    import socket

    for module in ("receiver_process", "spark_process"):
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-m", f"penstock.service.{module}", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                text=True,
            )
        ours.close()
        _, said = child.communicate(timeout=60)
        assert (child.returncode, said) == (0, ""), json.dumps(said)
