"""Private Unix sockets: where they lie, who may connect, and the names that crashes leave."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache_connector.errors import StartupError

# Packets keep their borders, and the descriptor that came with one stays with it.
SOCKET_TYPE = socket.SOCK_SEQPACKET
# struct sockaddr_un holds 108 bytes, the final zero included.
_MAX_PATH_BYTES = 107
_OUR_NAME = re.compile(r"[0-9a-f]{24}(-[0-9a-f]{8})?\.sock")
_UCRED = struct.Struct("iII")


def socket_path_for(engine_id: str) -> Path:
    """Where the service of this engine core listens: a short name in a directory of our own.

    Raises:
        StartupError: the directory cannot be trusted, or its name is too long.
    """
    directory = Path(tempfile.gettempdir()) / f"lmcache-{os.geteuid()}"
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    path = directory / f"{name}.sock"
    if len(os.fsencode(_other_name(path))) > _MAX_PATH_BYTES:
        raise StartupError(
            [f"the socket path {path} is too long for the system; set TMPDIR to a shorter path"]
        )
    _ensure_private_directory(directory)
    return path


def _other_name(path: Path) -> Path:
    return path.with_stem(f"{path.stem}-{secrets.token_hex(4)}")


def _ensure_private_directory(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o022:
        raise StartupError(
            [
                f"{directory} must be a directory of user {os.geteuid()} that nobody else can "
                f"write to (it has owner {status.st_uid}, mode {mode:04o}); remove it or set "
                "TMPDIR to another place"
            ]
        )


def listen_private(path: Path) -> tuple[socket.socket, Path]:
    """Listen at ``path`` for this user only; at a name beside it when a live service has it.

    Dead names of earlier services in the directory are removed first.

    Raises:
        OSError: the directory cannot be written to.
    """
    with _directory_lock(path.parent):
        ours = (Path(entry) for entry in os.scandir(path.parent) if _OUR_NAME.fullmatch(entry.name))
        for name in (path, *ours):
            if _is_dead(name):
                name.unlink(missing_ok=True)
        while os.path.lexists(path):
            path = _other_name(path)
        listener = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    return listener, path


def remove_socket(path: Path, inode: int) -> None:
    """Remove the name of a socket that was bound as ``inode``, unless another has it now."""
    with contextlib.suppress(FileNotFoundError), _directory_lock(path.parent):
        if path.lstat().st_ino == inode:
            path.unlink()


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    """Names in the directory change under this lock; the kernel drops it with its holder."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_dead(path: Path) -> bool:
    """Whether this is the name of a socket that nobody listens at any more."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, SOCKET_TYPE)) as probe:
        probe.setblocking(False)
        refused = probe.connect_ex(str(path)) == errno.ECONNREFUSED
    # Anything that is no socket refuses too.
    return refused and path.is_socket()


def peer_uid(connection: socket.socket) -> int:
    """The user who made the other end, told by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return int(uid)


def is_trusted(uid: int) -> bool:
    """Ourselves, and root."""
    return uid in (0, os.geteuid())
