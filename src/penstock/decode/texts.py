"""Texts by number: each is kept once, and travels as a code into an Arrow array that many chunks share."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Codes = NDArray[np.int32]

_PATIENCE = 2  # times as many codes as there are texts, before it pays to make the array of all of them anew


class Texts:
    """Texts that somebody uses. The number of one that nobody uses any more is given to another.

    Threads: one at a time. Arrays that `encoded` gave stay as they are, whatever comes after.
    """

    def __init__(self) -> None:
        self._texts: list[str | None] = []
        self._uses: list[int] = []
        self._number: dict[str, int] = {}
        self._free: list[int] = []
        self._column: Any = None  # all texts; None once there are others
        self._asked = 0  # codes since then

    def __len__(self) -> int:
        return len(self._number)

    def __getitem__(self, number: int) -> str:
        text = self._texts[number]
        assert text is not None
        return text

    def add(self, text: str) -> int:
        """The number of that text, for one more that uses it."""
        number = self._number.get(text)
        if number is not None:
            self._uses[number] += 1
            return number
        if self._free:
            number = self._free.pop()
            self._texts[number], self._uses[number] = text, 1
        else:
            number = len(self._texts)
            self._texts.append(text)
            self._uses.append(1)
        self._number[text] = number
        self._column, self._asked = None, 0
        return number

    def release(self, number: int) -> None:
        """One less uses it."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._number[self[number]]
            self._texts[number] = None
            self._free.append(number)
            self._column, self._asked = None, 0

    def encoded(self, numbers: Codes) -> tuple[Codes, Any]:
        """Codes and the Arrow array that they point into; the same array as long as no text comes or goes.

        While some do all the time, one of only those that are asked for.
        """
        if self._column is None:
            self._asked += len(numbers)
            if self._asked < _PATIENCE * len(self._texts):
                is_used = np.zeros(len(self._texts), bool)
                is_used[numbers] = True
                used = np.flatnonzero(is_used)
                code = np.zeros(len(self._texts), np.int32)
                code[used] = np.arange(len(used))
                return code[numbers], pa.array([self._texts[number] for number in used.tolist()], pa.string())
            self._column = pa.array(self._texts, pa.string())
        return numbers, self._column
