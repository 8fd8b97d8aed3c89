"""The shared server and its client over real sockets: sessions, leases, outages, hostile frames."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lmcache_connector.errors import ConnectorError
from lmcache_connector.groups import (
    FULL,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
)
from lmcache_connector.layout import CacheLayout
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import messages, sockets, store_client
from lmcache_connector.server.cache_server import CacheServer, Instance
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.service import PoolService
from lmcache_connector.server.session import LOST, RefusedError, Session
from lmcache_connector.server.store_client import CALL_SECONDS, StoreClient
from lmcache_connector.storage.base import (
    Commit,
    GroupShards,
    LookupReply,
    LookupState,
    NewRow,
    Row,
    StoreStats,
    TierCounters,
)
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.tiering import open_tiering

TIMEOUT = 20.0
MIB = 1 << 20
CHUNK = 256
NAMESPACE = b"n" * 32
TOKEN = "0" * 64


def kernel_group(engine_group: int, rule: ReuseRule, slot_bytes: int) -> KVLayerGroupInfo:
    return KVLayerGroupInfo(
        engine_group_idx=engine_group,
        layer_indices=(engine_group,),
        kv_size=1,
        nl=1,
        nb=8,
        bs=64,
        nh=1,
        hs=slot_bytes,
        element_size=1,
        block_stride_elems=64 * slot_bytes,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=64,
        slots_per_block=64,
        sw_size_tokens=rule.tokens + 1 if rule.kind is ReuseKind.WINDOW else -1,
        recurrent_state=False,
        rule=rule,
        num_shards=1,
        num_runs=1,
        run_bytes=64 * slot_bytes,
    )


def geometry(rank: int = 0, ranks: int = 1, slot_bytes: int = 16) -> WorkerGeometry:
    groups = [
        kernel_group(0, FULL, slot_bytes),
        kernel_group(1, ReuseRule(ReuseKind.WINDOW, 100), slot_bytes),
    ]
    return WorkerGeometry(rank, 0, 1, rank, ranks, CHUNK, engine_group_infos(groups), tuple(groups))


def registration(instance: str = "engine", ranks: int = 1, **how: Any) -> messages.RegisterKVCache:
    geometries = [geometry(rank, ranks, how.pop("slot_bytes", 16)) for rank in range(ranks)]
    return messages.RegisterKVCache(instance, "model", NAMESPACE, geometries, **how)


TAGS = [group.tag for group in CacheLayout(registration().geometries).groups]
SIZES = {group.tag: group.sizes[0] for group in CacheLayout(registration().geometries).shards()}


def chunk(index: int) -> bytes:
    return index.to_bytes(32, "big")


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a name short enough for sockets (tmp_path has a long one)."""
    with tempfile.TemporaryDirectory(prefix="lc-") as name:
        yield Path(name)


class House:
    """A server in this process, with everything that was opened for a test."""

    def __init__(self, directory: Path, capacity: int = 4 * MIB) -> None:
        self.endpoint = directory / "kv"
        self.pool = MemoryPool(capacity, MIB)
        self.engine = StorageEngine(self.pool, shared=True)
        for extent in range(len(self.pool.extents)):
            self.engine.mark_ready(extent)
        self.service = PoolService(self.pool.extents, self.endpoint, exclusive=True)
        self.server = CacheServer(self.engine, self.service)
        self.stack = contextlib.ExitStack()

    def client(self, instance: str = "engine", attach: bool = True, **how: Any) -> StoreClient:
        client = StoreClient(f"ipc://{self.endpoint}", registration(instance, **how))
        self.stack.callback(client.close)
        if attach:
            self.worker(instance)
            assert client.wait_ready(TIMEOUT)
        return client

    def worker(self, instance: str = "engine", rank: int = 0) -> PoolClient:
        worker = PoolClient(sockets.memory_path(self.endpoint), rank, instance)
        self.stack.callback(worker.close)
        return worker

    def session(self) -> Session:
        session = Session(self.endpoint, TIMEOUT)
        self.stack.callback(session.close)
        return session

    def status(self) -> messages.StatusReply:
        with contextlib.closing(Session(self.endpoint, TIMEOUT)) as session:
            reply: messages.StatusReply = session.call(messages.Status(), TIMEOUT)
            return reply

    def names(self) -> list[str]:
        return [one.instance for one in self.status().instances]

    def close(self) -> None:
        self.stack.close()
        until(lambda: not self.names())
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.leases, stats.busy_rows) == (0, 0)
        self.service.close()
        self.server.close()
        self.engine.close()


@pytest.fixture
def house(directory: Path) -> Iterator[House]:
    house = House(directory)
    yield house
    house.close()
    assert os.listdir(directory) == []


def new_row(index: int, tag: str = "full") -> NewRow:
    return NewRow(SIZES[tag], (chunk(index), tag))


def store(client: StoreClient, store_id: int, indexes: range) -> None:
    rows = [new_row(index, tag) for index in indexes for tag in TAGS]
    slots = client.prepare_store(store_id, rows, [])
    commits = [
        Commit(number, row.key[0], None, row.key[1], [7])
        for number, row in enumerate(rows)
        if row.key is not None and slots[number]
    ]
    client.complete_store(store_id, commits)
    client.prepare_store(1000 + store_id, [], [])  # an answer: others find it now


def found(client: StoreClient, lookup_id: int, indexes: range) -> list[int]:
    reply = client.lookup(lookup_id, [chunk(index) for index in indexes], indexes.start)
    client.release(lookup_id)
    return [shards[0] for shards in reply.present]


