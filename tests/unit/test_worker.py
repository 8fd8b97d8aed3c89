"""The worker side on real tensors: what it copies, and what it refuses to touch."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from lmcache_connector.counters import Counters
from lmcache_connector.errors import ProtocolError
from lmcache_connector.groups import STATE, EngineGroupSpec, LayerSpec, ReuseKind, ReuseRule
from lmcache_connector.metadata import LoadOp, ObjectOp, PoolRef, SlotRef, StepMeta, StoreOp
from lmcache_connector.worker.register import RankFacts, register_kv_caches
from lmcache_connector.worker.transfer import CpuCopier, GpuCopier, SlotCheck
from lmcache_connector.worker.worker import CacheWorker

CHUNK, BLOCK, NUM_BLOCKS = 64, 32, 12
WINDOW = ReuseRule(ReuseKind.WINDOW, 20)
PAGE = BLOCK * 2 * 16


class Client:
    """An attachment whose memory is a buffer of this process."""

    path, instance = Path("/pool"), ""

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint8 * (1 << 20))()
        self.held = 0

    def hold(self, incarnation: str) -> bool:
        self.held += incarnation == "life"
        return incarnation == "life"

    def drop(self) -> None:
        self.held -= 1
        # As an mmap would: nothing may point into it any more.
        assert self.held >= 0

    def address(self, slot: SlotRef) -> int:
        if slot.extent != 0:
            raise ProtocolError("not mapped")
        return ctypes.addressof(self.memory) + slot.offset

    def view(self, slot: SlotRef) -> memoryview:
        return memoryview(self.memory).cast("B")[slot.offset : slot.offset + slot.nbytes]

    def close(self) -> None:
        pass


class Bed:
    """Two attention layers in two groups and a state layer, one rank."""

    def __init__(self, tp_rank: int = 0, tp: int = 1, shards: int = 1) -> None:
        torch.manual_seed(0)

        def layer(name: str, rule: ReuseRule, tokens: int = BLOCK) -> LayerSpec:
            slots = 1 if rule is STATE else BLOCK
            return LayerSpec(name, tokens, slots, PAGE, "int8", rule, shards, num_heads=1)

        full = layer("full", ReuseRule(ReuseKind.FULL))
        window = layer("window", WINDOW)
        state = layer("state", STATE, CHUNK)
        specs = [
            EngineGroupSpec(index, True, (one,)) for index, one in enumerate((full, window, state))
        ]
        self.tensors = {
            "full": torch.randint(-99, 99, (NUM_BLOCKS, 1, BLOCK, PAGE // BLOCK)).to(torch.int8),
            "window": torch.randint(-99, 99, (NUM_BLOCKS, 1, BLOCK, PAGE // BLOCK)).to(torch.int8),
            "state": torch.randint(-99, 99, (NUM_BLOCKS, 1, 1, PAGE)).to(torch.int8),
        }
        ranks = RankFacts(rank=tp_rank, tp_rank=tp_rank, tp_size=tp)
        registration = register_kv_caches(specs, self.tensors, NUM_BLOCKS, CHUNK, ranks)
        self.worker = CacheWorker(registration, CpuCopier(), Counters())
        self.client = Client()
        self.worker._clients = [self.client]  # type: ignore[list-item]
        self.groups = {group.tag: group for group in self.worker.geometry.object_groups()}

    def objects(self, shift: int = 0, **change: Any) -> list[ObjectOp]:
        """All groups' objects of the first chunk, in slots of their own."""
        blocks = {"full": {0: [3, 1]}, "window-20": {1: [7]}, "state": {2: [5]}}
        objects = []
        for index, (tag, ids) in enumerate(blocks.items()):
            group = next(g for t, g in self.groups.items() if t.split("-s")[0] == tag)
            size = self.worker.geometry.object_layout(group, CHUNK).nbytes
            slot = SlotRef(0, 8192 * index, change.get("nbytes", size))
            moved = {engine: [block + shift for block in one] for engine, one in ids.items()}
            objects.append(ObjectOp(group.tag, CHUNK, moved, [slot] * group.num_shards, []))
        return objects

    def store(self, objects: list[ObjectOp], incarnation: str = "life") -> Any:
        self.worker.save(StepMeta(stores=[StoreOp(1, incarnation, objects)]))
        meta = self.worker.take_meta()
        assert meta is not None
        return meta.stores[0]

    def load(
        self, objects: list[ObjectOp], incarnation: str = "life", seconds: float = 10.0
    ) -> Any:
        op = LoadOp(1, "request", incarnation, time.monotonic() + seconds, objects)
        self.worker.start_loads(StepMeta(loads=[op]))
        finished, failed = self.worker.take_results()
        assert finished == {"request"}
        meta = self.worker.take_meta()
        assert meta is not None
        (report,) = meta.loads
        assert report.ok == (failed == set())
        return report

    def snapshot(self) -> bytes:
        return b"".join(tensor.numpy().tobytes() for tensor in self.tensors.values())


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    assert bed.client.held == 0
    bed.worker.shutdown()


