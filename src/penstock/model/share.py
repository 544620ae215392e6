"""Shares of the series: the bytes of its texts alone decide the share of a row, in every process.

    number = sum of the bytes of its texts, modulo 256          share = number modulo the number of shares

The texts are those of the metric and the entity, or of the entity alone where there are many. Segments are written in
shares, so the rule never changes. Each of 4 shares lies in one of 2.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BY_SERIES = ("metric", "entity")
BY_ENTITY = ("entity",)


@dataclass(frozen=True, slots=True)
class Share:
    """One of `among` shares of the series; by default all of them."""

    number: int = 0
    among: int = 1
    by: tuple[str, ...] = BY_SERIES

    def of(self, partials: pa.Table) -> pa.Table:
        """The share's rows of encoded partials."""
        if self.among == 1 or not partials.num_rows:
            return partials
        numbers = [_numbers(partials[text]) for text in self.by]
        return partials.filter(pa.array(np.add.reduce(numbers, dtype=np.uint8) % self.among == self.number))


ALL = Share()


def _numbers(column: Any) -> NDArray[np.uint8]:
    return np.concatenate([partial_share_numbers(part.dictionary)[part.indices.to_numpy()] for part in column.chunks])


def partial_share_numbers(texts: pa.StringArray) -> NDArray[np.uint8]:
    """The number of each text; all at once, because one by one took as long as reading the segment."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    found = np.zeros(len(texts), np.uint8)
    held = np.flatnonzero(ends[1:] > ends[:-1])
    if len(held):
        found[held] = np.add.reduceat(np.frombuffer(data, np.uint8)[: ends[-1]], ends[held], dtype=np.uint8)
    return found
