"""``file://`` where disks are full, broken or hostile, and its limit on bytes."""

from __future__ import annotations

import builtins
import errno
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest

from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers import disk
from lmcache_connector.storage.tiers.base import (
    DroppedError,
    TierError,
    header_bytes,
    open_tier,
    parse_tier_url,
)
from lmcache_connector.storage.tiers.disk import DiskTier

SIZES = [100, 5000]
BLOCK = 4096


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = set(os.listdir("/proc/self/fd")) - before
    assert not [fd for fd in left if os.path.exists(f"/proc/self/fd/{fd}")]


@contextmanager
def opened(path: Path, max_bytes: int | None = None) -> Iterator[DiskTier]:
    """With all that lies there counted."""
    tier = DiskTier(str(path), max_bytes)
    assert tier._walked.wait(10)
    yield tier
    tier.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "values"


@pytest.fixture
def tier(root: Path) -> Iterator[DiskTier]:
    with opened(root) as tier:
        yield tier


def path_of(root: Path, name: str) -> Path:
    namespace, file = name.split("/")
    return root / namespace / file[:2] / file


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def is_miss(values: ModuleType, tier: DiskTier, name: str) -> bool:
    try:
        return values.read_verified(tier, name, SIZES) is None
    except values.DamagedError:
        return True


