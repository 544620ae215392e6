"""Chunks of many metrics as partials, with one group-by over all of them.

    metric, entity, minute, part ──► one number ──► which row of the result ──► states added up there

Everything that decides where a point belongs is a number from the receiver on, so no text is looked at but those that
the result needs, once each. It takes a tenth of a group-by over texts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.model.columns import Columns, columns_of
from penstock.model.function import UNDEFINED, Function
from penstock.model.partial import CODED, ENCODED
from penstock.model.point import STATED, Chunk, Kind

Ints = NDArray[np.int64]

_MINUTE = 60_000_000  # microseconds
_MOST = 1 << 62  # what a key may come to


def merged_chunks(chunks: Sequence[Chunk]) -> pa.Table:
    """Points and distributions of any metrics by their own labels: one row per identity, texts encoded."""
    if not chunks:
        return ENCODED.empty_table()
    numbers = [chunk for chunk in chunks if chunk.kind is not Kind.DISTRIBUTION]
    distributions = [chunk for chunk in chunks if chunk.kind is Kind.DISTRIBUTION]
    ordered = _tables_first(numbers) + _tables_first(distributions)
    kinds: dict[type[Chunk], int] = {}
    owners = np.array([kinds.setdefault(type(chunk), len(kinds)) for chunk in ordered])
    metrics = np.repeat(owners, [len(chunk) for chunk in ordered])
    pieces = _pieces(numbers) + _pieces(distributions)
    entities, texts = _unified(pieces)
    values = np.concatenate([piece.values for piece in pieces])
    minutes = np.concatenate([piece.times for piece in pieces]) // _MINUTE
    first = sum(map(len, numbers))
    parts = np.zeros(len(values), np.int64)
    if distributions:
        parts[first:] = _parts(UNDEFINED[Kind.DISTRIBUTION], values[first:])
    which, rows = _grouped([metrics, entities, minutes, parts])
    states = [
        np.concatenate([own, *(piece.states[name] for piece in pieces if piece.states)])
        for name, own in zip(STATED, (np.ones(first, np.int64), *[values[:first]] * 3))
    ]
    return _table(list(kinds), metrics[rows], entities[rows], texts, minutes[rows], parts[rows], _merged(states, which))


def _tables_first(chunks: list[Chunk]) -> list[Chunk]:
    """In the order in which `_pieces` has their rows."""
    return [c for c in chunks if c.columns is None] + [c for c in chunks if c.columns is not None]


def _pieces(chunks: list[Chunk]) -> list[Columns]:
    """The columns of these chunks; Arrow tables are put together first, so that their texts are encoded once."""
    tables = [chunk.points for chunk in chunks if chunk.columns is None]
    found = [chunk.columns for chunk in chunks if chunk.columns is not None]
    return [columns_of(pa.concat_tables(tables)), *found] if tables else found


def _unified(pieces: list[Columns]) -> tuple[NDArray[Any], Any]:
    """Codes of all rows that mean the same in all of them, and their texts."""
    codes = [piece.codes for piece in pieces]
    dictionaries = {id(piece.texts): piece.texts for piece in pieces}
    if len(dictionaries) == 1:
        return np.concatenate(codes), pieces[0].texts
    # Of each, only what is used: it may hold the texts of everything that was ever seen.
    used = {}
    for key in dictionaries:
        some = np.concatenate([piece.codes for piece in pieces if id(piece.texts) == key])
        used[key] = _distinct(some, len(dictionaries[key]))
    texts = pa.concat_arrays([dictionaries[key].take(pa.array(used[key])) for key in dictionaries]).dictionary_encode()
    new = texts.indices.to_numpy(zero_copy_only=False)
    translated = {}
    start = 0
    for key in dictionaries:
        translated[key] = np.zeros(len(dictionaries[key]), np.int32)
        translated[key][used[key]] = new[start : start + len(used[key])]
        start += len(used[key])
    return np.concatenate([translated[id(piece.texts)][piece.codes] for piece in pieces]), texts.dictionary


def _distinct(codes: NDArray[Any], of: int) -> Ints:
    is_used = np.zeros(of, bool)
    is_used[codes] = True
    return np.flatnonzero(is_used)


def _parts(function: Function, values: NDArray[np.float64]) -> Ints:
    found: Ints = function.parts(pa.array(values), None).to_numpy(zero_copy_only=False)
    return found


def _grouped(columns: list[NDArray[Any]]) -> tuple[NDArray[Any], Ints]:
    """For each row the number of its group, and for each group one of its rows."""
    keys, span = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        if span * (high - low + 1) > _MOST:
            keys, span = _codes(keys)
        span *= high - low + 1
        keys = keys * (high - low + 1) + (column - low)
    which, groups = _codes(keys)
    rows = np.zeros(groups, np.int64)
    rows[which] = np.arange(len(keys))
    return which, rows


def _codes(keys: Ints) -> tuple[NDArray[Any], int]:
    """Small numbers in place of great ones, and how many there are."""
    found = pa.array(keys).dictionary_encode()
    return found.indices.to_numpy(zero_copy_only=False), len(found.dictionary)


def _merged(states: list[NDArray[Any]], which: NDArray[Any]) -> list[NDArray[Any]]:
    groups = int(which.max()) + 1 if len(which) else 0
    count, total, least, greatest = states
    counts = np.zeros(groups, np.int64)
    np.add.at(counts, which, count)
    lowest, highest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(lowest, which, least)
    np.maximum.at(highest, which, greatest)
    return [counts, np.bincount(which, total, groups), lowest, highest]


def _table(
    kinds: list[type[Chunk]],
    metrics: Ints,
    entities: NDArray[Any],
    texts: Any,
    minutes: Ints,
    parts: Ints,
    states: list[NDArray[Any]],
) -> pa.Table:
    names = _coded(metrics, [kind.metric for kind in kinds])
    functions = _coded(metrics, [str(UNDEFINED[kind.kind]) for kind in kinds])
    used = _distinct(entities, len(texts))
    number = np.zeros(len(texts), np.int32)
    number[used] = np.arange(len(used))
    columns = [
        names,
        functions,
        pa.DictionaryArray.from_arrays(pa.array(number[entities]), texts.take(pa.array(used))),
        pa.array(minutes * _MINUTE).cast(ENCODED.field("bucket").type),
        pa.array(parts),
        pa.nulls(len(parts), CODED),
        *map(pa.array, states),
    ]
    return pa.table(columns, schema=ENCODED)


def _coded(numbers: Ints, texts: list[str]) -> Any:
    """A column of texts by number; some of them may be the same."""
    distinct = list(dict.fromkeys(texts))
    code = np.array([distinct.index(text) for text in texts], np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(code[numbers]), pa.array(distinct, pa.string()))
