"""A YAML file as values with their lines. Safe YAML only, no duplicate keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError
from penstock.yaml_bounds import compose

_PLAIN = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


@dataclass(frozen=True, slots=True)
class LocatedConfigValue:
    """A value (of a mapping: its entries, of a list: its members, each located) and the line where it stands."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value without its lines."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        return [entry.plain() for entry in self.value] if isinstance(self.value, list) else self.value


def read_config_document(path: Path) -> LocatedConfigValue:
    """What the file holds; ConfigError names the file and the line."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: name a file that is there, or make one: penstock config init"
        ) from (error)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    return parse_config_document(text, str(path))


def parse_config_document(text: str, name: str) -> LocatedConfigValue:
    loader = yaml.SafeLoader(text)
    try:
        node = compose(loader)
        return LocatedConfigValue({}, 1) if node is None else _located(loader, node, name)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem}") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a date that is none, a number of thousands of digits
        raise ConfigError(f"{name}: not YAML: {error}") from error
    finally:
        loader.dispose()


def _located(loader: yaml.SafeLoader, node: yaml.Node, name: str) -> LocatedConfigValue:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConfigError(f"{name}:{line}: not YAML: {tag} is not allowed")
    if isinstance(node, yaml.SequenceNode):
        return LocatedConfigValue([_located(loader, one, name) for one in node.value], line)
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicate_keys(loader, node, name)
        loader.flatten_mapping(node)  # `<<: *other`
        entries: dict[str, LocatedConfigValue] = {}
        for key_node, value_node in node.value:
            found = _located(loader, value_node, name)
            # The key's line: a value may begin below it.
            entries[str(loader.construct_object(key_node))] = LocatedConfigValue(
                found.value, key_node.start_mark.line + 1
            )
        return LocatedConfigValue(entries, line)
    return LocatedConfigValue(loader.construct_object(node), line)


def _refuse_duplicate_keys(loader: yaml.SafeLoader, node: yaml.MappingNode, name: str) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}:{key_node.start_mark.line + 1}: a key must be a word")
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen and key != "<<":
            raise ConfigError(f"{name}:{line}: {key} is set twice, first in line {seen[key]}")
        seen[key] = line
