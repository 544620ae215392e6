"""What each task reads: together all of it, and no row twice."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.partial import PARTIALS, encoded, of_points
from penstock.model.point import chunk_type
from penstock.model.segment import Segment, Span
from penstock.spark.pieces import MOST_SHARES, Piece, pieces

MINUTE = 60_000_000


def batch(number: int, minutes: float, writer: str = "edge") -> dict[Segment, Span | None]:
    """So many segments, one after another in time, over these minutes in all."""
    each = minutes * MINUTE / max(number, 1)
    return {Segment(writer, n, n): (int(n * each) // MINUTE * MINUTE, int((n + 1) * each)) for n in range(number)}


def shape(found: list[Piece]) -> list[tuple[int, int, int]]:
    return [(len(piece.names), piece.share, piece.shares) for piece in found]


def test_a_batch_of_many_minutes_is_cut_into_stretches() -> None:
    assert shape(pieces(batch(8, 60), 2)) == [(4, 0, 1), (4, 0, 1)]


def test_a_task_gets_segments_side_by_side_in_time_of_all_writers() -> None:
    held = batch(4, 60, "a") | batch(2, 60, "b") | batch(1, 60, "c")
    shown = [[name[0] + name.split("-")[1][-1] for name in piece.names] for piece in pieces(held, 2)]

    assert shown == [["a0", "b0", "c0"], ["a1", "a2", "b1", "a3"]]


def test_a_batch_of_one_minute_is_shared_by_series() -> None:
    assert shape(pieces(batch(8, 0.9), 2)) == [(8, 0, 2), (8, 1, 2)]


def test_many_tasks_take_shares_of_stretches() -> None:
    assert shape(pieces(batch(16, 0.9), 8)) == [(8, share, MOST_SHARES) for _ in range(2) for share in range(4)]


def test_a_segment_that_does_not_say_where_its_rows_are_makes_stretches() -> None:
    assert shape(pieces(batch(8, 0.9) | {Segment("old", 0, 0): None}, 2)) == [(4, 0, 1), (5, 0, 1)]


def test_a_single_segment_is_read_by_one_task() -> None:
    assert shape(pieces(batch(1, 0.1), 8)) == [(1, 0, 1)]


@given(st.integers(0, 30), st.integers(1, 30), st.floats(0.1, 200))
def test_every_share_of_every_segment_is_in_one_piece(number: int, tasks: int, minutes: float) -> None:
    found = pieces(batch(number, minutes), tasks)
    parts = Counter((name, piece.share) for piece in found for name in piece.names)

    assert len(found) <= tasks
    assert set(parts.values()) <= {1}
    assert len({piece.shares for piece in found}) <= 1
    assert len(parts) == number * (found[0].shares if found else 1)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(zip(*(table[name].to_pylist() for name in ("metric", "entity", "bucket"))))


@pytest.mark.parametrize("shares", [2, 3, 4])
def test_shares_are_all_rows_and_a_series_is_in_one_of_them_whatever_its_code_is(shares: int) -> None:
    names = [f'{{"host":"h{n}"}}' for n in range(200)]
    chunks = [chunk_type(metric).of(names, [0] * 200, [1.0] * 200) for metric in ("cpu", "rps")]
    forth = encoded(pa.concat_tables([of_points([chunk]) for chunk in chunks]))
    back = encoded(forth.cast(PARTIALS).take(list(reversed(range(400)))))  # other codes for the same texts
    table = pa.concat_tables([forth, back])
    found = [Piece([], share, shares).of(table) for share in range(shares)]

    assert sorted(row for piece in found for row in rows_of(piece)) == rows_of(table)
    owners = Counter(row for piece in found for row in set(rows_of(piece)))
    assert set(owners.values()) == {1}
    assert all(piece.num_rows > 800 / shares * 0.7 for piece in found)
