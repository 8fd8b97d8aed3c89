"""Hidden states through sockets: an engine's own pool, a server's, other processes, outages."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_connector.config import Config, load_config
from lmcache_connector.groups import FULL, KVLayerGroupInfo, WorkerGeometry, engine_group_infos
from lmcache_connector.hidden_states.rows import Rows
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.metadata import PoolRef
from lmcache_connector.server import messages, sockets
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.embedded import EmbeddedStore
from lmcache_connector.server.session import RefusedError, Session
from lmcache_connector.server.store_client import StoreClient
from lmcache_connector.storage.base import Commit, GroupShards, LookupState, NewRow, Store

TIMEOUT = 30.0
MIB = 1 << 20
CHUNK, WIDTH = 64, 32
NAMESPACE = b"n" * 32
IDS = [*range(5 * CHUNK)]


def geometry() -> WorkerGeometry:
    group = KVLayerGroupInfo(
        engine_group_idx=0,
        layer_indices=(0,),
        kv_size=1,
        nl=1,
        nb=8,
        bs=CHUNK,
        nh=1,
        hs=16,
        element_size=1,
        block_stride_elems=CHUNK * 16,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=CHUNK,
        slots_per_block=CHUNK,
        sw_size_tokens=-1,
        recurrent_state=False,
        rule=FULL,
        num_shards=1,
        num_runs=1,
        run_bytes=CHUNK * 16,
    )
    return WorkerGeometry(0, 0, 1, 0, 1, CHUNK, engine_group_infos([group]), (group,))


LAYOUT = CacheLayout([geometry()])


def rows_of(layer: int = 0, first: int = 0, end: int = len(IDS)) -> torch.Tensor:
    return (torch.arange(first, end)[:, None] % 251 + layer * torch.ones(WIDTH)).bfloat16()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def hashes(namespace: bytes = NAMESPACE) -> list[bytes]:
    chain = ChunkChain(TokenDatabase(namespace, CHUNK))
    chain.extend(lambda start, end: IDS[start:end], len(IDS))
    return chain.hashes


def add_kv(store: Store, store_id: int, chunks: int = 5) -> None:
    keys = [(name, "full") for name in hashes()[:chunks]]
    slots = store.prepare_store(store_id, [NewRow([CHUNK * 16], key) for key in keys], [])
    assert all(slots), "the rows have no room"
    store.complete_store(
        store_id, [Commit(index, key[0], None, "full", [7]) for index, key in enumerate(keys)]
    )


class Worker:
    """A worker's part, as sides.WorkerSide has it."""

    def __init__(self, endpoint: str, name: str = "e/rows", **options: Any) -> None:
        who = messages.RegisterHiddenStates(name, "model", NAMESPACE, CHUNK, 1)
        self.client = StoreClient(endpoint, who)
        path = sockets.memory_path(Path(endpoint.removeprefix("ipc://")))
        self.memory = PoolClient(path, 0, name)
        database = TokenDatabase(NAMESPACE, CHUNK)
        self.hs = HiddenStateStore(**options)
        self.hs.attach(self.client, self.memory, database)

    def ready(self) -> Worker:
        until(lambda: self.client.wait_ready(1.0))
        return self

    def close(self) -> None:
        self.hs.close()
        self.client.close()
        self.memory.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lc-") as name:
        yield Path(name)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _config(hidden_size: str) -> Config:
    sizes = {"max_local_cpu_size": "1MiB", "max_hidden_state_cpu_size": hidden_size}
    return load_config({**sizes, "enable_hidden_state_cache": True}, {}).config


@pytest.fixture
def embedded(directory: Path) -> Iterator[EmbeddedStore]:
    """An engine core's store; its KV is there at once."""
    store = EmbeddedStore(directory / "a.sock", "m", NAMESPACE, LAYOUT, _config("2MiB"))
    for extent in range(len(store._engine._pool.extents)):
        store._engine.mark_ready(extent)
    yield store
    store.check_integrity((), ())
    stats = store.hidden.engine.stats()
    assert (stats.leases, stats.busy_rows) == (0, 0)
    store.close()
    assert os.listdir(directory) == []


