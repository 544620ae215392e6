"""Files and names that are handed to the disk: which of its refusals count. Real power cuts: tests/spark."""

import errno
import os
from pathlib import Path

import pytest

from penstock.durable import make_folder, sync_to_disk, write_text


def failing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("count", [1, 20])
def test_each_file_and_folder_is_synced_once(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    files = [tmp_path / str(number) for number in range(count)]
    for file in files:
        file.touch()
    sync_to_disk([*files, *files, tmp_path])
    assert sorted(synced) == sorted(map(str, [*files, tmp_path]))


@pytest.mark.parametrize("count", [1, 5])
def test_a_disk_that_fails_is_an_error(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / str(number) for number in range(count)]
    for file in files:
        file.touch()
    failing(errno.EIO, monkeypatch)
    with pytest.raises(OSError, match="Input/output error"):
        sync_to_disk(files)
    with pytest.raises(OSError, match="Input/output error"):
        sync_to_disk([tmp_path])


def test_a_mount_that_cannot_sync_folders_keeps_their_names_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    failing(errno.EINVAL, monkeypatch)
    sync_to_disk([tmp_path])
    with pytest.raises(OSError, match="Invalid argument"):
        sync_to_disk([file])


def test_a_folder_is_made_with_its_parents_and_its_own_mode(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", 0o700)
    make_folder(tmp_path / "a" / "b", 0o755)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_text_replaces_another(tmp_path: Path) -> None:
    for text in ("1", "22"):
        write_text(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert os.listdir(tmp_path) == ["file"]