def digest(bed: Bed, obj: ObjectOp) -> int:
    return xxhash.xxh3_64_intdigest(bed.client.view(obj.slots[0]))


def test_a_round_trip_writes_the_named_blocks_and_nothing_else(bed: Bed) -> None:
    objects = bed.objects()
    report = bed.store(objects)
    assert report.digests == [digest(bed, obj) for obj in objects]
    stored = {name: tensor.clone() for name, tensor in bed.tensors.items()}
    for tensor in bed.tensors.values():
        tensor.fill_(77)
    targets = bed.objects(shift=4)
    for obj, value in zip(targets, report.digests, strict=True):
        obj.digests.append(value)
    assert bed.load(targets).ok
    expected = {"full": {7: 3, 5: 1}, "window": {11: 7}, "state": {9: 5}}
    for name, moved in expected.items():
        for block in range(NUM_BLOCKS):
            source = moved.get(block)
            content = bed.tensors[name][block]
            if source is None:
                assert (content == 77).all()
            else:
                assert torch.equal(content, stored[name][source])


def test_a_load_may_name_the_last_blocks_only(bed: Bed) -> None:
    objects = bed.objects()
    report = bed.store(objects)
    objects[0].block_ids[0] = [9]
    for obj, value in zip(objects, report.digests, strict=True):
        obj.digests.append(value)
    before = bed.tensors["full"].clone()
    assert bed.load(objects).ok
    assert torch.equal(bed.tensors["full"][9], before[1])
    assert torch.equal(bed.tensors["full"][3], before[3])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_bytes_that_fail_their_check_reach_no_block(bed: Bed, index: int) -> None:
    objects = bed.objects()
    report = bed.store(objects)
    for obj, value in zip(objects, report.digests, strict=True):
        obj.digests.append(value)
    bed.client.view(objects[index].slots[0])[5] ^= 1
    before = bed.snapshot()
    failed = bed.load(objects)
    assert not failed.ok
    assert failed.corrupt == [index]
    assert bed.snapshot() == before


def refusals(bed: Bed) -> dict[str, tuple[list[ObjectOp], dict[str, Any]]]:
    narrow, outside, negative = bed.objects(nbytes=16), bed.objects(), bed.objects()
    outside[0].block_ids[0] = [3, NUM_BLOCKS]
    negative[0].block_ids[0] = [3, -1]
    many, unmapped = bed.objects(), bed.objects()
    many[0].block_ids[0] = [1, 2, 3]
    unmapped[0].slots[0] = SlotRef(1, 0, 4096)
    shards = bed.objects()
    shards[0].slots.clear()
    return {
        "another life of the pool": (bed.objects(), {"incarnation": "other"}),
        "a slot too small": (narrow, {}),
        "a block beyond the cache": (outside, {}),
        "a negative block": (negative, {}),
        "more blocks than are kept": (many, {}),
        "an extent that is not mapped": (unmapped, {}),
        "a row of fewer shards": (shards, {}),
    }


@pytest.mark.parametrize("case", list(refusals(Bed())))
def test_what_does_not_fit_is_refused_untouched(bed: Bed, case: str) -> None:
    objects, how = refusals(bed)[case]
    for obj in objects:
        obj.digests.append(0)
    before, memory = bed.snapshot(), bytes(bed.client.memory)
    assert not bed.load(objects, **how).ok
    assert bed.store(objects, **how).digests == [None] * 3
    assert bed.snapshot() == before
    assert bytes(bed.client.memory) == memory


def test_a_store_names_every_block_that_is_kept(bed: Bed) -> None:
    objects = bed.objects()
    objects[0].block_ids[0] = [3]
    assert bed.store(objects).digests == [None] * 3


def test_a_load_past_its_deadline_or_without_a_plan_is_refused(bed: Bed) -> None:
    objects = bed.objects()
    report = bed.store(objects)
    for obj, value in zip(objects, report.digests, strict=True):
        obj.digests.append(value)
    before = bed.snapshot()
    assert not bed.load(objects, seconds=-1.0).ok
    assert not bed.load([]).ok
    assert bed.snapshot() == before


def test_only_the_first_replica_stores_and_all_load() -> None:
    first, second = Bed(0, 2), Bed(1, 2)
    objects = first.objects()
    digests = first.store(objects).digests
    assert None not in digests
    assert second.store(second.objects()).digests == [None] * 3
    second.client.memory[:] = first.client.memory[:]
    for obj, value in zip(objects, digests, strict=True):
        obj.digests.append(value)
    assert second.load(objects).ok