def work_elsewhere(endpoint: str) -> None:
    """What the other process does."""
    worker = Worker(endpoint).ready()
    for first in range(0, len(IDS), 50):
        end = min(len(IDS), first + 50)
        worker.hs.store_batch(
            [Rows(IDS[:end], rows_of(layer, first, end), layer, first) for layer in (0, -1)]
        )
    found = worker.hs.retrieve_layers(IDS, [0, -1])
    lengths = {layer: len(rows) for layer, rows in (found or {}).items()}
    print("found", lengths, flush=True)
    sys.stdin.read()
    worker.close()


def start_worker(endpoint: str) -> subprocess.Popen[str]:
    code = (
        "import importlib.util, sys;"
        f"spec = importlib.util.spec_from_file_location('elsewhere', {__file__!r});"
        "module = importlib.util.module_from_spec(spec); sys.modules['elsewhere'] = module;"
        f"spec.loader.exec_module(module); module.work_elsewhere({endpoint!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def test_a_worker_in_another_process_stores_and_reads(
    embedded: EmbeddedStore, stack: contextlib.ExitStack
) -> None:
    add_kv(embedded, 1, 4)
    child = start_worker(embedded.hidden.endpoint)
    stack.callback(lambda: (child.kill(), child.communicate()))
    assert child.stdout is not None
    assert child.stdout.readline() == f"found {{0: {4 * CHUNK}, -1: {4 * CHUNK}}}\n"
    # The engine core asks for the same at schedule time, and a second worker reads it.
    groups = [GroupShards(f"hs{layer}-bfloat16-{WIDTH}", [[8]], full=True) for layer in "0"]
    session = embedded.hidden.engine.open_session(NAMESPACE, groups, PoolRef("", ""))
    assert session.lookup(1, hashes(), 0).present == [[0b1111]]
    assert session.narrow(1, [(hashes()[0], groups[0].tag)]) is LookupState.READY
    session.close()
    other = Worker(embedded.hidden.endpoint, "f/rows", default=(torch.bfloat16, WIDTH)).ready()
    stack.callback(other.close)
    for layer in (0, -1):
        found = other.hs.retrieve_hidden_states(IDS, layer, dtype=None)
        assert torch.equal(found, rows_of(layer, 0, 4 * CHUNK))
    # A killed worker leaves nothing behind.
    assert embedded.hidden.engine.stats().rows == 10
    child.kill()
    until(lambda: len(embedded.hidden.engine.sessions) == 1)


def test_kv_that_goes_takes_rows_with_it_across_the_socket(
    embedded: EmbeddedStore, stack: contextlib.ExitStack
) -> None:
    worker = Worker(embedded.hidden.endpoint).ready()
    stack.callback(worker.close)
    add_kv(embedded, 1)
    assert worker.hs.store_hidden_states(IDS, rows_of()) == 5
    embedded.lookup(1, hashes(), 0)
    keys = [(name, "full") for name in hashes()]
    assert embedded.prepare_load(1, 1, keys) is not None
    embedded.complete_load(1, keys[3:4])
    assert worker.hs.coverage(IDS) == 3 * CHUNK
    assert worker.hs.num_cached_chunks == 4


