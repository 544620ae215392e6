"""One JVM for all tests that need Spark."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from penstock.errors import MissingRequirement
from penstock.spark.session import start_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    try:
        session = start_session(
            "local[2]",
            {
                "spark.sql.shuffle.partitions": "1",
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",  # short runs: compile fast, not well
            },
        )
    except MissingRequirement as error:
        pytest.fail(str(error))  # `make setup` provides Java, so a missing one is a failure everywhere
    yield session
    session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # the first one pays for the JVM's start
