"""`penstock queue` as a user types it."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.cli.main import main
from penstock.spool.files import OsSpoolFiles
from tests.spool.damage import chunk_paths, drain, flip

Run = Callable[..., Result]
CONFIG = FastQueueConfig(durability=Durability.DISK, compression="none")


@pytest.fixture
def run() -> Run:
    return lambda *words: CliRunner().invoke(main, ["queue", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed queue of ten blocks, each in a frame of its own; one has been handed out before."""
    with FastQueue(tmp_path / "q", CONFIG) as queue:
        for i in range(10):
            queue.push(b"block %d" % i * 9)
        queue.lease()
    return tmp_path / "q"


def test_inspect_says_what_is_there(run: Run, folder: Path) -> None:
    result = run("inspect", folder)
    assert result.exit_code == 0
    for text in ("10 (630 B)", "version 3", "closed", "1 chunks"):
        assert text in result.output


def test_inspect_for_programs(run: Run, folder: Path) -> None:
    found = json.loads(run("inspect", folder, "--json").output)
    assert (found["blocks"], found["bytes"], found["attempted"], found["dead_letters"]) == (10, 630, 1, 0)
    assert found["oldest_enqueued_at"] > 1_700_000_000
    assert found["is_in_use"] is False
    assert found["was_closed_properly"] is True


def test_inspect_and_check_work_while_the_queue_is_in_use(run: Run, folder: Path) -> None:
    with FastQueue(folder, CONFIG) as queue:
        assert "in use" in run("inspect", folder).output
        assert run("check", folder).exit_code == 0
        repaired = run("check", folder, "--repair")
        assert repaired.exit_code == 1
        assert "another process has the queue" in repaired.output
        assert len(drain(queue)) == 10


