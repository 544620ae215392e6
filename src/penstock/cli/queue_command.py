"""`penstock queue`: look into a durable queue's folder, check and mend it, bring dead letters back, empty it."""

import base64
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import click

from penstock.errors import PenstockError
from penstock.service.printable import printable
from penstock.service.queue_folder import FILE, QueueFolder
from penstock.spool import (
    Durability,
    FastQueue,
    FastQueueConfig,
    FullBehavior,
    Lease,
    dead_letter_report,
    dead_letters,
    examine,
)
from penstock.units import format_bytes

# Whatever the queue's own limits are, these commands must not drop a block because of them.
UNLIMITED = FastQueueConfig(
    durability=Durability.FSYNC,  # what is moved must be safe in its new place before it leaves the old one
    max_size=2**62,
    max_bytes=2**62,
    max_block_bytes=2**32,
    full_behavior=FullBehavior.DROP_NEWEST,
)
BATCH = 256
_MOST_REASONS = 10
_LONGEST_REASON = 200  # signs: two lines of a terminal, and more than tells it from the others
QUEUE = QueueFolder()
_CONFIG = click.option(
    "--config",
    "-c",
    envvar="PENSTOCK_CONFIG",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,  # PATH is understood by it
    expose_value=False,
    callback=lambda ctx, _, file: ctx.meta.__setitem__(FILE, file),
    help="A configuration file: PATH may be the name of one of its queues, as rollup or relay.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="For programs to read.")


@click.group("queue")
def queue_command() -> None:
    """Durable queues: what is in them, whether they are whole, how to empty them.

    \b
    Examples:
      penstock queue inspect ./queue
      penstock queue check ./queue --repair
      penstock queue replay ./queue --dead-letters
      penstock queue drain ./queue --to blocks.jsonl --format jsonl
    """


@queue_command.command("inspect")
@click.argument("path", type=QUEUE)
@_CONFIG
@JSON
def queue_inspect_command(path: str, as_json: bool) -> None:
    """Show what the queue in PATH holds, and why its dead letters were given up, the most frequent reasons first.

    Nothing changes, and the queue may be in use: then it is a moment's view. Dead letters are read one by one, the rest
    costs the same whatever the backlog. PATH may be a folder of dead letters itself.

    \b
    Examples:
      penstock queue inspect ./queue
      penstock queue inspect rollup -c penstock.yaml --json
    """
    found = examine.overview_of_spool(path)
    reasons = dead_letter_report.dead_letters_by_reason(
        path if dead_letter_report.holds_dead_letters(path) else _letters_of(path)
    )
    if as_json:
        click.echo(json.dumps({**asdict(found), "dead_letter_reasons": [asdict(one) for one in reasons]}))
        return
    since = found.oldest_enqueued_at
    oldest = "none" if since is None else datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")
    rows = [
        ("blocks", f"{found.blocks} ({format_bytes(found.bytes)})"),
        ("handed out before", f"{found.attempted}"),
        ("oldest block", oldest),
        ("on disk", f"{format_bytes(found.disk_bytes)} in {found.chunks} chunks"),
        ("dead letters", f"{found.dead_letters}"),
        ("quarantined files", f"{found.quarantined_files}"),
        ("foreign files", f"{found.foreign_files}"),
        ("meta", found.meta),
        ("state", _state(found)),
    ]
    for name, value in rows:
        click.echo(f"{name:>18}  {value}")
    for line in _explained(reasons):
        click.echo(line)


def _letters_of(path: str) -> str:
    return f"{path}/{dead_letters.FOLDER_NAME}"


def _explained(reasons: list[dead_letter_report.ReasonCount]) -> Iterator[str]:
    """Why letters were given up: as many reasons as a screen has room for."""
    if reasons:
        yield "\nwhy they are dead letters (replay takes a part of it as --reason):"
    for one in reasons[:_MOST_REASONS]:
        text = "no dead letters: replay leaves them" if one.reason is None else printable(one.reason)
        cut = f"{text[:_LONGEST_REASON]}…" if len(text) > _LONGEST_REASON else text
        yield f"{one.letters:>8}  {format_bytes(one.bytes):>10}  {cut}"
    if others := reasons[_MOST_REASONS:]:
        count, size = sum(one.letters for one in others), sum(one.bytes for one in others)
        yield f"{count:>8}  {format_bytes(size):>10}  +{len(others)} more reasons: --json has them all"


def _state(found: examine.SpoolOverview) -> str:
    if found.is_in_use:
        return "in use"
    return "closed" if found.was_closed_properly else "not closed properly: the next start will recover it"


@queue_command.command("check")
@click.argument("path", type=QUEUE)
@_CONFIG
@click.option("--repair", is_flag=True, help="Cut the torn tail, set damaged bytes aside. The queue must be closed.")
@JSON
def queue_check_command(path: str, repair: bool, as_json: bool) -> None:
    """Read every byte of the queue in PATH. The exit code is 0 if all is whole, else 1.

    \b
    Examples:
      penstock queue check ./queue
      penstock queue check ./queue --repair
    """
    with _progress("Checking", examine.spool_size_on_disk(path), as_json) as advance:
        report = examine.check_spool(path, repair=repair, advance=advance)
    if as_json:
        click.echo(report.as_json())
    else:
        click.echo(f"{report.blocks} blocks in {report.frames} frames, {format_bytes(report.bytes_read)} read")
        click.echo(f"meta: {report.meta}")
        for damage in report.damages:
            blocks = "unknown" if damage.blocks is None else damage.blocks
            mended = ", mended" if damage.is_mended else ""
            click.echo(f"damage at {damage.offset:#x}: {damage.bytes} bytes, {damage.reason}, blocks: {blocks}{mended}")
        if report.torn_bytes:
            click.echo(f"torn tail of {report.torn_bytes} bytes: a push that was never accepted")
        if report.missing_blocks:
            click.echo(f"{report.missing_blocks} blocks are missing")
        if report.is_in_use:
            click.echo("in use: what is at its end may still be on its way")
        click.echo("whole" if report.is_whole else "damaged: the queue works and steps over it; --repair sets it aside")
    sys.exit(0 if report.is_whole else 1)


@queue_command.command("replay")
@click.argument("path", type=QUEUE)
@_CONFIG
@click.option("--dead-letters", "from_dead_letters", is_flag=True, help="Bring the dead letters back into the queue.")
@click.option("--reason", default="", help="Only letters whose reason contains this text.")
@click.option("--from", "letters_path", type=QUEUE, help="Where `dead_letter` put them, if not in PATH/dead-letters.")
@JSON
def queue_replay_command(
    path: str, from_dead_letters: bool, reason: str, letters_path: str | None, as_json: bool
) -> None:
    """Put dead letters back into the queue in PATH, with no attempts counted. The queue must be closed.

    A letter leaves the dead-letter queue only when the queue has it on the disk.

    \b
    Examples:
      penstock queue replay ./queue --dead-letters
      penstock queue replay ./queue --dead-letters --reason "400"
    """
    if not from_dead_letters:
        raise click.UsageError("say what to replay: --dead-letters")
    folder = letters_path or _letters_of(path)
    replayed = kept = 0
    if os.path.isdir(folder):
        waiting = examine.overview_of_spool(folder).blocks
        config = replace(UNLIMITED, dead_letter=folder)
        with FastQueue(path, config) as target, _progress("Replaying", waiting, as_json) as advance:
            replayed, kept = target.replay_dead_letters(reason, advance=advance)
    if as_json:
        click.echo(json.dumps({"replayed": replayed, "kept": kept}))
    else:
        click.echo(f"{replayed} dead letters are back in the queue, {kept} stay")


@queue_command.command("drain")
@click.argument("path", type=QUEUE)
@_CONFIG
@click.option("--to", "target", required=True, type=click.Path(dir_okay=False), help="The file to write.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["length-prefixed", "lines", "jsonl"]),
    default="length-prefixed",
    show_default=True,
    help="4 bytes of length (little-endian) before each block; a newline behind it; or JSON with base64.",
)
@click.option("--append", is_flag=True, help="Write behind what the file holds, as after a drain that was stopped.")
@JSON
def queue_drain_command(path: str, target: str, style: str, append: bool, as_json: bool) -> None:
    """Move every block of the queue in PATH into a file. The queue must be closed.

    A block leaves the queue only when the file has it on the disk.

    \b
    Examples:
      penstock queue drain ./queue --to blocks.bin
      penstock queue drain ./queue --to blocks.jsonl --format jsonl --append
    """
    written = size = 0
    with (
        FastQueue(path, UNLIMITED) as source,  # first: a queue that is in use must not leave an empty file behind
        _new_file(target, append) as file,
        _progress("Draining", len(source), as_json) as advance,
    ):
        while leases := source.lease(BATCH):
            _write(file, leases, style)
            source.ack(leases)
            written += len(leases)
            size += sum(len(lease.data) for lease in leases)
            advance(len(leases))
    if as_json:
        click.echo(json.dumps({"blocks": written, "bytes": size, "file": target}))
    else:
        click.echo(f"{written} blocks ({format_bytes(size)}) are in {target}")


def _new_file(target: str, append: bool) -> IO[bytes]:
    try:
        return open(target, "ab" if append else "xb")
    except FileExistsError:
        raise PenstockError(f"{target} exists: name another file, or say --append") from None
    except OSError as error:
        raise PenstockError(f"cannot write {target}: {error.strerror}") from None


def _write(file: IO[bytes], leases: list[Lease], style: str) -> None:
    for lease in leases:
        if style == "jsonl":
            row = {
                "sequence": lease.sequence,
                "enqueued_at": lease.enqueued_at,
                "data": base64.b64encode(lease.data).decode(),
            }
            file.write(json.dumps(row).encode() + b"\n")
        elif style == "lines":
            file.write(lease.data + b"\n")
        else:
            file.write(len(lease.data).to_bytes(4, "little") + lease.data)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _progress(label: str, length: int, is_quiet: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on standard error in a terminal; elsewhere its updates are ignored."""
    if is_quiet or not sys.stderr.isatty():
        yield lambda amount: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update
