"""Partials as a batch for each share, and a range in the dictionary of entities for each.

    texts       a e │ b f │ c │ d g h       ends: 2 4 5 8
    batches     0     1     2   3           a batch has texts of its own range only

The reader of a share then needs neither to filter rows nor to read texts of other shares. In a batch the rows of a
metric are side by side, so that a group-by works in nearby memory.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.model.share import BY_ENTITY, BY_SERIES, Share, partial_share_numbers

SHARES = 4  # for two or four tasks
_MANY_ROWS = 1 << 16  # with fewer, filtering costs less than sorting
_MANY_ENTITIES = 1 << 12  # with fewer, shares differ too much in size


def partials_in_shares(partials: pa.Table) -> tuple[list[pa.RecordBatch], list[int]] | None:
    """The batches of encoded partials, and where their texts end; None for too few rows or uneven shares."""
    if partials.num_rows < _MANY_ROWS or any(partials[text].null_count for text in BY_SERIES):
        return None
    entities, metrics = partials["entity"].combine_chunks(), partials["metric"].combine_chunks()
    owners = partial_share_numbers(entities.dictionary) % SHARES
    old = entities.indices.to_numpy()
    shares = owners[old]
    rows = np.bincount(shares, minlength=SHARES)
    if len(owners) < _MANY_ENTITIES or rows.max() > len(shares) // 2:
        return None
    places = shares.astype(np.uint16) << 14 | (metrics.indices.to_numpy() & 0x3FFF).astype(np.uint16)
    order = np.argsort(places, kind="stable")  # 16 bits: numpy then sorts by counting
    texts = np.argsort(owners, kind="stable")
    codes = np.empty(len(texts), np.int32)
    codes[texts] = np.arange(len(texts), dtype=np.int32)
    new = pa.DictionaryArray.from_arrays(pa.array(codes[old[order]]), entities.dictionary.take(pa.array(texts)))
    (batch,) = _with_entities(partials.take(pa.array(order)).combine_chunks(), new).to_batches()
    ends = np.cumsum(np.bincount(owners, minlength=SHARES)).tolist()
    return [batch.slice(start, end - start) for start, end in pairwise([0, *np.cumsum(rows).tolist()])], ends


def partials_of_share(batches: list[pa.RecordBatch], ends: list[int], share: Share) -> pa.Table:
    """The rows of a share, from the batches of `partials_in_shares`; ValueError if they are not such batches."""
    if len(batches) != len(ends):
        raise ValueError(f"{len(batches)} batches for {len(ends)} shares")
    found = [_with_entities(batch, _cut(batch["entity"], *at)) for batch, at in zip(batches, pairwise([0, *ends]))]
    if share.by == BY_ENTITY and len(ends) % share.among == 0:
        return pa.Table.from_batches(found[share.number :: share.among])
    return share.of(pa.Table.from_batches(found))


def _cut(entities: Any, start: int, end: int) -> Any:
    """The column with the texts of its own range alone."""
    codes = entities.indices.to_numpy() - np.int32(start)
    if len(codes) and not 0 <= codes.min() <= codes.max() < end - start:
        raise ValueError(f"entities {codes.min()} to {codes.max()} of {end - start} in a share")
    texts = entities.dictionary.slice(start, end - start)
    return pa.DictionaryArray.from_arrays(pa.array(codes), texts, safe=False)


def _with_entities(rows: Any, entities: Any) -> Any:
    place = rows.schema.get_field_index("entity")
    return rows.set_column(place, rows.schema.field(place), entities)
