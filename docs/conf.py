"""Settings of the documentation site: `make docs`. Sphinx reads the Markdown pages as they are on the disk."""

import re
from importlib.metadata import version as installed_version
from typing import Any

project = "Penstock"
copyright = "the Penstock authors, Apache-2.0"
release = installed_version("penstock")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["README.md"]  # index.rst includes it
html_theme = "furo"
html_title = f"Penstock {release}"
html_copy_source = False
myst_heading_anchors = 4  # the same anchors as on a code host
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

_PROMISE = re.compile(r"(?m)^(?=[A-Z][a-z]+: )")


def _as_restructured_text(docstring: str) -> str:
    """Docstrings are plain text: `names` become literals, pictures and tables blocks, promises a list."""
    paragraphs = [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", docstring) if paragraph.strip()]
    return "\n\n".join(_block(text) if _is_picture(text) else _prose(text) for text in paragraphs)


def _is_picture(text: str) -> bool:
    return not _PROMISE.match(text) and bool(re.search(r"(?m)^\s|\S {2,}\S", text))


def _block(text: str) -> str:
    return "::\n\n" + "\n".join(f"    {line}" for line in text.splitlines())


def _prose(text: str) -> str:
    promises = [" ".join(part.split()) for part in _PROMISE.split(text) if part.strip()]
    if len(promises) == 1:
        return _escaped(promises[0])
    return "\n".join(f"* {_escaped(promise)}" for promise in promises)


def _escaped(text: str) -> str:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick that does not quote
        return re.sub(r"([`*_|\\])", r"\\\1", text)
    escaped = [re.sub(r"([*_|\\])", r"\\\1", part) for part in parts[::2]]
    return escaped[0] + "".join(f":code:`{code}`\\ {rest}" for code, rest in zip(parts[1::2], escaped[1:]))


def _rewrite(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [*_as_restructured_text("\n".join(lines)).splitlines(), ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _rewrite)
