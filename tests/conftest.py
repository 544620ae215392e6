"""What every test may ask for: real servers, and a skip (in CI a failure) where one cannot be had."""

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from penstock.errors import MissingRequirement
from tests.servers import PostgreSQL, Prometheus, RabbitMQ

# On a shared machine a slow example is no slow code, and neither is one that is slow to make.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("shared machine"), max_examples=20)  # of `make test-fast`
settings.load_profile("shared machine")
SERVERS = {"shared_rabbitmq", "rabbitmq", "postgres", "shared_postgres", "prometheus"}  # fixtures


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of a campaign: what it printed repeats it")
    parser.addoption("--seconds", type=float, help="how long a campaign of `make soak` strikes")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server. Tests that need a JVM share one: they run in one process, the others in the other."""
    for item in items:
        if SERVERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.xdist_group("spark"))


def missing(error: MissingRequirement) -> NoReturn:
    """Skip with the reason; in CI, where every server must be, fail with it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must have every server: {error}")
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared_rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """One broker for all tests that do not kill it."""
    try:
        broker = RabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    except MissingRequirement as error:
        missing(error)
    with broker:
        yield broker


@pytest.fixture
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A broker of the test's own, to be killed and restarted."""
    try:
        broker = RabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    except MissingRequirement as error:
        missing(error)
    with broker:
        yield broker


@pytest.fixture
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    """A database of the test's own, to be killed and restarted."""
    try:
        database = PostgreSQL(tmp_path_factory.mktemp("postgres"))
    except MissingRequirement as error:
        missing(error)
    with database:
        yield database


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One Prometheus for all tests, with its remote-write receiver on."""
    try:
        server = Prometheus(tmp_path_factory.mktemp("prometheus"))
    except MissingRequirement as error:
        missing(error)
    with server:
        yield server
