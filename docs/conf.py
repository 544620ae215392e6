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
autodoc_typehints = "description"
autodoc_preserve_defaults = True

_QUOTED = re.compile(r"`([^`]+)`")
_PROMISE = re.compile(r"[A-Z][a-z]+: ")


def _as_restructured_text(lines: list[str]) -> list[str]:
    """Docstrings are plain text: `names` become literals, indented pictures blocks, and promises lines of their own."""
    out: list[str] = []
    for line in lines:
        is_indented = line.startswith((" ", "\t"))
        if is_indented and out and not out[-1].strip():
            out += ["::", ""]
        if not is_indented or (out and out[-1].startswith(("* ", "  ")) and not line.startswith("    ")):
            parts = _QUOTED.split(line)
            escaped = [re.sub(r"([*_|\\])", r"\\\1", part) for part in parts[::2]]
            line = escaped[0] + "".join(f"``{code}``{text}" for code, text in zip(parts[1::2], escaped[1:]))
        if _PROMISE.match(line):
            line = "* " + line
            if out and out[-1].strip() and not out[-1].startswith(("* ", "  ")):
                out.append("")
        elif out and out[-1].startswith(("* ", "  ")) and line.strip() and not is_indented:
            line = "  " + line
        out.append(line)
    return out


def _rewrite(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [*_as_restructured_text(lines), ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _rewrite)