def cleared(house: House, session: Session, namespace: str) -> int:
    """How many rows a clear deletes."""
    before = house.status().cleared_rows
    session.call(messages.ClearNamespace(namespace), TIMEOUT)
    until(lambda: not house.status().open_clears)
    return house.status().cleared_rows - before


# ---- sessions -----------------------------------------------------------------------------------


def test_an_engine_finds_what_another_has_stored(house: House) -> None:
    first, second = house.client("first"), house.client("second")
    assert first.pool_ref.incarnation == house.service.incarnation
    assert first.pool_ref.instance == "first"
    assert not first.has_tiers
    store(first, 1, range(3))
    second.lookup(1, [chunk(index) for index in range(4)], 0)
    keep = [(chunk(index), "full") for index in range(3)]
    assert second.narrow(1, keep) is LookupState.READY
    rows = second.prepare_load(9, 1, keep)
    assert rows is not None
    assert [row.digests for row in rows] == [[7]] * 3
    assert house.status().pool.busy_rows == 3
    second.complete_load(9, [keep[0]])
    second.prepare_store(1000, [], [])
    assert found(first, 2, range(4)) == [0b110, 0b111]
    # The first value wins, and what is there is not reserved again.
    assert first.prepare_store(3, [new_row(1)], []) == [[]]
    first.check_integrity([], [])
    second.check_integrity([], [])


def test_engines_of_other_shapes_share_the_pool(house: House) -> None:
    small, large = house.client("small"), house.client("large", slot_bytes=64)
    store(small, 1, range(2))
    size = 4 * SIZES["full"][0]
    assert large.prepare_store(1, [NewRow([size], (chunk(9), "full"))], []) != []
    large.complete_store(1, [Commit(0, chunk(9), None, "full", [1])])
    assert large.stats().used_bytes == small.stats().used_bytes > 0
    assert large.prepare_store(2, [new_row(1)], []) == []  # of the other's size


def test_nothing_is_handed_out_before_all_ranks_have_mapped_the_pool(house: House) -> None:
    client = house.client(attach=False, ranks=2)
    late = house.client(attach=False, ranks=2, instance="late")
    row = NewRow(SIZES["full"], (chunk(0), "full-s1"))
    assert not client.wait_ready(0.05)
    assert client.prepare_store(1, [row], []) == []
    house.worker(rank=0)
    assert not client.wait_ready(0.1)
    house.worker(rank=1)
    assert client.wait_ready(TIMEOUT)
    assert client.prepare_store(1, [row], []) != []
    client.complete_store(1, [Commit(0, chunk(0), None, "full-s1", [1])])
    assert found(client, 1, range(2)) == [1, 0]
    assert found(late, 1, range(2)) == [0, 0]


def test_leases_last_until_nobody_can_write(house: House) -> None:
    client = house.client(attach=False)
    worker = house.worker()
    assert client.wait_ready(TIMEOUT)
    store(client, 1, range(1))
    client.lookup(1, [chunk(0)], 0)
    assert client.prepare_store(2, [new_row(5)], []) != []
    client.close()
    until(lambda: house.engine.stats().busy_rows == 0)
    assert house.engine.stats().leases == 1
    assert house.names() == ["engine"]
    # Nobody else of that name may come now.
    with pytest.raises(RefusedError, match="workers are still there"):
        house.session().call(registration(life="another"), TIMEOUT)
    assert not house.worker()._attached.wait(0.1)
    worker.close()
    until(lambda: house.names() == [])
    stats = house.engine.stats()
    assert (stats.leases, stats.rows) == (0, len(TAGS))


def test_leases_outlive_workers_while_their_client_lives(house: House) -> None:
    client = house.client(attach=False)
    worker = house.worker()
    assert client.wait_ready(TIMEOUT)
    assert client.prepare_store(2, [new_row(5)], []) != []
    worker.close()
    until(lambda: not client.wait_ready(0.0))
    assert house.engine.stats().leases == 1
    assert client.prepare_store(3, [new_row(6)], []) == []
    client.close()
    until(lambda: house.engine.stats().leases == 0)


def test_a_client_comes_back_with_what_it_has_open(house: House) -> None:
    client = house.client()
    store(client, 1, range(2))
    for lookup_id in (1, 2, 3, 4):
        client.lookup(lookup_id, [chunk(0)], 0)
    key = (chunk(0), "full")
    assert client.prepare_load(11, 1, [key]) is not None
    assert client.prepare_load(12, 2, [key]) is not None
    assert client.prepare_load(13, 3, [key]) is not None
    for store_id in (21, 22, 23):
        assert client.prepare_store(store_id, [new_row(store_id)], []) != []
    before = client.pool_ref
    client._break()
    assert client.pool_ref.incarnation == ""
    # Reports come in while there is no session, and between its making and its use.
    client._open_stores.remove(22)
    until(lambda: client._fresh)
    client._open_stores.remove(23)
    client._open_loads.remove(13)
    client.complete_load(12)
    client.complete_store(21, [Commit(0, chunk(21), None, "full", [1])])
    client.check_integrity([11], [])
    assert client.pool_ref == before
    until(lambda: house.status().instances[0].open_loads == 1)
    assert found(client, 5, range(21, 24)) == [1, 0]
    client.complete_load(11)
    # What the lost session had looked up is let go.
    client.check_integrity([], [])
    assert house.engine.stats().busy_rows == 0