def test_what_a_lost_service_may_not_have_kept_is_not_counted(
    embedded: EmbeddedStore, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(embedded.hidden.endpoint).ready()
    stack.callback(worker.close)
    add_kv(embedded, 1)
    complete = worker.client.complete_store

    def lose(*how: Any) -> None:
        worker.client._break()
        complete(*how)

    monkeypatch.setattr(worker.client, "complete_store", lose)
    assert worker.hs.store_hidden_states(IDS, rows_of()) == 0
    monkeypatch.undo()
    worker.ready()
    until(lambda: worker.hs.store_hidden_states(IDS, rows_of()) == 5)
    assert torch.equal(worker.hs.retrieve_hidden_states(IDS, dtype=None), rows_of())


def test_each_kind_registers_where_it_belongs(
    embedded: EmbeddedStore, stack: contextlib.ExitStack
) -> None:
    endpoint = Path(embedded.hidden.endpoint.removeprefix("ipc://"))
    session = Session(endpoint, TIMEOUT)
    stack.callback(session.close)
    kv = messages.RegisterKVCache("e", "m", NAMESPACE, [geometry()])
    with pytest.raises(RefusedError, match="hidden states beside it"):
        session.call(kv, TIMEOUT)
    for group in (
        GroupShards("hs0", [[0]]),
        GroupShards("hs0", [[-4]]),
        GroupShards("hs0", [[1, 1]]),
        GroupShards("hs0", [[1], [1]]),
        GroupShards("hs0", []),
        GroupShards("../hs0", [[1]]),
        GroupShards("hs0\n", [[1]]),
    ):
        bad = messages.RegisterHiddenStates("e", "m", NAMESPACE, CHUNK, 0, [group])
        with pytest.raises(RefusedError):
            session.call(bad, TIMEOUT)
    session.call(messages.RegisterHiddenStates("e", "m", NAMESPACE, CHUNK, 0), TIMEOUT)
    with pytest.raises(RefusedError, match="rows of"):
        session.call(messages.AddGroups([GroupShards("hs0", [[0]])]), TIMEOUT)
    session.call(messages.AddGroups([GroupShards("hs0", [[8]], full=True)]), TIMEOUT)
    assert session.call(messages.Lookup(1, hashes(), 0), TIMEOUT).present == [[0]]
    (one,) = session.call(messages.Status(), TIMEOUT).instances
    assert [(group.tag, group.kind, group.row_bytes) for group in one.groups] == [
        ("hs0", "full", 8)
    ]
    other = Session(embedded._service.endpoint, TIMEOUT)
    stack.callback(other.close)
    with pytest.raises(RefusedError, match="engine's own cache"):
        other.call(messages.RegisterHiddenStates("e", "m", NAMESPACE, CHUNK, 0), TIMEOUT)


def test_groups_and_what_is_asked_of_them_are_limited(
    embedded: EmbeddedStore, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Path(embedded.hidden.endpoint.removeprefix("ipc://"))

    def call(message: messages.Message) -> Any:
        return session.call(message, TIMEOUT)

    def some(first: int, count: int) -> list[GroupShards]:
        return [GroupShards(f"hs{number}", [[8]]) for number in range(first, first + count)]

    session = Session(endpoint, TIMEOUT)
    stack.callback(session.close)
    registration = messages.RegisterHiddenStates("e", "m", NAMESPACE, CHUNK, 0, some(0, 1024))
    assert not call(registration).resumed
    call(messages.AddGroups(some(1, 1023)))  # it knows them
    with pytest.raises(RefusedError, match="more than 1024 groups"):
        call(messages.AddGroups(some(1024, 1)))
    registration.groups = some(1000, 1024)
    with pytest.raises(RefusedError, match="more than 1024 groups"):
        call(registration)
    chunks = [number.to_bytes(32, "big") for number in range(1025)]
    assert len(call(messages.Lookup(1, chunks[:1024], 0)).present) == 1024
    with pytest.raises(RefusedError, match="1025 chunks of 1024 groups"):
        call(messages.Lookup(2, chunks, 0))
    # And of the KV that they go with.
    monkeypatch.setattr("lmcache_connector.storage.engine._MAX_ROWS", 1024)
    other = Session(endpoint, TIMEOUT)
    stack.callback(other.close)
    one = messages.RegisterHiddenStates("o", "m", NAMESPACE, CHUNK, 0, some(0, 1))
    assert not other.call(one, TIMEOUT).resumed
    more = [GroupShards(f"kv{number}", [[8]]) for number in range(10)]
    embedded.groups |= {group.tag: group for group in more}
    with pytest.raises(RefusedError, match=f"1000 chunks of {len(embedded.groups)} groups"):
        other.call(messages.Lookup(1, chunks[:1000], 0), TIMEOUT)


def test_the_command_line_finds_the_endpoint_of_the_kv(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(directory))
    path = sockets.socket_path_for("engine")
    store = EmbeddedStore(path, "m", NAMESPACE, LAYOUT, _config("1MiB"))
    assert sockets.our_endpoints() == ([f"ipc://{path}"], [])
    assert store.hidden.endpoint == f"ipc://{path}-hs"
    # A name that a crash left is removed by the next one to come.
    store.close()
    dead = sockets.hidden_endpoint(path.with_stem(f"{path.stem}-0123abcd"))
    listener, _ = sockets.listen_private(dead)
    listener.close()
    assert sockets.our_endpoints()[1] == [sockets.memory_path(dead)]
    EmbeddedStore(path, "m", NAMESPACE, LAYOUT, _config("1MiB")).close()
    assert list(path.parent.iterdir()) == []


# ---- a server -----------------------------------------------------------------------------------


def start_server(directory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "lmcache_connector.server"),
            *("--socket", f"ipc://{directory}/kv", "--max-local-cpu-size", "4MiB"),
            *("--max-hidden-state-cpu-size", "4MiB", "--tier", f"file://{directory}/tier"),
        ],
        env={k: v for k, v in os.environ.items() if not k.startswith("LMCACHE_")},
        stderr=subprocess.DEVNULL,
    )
    until(lambda: sockets.memory_path(directory / "kv-hs").exists() or process.poll() is not None)
    assert process.poll() is None
    return process


