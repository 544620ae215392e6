"""Rows of a group as chunks, one for each metric."""

from itertools import pairwise

import numpy as np

from penstock.decode.group import Rows
from penstock.decode.series import SeriesTable
from penstock.model.columns import Columns
from penstock.model.point import Chunk


def chunks_of(rows: Rows, table: SeriesTable) -> list[Chunk]:
    """The rows by metric: one sort, and a slice of the columns for each metric."""
    if not len(rows.streams):
        return []
    metrics = table.metric[rows.streams]
    if (metrics[1:] < metrics[:-1]).any():
        order = np.argsort(metrics, kind="stable")
        rows, metrics = rows.take(order), metrics[order]
    codes, texts = table.entities_of(rows.streams)
    columns = Columns(codes, texts, rows.times // 1000, rows.values, rows.states)
    starts = np.concatenate([[0], np.flatnonzero(metrics[1:] != metrics[:-1]) + 1, [len(metrics)]]).tolist()
    return [table.metrics[metrics[start]].chunk(columns.take(slice(start, end))) for start, end in pairwise(starts)]
