"""MOVER: segments into tables. The only package that imports pyspark, and only when a job starts.

from penstock.spark import register
register(spark, "/data/tables")
spark.sql("select labels['service'], bucket, p99 from penstock.hour where metric = 'service_percentile'")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.reading import read_segments, read_sketches, read_table
    from penstock.spark.sql_views import register

__all__ = ["read_segments", "read_sketches", "read_table", "register"]


def __getattr__(name: str) -> Any:
    if name == "register":
        from penstock.spark.sql_views import register

        return register
    if name in __all__:
        from penstock.spark import reading

        return getattr(reading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
