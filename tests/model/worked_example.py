"""The worked example of docs/reference/functions.md, run as it stands there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from penstock.model.function import FUNCTIONS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "functions.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def example_definitions() -> Any:
    (text,) = blocks("yaml")
    return yaml.safe_load(text)


@contextmanager
def added_function() -> Iterator[dict[str, Any]]:
    """The example's function is in `FUNCTIONS`; gives what its code defines, the test included."""
    before = dict(FUNCTIONS)
    names: dict[str, Any] = {}
    try:
        for block in blocks("python"):
            exec(block, names)
        yield names
    finally:
        FUNCTIONS.clear()
        FUNCTIONS.update(before)
