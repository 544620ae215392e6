"""Chunks of many metrics merged by codes: the same partials as those of a group-by over texts."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.chunk_partials import KEPT, LATEST, PERCENTILE, Kept, newest_of_chunks, partials_of_chunks
from penstock.model.columns import ChunkColumns
from penstock.model.definition import Definition
from penstock.model.function import AVG
from penstock.model.partial import ENCODED, IDENTITY, merged, merged_encoded
from penstock.model.point import Chunk, PointKind, chunk_type

TEXTS = ("a", "b", 'quote"d', "")
TYPES = [chunk_type(name, kind) for name in ("cpu", "rps") for kind in PointKind]  # kept, since types are held weakly
rows = st.tuples(
    st.integers(0, len(TEXTS) - 1),
    st.integers(-3 * 60_000_000, 3 * 60_000_000),
    st.integers(-1000, 1000).map(float),
)


@st.composite
def chunks(draw: st.DrawFn) -> list[Chunk]:
    """Some with codes, into the same texts or into others, and some with texts."""
    forward, backward = pa.array(TEXTS, pa.string()), pa.array(TEXTS[::-1], pa.string())
    made = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(TYPES))
        codes, times, values = map(np.array, zip(*draw(st.lists(rows, min_size=1, max_size=8))))
        states: dict[str, Any] = {}
        if kind.kind is PointKind.DISTRIBUTION:
            states = {"count": np.arange(len(codes)), "sum": values * 2, "min": values - 1, "max": values + 1}
        columns = ChunkColumns(
            codes.astype(np.int32), draw(st.sampled_from([forward, backward])), times.astype(np.int64), values, states
        )
        made.append(kind(columns if draw(st.booleans()) else kind(columns).points))
    return made


def as_rows(partials: pa.Table) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    found = {tuple(row[name] for name in IDENTITY): tuple(row.values())[6:] for row in partials.to_pylist()}
    assert len(found) == partials.num_rows
    return found


def by_texts(made: list[Chunk], kept: Kept) -> pa.Table:
    """The same through a definition of each metric that keeps all labels."""
    tables = []
    for chunk in made:
        function = kept[chunk.kind][0]
        tables.append(Definition(name=chunk.metric, source=chunk.metric, function=function).partials(chunk.points))
    return merged(pa.concat_tables([ENCODED.empty_table(), *tables]))


ASKED = {**KEPT, PointKind.EVENT: (PERCENTILE, LATEST), PointKind.GAUGE: (AVG, LATEST)}


@given(chunks(), st.sampled_from([KEPT, ASKED]))
def test_the_partials_are_those_of_a_group_by_over_texts(made: list[Chunk], kept: Kept) -> None:
    found = merged_encoded(partials_of_chunks(made, kept))

    assert found.schema == ENCODED
    assert as_rows(found) == as_rows(by_texts(made, kept))


@given(chunks())
def test_the_newest_points_are_those_that_merging_leaves(made: list[Chunk]) -> None:
    found = merged(newest_of_chunks(made, ASKED))

    some = [chunk for chunk in made if chunk.kind in (PointKind.EVENT, PointKind.GAUGE)]
    expected = [Definition(name=one.metric, source=one.metric, function=LATEST).partials(one.points) for one in some]
    rows = as_rows(merged(pa.concat_tables([ENCODED.empty_table(), *expected])))
    assert {key: states[3] for key, states in as_rows(found).items()} == {key: one[3] for key, one in rows.items()}
    assert not any(found["count"].to_pylist())  # they are counted by the other function
    assert not newest_of_chunks(made, KEPT).num_rows


def test_only_texts_that_are_needed_travel() -> None:
    kind = chunk_type("cpu")
    many = pa.array([str(number) for number in range(1000)])
    columns = ChunkColumns(np.array([7, 7], np.int32), many, np.zeros(2, np.int64), np.ones(2))

    (column,) = partials_of_chunks([kind(columns)])["entity"].chunks

    assert column.dictionary.to_pylist() == ["7"]


@pytest.mark.parametrize("kind", list(PointKind))
def test_a_chunk_of_columns_is_a_table_on_request(kind: PointKind) -> None:
    some = {name: np.ones(2) for name in ("sum", "min", "max")}
    states = {"count": np.ones(2, np.int64), **some} if kind is PointKind.DISTRIBUTION else {}
    columns = ChunkColumns(
        np.array([1, 0], np.int32), pa.array(["a", "b"]), np.array([5, 6]), np.array([1.0, 2.0]), states
    )
    chunk = chunk_type("cpu", kind)(columns)

    assert len(chunk) == chunk.points.num_rows == 2
    assert chunk.points["entity"].to_pylist() == ["b", "a"]
    assert chunk.points["time"].cast(pa.int64()).to_pylist() == [5, 6]
    assert chunk.nbytes == columns.take(slice(0, 1)).nbytes * 2
