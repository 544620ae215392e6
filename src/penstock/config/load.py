"""Reads file, environment and flags into one checked configuration. Each value keeps its origin.

    flag  >  environment variable  >  file  >  default

A later layer replaces single keys of an earlier one, never a whole section. All problems are found before any of them
is reported.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from penstock.config.schema import (
    NAME,
    PREFIX,
    ConfigKey,
    ConfigSection,
    KeyPath,
    flag_of_key,
    schema_of,
    variable_of_key,
)
from penstock.config.yaml_document import LocatedConfigValue, parse_config_document, read_config_document
from penstock.errors import ConfigError

T = TypeVar("T")
VALID_NAME = "a lower-case letter, then letters and digits"
# Variables of ours that set no key of the file.
OTHER_VARIABLES = {f"{PREFIX}_{name}" for name in ("CONFIG", "TABLES", "SEGMENTS", "MASTER", "ARCHIVE")}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value and where it was set: `penstock.yaml:12`, `PENSTOCK_ADMIN_LISTEN` or `--admin-listen`."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[T]):
    """A configuration, the origin of each value that was set, and warnings."""

    config: T
    given: Mapping[KeyPath, GivenValue]
    warnings: tuple[str, ...] = ()


def load(
    kind: type[T],
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    text: str | None = None,
    path: KeyPath = (),
    beneath: Mapping[KeyPath, GivenValue] | None = None,
    aliases: Mapping[str, KeyPath] | None = None,
) -> LoadedConfig[T]:
    """Read a configuration of class `kind`. ConfigError lists every problem with its key, value, bound and place.

    `environ`: variables by name; only `PENSTOCK_…` count. `flags`: texts by flag, as `--admin-listen`.
    `text`: the content of the file, in place of reading it.
    `path`: the place of the class in the tree. `beneath`: values of an earlier load, which any other origin overrides.
    `aliases`: further flags, each with the key that it sets.
    """
    schema = schema_of(kind, path)
    problems: list[str] = []
    given: dict[KeyPath, GivenValue] = dict(beneath or {})
    if file is not None or text is not None:
        name = str(file or "configuration")
        document = (
            read_config_document(file) if text is None and file is not None else parse_config_document(text or "", name)
        )
        values = dict(_values_of_document(schema, document, name, problems))
        _add_layer(given, schema, values.items() if file is None else _beside_file(schema, values, file))
    warnings: list[str] = []
    _add_layer(given, schema, _values_of_variables(schema, environ or {}, problems, warnings))
    _add_layer(given, schema, _values_of_flags(schema, flags or {}, aliases or {}, problems))
    config = _build(schema, path, given, problems)
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    for key in schema.walk_old():
        if key.path in given:
            now = ".".join((*key.path[:-1], str(key.replaced_by)))
            warnings.append(f"{given[key.path].origin}: {key.name} is an old spelling, write {now}: {key.doc}")
    return LoadedConfig(config, given, tuple(warnings))


# -- layers ----------------------------------------------------------------------------------------------------------


def _add_layer(
    given: dict[KeyPath, GivenValue], schema: ConfigSection, layer: Iterable[tuple[KeyPath, GivenValue]]
) -> None:
    """Let the layer's values win, over old spellings of the same setting, too."""
    old = list(schema.walk_old())
    for path, value in layer:
        for key in old:
            if path == (*key.path[:-1], key.replaced_by):
                given.pop(key.path, None)
        given[path] = value


def _values_of_document(
    section: ConfigSection, document: LocatedConfigValue, file: str, problems: list[str], path: KeyPath = ()
) -> Iterator[tuple[KeyPath, GivenValue]]:
    """Every key that the file sets."""
    if document.value is None:  # `exporter:` and nothing below it
        return
    if not isinstance(document.value, dict):
        where = ".".join(path) or "the file"
        problems.append(f"{file}:{document.line}: {where} must be a mapping of keys, got {document.plain()!r}")
        return
    for word, entry in document.value.items():
        here, origin = (*path, word), f"{file}:{entry.line}"
        if key := section.keys.get(word) or section.old_keys.get(word):
            try:
                yield here, GivenValue(replace(key, path=here).checked(entry.plain()), origin)
            except ConfigError as error:
                problems.append(f"{origin}: {error}")
        elif word in section.refused:
            problems.append(f"{origin}: {'.'.join(here)} has no effect here: {section.refused[word]}")
        elif word not in section.sections:
            problems.append(
                f"{origin}: {describe_unknown_key('.'.join(here), word, [*section.keys, *section.sections])}"
            )
        elif section.sections[word].is_named:
            yield from _values_of_named_section(section.sections[word], entry, file, problems, here)
        else:
            yield from _values_of_document(section.sections[word], entry, file, problems, here)


