"""Points as plain arrays, with codes in place of texts: what receivers decode to, and what L1 merges."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_WIDTH = 4 + 8 + 8  # bytes of a row's code, time and value
_WIDTH_OF_STATES = 4 * 8
_MICROSECONDS = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """Points or distributions of one metric. The entity of row i is texts[codes[i]]; no text occurs twice.

    `texts` may hold far more than these rows need. Many chunks share it, so it is never changed.
    """

    codes: NDArray[np.int32]
    texts: Any  # an Arrow array
    times: NDArray[np.int64]  # microseconds since the epoch
    values: NDArray[np.float64]
    states: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # count, sum, min, max of a distribution

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return len(self.values) * (_WIDTH + _WIDTH_OF_STATES if self.states else _WIDTH)

    def take(self, rows: Any) -> "ChunkColumns":
        """The rows of a slice, a mask, or a list of row numbers."""
        states = {name: column[rows] for name, column in self.states.items()}
        return ChunkColumns(self.codes[rows], self.texts, self.times[rows], self.values[rows], states)

    def table(self, schema: pa.Schema) -> pa.Table:
        """The rows as an Arrow table with its texts written out."""
        found: dict[str, Any] = {
            "entity": self.texts.take(pa.array(self.codes)),
            "time": pa.array(self.times).cast(_MICROSECONDS),
            "value": pa.array(self.values),
            **{name: pa.array(column) for name, column in self.states.items()},
        }
        return pa.table([found[name] for name in schema.names], schema=schema)


def joined_chunk_columns(pieces: list[ChunkColumns]) -> ChunkColumns:
    """The rows of all pieces, which share their texts and have the same states."""
    first = pieces[0]
    states = {name: np.concatenate([piece.states[name] for piece in pieces]) for name in first.states}
    codes, times, values = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("codes", "times", "values")
    )
    return ChunkColumns(codes, first.texts, times, values, states)


def chunk_columns_of(points: pa.Table) -> ChunkColumns:
    """The rows of an Arrow table, its texts encoded."""
    encoded = points["entity"].combine_chunks().dictionary_encode()
    numbers = {name: points[name].combine_chunks().to_numpy(zero_copy_only=False) for name in points.column_names[2:]}
    times = points["time"].combine_chunks().cast(pa.int64()).to_numpy(zero_copy_only=False)
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return ChunkColumns(codes, encoded.dictionary, times, numbers.pop("value"), numbers)
