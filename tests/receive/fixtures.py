"""A sink that keeps what it is given, and a running HTTP receiver in front of it."""

from collections.abc import Iterator

import pytest

from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from tests.receive.support import KeepingSink, running


@pytest.fixture
def sink() -> KeepingSink:
    return KeepingSink()


@pytest.fixture
def intake(sink: KeepingSink) -> Iterator[Intake]:
    intake = Intake(sink).start()
    yield intake
    sink.release()
    assert intake.close(10.0)


@pytest.fixture
def http(intake: Intake) -> Iterator[HttpReceiver]:
    with running(intake) as receiver:
        yield receiver
