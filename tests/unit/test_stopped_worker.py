"""A worker that is stopped, continued or killed while slots are reserved for it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from lmcache_connector.metadata import SlotRef
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.base import Commit, GroupShards, NewRow
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool

PAGE = 4096
OBJECT = 3 * PAGE - 100
TIMEOUT = 20.0

# Fills each slot named on a line with one byte value, and answers with the digest.
WORKER = """
import sys
from pathlib import Path
import xxhash
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server.client import PoolClient

client = PoolClient(Path(sys.argv[1]), 0, "worker")
assert client._attached.wait(20)
print("attached", flush=True)
for line in sys.stdin:
    extent, offset, nbytes, value = map(int, line.split())
    with client.view(SlotRef(extent, offset, nbytes)) as view:
        view[:] = bytes([value]) * nbytes
        print(xxhash.xxh3_64_intdigest(view), flush=True)
"""


class House:
    """A store with two workers: one is a process of its own, one is the test."""

    def __init__(self, directory: Path) -> None:
        self.pool = MemoryPool(40 * PAGE, 16 * PAGE)
        self.ended: list[str] = []
        self.engine = StorageEngine(self.pool)
        self.service = PoolService(
            self.pool.extents,
            directory / "pool.sock",
            on_mapped=lambda count: self.engine.mark_ready(count - 1),
        )
        self.service.on_workers_gone = self.ended.append
        for name in ("worker", "test"):
            self.service.add_instance(name, 1)
        groups = [GroupShards("full", [[OBJECT]])]
        self.session = self.engine.open_session(bytes(32), groups, self.service.pool_ref())
        path = self.session.pool_ref.socket_path
        self.worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "attached"
        self.client = PoolClient(Path(path), 0, "test")
        assert all(self.service.wait_ready(TIMEOUT, name) for name in ("worker", "test"))
        self.ids = iter(range(1, 1 << 30))
        # Whatever was published: chunk -> digest.
        self.published: dict[bytes, int] = {}
        self.random = random.Random(0)

    def answer(self) -> str:
        assert self.worker.stdout is not None
        return self.worker.stdout.readline().strip()

    def tell(self, slot: SlotRef, value: int) -> None:
        assert self.worker.stdin is not None
        self.worker.stdin.write(f"{slot.extent} {slot.offset} {slot.nbytes} {value}\n")
        self.worker.stdin.flush()

    def reserve(self) -> tuple[int, SlotRef]:
        store_id = next(self.ids)
        slots = self.session.prepare_store(store_id, [NewRow([OBJECT])], ())
        return store_id, slots[0][0]

    def publish(self, store_id: int, chunk: bytes, digest: int) -> None:
        self.session.complete_store(store_id, [Commit(0, chunk, None, "full", [digest])])
        self.published[chunk] = digest

    def fill(self, count: int, foreign: SlotRef) -> None:
        """Others store, evict and look up; none of them is ever given ``foreign``."""
        for _ in range(count):
            store_id, slot = self.reserve()
            apart = slot.extent != foreign.extent or abs(slot.offset - foreign.offset) >= 3 * PAGE
            assert apart, f"{slot} was handed out twice"
            data = self.random.randbytes(OBJECT)
            self.client.view(slot)[:] = data
            self.publish(store_id, data[:32], xxhash.xxh3_64_intdigest(data))

    def verify(self) -> int:
        """Check the bytes of every visible row; how many there are."""
        visible = 0
        for chunk, digest in self.published.items():
            read_id = next(self.ids)
            self.session.lookup(read_id, [chunk], 0)
            rows = self.session.prepare_load(read_id, read_id, [(chunk, "full")])
            if rows is None:
                continue
            visible += 1
            assert rows[0].digests == [digest]
            assert xxhash.xxh3_64_intdigest(self.client.view(rows[0].slots[0])) == digest
            self.session.complete_load(read_id)
        self.engine.check_integrity()
        return visible

    def close(self) -> None:
        self.worker.kill()
        self.worker.wait()
        for pipe in (self.worker.stdin, self.worker.stdout):
            assert pipe is not None
            pipe.close()
        self.client.close()
        self.service.close()
        self.engine.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    return ") T " in Path(f"/proc/{pid}/stat").read_text()


@pytest.fixture
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="lc-") as directory:
        house = House(Path(directory))
        yield house
        house.close()
        assert os.listdir(directory) == []


def test_a_stopped_worker_finds_its_slot_untouched_by_others(house: House) -> None:
    store_id, slot = house.reserve()
    house.worker.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(house.worker.pid))
    # It will write as soon as it runs again, however late that is.
    house.tell(slot, 0xA5)
    house.fill(100, slot)
    house.session.clear(bytes(32))
    house.fill(100, slot)
    assert house.engine.stats().leases == 1
    assert house.ended == []
    # 40 pages in extents of 16, 16 and 8 hold 5, 5 and 2 objects; one place is the lease's.
    assert house.verify() == 11
    house.worker.send_signal(signal.SIGCONT)
    digest = int(house.answer())
    assert house.verify() == 11
    assert digest == xxhash.xxh3_64_intdigest(b"\xa5" * OBJECT)
    # Its store is from before the reset: dropped, and only now its slot is room again.
    house.session.complete_store(store_id, [Commit(0, b"late", None, "full", [digest])])
    assert house.session.lookup(0, [b"late"], 0).present == [[0]]
    house.session.release(0)
    store_id, again = house.reserve()
    assert again == slot
    house.tell(again, 0x5A)
    house.publish(store_id, b"late", int(house.answer()))
    assert house.verify() == 12


def test_slots_of_a_killed_worker_are_freed_when_its_end_is_known(house: House) -> None:
    leases = [house.reserve() for _ in range(3)]
    house.worker.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(house.worker.pid))
    house.tell(leases[0][1], 1)
    house.fill(20, leases[0][1])
    assert house.ended == []
    house.worker.kill()
    until(lambda: house.ended == ["worker"])
    # The end alone frees nothing: the owner knows which leases were the dead rank's.
    assert house.engine.stats().leases == 3
    for store_id, _ in leases:
        house.session.complete_store(store_id, [])
    assert house.verify() == 9
    house.session.clear(bytes(32))
    assert house.engine.stats().used_bytes == 0
    # The other worker still has its memory.
    store_id, slot = house.reserve()
    house.client.view(slot)[:] = bytes(OBJECT)
    house.publish(store_id, b"next", xxhash.xxh3_64_intdigest(bytes(OBJECT)))
    assert house.verify() == 1
