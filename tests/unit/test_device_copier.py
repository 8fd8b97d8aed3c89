"""DeviceCopier on a simulated device whose streams run in any order that events allow."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lmcache_connector.errors import ProtocolError
from lmcache_connector.triton_kernels import reference
from lmcache_connector.worker.device_copier import DeviceCopier
from lmcache_connector.worker.staging import PageJob

CPU = torch.device("cpu")
STAGING_BYTES = 16 << 10  # 4 KiB for each load area, 8 KiB of ring
RUN_BYTES, POOL_BLOCKS = 120, 16


class Event:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        Device.active.run(until=self)


class Stream:
    def __init__(self, device: object = None) -> None:
        self.work: list[Event | Callable[[], None]] = []
        Device.active.streams.append(self)

    def record_event(self) -> Event:
        event = Event()

        def reach() -> None:
            event.reached = True

        self.work.append(reach)
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    @property
    def ready(self) -> bool:
        head = self.work[0] if self.work else None
        return head is not None and (not isinstance(head, Event) or head.reached)

    def step(self) -> None:
        work = self.work.pop(0)
        if not isinstance(work, Event):
            work()


class Device:
    """Queues what is put on its streams; ``run`` picks streams at random."""

    active: Device

    def __init__(self, seed: int = 0) -> None:
        Device.active = self
        self.streams: list[Stream] = []
        self.random = random.Random(seed)
        self.compute = Stream()
        self.current = self.compute
        self.pinned: dict[int, int] = {}
        self.pin_status = 0

    def do(self, work: Callable[[], object]) -> None:
        self.current.work.append(work)

    def run(self, until: Event | None = None, only: Stream | None = None) -> None:
        while until is None or not until.reached:
            ready = [s for s in self.streams if s.ready and only in (None, s)]
            if not ready:
                assert until is None, "deadlock"
                return
            self.random.choice(ready).step()

    def queued(self) -> int:
        return sum(len(stream.work) for stream in self.streams)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    # cudart
    cudaError = SimpleNamespace(success=0)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 3
        if self.pin_status == 0:
            self.pinned[address] = nbytes
        return self.pin_status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"reason {status}"

    def check_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy may touch one registration at most, and never memory between them."""
        for tensor in (target, source):
            begin = tensor.data_ptr()
            end = begin + tensor.numel() * tensor.element_size()
            touched = [a for a, n in self.pinned.items() if begin < a + n and a < end]
            assert len(touched) <= 1
            assert all(a <= begin and end <= a + self.pinned[a] for a in touched)


def queued_kernel(copy: Callable[..., None]) -> Callable[..., None]:
    def launch(runs, stride, run_bytes, ids, slots, pitch, *, word_bytes) -> None:
        def execute() -> None:
            tables = [table.numpy().copy() for table in (runs, ids, slots)]
            for value in (*tables[0], *tables[2], stride, run_bytes, pitch):
                assert value % word_bytes == 0
            copy(tables[0], stride, run_bytes, tables[1], tables[2], pitch)

        Device.active.do(execute)

    return launch


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Device]:
    paged_copy = pytest.importorskip(
        "lmcache_connector.triton_kernels.paged_copy", reason="Triton is not installed"
    )
    copy_, zero_ = torch.Tensor.copy_, torch.Tensor.zero_

    def pin_memory(self):
        pinned = self.clone()
        pinned.freed_when_dropped = True
        return pinned

    def queued_copy(self, source, non_blocking=False):
        assert non_blocking
        Device.active.check_copy(self, source)
        if hasattr(source, "freed_when_dropped"):  # the caller must keep it
            table = weakref.ref(source)
            Device.active.do(lambda: copy_(self, table()))
        else:
            Device.active.do(lambda: copy_(self, source))
        return self

    def queued_zero(self):
        Device.active.do(lambda: zero_(self))
        return self

    def start(seed: int = 0) -> Device:
        device = Device(seed)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(cuda, "Stream", Stream)
        monkeypatch.setattr(cuda, "current_stream", lambda _: device.current)
        monkeypatch.setattr(cuda, "stream", device.stream)
        monkeypatch.setattr(cuda, "cudart", lambda: device)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "copy_", queued_copy)
        monkeypatch.setattr(torch.Tensor, "zero_", queued_zero)
        for name in ("gather_pages", "scatter_pages"):
            monkeypatch.setattr(paged_copy, name, queued_kernel(getattr(reference, name)))
        return device

    return start


class Pool:
    """Two extents that are neighbours in memory, registered one by one."""

    def __init__(self, copier: DeviceCopier, extent_bytes: int = 32 << 10) -> None:
        self.memory = np.full(2 * extent_bytes, 0xEE, np.uint8)
        self.base = self.memory.ctypes.data
        copier.register_extent(self.base + extent_bytes, extent_bytes)
        copier.register_extent(self.base, extent_bytes)


