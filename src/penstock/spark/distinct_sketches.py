"""Distinct counts in Spark: registers put together to the sketch that Spark's own functions read.

Only built-in expressions, so nothing leaves the JVM. The image is described in `penstock.model.distinct`; numbers
become bytes by way of their hexadecimal text, least byte first.
"""

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.distinct import FLAGS, HEADER

_LOW = 32  # registers below have a sum of their own


def spark_sketch_of(entries: Column, shift: int, lg_k: Column) -> Column:
    """The sketch (HLL_8) of an ascending array of `register << shift | rank`; of the same register the last counts.

    Arrays are paired with themselves, one place on: looking an element up inside of a lambda would compute the whole
    array again for every element.
    """
    paired = F.zip_with(entries, _from_second(entries), lambda entry, following: _last_of(entry, following, shift))
    return _let(F.array_compact(paired), lambda kept: _image(kept, shift, lg_k))


def _let(value: Column, body: Callable[[Column], Column]) -> Column:
    """`body` of a value that is computed once. Java compiles nothing of it, so that it does not burden its query."""
    return F.get(F.transform(F.array(value), body), F.lit(0))


def _image(kept: Column, shift: int, lg_k: Column) -> Column:
    before = F.concat(F.array(F.lit(-1).cast("bigint")), F.transform(kept, lambda entry: F.shiftright(entry, shift)))
    digits = F.array_join(F.zip_with(kept, before, lambda entry, last: _filled(entry, last, shift)), "")
    size = _power_of_two(lg_k)
    empty = size - F.size(kept)
    low = _shares(kept, shift, 0, _LOW, _LOW - 1) + empty * F.lit(1 << (_LOW - 1))
    return F.unhex(
        F.concat(
            F.lit(HEADER.hex()),
            _hex(lg_k, 1),
            F.lit("00" + FLAGS.hex() + "00" * 8),
            _double(low, _LOW - 1),
            _double(_shares(kept, shift, _LOW, 63, 62), 62),
            _hex(empty, 4),
            F.lit("00" * 4),
            F.rpad(digits, (2 * size).cast("int"), F.lit("0")),
        )
    )


def _from_second(entries: Column) -> Column:
    return F.slice(entries, 2, F.greatest(F.size(entries), F.lit(1)))


def _last_of(entry: Column, following: Column, shift: int) -> Column:
    """The entry if no other of its register follows, else null."""
    return F.when(following.isNull() | (F.shiftright(following, shift) != F.shiftright(entry, shift)), entry)


def _filled(entry: Column, last: Column, shift: int) -> Column:
    """A rank as two digits, behind the zeros of the registers since the last; null beyond the end."""
    gap = F.shiftright(entry, shift) - last - 1
    return F.concat(F.repeat(F.lit("00"), gap.cast("int")), F.get(_digits(), _rank(entry, shift).cast("int")))


def _digits() -> Column:
    return F.array(*(F.lit(f"{rank:02x}") for rank in range(64)))


def _rank(entry: Column, shift: int) -> Column:
    return entry.bitwiseAND(F.lit((1 << shift) - 1))


def _shares(kept: Column, shift: int, first: int, end: int, bits: int) -> Column:
    """The sum of 2**-rank over ranks from `first` to before `end`, times 2**bits: a whole number."""

    def add(total: Column, entry: Column) -> Column:
        rank = _rank(entry, shift)
        return total + F.when((rank >= first) & (rank < end), _power_of_two(F.lit(bits) - rank)).otherwise(F.lit(0))

    return F.aggregate(kept, F.lit(0).cast("bigint"), add)


def _power_of_two(exponent: Column) -> Column:
    return F.pow(F.lit(2.0), exponent).cast("bigint")


def _double(number: Column, bits: int) -> Column:
    """`number` times 2**-bits as the bytes of a double: exact, because it has fewer digits than a double holds."""
    digits = F.bin(number)
    exponent = F.length(digits) - 1 - bits + 1023
    fraction = F.rpad(F.substring(digits, 2, 64), 52, "0")
    text = F.conv(F.concat(F.lpad(F.bin(exponent.cast("bigint")), 12, "0"), fraction), 2, 16)
    return F.when(number == 0, F.lit("00" * 8)).otherwise(_least_first(F.lpad(text, 16, "0"), 8))


def _hex(number: Column, count: int) -> Column:
    return _least_first(F.lpad(F.hex(number.cast("bigint")), 2 * count, "0"), count)


def _least_first(digits: Column, count: int) -> Column:
    return F.concat(*(F.substring(digits, 2 * n + 1, 2) for n in reversed(range(count))))
