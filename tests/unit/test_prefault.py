"""Pool memory that is touched ahead of its use: how much, and never what is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import prefault as module
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.prefault import prefault
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.pool import MemoryPool

MIB = 1 << 20


def resident(pool: MemoryPool) -> list[int]:
    """Bytes of memory that each extent takes."""
    return [os.fstat(extent.fd).st_blocks * 512 for extent in pool.extents]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    pool = MemoryPool(4 * MIB, extent_bytes=MIB)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        service = PoolService(pool.extents, Path(directory) / "s")
        service.add_instance("", 1)
        pool.path = service.pool_ref().socket_path  # type: ignore[attr-defined]
        yield pool
        service.close()
    pool.close()


def attach(pool: MemoryPool, touch_ahead: bool) -> PoolClient:
    client = PoolClient(Path(pool.path), 0, touch_ahead=touch_ahead)  # type: ignore[attr-defined]
    assert client._attached.wait(20)
    return client


def test_one_extent_more_than_is_used(pool: MemoryPool) -> None:
    client = attach(pool, touch_ahead=True)
    until(lambda: resident(pool) == [MIB, 0, 0, 0])
    client.address(SlotRef(0, 0, 4096))
    until(lambda: resident(pool) == [MIB, MIB, 0, 0])
    client.address(SlotRef(1, 0, 4096))
    until(lambda: resident(pool) == [MIB, MIB, MIB, 0])
    client.address(SlotRef(3, 0, 4096))
    until(lambda: resident(pool) == [MIB] * 4)
    client.close()


def test_pinned_memory_is_left_alone(pool: MemoryPool) -> None:
    client = attach(pool, touch_ahead=False)
    client.address(SlotRef(0, 0, 4096))
    time.sleep(0.05)
    assert resident(pool) == [0] * 4
    client.close()


def test_content_stays() -> None:
    memory = mmap.mmap(-1, 2 * MIB)
    memory[5:9] = b"kept"

    anchor = ctypes.c_char.from_buffer(memory)
    assert prefault(ctypes.addressof(anchor), 2 * MIB, threading.Event())
    assert memory[:12] == b"\0" * 5 + b"kept" + b"\0" * 3
    del anchor
    memory.close()


def test_stopped_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    assert not prefault(0, MIB, stop)
    # No such advice, as on an old kernel.
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)
    memory = mmap.mmap(-1, MIB)

    anchor = ctypes.c_char.from_buffer(memory)
    assert not prefault(ctypes.addressof(anchor), MIB, threading.Event())
    del anchor
    memory.close()