COMMANDS = [["inspect"], ["check"], ["check", "--repair"], ["replay", "--dead-letters"], ["drain", "--to", "out"]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_folder_without_a_queue_is_refused_and_left_as_it_is(
    run: Run, tmp_path: Path, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").touch()
    result = run(words[0], tmp_path, *words[1:])

    assert result.exit_code == 2
    assert f"there is no queue in {tmp_path}" in result.output
    assert "fastqueue.meta" in result.output
    assert "notes.txt" in result.output
    assert not caplog.records  # not a word about files of a queue that is none
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
    assert run(words[0], tmp_path / "nowhere", *words[1:]).exit_code == 2


def test_a_folder_of_queues_names_them(run: Run, folder: Path) -> None:
    result = run("check", folder.parent)
    assert result.exit_code == 2
    assert f"did you mean {folder}?" in result.output


def test_check_of_a_whole_queue(run: Run, folder: Path) -> None:
    result = run("check", folder)
    assert result.exit_code == 0
    assert "10 blocks in 10 frames" in result.output
    assert result.output.endswith("whole\n")


@pytest.mark.parametrize("at", [2 * 119 + 9, 2 * 119 + 80], ids=["header", "payload"])
def test_check_finds_damage_and_repair_leaves_the_queue_whole(run: Run, folder: Path, at: int) -> None:
    flip(chunk_paths(folder)[0], at)
    result = run("check", folder)
    assert result.exit_code == 1
    assert "damage at 0xee: 119 bytes" in result.output
    assert "1 blocks are missing" in result.output

    report = json.loads(run("check", folder, "--repair", "--json").output)
    assert report["is_whole"]
    assert [damage["is_mended"] for damage in report["damages"]] == [True]
    assert len(list((folder / "quarantine").iterdir())) == 1

    assert run("check", folder).exit_code == 0
    with FastQueue(folder, CONFIG) as queue:
        assert len(drain(queue)) == 9
        assert len(queue) == queue.size_bytes == 0
        assert queue.stats().damaged_regions == 0


def test_repair_cuts_a_torn_tail_and_sets_a_damaged_meta_aside(run: Run, folder: Path) -> None:
    os.truncate(chunk_paths(folder)[0], 9 * 119 + 70)
    flip(folder / "fastqueue.meta", 40)
    result = run("check", folder)
    assert result.exit_code == 1
    assert "torn tail of 70 bytes" in result.output
    assert run("check", folder, "--repair").exit_code == 0
    with FastQueue(folder, CONFIG) as queue:
        assert len(queue) == 9
        assert len(drain(queue)) == 9


def test_replay_brings_dead_letters_back_as_they_were(run: Run, folder: Path) -> None:
    with FastQueue(folder, CONFIG) as queue:
        for reason in ("400 Bad Request", "400 Bad Request", "413 too large"):
            queue.reject(queue.lease()[0], reason)
    assert json.loads(run("inspect", folder, "--json").output)["dead_letters"] == 3

    assert (
        "2 dead letters are back in the queue, 1 stay"
        in run("replay", folder, "--dead-letters", "--reason", "400").output
    )
    assert json.loads(run("replay", folder, "--dead-letters", "--json").output) == {"replayed": 1, "kept": 0}
    with FastQueue(folder, CONFIG) as queue:
        order = [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
        assert drain(queue) == [b"block %d" % i * 9 for i in order]


def given_up(folder: Path, *reasons: str) -> None:
    with FastQueue(folder, CONFIG) as queue:
        for reason in reasons:
            queue.reject(queue.lease()[0], reason)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_inspect_says_why_there_are_dead_letters_and_changes_nothing(run: Run, folder: Path) -> None:
    given_up(folder, "413 too large", "400 Bad Request: \x1b[2J", "400 Bad Request: \x1b[2J")
    run("replay", folder, "--dead-letters", "--reason", "413")
    given_up(folder, "422 no")
    before = contents(folder)

    lines = run("inspect", folder).output.splitlines()
    assert lines[-2:] == ["       2       126 B  400 Bad Request: \\x1b[2J", "       1        63 B  422 no"]
    found = json.loads(run("inspect", folder, "--json").output)
    assert found["dead_letters"] == 3
    assert found["dead_letter_reasons"] == [
        {"reason": "400 Bad Request: \x1b[2J", "letters": 2, "bytes": 126},
        {"reason": "422 no", "letters": 1, "bytes": 63},
    ]
    assert contents(folder) == before


def test_inspect_shows_reasons_of_a_queue_in_use(run: Run, folder: Path) -> None:
    with FastQueue(folder, CONFIG) as queue:
        queue.reject(queue.lease()[0], "400 Bad Request")
        output = run("inspect", folder).output
        assert "       1        63 B  400 Bad Request" in output
        assert "in use" in output
        assert queue.replay_dead_letters("400") == (1, 0)


def test_inspect_names_ten_reasons_and_counts_the_others(run: Run, folder: Path) -> None:
    with FastQueue(folder, CONFIG) as queue:
        queue.push_many([b"x"] * 4)
    given_up(folder, "much the same", "much the same", "y" * 500, *(f"another {number}" for number in range(11)))

    lines = run("inspect", folder).output.splitlines()[-11:]
    assert lines[0].endswith("2       126 B  much the same")
    assert lines[1].endswith("  " + "y" * 200 + "…")
    assert lines[-1] == "       3         3 B  +3 more reasons: --json has them all"


def test_inspect_of_a_folder_of_letters_says_why_and_what_is_none(run: Run, folder: Path) -> None:
    given_up(folder, "400 Bad Request")
    with FastQueue(folder / "dead-letters", CONFIG) as letters:
        letters.push_many([b"no letter", b"[" * 100_000])
    reasons = json.loads(run("inspect", folder / "dead-letters", "--json").output)["dead_letter_reasons"]
    assert reasons == [
        {"reason": None, "letters": 2, "bytes": 100_009},
        {"reason": "400 Bad Request", "letters": 1, "bytes": 63},
    ]


def test_damaged_letters_are_passed_over(run: Run, folder: Path) -> None:
    given_up(folder, "400", "413", "422")
    flip(chunk_paths(folder / "dead-letters")[0], 100)
    reasons = json.loads(run("inspect", folder, "--json").output)["dead_letter_reasons"]
    assert [one["reason"] for one in reasons] == ["413", "422"]
    assert not (folder / "dead-letters" / "quarantine").exists()


def test_replay_needs_a_choice(run: Run, folder: Path) -> None:
    result = run("replay", folder)
    assert result.exit_code == 2
    assert "--dead-letters" in result.output


@pytest.mark.parametrize("style", ["length-prefixed", "lines", "jsonl"])
def test_drain_moves_every_block_into_the_file(run: Run, folder: Path, tmp_path: Path, style: str) -> None:
    target = tmp_path / "blocks"
    result = run("drain", folder, "--to", target, "--format", style)
    assert result.output == f"10 blocks (630 B) are in {target}\n"
    content = target.read_bytes()
    if style == "lines":
        blocks = content.splitlines()
    elif style == "jsonl":
        blocks = [base64.b64decode(json.loads(line)["data"]) for line in content.splitlines()]
    else:
        blocks = []
        while content:
            length = int.from_bytes(content[:4], "little")
            blocks.append(content[4 : 4 + length])
            content = content[4 + length :]
    assert blocks == [b"block %d" % i * 9 for i in range(10)]
    assert json.loads(run("inspect", folder, "--json").output)["blocks"] == 0


def test_drain_does_not_overwrite_and_can_go_on(run: Run, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "blocks"
    target.write_bytes(b"first\n")
    refused = run("drain", folder, "--to", target)
    assert refused.exit_code == 1
    assert "exists: name another file, or say --append" in refused.output
    report = json.loads(run("drain", folder, "--to", target, "--append", "--format", "lines", "--json").output)
    assert report == {"blocks": 10, "bytes": 630, "file": str(target)}
    assert target.read_bytes().startswith(b"first\nblock 0")


def test_drain_of_a_queue_in_use_or_into_nowhere_says_so_and_leaves_nothing(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    with FastQueue(folder, CONFIG):
        result = run("drain", folder, "--to", tmp_path / "blocks")
    assert result.exit_code == 1
    assert "another process has the queue" in result.output
    assert not (tmp_path / "blocks").exists()
    result = run("drain", folder, "--to", tmp_path / "no" / "such" / "folder")
    assert result.exit_code == 1
    assert "No such file or directory" in result.output


def test_replay_takes_letters_from_another_folder_and_leaves_what_is_none(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    letters = tmp_path / "letters"
    with FastQueue(folder, FastQueueConfig(dead_letter=letters)) as queue:
        queue.reject(queue.lease()[0], "400")
    with FastQueue(letters, CONFIG) as queue:
        queue.push_many([b"", b"no letter", b"\2\0\0\0{}"])
    report = run("replay", folder, "--dead-letters", "--from", letters, "--json")
    assert json.loads(report.output) == {"replayed": 1, "kept": 3}
    with FastQueue(letters, CONFIG) as queue:
        assert drain(queue) == [b"", b"no letter", b"\2\0\0\0{}"]


def test_a_chunk_that_vanishes_during_a_look_is_no_error(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, real = iter([FileNotFoundError]), OsSpoolFiles.size_of

    def vanishing(path: str) -> int:
        if len(os.path.basename(path)) == 16 and (error := next(sizes, None)) is not None:
            raise error
        return real(path)

    monkeypatch.setattr(OsSpoolFiles, "size_of", staticmethod(vanishing))
    assert run("inspect", folder).exit_code == 0
    sizes = iter([FileNotFoundError])
    assert run("check", folder).exit_code == 0


def test_the_end_of_a_queue_in_use_may_be_on_its_way(run: Run, folder: Path) -> None:
    with FastQueue(folder, CONFIG) as queue:
        queue.push(b"one more")
        path = chunk_paths(folder)[-1]
        os.truncate(path, path.stat().st_size - 3)
        result = run("check", folder)
        assert result.exit_code == 0
        assert "in use: what is at its end may still be on its way" in result.output