def test_a_reset_while_the_session_is_lost_is_made_up_for(house: House) -> None:
    client = house.client()
    assert client.prepare_store(1, [new_row(1)], []) != []
    client._break()
    client.clear(b"m" * 32)
    until(lambda: client._fresh)
    client.clear(b"o" * 32)
    client.complete_store(1, [Commit(0, chunk(1), None, "full", [1])])
    assert found(client, 1, range(1, 2)) == [0, 0]
    assert house.status().instances[0].namespace_digest == b"o" * 32
    client._break()
    client.clear(b"p" * 32)
    until(lambda: house.status().instances[0].namespace_digest == b"p" * 32)


def test_old_tokens_are_dead_once_their_client_is_back(house: House) -> None:
    old, new = house.session(), house.session()
    assert not old.call(registration(life="x"), TIMEOUT).resumed
    assert new.call(registration(life="x"), TIMEOUT).resumed
    with pytest.raises(RefusedError, match="no engine core") as refused:
        old.call(messages.Ping(), TIMEOUT)
    assert refused.value.renew
    with pytest.raises(RefusedError, match="has registered engine already"):
        new.call(registration("another"), TIMEOUT)
    assert new.call(messages.Ping(), TIMEOUT) is False
    new.call(messages.Unregister(), TIMEOUT)
    until(lambda: house.names() == [])


def broken(**change: Any) -> messages.RegisterKVCache:
    changed = msgspec.structs.replace(geometry(), **change)
    return msgspec.structs.replace(registration(), geometries=[changed])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (broken(engine_groups=geometry().engine_groups[:1]), "1 engine group infos for 2 kernel"),
        (
            broken(engine_groups=geometry().engine_groups[::-1]),
            "its kernel group says EngineGroupInfo",
        ),
        (broken(tp_size=2), r"ranks \[0\] registered, expected all of 0..1"),
        (broken(tp_size=2**40), "registered, expected all of"),
        (broken(chunk_tokens=100), "no multiple of its 64-token blocks"),
        (registration(slot_bytes=1 << 16), "has room for 0 objects of 16777216 bytes, one chunk"),
        (
            broken(
                kernel_groups=(kernel_group(0, FULL, -16),),
                engine_groups=engine_group_infos([kernel_group(0, FULL, -16)]),
            ),
            "objects of",
        ),
        (msgspec.structs.replace(registration(), geometries=[]), "no rank registered"),
        (
            broken(
                kernel_groups=(kernel_group(0, ReuseRule(ReuseKind.CHUNKED, 0), 16),),
                engine_groups=engine_group_infos(
                    [kernel_group(0, ReuseRule(ReuseKind.CHUNKED, 0), 16)]
                ),
            ),
            "no chunked has 0 tokens",
        ),
    ],
)
def test_a_registration_is_refused_with_the_difference(
    house: House, message: messages.RegisterKVCache, problem: str
) -> None:
    with pytest.raises(RefusedError, match=problem) as refused:
        house.session().call(message, TIMEOUT)
    assert not refused.value.renew
    assert house.names() == []


def test_ranks_that_contradict_each_other_are_refused(house: House) -> None:
    groups = [kernel_group(0, ReuseRule(ReuseKind.STATE), 16)]
    other = msgspec.structs.replace(
        geometry(1, 2),
        pp_size=1 << 40,  # as many objects a chunk
        engine_groups=engine_group_infos(groups),
        kernel_groups=tuple(groups),
    )
    message = msgspec.structs.replace(registration(), geometries=[geometry(0, 2), other])
    with pytest.raises(RefusedError, match="rank 1 is in"):
        house.session().call(message, TIMEOUT)


def test_an_attention_chunk_that_never_repeats_is_refused(house: House) -> None:
    groups = [kernel_group(0, ReuseRule(ReuseKind.CHUNKED, 2**61 - 1), 16)]
    message = broken(engine_groups=engine_group_infos(groups), kernel_groups=tuple(groups))
    with pytest.raises(RefusedError, match="objects repeat only after"):
        house.session().call(message, TIMEOUT)


def test_a_refused_client_goes_on_without_a_cache(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    client = house.client(attach=False, slot_bytes=1 << 16)
    assert not client.wait_ready(TIMEOUT)
    assert "has room for 0 objects" in caplog.text
    assert client.pool_ref.incarnation == ""


def test_an_engines_own_cache_takes_no_other(directory: Path) -> None:
    pool = MemoryPool(MIB)
    engine = StorageEngine(pool)
    service = PoolService(pool.extents, directory / f"{'0' * 24}.sock")
    service.add_instance("", 1)
    layout = CacheLayout(registration().geometries)
    session = engine.open_session(NAMESPACE, layout.shards(), service.pool_ref())
    server = CacheServer(engine, service, Instance("", "model", "", layout, session))
    with contextlib.closing(Session(service.endpoint, TIMEOUT)) as other:
        with pytest.raises(RefusedError, match="start `lmcache-connector server`"):
            other.call(registration(), TIMEOUT)
        status = other.call(messages.Status(), TIMEOUT)
    assert status.embedded
    assert [(one.instance, one.ready) for one in status.instances] == [("", False)]
    service.close()
    server.close()
    engine.close()
    assert os.listdir(directory) == []


# ---- requests -----------------------------------------------------------------------------------


def test_requests_without_a_good_token_are_answered_with_an_error(house: House) -> None:
    session = house.session()
    with pytest.raises(RefusedError, match="no engine core") as refused:
        session.call(messages.Stats(), TIMEOUT)
    assert refused.value.renew
    session._token = TOKEN
    with pytest.raises(RefusedError, match="token") as refused:
        session.call(messages.Status(), TIMEOUT)
    assert refused.value.renew


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (messages.CompleteStore(5, []), "store 5 is not open"),
        (messages.CompleteLoad(5, []), "load 5 is not open"),
        (messages.PrepareStore(1, [NewRow([1])], []), "other sizes"),
        (messages.PrepareStore(1, [NewRow([-4096])], []), "other sizes"),
        (messages.PrepareStore(1, [new_row(0), NewRow([])], []), "other sizes"),
    ],
)
def test_what_cannot_be_done_is_answered(
    house: House, message: messages.Message, problem: str
) -> None:
    client = house.client()
    session = client._current()
    assert session is not None
    with pytest.raises(RefusedError, match=problem) as refused:
        session.call(message, TIMEOUT)
    assert not refused.value.renew
    # In the client it is a miss, and the session goes on.
    client._tell(message)
    assert client.wait_ready(0.0)


