#!/usr/bin/env python3
"""The cache server's answers per second with 1 to 8 engines, and the tiers' GB/s.

usage: benchmarks/server_and_tiers.py

Engines are processes with the client that an engine core uses; nothing is computed. Each tier puts
and gets rows of 4 MiB through the threads, headers and checksums of the real thing; beside it, in
the same run, the same bytes go to the same medium by the plainest means there is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lmcache_connector.groups import (
    FULL,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
)
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import sockets
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.messages import RegisterKVCache
from lmcache_connector.server.store_client import StoreClient
from lmcache_connector.storage.base import Row
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.tiering import open_tiering

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 256
SECONDS = 3.0
ROW_BYTES = 4 << 20
ROWS = 48


def geometry() -> WorkerGeometry:
    """One rank with a full and a window group of 1 KiB per block."""
    rules = (FULL, ReuseRule(ReuseKind.WINDOW, 1023))
    groups = tuple(
        KVLayerGroupInfo(
            engine_group_idx=index, layer_indices=(index,), kv_size=1, nl=1, nb=1000, bs=16, nh=1,
            hs=64, element_size=1, block_stride_elems=1024, dtype="int8", layout="NB,BS,HS",
            tokens_per_block=16, slots_per_block=16, sw_size_tokens=-1, recurrent_state=False,
            rule=rule, num_shards=1, num_runs=1, run_bytes=1024,
        )
        for index, rule in enumerate(rules)
    )  # fmt: skip
    return WorkerGeometry(
        rank=0, pp_rank=0, pp_size=1, tp_rank=0, tp_size=1, chunk_tokens=CHUNK,
        engine_groups=engine_group_infos(groups), kernel_groups=groups,
    )  # fmt: skip


def ask(endpoint: str, number: int, tokens: int, results: Any) -> None:
    """One engine: looks prompts up, one after the other, as fast as it can."""
    name = f"engine-{number}"
    hashes = [os.urandom(32) for _ in range(tokens // CHUNK)]
    memory = sockets.memory_path(Path(endpoint.removeprefix("ipc://")))
    worker = PoolClient(memory, 0, name)
    client = StoreClient(endpoint, RegisterKVCache(name, "bench", os.urandom(32), [geometry()]))
    while not client.wait_ready(10.0):
        time.sleep(0.01)
    times = []
    stop = time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < stop:
        client.lookup(len(times), hashes, 0)
        client.release(len(times))
        times.append(time.perf_counter() - began)
    # Lost calls answer at once, and would look fast.
    results.put(times if client.wait_ready(0.0) else [])
    client.close()
    worker.close()


def measure_server(directory: Path) -> None:
    endpoint = f"ipc://{directory}/kv"
    command = [
        "-m",
        "lmcache_connector.server",
        "--socket",
        endpoint,
        "--max-local-cpu-size",
        "64MiB",
    ]
    server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    context = multiprocessing.get_context("spawn")
    print("| engines | prompt tokens | lookups/s | median us | p99 us |")
    print("|---|---|---|---|---|")
    try:
        for tokens in (4096, 131072):
            for count in (1, 2, 4, 8):
                results = context.Queue()
                engines = [
                    context.Process(target=ask, args=(endpoint, number, tokens, results))
                    for number in range(count)
                ]
                for engine in engines:
                    engine.start()
                times = [seconds for _ in engines for seconds in results.get(timeout=60)]
                for engine in engines:
                    engine.join()
                if not times:
                    print(f"| {count} | {tokens:,} | no answer | | |")
                    continue
                p99 = statistics.quantiles(times, n=100)[98]
                print(
                    f"| {count} | {tokens:,} | {len(times) / SECONDS:,.0f} "
                    f"| {statistics.median(times) * 1e6:.0f} | {p99 * 1e6:.0f} |"
                )
    finally:
        server.terminate()
        server.wait()


# ---- tiers --------------------------------------------------------------------------------------

# Plain put and get of one value, by number.
Plain = tuple[Callable[[int, bytes], object], Callable[[int], object]]


def plain_files(directory: Path) -> Plain:
    def get(number: int) -> bytes:
        return (directory / str(number)).read_bytes()

    return lambda number, value: (directory / str(number)).write_bytes(value), get


def plain_redis(url: str) -> Plain:
    import redis

    client = redis.Redis.from_url(url.split("?")[0])
    return lambda number, value: client.set(str(number), value), lambda n: client.get(str(n))


def plain_object_store(url: str) -> Plain:
    import obstore

    from lmcache_connector.storage.tiers.base import open_tier, parse_tier_url

    store = open_tier(parse_tier_url(url))._store  # type: ignore[attr-defined]
    return (
        lambda number, value: obstore.put(store, f"plain/{number}", value),
        lambda number: obstore.get(store, f"plain/{number}").bytes(),
    )


def plain_memory(_: str) -> Plain:
    held: dict[int, bytearray] = {}

    def put(number: int, value: bytes) -> None:
        held[number] = bytearray(value)

    return put, lambda number: bytes(held[number])


def gigabytes(count: int, began: float) -> float:
    return count * ROW_BYTES / (time.perf_counter() - began) / 1e9


def measure_tier(url: str, plain: Plain | None) -> tuple[float, float, float, float]:
    """GB/s of put and get, of the tier and by plain means; one thread each."""
    pool = MemoryPool(ROWS * ROW_BYTES)
    tiering = open_tiering([url], pool)
    assert tiering is not None
    channel = tiering.channels[0]
    value = os.urandom(ROW_BYTES)
    memory = pool.map()[0]
    slots = [SlotRef(0, number * ROW_BYTES, ROW_BYTES) for number in range(ROWS)]
    for slot in slots:
        memory[slot.offset : slot.offset + ROW_BYTES] = value
    import xxhash

    digest = xxhash.xxh3_64_intdigest(value)
    names = [f"{'0' * 16}/{number:064x}-full" for number in range(ROWS)]
    began = time.perf_counter()
    for name, slot in zip(names, slots, strict=True):
        tiering.write(channel, channel.tier, name, Row([slot], [digest]))
    written = gigabytes(ROWS, began)
    began = time.perf_counter()
    for name, slot in zip(names, slots, strict=True):
        assert tiering.read(channel, channel.tier, name, [slot]) == [digest]
    read = gigabytes(ROWS, began)
    tiering.close()
    if plain is None:
        return written, read, float("nan"), float("nan")
    began = time.perf_counter()
    for number in range(ROWS):
        plain[0](number, value)
    plainly_written = gigabytes(ROWS, began)
    began = time.perf_counter()
    for number in range(ROWS):
        plain[1](number)
    return written, read, plainly_written, gigabytes(ROWS, began)


def load_servers() -> ModuleType:
    path = ROOT / "tests" / "tiers" / "servers.py"
    spec = importlib.util.spec_from_file_location("servers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["servers"] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def url_of(kind: str, directory: Path) -> Iterator[tuple[str, Plain | None]]:
    servers = load_servers()
    if kind == "memory":
        yield "memory://", plain_memory("")
    elif kind == "file":
        (directory / "plain").mkdir()
        yield f"file://{directory}/tier", plain_files(directory / "plain")
    elif kind == "redis":
        with servers.redis_url() as url:
            yield url, plain_redis(url)
    elif kind == "s3":
        with servers.s3_url() as url:
            yield url, plain_object_store(url)
    else:
        with servers.mooncake_url() as url:
            yield url, None


def measure_tiers(directory: Path) -> None:
    print("\n| tier | put GB/s | plain | ratio | get GB/s | plain | ratio |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("memory", "file", "redis", "s3", "mooncake"):
        with url_of(kind, directory) as (url, plain):
            put, get, plain_put, plain_get = measure_tier(url, plain)
        print(
            f"| {kind} | {put:.2f} | {plain_put:.2f} | {put / plain_put:.2f} "
            f"| {get:.2f} | {plain_get:.2f} | {get / plain_get:.2f} |"
        )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name:
        measure_server(Path(name))
        measure_tiers(Path(name))


if __name__ == "__main__":
    main()
