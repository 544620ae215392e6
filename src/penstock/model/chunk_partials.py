"""Chunks of metrics without a definition as partials, by their own labels.

The receivers decode texts to codes, and the codes stay: no text is read, and only texts in use are copied. Merging the
result with `merged_encoded` takes a tenth of a group-by over texts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.model.columns import Columns, columns_of, joined
from penstock.model.function import AVG, Function
from penstock.model.grouping import MINUTE_US
from penstock.model.partial import CODED, ENCODED
from penstock.model.point import STATED, Chunk, PointKind

# Of a metric without a definition. The states of avg and sum are the same; those of a percentile include them.
FUNCTION_OF = {
    PointKind.GAUGE: AVG,
    PointKind.COUNTER: Function("sum"),
    PointKind.DISTRIBUTION: Function.parse("percentile"),
}


def partials_of_chunks(chunks: Sequence[Chunk]) -> pa.Table:
    """Points and distributions of any metrics: an encoded row for each, to be merged."""
    alike: dict[tuple[int, bool], list[Chunk]] = {}  # by dictionary of texts, and by their columns
    for chunk in chunks:
        texts = 0 if chunk.columns is None else id(chunk.columns.texts)
        alike.setdefault((texts, chunk.kind is PointKind.DISTRIBUTION), []).append(chunk)
    return pa.concat_tables(map(_rows, alike.values())) if alike else ENCODED.empty_table()


def _rows(chunks: list[Chunk]) -> pa.Table:
    columns = _columns(chunks)
    types: dict[type[Chunk], int] = {}
    owners = np.repeat([types.setdefault(type(chunk), len(types)) for chunk in chunks], list(map(len, chunks)))
    values, used = pa.array(columns.values), pa.array(columns.codes).dictionary_encode()
    if columns.states:
        parts = FUNCTION_OF[PointKind.DISTRIBUTION].parts(values, None)
        states = [pa.array(columns.states[name]) for name in STATED]
    else:
        parts = pa.array(np.zeros(len(values), np.int64))
        states = [pa.array(np.ones(len(values), np.int64)), values, values, values]
    found = [
        _encoded(owners, [kind.metric for kind in types]),
        _encoded(owners, [str(FUNCTION_OF[kind.kind]) for kind in types]),
        pa.DictionaryArray.from_arrays(used.indices, columns.texts.take(used.dictionary)),
        pa.array(columns.times - columns.times % MINUTE_US).cast(ENCODED.field("bucket").type),
        parts,
        pa.nulls(len(values), CODED),
        *states,
    ]
    return pa.table(found, schema=ENCODED)


def _columns(chunks: list[Chunk]) -> Columns:
    """The points of all chunks. Arrow tables are concatenated first, so that their texts are encoded once."""
    columns = [chunk.columns for chunk in chunks if chunk.columns is not None]
    return joined(columns) if columns else columns_of(pa.concat_tables([chunk.points for chunk in chunks]))


def _encoded(numbers: NDArray[Any], texts: list[str]) -> Any:
    """A column with texts[numbers[i]] in row i; equal texts get one code."""
    codes = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    indices = np.array([codes[text] for text in texts], np.int32)[numbers]
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(list(codes), pa.string()))
