"""MOVER: segments into tables. The only package that imports pyspark, and only when a job starts.

from penstock.spark import read_table
read_table(spark, "/data/tables", "hour").where("metric = 'service_percentile'").select("entity", "bucket", "p99")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.reading import read_segments, read_sketches, read_table

__all__ = ["read_segments", "read_sketches", "read_table"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from penstock.spark import reading

        return getattr(reading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
