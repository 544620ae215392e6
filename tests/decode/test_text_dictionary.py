"""Texts by number: the arrays that chunks hold never change, whatever becomes of the numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.decode.text_dictionary import SeriesTextDictionary


def spelled(texts: SeriesTextDictionary, *numbers: int) -> list[str]:
    codes, column = texts.encoded(np.array(numbers, np.int32))
    return [column[int(code)].as_py() for code in codes]


def test_a_text_has_one_number_until_nobody_uses_it() -> None:
    texts = SeriesTextDictionary()
    first, again, other = texts.add("a"), texts.add("a"), texts.add("b")

    assert (first, len(texts)) == (again, 2)
    texts.release(first)
    assert spelled(texts, first, other) == ["a", "b"]
    texts.release(first)
    assert len(texts) == 1
    assert texts.add("c") == first


def test_an_array_that_was_given_out_keeps_its_texts_when_a_number_is_given_to_another() -> None:
    texts = SeriesTextDictionary()
    number = texts.add("a")
    for _ in range(3):  # until it is the array of all texts
        codes, column = texts.encoded(np.array([number], np.int32))
    texts.release(number)

    assert texts.add("b") == number
    assert column[int(codes[0])].as_py() == "a"
    assert spelled(texts, number) == ["b"]


def test_as_long_as_no_text_comes_or_goes_the_array_is_the_same() -> None:
    texts = SeriesTextDictionary()
    numbers = np.array([texts.add(text) for text in "abc"], np.int32)
    columns = [texts.encoded(numbers)[1] for _ in range(4)]

    assert columns[-1] is columns[-2]
    texts.add("a")
    assert texts.encoded(numbers)[1] is columns[-1]
    texts.add("new")
    assert texts.encoded(numbers)[1] is not columns[-1]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), max_size=60))
def test_whatever_comes_and_goes_numbers_mean_their_texts(steps: list[tuple[bool, str]]) -> None:
    texts = SeriesTextDictionary()
    held: list[tuple[int, str]] = []
    for adds, text in steps:
        if adds or not held:
            held.append((texts.add(text), text))
        else:
            texts.release(held.pop(0)[0])
        assert spelled(texts, *(number for number, _ in held)) == [text for _, text in held]
    assert len(texts) == len({text for _, text in held})
