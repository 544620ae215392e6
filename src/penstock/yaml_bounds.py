"""YAML that does not explode: a few lines of aliases can stand for a billion values."""

from typing import Any

import yaml

_MAX_VALUES = 100_000  # of a file, each alias counted as what it stands for: a thousand times the longest that we know


class YamlExplodes(yaml.YAMLError):
    """More values than a file may have, or values that contain themselves."""


def compose(loader: yaml.SafeLoader) -> yaml.Node | None:
    """Returns the document's node; YAMLError if it is not YAML, or explodes."""
    try:
        node = loader.get_single_node()
        if node is not None:
            _size(node, {})
    except RecursionError:
        raise YamlExplodes("it is nested too deep") from None
    return node


def load_plain(text: str) -> Any:
    """Returns the document as plain values; YAMLError as `compose`."""
    loader = yaml.SafeLoader(text)
    try:
        node = compose(loader)
        return None if node is None else loader.construct_document(node)
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Returns how many values the node stands for. `known` has a None for nodes that are being counted."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise YamlExplodes("a value contains itself")
        return size
    known[id(node)] = None
    size = 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(part, known) for part in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(part, known) for pair in node.value for part in pair)
    if size > _MAX_VALUES:
        raise YamlExplodes(f"with its aliases it has more than {_MAX_VALUES} values")
    known[id(node)] = size
    return size
