"""Private Unix sockets: where they lie, who may connect, and the names that crashes leave.

An endpoint is two of them in one directory: ``name`` speaks ZeroMQ, ``name.fd`` hands out memory
and tokens (protocol.py). Who has the second has both.
"""

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

from lmcache_connector.errors import ProtocolError, StartupError

# Packets keep their borders, and the descriptor that came with one stays with it.
SOCKET_TYPE = socket.SOCK_SEQPACKET
# struct sockaddr_un holds 108 bytes, the final zero included.
_MAX_PATH_BYTES = 107
_OUR_NAME = re.compile(r"[0-9a-f]{24}(-[0-9a-f]{8})?\.sock(-hs)?(\.fd)?")
_UCRED = struct.Struct("iII")


def memory_path(endpoint: Path) -> Path:
    """The memory socket of an endpoint."""
    return endpoint.with_name(f"{endpoint.name}.fd")


def hidden_endpoint(endpoint: Path) -> Path:
    """Where hidden states are kept beside the KV of an endpoint."""
    return endpoint.with_name(f"{endpoint.name}-hs")


def socket_path_for(engine_id: str) -> Path:
    """The endpoint of this engine core: a short name in a directory of our own.

    Raises:
        StartupError: the directory cannot be trusted, or its name is too long.
    """
    directory = Path(tempfile.gettempdir()) / f"lmcache-{os.geteuid()}"
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    path = directory / f"{name}.sock"
    _check_length(hidden_endpoint(_other_name(path)), "set TMPDIR to a shorter path")
    ensure_private_directory(directory)
    return path


def _check_length(endpoint: Path, fix: str) -> None:
    if len(os.fsencode(memory_path(endpoint))) > _MAX_PATH_BYTES:
        raise StartupError(f"the socket path {endpoint} is too long for the system; {fix}")


def _other_name(path: Path) -> Path:
    return path.with_stem(f"{path.stem}-{secrets.token_hex(4)}")


def ensure_private_directory(directory: Path, mode: int = 0o700) -> None:
    """Make a directory for sockets, with ``mode``.

    Raises:
        StartupError: it cannot be made, or others could put sockets of theirs there.
    """
    try:
        directory.mkdir()
        directory.chmod(mode)
    except FileExistsError:
        pass
    except OSError as error:
        problem = f"{directory} for sockets cannot be made (where it goes must be there): {error}"
        raise StartupError(problem) from error
    status = directory.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o022:
        raise StartupError(
            f"{directory} must be a directory of user {os.geteuid()} that nobody else can "
            f"write to (it has owner {status.st_uid}, mode {mode:04o}); remove it or choose "
            "another place: TMPDIR for an engine, the endpoint for a server"
        )


def listen_private(
    endpoint: Path, *, exclusive: bool = False, mode: int = 0o600
) -> tuple[socket.socket, Path]:
    """Listen at an endpoint's memory socket, for this user only unless ``mode`` says otherwise;
    the endpoint is another one beside it when a live service has it.

    Dead names of earlier services in the directory are removed first.

    Raises:
        OSError: the directory cannot be written to.
        StartupError: with ``exclusive``: the name is taken, or too long.
    """
    directory = endpoint.parent
    _check_length(endpoint, "choose a shorter one")
    with _directory_lock(directory):
        ours = (Path(entry) for entry in os.scandir(directory) if _OUR_NAME.fullmatch(entry.name))
        for name in (endpoint, memory_path(endpoint), *ours):
            if _is_dead(name):
                name.unlink(missing_ok=True)
        while any(map(os.path.lexists, (endpoint, memory_path(endpoint)))):
            if exclusive:
                raise StartupError(
                    f"{endpoint} is taken: by a cache server that runs, or by a file that is "
                    "no socket; use that server, end it, or choose another endpoint"
                )
            endpoint = _other_name(endpoint)
        listener = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
        try:
            listener.bind(str(memory_path(endpoint)))
            memory_path(endpoint).chmod(mode)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    return listener, endpoint


def remove_socket(endpoint: Path, inode: int) -> None:
    """Remove the names of an endpoint whose memory socket was bound as ``inode``, unless another
    has them now."""
    with contextlib.suppress(FileNotFoundError), _directory_lock(endpoint.parent):
        if memory_path(endpoint).lstat().st_ino == inode:
            memory_path(endpoint).unlink()
            endpoint.unlink()


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


def connect(path: Path, timeout: float) -> socket.socket:
    """Connect to the memory socket at ``path``, run by us, root or the owner of its directory.

    Raises:
        OSError: nobody is there, or no answer within ``timeout`` seconds.
        ProtocolError: somebody else is.
    """
    connection = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
    try:
        connection.settimeout(timeout)
        connection.connect(str(path))
        uid = peer_uid(connection)
        if not is_trusted(uid) and uid != path.parent.stat().st_uid:
            raise ProtocolError(f"the service at {path} is run by user {uid}")
    except (OSError, ProtocolError):
        connection.close()
        raise
    return connection


def our_endpoints() -> tuple[list[str], list[Path]]:
    """What lies in this user's directory: live endpoints, and names of dead sockets.

    Raises:
        StartupError: the directory cannot be trusted.
    """
    names = sorted(socket_path_for("").parent.iterdir())
    dead = [name for name in names if _OUR_NAME.fullmatch(name.name) and _is_dead(name)]
    live = [name for name in names if memory_path(name) in {*names}.difference(dead)]
    return [f"ipc://{name}" for name in live if name.suffix == ".sock"], dead
