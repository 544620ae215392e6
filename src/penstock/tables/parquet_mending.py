"""Folders of a Parquet table that a power cut has torn, set aside together with what was added after them.

A folder is on the disk before it gets its name, so none is torn by a cut. Tables that an older version has written, and
disks that lie about what they have, are why this is here.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import TableConflict
from penstock.tables.torn import Covered, files_aside, is_whole, set_aside

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Folder:
    """One append or fold; `guard` is None if it cannot be read."""

    path: Path
    made: int  # nanoseconds since the epoch
    guard: dict[str, Any] | None

    @property
    def versions(self) -> Mapping[str, int]:
        return self.guard["versions"] if self.guard else {}

    @property
    def replaces(self) -> list[str]:
        return self.guard["replaces"] if self.guard else []


def mend_folders(table: Path, guard_name: str, covered: Covered) -> int:
    """Set aside folders that cannot be read, and all that were added later; how many lie aside.

    A folder whose guard can be read goes only if segments still hold what is lost. TableConflict if a fold came later:
    it has the points of some batches in its rows, and cannot be taken back.
    """
    folders = sorted((_read(path, guard_name) for path in table.iterdir() if path.name[0] not in "._"), key=_made)
    replaced = {file for folder in folders for file in folder.replaces}
    torn = [folder for folder in folders if not _is_whole(folder, replaced)]
    if torn:
        lost = folders[folders.index(torn[0]) :]
        if any(folder.guard is None for folder in torn) or _is_covered(lost, folders, covered):
            fixed = next((folder for folder in lost if folder.replaces and folder not in torn), None)
            if fixed is not None:
                raise TableConflict(
                    f"{torn[0].path} is torn, and {fixed.path.name} replaces files that were there before: restore "
                    "the torn folder, or delete all tables and the checkpoint of this job and run it over the segments"
                )
            set_aside(table, [folder.path for folder in lost], "it, or a folder that was added before it, is torn")
        else:
            log.error(
                "A file of a table is torn, and no segment holds its points any more: restore it. table=%s folder=%s",
                table, torn[0].path.name,
            )  # fmt: skip
    return files_aside(table)


def _read(path: Path, guard_name: str) -> _Folder:
    place = path / guard_name
    try:
        guard = json.loads(place.read_text())
    except (ValueError, FileNotFoundError):
        guard = None
    return _Folder(path, (place if place.exists() else path).stat().st_mtime_ns, guard)


def _made(folder: _Folder) -> int:
    return folder.made


def _is_whole(folder: _Folder, replaced: set[str]) -> bool:
    if folder.guard is None:
        return False
    live = [name for name in folder.guard["files"] if f"{folder.path.name}/{name}" not in replaced]
    return all(is_whole(folder.path / name) for name in live)


def _is_covered(lost: list[_Folder], folders: list[_Folder], covered: Covered) -> bool:
    """Whether segments hold what the tables would lose."""
    before: dict[str, int] = {}
    now: dict[str, int] = {}
    for folder in folders:
        for application, version in folder.versions.items():
            now[application] = max(version, now.get(application, -1))
            if folder not in lost:
                before[application] = max(version, before.get(application, -1))
    return all(
        covered(application.rpartition("/")[2], before.get(application, -1), last)
        for application, last in now.items()
        if last > before.get(application, -1)
    )