def test_a_group_of_another_stage_is_not_ours(bed: Bed) -> None:
    foreign = ObjectOp("full-s9", CHUNK, {0: [1, 2]}, [SlotRef(0, 0, 4096)], [1])
    assert bed.store([foreign]).digests == [None]
    assert bed.load([foreign]).ok


def test_a_copy_holds_the_memory_until_its_result(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bed.worker._copier, "result", lambda ticket: None)
    bed.worker.save(StepMeta(stores=[StoreOp(1, "life", bed.objects())]))
    load = LoadOp(2, "request", "life", time.monotonic() + 10, bed.objects())
    for obj in load.objects:
        obj.digests.append(0)
    bed.worker.start_loads(StepMeta(loads=[load]))
    assert bed.client.held == 2
    (_, running) = bed.worker._stores[1]
    monkeypatch.undo()
    bed.worker.take_results()
    assert bed.client.held == 0
    # The views are gone before the hold is.
    check = running.checks[0]
    assert check is not None
    with pytest.raises(ValueError, match="released"):
        check.view.tobytes()


def test_a_shutdown_ends_copies_without_a_result(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed.worker._copier, "result", lambda ticket: None)
    bed.worker.save(StepMeta(stores=[StoreOp(1, "life", bed.objects())]))
    assert bed.client.held == 1
    bed.worker.shutdown()
    assert bed.client.held == 0


def test_each_pool_is_attached_to_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    def client(path: Any, rank: int, instance: str, **how: Any) -> Any:
        assert how["touch_ahead"]
        assert how["register_extent"] == bed.worker._copier.register_extent
        assert how["unregister_extent"] == bed.worker._copier.unregister_extent
        started.append((str(path), instance))
        return SimpleNamespace(path=path, instance=instance, close=lambda: None)

    monkeypatch.setattr("lmcache_connector.worker.worker.PoolClient", client)
    for _ in range(200):
        bed.worker.attach("/one", "")
    assert started == [("/one", "")]
    # Whatever life of it, and also while there is none.
    for incarnation in ("first", "", "second"):
        bed.worker.start_loads(StepMeta(PoolRef("/one", incarnation)))
    assert started == [("/one", "")]
    bed.worker.start_loads(StepMeta(PoolRef("/two", "first", "engine")))
    assert started == [("/one", ""), ("/two", "engine")]


class Device:
    """A device whose copies end when told."""

    def __init__(self) -> None:
        self.ended = False
        self.waited = self.closed = 0

    def store(self, jobs: Any) -> int:
        return 5

    load = store

    def done(self, ticket: int) -> bool:
        return self.ended

    def wait(self, ticket: int) -> None:
        self.waited += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GpuCopier, Device]]:
    copier = GpuCopier.__new__(GpuCopier)
    device = Device()
    copier._device = device  # type: ignore[assignment]
    copier._threads = ThreadPoolExecutor(1)
    copier._copies = {}
    yield copier, device
    copier.close()


def check(content: bytes, expected: int | None) -> SlotCheck:
    return SlotCheck(memoryview(np.frombuffer(bytearray(content), dtype=np.uint8)), 4, expected)


def wait_for(copier: GpuCopier, ticket: int) -> list[int]:
    deadline = time.monotonic() + 10
    while (result := copier.result(ticket)) is None:
        assert time.monotonic() < deadline
    return result


def test_a_store_is_hashed_after_its_copy(gpu: tuple[GpuCopier, Device]) -> None:
    copier, device = gpu
    slot = check(b"aaaa", None)
    ticket = copier.store([], [slot])
    assert ticket is not None
    assert copier.result(ticket) is None
    slot.view[:] = np.frombuffer(b"bbbb", dtype=np.uint8)
    device.ended = True
    assert wait_for(copier, ticket) == [xxhash.xxh3_64_intdigest(b"bbbb")]


def test_a_load_ends_with_its_copy_and_its_check(gpu: tuple[GpuCopier, Device]) -> None:
    copier, device = gpu
    ticket = copier.load([], [check(b"aaaa", 1)])
    assert ticket is not None
    time.sleep(0.05)
    assert copier.result(ticket) is None
    device.ended = True
    assert wait_for(copier, ticket) == [xxhash.xxh3_64_intdigest(b"aaaa")]


def test_closing_waits_for_copies(gpu: tuple[GpuCopier, Device]) -> None:
    copier, device = gpu
    copier.store([], [check(b"aaaa", None)])
    copier.close()
    assert (device.waited, device.closed) == (1, 1)
