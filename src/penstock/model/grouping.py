"""Group-bys over numbers: the keys of a row become the digits of one number, and rows are grouped by it.

    number = ((bucket · parts + part) · entities + entity) …     each digit is a code of its key's value

Keys that are the same in every row take no digit. The number is an index into an array for each state, so a row costs a
few nanoseconds. If most of the array would stay empty, the numbers that occur are renumbered first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Aggregate = tuple[str, str]  # a column, and its merge: count, sum, min, max or list
Codes = NDArray[np.int64]

MINUTE_US = 60_000_000  # what buckets are multiples of
_GREATEST_DIGIT = 1 << 31  # two such digits still fit in 63 bits
_SMALL = 1 << 16  # an array of this length costs nothing
_SPREAD = 2  # indices a row; with more of them most would be empty
_EMPTY = {"min": np.inf, "max": -np.inf}


def grouped_partials(table: pa.Table, keys: Sequence[str], aggregates: Sequence[Aggregate]) -> pa.Table:
    """One row for each combination of keys, in any order: the keys, then a column like `sum_max` for each aggregate.

    The table has at least one row. Its texts may be encoded or not; those of the result are.
    """
    # The bucket first: rows side by side in time are so in memory too.
    digits = _digits(table, sorted(keys, key=lambda key: key != "bucket"))
    if digits.count > max(_SMALL, _SPREAD * table.num_rows):
        digits.renumber()
    numbers, columns = _indexed(table, digits, aggregates) or _hashed(table, digits, aggregates)
    values = digits.values(numbers)
    names = [f"{column}_{merge}" for column, merge in aggregates]
    return pa.table([*(values[key] for key in keys), *columns], names=[*keys, *names])


def among_the_greatest(table: pa.Table, keys: Sequence[str], column: str, n: int) -> Any:
    """Whether each row's value is no less than the `n`-th greatest of its group.

    It compares numbers only, and leaves few rows to be sorted by texts.
    """
    digits = _digits(table, keys)
    values = one_array(table[column]).to_numpy(zero_copy_only=False)
    order = np.lexsort((-values, digits.numbers))
    numbers, values = digits.numbers[order], values[order]
    starts = _starts(numbers)
    sizes = np.diff(np.r_[starts, len(numbers)])
    least = values[starts + np.minimum(sizes, n) - 1]
    found = np.empty(len(numbers), bool)
    found[order] = ~(values < np.repeat(least, sizes))  # NaN is never less
    return pa.array(found)


def group_starts(ordered: pa.Table, keys: Sequence[str]) -> Codes:
    """The first row of each group, of a table in which the rows of a group are side by side."""
    return _starts(_digits(ordered, keys).numbers) if ordered.num_rows else np.empty(0, np.int64)


def _starts(numbers: Codes) -> Codes:
    return np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])


class _Digits:
    """Keys as the digits of one number a row; `values` gives the keys back."""

    def __init__(self, rows: int) -> None:
        self.numbers: Codes = np.zeros(rows, np.int64)
        self.count = 1  # the numbers are below it
        self._undo: list[Callable[[Codes, dict[str, Any]], Codes]] = []  # takes off the last digit, and gives its key

    def add(self, key: str, column: Any) -> None:
        """Append the digit of one more key."""
        codes, size, values = _coded(column)
        if size * self.count > _GREATEST_DIGIT**2:
            self.renumber()
        if size > 1:
            self.numbers *= size
            self.numbers += codes.astype(np.int64, copy=False)  # adding integers of two widths is slower
        self.count *= size

        def undo(numbers: Codes, found: dict[str, Any]) -> Codes:
            left, digit = np.divmod(numbers, size)
            found[key] = values(digit)
            return left

        self._undo.append(undo)

    def values(self, numbers: Codes) -> dict[str, Any]:
        """The keys of these numbers, texts encoded."""
        found: dict[str, Any] = {}
        for undo in reversed(self._undo):
            numbers = undo(numbers, found)
        return found

    def renumber(self) -> None:
        """Renumber the numbers that occur: there are no more of them than rows."""
        codes = pa.array(self.numbers).dictionary_encode()
        known = codes.dictionary.to_numpy()
        self.numbers, self.count = codes.indices.to_numpy().astype(np.int64), len(known)
        self._undo.append(lambda numbers, _: known[numbers])


def _digits(table: pa.Table, keys: Sequence[str]) -> _Digits:
    digits = _Digits(table.num_rows)
    for key in keys:
        digits.add(key, table[key])
    return digits


def _coded(column: Any) -> tuple[Any, int, Callable[[Codes], Any]]:
    """A key's codes (None if all rows have the same), how many there may be, and how codes become values again."""
    if pa.types.is_string(column.type) or _has_codes(column):
        return _looked_up(column)
    numbers = one_array(column).cast(pa.int64())
    least, greatest = pc.min_max(numbers).as_py().values()
    if numbers.null_count or greatest - least >= _GREATEST_DIGIT * MINUTE_US:
        return _looked_up(column)
    kind = column.type
    if least == greatest:
        return None, 1, lambda digit: pa.array(digit + least).cast(kind)
    codes, step = numbers.to_numpy() - least, 1
    if greatest - least >= MINUTE_US:
        minutes = codes // MINUTE_US
        if np.array_equal(minutes * MINUTE_US, codes):
            codes, step = minutes, MINUTE_US
    size = (greatest - least) // step + 1
    if size > _GREATEST_DIGIT:
        return _looked_up(column)
    return codes, size, lambda digit: pa.array(digit * step + least).cast(kind)