def _beside_file(
    schema: ConfigSection, values: Mapping[KeyPath, GivenValue], file: Path
) -> Iterator[tuple[KeyPath, GivenValue]]:
    """The values, with relative paths of keys that say so taken from the folder of the file."""
    paths = {key.path for key in schema.walk() if key.is_beside_file}
    for path, one in values.items():
        is_beside = path in paths and one.value is not None
        yield path, replace(one, value=str(file.absolute().parent / one.value)) if is_beside else one


def _values_of_named_section(
    section: ConfigSection, document: LocatedConfigValue, file: str, problems: list[str], path: KeyPath
) -> Iterator[tuple[KeyPath, GivenValue]]:
    if document.value is None:
        return
    if not isinstance(document.value, dict):
        problems.append(
            f"{file}:{document.line}: {'.'.join(path)} must be a mapping of names, got {document.plain()!r}"
        )
        return
    for name, entry in document.value.items():
        if not is_config_section_name(name):
            problems.append(f"{file}:{entry.line}: {'.'.join(path)}.{name}: a name must be {VALID_NAME}")
            continue
        yield (*path, name), GivenValue(None, f"{file}:{entry.line}")  # the section exists, even if it sets no key
        yield from _values_of_document(section, entry, file, problems, (*path, name))


def _values_of_variables(
    schema: ConfigSection, environ: Mapping[str, str], problems: list[str], warnings: list[str]
) -> Iterator[tuple[KeyPath, GivenValue]]:
    known = {key.variable: key for key in (*schema.walk(), *schema.walk_old())}
    refused = {variable_of_key(path): remedy for path, remedy in schema.walk_refused()}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(f"{PREFIX}_") or variable in OTHER_VARIABLES:
            continue
        if remedy := _remedy(variable, refused, "_"):
            problems.append(f"{variable} has no effect: {remedy}")
            continue
        # An unknown one is no error: Kubernetes sets PENSTOCK_SERVICE_HOST and others for a service of our name.
        yield from _values_of_text(variable, text, known, "_", problems, warnings, schema)


def _values_of_flags(
    schema: ConfigSection, flags: Mapping[str, str], aliases: Mapping[str, KeyPath], problems: list[str]
) -> Iterator[tuple[KeyPath, GivenValue]]:
    by_path = {key.path: key for key in (*schema.walk(), *schema.walk_old())}
    known = {flag: key for key in by_path.values() for flag in key.flags}
    known |= {flag: by_path[path] for flag, path in aliases.items()}
    refused = {flag_of_key(path): remedy for path, remedy in schema.walk_refused()}
    for flag, text in flags.items():
        if remedy := _remedy(flag, refused, "-"):
            problems.append(f"{flag} has no effect: {remedy}")
        else:
            yield from _values_of_text(flag, text, known, "-", problems, problems, schema)


def _remedy(spelled: str, refused: Mapping[str, str], between: str) -> str | None:
    """The remedy for a refused key, or for a key in a refused section; None if it is not refused."""
    for name, remedy in refused.items():
        if spelled == name or spelled.startswith(name + between):
            return remedy
    return None


