"""The picture of the demo in README: `python -m docs.demo_picture` runs the demo and draws what it prints."""

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.cli.demo_screen import demo_summary_on_screen
from penstock.service.demo import run_demo
from penstock.service.generator import DemoDay

PICTURE = Path(__file__).parent / "images" / "demo.svg"
WIDTH = 84
SHOWN = (
    r"Tables *\n.*?(?=Top 3)",
    r"Percentiles.*?(?=checkout, POST)",
    r"╭─.*?╮\n.*?\n.*?\n.*?\n",
    r"╰─.*?╯\n",
)


def draw() -> str:
    screen = Console(record=True, width=WIDTH, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        demo_summary_on_screen(screen, run_demo(Path(folder), DemoDay(points=600_000), lambda progress: None))
    text = Text.from_ansi(screen.export_text(styles=True))
    picture = Console(record=True, width=WIDTH, file=io.StringIO())
    for part in SHOWN:
        found = re.search(part, text.plain, re.DOTALL)
        assert found, part
        picture.print(text[found.start() : found.end()], end="")
    svg = picture.export_svg(title="penstock demo")
    # The fonts that rich names are fetched from elsewhere; what the reader's machine has will do.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    PICTURE.write_text(draw())
