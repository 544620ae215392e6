"""The log of one Delta table, as a power cut may leave it: on the disk entry by entry, and mended at a start.

    <table>/_delta_log/00000000000000000007.json                  one commit
    <table>/_delta_log/00000000000000000100.checkpoint.parquet    what all entries up to it say together
    <table>/_torn/                                                what a power cut has torn, set aside

`deltalake` writes entries and syncs none. An append counts once its entry and all before it are on the disk, and old
entries are removed once the checkpoint that stands for them is. So a power cut tears the newest entries only, and the
table of the entries before them is whole.
"""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, PostCommitHookProperties

from penstock.durable import sync_to_disk
from penstock.tables.torn import Covered, files_aside, is_whole, set_aside

log = logging.getLogger(__name__)
MAINTENANCE = "penstock/maintenance"  # the guard of what rewrites a table: compaction, expiry, replacement
CHECKPOINT_EVERY = 100  # entries: an opening reads at most so many
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)  # `sync` does both, in order


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry; `actions` is None if it cannot be read."""

    version: int
    path: Path
    actions: list[dict[str, Any]] | None

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        return (action[kind] for action in self.actions or () if action.get(kind))


class DeltaLog:
    """The log below the folder of one table.

    Threads: every method may be called from any thread.
    """

    def __init__(self, table: Path) -> None:
        self._table = table
        self._folder = table / "_delta_log"
        # _lock guards _synced, and the files of the log from being removed while they are examined.
        self._lock = threading.Lock()
        self._synced: int | None = None  # entries up to this are known to be on the disk

    def sync(self, table: DeltaTable) -> None:
        """Return when every entry that `table` was read from is on the disk."""
        with self._lock:
            self._sync_locked(table)

    def _sync_locked(self, table: DeltaTable) -> None:
        before = self._newest_checkpoint() if self._synced is None else self._synced
        version = table.version()
        if version <= before:
            return
        entries = [self._folder / f"{number:020}.json" for number in range(before + 1, version + 1)]
        sync_to_disk([*(path for path in entries if path.exists()), self._folder])
        self._synced = version
        if version // CHECKPOINT_EVERY > max(before, 0) // CHECKPOINT_EVERY:
            table.create_checkpoint()
            sync_to_disk([*self._checkpoints(version), self._folder / "_last_checkpoint", self._folder])
            table.cleanup_metadata()

    def guards(self, before: int | None = None) -> dict[str, int]:
        """All guards of the entries `before` a version: deltalake tells only of those that are asked for by name."""
        found: dict[str, int] = {}
        actions: list[Any] = []
        for path in sorted(self._folder.glob("*.checkpoint*.parquet")):
            if before is None or int(path.name[:20]) < before:
                with suppress(KeyError, pa.ArrowInvalid):  # one without guards, or torn
                    actions += pq.read_table(path, columns=["txn"], partitioning=None)["txn"].to_pylist()
        for entry in self._entries(-1):
            actions += entry.of("txn") if before is None or entry.version < before else ()
        for action in actions:
            if action and action["appId"] not in (None, MAINTENANCE):
                found[action["appId"]] = max(action["version"], found.get(action["appId"], -1))
        return found

    def mend(self, covered: Covered) -> int:
        """Set aside what a power cut has torn, so that the table is that of the entries before; how many lie aside.

        Entries that cannot be read go, with all that follow on them. One that names torn files goes only if segments
        still hold what it added.
        """
        with self._lock:
            self._synced = None
            if self._folder.is_dir():
                self._mend_locked(covered)
        return files_aside(self._table)

    def _mend_locked(self, covered: Covered) -> None:
        torn = [path for path in self._folder.glob("*.checkpoint*.parquet") if not is_whole(path)]
        hint = self._folder / "_last_checkpoint"
        if hint.exists() and (torn or not self._names_a_checkpoint(hint)):
            torn.append(hint)  # readers find checkpoints without it
        set_aside(self._table, torn, "it is torn")
        entries = list(self._entries(self._newest_checkpoint()))
        whole = _first_unreadable(entries)
        set_aside(self._table, [entry.path for entry in entries[whole:]], "it, or an entry before it, is torn")
        lost = self._naming_torn_files(entries[:whole])
        if lost and self._can_do_without(lost, covered):
            set_aside(self._table, [entry.path for entry in lost], "it, or an entry before it, names a torn file")
        elif lost:
            log.error(
                "A file of a table is torn, and neither older files nor segments hold its points: restore it. "
                "table=%s entry=%s", self._table, lost[0].path.name,
            )  # fmt: skip

    def _naming_torn_files(self, entries: list[_Entry]) -> list[_Entry]:
        """The first entry whose files are torn, and those that follow on it; none if all are whole."""
        removed = {action["path"] for entry in entries for action in entry.of("remove")}
        for place, entry in enumerate(entries):
            files = [action for action in entry.of("add") if action["path"] not in removed]
            if not all(is_whole(self._file(action), action["size"]) for action in files):
                return entries[place:]
        return []

    def _can_do_without(self, entries: list[_Entry], covered: Covered) -> bool:
        """Whether the files that these entries have removed are still there, and segments hold what they added."""
        before, now = self.guards(before=entries[0].version), self.guards()
        return (
            all(any(entry.of("txn")) for entry in entries if any(entry.of("add")))  # all of them are ours
            and all(self._file(action).exists() for entry in entries for action in entry.of("remove"))
            and all(
                covered(application.rpartition("/")[2], before.get(application, -1), last)
                for application, last in now.items()
                if last > before.get(application, -1)
            )
        )

    def _names_a_checkpoint(self, hint: Path) -> bool:
        try:
            return bool(self._checkpoints(int(json.loads(hint.read_text())["version"])))
        except (ValueError, KeyError, TypeError):
            return False

    def _file(self, action: dict[str, Any]) -> Path:
        return self._table / unquote(action["path"])

    def _entries(self, after: int) -> Iterator[_Entry]:
        for path in sorted(self._folder.glob("*.json")):
            if path.stem.isdigit() and int(path.stem) > after:
                try:
                    actions = [json.loads(line) for line in path.read_text().splitlines() if line]
                except ValueError:
                    actions = []
                except FileNotFoundError:
                    continue  # removed since it was listed: a checkpoint stands for it
                yield _Entry(int(path.stem), path, actions or None)

    def _checkpoints(self, version: int) -> list[Path]:
        return list(self._folder.glob(f"{version:020}.checkpoint*.parquet"))

    def _newest_checkpoint(self) -> int:
        names = [path.name[:20] for path in self._folder.glob("*.checkpoint*.parquet") if is_whole(path)]
        return max((int(name) for name in names if name.isdigit()), default=-1)


def _first_unreadable(entries: list[_Entry]) -> int:
    """The place of the first entry that cannot be read or does not follow on the one before; else their number."""
    for place, entry in enumerate(entries):
        if entry.actions is None or (place and entry.version != entries[place - 1].version + 1):
            return place
    return len(entries)
