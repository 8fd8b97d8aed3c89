"""Cold run = restored run when what is restored comes from a tier, on real engines and servers.

One engine per family; the cache server is started anew with another tier for each case, and with a
pool of four chunks, so that a prompt of three is gone from it when another has been stored.
LMCACHE_TEST_MATRIX=1: all families; LMCACHE_MATRIX_TABLE: the file that gets the table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import servers

from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.server import messages
from lmcache_connector.server.management import managing
from lmcache_connector.storage.tiers.base import (
    header_bytes,
    open_tier,
    parse_tier_url,
    value_name,
)

pytestmark = pytest.mark.engine

IS_MATRIX = os.environ.get("LMCACHE_TEST_MATRIX") == "1"
ALL = ["qwen2", "gemma3", "gemma4", "gptoss", "llama4", "qwen3next", "deepseek_v3"]
FAMILIES = ALL if IS_MATRIX else ["gemma3", "qwen3next"]
KINDS = ["file", "redis", "s3", "mooncake"]
CHUNKS = 3


@pytest.fixture(scope="module")
def tier_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Kind -> URL; its server starts when it is first asked for."""
    urls = {"file": f"file://{tmp_path_factory.mktemp('tier')}"}
    with ExitStack() as stack:

        def url(kind: str) -> str:
            if kind not in urls:
                urls[kind] = stack.enter_context(getattr(servers, f"{kind}_url")())
            return urls[kind]

        yield url


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of docs/matrix.md."""
    rows: list[str] = []
    yield rows
    if path := os.environ.get("LMCACHE_MATRIX_TABLE"):
        head = ["family", "tier", "hit tokens", "of prompt tokens", "bytes read", "seconds"]
        lines = [" | ".join(head), " | ".join(["---"] * 2 + ["---:"] * 4), *rows]
        Path(path).write_text(INTRODUCTION + "".join(f"| {line} |\n" for line in lines))


INTRODUCTION = """# Families and tiers

Written by `make test-matrix`: real vLLM engines on a cache server. Its pool has dropped the prompt
when it is asked for again: what is restored comes from the tier. Each row stands for a test that
passed: tokens and logprobs are those of a run without a cache, restored pages were compared byte by
byte, wrong bytes of each group show in the answer, the next server finds what this one wrote, and a
damaged value is recomputed. Bytes are those read from the tier; seconds go from the request to its
first token, on the CPU that ran the tests.

