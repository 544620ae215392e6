"""The tables of a job, read with Spark, with DuckDB, with Polars and with nothing but pyarrow, and one of them drawn.

    penstock demo && python examples/read_tables.py penstock-demo/tables

DuckDB and Polars are asked only if they are installed. Rows that are final have their values as plain columns.
"""

import importlib.util
import sys

import plotext
import pyarrow.compute as pc
from rich.console import Console
from rich.text import Text

from penstock.model.level import Level
from penstock.spark import read_table
from penstock.tables.delta import DeltaTables
from penstock.tables.port import read_level, read_top_n

METRIC = "http.server.request.duration"
QUESTION = """
    select labels['service'] as service, bucket, avg, max from read_parquet({files})
    where metric = '{metric}' and is_final order by service, bucket
"""

location = sys.argv[1] if len(sys.argv) > 1 else "penstock-demo/tables"
tables = DeltaTables(location)

# 1. Without a JVM: final values as an Arrow table.
hours = read_level(tables, Level.HOUR)
mine = hours.filter(pc.equal(hours["metric"], METRIC))
print(f"pyarrow: {mine.num_rows} hours of {METRIC}")

# 2. Spark: the same final values as a frame.
from penstock.spark.session import start_session  # noqa: E402 - pyspark takes its time, and this is its turn

spark = start_session("local[2]")
frame = read_table(spark, location, "hour").where(f"metric = '{METRIC}'")
frame.select("entity", "bucket", "count", "avg", "max").orderBy("entity", "bucket").show(5, truncate=False)
assert frame.count() == mine.num_rows
spark.stop()

# 3. DuckDB and Polars: the table's files as they are.
files = tables.file_uris("hour")
if importlib.util.find_spec("duckdb"):
    import duckdb

    found = duckdb.sql(QUESTION.format(files=files, metric=METRIC))
    assert len(found) == mine.num_rows
    print(found.limit(3))
if importlib.util.find_spec("polars"):
    import polars as pl

    rows = pl.scan_parquet(files, hive_partitioning=False).filter(pl.col("metric") == METRIC, pl.col("is_final"))
    final = rows.select("labels", "bucket", "avg", "max").sort("bucket").collect()
    assert len(final) == mine.num_rows
    print(final.head(3))

# 4. The slowest entities of the newest minute, and a chart of one entity's hours.
worst = read_top_n(tables, 3)
for row in worst.filter(pc.equal(worst["bucket"], pc.max(worst["bucket"]))).to_pylist():
    print(f"{row['bucket']:%H:%M} {row['metric']:<30} {row['entity']} {row['max']:.1f}")

entity = mine["entity"][0].as_py()
one = mine.filter(pc.equal(mine["entity"], entity)).to_pylist()
figure = plotext.figure
figure.clear()
figure.plot_size(100, 14)
figure.theme("colorless")
figure.draw(figure.bar([f"{row['bucket']:%H}" for row in one], [row["avg"] for row in one]))
print(f"{METRIC} of {entity}, mean by hour")
Console().print(Text.from_ansi(str(figure.build())))  # colours and their codes only where a terminal shows them
