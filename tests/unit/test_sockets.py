"""Where private sockets lie, and what happens to names that are in use or left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_connector.errors import StartupError
from lmcache_connector.server import sockets


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, with a name short enough for sockets (tmp_path has a long one)."""
    with tempfile.TemporaryDirectory(prefix="lc-") as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for listener in opened:
        listener.close()


def test_socket_path_is_short_stable_and_private(temp: Path) -> None:
    name = "engine with a / long name" * 50
    path = sockets.socket_path_for(name)
    assert path == sockets.socket_path_for(name)
    assert path != sockets.socket_path_for("another")
    assert path.parent == temp / f"lmcache-{os.geteuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["open", "link", "file", "foreign"])
def test_a_directory_that_cannot_be_trusted_is_refused(
    temp: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    directory = temp / f"lmcache-{os.geteuid()}"
    if kind == "open":
        directory.mkdir()
        directory.chmod(0o770)
    elif kind == "link":
        (temp / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(temp / "elsewhere")
    elif kind == "file":
        directory.touch(mode=0o600)
    else:
        uid = os.geteuid() + 1
        monkeypatch.setattr("os.geteuid", lambda: uid)
        (temp / f"lmcache-{uid}").mkdir(mode=0o700)
    with pytest.raises(StartupError, match="TMPDIR"):
        sockets.socket_path_for("engine")


def test_a_path_too_long_for_the_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(StartupError, match="TMPDIR"):
        sockets.socket_path_for("engine")


def test_the_socket_is_for_its_user_only(temp: Path, listeners: list[socket.socket]) -> None:
    wanted = sockets.socket_path_for("engine")
    listener, path = sockets.listen_private(wanted)
    listeners.append(listener)
    assert path == wanted
    assert stat.S_IMODE(sockets.memory_path(path).stat().st_mode) == 0o600


def test_a_name_in_use_is_left_alone(temp: Path, listeners: list[socket.socket]) -> None:
    wanted = sockets.socket_path_for("engine")
    paths = []
    for _ in range(3):
        listener, path = sockets.listen_private(wanted)
        listeners.append(listener)
        paths.append(path)
    assert paths[0] == wanted
    assert len(set(paths)) == 3
    assert {path.parent for path in paths} == {wanted.parent}
    for path in paths:
        sockets.connect(sockets.memory_path(path), 5.0).close()


def test_a_server_takes_its_own_name_or_none(temp: Path, listeners: list[socket.socket]) -> None:
    temp.chmod(0o700)
    wanted = temp / "kv"
    listener, path = sockets.listen_private(wanted, exclusive=True)
    listeners.append(listener)
    assert path == wanted
    with pytest.raises(StartupError, match="is taken: by a cache server that runs"):
        sockets.listen_private(wanted, exclusive=True)
    file = temp / "file"
    file.write_text("of somebody")
    with pytest.raises(StartupError, match="or by a file that is no socket"):
        sockets.listen_private(file, exclusive=True)
    assert file.read_text() == "of somebody"
    # ZeroMQ would take the name away from whoever listens there.
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(temp / "other"))
        other.listen(1)
        with pytest.raises(StartupError, match="is taken"):
            sockets.listen_private(temp / "other", exclusive=True)
    listener, _ = sockets.listen_private(temp / "other", exclusive=True)
    listeners.append(listener)
    with pytest.raises(StartupError, match="choose a shorter one"):
        sockets.listen_private(temp / ("x" * 100), exclusive=True)


@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_a_directory_is_made_with_its_mode(temp: Path, mode: int) -> None:
    sockets.ensure_private_directory(temp / "new", mode)
    assert stat.S_IMODE((temp / "new").stat().st_mode) == mode
    sockets.ensure_private_directory(temp / "new")
    assert stat.S_IMODE((temp / "new").stat().st_mode) == mode
    with pytest.raises(StartupError, match="cannot be made"):
        sockets.ensure_private_directory(temp / "missing" / "new")


OWNER = """
import sys, time
from pathlib import Path
from lmcache_connector.server import sockets

kept = [sockets.listen_private(Path(path)) for path in sys.argv[1:]]
print("started", flush=True)
time.sleep(60)
"""


def test_names_of_killed_owners_are_swept_at_the_next_start(
    temp: Path, listeners: list[socket.socket]
) -> None:
    paths = [sockets.socket_path_for(name) for name in ("engine-0", "engine-1")]
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *map(str, paths)], stdout=subprocess.PIPE
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"started\n"
            listener, alive = sockets.listen_private(sockets.socket_path_for("engine-2"))
            alive = sockets.memory_path(alive)
            listeners.append(listener)
            assert all(sockets.memory_path(path).exists() for path in paths)
        finally:
            owner.kill()
    others = [alive.with_name("0" * 24 + ".sock"), alive.with_name("not-ours.sock")]
    for other in others:
        other.touch()
    # What ZeroMQ leaves behind.
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(paths[1]))
    listener, path = sockets.listen_private(paths[0])
    listeners.append(listener)
    # It gets the dead one's name; the other dead one is removed; nothing else is.
    assert path == paths[0]
    assert set(path.parent.iterdir()) == {sockets.memory_path(path), alive, *others}


def test_a_name_is_removed_by_the_one_that_has_it(
    temp: Path, listeners: list[socket.socket]
) -> None:
    wanted = sockets.socket_path_for("engine")
    first, path = sockets.listen_private(wanted)
    listeners.append(first)
    memory = sockets.memory_path(path)
    inode = memory.lstat().st_ino
    # Somebody cleans the directory, and a successor takes the name.
    memory.rename(path.with_name("moved"))
    second, path = sockets.listen_private(wanted)
    listeners.append(second)
    assert path == wanted
    path.touch()
    sockets.remove_socket(path, inode)
    assert memory.exists()
    assert path.exists()
    sockets.remove_socket(path, memory.lstat().st_ino)
    assert not memory.exists()
    assert not path.exists()
    sockets.remove_socket(path, inode)
    path.with_name("moved").unlink()
    path.parent.rmdir()
    sockets.remove_socket(path, inode)
