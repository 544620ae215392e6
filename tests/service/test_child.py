"""Processes of the service: there again after they died, gone when the service is."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.service import child as child_module
from penstock.service.child import ChildProcess
from penstock.service.exit_codes import FINAL
from penstock.telemetry import Value
from penstock.testing import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ChildProcess]]:
    monkeypatch.setattr(child_module, "FIRST_PAUSE", 0.01)
    made: list[ChildProcess] = []

    def begin(**first: Any) -> ChildProcess:
        child = ChildProcess("echo", "tests.service.echo_child", lambda: first, environ={"PYTHONPATH": str(ROOT)})
        made.append(child)
        child.start()
        return child

    yield begin
    for child in made:
        child.kill()


def test_it_is_told_what_to_begin_with_and_answers(start: Callable[..., ChildProcess]) -> None:
    child = start(config="x: 1")

    assert child.ask("first")["config"] == "x: 1"
    assert child.is_up
    assert child.problem() is None
    assert list(child.values()) == [Value("penstock_queue_size", "", {"queue": "x"}, 2.0)]


def test_one_that_dies_is_started_again(start: Callable[..., ChildProcess]) -> None:
    child = start()
    first = child.ask("pid")
    with pytest.raises(OSError, match="ended"):
        child.ask("die")

    wait_until(lambda: child.restarts == 1 and answers(child))

    assert child.ask("pid") != first
    assert {sample.name: sample.value for sample in child.samples()} == {
        "penstock_service_child_up": 1.0,
        "penstock_service_child_restarts_total": 1,
    }


def answers(child: ChildProcess) -> bool:
    try:
        return child.ask("pid") is not None
    except OSError:
        return False


def test_one_that_would_only_fail_again_is_left_alone(start: Callable[..., ChildProcess]) -> None:
    child = start(code=FINAL)
    wait_until(lambda: child.has_ended)

    assert child.restarts == 0
    assert child.problem() == f"echo is down: exit code {FINAL}"
    assert list(child.values()) == []


def test_a_question_that_fails_ends_nobody(start: Callable[..., ChildProcess]) -> None:
    child = start()
    before = child.ask("pid")

    assert child.ask("fail") is None
    assert child.ask("pid") == before


def test_it_ends_when_told_and_is_not_started_again(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.ask("pid")
    child.stop()

    assert child.join(10.0)
    wait_until(lambda: child.has_ended)
    assert child.restarts == 0


def test_one_that_somebody_else_told_to_end_is_started_again(start: Callable[..., ChildProcess]) -> None:
    child = start()
    first = child.ask("pid")
    os.kill(first, signal.SIGTERM)  # it ends in good order, with 0

    wait_until(lambda: child.restarts == 1 and answers(child))
    assert child.ask("pid") != first


def test_one_that_does_not_end_in_time_is_killed(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.ask("ignore")
    child.stop()

    assert not child.join(0.1)
    assert not child.is_up


def test_it_ends_when_the_service_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from penstock.service.child import ChildProcess\n"
        "child = ChildProcess('echo', 'tests.service.echo_child', dict)\n"
        "child.start()\n"
        "print(child.ask('pid'), flush=True)\n"
        "time.sleep(60)\n"
    )
    service = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert service.stdout is not None
    pid = int(service.stdout.readline())
    os.kill(service.pid, signal.SIGKILL)
    service.wait()
    service.stdout.close()

    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
