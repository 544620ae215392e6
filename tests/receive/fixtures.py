"""A sink that keeps what it is given, and a running HTTP receiver in front of it."""

from collections.abc import Iterator

import pytest

from penstock.receive.config import HttpReceiverConfig
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from tests.receive.support import KeepingSink


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
    receiver = HttpReceiver(HttpReceiverConfig(port=0), intake).start()
    yield receiver
    receiver.close(1.0)
