"""Idle workers look up more often than they need to outside of tests: every test closes them and waits for it."""

import pytest

from penstock.export import workers


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TURN", 0.02)