def _looked_up(column: Any) -> tuple[Any, int, Callable[[Codes], Any]]:
    """`_coded` by a dictionary, in which null comes last."""
    codes = one_array(column.dictionary_encode().unify_dictionaries())
    dictionary, indices = codes.dictionary, codes.indices
    nulls = indices.null_count > 0
    size = len(dictionary) + nulls
    is_text = pa.types.is_string(dictionary.type)

    def values(digit: Codes) -> Any:
        mask = digit == len(dictionary) if nulls else None
        found = pa.DictionaryArray.from_arrays(pa.array(digit.astype(np.int32), mask=mask), dictionary)
        return found if is_text else found.dictionary_decode()

    if size > 1 and nulls:
        indices = pc.fill_null(indices, pa.scalar(len(dictionary), indices.type))
    return indices.to_numpy() if size > 1 else None, size, values


def _indexed(table: pa.Table, digits: _Digits, aggregates: Sequence[Aggregate]) -> tuple[Codes, list[Any]] | None:
    """The numbers as indices into arrays; None if there are nulls or NaN: pyarrow leaves them out, numpy does not."""
    rows = np.bincount(digits.numbers, minlength=digits.count)
    taken = np.flatnonzero(rows)
    columns = []
    for name, merge in aggregates:
        column = one_array(table[name])
        if merge == "list":
            columns.append(_lists(digits.numbers, column))
            continue
        if column.null_count:
            return None
        if merge == "count":
            columns.append(pa.array(rows[taken]))
            continue
        values = column.to_numpy()
        if merge == "sum" and values.dtype == np.int64:
            merged = np.zeros(digits.count, np.int64)
            np.add.at(merged, digits.numbers, values)
        elif values.dtype != np.float64 or np.isnan(values).any():
            return None
        elif merge == "sum":
            merged = np.bincount(digits.numbers, values, minlength=digits.count)
        else:
            merged = np.full(digits.count, _EMPTY[merge])
            (np.minimum if merge == "min" else np.maximum).at(merged, digits.numbers, values)
        columns.append(pa.array(merged[taken]))
    return taken, columns


def _hashed(table: pa.Table, digits: _Digits, aggregates: Sequence[Aggregate]) -> tuple[Codes, list[Any]]:
    """The same through a hash table of pyarrow."""
    states = (
        table.append_column("", pa.array(digits.numbers)).group_by("", use_threads=False).aggregate(list(aggregates))
    )
    return states[""].to_numpy(), [states[f"{column}_{merge}"] for column, merge in aggregates]


def _lists(numbers: Codes, column: Any) -> Any:
    """The values of each group, in the order of the groups' numbers."""
    found = pa.table([pa.array(numbers), column], names=["", "of"]).group_by("", use_threads=False)
    lists = found.aggregate([("of", "list")])
    return one_array(lists["of_list"]).take(pa.array(np.argsort(lists[""].to_numpy())))


def _has_codes(column: Any) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def one_array(column: Any) -> Any:
    """The column without chunks."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
