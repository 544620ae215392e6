"""Texts by number: each is kept once, and travels as a code into an Arrow array that many chunks share."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Codes = NDArray[np.int32]

_REBUILD_AFTER = 2  # times as many codes as there are texts: then it pays to build the array of all texts anew


class SeriesTextDictionary:
    """Texts with a count of their uses. The number of a text without uses is given to another one.

    Threads: one at a time. Arrays that `encoded` returned never change.
    """

    def __init__(self) -> None:
        self._texts: list[str | None] = []
        self._uses: list[int] = []
        self._number: dict[str, int] = {}
        self._free: list[int] = []
        self._column: Any = None  # all texts; None after a text has come or gone
        self._encoded = 0  # codes since then

    def __len__(self) -> int:
        return len(self._number)

    def __getitem__(self, number: int) -> str:
        text = self._texts[number]
        assert text is not None
        return text

    def uses(self, text: str) -> int:
        """Returns how many uses that text has."""
        number = self._number.get(text)
        return 0 if number is None else self._uses[number]

    def most_used(self) -> str:
        """Returns the text with the most uses; empty if there is none."""
        return max(self._number, key=self.uses, default="")

    def add(self, text: str) -> int:
        """Returns the number of that text, with one more use."""
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
        self._column, self._encoded = None, 0
        return number

    def release(self, number: int) -> None:
        """Ends one use."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._number[self[number]]
            self._texts[number] = None
            self._free.append(number)
            self._column, self._encoded = None, 0

    def encoded(self, numbers: Codes) -> tuple[Codes, Any]:
        """Returns codes and the Arrow array that they point into: the same array as long as no text comes or goes.

        While texts keep coming and going, the array holds only those of `numbers`.
        """
        if self._column is None:
            self._encoded += len(numbers)
            if self._encoded < _REBUILD_AFTER * len(self._texts):
                is_used = np.zeros(len(self._texts), bool)
                is_used[numbers] = True
                used = np.flatnonzero(is_used)
                code = np.zeros(len(self._texts), np.int32)
                code[used] = np.arange(len(used))
                return code[numbers], pa.array([self._texts[number] for number in used.tolist()], pa.string())
            self._column = pa.array(self._texts, pa.string())
        return numbers, self._column
