"""Logs: readable lines in a terminal, JSON otherwise."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.service.logs import set_up_logs

log = logging.getLogger("penstock.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, own = list(root.handlers), root.level, logging.getLogger("penstock").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("penstock").setLevel(own)


def test_a_terminal_gets_lines_for_people() -> None:
    stream = Terminal()
    set_up_logs(logging.INFO, "auto", stream)
    log.info("Queue started dropping. queue=%s reason=%s", "relay", "oldest")

    assert stream.getvalue().endswith("INFO    Queue started dropping. queue=relay reason=oldest\n")


def test_a_terminal_shows_colours_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, plain = Terminal(), Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    set_up_logs(logging.INFO, "auto", coloured)
    log.warning("Queue started dropping.")
    monkeypatch.setenv("NO_COLOR", "1")
    set_up_logs(logging.INFO, "auto", plain)
    log.warning("Queue started dropping.")

    assert coloured.getvalue().startswith("\x1b[33m")
    assert "\x1b" not in plain.getvalue()


def test_anything_else_gets_one_object_a_line_with_the_fields_by_name() -> None:
    stream = io.StringIO()
    set_up_logs(logging.INFO, "auto", stream)
    log.warning("Queue started dropping. queue=%s count=%d", "relay", 3)
    log.info("Ready in %s", "a moment")
    log.info("Reloaded.")

    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["queue"], first["count"]) == ("Queue started dropping", "relay", 3)
    assert first["level"] == "warning"
    assert first["time"].endswith("Z")
    assert second["message"] == "Ready in a moment"
    assert (third["message"], third["event"]) == ("Reloaded.", "Reloaded")


def test_what_others_call_things_looks_like_no_line_of_ours_and_commands_no_terminal() -> None:
    for stream, style in ((Terminal(), "auto"), (io.StringIO(), "human"), (io.StringIO(), "json")):
        set_up_logs(logging.INFO, style, stream)  # type: ignore[arg-type]
        log.info("Refused. label=%s level=%s", "a\n12:00:00 ERROR   all is lost\x1b[2J\x9b2J", "critical")
        (line,) = stream.getvalue().splitlines()
        assert "\x1b[2J" not in line
        if style == "json":
            assert json.loads(line)["level"] == "info"
            assert json.loads(line)["label"].startswith("a\n12:00:00")


def test_a_field_takes_the_place_of_nothing_that_the_line_says_of_itself() -> None:
    stream = io.StringIO()
    set_up_logs(logging.INFO, "json", stream)
    log.warning("Destination refused part of a batch. message=%s event=%s time=%s", "too old", "none", "never")

    said = json.loads(stream.getvalue())
    assert said["message"] == "Destination refused part of a batch. message=too old event=none time=never"
    assert said["event"] == "Destination refused part of a batch"
    assert said["time"].endswith("Z")
    assert (said["message_"], said["event_"], said["time_"]) == ("too old", "none", "never")


def test_where_it_broke_is_part_of_the_object() -> None:
    stream = io.StringIO()
    set_up_logs(logging.INFO, "json", stream)
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        log.exception("It failed. part=%s", "x")

    (line,) = stream.getvalue().splitlines()
    assert "in two lines" in json.loads(line)["exception"]


def test_settings_can_change_and_nothing_is_said_twice() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logs(logging.ERROR, "human", first)
    set_up_logs(logging.DEBUG, "human", second)
    log.debug("Heard.")

    assert first.getvalue() == ""
    assert second.getvalue().count("Heard.") == 1
