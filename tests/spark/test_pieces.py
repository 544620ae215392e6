"""What each task reads: together all of it, and no row twice."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.segment import Outline, Segment
from penstock.model.share import BY_ENTITY, BY_SERIES
from penstock.spark.pieces import MOST_SHARES, SparkReadPiece, spark_read_pieces

MINUTE = 60_000_000


def batch(number: int, minutes: float, writer: str = "edge", *, in_shares: bool = False) -> dict[Segment, Outline]:
    """So many segments, one after another in time, over these minutes in all."""
    each = minutes * MINUTE / max(number, 1)
    spans = [(int(n * each) // MINUTE * MINUTE, int((n + 1) * each)) for n in range(number)]
    return {Segment(writer, n, n): Outline(span, in_shares) for n, span in enumerate(spans)}


def shape(found: list[SparkReadPiece]) -> list[tuple[int, int, int]]:
    return [(len(piece.names), piece.share.number, piece.share.among) for piece in found]


def test_a_batch_of_many_minutes_is_cut_into_stretches() -> None:
    assert shape(spark_read_pieces(batch(8, 60), 2)) == [(4, 0, 1), (4, 0, 1)]


def test_a_task_gets_segments_side_by_side_in_time_of_all_writers() -> None:
    held = batch(4, 60, "a") | batch(2, 60, "b") | batch(1, 60, "c")
    shown = [[name[0] + name.split("-")[1][-1] for name in piece.names] for piece in spark_read_pieces(held, 2)]

    assert shown == [["a0", "b0", "c0"], ["a1", "a2", "b1", "a3"]]


def test_a_batch_of_one_minute_is_shared_by_series() -> None:
    assert shape(spark_read_pieces(batch(8, 0.9), 2)) == [(8, 0, 2), (8, 1, 2)]


def test_many_tasks_take_shares_of_stretches() -> None:
    assert shape(spark_read_pieces(batch(16, 0.9), 8)) == [
        (8, share, MOST_SHARES) for _ in range(2) for share in range(4)
    ]


def test_a_segment_that_does_not_say_where_its_rows_are_makes_stretches() -> None:
    assert shape(spark_read_pieces(batch(8, 0.9) | {Segment("old", 0, 0): Outline()}, 2)) == [(4, 0, 1), (5, 0, 1)]


def test_a_single_segment_is_read_by_one_task() -> None:
    assert shape(spark_read_pieces(batch(1, 0.1), 8)) == [(1, 0, 1)]


@given(st.integers(0, 30), st.integers(1, 30), st.floats(0.1, 200))
def test_every_share_of_every_segment_is_in_one_piece(number: int, tasks: int, minutes: float) -> None:
    found = spark_read_pieces(batch(number, minutes), tasks)
    parts = Counter((name, piece.share.number) for piece in found for name in piece.names)

    assert len(found) <= tasks
    assert set(parts.values()) <= {1}
    assert len({(piece.share.among, piece.share.by) for piece in found}) <= 1
    assert len(parts) == number * (found[0].share.among if found else 1)


def test_shares_go_by_entity_where_most_segments_keep_such_shares_apart() -> None:
    apart, mixed = batch(4, 0.9, "a", in_shares=True), batch(3, 0.9, "b")

    assert {piece.share.by for piece in spark_read_pieces(apart | mixed, 2)} == {BY_ENTITY}
    assert {piece.share.by for piece in spark_read_pieces(mixed | batch(2, 0.9, "a", in_shares=True), 2)} == {BY_SERIES}
