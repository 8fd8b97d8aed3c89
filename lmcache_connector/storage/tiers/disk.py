"""``file:///dir?max_size=100GB``: one file a value, on a local disk or a shared file system.

    dir/<namespace>/<first 2 digits of the chunk hash>/<chunk hash>-<group>
    dir/tmp/<host>.<pid>.<random>    being written; renamed when whole

No symbolic link is followed; what is not ours is passed over. Nothing is synced: after a power cut
values may not verify. ``max_size`` bounds what a walk at open finds and this process puts, in
blocks on disk and 4 KiB a value for its folder; what was least lately read or written makes way.
Puts wait for the walk, for a second; then they are dropped. N processes in one directory keep it
below N times ``max_size``.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from urllib.parse import unquote

from lmcache_connector.config import parse_size
from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers import base
from lmcache_connector.storage.tiers.base import TierError, TierStats, TierUrl

# Nothing lies there, or no file; and what is perhaps wrong with one file alone.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESTALE)
_DAMAGED = (errno.EACCES, errno.EBADMSG, errno.EIO, errno.EPERM, errno.EUCLEAN)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a fifo does not block
_BLOCK = 4096


def open_url(url: TierUrl) -> DiskTier:
    max_bytes = base.take_options(url, {"max_size": parse_size}).get("max_size")
    path = unquote(url.path)
    if url.host or not path.startswith("/") or "\0" in path:
        raise ConfigError(f"tiers: {url.text!r} names no absolute directory: write file:///dir")
    return DiskTier(path, max_bytes if isinstance(max_bytes, int) else None)


class DiskTier(base.Tier):
    """See ``Tier``."""

    def __init__(self, path: str, max_bytes: int | None) -> None:
        self._root = os.path.realpath(path)
        self._tmp = f"{self._root}/tmp"
        self._max_bytes = max_bytes
        self._limit = max_bytes or 1 << 63
        self._lock = threading.RLock()
        self._known = OrderedDict[str, int]()  # name -> bytes; the first makes way first
        self._used = 0  # by what is known and what is being written
        self._is_closed = False
        self._walked = threading.Event()
        self._thread = threading.Thread(target=self._walk, name="disk-walk", daemon=True)
        try:
            for folder in (self._root, self._tmp):
                os.makedirs(folder, 0o700, exist_ok=True)
                opened = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
                mode = os.fstat(opened).st_mode
                os.close(opened)
                if mode & stat.S_IWOTH:
                    # A checksum tells damage, not intent.
                    raise PermissionError(f"anybody can write to {folder}: chmod o-w")
            self._sweep()
        except OSError as error:
            raise TierError(f"file://{path} cannot be used: {error}") from error
        self._thread.start()

    def contains(self, names: Sequence[str]) -> list[bool]:
        return [self._find(name) is not None for name in names]

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        try:
            with open(self._path(name), "rb", opener=lambda path, _: os.open(path, _READ)) as file:
                found = os.fstat(file.fileno())
                is_it = stat.S_ISREG(found.st_mode) and found.st_size == sum(map(len, buffers))
                if not is_it or any(file.readinto(buffer) != len(buffer) for buffer in buffers):
                    return False
                if time.time() - found.st_mtime > 60:
                    with suppress(OSError):  # the order after a restart, no more
                        os.utime(file.fileno())
        except OSError as error:
            if error.errno in (*_ABSENT, *_DAMAGED):
                return False
            raise TierError(f"file://: {name} cannot be read: {error}") from error
        with suppress(KeyError):
            self._known.move_to_end(name)
        return True

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        size = sum(map(len, buffers))
        room = (size // _BLOCK + 2) * _BLOCK
        if self._max_bytes and not self._walked.wait(timeout=1):
            raise base.DroppedError(f"file://{self._root}: what lies there is still being counted")
        with self._lock:
            if room <= self._limit:
                self._evict(self._used + room - self._limit)
            if self._used + room > self._limit:
                raise TierError(f"file://{self._root}: {room} bytes find no room in max_size")
            self._used += room
        try:
            for is_last in (False, True):
                try:
                    return self._write(name, buffers, size)
                except OSError as error:
                    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                    is_gone = error.errno in (errno.ENOENT, errno.EEXIST)  # its folder
                    if is_last or not (is_full or is_gone):
                        raise TierError(f"file://: {name} cannot be written: {error}") from error
                    self._evict(room if is_full and self._max_bytes else 0)
        finally:
            with self._lock:
                self._used -= room

    def remove(self, name: str) -> None:
        with self._lock:
            try:
                os.unlink(self._path(name))
                with suppress(OSError):  # other values lie there
                    os.rmdir(f"{self._root}/{name[:19]}")
                    os.rmdir(f"{self._root}/{name[:16]}")
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise TierError(f"file://: {name} cannot be removed: {error}") from error
            self._used -= self._known.pop(name, 0)

    def clear(self, namespace: str) -> None:
        for _, name, _ in self._values(f"{namespace}/"):
            self.remove(name)

    def stats(self) -> TierStats:
        return TierStats(self._used, self._max_bytes, len(self._known))

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(timeout=5)

    def _path(self, name: str) -> str:
        """Where a value lies: below the directory by its name, in folders that are no links."""
        assert base.NAME.fullmatch(name), name
        folder = f"{self._root}/{name[:19]}"
        if any(map(os.path.islink, (folder, folder[:-3], self._tmp))):
            raise OSError(errno.ELOOP, "a folder is a symbolic link", folder)
        return folder + name[16:]

    def _find(self, name: str) -> tuple[float, str, int] | None:
        """Time of use, name and bytes on disk of a value."""
        with suppress(OSError):
            found = os.lstat(self._path(name))
            if stat.S_ISREG(found.st_mode) and found.st_size:
                return found.st_mtime, name, max(found.st_size, found.st_blocks * 512) + _BLOCK
        return None

    def _write(self, name: str, buffers: Sequence[memoryview], size: int) -> None:
        path = self._path(name)
        os.makedirs(self._tmp, 0o700, exist_ok=True)
        fd, temporary = tempfile.mkstemp("", f"{os.uname().nodename}.{os.getpid()}.", self._tmp)
        try:
            with open(fd, "wb") as file:  # closing is where NFS tells of failed writes
                file.writelines(buffers)
            found = os.lstat(temporary)
            if found.st_size != size:
                raise OSError(errno.EIO, f"{found.st_size} of {size} bytes were written")
            cost = max(size, found.st_blocks * 512) + _BLOCK
            with self._lock:
                for folder in (name[:16], name[:19]):
                    os.makedirs(f"{self._root}/{folder}", 0o700, exist_ok=True)
                os.rename(temporary, path)
                self._used += cost - self._known.pop(name, 0)
                self._known[name] = cost
        finally:
            with suppress(OSError):  # renamed
                os.unlink(temporary)

    def _evict(self, num_bytes: int) -> None:
        """Remove the oldest values until so many bytes are free or none is left."""
        with self._lock:
            while num_bytes > 0 and self._known:
                name, cost = self._known.popitem(last=False)
                self._known[name] = cost  # at the end: one that cannot be removed is not met again
                num_bytes -= cost
                self.remove(name)

    def _sweep(self) -> None:
        """Remove what dead processes, or this one's forerunner of the same pid, left unfinished."""
        for file in os.listdir(self._tmp):
            with suppress(OSError, ValueError):  # gone, or foreign
                host, pid, _ = file.rsplit(".", 2)
                is_dead = pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}")
                is_old = time.time() - os.lstat(f"{self._tmp}/{file}").st_mtime > 3600
                if is_old or (is_dead and host == os.uname().nodename):
                    os.unlink(f"{self._tmp}/{file}")

    def _walk(self) -> None:
        walked = sorted(self._values())
        with self._lock, suppress(TierError):  # the next put tells it
            for _, name, cost in walked:
                self._used += cost - self._known.pop(name, 0)
                self._known[name] = cost
            self._evict(self._used - self._limit)
        self._walked.set()

    def _values(self, prefix: str = "") -> Iterator[tuple[float, str, int]]:
        """What ``_find`` finds under names that begin with ``prefix``, until ``close``."""
        for folder, below, files in os.walk(self._root):
            if self._is_closed or len(folder) > len(self._root) + 17:  # deeper than namespaces
                below.clear()
            for name in (f"{folder[-19:-3]}/{file}" for file in files if not self._is_closed):
                is_ours = base.NAME.fullmatch(name) and name.startswith(prefix)
                if is_ours and (value := self._find(name)):
                    yield value
