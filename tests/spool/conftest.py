"""What the tests of the queue share."""

import pytest

from penstock.spool.files import OsFiles


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the waiting for the real disk: what a sync is good for is tested on the fake one, which forgets."""
    monkeypatch.setattr(OsFiles, "sync", staticmethod(lambda handle: None))
    monkeypatch.setattr(OsFiles, "sync_folder", lambda self, path: None)
