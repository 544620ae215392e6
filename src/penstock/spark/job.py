"""The streaming job: one stateless query from segments to all tables."""

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.spark.rollup import at, merged, top_n
from penstock.spark.tables import TOP_N, Tables

TRIGGER = "2 seconds"  # a batch costs about 0.2 s even when it is small; more often only burns CPU


def start_job(spark: SparkSession, segments: Path, tables: Tables, checkpoint: Path) -> StreamingQuery:
    """Follow `segments` and keep the tables up to date until the query is stopped.

    Exactly once: a segment never changes, Spark's log says which segments a batch has, and every append is guarded by
    (query id, batch id) in its own commit. The query id lives in the checkpoint: keep it as long as the tables.
    """
    partials = spark.readStream.format("penstock").option("path", str(segments)).load()
    return (
        partials.writeStream.queryName("penstock")
        .foreachBatch(_into(tables))
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime=TRIGGER)
        .start()
    )


def _into(tables: Tables) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, batch_id: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query, "Spark names the query of every batch"
        minutes = batch.transform(merged).persist()
        try:
            for level in Level:
                rows = minutes.transform(at(level)).toArrow()
                tables.append(level.value, rows.cast(PARTIALS), query, batch_id)
            tables.append("top_n", minutes.transform(top_n).toArrow().cast(TOP_N), query, batch_id)
        finally:
            minutes.unpersist()

    return write
