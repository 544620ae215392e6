"""The keys of the configuration classes, with their kinds, flags and environment variables.

    class QueueConfig:                    schema_of(ServiceConfig)
        max_bytes: int | str = "1Gi"  ──►   Key("exporter.queue.max_bytes", SIZE, default "1Gi",
        'Most bytes.'                         --exporter-queue-max-bytes, PENSTOCK_EXPORTER_QUEUE_MAX_BYTES)

The annotation says the kind: `int | str` is a size, `float | str` a duration, a dataclass a section, a mapping of
dataclasses a named section.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.errors import ConfigError
from penstock.secret_text import redacted
from penstock.units import parse_bytes, parse_duration

PREFIX = "PENSTOCK"
NAME = "NAME"  # stands for the name that a user gives a section, as in `exporters.NAME`
_YES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# Of the short flags, those that are not spelled like their key.
_SHORT_FLAGS = {
    "meta_sync_interval": "--queue-meta-sync",
    "memory_limit_ratio": "--memory-limit-ratio",
    "pipeline_split.preparer_count": "--queue-pipeline-split-preparers",
    "pipeline_split.sender_count": "--queue-pipeline-split-senders",
    "adaptive_workers.min_workers": "--queue-adaptive-workers-min",
    "adaptive_workers.max_workers": "--queue-adaptive-workers-max",
}

KeyPath = tuple[str, ...]


def flag_of_key(path: KeyPath) -> str:
    return "--" + "-".join(path).replace("_", "-")


def variable_of_key(path: KeyPath) -> str:
    return "_".join((PREFIX, *path)).upper()


class KeyKind(Enum):
    """The kind of a value, with its name in `--help` and in the reference."""

    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    TEXT = "text"
    PATH = "a path"
    SIZE = "a size, as 512Mi"
    DURATION = "a duration, as 30s"
    CHOICE = "one of"
    TEXTS = "a list of texts"
    TABLE = "a mapping of texts"


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One setting."""

    path: KeyPath
    kind: KeyKind
    default: Any
    doc: str
    is_optional: bool = False
    choices: tuple[str, ...] = ()
    is_beside_file: bool = False  # a relative path in a file is taken from that file's folder, not from `data_dir`
    replaced_by: str | None = None  # of an old spelling: the key beside it that says the same

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return flag_of_key(self.path)

    @property
    def variable(self) -> str:
        return variable_of_key(self.path)

    @property
    def describes(self) -> str:
        """Its kind in words."""
        return f"one of {', '.join(self.choices)}" if self.kind is KeyKind.CHOICE else self.kind.value

    @property
    def short_flag(self) -> str | None:
        """The flag that the queue's users know, for keys of `exporter.queue`: `--queue-max-bytes`."""
        if self.path[:2] != ("exporter", "queue"):
            return None
        own = ".".join(self.path[2:])
        return _SHORT_FLAGS.get(own) or f"--queue-{own}".replace(".", "-").replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag that sets it."""
        return (self.short_flag, self.flag) if self.short_flag else (self.flag,)

    def checked(self, value: Any) -> Any:
        """The value of a file, converted to this kind; ConfigError says what is expected."""
        name = self.name
        if value is None and (self.is_optional or self.default is None):
            return None
        match self.kind:
            case KeyKind.BOOL:
                fits = isinstance(value, bool)
            case KeyKind.INT:
                fits = isinstance(value, int) and not isinstance(value, bool)
            case KeyKind.FLOAT:
                fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            case KeyKind.SIZE:
                parse_bytes(value, name)
                fits = True
            case KeyKind.DURATION:
                parse_duration(value, name)
                fits = True
            case KeyKind.CHOICE:
                fits = value in self.choices
            case KeyKind.TEXTS:
                value = [value] if isinstance(value, str) else value
                fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
                value = tuple(value) if fits else value
            case KeyKind.TABLE:
                fits = isinstance(value, dict) and all(isinstance(one, (str, int, float)) for one in value.values())
                value = {str(one): _as_text(text) for one, text in value.items()} if fits else value
            case _:
                fits = isinstance(value, str)
        if not fits:
            raise ConfigError(f"must be {self.describes}, got {self._shown(value)}", field=name)
        return value

    def _shown(self, value: Any) -> str:
        """For a message: what stands where headers and the like belong may be secret."""
        return f"a {type(value).__name__}" if self.kind is KeyKind.TABLE else redacted(repr(value))

    def parsed(self, text: str) -> Any:
        """The value that a flag or an environment variable gives as text."""
        name = self.name
        if text == "" and (self.is_optional or self.default is None):
            return None
        match self.kind:
            case KeyKind.BOOL:
                return self.checked(_YES.get(text.lower(), text))
            case KeyKind.INT | KeyKind.FLOAT:
                try:
                    return int(text) if self.kind is KeyKind.INT else float(text)
                except ValueError:
                    raise ConfigError(f"must be {self.kind.value}, got {text!r}", field=name) from None
            case KeyKind.TEXTS:
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case KeyKind.TABLE:
                pairs = [part.partition("=") for part in text.split(",") if part.strip()]
                if not all(found for _, found, _ in pairs):
                    raise ConfigError("must be KEY=VALUE,KEY=VALUE, got a part without =", field=name)
                return {key.strip(): value.strip() for key, _, value in pairs}
        return self.checked(text)


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """A group of settings: what one configuration class holds."""

    path: KeyPath
    kind: type[Any]
    doc: str
    keys: Mapping[str, ConfigKey]
    old_keys: Mapping[str, ConfigKey]  # old spellings: still taken, and listed nowhere
    sections: Mapping[str, "ConfigSection"]
    is_optional: bool = False  # None unless one of its keys is set
    is_named: bool = False  # one for each name that the user gives

    @property
    def refused(self) -> Mapping[str, str]:
        """Keys that similar sections have and this one refuses, each with a remedy."""
        words: Mapping[str, str] = getattr(self.kind, "REFUSED", {})
        return words

    def walk_refused(self) -> Iterator[tuple[KeyPath, str]]:
        """Every refused key or section in it and below, with its remedy."""
        for word, remedy in self.refused.items():
            yield (*self.path, word), remedy
        for section in self.sections.values():
            yield from section.walk_refused()

    def walk(self) -> Iterator[ConfigKey]:
        """Every key in it and below."""
        yield from self.keys.values()
        for section in self.sections.values():
            yield from section.walk()

    def walk_old(self) -> Iterator[ConfigKey]:
        """Every old spelling in it and below."""
        yield from self.old_keys.values()
        for section in self.sections.values():
            yield from section.walk_old()


def schema_of(kind: type[Any], path: KeyPath = ()) -> ConfigSection:
    """The keys and sections of a configuration class; `path` is its place in the tree."""
    if (kind, path) not in _read:
        _read[(kind, path)] = _schema(kind, path)
    return _read[(kind, path)]


_read: dict[tuple[type[Any], KeyPath], ConfigSection] = {}


def _schema(kind: type[Any], path: KeyPath) -> ConfigSection:
    hints = get_type_hints(kind)
    keys: dict[str, ConfigKey] = {}
    old_keys: dict[str, ConfigKey] = {}
    sections: dict[str, ConfigSection] = {}
    docs = config_field_docs(kind)
    for field in fields(kind):
        if not field.metadata.get("is_key", True):
            continue
        here = (*path, field.name)
        plain, is_optional = _without_none(hints[field.name])
        doc = docs.get(field.name, "")
        if is_dataclass(plain):
            found = schema_of(plain, here)  # type: ignore[arg-type]  # a class, never an instance
            sections[field.name] = _with_context(found, doc, is_optional=is_optional)
        elif get_origin(plain) in (Mapping, dict) and is_dataclass(get_args(plain)[1]):
            sections[field.name] = _with_context(schema_of(get_args(plain)[1], (*here, NAME)), doc, is_named=True)
        else:
            value_kind, choices = _kind_of(plain, ".".join(here))
            default = field.default if field.default_factory is MISSING else field.default_factory()
            is_beside_file = field.metadata.get("is_beside_file", False)
            replaced_by = field.metadata.get("replaced_by")
            key = ConfigKey(here, value_kind, default, doc, is_optional, choices, is_beside_file, replaced_by)
            (old_keys if replaced_by else keys)[field.name] = key
    return ConfigSection(path, kind, inspect.cleandoc(kind.__doc__ or ""), keys, old_keys, sections)


def _with_context(
    section: ConfigSection, doc: str, *, is_optional: bool = False, is_named: bool = False
) -> ConfigSection:
    return replace(section, doc=doc or section.doc, is_optional=is_optional, is_named=is_named)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        if len(parts) < len(get_args(hint)):
            return (parts[0] if len(parts) == 1 else Union[tuple(parts)]), True  # noqa: UP007 - built from parts
    return hint, False


def _kind_of(hint: Any, name: str) -> tuple[KeyKind, tuple[str, ...]]:
    parts = set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}
    if get_origin(hint) is Literal:
        return KeyKind.CHOICE, get_args(hint)
    for part in parts:  # beside an enum may stand the texts of its members
        if isinstance(part, type) and issubclass(part, Enum):
            return KeyKind.CHOICE, tuple(member.value for member in part)
    if Path in parts:
        return KeyKind.PATH, ()
    if get_origin(hint) is tuple:
        return KeyKind.TEXTS, ()
    if get_origin(hint) in (Mapping, dict):
        return KeyKind.TABLE, ()
    for kinds, kind in _KINDS:
        if parts == kinds:
            return kind, ()
    raise TypeError(f"{name} is declared as {hint}, which no configuration file can hold")


_KINDS: tuple[tuple[set[type], KeyKind], ...] = (
    ({bool}, KeyKind.BOOL),
    ({int}, KeyKind.INT),
    ({float}, KeyKind.FLOAT),
    ({str}, KeyKind.TEXT),
    ({int, str}, KeyKind.SIZE),
    ({float, str}, KeyKind.DURATION),
)


def config_field_docs(kind: type[Any]) -> dict[str, str]:
    """The text behind each field of a class, as editors show it; empty where the source cannot be had."""
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        statements = getattr(body, "body", [])
        for field, text in pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
