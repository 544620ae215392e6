"""The error tree is drawn in one docstring, and the drawing is true."""

import inspect
import re

import pytest

from penstock import errors
from penstock.errors import ConfigError, PenstockError, UndeclaredMetric


def test_the_docstring_draws_every_error_under_its_parent() -> None:
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, PenstockError) and kind.__module__ == errors.__name__ and kind is not PenstockError
    }
    drawn: dict[str, str] = {}
    path = ["PenstockError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ]*)[├└]── (\w+)", line)
        if match:
            depth = len(match[1]) // 4 + 1
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1]
    assert drawn == real


def test_a_setting_that_makes_no_sense_is_also_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_an_undeclared_metric_reads_without_quotes() -> None:
    with pytest.raises(KeyError) as caught:
        raise UndeclaredMetric("penstock_x is not declared")
    assert str(caught.value) == "penstock_x is not declared"
