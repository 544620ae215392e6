from hypothesis import given
from hypothesis import strategies as st

from penstock.protobuf import (
    encode_varint,
    field_bytes,
    field_double,
    field_varint,
    fields,
    get_bytes,
    get_varint,
    halve,
    read_varint,
)


@given(st.integers(0, 2**64 - 1))
def test_a_varint_comes_back(value: int) -> None:
    encoded = encode_varint(value)
    assert read_varint(encoded, 0) == (value, len(encoded))


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_without_gaps_or_a_value_error(message: bytes) -> None:
    try:
        ends = [end for _, _, end in fields(message)]
    except ValueError:
        return
    assert ends == sorted(ends)
    assert (ends or [0])[-1] == len(message)


def test_a_field_is_its_tag_and_where_its_content_is_and_a_varint_its_value() -> None:
    message = field_varint(1, 300) + field_bytes(2, b"text") + field_double(3, 0.5)
    (one, value, _), (two, start, end), (three, _, last) = fields(message)
    assert (one, value) == (1 << 3, 300)
    assert (two, message[start:end]) == (2 << 3 | 2, b"text")
    assert (three, last) == (3 << 3 | 1, len(message))


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=20))
def test_halves_hold_every_repeated_field_once(values: list[bytes]) -> None:
    message = b"".join(field_bytes(1, value) for value in values)
    halves = halve(message, [(1,)])
    assert halves is not None
    assert b"".join(halves) == message
    assert all(halves)


def test_a_batch_of_very_many_series_is_cut_as_fast_as_it_is_read() -> None:
    message = field_bytes(3, b"all") + field_bytes(1, b"series") * 200_000  # looking each up among the others: minutes
    halves = halve(message, [(1,)])
    assert halves == (field_bytes(3, b"all") + field_bytes(1, b"series") * 100_000,) * 2


def test_the_last_of_several_fields_counts() -> None:
    message = field_bytes(2, b"a") + field_bytes(2, b"b")
    assert get_bytes(message, 2) == b"b"
    assert get_bytes(message, 3) is None
    assert get_varint(message, 2) == 0