def engine(directory: Path, stack: contextlib.ExitStack, name: str = "e") -> StoreClient:
    """The KV of an engine core, with its worker."""
    registration = messages.RegisterKVCache(name, "m", NAMESPACE, [geometry()])
    client = StoreClient(f"ipc://{directory}/kv", registration)
    stack.callback(client.close)
    memory = PoolClient(sockets.memory_path(directory / "kv"), 0, name)
    stack.callback(memory.close)
    until(lambda: client.wait_ready(1.0))
    return client


def test_a_server_shares_rows_and_its_tiers_keep_them_over_a_kill(
    directory: Path, stack: contextlib.ExitStack
) -> None:
    server = start_server(directory)
    stack.callback(lambda: (server.kill(), server.wait()))
    kv = engine(directory, stack)
    add_kv(kv, 1)
    options = {"default": (torch.bfloat16, WIDTH), "timeout": 10.0}
    first, second = (Worker(f"ipc://{directory}/kv-hs", f"{n}/rows", **options) for n in "ef")
    for worker in (first, second):
        stack.callback(worker.close)
        worker.ready()
    assert first.hs.store_hidden_states(IDS, rows_of(3), 3) == 5
    assert torch.equal(second.hs.retrieve_hidden_states(IDS, 3, dtype=None), rows_of(3))
    until(lambda: len(list((directory / "tier").rglob("*-hs3*"))) == 5)
    until(lambda: len(list((directory / "tier").rglob("*-full"))) == 5)

    server.kill()
    server.wait()
    began = time.monotonic()
    assert first.hs.retrieve_hidden_states(IDS, 3) is None
    assert first.hs.store_hidden_states(IDS, rows_of(3), 3) == 0
    assert first.hs.coverage(IDS, [3]) == 0
    assert time.monotonic() - began < 5
    again = start_server(directory)
    stack.callback(lambda: (again.kill(), again.wait()))
    for worker in (first, second):
        worker.ready()
    until(lambda: kv.wait_ready(1.0))
    # Nothing is in a pool: KV and rows are in the tier.
    until(lambda: second.hs.coverage(IDS, [3]) == 5 * CHUNK)
    assert torch.equal(second.hs.retrieve_hidden_states(IDS, 3, dtype=None), rows_of(3))
    assert first.hs.store_hidden_states(IDS, rows_of(4), 4) == 5
    found = first.hs.retrieve_layers(IDS, [3, 4])
    assert all(torch.equal(found[layer], rows_of(layer)) for layer in (3, 4))
    # Who only looks up needs no memory; its rows are known by their tags.
    groups = [GroupShards(f"hs3-bfloat16-{WIDTH}", [[CHUNK * WIDTH * 2]], full=True)]
    who = messages.RegisterHiddenStates("e/lookups", "m", NAMESPACE, CHUNK, 0, groups)
    lookups = StoreClient(f"ipc://{directory}/kv-hs", who)
    stack.callback(lookups.close)
    until(lambda: lookups.wait_ready(1.0))
    until(lambda: lookups.lookup(1, hashes(), 0).state is LookupState.READY)
    assert lookups.lookup(1, hashes(), 0).present == [[0b11111]]
    server = again
    server.terminate()
    assert server.wait(TIMEOUT) == 0
    assert sorted(os.listdir(directory)) == ["tier"]


def test_layers_that_were_added_are_known_to_the_next_session(
    directory: Path, stack: contextlib.ExitStack
) -> None:
    server = start_server(directory)
    stack.callback(lambda: (server.kill(), server.wait()))
    add_kv(engine(directory, stack), 1)
    worker = Worker(f"ipc://{directory}/kv-hs").ready()
    stack.callback(worker.close)
    for layer in (0, 5):
        assert worker.hs.store_hidden_states(IDS, rows_of(layer), layer) == 5
        worker.client._break()
        until(lambda: worker.client.wait_ready(1.0))
    found = worker.hs.retrieve_layers(IDS, [5, 0])
    assert all(torch.equal(found[layer], rows_of(layer)) for layer in (0, 5))