def _values_of_text(
    spelled: str,
    text: str,
    known: Mapping[str, ConfigKey],
    between: str,
    problems: list[str],
    unknowns: list[str],
    schema: ConfigSection,
) -> Iterator[tuple[KeyPath, GivenValue]]:
    """The values that a flag or a variable sets."""
    key = known.get(spelled) or _named_key(spelled, known, between)
    if key is None:
        unknowns.append(describe_unknown_key(spelled, spelled, list(known), f"{PREFIX}_" if between == "_" else "--"))
        return
    for end in range(1, len(key.path)):
        if _is_named_at(schema, key.path[:end]):
            yield key.path[: end + 1], GivenValue(None, spelled)
    try:
        yield key.path, GivenValue(key.parsed(text), spelled)
    except ConfigError as error:
        problems.append(f"{spelled}: {error}")


def _named_key(spelled: str, known: Mapping[str, ConfigKey], between: str) -> ConfigKey | None:
    """`--exporters-backup-url`, of which only `--exporters-NAME-url` is known; a name has no separator in it."""
    for pattern, key in known.items():
        if NAME not in key.path:
            continue
        before, _, after = pattern.partition(f"{between}{NAME}{between}")
        if spelled.startswith(before + between) and spelled.endswith(between + after):
            name = spelled[len(before) + 1 : len(spelled) - len(after) - 1].lower()
            if is_config_section_name(name):
                return replace(key, path=tuple(name if word == NAME else word for word in key.path))
    return None


def _is_named_at(schema: ConfigSection, path: KeyPath) -> bool:
    section: ConfigSection | None = schema
    for word in path:
        section = section.sections.get(word) if section else None
        if section and section.is_named:
            return section.path[:-1] == path
    return False


# -- building --------------------------------------------------------------------------------------------------------


def _build(section: ConfigSection, path: KeyPath, given: Mapping[KeyPath, GivenValue], problems: list[str]) -> Any:
    """Build the class of the section. None if it refuses the values; then `problems` has a new entry."""
    words = (*section.keys, *section.old_keys)
    values = {word: given[(*path, word)].value for word in words if (*path, word) in given}
    found = len(problems)
    for word, inner in section.sections.items():
        here = (*path, word)
        if inner.is_named:
            names = dict.fromkeys(known[len(here)] for known in given if known[: len(here)] == here and known != here)
            values[word] = {name: _build(inner, (*here, name), given, problems) for name in names}
        elif not inner.is_optional or any(
            known[: len(here)] == here and one.value is not None for known, one in given.items()
        ):
            values[word] = _build(inner, here, given, problems)
    if len(problems) > found:
        if not path:
            return None
        values = {word: value for word, value in values.items() if value is not None}  # for further problems
    try:
        made = section.kind(**values)
        return made if len(problems) == found else None
    except ConfigError as error:
        problems.append(_describe_error(error, section, path, given))
    except TypeError:
        missing = [word for word, key in section.keys.items() if word not in values and key.default is MISSING]
        if not missing:
            raise
        problems.append(_describe_error(ConfigError("must be set", field=missing[0]), section, path, given))
    return None


def _describe_error(
    error: ConfigError, section: ConfigSection, path: KeyPath, given: Mapping[KeyPath, GivenValue]
) -> str:
    """The text of a class's error, with the origin of the value and the whole key."""
    words = tuple(error.field.split(".")) if error.field else ()
    # A class may name its own section, too: `circuit_breaker.threshold`.
    if words and path[-1:] == words[:1] and words[0] not in {*section.keys, *section.sections}:
        words = words[1:]
    here = (*path, *words)
    inside = [one for known, one in given.items() if known[: len(path)] == path]
    set_here = given.get(here) or (inside[0] if inside else None)
    where = f"{set_here.origin}: " if set_here else ""
    key = ".".join(here) + (" " if error.field else ": ") if here else ""
    return f"{where}{key}{error.problem}"


def is_config_section_name(text: str) -> bool:
    return text.isascii() and text.isalnum() and text.islower() and text[0].isalpha()


def describe_unknown_key(name: str, word: str, known: list[str], prefix: str = "") -> str:
    """The text for an unknown name, with the closest known one. `prefix`: what all known names begin with."""
    bare = [one.removeprefix(prefix) for one in known]
    close = difflib.get_close_matches(word.removeprefix(prefix), bare, n=1, cutoff=0.6)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    if len(hint) > 400:
        hint = "`penstock config keys` lists all"
    return f"{name} is not a setting; {hint}"