def test_rows_without_bytes_are_refused(house: House) -> None:
    groups = [kernel_group(0, ReuseRule(ReuseKind.CHUNKED, 2 * CHUNK), 16)]
    message = broken(engine_groups=engine_group_infos(groups), kernel_groups=tuple(groups))
    session = house.session()
    session.call(message, TIMEOUT)
    house.worker()
    until(lambda: session.call(messages.Ping(), TIMEOUT))
    with pytest.raises(RefusedError, match="other sizes"):
        session.call(messages.PrepareStore(1, [NewRow([0])], []), TIMEOUT)


@pytest.mark.parametrize(
    "message",
    [
        *(messages.ClearNamespace(name) for name in ("/", ".*", "..", "0" * 17, "0" * 16 + "\n")),
        messages.Probe("*", []),
        registration("a\nb"),
        msgspec.structs.replace(registration(), model="\x1b[2J"),
    ],
)
def test_names_that_could_mean_more_are_refused(house: House, message: messages.Message) -> None:
    with pytest.raises(RefusedError, match="malformed"):
        house.session().call(message, TIMEOUT)


def test_open_lookups_are_limited(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_connector.server.cache_server._MAX_LOOKUPS", 2)
    client = house.client()
    store(client, 1, range(1))
    for lookup_id in (1, 2):
        assert client.lookup(lookup_id, [chunk(0)], 0).present == [[1], [1]]
    assert client.lookup(3, [chunk(0)], 0).present == [[0], [0]]
    client.release(1)
    assert client.lookup(4, [chunk(0)], 0).present == [[1], [1]]
    client.prepare_load(1, 2, [])
    assert client.lookup(5, [chunk(0)], 0).present == [[1], [1]]
    client.complete_load(1)


def test_chunks_of_open_lookups_are_limited(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_connector.server.cache_server._MAX_CHUNKS", 5)
    client = house.client()
    store(client, 1, range(6))
    some = [chunk(index) for index in range(6)]
    assert client.lookup(1, some, 0).present == [[0], [0]]
    for _ in range(3):  # asked again it takes no more
        assert client.lookup(1, some[:3], 0).present == [[0b111], [0b111]]
    assert client.lookup(2, some[:3], 0).present == [[0], [0]]
    assert client.lookup(3, some[:2], 0).present == [[0b11], [0b11]]
    client.release(3)
    assert client.lookup(2, some[:2], 0).present == [[0b11], [0b11]]
    for lookup_id in (1, 2):
        client.release(lookup_id)


def test_rows_that_one_call_asks_for_are_limited(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_connector.storage.engine._MAX_ROWS", 5)
    client, session = house.client(), house.session()
    store(client, 1, range(3))
    some = [chunk(index) for index in range(3)]
    assert client.lookup(1, some, 0).present == [[0], [0]]
    assert client.lookup(1, some[:2], 0).present == [[0b11], [0b11]]
    client.release(1)
    house.engine.tiering = open_tiering(["memory://"], house.pool)
    with pytest.raises(RefusedError, match="3 chunks of 2 groups"):
        session.call(messages.Probe(NAMESPACE.hex()[:16], some), TIMEOUT)
    probe = messages.Probe(NAMESPACE.hex()[:16], some[:2])
    assert session.call(probe, TIMEOUT).in_pool == dict.fromkeys(TAGS, "3")


def test_groups_of_kv_are_those_of_its_registration(house: House) -> None:
    session = house.session()
    session.call(registration(), TIMEOUT)
    with pytest.raises(RefusedError, match="those of its registration"):
        session.call(messages.AddGroups([GroupShards("more", [[8]])]), TIMEOUT)
    assert [group.tag for group in house.status().instances[0].groups] == TAGS


def test_an_unforeseen_error_is_answered_and_survived(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("why not")

    monkeypatch.setattr(house.engine, "set_pinned", fail)
    session = house.session()
    with pytest.raises(RefusedError, match="ZeroDivisionError: why not"):
        session.call(messages.Pin([], True), TIMEOUT)
    assert "a request has failed" in caplog.text
    assert cleared(house, session, "") == 0


def test_books_that_do_not_add_up_are_told(house: House) -> None:
    client = house.client()
    assert client.prepare_store(1, [new_row(1)], []) != []
    client.check_integrity([], [1])
    with pytest.raises(AssertionError, match="1"):
        client.check_integrity([], [])
    house.engine.rows.namespace_bytes["x"] = 5
    with pytest.raises(AssertionError, match="do not add up"):
        client.check_integrity([], [1])
    del house.engine.rows.namespace_bytes["x"]


def test_clears_keep_nobody_waiting_and_are_counted(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, session = house.client(), house.session()
    store(client, 1, range(3))
    clear, may_end = house.engine.clear_namespace, threading.Event()

    def slow(namespace: str) -> int:
        may_end.wait(TIMEOUT)
        if namespace:
            raise ZeroDivisionError("why not")
        return clear(namespace)

    monkeypatch.setattr(house.engine, "clear_namespace", slow)
    for count, namespace in enumerate(["", NAMESPACE.hex()[:16], "", *[""] * 61], 1):
        assert session.call(messages.ClearNamespace(namespace), TIMEOUT) is None
        if count < 4:
            assert found(client, count, range(3)) == [0b111, 0b111]
    with pytest.raises(RefusedError, match="64 clears are under way"):
        session.call(messages.ClearNamespace(""), TIMEOUT)
    assert house.status().open_clears == 64
    may_end.set()
    until(lambda: not house.status().open_clears)
    assert house.status().cleared_rows == 6
    assert "a clear has failed" in caplog.text
    assert found(client, 9, range(3)) == [0, 0]


def test_a_server_ends_while_it_clears(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(directory)
    began, clear = threading.Event(), house.engine.clear_namespace

    def slow(namespace: str) -> int:
        began.set()
        time.sleep(0.3)
        return clear(namespace)

    monkeypatch.setattr(house.engine, "clear_namespace", slow)
    session = house.session()
    for _ in range(3):
        session.call(messages.ClearNamespace(""), TIMEOUT)
    assert began.wait(TIMEOUT)
    house.close()


def test_as_many_descriptors_are_allowed_as_may_be(directory: Path) -> None:
    """libzmq aborts the process when somebody connects and none is left."""
    files = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(files)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, files, (soft, hard))
        resource.setrlimit(files, (256, hard))
        house = House(directory)
        stack.callback(house.close)
        assert resource.getrlimit(files) == (min(hard, 1 << 16), hard)
        for _ in range(200):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.enter_context(contextlib.closing(peer)).connect(str(house.endpoint))
        assert house.names() == []


def test_management(house: House) -> None:
    client = house.client()
    store(client, 1, range(70))
    found(client, 1, range(72))
    assert client.prepare_store(2, [new_row(99)], []) != []
    session = house.session()
    status: messages.StatusReply = session.call(messages.Status(), TIMEOUT)
    assert (status.embedded, status.pid, status.floor_bytes) == (False, os.getpid(), 0)
    assert status.incarnation == house.service.incarnation
    [one] = status.instances
    assert (one.instance, one.model, one.num_ranks, one.ready) == ("engine", "model", 1, True)
    assert (one.open_loads, one.open_stores) == (0, 1)
    assert (one.asked_rows, one.found_rows) == (144, 140)
    assert one.namespace_digest == NAMESPACE
    assert [(group.tag, group.kind, group.tokens) for group in one.groups] == [
        ("full", "full", 0),
        ("window-100", "window", 100),
    ]
    assert [group.row_bytes for group in one.groups] == [sum(SIZES[tag]) for tag in TAGS]
    chunks = [chunk(index) for index in range(72)]
    assert session.call(messages.Pin(chunks[:3], True), TIMEOUT) == 6
    held = session.call(messages.Status(), TIMEOUT).namespaces[one.namespace]
    assert (held.rows, held.pinned_rows) == (140, 6)
    probe = session.call(messages.Probe(one.namespace, chunks), TIMEOUT)
    assert not probe.pending
    assert probe.in_pool == dict.fromkeys(TAGS, f"{(1 << 70) - 1:x}")
    assert session.call(messages.Pin(chunks[:3], False), TIMEOUT) == 6
    assert cleared(house, session, "0" * 16) == 0
    assert cleared(house, session, one.namespace) == 140
    assert found(client, 3, range(70)) == [0, 0]


def test_another_user_gets_no_token(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(house.endpoint.stat().st_mode) == 0o600
    monkeypatch.setattr(sockets, "peer_uid", lambda connection: os.geteuid() + 1)
    with pytest.raises(LOST):
        Session(house.endpoint, 1.0)
    monkeypatch.undo()


OTHER_USER = """
import os, sys, zmq
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
    peer.linger = 0
    peer.connect(f"ipc://{sys.argv[1]}")
    peer.send(b"?")
    print(peer.poll(int(sys.argv[3])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_who_are_not_allowed_are_not_even_heard(directory: Path) -> None:
    directory.chmod(0o711)
    pool = MemoryPool(MIB)
    service = PoolService(pool.extents, directory / "kv", exclusive=True, allowed_uids=[1234])
    server = CacheServer(StorageEngine(pool, shared=True), service)

    def heard(uid: int, milliseconds: int) -> bool:
        command = [sys.executable, "-c", OTHER_USER, str(service.endpoint), str(uid)]
        return b"1" in subprocess.check_output([*command, str(milliseconds)])

    assert heard(1234, 10_000)
    assert not heard(1235, 300)
    service.close()
    server.close()
    pool.close()


# ---- the client ---------------------------------------------------------------------------------


def everything(client: StoreClient) -> None:
    """All verbs, on a client without a server."""
    empty = LookupReply(LookupState.READY, [[0], [0]])
    assert client.lookup(1, [chunk(0)], 0) == empty
    assert client.narrow(1, [(chunk(0), "full")]) is LookupState.GONE
    assert client.narrow(1, []) is LookupState.READY
    assert client.prepare_load(1, 1, []) is None
    client.complete_load(1)
    client.release(1)
    assert client.prepare_store(1, [new_row(0)], []) == []
    client.complete_store(1, [])
    client.clear(NAMESPACE)
    assert isinstance(client.stats(), StoreStats)
    client.check_integrity([], [])
    assert client.pool_ref.incarnation == ""


def test_without_a_server_everything_is_a_miss_at_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    client = StoreClient(f"ipc://{directory}/kv", registration())
    assert not client.wait_ready(TIMEOUT)
    everything(client)
    assert time.monotonic() - began < CALL_SECONDS / 2
    assert caplog.text.count("no cache, until there is a server") == 1
    house = House(directory)
    house.worker()
    until(lambda: client.wait_ready(0.0))
    store(client, 1, range(2))
    assert found(client, 1, range(2)) == [3, 3]
    client.close()
    until(lambda: not client._thread.is_alive())
    everything(client)
    house.close()


class Answers:
    """In place of a session: gives prepared answers and counts the questions."""

    incarnation = "life"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def call(self, message: messages.Message, timeout: float) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, message: messages.Message) -> None:
        self.call(message, 0.0)

    def close(self) -> None:
        pass


@pytest.fixture
def lonely(directory: Path) -> Iterator[StoreClient]:
    client = StoreClient(f"ipc://{directory}/kv", registration())
    yield client
    client._session = None
    client.close()


def test_waiting_lookups_are_asked_about_in_turn(
    lonely: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(store_client.time, "monotonic", lambda: now[0])
    pending = LookupReply(LookupState.PENDING, [[1], [0]])
    ready = LookupReply(LookupState.READY, [[1], [1]])
    answers = Answers(pending, pending, pending)
    lonely._session = answers  # type: ignore[assignment]
    for lookup_id in (1, 2, 3):
        assert lonely.lookup(lookup_id, [], 0) is pending
    now[0] += 0.005
    assert lonely.lookup(1, [], 0) is pending
    answers.answers = [ready, pending, LookupState.PENDING, LookupState.READY]
    now[0] += 0.002
    assert lonely.lookup(1, [], 0) is ready
    # Two are left: their turn comes sooner.
    now[0] += 0.0
    assert lonely.lookup(2, [], 0) is pending
    assert len(answers.answers) == 2
    # Another question is not answered with the answer to the last one.
    assert lonely.narrow(2, []) is LookupState.PENDING
    assert lonely.narrow(2, []) is LookupState.PENDING
    assert lonely.narrow(2, [(chunk(0), "full")]) is LookupState.READY
    assert answers.answers == []


def test_statistics_are_asked_for_once_a_second(
    lonely: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(store_client.time, "monotonic", lambda: now[0])
    first, second = (StoreStats(size, 0, 0, 0, 0, 0, {}, 0) for size in (1, 2))
    counted = StoreStats(1, 0, 0, 0, 0, 0, {"full": 5}, 0, {"memory://": TierCounters(7)})
    lonely._session = Answers(counted, second)  # type: ignore[assignment]
    # What the server counts for all its engines is no engine's own.
    assert lonely.stats() == first
    now[0] += 0.5
    assert lonely.stats() == first
    now[0] += 0.6
    assert lonely.stats() == second


@pytest.mark.parametrize("error", [OSError("x"), zmq.Again(), ConnectorError("x")])
def test_whatever_goes_wrong_is_a_miss(lonely: StoreClient, error: Exception) -> None:
    lonely._session = Answers(error)  # type: ignore[assignment]
    assert lonely.prepare_store(1, [], []) == []
    assert lonely._session is None
    lonely._session = Answers(error)  # type: ignore[assignment]
    lonely.release(1)
    assert lonely._session is None
    lonely._session = Answers(RefusedError("x"))  # type: ignore[assignment]
    assert lonely.prepare_load(1, 1, []) is None
    assert lonely._session is not None


def test_what_a_new_session_begins_with_is_not_forgotten(lonely: StoreClient) -> None:
    anew = messages.Registered(False, True)
    slot, told = SlotRef(0, 0, 4096), list[messages.Message]()
    row = Row([slot], [1])

    def fresh(*answers: Any) -> None:
        session = Answers(*answers)
        session.tell = told.append  # type: ignore[method-assign]
        lonely._fresh = (session, registration(), anew)  # type: ignore[assignment]

    fresh([[slot]])
    assert lonely.prepare_store(1, [new_row(0)], []) == [[slot]]
    assert lonely.has_tiers
    lonely.complete_store(1, [])
    fresh([row])
    assert lonely.prepare_load(2, 1, []) == [row]
    lonely.complete_load(2)
    assert told == [messages.CompleteStore(1, []), messages.CompleteLoad(2, [])]
    for answer in (None, OSError("x")):
        fresh(answer, answer)
        assert lonely.prepare_load(3, 1, []) is None
        assert lonely.prepare_store(4, [], []) == []
    assert not lonely._open_loads | lonely._open_stores


def test_a_message_too_long_is_a_miss(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house.client()
    store(client, 1, range(1))
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 1000)
    assert client.lookup(1, [chunk(0)] * 100, 0).present == [[0], [0]]
    assert found(client, 2, range(1)) == [1, 1]


def test_answers_that_nobody_waits_for_do_not_pile_up(house: House) -> None:
    client = house.client()
    for lookup_id in range(3000):
        client.release(lookup_id)
    assert client.wait_ready(0.0)


def test_closing_while_a_session_is_being_made_leaves_none_behind(house: House) -> None:
    for _ in range(20):
        client = house.client(attach=False)
        client.close()
        assert not client._thread.is_alive()
    until(lambda: house.names() == [])
    until(lambda: not house.service._sessions)


# ---- a server of its own ------------------------------------------------------------------------

SERVER = """
import sys
from lmcache_connector.server.run import run_server
try:
    run_server(sys.argv[1], int(sys.argv[2]), sys.argv[3:], 0, [])
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
assert not {"torch", "vllm", "numpy", "triton"} & set(sys.modules)
"""


class Server:
    """A server process and its log."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/s/kv"
        self.log = directory / "log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, self.endpoint, str(4 * MIB)], stderr=log
            )

    def text(self) -> str:
        return self.log.read_text()

    def wait_started(self, starts: int = 1) -> None:
        until(lambda: self.text().count(" ready in ") == starts)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all(") T " in (t / "stat").read_text() for t in threads.iterdir()))

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    server = Server(directory)
    yield server
    server.end()


def names(server: Server) -> list[str]:
    return sorted(os.listdir(server.log.parent / "s"))


def test_a_server_starts_fast_ends_cleanly_and_owns_its_name(server: Server) -> None:
    server.wait_started()
    seconds = float(server.text().split(" ready in ")[1].split(" s:")[0])
    assert seconds < 2.0
    place = server.log.parent / "s"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}
    other = subprocess.run(
        [sys.executable, "-c", SERVER, server.endpoint, str(MIB)], capture_output=True, text=True
    )
    assert other.returncode == 1
    assert "is taken: by a cache server that runs" in other.stderr
    assert names(server) == ["kv", "kv.fd"]
    assert server.end(signal.SIGTERM) == 0, server.text()
    assert names(server) == []


def test_a_server_whose_memory_socket_has_failed_ends(directory: Path) -> None:
    fail = """
from lmcache_connector.server.service import PoolService
PoolService._serve_events = lambda self: 1 / 0
"""
    command = [sys.executable, "-c", fail + SERVER, f"ipc://{directory}/s/kv", str(MIB)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert "RuntimeError: a thread of the server has ended" in process.stderr


def test_a_network_endpoint_is_refused() -> None:
    command = [sys.executable, "-m", "lmcache_connector.server", "--socket", "tcp://0.0.0.0:5555"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2
    assert "share memory, so they share a host" in " ".join(process.stderr.replace("│", "").split())


def test_a_directory_that_others_write_to_is_refused(directory: Path) -> None:
    (directory / "s").mkdir()
    (directory / "s").chmod(0o777)
    server = Server(directory)
    assert server.process.wait(TIMEOUT) == 1
    assert "StartupError" in server.text()
    assert "nobody else can write to" in server.text()


class Engine:
    """A client and its worker, both in this process."""

    def __init__(self, endpoint: str, instance: str = "engine") -> None:
        path = Path(endpoint.removeprefix("ipc://"))
        self.worker = PoolClient(sockets.memory_path(path), 0, instance)
        self.client = StoreClient(endpoint, registration(instance))

    def wait_ready(self) -> None:
        until(lambda: self.client.wait_ready(0.0))

    def close(self) -> None:
        self.client.close()
        self.worker.close()


@pytest.fixture
def engine(server: Server) -> Iterator[Engine]:
    server.wait_started()
    engine = Engine(server.endpoint)
    engine.wait_ready()
    yield engine
    engine.close()


def test_a_killed_server_is_a_miss_and_the_next_one_is_attached_to(
    server: Server, engine: Engine
) -> None:
    client, worker = engine.client, engine.worker
    store(client, 1, range(2))
    first = client.pool_ref.incarnation
    assert worker.hold(first)
    assert client.prepare_store(2, [new_row(7)], []) != []
    client.lookup(3, [chunk(0)], 0)
    assert client.prepare_load(3, 3, [(chunk(0), "full")]) is not None
    server.stop()
    began = time.monotonic()
    threading.Timer(0.1, server.process.kill).start()
    # In the middle of a call: its end is known at once.
    assert found(client, 4, range(2)) == [0, 0]
    assert 0.1 <= time.monotonic() - began < 0.8 * CALL_SECONDS
    server.end()
    assert names(server) == ["kv", "kv.fd"]
    began = time.monotonic()
    assert found(client, 4, range(2)) == [0, 0]
    client.complete_load(3)
    assert client.prepare_store(4, [new_row(8)], []) == []
    assert client.pool_ref.incarnation == ""
    assert time.monotonic() - began < CALL_SECONDS / 2
    server.start()
    server.wait_started(2)
    assert names(server) == ["kv", "kv.fd"]
    until(lambda: client.wait_ready(0.0) or client.pool_ref.incarnation)
    # A copy of before still runs: only then can the new memory be mapped.
    assert not client.wait_ready(0.2)
    assert found(client, 4, range(2)) == [0, 0]
    worker.drop()
    engine.wait_ready()
    assert client.pool_ref.incarnation not in ("", first)
    # The new server knows nothing of it, and is told nothing.
    client.complete_store(2, [Commit(0, chunk(7), None, "full", [1])])
    client.check_integrity([], [])
    store(client, 5, range(2))
    assert found(client, 6, range(2)) == [3, 3]
    assert "refused a request" not in server.text()


def test_a_stopped_server_is_waited_for_once(server: Server, engine: Engine) -> None:
    client = engine.client
    store(client, 1, range(2))
    life = client.pool_ref
    for store_id in (2, 3):
        assert client.prepare_store(store_id, [new_row(store_id)], []) != []
    server.stop()
    began = time.monotonic()
    # Reserved there as soon as it goes on, and for nobody.
    assert client.prepare_store(4, [new_row(4)], []) == []
    assert CALL_SECONDS / 2 < time.monotonic() - began < 3 * CALL_SECONDS
    began = time.monotonic()
    assert found(client, 1, range(2)) == [0, 0]
    client.complete_store(3, [Commit(0, chunk(3), None, "full", [1])])
    assert client.stats() is client.stats()
    assert time.monotonic() - began < CALL_SECONDS
    time.sleep(2.5 * CALL_SECONDS)
    server.process.send_signal(signal.SIGCONT)
    engine.wait_ready()
    assert client.pool_ref == life
    assert engine.worker.incarnation == life.incarnation
    client.complete_store(2, [Commit(0, chunk(2), None, "full", [1])])
    assert found(client, 2, range(5)) == [0b111, 0b011]
    client.check_integrity([], [])
    assert client.stats().leases == 0


ENGINE = """
import sys, time
sys.path[:0] = [sys.argv[1]]
import test_cache_server as t
engine = t.Engine(sys.argv[2], "other")
engine.wait_ready()
assert engine.client.prepare_store(1, [t.new_row(1)], []) != []
print("stored", flush=True)
time.sleep(60)
"""


def test_a_killed_engine_leaves_nothing(server: Server, engine: Engine) -> None:
    client = engine.client
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(Path(__file__).parent), server.endpoint],
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"stored\n"
        client.check_integrity([], [])
        assert client.stats().leases == 1
        other.kill()
    until(lambda: client.check_integrity([], []) or client.stats().leases == 0)
    assert client.stats().used_bytes == 0
    assert found(client, 1, range(1, 2)) == [0, 0]


# ---- hostile frames -----------------------------------------------------------------------------


def rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def corpus() -> list[messages.Message]:
    hashes = [chunk(index) for index in range(4)]
    keys = [(one, tag) for one in hashes for tag in TAGS]
    return [
        registration(life="fuzz", open_loads=[1], open_stores=[1]),
        messages.Lookup(1, hashes, 0),
        messages.Narrow(1, keys[:2]),
        messages.Release(1),
        messages.PrepareLoad(1, 1, keys[:2]),
        messages.CompleteLoad(1, keys[:1]),
        messages.PrepareStore(1, [new_row(1), NewRow(SIZES["full"])], hashes),
        messages.CompleteStore(1, [Commit(0, chunk(1), None, "full", [5])]),
        messages.Clear(NAMESPACE),
        messages.Stats(),
        messages.Ping(),
        messages.Status(),
        messages.Probe("", hashes),
        messages.Pin(hashes, True),
        messages.Pin(hashes, False),
        messages.ClearNamespace(""),
        messages.Unregister(),
    ]


def mutated(rng: random.Random, frame: bytes, keep: int) -> bytes:
    """Often still a request with its token, seldom a message."""
    data = bytearray(frame)
    first = rng.choice([0, keep, keep, keep])
    for _ in range(rng.choice([0, 1, 1, 2, 8])):
        data[rng.randrange(first, len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.1:
        data += rng.randbytes(rng.randrange(200))
    return rng.randbytes(rng.randrange(300)) if rng.random() < 0.1 else bytes(data)


def test_hostile_frames_are_answered_and_cost_nothing(server: Server, engine: Engine) -> None:
    count = int(os.environ.get("LMCACHE_FUZZ_FRAMES", "20000"))
    rng = random.Random(0)
    path = Path(server.endpoint.removeprefix("ipc://"))
    session = Session(path, TIMEOUT)
    worker = PoolClient(sockets.memory_path(path), 0, "fuzz")
    frames = [messages.encode_request(session._token, 1, message) for message in corpus()]
    keep = len(messages.encode_request(session._token, 1, messages.Ping())) - 11
    register = frames[0].replace(b"\xa6engine", b"\xa4fuzz")
    frames[0] = register
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(server.endpoint)
    baseline = 0
    for start in range(0, count, 200):
        raw.send(register)
        for _ in range(199):
            raw.send(mutated(rng, rng.choice(frames), keep))
        for _ in range(200):
            assert raw.poll(TIMEOUT * 1000), server.text()[-2000:]
            messages.decode_reply(raw.recv())
        if start == 2000:
            baseline = rss(server.process.pid)
    assert not raw.poll(0)
    # Connections that are no ZeroMQ, and requests of many parts and of too many bytes.
    for _ in range(50):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as peer:
            peer.connect(str(path))
            with contextlib.suppress(ConnectionError):
                peer.sendall(rng.randbytes(rng.randrange(1, 2000)))
    raw.send_multipart([b"", b"x"] * 100)
    assert raw.poll(TIMEOUT * 1000)
    raw.close()
    long = zmq.Context.instance().socket(zmq.DEALER)
    long.setsockopt(zmq.LINGER, 0)
    long.connect(server.endpoint)
    long.send(bytes(messages.MAX_MESSAGE_BYTES + 1))
    assert not long.poll(100)
    long.close()
    session.close()
    worker.close()
    until(lambda: engine.client.wait_ready(0.0))
    engine.client.check_integrity([], [])
    until(lambda: engine.client.stats().leases == 0)
    assert rss(server.process.pid) - baseline < 32 * MIB
    assert server.process.poll() is None
    assert "a request has failed" not in server.text(), server.text()[-3000:]


def test_hostile_frames_on_the_memory_socket(server: Server, engine: Engine) -> None:
    rng = random.Random(1)
    path = sockets.memory_path(Path(server.endpoint.removeprefix("ipc://")))
    descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    for _ in range(500):
        # While its queue is full, a connection is refused at once.
        with contextlib.suppress(BlockingIOError), sockets.connect(path, TIMEOUT) as peer:
            for _ in range(rng.randrange(4)):
                with contextlib.suppress(ConnectionError):
                    peer.send(rng.randbytes(rng.randrange(1, 300)))
    until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) == descriptors)
    assert engine.client.wait_ready(0.0)
