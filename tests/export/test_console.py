"""The console exporter: one whole line per batch."""

import io

import pytest

from penstock.errors import ConfigError
from penstock.export.exporters.console_exporter import ConsoleExporter


def test_a_line_says_how_large_a_batch_is_and_how_it_begins() -> None:
    out = io.StringIO()
    exporter = ConsoleExporter(out)
    for batch in (b"\x0aone", b"x" * 100):
        exporter.send(exporter.prepare(batch))
    assert out.getvalue().splitlines() == ["batch 1: 4 bytes '\\none'", f"batch 2: 100 bytes '{'x' * 64}'…"]


def test_text_is_shown_as_it_is() -> None:
    out = io.StringIO()
    exporter = ConsoleExporter(out, style="text")
    exporter.send(exporter.prepare("grüße".encode()))
    assert out.getvalue() == "grüße\n"


def test_a_line_is_out_before_its_batch_counts_as_taken() -> None:
    out = io.BytesIO()
    exporter = ConsoleExporter(io.TextIOWrapper(out), style="text")
    exporter.send(exporter.prepare(b"one"))
    assert out.getvalue() == b"one\n"


def test_a_batch_for_the_console_is_never_split() -> None:
    assert ConsoleExporter().split(b"xx") is None


def test_another_style_is_refused() -> None:
    with pytest.raises(ConfigError, match="style must be one of summary, text, got 'xml'"):
        ConsoleExporter(style="xml")  # type: ignore[arg-type]
