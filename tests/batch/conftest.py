"""What tests of the batch queue may ask for."""

import pytest

from penstock.batch import drain, rounds

SLOW = 0.25  # seconds that a call has to take to be too slow for the rounds of a test


@pytest.fixture
def patient_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must look neither like handlers that take long nor like rounds that hang."""
    for module in (rounds, drain):
        monkeypatch.setattr(module, "SLOW_CALLS", SLOW)
    monkeypatch.setattr(drain, "PATIENCE", 10_000)