"""


class Site:
    """A family's engine and the server that it uses."""

    def __init__(self, bed: Any, server: Any, make_prompt: Callable[..., list[int]]) -> None:
        self.bed = bed
        self.server = server
        self.prompt = make_prompt(31, CHUNKS * bed.chunk + 40)
        # Of one chunk more: the first fills the pool, where all rows of a group are as large.
        self.others = [make_prompt(seed, len(self.prompt) + bed.chunk) for seed in (32, 33, 34)]
        (instance,) = server.status().instances
        chain = ChunkChain(TokenDatabase(instance.namespace_digest, instance.chunk_tokens))
        chain.extend(lambda start, end: self.prompt[start:end], len(self.prompt), None)
        self.namespace, self.hashes = instance.namespace, chain.hashes
        self.row_bytes = {group.tag: group.row_bytes for group in instance.groups}

    def restart(self, url: str) -> None:
        """Another server, whose pool has room for CHUNKS + 1 chunks, and nothing in it."""
        self.server.kill()
        size = (CHUNKS + 1) * sum(self.row_bytes.values())
        self.server.start(size=f"{size}B", tiers=[url])
        self.bed.engine.run("host.attach(); host.matches.clear()")

    def counters(self) -> Any:
        (tier,) = self.server.status().tiers
        return tier.counters

    def where(self) -> tuple[dict[str, int], dict[str, int]]:
        """Masks by group: the prompt's rows in the pool, and in the tier."""
        with managing(self.server.endpoint) as ask:
            while (found := ask(messages.Probe(self.namespace, self.hashes))).pending:
                time.sleep(0.01)
        return tuple(
            {tag: int(masks.get(tag, "0"), 16) for tag in self.row_bytes}
            for masks in (found.in_pool, found.in_tiers)
        )

    def store(self, prompt: list[int]) -> None:
        """Chunk by chunk: more of them at once than half of the pool would not be written."""
        bed, engine = self.bed, self.bed.engine
        bed.use(load=False, store=True)
        engine.reset_local()
        for end in range(bed.chunk, len(prompt), bed.chunk):
            engine.one(prompt[: end + 1], max_tokens=1)
            engine.settle()
        engine.reset_local()
        bed.use(load=True, store=True)
        assert self.counters().dropped_rows == 0

    def displace(self) -> None:
        """Only the tier has the prompt."""
        for other in self.others:
            self.store(other)
            in_pool, in_tier = self.where()
            if not any(in_pool.values()):
                break
        assert not any(in_pool.values()), in_pool
        assert all(mask >> CHUNKS - 1 & 1 for mask in in_tier.values()), in_tier

    def damage(self, url: str, index: int, group: str) -> None:
        """Flip a bit in the middle of the tier's value of one row."""
        tier = open_tier(parse_tier_url(url))
        name = value_name(self.namespace, self.hashes[index], group)
        value = bytearray(header_bytes(1) + self.row_bytes[group])
        assert tier.get(name, [memoryview(value)])
        value[len(value) // 2] ^= 4
        tier.remove(name)
        tier.put(name, [memoryview(bytes(value))])
        tier.close()


@pytest.fixture(scope="module", params=FAMILIES)
def site(
    request: Any,
    start_bed: Callable[..., Any],
    start_server: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
) -> Iterator[Site]:
    server = start_server()
    # A slow machine is no reason for a miss.
    extra = {"server": server.endpoint, "lookup_timeout": 60, "load_timeout": 60}
    bed = start_bed(request.param, extra=extra)
    yield Site(bed, server, make_prompt)
    bed.engine.close()
    server.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_restored_from_a_tier(
    site: Site, kind: str, tier_url: Callable[[str], str], table: list[str]
) -> None:
    bed, url, prompt = site.bed, tier_url(kind), site.prompt
    cold = bed.cold(prompt)
    site.restart(url)
    site.store(prompt)
    site.displace()

    loaded = bed.engine.run("host.on_workers(watch_pages); result = host.load_bytes()")
    restored = bed.engine.one(prompt, max_tokens=bed.TOKENS)
    (seen,) = bed.engine.run("result = host.on_workers(pages_seen)")
    assert restored["cached"] == bed.last_match()[1] == CHUNKS * bed.chunk
    bed.same(cold, restored)
    assert seen["pages"] > 0
    assert seen["wrong"] == 0
    counters = site.counters()
    assert counters.read_bytes > 0
    assert counters.corrupt_rows == counters.errors == 0
    after = bed.engine.run("result = host.load_bytes()")
    assert all(after[group] > loaded.get(group, 0) for group in bed.groups), after
    bed.engine.settle()
    table.append(
        f"{bed.family} | {kind} | {restored['cached']} | {len(prompt)} | {counters.read_bytes} | "
        f"{restored['first_token_seconds']:.2f}"
    )

    # The twin of the comparison: it fails when one group's bytes are wrong.
    for group in bed.groups:
        poisoned = bed.poisoned(prompt, group)
        with pytest.raises(AssertionError):
            bed.same(cold, poisoned)
    bed.engine.reset_local()

    # The next server finds what this one wrote; a damaged value is recomputed and stored again.
    site.restart(url)
    last = CHUNKS - 1
    site.damage(url, last, "full")
    mended = bed.engine.one(prompt, max_tokens=bed.TOKENS)
    assert mended["cached"] == last * bed.chunk
    bed.same(cold, mended)
    bed.engine.settle()
    assert site.counters().corrupt_rows == 1
    assert site.where()[1]["full"] >> last & 1
    bed.engine.reset_local()
