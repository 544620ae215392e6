"""Labels as readers see them: a map of texts, and `series`, which is the same for the same labels in every table.

    entity    {"host":"a","zone":"z"}        how partials carry labels: JSON, sorted by name
    labels    host → a, zone → z             a map
    series    the first 32 hexadecimal digits of the entity's SHA-256

128 bits of a hash that has no known collisions: among a billion sets of labels, two that share a series are less likely
than a disk that returns wrong bytes unnoticed. An entity that is no such JSON is kept whole, under the empty name.
"""

import hashlib
import json
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.model.grouping import one_array
from penstock.model.point import entity_of

LABELS = pa.map_(pa.string(), pa.string())
Pairs = tuple[tuple[str, str], ...]


@lru_cache(maxsize=1 << 17)  # the series of a batch are mostly those of the batch before
def table_labels_of_entity(entity: str) -> tuple[Pairs, str]:
    """The labels of an entity, sorted by name, and its series."""
    return _pairs(entity), hashlib.sha256(entity.encode()).hexdigest()[:32]


def entity_from_table_labels(pairs: Any) -> str:
    """The entity of labels: what `table_labels_of_entity` was given."""
    labels = dict(pairs)
    return labels[""] if list(labels) == [""] else entity_of(labels)


def label_columns(entities: Any) -> tuple[Any, Any]:
    """The maps and the series of a column of entities; each entity is parsed once."""
    coded = one_array(entities.dictionary_encode() if not pa.types.is_dictionary(entities.type) else entities)
    found = [table_labels_of_entity(entity) for entity in coded.dictionary.to_pylist()]
    series = pa.array([one for _, one in found], pa.string())
    return table_label_maps([pairs for pairs, _ in found]).take(coded.indices), series.take(coded.indices)


def table_label_maps(labels: list[Pairs]) -> Any:
    return pa.array([list(pairs) for pairs in labels], LABELS)


def entity_column(labels: Any, series: Any) -> Any:
    """The entities of a column of maps; rows of one series have the same."""
    known, first = first_of_each_text(series)
    pairs = one_array(labels).take(pa.array(first)).to_pylist()
    texts = pa.array([entity_from_table_labels(some) for some in pairs], pa.string())
    return texts.take(known.indices)


def first_of_each_text(column: Any) -> tuple[Any, Any]:
    """A column of texts as codes, and for each code the first row that has it."""
    texts = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column  # only texts that occur
    known = one_array(texts).dictionary_encode()
    rows = np.empty(len(known.dictionary), np.int64)
    codes = known.indices.to_numpy()
    rows[codes[::-1]] = np.arange(len(codes))[::-1]
    return known, rows


def _pairs(entity: str) -> Pairs:
    try:
        labels = json.loads(entity)
    except ValueError:
        labels = None
    is_plain = isinstance(labels, dict) and all(isinstance(text, str) for text in labels.values())
    if not is_plain or list(labels) == [""] or entity_of(labels) != entity:
        return (("", entity),)
    return tuple(sorted(labels.items()))
