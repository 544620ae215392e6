"""The configuration as text: effective values with their origins, a commented template, a list of all keys."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.config.load import GivenValue, LoadedConfig
from penstock.config.schema import NAME, ConfigKey, ConfigSection, KeyKind, KeyPath, schema_of
from penstock.secret_text import HIDDEN, is_secret_name, redacted
from penstock.units import exact_bytes, exact_duration, parse_bytes, parse_duration


def config_as_yaml(loaded: LoadedConfig[Any], *, with_origin: bool = False, with_secrets: bool = False) -> str:
    """All effective values as a file that loads to the same configuration. Secrets are masked."""
    masking = (lambda _, value: value) if with_secrets else mask_config_secrets
    lines = list(_lines(schema_of(type(loaded.config)), (), loaded.config, loaded.given, masking))
    if not with_origin:
        return "\n".join(text for text, _ in lines) + "\n"
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines) + "\n"


def _lines(
    section: ConfigSection,
    path: KeyPath,
    config: Any,
    given: Mapping[KeyPath, GivenValue],
    masking: Callable[[ConfigKey, Any], Any],
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for word, key in section.keys.items():
        value = getattr(config, word)
        origin = given[(*path, word)].origin if (*path, word) in given else "default"
        yield f"{indent}{word}: {config_value_as_yaml(key, masking(key, value))}", origin
    for word, inner in section.sections.items():
        value = getattr(config, word)
        if value is None or (inner.is_named and not value):
            yield f"{indent}{word}: {'{}' if inner.is_named else 'null'}", "default"
        elif inner.is_named:
            yield f"{indent}{word}:", ""
            for name, one in value.items():
                yield f"{indent}  {name}:", ""
                yield from _lines(inner, (*path, word, name), one, given, masking)
        else:
            yield f"{indent}{word}:", ""
            yield from _lines(inner, (*path, word), value, given, masking)


def config_entries(loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, str]]:
    """Every key with its name, its value for JSON, and its origin."""
    yield from _entries(schema_of(type(loaded.config)), (), loaded.config, loaded.given)


def _entries(
    section: ConfigSection, path: KeyPath, config: Any, given: Mapping[KeyPath, GivenValue]
) -> Iterator[tuple[str, Any, str]]:
    for word, key in section.keys.items():
        here = (*path, word)
        value = mask_config_secrets(key, getattr(config, word))
        plain = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
        yield ".".join(here), plain, given[here].origin if here in given else "default"
    for word, inner in section.sections.items():
        value = getattr(config, word)
        for name, one in value.items() if inner.is_named else [] if value is None else [("", value)]:
            yield from _entries(inner, (*path, word, *([name] if name else [])), one, given)


def config_value_as_yaml(key: ConfigKey, value: Any) -> str:
    """A value as YAML on one line, sizes and durations with their units."""
    if value is None:
        return "null"
    if value is MISSING:
        return ""
    if isinstance(value, Enum):
        value = value.value
    if key.kind is KeyKind.SIZE:
        return exact_bytes(parse_bytes(value, key.name))
    if key.kind is KeyKind.DURATION:
        return exact_duration(parse_duration(value, key.name))
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and _is_plain(value):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _is_plain(text: str) -> bool:
    """Whether YAML reads it back as the same text without quotes."""
    import yaml

    try:
        return bool(text) and "\n" not in text and yaml.safe_load(f"x: {text}") == {"x": text}
    except yaml.YAMLError:
        return False


def mask_config_secrets(key: ConfigKey, value: Any) -> Any:
    """`value` without secrets: passwords in addresses, the values of headers, and settings of Spark by their names."""
    if key.kind is KeyKind.TABLE:
        is_header = key.path[-1] == "headers"
        pairs = (value or {}).items()
        return {name: HIDDEN if is_header or is_secret_name(name) else redacted(text) for name, text in pairs}
    return redacted(value) if isinstance(value, str) else value


def config_key_list(kind: type[Any]) -> Iterator[tuple[ConfigKey, str]]:
    """Every key, in the order of the file, with its default as YAML."""
    for key in schema_of(kind).walk():
        yield key, config_value_as_yaml(key, key.default)


def config_template(kind: type[Any]) -> str:
    """A file with every key and its default, all of them commented out."""
    out = [
        "# Every key with its default. Take the `#` away from what you change, and from the sections above it.",
        "# An environment variable or a flag wins over this file: see docs/reference/configuration.md.",
        "",
    ]
    out += _template_lines(schema_of(kind), 0)
    return "\n".join(out) + "\n"


def _template_lines(section: ConfigSection, depth: int) -> Iterator[str]:
    indent = "#" + "  " * depth
    for word, key in section.keys.items():
        if key.doc:
            yield f"{indent} # {key.doc}"
        if key.choices:
            yield f"{indent} # {key.describes}"
        has_none = "# " if key.default is MISSING else ""
        yield f"{indent} {has_none}{word}: {config_value_as_yaml(key, key.default)}"
    for word, inner in section.sections.items():
        if not depth:
            yield "#"
        yield f"{indent} {word}:  # {inner.doc.splitlines()[0]}"
        if inner.is_named:
            yield f"{indent}   {NAME.lower()}: {{}}  # each with the keys of {inner.path[0].removesuffix('s')}"
        else:
            yield from _template_lines(inner, depth + 1)
