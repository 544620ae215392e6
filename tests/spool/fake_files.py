"""A filesystem in memory that knows which bytes are only written and which are on the disk.

`kill` ends the process: the kernel still has every byte that was written. `cut_power` ends the machine: what was not
synced is gone, or there in part, or there as zeros; a name that was not synced may be the old one or the new one.
`fail` makes one call, or all of them from then on, fail as a disk would.
"""

import errno
import os
import random
from collections.abc import Callable

from penstock.errors import QueueLocked
from penstock.spool.files import Buffers


class Inode:
    def __init__(self) -> None:
        self.written = bytearray()
        self.durable = b""


class FakeMappedFile:
    """A mapped file: what is stored there is written, and only a sync makes it durable."""

    def __init__(self, inode: Inode) -> None:
        self._inode = inode

    def __setitem__(self, where: slice, data: bytes, /) -> None:
        self._inode.written[where] = data

    def close(self) -> None:
        pass


class FakeFiles:
    """Implements `penstock.spool.files.SpoolFiles`."""

    def __init__(self) -> None:
        self.names_now: dict[str, Inode] = {}
        self.names_durable: dict[str, Inode] = {}
        self._handles: dict[int, Inode] = {}
        self._locked: dict[int, str] = {}
        self._next_handle = 100
        self.calls: list[str] = []
        self._fault: Callable[[str, int], int | None] = lambda call, number: None
        self.free = 1 << 40
        self.reads_fail = False
        self.unreadable_from = 1 << 62
        self.bytes_read = 0

    # -- faults ----------------------------------------------------------------------------------------------------

    def fail(self, number: int, code: int = errno.ENOSPC, *, until: int | None = None) -> None:
        """Fail the call with this number (counted from now, 0 is the next) and those before `until`."""
        last = number + 1 if until is None else until
        self.calls.clear()
        self._fault = lambda call, at: code if number <= at < last else None

    def heal(self) -> None:
        self._fault = lambda call, number: None

    def _call(self, name: str) -> None:
        number = len(self.calls)
        self.calls.append(name)
        code = self._fault(name, number)
        if code is not None:
            raise OSError(code, f"{os.strerror(code)} (injected into {name})")

    # -- crashes ---------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """The process is gone: handles and locks too, written bytes stay."""
        self._handles.clear()
        self._locked.clear()

    def cut_power(self, chance: random.Random) -> None:
        """The machine is gone: of what was not synced, some is there and some is not."""
        self.kill()
        names = dict(self.names_durable)
        for path in sorted({*self.names_now, *self.names_durable}):
            if self.names_now.get(path) is not self.names_durable.get(path) and chance.random() < 0.5:
                if path in self.names_now:
                    names[path] = self.names_now[path]
                else:
                    names.pop(path, None)
        for _, inode in sorted(names.items(), key=lambda item: item[0]):
            inode.written[:] = self._survived(inode, chance)
            inode.durable = bytes(inode.written)
        self.names_now, self.names_durable = names, dict(names)

    @staticmethod
    def _survived(inode: Inode, chance: random.Random) -> bytes:
        written, durable = bytes(inode.written), inode.durable
        if written == durable:
            return durable
        if not written.startswith(durable):  # overwritten or cut: one or the other
            return chance.choice([written, durable])
        kept = chance.randint(len(durable), len(written))
        zeros = chance.choice([0, 0, len(written) - kept])
        return written[:kept] + bytes(zeros)

    # -- Files -----------------------------------------------------------------------------------------------------

    def make_folder(self, path: str) -> None:
        pass

    def names(self, folder: str) -> list[str]:
        return [os.path.basename(path) for path in self.names_now if os.path.dirname(path) == folder]

    def size_of(self, path: str) -> int:
        return len(self._inode(path).written)

    def open(self, path: str, *, create: bool = False) -> int:
        if create and path not in self.names_now:
            self._call("create")
            self.names_now[path] = Inode()
        self._next_handle += 1
        self._handles[self._next_handle] = self._inode(path)
        return self._next_handle

    def close(self, handle: int) -> None:
        self._handles.pop(handle, None)
        self._locked.pop(handle, None)

    def pread(self, handle: int, length: int, offset: int, /) -> bytes:
        assert length >= 0
        assert offset >= 0
        if self.reads_fail or offset + length > self.unreadable_from:
            raise OSError(errno.EIO, "injected into a read")
        data = bytes(self._open(handle).written[offset : offset + length])
        self.bytes_read += len(data)
        return data

    def pwritev(self, handle: int, buffers: Buffers, offset: int, /) -> int:
        data = b"".join(buffers)
        inode = self._open(handle)
        try:
            self._call("write")
        except OSError:
            data = data[: len(data) // 2]  # a full disk takes what fits before it says so
            self._put(inode, data, offset)
            raise
        self._put(inode, data, offset)
        return len(data)

    @staticmethod
    def _put(inode: Inode, data: bytes, offset: int) -> None:
        if len(inode.written) < offset:
            inode.written.extend(bytes(offset - len(inode.written)))
        inode.written[offset : offset + len(data)] = data

    def map(self, handle: int, length: int, /) -> FakeMappedFile:
        self._call("map")
        inode = self._open(handle)
        inode.written.extend(bytes(length - len(inode.written)))
        return FakeMappedFile(inode)

    def truncate(self, handle: int, length: int, /) -> None:
        self._call("truncate")
        del self._open(handle).written[length:]

    def sync(self, handle: int, /) -> None:
        self._call("sync")
        inode = self._open(handle)
        inode.durable = bytes(inode.written)

    def check_room(self, folder: str, length: int) -> None:
        self._call("write")

    def sync_folder(self, path: str) -> None:
        self._call("sync_folder")
        for name in [name for name in self.names_durable if os.path.dirname(name) == path]:
            del self.names_durable[name]
        self.names_durable.update({n: i for n, i in self.names_now.items() if os.path.dirname(n) == path})

    def rename(self, source: str, target: str) -> None:
        self._call("rename")
        self.names_now[target] = self._inode(source)
        del self.names_now[source]

    def unlink(self, path: str) -> None:
        self._call("unlink")
        self._inode(path)
        del self.names_now[path]

    def lock(self, path: str) -> int:
        if path in self._locked.values():
            raise QueueLocked(f"another process has the queue in {os.path.dirname(path)}")
        self.names_now.setdefault(path, Inode())
        handle = self.open(path)
        self._locked[handle] = path
        return handle

    def free_bytes(self, path: str) -> int:
        return self.free

    def _inode(self, path: str) -> Inode:
        try:
            return self.names_now[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _open(self, handle: int) -> Inode:
        try:
            return self._handles[handle]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
