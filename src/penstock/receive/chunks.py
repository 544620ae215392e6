"""Rows of a group as chunks, one for each metric."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.model.point import DISTRIBUTIONS, POINTS, Chunk
from penstock.receive.group import Rows
from penstock.receive.series import SeriesTable


def chunks_of(rows: Rows, table: SeriesTable) -> list[Chunk]:
    """The rows by metric: one sort, one Arrow table, and a slice of it for each metric."""
    if not len(rows.streams):
        return []
    metrics = table.metric[rows.streams]
    if (metrics[1:] < metrics[:-1]).any():
        order = np.argsort(metrics, kind="stable")
        rows, metrics = rows.take(order), metrics[order]
    schema = DISTRIBUTIONS if rows.states else POINTS
    columns: dict[str, Any] = {
        "entity": table.entity_column(rows.streams),
        "time": pa.array(rows.times // 1000).cast(schema.field("time").type),
        "value": pa.array(rows.values),
        **{name: pa.array(column) for name, column in rows.states.items()},
    }
    points = pa.table([columns[name] for name in schema.names], schema=schema)
    starts = np.concatenate([[0], np.flatnonzero(metrics[1:] != metrics[:-1]) + 1, [len(metrics)]]).tolist()
    return [table.metrics[metrics[start]].chunk(points.slice(start, end - start)) for start, end in pairwise(starts)]
