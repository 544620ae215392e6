"""The pages that readers have: README, CONTRIBUTING, CHANGELOG and everything in docs/."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """Its text without code blocks."""
    return _FENCE.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind `#`, as code hosts and the site make it of headings."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", prose_of(page)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number = 0
        while (slug if not number else f"{slug}-{number}") in found:
            number += 1
        found.add(slug if not number else f"{slug}-{number}")
    return found


def snippets(page: Path) -> list[tuple[str, str]]:
    """Each Python example with all that stands before it."""
    text = page.read_text()
    return [(text[: found.start()], found[1]) for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]
