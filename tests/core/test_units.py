"""Sizes and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.units import exact_bytes, exact_duration, format_bytes, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0), (4096, 4096), ("4096", 4096), ("512Mi", 512 * 2**20), ("256Ki", 2**18), ("1Gi", 2**30), ("1gib", 2**30),
        ("10MB", 10**7), ("1.5Ki", 1536), (" 2 Ti ", 2**41), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(written: int | str, size: int) -> None:
    assert parse_bytes(written, "x") == size


@pytest.mark.parametrize("nonsense", [-1, "", "Mi", "1.5", "1.5b", "12 apples", "-5Mi", True, 1.5, None])
def test_a_size_that_makes_no_sense_is_refused_with_field_and_value(nonsense: object) -> None:
    with pytest.raises(ConfigError, match=r"queue\.max_bytes") as refused:
        parse_bytes(nonsense, "queue.max_bytes")  # type: ignore[arg-type]
    assert str(nonsense) in str(refused.value)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        ("0.5", 0.5),
        (" 30 ", 30.0),
        ("30s", 30.0),
        ("5m", 300.0),
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("2h", 7200.0),
        ("1d", 86400.0),
    ],
)
def test_durations_are_read_as_people_write_them(written: float | str, seconds: float) -> None:
    assert parse_duration(written, "x") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "nonsense", [-1, "-1", "", ".", "1.", "1e3", "5 6", "s", "1x", "5m later", float("nan"), float("inf"), True, None]
)
def test_a_duration_that_makes_no_sense_is_refused_with_field_and_value(nonsense: object) -> None:
    with pytest.raises(ConfigError, match=r"reset_timeout") as refused:
        parse_duration(nonsense, "reset_timeout")  # type: ignore[arg-type]
    assert str(nonsense) in str(refused.value)


@given(st.integers(0, 2**50), st.sampled_from(["", "Ki", "Mi", "Gi", "k", "MB"]))
def test_a_whole_number_with_a_unit_loses_no_byte(number: int, unit: str) -> None:
    factor = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "MB": 10**6}[unit]
    assert parse_bytes(f"{number}{unit}", "x") == number * factor


def test_sizes_are_shown_with_the_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 2**30, 3 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 GiB", "3.0 TiB",
    ]  # fmt: skip


@given(st.integers(0, 2**60))
def test_a_size_as_short_text_is_read_back_as_the_same(size: int) -> None:
    assert parse_bytes(exact_bytes(size), "x") == size


def test_a_size_is_written_in_the_unit_that_makes_it_short() -> None:
    assert [exact_bytes(size) for size in (2**30, 256 * 10**6, 2**20 + 1)] == ["1Gi", "256MB", "1048577"]


@given(st.integers(0, 10**9))
def test_a_duration_as_short_text_is_read_back_as_the_same(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(exact_duration(seconds), "x") == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.5, "500ms"), (90.0, "90s"), (300.0, "5m"), (604800.0, "7d"), (1e-7, "0.0000001s")],
)
def test_durations_are_written_as_people_would(seconds: float, text: str) -> None:
    assert exact_duration(seconds) == text
