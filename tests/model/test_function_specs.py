"""Each function is defined once: no engine compares names, and the documented example of adding one works."""

import ast
from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.model.definition_file import parse_definitions
from penstock.model.function import FUNCTIONS, Function
from tests.model.worked_example import PAGE, added_function, example_definitions

SRC = Path(penstock.__file__).parent
ENGINES = [
    path
    for pattern in ("model/*.py", "aggregate/*.py", "tables/*.py", "spark/*.py", "cli/query*.py")
    for path in sorted(SRC.glob(pattern))
]
PLAIN_WORDS = {"count", "sum", "min", "max"}  # also the names of states


def test_the_documented_example_of_a_new_function_works_from_its_definition_to_its_value() -> None:
    with added_function() as example:
        (test,) = (value for name, value in example.items() if name.startswith("test_"))
        test()
        (definition,) = parse_definitions(example_definitions()).metrics
        assert definition.function == Function("excess", (0.3,))
        assert not definition.function.spec.is_ranked
        with pytest.raises(ConfigError, match="function excess: needs a limit, got "):
            Function("excess")


def test_the_page_lists_every_function() -> None:
    listed = [line.split("`")[1].partition("(")[0] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert listed[: len(FUNCTIONS)] == list(FUNCTIONS)


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: str(path.relative_to(SRC)))
def test_no_engine_compares_names_of_functions(path: Path) -> None:
    compared = [
        constant.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Compare, ast.MatchValue))
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    ]
    assert {text.partition("(")[0] for text in compared} & (FUNCTIONS.keys() - PLAIN_WORDS) == set()
