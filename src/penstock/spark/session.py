"""One Spark session, with the settings that the pipeline relies on."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.spark.java import find_java
from penstock.spark.source import SegmentSource

CONFIG = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # INT96 reads back as nanoseconds without a zone
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",  # no state that an empty batch would have to age
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",  # it would write over our own progress
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def start_session(master: str = "local[*]", config: Mapping[str, str] | None = None) -> SparkSession:
    """A session on `master` that knows `format("penstock")`. MissingRequirement if there is no Java for it."""
    os.environ["JAVA_HOME"] = str(find_java().home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    builder = SparkSession.builder.appName("penstock").master(master)
    builder = builder.config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={logging}")
    builder = builder.config("spark.sql.shuffle.partitions", str(os.cpu_count() or 2))
    for key, value in {**CONFIG, **(config or {})}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.dataSource.register(SegmentSource)
    return session
