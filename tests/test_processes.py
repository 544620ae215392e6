"""Tests that share something dear, as a JVM, stay in one of the processes that the tests run in."""

import pytest


@pytest.mark.xdist_group("dear")
def test_a_group_stays_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells groups by the ends of the ids; a pytest that keeps ids elsewhere scatters them silently."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("these tests run in one process, or without --dist loadgroup")
    assert request.node.nodeid.endswith("@dear")
