"""Looks at what processes hold and keep: rows byte for byte, memory, descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from lmcache_connector.groups import WorkerGeometry
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.server import messages, sockets
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.store_client import StoreClient
from lmcache_connector.storage.base import LookupState, RowKey
from lmcache_connector.storage.tiers.base import header_bytes, unpack_header


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``condition`` answers once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return found


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def family(pid: int) -> list[int]:
    """A process and all below it."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = " ".join((thread / "children").read_text() for thread in threads).split()
    return [pid, *(one for child in children for one in family(int(child)))]


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_maps(pid: int) -> int:
    """How many extents of pools a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:lmcache-pool")


def resident(pid: int, kind: str) -> int:
    """Bytes of a process in memory: RssAnon, RssShmem."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Auditor:
    """Reads a server's rows as an engine core of these geometries does, but without an engine."""

    def __init__(
        self, endpoint: str, namespace: bytes, geometries: Sequence[WorkerGeometry]
    ) -> None:
        self._endpoint = endpoint
        self._groups = CacheLayout(geometries).shards()
        self._database = TokenDatabase(namespace, geometries[0].chunk_tokens)
        self._said = messages.RegisterKVCache("audit", "audit", namespace, list(geometries))

    def audit(self, prompts: Sequence[Sequence[int]]) -> int:
        """Check the bytes of every row of ``prompts`` in the pool or a tier; how many there are."""
        path = sockets.memory_path(Path(self._endpoint.removeprefix("ipc://")))
        checked: set[RowKey] = set()
        with (
            contextlib.closing(StoreClient(self._endpoint, self._said)) as client,
            contextlib.closing(PoolClient(path, 0, "audit")) as memory,
        ):
            until(lambda: client.wait_ready(1.0))
            for prompt in prompts:
                chain = ChunkChain(self._database)
                chain.extend(lambda start, end, of=prompt: of[start:end], len(prompt), None)
                # One at a time: a pool full of leases has room for no more.
                for chunk, chunk_hash in enumerate(chain.hashes):
                    checked |= self._check(client, memory, chunk, chunk_hash, len(checked) + 1)
        return len(checked)

    def _check(
        self, client: StoreClient, memory: PoolClient, chunk: int, chunk_hash: bytes, call: int
    ) -> set[RowKey]:
        state, keys = LookupState.PENDING, []
        while state is not LookupState.READY:
            reply = client.lookup(call, [chunk_hash], chunk)
            if reply.state is LookupState.READY:
                there = zip(self._groups, reply.present, strict=True)
                keys = [(chunk_hash, group.tag) for group, (mask,) in there if mask]
                state = client.narrow(call, keys)
        rows = client.prepare_load(call, call, keys) or []
        for key, row in zip(keys, rows, strict=True):
            with memory.view(row.slots[0]) as view:
                assert xxhash.xxh3_64_intdigest(view) == row.digests[0], key
        client.complete_load(call)
        return set(keys)


def audit_tier(directory: Path, max_bytes: int) -> int:
    """Check every file of a `file://` tier that nobody uses; how many there are."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert list(directory.glob("tmp/*")) == []
    assert sum(path.stat().st_size for path in files) <= max_bytes
    for path in files:
        data = memoryview(path.read_bytes())
        name = f"{path.parent.parent.name}/{path.name}"
        shard = data[header_bytes(1) :]
        digests = unpack_header(bytes(data[: header_bytes(1)]), name, [len(shard)])
        assert digests == [xxhash.xxh3_64_intdigest(shard)], name
    return len(files)