def within_seconds(call: Callable[[], Any]) -> Any:
    """The result of a call that must not block."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(5)
    assert results, "it blocks, or raised"
    return results[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- The URL, the layout, restarts -----------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("file://tmp/x", "file:///dir"),
        ("file:tmp/x", "such as file:///"),
        ("file://", "file:///dir"),
        ("file:///tmp/%00", "file:///dir"),
        ("file:///tmp/x?max_size=lots", "max_size=lots"),
        ("file:///tmp/x?max_size=0", "max_size=0"),
        ("file:///tmp/x?size=1GB", "no option 'size'"),
    ],
)
def test_wrong_urls_are_refused_with_the_fix(url: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_tier(parse_tier_url(url))
    assert part in str(caught.value)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match="cannot be used"):
        DiskTier(f"{tmp_path}/file/below", None)


def test_layout_and_permissions(tmp_path: Path, values: ModuleType) -> None:
    tier = open_tier(parse_tier_url(f"file://{tmp_path}/a%20b?max_size=1GB"))
    root = tmp_path / "a b"
    name = values.random_name()
    values.put_value(tier, name, SIZES)
    assert files_below(root) == {f"{name[:16]}/{name[17:19]}/{name[17:]}"}
    assert tier.stats().capacity_bytes == 10**9
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    tier.remove(name)
    assert [path.name for path in root.rglob("*")] == ["tmp"]
    tier.close()


def test_values_outlive_the_tier_and_are_counted_again(root: Path, values: ModuleType) -> None:
    names = [values.random_name() for _ in range(20)]
    with opened(root) as tier:
        shards = [values.put_value(tier, name, SIZES, seed) for seed, name in enumerate(names)]
        stats = tier.stats()
    assert stats.num_values == 20
    for max_bytes in (None, 1 << 30):
        with opened(root, max_bytes) as tier:
            assert tier.stats().used_bytes == stats.used_bytes
            assert tier.stats().num_values == 20
            assert [values.read_verified(tier, name, SIZES) for name in names] == shards


def test_a_directory_that_is_emptied_meanwhile_is_made_again(
    tier: DiskTier, root: Path, values: ModuleType
) -> None:
    name = values.random_name()
    values.put_value(tier, name, SIZES)
    subprocess.run(["rm", "-r", root], check=True)
    assert is_miss(values, tier, name)
    shards = values.put_value(tier, name, SIZES)
    assert values.read_verified(tier, name, SIZES) == shards


# --- Faults of the disk ----------------------------------------------------------------------


class FaultyFile:
    """A file whose writes or reads fail after some bytes; ``code`` 0: they are lost silently."""

    def __init__(self, file: Any, code: int, num_good_bytes: int, at_close: bool) -> None:
        self._file, self._code, self._left = file, code, num_good_bytes
        self._at_close = at_close

    def fileno(self) -> int:
        return int(self._file.fileno())

    def writelines(self, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            part = buffer[: self._left]
            self._file.write(part)
            self._left -= len(part)
            if len(part) < len(buffer) and self._code and not self._at_close:
                raise OSError(self._code, os.strerror(self._code))

    def readinto(self, buffer: memoryview) -> int:
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return int(self._file.readinto(buffer[: self._left]))

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()
        if self._at_close and error is None:
            raise OSError(self._code, os.strerror(self._code))


def break_files(
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    num_good_bytes: int = 2000,
    times: int = 1000,
    at_close: bool = False,
) -> None:
    """The next ``times`` files that the tier opens are faulty."""
    left = [times]

    def faulty_open(*arguments: Any, **options: Any) -> Any:
        file = builtins.open(*arguments, **options)  # noqa: SIM115 (the tier closes it)
        left[0] -= 1
        return FaultyFile(file, code, num_good_bytes, at_close) if left[0] >= 0 else file

    monkeypatch.setattr(disk, "open", faulty_open, raising=False)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, 0])
@pytest.mark.parametrize("num_good_bytes", [0, 2000])
@pytest.mark.parametrize("max_bytes", [None, 1 << 20])
def test_a_write_that_fails_leaves_what_was_there(
    root: Path,
    values: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    num_good_bytes: int,
    max_bytes: int | None,
) -> None:
    other, name = sorted(values.random_name() for _ in range(2))
    with opened(root, max_bytes) as tier:
        shards = values.put_value(tier, name, SIZES, 1)
        used = tier.stats().used_bytes
        break_files(monkeypatch, code, num_good_bytes)
        for failing in (name, other):
            with pytest.raises(TierError):
                values.put_value(tier, failing, SIZES, 2)
        monkeypatch.undo()
        assert is_miss(values, tier, other)
        # A full disk makes a tier with a limit give up values of its own.
        gave_up = max_bytes is not None and code in (errno.ENOSPC, errno.EDQUOT)
        assert files_below(root) == (
            set() if gave_up else {f"{name[:16]}/{name[17:19]}/{name[17:]}"}
        )
        assert tier.stats().used_bytes == (0 if gave_up else used)
        assert values.read_verified(tier, name, SIZES) == (None if gave_up else shards)
        assert values.put_value(tier, other, SIZES, 2) == values.read_verified(tier, other, SIZES)


def test_a_write_that_fails_when_the_file_is_closed(
    tier: DiskTier, root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_files(monkeypatch, errno.EIO, 10**9, at_close=True)
    with pytest.raises(TierError, match=os.strerror(errno.EIO)):
        values.put_value(tier, values.random_name(), SIZES)
    assert files_below(root) == set()


def test_a_full_disk_costs_the_oldest_value_and_no_store(
    root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [values.random_name() for _ in range(4)]
    with opened(root, 1 << 20) as tier:
        for name in names[:3]:
            values.put_value(tier, name, SIZES)
        break_files(monkeypatch, errno.ENOSPC, times=1)
        values.put_value(tier, names[3], SIZES)
        assert tier.contains(names) == [False, True, True, True]


@pytest.mark.parametrize(("call", "code"), [("rename", errno.ENOENT), ("makedirs", errno.EEXIST)])
def test_a_folder_that_another_host_removed_is_made_again(
    root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    old, name = values.random_name(), values.random_name()
    real = getattr(os, call)
    left = [1]

    def fail(*arguments: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, os.strerror(code))
        real(*arguments, **options)

    with opened(root, 1 << 20) as tier:
        values.put_value(tier, old, SIZES)
        monkeypatch.setattr(os, call, fail)
        shards = values.put_value(tier, name, SIZES)
        assert values.read_verified(tier, name, SIZES) == shards
        left[0] = 1000
        with pytest.raises(TierError):
            values.put_value(tier, values.random_name(), SIZES)
        # The disk is not full: nothing makes way.
        assert tier.contains([old, name]) == [True, True]
        monkeypatch.undo()
    assert files_below(root / "tmp") == set()


@pytest.mark.parametrize("call", ["rename", "makedirs", "lstat"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE])
def test_other_calls_that_fail_while_writing(
    tier: DiskTier,
    root: Path,
    values: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(TierError):
        values.put_value(tier, values.random_name(), SIZES)
    monkeypatch.undo()
    assert files_below(root) == set()
    assert tier.stats().used_bytes == 0


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.EBADMSG, errno.EIO, errno.EPERM, errno.ESTALE, errno.EUCLEAN, 0]
)
def test_a_file_that_alone_cannot_be_read_is_no_value(
    tier: DiskTier, values: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int, at: str
) -> None:
    """0: it is truncated while it is read."""
    name = values.random_name()
    shards = values.put_value(tier, name, SIZES)
    with monkeypatch.context() as patch:
        fail_reads(patch, code, at if code else "read")
        assert values.read_verified(tier, name, SIZES) is None
    assert values.read_verified(tier, name, SIZES) == shards


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT])
def test_reads_that_fail_for_want_of_something_else_are_no_misses(
    tier: DiskTier, values: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int, at: str
) -> None:
    name = values.random_name()
    values.put_value(tier, name, SIZES)
    fail_reads(monkeypatch, code, at)
    with pytest.raises(TierError, match=os.strerror(code)):
        values.read_verified(tier, name, SIZES)


def fail_reads(monkeypatch: pytest.MonkeyPatch, code: int, at: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    if at == "open":
        monkeypatch.setattr(os, "open", fail)
    else:
        break_files(monkeypatch, code)


def test_permission_denied(
    tier: DiskTier, root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = values.random_name()
    shards = values.put_value(tier, name, SIZES)
    path_of(root, name).chmod(0)
    (root / "tmp").chmod(0)
    if os.geteuid() == 0:  # whom the modes do not keep out

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    assert values.read_verified(tier, name, SIZES) is None
    with pytest.raises(TierError, match="Permission denied"):
        values.put_value(tier, values.random_name(), SIZES)
    monkeypatch.undo()
    path_of(root, name).chmod(0o600)
    (root / "tmp").chmod(0o700)
    assert values.read_verified(tier, name, SIZES) == shards


# --- Damaged values --------------------------------------------------------------------------

HEADER_BYTES = header_bytes(len(SIZES))
PLACES = {
    "magic": 0,
    "version": 8,
    "count": 12,
    "name": 16,
    "size of the first shard": 24,
    "digest of the first shard": 32,
    "size of the last shard": 40,
    "digest of the last shard": 48,
    "check": HEADER_BYTES - 1,
    "start of the first shard": HEADER_BYTES,
    "end of the first shard": HEADER_BYTES + SIZES[0] - 1,
    "start of the last shard": HEADER_BYTES + SIZES[0],
    "middle of the last shard": HEADER_BYTES + SIZES[0] + SIZES[1] // 2,
    "end of the last shard": HEADER_BYTES + SIZES[0] + SIZES[1] - 1,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_found(tier: DiskTier, root: Path, values: ModuleType, place: str) -> None:
    name = values.random_name()
    values.put_value(tier, name, SIZES)
    path = path_of(root, name)
    whole = path.read_bytes()
    for bit in range(8):
        flipped = bytearray(whole)
        flipped[PLACES[place]] ^= 1 << bit
        path.write_bytes(flipped)
        with pytest.raises(values.DamagedError):
            values.read_verified(tier, name, SIZES)
    tier.remove(name)
    assert tier.contains([name]) == [False]
    shards = values.put_value(tier, name, SIZES)
    assert values.read_verified(tier, name, SIZES) == shards


@pytest.mark.parametrize("kind", ["truncated", "longer", "empty", "foreign", "another value"])
def test_other_bytes_are_no_value(
    tier: DiskTier, root: Path, values: ModuleType, kind: str
) -> None:
    name, other = values.random_name(), values.random_name()
    for each in (name, other):
        values.put_value(tier, each, SIZES)
    path = path_of(root, name)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:-1],
            "longer": whole + b"\0",
            "empty": b"",
            "foreign": random.Random(3).randbytes(len(whole)),
            "another value": path_of(root, other).read_bytes(),
        }[kind]
    )
    assert tier.contains([name, other]) == [kind != "empty", True]
    assert is_miss(values, tier, name)
    assert not is_miss(values, tier, other)
    tier.remove(name)
    assert tier.contains([name]) == [False]
    shards = values.put_value(tier, name, SIZES)
    assert values.read_verified(tier, name, SIZES) == shards


# --- Hostile directories ---------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/s")  # the whole path would be too long
        os.close(folder)
    os.rename(path.parent / "s", path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_loop, make_folder])
def test_what_is_no_file_is_passed_over(
    root: Path, values: ModuleType, make: Callable[[Path], None]
) -> None:
    name = values.random_name()
    path = path_of(root, name)
    path.parent.mkdir(parents=True)
    make(path)
    with opened(root, 1 << 20) as tier:
        assert within_seconds(lambda: tier.contains([name])) == [False]
        for size in (0, 10):
            buffer = memoryview(bytearray(size))
            assert within_seconds(lambda buffer=buffer: tier.get(name, [buffer])) is False
        assert tier.stats().num_values == 0
        if make is make_folder:
            with pytest.raises(TierError):
                values.put_value(tier, name, SIZES)
            tier.remove(name)
            tier.clear(name[:16])
            assert path.is_dir()
            assert tier.stats().used_bytes == 0
        else:
            shards = values.put_value(tier, name, SIZES)
            assert values.read_verified(tier, name, SIZES) == shards
        assert files_below(root / "tmp") == set()


@pytest.mark.parametrize("kind", ["fifo", "file", "dangling link"])
@pytest.mark.parametrize("level", ["namespace", "shard"])
def test_what_is_no_folder_is_passed_over(
    root: Path, values: ModuleType, level: str, kind: str
) -> None:
    name = values.random_name()
    folder = path_of(root, name).parent
    if level == "namespace":
        folder = folder.parent
    folder.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(folder)
    elif kind == "file":
        folder.write_bytes(b"x")
    else:
        folder.symlink_to("nowhere")
    with opened(root) as tier:
        assert within_seconds(lambda: tier.contains([name])) == [False]
        assert within_seconds(lambda: tier.get(name, [memoryview(bytearray(10))])) is False
        with pytest.raises(TierError):
            values.put_value(tier, name, SIZES)
        tier.remove(name)
        tier.clear(name[:16])
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize("level", ["value", "shard", "namespace"])
def test_symbolic_links_lead_nowhere(
    root: Path, tmp_path: Path, values: ModuleType, level: str
) -> None:
    """Neither to a value of this very name outside nor to one inside."""
    name = values.random_name()
    with opened(tmp_path / "outside") as outside:
        values.put_value(outside, name, SIZES)
    there = files_below(tmp_path / "outside")
    path, target = path_of(root, name), path_of(tmp_path / "outside", name)
    for _ in range({"value": 0, "shard": 1, "namespace": 2}[level]):
        path, target = path.parent, target.parent
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with opened(root, 1 << 20) as tier:
        assert tier.contains([name]) == [False]
        assert values.read_verified(tier, name, SIZES) is None
        assert tier.stats().num_values == 0
        tier.clear(name[:16])
        if level != "value":
            with pytest.raises(TierError, match="symbolic link"):
                values.put_value(tier, name, SIZES, 1)
            tier.remove(name)
            assert path.is_symlink()
        else:
            shards = values.put_value(tier, name, SIZES, 1)
            assert values.read_verified(tier, name, SIZES) == shards
            path.unlink()
            path.symlink_to(target)
            tier.remove(name)
            assert not path.is_symlink()
    assert files_below(tmp_path / "outside") == there
    with opened(tmp_path / "outside") as outside:
        assert values.read_verified(outside, name, SIZES) == values.make_shards(SIZES, 0)


def test_a_linked_tmp_is_refused(root: Path, tmp_path: Path, values: ModuleType) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "old.tar.gz").write_bytes(b"x")
    os.utime(outside / "old.tar.gz", (0, 0))
    root.mkdir()
    (root / "tmp").symlink_to(outside)
    with pytest.raises(TierError):
        DiskTier(str(root), None)
    (root / "tmp").unlink()
    with opened(root) as tier:
        (root / "tmp").rmdir()
        (root / "tmp").symlink_to(outside)
        with pytest.raises(TierError, match="symbolic link"):
            values.put_value(tier, values.random_name(), SIZES)
    assert files_below(outside) == {"old.tar.gz"}


@pytest.fixture
def deep_root(root: Path) -> Iterator[Path]:
    """Deeper than recursion goes: pytest could not remove it, in this run or a later one."""
    root.mkdir()
    try:
        deep = os.open(root, os.O_RDONLY)
        for _ in range(1100):
            os.mkdir("d", dir_fd=deep)
            above, deep = deep, os.open("d", os.O_RDONLY, dir_fd=deep)
            os.close(above)
        os.close(deep)
        yield root
    finally:
        subprocess.run(["rm", "-rf", root / "d"], check=True)


def test_a_deep_directory_is_passed_over(deep_root: Path, values: ModuleType) -> None:
    name = values.random_name()
    with opened(deep_root) as tier:
        values.put_value(tier, name, SIZES)
    with opened(deep_root, 1 << 20) as tier:
        assert tier.stats().num_values == 1
        tier.clear(name[:16])
        assert tier.contains([name]) == [False]


def test_foreign_names_are_passed_over(root: Path, values: ModuleType) -> None:
    names = [values.random_name(namespace) for namespace in ["0" * 16, "f" * 16]]
    with opened(root) as tier:
        for name in names:
            values.put_value(tier, name, SIZES)
    file = names[0][17:]
    foreign = [
        os.fsencode(root / part)
        for part in (
            "README",
            "tmp/core",
            f"{'0' * 16}/{file}",
            f"{'0' * 16}/zz/{file}",
            f"{'0' * 16}/{file[:2]}/{file}.bak",
            f"{'0' * 16}/{file[:2]}/{file[:64]}",
            f"{'0' * 16}/{file[:2]}/..{file}",
            f"{'0' * 16}/{file[:2]}/{'x' * 255}",
            f"{'0' * 16}/{file[:2]}/line\nbreak",
            f"{'0' * 16}/{file[:2]}/{file[:2]}/{file}",
            f"{'0' * 15}/{file[:2]}/{file}",
            f"{'G' * 16}/{file[:2]}/{file}",
            f"below/{'0' * 16}/{file[:2]}/{file}",
        )
    ] + [os.fsencode(root) + b"/" + b"0" * 16 + b"/\xff\xfe/\xff"]
    for path in foreign:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with builtins.open(path, "wb") as stream:
            stream.write(b"foreign")
    with opened(root, 1 << 20) as tier:
        assert tier.stats().num_values == 2
        assert not any(is_miss(values, tier, name) for name in names)
        tier.clear("0" * 16)
        assert tier.contains(names) == [False, True]
        assert tier.stats().num_values == 1
    assert all(map(os.path.exists, foreign))


@pytest.mark.parametrize("name", ["", "../x", "0" * 16 + "/../" + "0" * 64 + "-a", "/etc/passwd"])
def test_names_that_are_none_are_not_looked_for(tier: DiskTier, name: str) -> None:
    for call in (
        lambda: tier.get(name, []),
        lambda: tier.put(name, []),
        lambda: tier.remove(name),
        lambda: tier.contains([name]),
    ):
        with pytest.raises(AssertionError):
            call()


# --- Processes that die ----------------------------------------------------------------------


def test_what_dead_writers_left_is_swept(root: Path) -> None:
    host = os.uname().nodename
    dead = subprocess.Popen(["true"])
    dead.wait()
    (root / "tmp").mkdir(parents=True)
    swept = [f"{host}.{dead.pid}.a", f"{host}.{os.getpid()}.a", f"elsewhere.{dead.pid}.old"]
    kept = [f"{host}.{os.getppid()}.a", f"elsewhere.{dead.pid}.a", "foreign", "a.tar"]
    for file in swept + kept:
        (root / "tmp" / file).write_bytes(b"x")
        if file.endswith(".old"):
            os.utime(root / "tmp" / file, (0, 0))
    with opened(root):
        assert files_below(root / "tmp") == set(kept)


def test_killed_writers_leave_whole_values_or_none(root: Path, values: ModuleType) -> None:
    script = Path(__file__).parent / "disk_writers.py"
    names = [values.random_name("0" * 16) for _ in range(6)]
    contents = [values.make_shards([1000, 300_000], seed) for seed in range(4)]
    num_reads = 0
    with (
        opened(root) as tier,
        subprocess.Popen(
            [sys.executable, script, root, "2.5", *names], stdout=subprocess.PIPE
        ) as writers,
    ):
        while writers.poll() is None:
            for name in names:
                shards = values.read_verified(tier, name, [1000, 300_000])
                assert shards is None or shards in contents
                num_reads += shards is not None
        assert writers.stdout is not None
        assert int(writers.stdout.read()) > 10
    assert writers.returncode == 0
    assert num_reads > 10
    with opened(root) as tier:
        assert files_below(root / "tmp") == set()
        assert tier.stats().num_values == 6
        for name in names:
            assert values.read_verified(tier, name, [1000, 300_000]) in contents


# --- The limit on bytes ----------------------------------------------------------------------


def disk_usage(root: Path) -> int:
    """As ``du`` counts it, folders included."""
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))


def test_the_limit_holds_at_all_times(root: Path, values: ModuleType) -> None:
    """Ten times the limit is put by four threads."""
    limit, sizes = 100_000_000, [1_000_000]
    num_values = 10 * limit // sizes[0]
    names = [values.random_name("0" * 16) for _ in range(num_values)]
    usages: list[int] = []
    errors: list[BaseException] = []
    is_done = threading.Event()

    def put(tier: DiskTier, names: list[str]) -> None:
        try:
            for name in names:
                values.put_value(tier, name, sizes)
        except TierError as error:
            errors.append(error)

    def sample(tier: DiskTier) -> None:
        while not is_done.wait(0.003):
            with tier._lock:  # nothing is renamed or removed while it is counted
                usages.append(disk_usage(root))

    with opened(root, limit) as tier:
        sampler = threading.Thread(target=sample, args=(tier,))
        writers = [threading.Thread(target=put, args=(tier, names[part::4])) for part in range(4)]
        for thread in (sampler, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        is_done.set()
        sampler.join()
        assert errors == []
        assert len(usages) > 30
        assert max(usages) <= limit + sizes[0]
        used = tier.stats().used_bytes
        assert used is not None
        assert 0.9 * limit < used <= limit
        assert disk_usage(root) <= limit + sizes[0]
        assert sum(tier.contains(names)) >= 0.9 * limit / (sizes[0] + 2 * BLOCK)
        last = [values.random_name("0" * 16) for _ in range(4)]
        for name in last:
            values.put_value(tier, name, sizes)

    # Another process, with less room: what was put last is what stays.
    with opened(root, limit // 3) as tier:
        assert disk_usage(root) <= limit // 3 + sizes[0]
        assert tier.contains(last) == [True] * 4
        for name in names[:30]:
            values.put_value(tier, name, sizes)
            assert disk_usage(root) <= limit // 3 + sizes[0]
        assert tier.contains(names[29:30]) == [True]


def test_folders_count(root: Path, values: ModuleType) -> None:
    """Most values lie alone in theirs, which is larger than they are."""
    limit = 40 * 2 * BLOCK
    with opened(root, limit) as tier:
        for _ in range(200):
            values.put_value(tier, values.random_name("0" * 16), [10])
        assert 30 <= (tier.stats().num_values or 0) <= 40
        assert disk_usage(root) <= limit + 3 * BLOCK  # root, tmp, namespace


def test_what_was_read_stays_longest(root: Path, values: ModuleType) -> None:
    names = [values.random_name() for _ in range(5)]
    with opened(root, 5 * 3 * BLOCK) as tier:
        for name in names:
            values.put_value(tier, name, SIZES)
        assert not is_miss(values, tier, names[0])
        for _ in range(2):
            values.put_value(tier, values.random_name(), SIZES)
        assert tier.contains(names) == [True, False, False, True, True]
    # And so after a restart: the first is read again, the fourth is then the oldest.
    for index, seconds in ((0, 900), (3, 600), (4, 300)):
        then = time.time() - seconds
        os.utime(path_of(root, names[index]), (then, then))
    with opened(root, None) as tier:
        assert not is_miss(values, tier, names[0])
    with opened(root, 4 * 3 * BLOCK) as tier:
        assert tier.contains(names) == [True, False, False, False, True]


def test_a_value_larger_than_the_limit_removes_nothing(root: Path, values: ModuleType) -> None:
    name = values.random_name()
    with opened(root, 100_000) as tier:
        values.put_value(tier, name, SIZES)
        with pytest.raises(TierError, match="max_size"):
            values.put_value(tier, values.random_name(), [100_000])
        assert not is_miss(values, tier, name)


def test_overwriting_counts_once(root: Path, values: ModuleType) -> None:
    name = values.random_name()
    with opened(root, 200_000) as tier:
        for size in (50_000, 50_000, 10, 80_000):
            values.put_value(tier, name, [size])
            found = path_of(root, name).stat()
            assert tier.stats().used_bytes == found.st_blocks * 512 + BLOCK
        assert tier.stats().num_values == 1
        tier.remove(name)
        assert tier.stats().used_bytes == 0


def test_a_value_that_cannot_be_removed_is_not_in_the_way_for_ever(
    root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [values.random_name() for _ in range(4)]
    stuck = str(path_of(root, names[0]))
    unlink = os.unlink

    def unlink_but_one(path: str, **options: Any) -> None:
        if path == stuck:
            raise PermissionError(errno.EPERM, "immutable")
        unlink(path, **options)

    with opened(root, 3 * 3 * BLOCK) as tier:
        for name in names[:3]:
            values.put_value(tier, name, SIZES)
        monkeypatch.setattr(os, "unlink", unlink_but_one)
        with pytest.raises(TierError):
            values.put_value(tier, names[3], SIZES)
        assert tier.contains(names) == [True, True, True, False]
        values.put_value(tier, names[3], SIZES)
        assert tier.contains(names) == [True, False, True, True]
        used = tier.stats().used_bytes
        assert used is not None
        assert used <= 3 * 3 * BLOCK


def test_while_the_directory_is_counted_reads_go_on_and_puts_are_dropped(
    root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, late = values.random_name(), values.random_name()
    with opened(root) as tier:
        shards = values.put_value(tier, name, SIZES)
    may_go_on = threading.Event()
    found = DiskTier._values

    def slow(tier: DiskTier, prefix: str = "") -> Iterator[tuple[float, str, int]]:
        may_go_on.wait()
        return found(tier, prefix)

    monkeypatch.setattr(DiskTier, "_values", slow)
    tier = DiskTier(str(root), 1 << 20)
    assert values.read_verified(tier, name, SIZES) == shards
    with pytest.raises(DroppedError, match="still being counted"):
        values.put_value(tier, late, SIZES)
    assert tier.contains([name, late]) == [True, False]
    unlimited = DiskTier(str(root), None)
    values.put_value(unlimited, late, SIZES)
    assert tier.contains([name, late]) == [True, True]
    may_go_on.set()
    for each in (tier, unlimited):
        wait_until(lambda each=each: each.stats().num_values == 2)  # type: ignore[misc]
        assert each.stats().used_bytes == 2 * 3 * BLOCK
        each.close()


def test_close_does_not_wait_for_the_walk(
    root: Path, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{values.random_namespace()}/ab"
    with opened(root) as tier:
        for index in range(100):
            values.put_value(tier, f"{folder}{index:062}-full", [10])
    find = DiskTier._find
    is_there = threading.Event()

    def slow(tier: DiskTier, name: str) -> tuple[float, str, int] | None:
        is_there.set()
        time.sleep(0.05)
        return find(tier, name)

    monkeypatch.setattr(DiskTier, "_find", slow)
    tier = DiskTier(str(root), 1 << 20)
    assert is_there.wait(10)
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 2.5  # half of what it would take
    assert not tier._thread.is_alive()


def test_two_tiers_in_one_directory_clear_and_write(root: Path, values: ModuleType) -> None:
    """As two hosts do: what one forgets, the other can write again at any moment."""
    names = [values.random_name("0" * 16) for _ in range(8)]
    contents = [values.make_shards(SIZES, seed) for seed in range(4)]
    outcomes: list[str] = []
    end = time.monotonic() + 1.5

    def step(tier: DiskTier, rng: random.Random) -> str:
        shards = values.read_verified(tier, rng.choice(names), SIZES)
        if shards is not None and shards not in contents:
            return "a value that nobody put"
        if rng.random() < 0.1:
            tier.clear("0" * 16)
        try:
            values.put_value(tier, rng.choice(names), SIZES, rng.randrange(4))
        except TierError:  # its folder went twice just before the rename
            return "refused"
        return "done"

    def work(tier: DiskTier, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                outcomes.append(step(tier, rng))
        except Exception as error:
            outcomes.append(repr(error))

    with opened(root) as one, opened(root, 1 << 20) as other:
        threads = [
            threading.Thread(target=work, args=(each, seed))
            for seed, each in enumerate([one, other, one, other])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(outcomes) <= {"done", "refused"}
        assert outcomes.count("refused") <= len(outcomes) / 20
        assert files_below(root / "tmp") == set()
        for each in (one, other):
            each.clear("0" * 16)
            assert not any(each.contains(names))


def test_a_directory_that_anybody_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(TierError, match="chmod o-w"):
        DiskTier(str(tmp_path), None)