class Pages:
    def __init__(self, num_runs: int, run_bytes: int = RUN_BYTES, seed: int = 0) -> None:
        shape = (num_runs, POOL_BLOCKS, run_bytes)
        self.tensor = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self.run_bytes = run_bytes
        self.pitch = -(-run_bytes // 16) * 16

    def job(self, block_ids: list[int], first_slot: int) -> PageJob:
        """The blocks, one behind the other from ``first_slot``."""
        num_runs = len(self.tensor)
        return PageJob(
            run_addresses=self.tensor.ctypes.data
            + np.arange(num_runs) * (POOL_BLOCKS * self.run_bytes),
            block_stride=self.run_bytes,
            run_bytes=self.run_bytes,
            run_pitch=self.pitch,
            block_ids=np.array(block_ids),
            slot_addresses=first_slot + np.arange(len(block_ids)) * num_runs * self.pitch,
        )

    def in_slots(self, block_ids: list[int]) -> np.ndarray:
        """What the blocks look like in slots, padding zeroed."""
        num_runs = len(self.tensor)
        slots = np.zeros((len(block_ids), num_runs, self.pitch), np.uint8)
        slots[:, :, : self.run_bytes] = self.tensor[:, block_ids].swapaxes(0, 1)
        return slots.ravel()


# (runs, bytes of a run, blocks): a few; more than the ring; a block larger than an area; a run
# larger than an area.
SIZES = [(3, 120, 5), (4, 480, 12), (16, 480, 4), (2, 6000, 2)]


@pytest.mark.parametrize(("num_runs", "run_bytes", "num_blocks"), SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_store_sees_the_work_before_it_and_none_after_it(
    simulate: Callable[[int], Device], seed: int, num_runs: int, run_bytes: int, num_blocks: int
) -> None:
    device = simulate(seed)
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(num_runs, run_bytes), Pool(copier)
    written = Pages(num_runs, run_bytes, seed=1)
    block_ids = list(np.random.default_rng(seed).permutation(POOL_BLOCKS)[:num_blocks])
    first = 1024
    expected = pool.memory.copy()
    content = written.in_slots(block_ids)
    expected[first : first + len(content)] = content
    device.do(lambda: np.copyto(pages.tensor, written.tensor))
    ticket = copier.store([pages.job(block_ids, pool.base + first)])
    device.do(lambda: pages.tensor.fill(0))
    assert ticket is not None
    assert not copier.done(ticket)
    copier.wait(ticket)
    assert copier.done(ticket)
    assert np.array_equal(pool.memory, expected)


@pytest.mark.parametrize(("num_runs", "run_bytes", "num_blocks"), SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_load_comes_after_the_work_before_it(
    simulate: Callable[[int], Device], seed: int, num_runs: int, run_bytes: int, num_blocks: int
) -> None:
    device = simulate(seed)
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(num_runs, run_bytes), Pool(copier)
    stored = Pages(num_runs, run_bytes, seed=1)
    block_ids = list(np.random.default_rng(seed).permutation(POOL_BLOCKS)[:num_blocks])
    content = stored.in_slots(block_ids)
    pool.memory[512 : 512 + len(content)] = content
    expected = pages.tensor.copy()
    expected[:, block_ids] = stored.tensor[:, block_ids]
    old = pages.tensor.copy()
    device.do(lambda: pages.tensor.fill(0))
    device.do(lambda: np.copyto(pages.tensor, old))
    ticket = copier.load([pages.job(block_ids, pool.base + 512)])
    assert not copier.done(ticket)
    copier.wait(ticket)
    assert np.array_equal(pages.tensor, expected)


@pytest.mark.parametrize("seed", range(10))
def test_many_copies_in_flight(simulate: Callable[[int], Device], seed: int) -> None:
    device = simulate(seed)
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pool = Pool(copier, extent_bytes=256 << 10)
    kinds = [Pages(3, 120, seed=1), Pages(2, 480, seed=2)]
    restored = [Pages(3, 120, seed=3), Pages(2, 480, seed=4)]
    stored: list[tuple[int, list[int], int]] = []
    first = 0
    rng = random.Random(seed)
    running: list[int] = []
    for _ in range(30):
        parts, jobs = [], []
        for kind in rng.sample([0, 1], rng.randint(1, 2)):
            block_ids = rng.sample(range(POOL_BLOCKS), rng.randint(1, 3))
            jobs.append(kinds[kind].job(block_ids, pool.base + first))
            parts.append((kind, block_ids, first))
            first += len(block_ids) * jobs[-1].block_bytes
        ticket = copier.store(jobs)
        if ticket is not None:
            stored += parts
            running.append(ticket)
        for _ in range(rng.randrange(6)):
            device.run(only=rng.choice(device.streams))
    assert len(stored) > 4
    device.run()
    assert all(copier.done(ticket) for ticket in running)
    for kind, block_ids, start in stored:
        content = kinds[kind].in_slots(block_ids)
        assert np.array_equal(pool.memory[start : start + len(content)], content)
    expected = [pages.tensor.copy() for pages in restored]
    tickets = []
    for kind, block_ids, start in stored:
        expected[kind][:, block_ids] = kinds[kind].tensor[:, block_ids]
        tickets.append(copier.load([restored[kind].job(block_ids, pool.base + start)]))
    for ticket in tickets:
        copier.wait(ticket)
    for pages, tensor in zip(restored, expected, strict=True):
        assert np.array_equal(pages.tensor, tensor)


def test_neighbours_in_two_registrations(simulate: Callable[[int], Device]) -> None:
    device = simulate(0)
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(2), Pool(copier, extent_bytes=4096)
    first = 4096 - 2 * 2 * pages.pitch
    job = pages.job([5, 6, 7, 8], pool.base + first)
    copier.store([job])
    device.run()
    content = pages.in_slots([5, 6, 7, 8])
    assert np.array_equal(pool.memory[first : first + len(content)], content)
    copier.load([job])
    device.run()


def test_the_model_does_not_wait_for_the_bus(simulate: Callable[[int], Device]) -> None:
    device = simulate()
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(3), Pool(copier)
    copier.load([pages.job([1, 2, 3], pool.base)])
    assert copier.store([pages.job([4, 5], pool.base + 4096)]) is not None
    assert copier.store([pages.job([6], pool.base + 8192)]) is not None
    device.run(only=device.compute)
    assert not device.compute.work


def test_a_full_ring_refuses_and_starts_nothing(simulate: Callable[[int], Device]) -> None:
    device = simulate()
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(4), Pool(copier)
    job = pages.job([1, 2, 3, 4], pool.base)
    tickets = []
    while (ticket := copier.store([job])) is not None:
        tickets.append(ticket)
        assert len(tickets) < 100
    assert len(tickets) == 8192 // job.staged_bytes
    queued = device.queued()
    assert copier.store([job]) is None
    # Larger than the ring: only when it has the whole ring to itself.
    large = Pages(16, 480).job([1, 2], pool.base + 16384)
    assert copier.store([large]) is None
    assert device.queued() == queued
    copier.wait(tickets[0])
    assert copier.store([job]) is not None
    device.run()
    assert copier.store([large]) is not None


def test_slots_outside_pinned_memory_are_refused(simulate: Callable[[int], Device]) -> None:
    device = simulate()
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages = Pages(2)
    with pytest.raises(ProtocolError, match="not in pinned"):
        copier.store([pages.job([0], 4096)])
    pool = Pool(copier)
    queued = device.queued()
    good = pages.job([0], pool.base)
    for address in (pool.base - 16, pool.base + pool.memory.size - 16, 16):
        for start in (copier.store, copier.load):
            with pytest.raises(ProtocolError, match=f"{address:#x}"):
                start([good, pages.job([1], address)])
    assert device.queued() == queued


def test_null_blocks_and_empty_jobs(simulate: Callable[[int], Device]) -> None:
    device = simulate()
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(2), Pool(copier)
    block_bytes = 2 * pages.pitch
    ticket = copier.store([pages.job([3, -1, 5], pool.base), pages.job([], pool.base)])
    device.run()
    assert copier.done(ticket)
    assert np.array_equal(pool.memory[:block_bytes], pages.in_slots([3]))
    assert (pool.memory[block_bytes : 2 * block_bytes] == 0xEE).all()
    assert np.array_equal(pool.memory[2 * block_bytes : 3 * block_bytes], pages.in_slots([5]))
    queued = device.queued()
    for start in (copier.store, copier.load):
        assert copier.done(start([pages.job([-1], pool.base)]))
        assert copier.done(start([]))
    assert device.queued() == queued


def test_a_refused_registration_names_the_cause(simulate: Callable[[int], Device]) -> None:
    device = simulate()
    copier = DeviceCopier(CPU, STAGING_BYTES)
    device.pin_status = 2
    memory = ctypes.create_string_buffer(4096)
    with pytest.raises(OSError, match="reason 2"):
        copier.register_extent(ctypes.addressof(memory), 4096)
    with pytest.raises(ProtocolError):
        copier.store([Pages(1).job([0], ctypes.addressof(memory))])


def test_close_waits_and_unpins(simulate: Callable[[int], Device]) -> None:
    device = simulate()
    copier = DeviceCopier(CPU, STAGING_BYTES)
    pages, pool = Pages(2), Pool(copier)
    copier.store([pages.job([3], pool.base)])
    copier.close()
    assert np.array_equal(pool.memory[: 2 * pages.pitch], pages.in_slots([3]))
    assert not device.pinned
    # Whoever unmaps the memory says so too, before or after.
    copier.unregister_extent(pool.base)
