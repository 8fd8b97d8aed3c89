"""HiddenStateStore: what is stored, found, kept with its KV, and never handed out wrong."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forks import holds_in_a_child

from lmcache_connector.errors import ProtocolError
from lmcache_connector.hidden_states import client as client_module
from lmcache_connector.hidden_states import store as store_module
from lmcache_connector.hidden_states.rows import Rows
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import Commit, GroupShards, NewRow, StoreStats
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession
from lmcache_connector.storage.tiering import Question, Tiering
from lmcache_connector.storage.tiers.base import Tier
from lmcache_connector.storage.tiers.disk import DiskTier
from lmcache_connector.storage.tiers.memory import MemoryTier

PAGE = 4096
NAMESPACE = b"n" * 32
NOWHERE = PoolRef("/nowhere", "1")
CHUNK = 8
# A row of one chunk: a page.
WIDTH = PAGE // CHUNK // 2
# `make soak` runs longer.
STRESS_SECONDS = float(os.environ.get("LMCACHE_STRESS_SECONDS", "1.5"))


class LocalMemory:
    """A pool's memory, in the process that owns it."""

    def __init__(self, pool: MemoryPool) -> None:
        self._maps = pool.map()
        self.held = 0

    def hold(self, incarnation: str) -> bool:
        assert incarnation == NOWHERE.incarnation
        self.held += 1
        return True

    def drop(self) -> None:
        self.held -= 1

    def view(self, slot: SlotRef) -> memoryview:
        assert self.held, "memory is used that nobody holds"
        return self._maps[slot.extent][slot.offset : slot.offset + slot.nbytes]


class Bench:
    """KV and hidden states in this process, and short ways to use them."""

    def __init__(
        self,
        chunks: int = 64,
        *,
        kv_chunks: int = 1024,
        tier: Tier | None = None,
        chunk: int = CHUNK,
        chunk_bytes: int = PAGE,
        kv_groups: Sequence[GroupShards] = (GroupShards("full", [[PAGE]], full=True),),
        namespace: bytes = NAMESPACE,
        **options: Any,
    ) -> None:
        kv_pool, pool = MemoryPool(kv_chunks * PAGE), MemoryPool(chunks * chunk_bytes)
        tiering = Tiering([("memory://", tier)], kv_pool.map()) if tier else None
        self.kv_engine = StorageEngine(kv_pool, tiering)
        self.engine = StorageEngine(
            pool, tiering.for_pool(pool) if tiering else None, kv=self.kv_engine
        )
        for engine, memory in ((self.kv_engine, kv_pool), (self.engine, pool)):
            for extent in range(len(memory.extents)):
                engine.mark_ready(extent)
        self.kv = self.kv_engine.open_session(namespace, kv_groups, NOWHERE)
        self.session = self.engine.open_session(namespace, [], NOWHERE)
        self.memory = LocalMemory(pool)
        self.database = TokenDatabase(namespace, chunk)
        self.ids = iter(range(1, 1 << 30))
        self.hs = HiddenStateStore(**options)
        self.hs.attach(self.session, self.memory, self.database)

    def hashes(self, ids: Sequence[int], extra: Any = None) -> list[bytes]:
        chain = ChunkChain(self.database)
        chain.extend(lambda start, end: ids[start:end], len(ids), extra)
        return chain.hashes

    def add_kv(
        self, ids: Sequence[int], extra: Any = None, tags: Sequence[str] = ("full",), first: int = 0
    ) -> None:
        """The KV of all whole chunks."""
        hashes = self.hashes(ids, extra)
        keys = [(name, tag) for name in hashes[first:] for tag in tags]
        store_id = next(self.ids)
        slots = self.kv.prepare_store(store_id, [NewRow([PAGE], key) for key in keys], hashes)
        assert len(slots) == len(keys)
        parents = dict(zip(hashes, [None, *hashes[:-1]], strict=True))
        if any(slots):
            self.kv.complete_store(
                store_id,
                [
                    Commit(index, name, parents[name], tag, [7])
                    for index, (name, tag) in enumerate(keys)
                    if slots[index]
                ],
            )

    def drop_kv(self, ids: Sequence[int], first: int = 0) -> None:
        """As when the rows from chunk ``first`` on are evicted."""
        with self.kv_engine.lock:
            for name in self.hashes(ids)[first:]:
                entry = self.kv_engine.rows.index.get((name, "full"))
                if entry is not None:
                    self.kv_engine.rows.remove(entry)

    def tags(self) -> list[str]:
        return [entry.key[1] for entry in self.engine.rows.index.entries()]

    def close(self) -> None:
        self.hs.close()
        self.engine.check_integrity()
        self.kv_engine.check_integrity()
        assert not self.session.leases
        assert not self.session.loads
        assert not self.session.lookups
        assert not self.memory.held
        self.kv_engine.close()
        self.engine.close()


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench() -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 7919).randrange(1 << 16), *range(1, num_tokens)]


def rows_of(ids: Sequence[int], width: int = WIDTH, layer: int = 0) -> torch.Tensor:
    """Rows that only these tokens have: token, position and layer can be read from them."""
    base = torch.tensor(ids, dtype=torch.float32)[:, None] * 0.25
    place = torch.arange(len(ids), dtype=torch.float32)[:, None]
    return ((base + place + layer * 13) % 251 + torch.arange(width) % 3).to(torch.bfloat16)


# ---- the seed's snippets ------------------------------------------------------------------------


def test_the_calls_of_the_seed_run_as_written(bench: MakeBench) -> None:
    b = bench()
    engine = type("Engine", (), {"hidden_state_store": b.hs})()
    token_ids = prompt(5 * CHUNK)
    b.add_kv(token_ids)
    hidden_states, num_computed = rows_of(token_ids), 0

    hs = engine.hidden_state_store
    assert hs is not None
    stored = hs.store_hidden_states(
        token_ids,
        hidden_states,
        layer_idx=0,
        token_offset=num_computed,
    )
    restored = hs.retrieve_hidden_states(token_ids, layer_idx=0)

    assert stored == 5
    assert restored.dtype is torch.float32
    assert restored.device.type == "cpu"
    assert restored.is_contiguous()
    torch.testing.assert_close(restored, hidden_states.float(), rtol=0, atol=0)
    assert hs.num_cached_chunks == 5


def test_the_prefix_is_strict_and_of_whole_chunks(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(4 * CHUNK + 3)
    assert b.hs.retrieve_hidden_states(ids) is None
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 4
    assert len(b.hs.retrieve_hidden_states(ids)) == 4 * CHUNK
    # Another tail, and a prompt that is shorter than what is stored.
    assert len(b.hs.retrieve_hidden_states([*ids[: 2 * CHUNK], *[9] * 20])) == 2 * CHUNK
    assert len(b.hs.retrieve_hidden_states(ids[: 3 * CHUNK - 1])) == 2 * CHUNK
    assert b.hs.retrieve_hidden_states(ids[: CHUNK - 1]) is None
    assert b.hs.retrieve_hidden_states([]) is None
    assert b.hs.retrieve_hidden_states(ids, layer_idx=1) is None
    b.drop_kv(ids, first=2)
    assert len(b.hs.retrieve_hidden_states(ids)) == 2 * CHUNK


@pytest.mark.parametrize(
    ("rows", "offset", "text"),
    [
        (torch.zeros(CHUNK), 0, "tokens, hidden"),
        (torch.zeros(CHUNK, 0), 0, "tokens, hidden"),
        (torch.zeros(CHUNK, 4, dtype=torch.int32), 0, "int32"),
        (torch.zeros(CHUNK - 1, 4), 0, "7 rows were given for the tokens 0 to 8"),
        (torch.zeros(CHUNK, 4), 1, "8 rows were given for the tokens 1 to 8"),
        (torch.zeros(0, 4), 9, "9 to 8"),
        (torch.zeros(9, 4), -1, "-1 to 8"),
        (torch.zeros(CHUNK, 4).to_sparse(), 0, "dense"),
        (torch.zeros(CHUNK, 4, device="meta"), 0, "on meta"),
    ],
)
def test_what_cannot_be_rows_of_the_tokens_is_refused(
    bench: MakeBench, rows: torch.Tensor, offset: int, text: str
) -> None:
    b = bench()
    with pytest.raises(ValueError, match=text):
        b.hs.store_hidden_states(prompt(CHUNK), rows, token_offset=offset)


@pytest.mark.parametrize("index", [1 << 31, -(1 << 31), 1 << 200])
def test_a_layer_that_no_model_has_is_refused(bench: MakeBench, index: int) -> None:
    b = bench(default=(torch.bfloat16, WIDTH))
    ids = prompt(CHUNK)
    for use in (
        lambda: b.hs.store_hidden_states(ids, rows_of(ids), layer_idx=index),
        lambda: b.hs.retrieve_hidden_states(ids, layer_idx=index),
        lambda: b.hs.coverage(ids, [index]),
        lambda: b.hs.has_chunk(ids, index),
    ):
        with pytest.raises(ValueError, match="layer_idx"):
            use()
    with pytest.raises(TypeError):
        b.hs.coverage(ids, ["0"])


@pytest.mark.parametrize("index", [True, np.int64(1), torch.tensor(1)])
def test_a_layer_is_the_same_in_whatever_way_it_is_named(bench: MakeBench, index: Any) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows_of(ids), layer_idx=index) == 2
    assert b.tags()[0] == f"hs1-bfloat16-{WIDTH}"
    assert b.hs.coverage(ids, [1]) == 2 * CHUNK
    assert torch.equal(b.hs.retrieve_layers(ids, [index])[1], rows_of(ids))
    out = torch.zeros(2 * CHUNK, WIDTH)
    assert b.hs.retrieve_hidden_states(ids, index, out=out).data_ptr() == out.data_ptr()


def test_tokens_that_are_no_ids_are_refused(bench: MakeBench) -> None:
    b = bench()
    with pytest.raises(ValueError, match="whole numbers"):
        b.hs.store_hidden_states([None] * CHUNK, rows_of(prompt(CHUNK)))  # type: ignore[list-item]
    with pytest.raises(ValueError, match="whole numbers"):
        b.hs.retrieve_hidden_states([-1] * CHUNK)


# ---- calls that do not end at chunks ------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 200, 1000])
def test_all_chunks_of_4096_tokens_are_stored_in_any_steps(bench: MakeBench, step: int) -> None:
    b = bench(20, chunk=256)
    ids, width = prompt(4096), WIDTH // 32
    rows = rows_of(ids, width)
    b.add_kv(ids)
    stored = [
        b.hs.store_hidden_states(
            ids[: first + step], rows[first : first + step], token_offset=first
        )
        for first in range(0, 4096, step)
    ]
    assert sum(stored) == 16
    # A chunk counts in the call that has its last row.
    assert stored == [
        min(4096, first + step) // 256 - first // 256 for first in range(0, 4096, step)
    ]
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows)


def test_a_start_inside_a_chunk_goes_on_at_the_next_one(bench: MakeBench) -> None:
    """As after a hit of a whole prompt, whose last token is computed again."""
    b = bench()
    ids = prompt(4 * CHUNK)
    rows = rows_of(ids)
    b.add_kv(ids)
    first = 2 * CHUNK - 1
    assert b.hs.store_hidden_states(ids, rows[first:], token_offset=first) == 2
    assert b.hs.coverage(ids) == 0
    assert b.hs.store_hidden_states(ids[: 2 * CHUNK], rows[: 2 * CHUNK]) == 2
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows)


def test_rows_of_a_preempted_request_may_come_again(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(3 * CHUNK)
    rows = rows_of(ids)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids[:13], rows[:13]) == 1
    assert b.hs.store_hidden_states(ids[:5], rows[:5]) == 0
    assert b.hs.store_hidden_states(ids[:13], rows[5:13], token_offset=5) == 1
    assert b.hs.store_hidden_states(ids, rows[13:], token_offset=13) == 2
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows)
    assert b.hs.num_cached_chunks == 3


def test_requests_that_share_half_a_chunk_go_their_own_ways(bench: MakeBench) -> None:
    """As n samples of one prompt: each of them has the chunk's first rows given once."""
    b = bench()
    head = prompt(CHUNK + 5)
    tails = [[*head, *[token] * (CHUNK - 5)] for token in (1, 2, 3)]
    for ids in tails:
        b.add_kv(ids)
        b.hs.store_hidden_states(head, rows_of(ids)[: len(head)])
    for place in range(len(head), 2 * CHUNK):
        for ids in tails:
            b.hs.store_hidden_states(
                ids[: place + 1], rows_of(ids)[place : place + 1], token_offset=place
            )
    for ids in tails:
        assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))


def test_rows_that_wait_for_the_rest_of_their_chunk_are_bounded(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_PARTIAL_BYTES", 3 * PAGE)
    b = bench()
    prompts = [prompt(CHUNK, seed) for seed in range(5)]
    for ids in prompts:
        b.add_kv(ids)
        b.hs.store_hidden_states(ids[:6], rows_of(ids)[:6])
    done = [b.hs.store_hidden_states(ids, rows_of(ids)[6:], token_offset=6) for ids in prompts]
    assert done == [0, 0, 1, 1, 1]
    assert not b.hs._partials._held
    assert b.hs._partials._num_bytes == 0


def test_decoded_rows_are_stored(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(CHUNK + 3)
    b.hs.store_hidden_states(ids, rows_of(ids))
    counts = []
    for token in range(20):
        ids = [*ids, token]
        counts.append(b.hs.store_hidden_states(ids, rows_of(ids)[-1:], token_offset=len(ids) - 1))
    b.add_kv(ids)
    assert sum(counts) == 2
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids)[: 3 * CHUNK])


# ---- dtypes, places -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_are_kept_in_their_own_dtype(bench: MakeBench, dtype: torch.dtype) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    rows = torch.randn(len(ids), 24).to(dtype)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows) == 2
    with b.engine.lock:
        sizes = {entry.num_bytes for entry in b.engine.rows.index.entries()}
    assert sizes == {CHUNK * 24 * dtype.itemsize}
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows)
    assert torch.equal(b.hs.retrieve_hidden_states(ids), rows.float())
    (layers,) = b.hs.retrieve_layers(ids, [0]).values()
    assert layers.dtype is dtype


def test_rows_can_be_kept_as_float32(bench: MakeBench) -> None:
    b = bench(kept_as="float32")
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    assert set(b.tags()) == {f"hs0-float32-{WIDTH}"}
    assert torch.equal(b.hs.retrieve_hidden_states(ids), rows_of(ids).float())


def test_rows_go_where_they_are_wanted(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(3 * CHUNK)
    rows = rows_of(ids)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids[: 2 * CHUNK], rows[: 2 * CHUNK])
    out = torch.full((3 * CHUNK + 1, WIDTH), -1.0, dtype=torch.bfloat16)
    found = b.hs.retrieve_hidden_states(ids, out=out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out[: 2 * CHUNK], rows[: 2 * CHUNK])
    assert (out[2 * CHUNK :] == -1).all()
    # Not contiguous, and of another dtype.
    wide = torch.zeros(3 * CHUNK, 2 * WIDTH)
    b.hs.retrieve_hidden_states(ids, out=wide[:, ::2])
    assert torch.equal(wide[: 2 * CHUNK, ::2], rows[: 2 * CHUNK].float())
    assert not wide[:, 1::2].any()
    for bad in (torch.zeros(3 * CHUNK - 1, WIDTH), torch.zeros(3 * CHUNK, WIDTH + 1)):
        with pytest.raises(ValueError, match="out is"):
            b.hs.retrieve_hidden_states(ids, out=bad)
    row, other = torch.zeros(WIDTH), torch.zeros(3 * CHUNK, WIDTH)
    with torch.inference_mode():
        inference = torch.zeros(3 * CHUNK, WIDTH)
    for bad in (other.numpy(), other.to("meta")):
        with pytest.raises(ValueError, match="on the CPU or a GPU"):
            b.hs.retrieve_layers(ids, [0], out={0: bad})
    for bad in (
        row.expand(3 * CHUNK, WIDTH),
        torch.zeros(4 * CHUNK + WIDTH).as_strided((3 * CHUNK, WIDTH), (1, 1)),
        torch.zeros(3 * CHUNK, 1).expand(3 * CHUNK, WIDTH),
        torch.zeros(3 * CHUNK * WIDTH).as_strided((3 * CHUNK, WIDTH), (WIDTH - 1, 1)),
        other.int(),
        other.bool(),
        other.clone().requires_grad_(),
        torch._neg_view(other),
        inference,
    ):
        with pytest.raises(ValueError, match="do not overlap"):
            b.hs.retrieve_hidden_states(ids, out=bad)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, out=other.T.contiguous().T)[:1], rows[:1])
    with pytest.raises(ValueError, match="int64"):
        b.hs.retrieve_hidden_states(ids, dtype=torch.int64)
    with pytest.raises(ValueError, match="mapping"):
        b.hs.retrieve_layers(ids, [0], out=other)
    meta = b.hs.retrieve_hidden_states(ids, device="meta")
    assert (meta.device.type, meta.shape) == ("meta", (2 * CHUNK, WIDTH))


def test_layers_go_to_one_tensor_side_by_side(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(3 * CHUNK)
    b.add_kv(ids)
    for layer in range(2):
        b.hs.store_hidden_states(ids, rows_of(ids, layer=layer), layer_idx=layer)
    taps = torch.zeros(3 * CHUNK, 2, WIDTH)
    b.hs.retrieve_layers(ids, [0, 1], out={0: taps[:, 0], 1: taps[:, 1]})
    for layer in range(2):
        assert torch.equal(taps[:, layer], rows_of(ids, layer=layer).float())
    flat = torch.zeros(8 * CHUNK * WIDTH)
    at = lambda first, *strides: flat[first:].as_strided((3 * CHUNK, WIDTH), strides)  # noqa: E731
    for one, other in (
        (taps[:, 0], taps[:, 0]),
        (at(0, WIDTH, 1), at(CHUNK * WIDTH, WIDTH, 1)),
        (at(0, 2 * WIDTH, 1), at(1, 2 * WIDTH, 1)),
        (at(0, 2 * WIDTH, 1), at(2 * WIDTH - 1, 2 * WIDTH, 1)),
        (at(0, 2 * WIDTH, 1), at(WIDTH, WIDTH, 1)),
        (at(0, 1, 3 * CHUNK), at(WIDTH, 2 * WIDTH, 1)),
        (flat.view(torch.bfloat16)[: 3 * CHUNK * WIDTH].view(-1, WIDTH), at(4, WIDTH, 1)),
    ):
        for out in ({0: one, 1: other}, {0: other, 1: one}):
            with pytest.raises(ValueError, match="same memory"):
                b.hs.retrieve_layers(ids, [0, 1], out=out)
    apart = {0: at(0, WIDTH, 1), 1: at(3 * CHUNK * WIDTH, WIDTH, 1)}
    assert b.hs.retrieve_layers(ids, [1, 0], out=apart) is not None
    assert torch.equal(apart[0], rows_of(ids, layer=0).float())


def test_rows_are_on_the_cpu_wherever_tensors_are_made_by_default(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    rows = rows_of(ids)
    b.add_kv(ids)
    with torch.device("meta"):
        for first in range(0, 2 * CHUNK, 3):
            part = rows[first : first + 3]
            b.hs.store_hidden_states(ids[: first + 3], part, token_offset=first)
        assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows)


def test_rows_of_a_graph_are_stored_without_it(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(4 * CHUNK)
    rows = rows_of(ids).float().requires_grad_()
    b.add_kv(ids)
    for first, non_blocking in ((0, False), (2 * CHUNK, True)):
        for begin in (first, first + CHUNK + 3):
            end = 2 * CHUNK + first if begin > first else begin + CHUNK + 3
            part = rows[begin:end] * 1
            b.hs.store_hidden_states(ids[:end], part, token_offset=begin, non_blocking=non_blocking)
            assert b.hs.flush(10)
    found = b.hs.retrieve_hidden_states(ids)
    assert not found.requires_grad
    assert not any(staging._memory.requires_grad for staging in b.hs._staging.values())
    assert torch.equal(found, rows.detach())


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_rows_are_copied_aside_in_and_out_of_inference_mode(
    bench: MakeBench, modes: tuple[bool, bool]
) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    for mode, first in zip(modes, (0, CHUNK), strict=True):
        with torch.inference_mode(mode):
            rows = rows_of(ids)[first : first + CHUNK]
            b.hs.store_hidden_states(
                ids[: first + CHUNK], rows, token_offset=first, non_blocking=True
            )
    assert b.hs.flush(10)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))
    (staging,) = b.hs._staging.values()
    assert not staging._memory.is_inference()


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_a_chunk_is_put_together_in_and_out_of_inference_mode(
    bench: MakeBench, modes: tuple[bool, bool]
) -> None:
    b = bench()
    ids = prompt(CHUNK)
    b.add_kv(ids)
    # Twice: what two requests share is copied when the first one takes it.
    for _ in range(2):
        with torch.inference_mode(modes[0]):
            b.hs.store_hidden_states(ids[:3], rows_of(ids)[:3])
    for _ in range(2):
        with torch.inference_mode(modes[1]):
            b.hs.store_hidden_states(ids, rows_of(ids)[3:], token_offset=3)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))


def test_rows_that_are_not_contiguous_are_stored(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    wide = torch.randn(2 * CHUNK, 3 * WIDTH).to(torch.bfloat16)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, wide[:, 5 : 5 + WIDTH]) == 2
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), wide[:, 5 : 5 + WIDTH])
    minus = torch._neg_view(wide[:, :WIDTH].contiguous())
    assert b.hs.store_hidden_states(ids, minus, layer_idx=1) == 2
    assert torch.equal(b.hs.retrieve_hidden_states(ids, 1, dtype=None), -wide[:, :WIDTH])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_not_stored(bench: MakeBench, bad: float) -> None:
    b = bench()
    ids = prompt(3 * CHUNK)
    rows = rows_of(ids)
    rows[CHUNK + 2, 3] = bad
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows) == 2
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows[:CHUNK])
    assert b.hs.stats()["not_finite"] == 1
    told = b.hs.take_counts()
    assert told["not_finite"] == 1
    assert all(told.values())
    assert b.hs.take_counts() == {}


def test_another_width_or_dtype_of_a_layer_is_refused(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.hs.store_hidden_states(ids, torch.zeros(len(ids), 8))
    for rows in (torch.zeros(len(ids), 9), torch.zeros(len(ids), 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="hs0-float32-8"):
            b.hs.store_hidden_states(ids, rows)
    b.hs.store_hidden_states(ids, torch.zeros(len(ids), 9), layer_idx=1)


def test_no_rows_say_nothing_of_a_layer(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    assert b.hs.store_hidden_states([], torch.zeros(0, 3)) == 0
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 2


def test_rows_that_requests_are_not_answered_by_are_told(
    bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench(default=(torch.float32, 8))
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 2
    assert f"rows are hs0-bfloat16-{WIDTH}, hits of requests are told by those of" in caplog.text
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))


# ---- layers -------------------------------------------------------------------------------------


def test_layers_may_be_negative_and_of_other_widths(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    rows = {layer: rows_of(ids, 16 + layer, layer) for layer in (-1, 0, 24)}
    batch = [Rows(ids, rows[layer], layer) for layer in rows]
    assert b.hs.store_batch(batch) == [2, 2, 2]
    found = b.hs.retrieve_layers(ids, [-1, 0, 24])
    assert found.keys() == rows.keys()
    assert all(torch.equal(found[layer], rows[layer]) for layer in rows)
    assert b.hs.coverage(ids, [0, -1]) == 2 * CHUNK
    assert b.hs.coverage(ids, [0, 1]) == 0


def test_all_layers_asked_for_are_equally_long(bench: MakeBench) -> None:
    b = bench(25)
    ids = prompt(10 * CHUNK)
    b.add_kv(ids)
    stored = [b.hs.store_hidden_states(ids, rows_of(ids, layer=i), i) for i in range(3)]
    assert stored == [10, 10, 5]
    found = b.hs.retrieve_layers(ids, [0, 1, 2])
    assert [len(found[i]) for i in range(3)] == [5 * CHUNK] * 3
    assert all(torch.equal(found[i], rows_of(ids, layer=i)[: 5 * CHUNK]) for i in range(3))
    assert b.hs.retrieve_layers(ids, [0, 1, 2], min_rows=5 * CHUNK) is not None
    assert b.hs.retrieve_layers(ids, [0, 1, 2], min_rows=5 * CHUNK + 1) is None
    assert len(b.hs.retrieve_hidden_states(ids, 0)) == 10 * CHUNK


def test_a_batch_that_does_not_fit_keeps_its_layers_equally_long(bench: MakeBench) -> None:
    b = bench(25)
    ids = prompt(10 * CHUNK)
    b.add_kv(ids)
    batch = [Rows(ids, rows_of(ids, layer=i), i) for i in range(3)]
    assert b.hs.store_batch(batch) == [8, 8, 8]
    assert [b.hs.coverage(ids, [i]) for i in range(3)] == [8 * CHUNK] * 3
    assert b.hs.num_cached_chunks == 24


def test_layers_are_evicted_together(bench: MakeBench) -> None:
    """Reading one of them leaves none of the others to age alone."""
    b = bench(12)
    first, second = prompt(4 * CHUNK, 1), prompt(4 * CHUNK, 2)
    for ids in (first, second):
        b.add_kv(ids)
    b.hs.store_batch([Rows(first, rows_of(first, layer=i), i) for i in range(2)])
    b.hs.store_hidden_states(second[: 2 * CHUNK], rows_of(second)[: 2 * CHUNK], 5)
    b.hs.retrieve_hidden_states(first, 1)
    b.hs.store_batch([Rows(second, rows_of(second, layer=i), i) for i in range(2)])
    lengths = {b.hs.coverage(first, [i]) for i in range(2)}
    assert len(lengths) == 1


def test_only_allowed_layers_are_stored(bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    b = bench(layers=[0, -1])
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows_of(ids), 1) == 0
    assert "layer 1 are not stored: not in hidden_state_layers" in caplog.text
    assert b.hs.store_hidden_states(ids, rows_of(ids), -1) == 2
    assert b.hs.retrieve_hidden_states(ids, 1) is None
    assert b.hs.retrieve_layers(ids, [1, -1]) is None
    assert len(b.hs.retrieve_hidden_states(ids, -1)) == 2 * CHUNK
    assert b.hs.num_cached_chunks == 2


# ---- identity -----------------------------------------------------------------------------------


def test_what_else_identifies_tokens_keeps_rows_apart(bench: MakeBench) -> None:
    """The same placeholder tokens with two images, a salt, an adapter."""
    b = bench()
    ids = [7] * (3 * CHUNK + 4)

    def image(name: str, place: int) -> Callable[[int, int], object]:
        return lambda start, end: (name, place - start) if start <= place < end else None

    extras = [None, image("a", 2), image("b", 2), image("a", 3), lambda *_: ("lora", 1)]
    for seed, extra in enumerate(extras):
        rows = rows_of(ids, layer=seed)
        b.add_kv(ids, extra)
        # In pieces: what waits for the rest of its chunk is kept apart too.
        for first in range(0, len(ids), 5):
            b.hs.store_hidden_states(
                ids[: first + 5], rows[first : first + 5], token_offset=first, extra=extra
            )
    for seed, extra in enumerate(extras):
        found = b.hs.retrieve_hidden_states(ids, extra=extra, dtype=None)
        assert torch.equal(found, rows_of(ids, layer=seed)[: 3 * CHUNK])
    assert b.hs.retrieve_hidden_states(ids, extra=image("c", 0)) is None


def test_interleaved_pieces_of_requests_with_two_images_never_mix(bench: MakeBench) -> None:
    b = bench()
    ids = [7] * (2 * CHUNK)
    extras = [(lambda start, end, name=name: (name, start)) for name in "ab"]
    rows = [rows_of(ids, layer=seed) for seed in range(2)]
    for extra in extras:
        b.add_kv(ids, extra)
    for first in range(0, len(ids), 3):
        for extra, content in zip(extras, rows, strict=True):
            b.hs.store_hidden_states(
                ids[: first + 3], content[first : first + 3], token_offset=first, extra=extra
            )
    for extra, content in zip(extras, rows, strict=True):
        assert torch.equal(b.hs.retrieve_hidden_states(ids, extra=extra, dtype=None), content)


def test_a_prompt_is_hashed_once_for_all_its_layers(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    ids = prompt(4 * CHUNK)
    b.add_kv(ids)
    calls = []
    real = ChunkChain.extend
    monkeypatch.setattr(
        ChunkChain, "extend", lambda self, *how: (calls.append(1), real(self, *how))[1]
    )
    b.hs.store_batch([Rows(ids, rows_of(ids, layer=i), i) for i in range(3)])
    assert len(calls) == 1
    b.hs.retrieve_layers(ids, [0, 1, 2])
    b.hs.coverage(ids, [0, 1, 2])
    assert len(calls) == 3


def test_looking_for_rows_is_one_question_however_many_chunks(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    ids = prompt(20 * CHUNK)
    b.add_kv(ids)
    b.hs.store_batch([Rows(ids, rows_of(ids, layer=i), i) for i in range(3)])
    calls = []
    for verb in ("lookup", "narrow", "prepare_load", "complete_load"):
        real = getattr(StoreSession, verb)
        monkeypatch.setattr(
            StoreSession,
            verb,
            lambda self, *how, real=real, verb=verb: (calls.append(verb), real(self, *how))[1],
        )
    b.hs.retrieve_layers(ids, [0, 1, 2])
    assert calls == ["lookup", "narrow", "prepare_load", "complete_load"]


# ---- KV -----------------------------------------------------------------------------------------


def test_rows_stored_before_their_kv_are_found_when_it_comes(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(4 * CHUNK)
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 4
    for _ in range(3):
        assert b.hs.retrieve_hidden_states(ids) is None
        assert not b.hs.has_chunk(ids)
    b.add_kv(ids[: 2 * CHUNK])
    assert len(b.hs.retrieve_hidden_states(ids)) == 2 * CHUNK
    b.add_kv(ids)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))
    assert b.hs.has_chunk(ids)


def test_rows_go_at_once_when_their_kv_does(bench: MakeBench) -> None:
    b = bench(kv_chunks=4)
    ids, other = prompt(4 * CHUNK), prompt(3 * CHUNK, 1)
    b.add_kv(ids)
    b.hs.store_batch([Rows(ids, rows_of(ids, layer=i), i) for i in range(2)])
    assert b.hs.num_cached_chunks == 8
    b.add_kv(other)  # Only one chunk's KV is left of the first prompt.
    assert b.hs.num_cached_chunks == 2
    assert len(b.hs.retrieve_hidden_states(ids)) == CHUNK


def test_rows_are_evicted_without_their_kv(bench: MakeBench) -> None:
    b = bench(4)
    first, second = prompt(4 * CHUNK, 1), prompt(4 * CHUNK, 2)
    for ids in (first, second):
        b.add_kv(ids)
        assert b.hs.store_hidden_states(ids, rows_of(ids)) == 4
    assert b.hs.retrieve_hidden_states(first) is None
    assert torch.equal(b.hs.retrieve_hidden_states(second, dtype=None), rows_of(second))
    hashes = [*b.hashes(first), *b.hashes(second)]
    assert all(b.kv_engine.rows.index.get((name, "full")) for name in hashes)
    assert b.kv_engine.stats().evicted == {}


def test_kv_is_there_with_all_its_full_groups(bench: MakeBench) -> None:
    groups = [
        GroupShards("full", [[PAGE]], full=True),
        GroupShards("full-s1", [[PAGE]], full=True),
        GroupShards("state", [[PAGE]]),
    ]
    b = bench(kv_groups=groups)
    ids = prompt(2 * CHUNK)
    b.hs.store_hidden_states(ids, rows_of(ids))
    b.add_kv(ids, tags=["state", "full"])
    assert b.hs.coverage(ids) == 0
    b.add_kv(ids, tags=["full-s1"])
    assert b.hs.coverage(ids) == 2 * CHUNK
    with b.kv_engine.lock:  # A state is no part of it.
        b.kv_engine.rows.remove(b.kv_engine.rows.index.get((b.hashes(ids)[0], "state")))
    assert b.hs.coverage(ids) == 2 * CHUNK
    b.drop_kv(ids, first=1)
    assert b.hs.coverage(ids) == CHUNK
    assert b.hs.num_cached_chunks == 1


def test_without_full_groups_any_row_is_kv(bench: MakeBench) -> None:
    b = bench(kv_groups=[GroupShards("state", [[PAGE]]), GroupShards("window-7", [[PAGE]])])
    ids = prompt(CHUNK)
    b.hs.store_hidden_states(ids, rows_of(ids))
    b.add_kv(ids, tags=["state", "window-7"])
    (name,) = b.hashes(ids)
    for tag, length in (("state", CHUNK), ("window-7", 0)):
        with b.kv_engine.lock:
            b.kv_engine.rows.remove(b.kv_engine.rows.index.get((name, tag)))
        assert b.hs.coverage(ids) == length
    assert b.hs.num_cached_chunks == 0


def test_clearing_the_kv_forgets_the_rows(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    new = b"m" * 32
    b.kv.clear(new)
    assert b.hs.num_cached_chunks == 0
    b.hs.attach(b.session, b.memory, TokenDatabase(new, CHUNK))
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 2
    assert b.hs.retrieve_hidden_states(ids) is None
    b.database = TokenDatabase(new, CHUNK)
    b.add_kv(ids)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))


# ---- room ---------------------------------------------------------------------------------------


def test_of_a_prompt_larger_than_the_pool_the_head_is_kept(bench: MakeBench) -> None:
    b = bench(25)
    ids = prompt(30 * CHUNK)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 25
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids)[: 25 * CHUNK])
    # And by steps.
    for first in range(0, 240, 60):
        b.hs.store_hidden_states(
            ids[: first + 60], rows_of(ids)[first : first + 60], token_offset=first
        )
    assert b.hs.coverage(ids) == 25 * CHUNK


def test_eviction_takes_the_longest_unused_prompt_from_its_tail(bench: MakeBench) -> None:
    b = bench(12)
    prompts = [prompt(4 * CHUNK, seed) for seed in range(4)]
    for ids in prompts[:3]:
        b.add_kv(ids)
        b.hs.store_hidden_states(ids, rows_of(ids))
    b.hs.retrieve_hidden_states(prompts[0])
    b.add_kv(prompts[3])
    b.hs.store_hidden_states(prompts[3][: 3 * CHUNK], rows_of(prompts[3])[: 3 * CHUNK])
    assert [b.hs.coverage(ids) // CHUNK for ids in prompts] == [4, 1, 4, 3]


def test_one_batch_never_evicts_what_it_stores(bench: MakeBench) -> None:
    b = bench(6)
    prompts = [prompt(4 * CHUNK, seed) for seed in range(2)]
    for ids in prompts:
        b.add_kv(ids)
    assert b.hs.store_batch([Rows(ids, rows_of(ids)) for ids in prompts]) == [4, 2]
    assert [b.hs.coverage(ids) // CHUNK for ids in prompts] == [4, 2]


def test_a_row_larger_than_the_pool_is_no_error(bench: MakeBench) -> None:
    b = bench(4)
    ids = prompt(CHUNK)
    b.add_kv(ids)
    assert b.hs.store_hidden_states(ids, torch.zeros(CHUNK, 4096)) == 0
    assert b.hs.stats()["dropped"] == 1


def test_rows_being_read_are_not_evicted(bench: MakeBench) -> None:
    b = bench(4)
    first, second = prompt(4 * CHUNK, 1), prompt(4 * CHUNK, 2)
    for ids in (first, second):
        b.add_kv(ids)
    b.hs.store_hidden_states(first, rows_of(first))
    real, seen = b.memory.view, []

    def view(slot: SlotRef) -> memoryview:
        if not seen:  # In the middle of a retrieval somebody stores, and KV goes.
            seen.append(1)
            assert b.hs.store_hidden_states(second, rows_of(second)) == 0
            b.drop_kv(first)
        return real(slot)

    b.memory.view = view
    assert torch.equal(b.hs.retrieve_hidden_states(first, dtype=None), rows_of(first))
    b.memory.view = real
    assert b.hs.retrieve_hidden_states(first) is None
    assert b.hs.store_hidden_states(second, rows_of(second)) == 4


# ---- faults -------------------------------------------------------------------------------------


def test_a_damaged_row_ends_the_prefix_and_is_removed(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(4 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    slot = b.engine.rows.index.get((b.hashes(ids)[2], f"hs0-bfloat16-{WIDTH}")).row.slots[0]
    b.memory._maps[slot.extent][slot.offset + 77] ^= 1
    assert b.hs.retrieve_hidden_states(ids) is None
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids)[: 2 * CHUNK])
    assert b.hs.stats()["corrupt"] == 1
    assert b.hs.num_cached_chunks == 3


def test_no_room_for_what_was_found_leaves_no_pins(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    with pytest.raises(RuntimeError):
        b.hs.retrieve_hidden_states(ids, device="nowhere")
    assert (len(b.session.loads), b.memory.held) == (0, 0)


def test_memory_that_is_gone_is_a_miss(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    b.memory.hold = lambda incarnation: False
    began = time.monotonic()
    assert b.hs.retrieve_hidden_states(ids) is None
    assert b.hs.store_hidden_states(prompt(2 * CHUNK, 1), rows_of(ids)) == 0
    assert time.monotonic() - began < 1


def test_memory_that_is_mapped_in_part_is_a_miss(bench: MakeBench) -> None:
    b = bench()
    ids, others = prompt(4 * CHUNK), prompt(2 * CHUNK, 1)
    b.add_kv(ids)
    b.add_kv(others)
    b.hs.store_hidden_states(ids, rows_of(ids))
    real, seen = b.memory.view, []

    def view(slot: SlotRef) -> memoryview:
        seen.append(slot)
        if len(seen) == 2:
            raise ProtocolError(f"{slot} is in an extent that is not mapped")
        return real(slot)

    b.memory.view = view
    assert b.hs.retrieve_hidden_states(ids) is None
    seen.clear()
    assert b.hs.store_hidden_states(others, rows_of(others)) == 1
    b.memory.view = real
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))
    assert b.hs.coverage(others) == CHUNK
    assert b.hs.stats()["corrupt"] == 0


def test_a_forked_child_finds_nothing(bench: MakeBench) -> None:
    """It has none of the threads, sockets and locks of its parent, but memory of its own."""
    b = bench()
    ids = prompt(4 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    assert b.hs.retrieve_hidden_states(ids) is not None  # Threads are there.

    def finds_nothing() -> bool:
        found = (
            b.hs.store_hidden_states(ids, rows_of(ids)),
            b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True),
            b.hs.coverage(ids),
            b.hs.num_cached_chunks,
            *map(len, (b.hs.stats(), b.hs.take_counts())),
        )
        return not any(found) and b.hs.retrieve_hidden_states(ids) is None and b.hs.flush()

    with b.hs._attached[0].lock:
        assert holds_in_a_child(finds_nothing)
    assert b.hs.coverage(ids) == 4 * CHUNK


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_rows_are_read_with_as_few_threads_as_can_be_had(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Nothing is copied any more when the call has ended: slots and ``out`` are others' then."""
    monkeypatch.setattr(client_module, "_COPIES_AT_ONCE", 4)
    b = bench()
    ids = prompt(12 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if "lmcache-rows" in thread.name:
            started.append(thread)
            if len(started) > num_threads:
                raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    view = b.memory.view
    b.memory.view = lambda slot: (time.sleep(0.002), view(slot))[1]
    for _ in range(3):
        out = torch.zeros(12 * CHUNK, WIDTH, dtype=torch.bfloat16)
        assert torch.equal(b.hs.retrieve_hidden_states(ids, out=out), rows_of(ids))
        out.zero_()
        time.sleep(0.01)
        assert not out.any()


def test_a_thread_that_becomes_free_copies_nothing_behind_the_call(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take what was queued before another thread could not be had."""
    monkeypatch.setattr(client_module, "_COPIES_AT_ONCE", 2)
    b = bench()
    ids = prompt(12 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    free, real, view = threading.Event(), threading.Thread.start, b.memory.view
    b.hs._attached[0]._copiers.submit(free.wait, 20)

    def start(thread: threading.Thread) -> None:
        if "lmcache-rows" in thread.name:
            threading.Timer(0.05, free.set).start()
            raise RuntimeError("can't start new thread")
        real(thread)

    slow = [0.5]

    def look(slot: SlotRef) -> memoryview:
        is_helper = "lmcache-rows" in threading.current_thread().name
        time.sleep(slow.pop() if is_helper and slow else 0.01)
        return view(slot)

    monkeypatch.setattr(threading.Thread, "start", start)
    b.memory.view = look
    out = torch.zeros(12 * CHUNK, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, out=out), rows_of(ids))


def test_an_error_while_copying_ends_the_store(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    real = b.memory.view
    b.memory.view = lambda slot: 1 // 0
    with pytest.raises(ZeroDivisionError):
        b.hs.store_hidden_states(ids, rows_of(ids))
    b.memory.view = real
    assert not b.session.leases
    assert b.hs.store_hidden_states(ids, rows_of(ids)) == 2


def test_without_a_store_nothing_is_stored_or_found() -> None:
    hs = HiddenStateStore()
    ids = prompt(2 * CHUNK)
    assert hs.store_hidden_states(ids, rows_of(ids)) == 0
    assert hs.store_hidden_states(ids, rows_of(ids), non_blocking=True) == 0
    assert hs.retrieve_hidden_states(ids) is None
    assert hs.coverage(ids) == hs.num_cached_chunks == 0
    assert not hs.has_chunk(ids)
    assert hs.stats() == hs.take_counts() == {}
    assert hs.flush()
    hs.close()


def test_after_close_nothing_is_stored_or_found(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    b.hs.close()
    assert b.hs.retrieve_hidden_states(ids) is None
    assert b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True) == 0
    assert b.hs.flush()


# ---- the helper thread --------------------------------------------------------------------------


def test_rows_are_stored_without_waiting(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(3 * CHUNK)
    rows = rows_of(ids)
    b.add_kv(ids)
    for first in range(0, len(ids), 5):
        chunk = rows[first : first + 5].clone()
        assert (
            b.hs.store_hidden_states(ids[: first + 5], chunk, token_offset=first, non_blocking=True)
            == 0
        )
        chunk.fill_(-1)  # The engine goes on with its buffers.
    assert b.hs.flush(10)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows)


def test_what_waits_for_the_helper_thread_is_bounded(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_STAGING_BYTES", 5 * PAGE)
    b = bench(timeout=0.2)
    prompts = [prompt(2 * CHUNK, seed) for seed in range(4)]
    for ids in prompts:
        b.add_kv(ids)
    gate, real = threading.Event(), b.memory.view
    b.memory.view = lambda slot: (gate.wait(20), real(slot))[1]
    for ids in prompts:
        b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True)
    assert not b.hs.flush(0.05)
    # The next call would come before those that wait.
    began = time.monotonic()
    assert b.hs.store_hidden_states(prompts[3], rows_of(prompts[3])) == 0
    assert time.monotonic() - began < 2
    gate.set()
    assert b.hs.flush(10)
    assert [b.hs.coverage(ids) for ids in prompts] == [2 * CHUNK, 2 * CHUNK, 0, 0]
    assert not b.hs._queued


def test_what_never_fits_the_staging_memory_is_waited_for(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_STAGING_BYTES", 2 * PAGE)
    b = bench()
    ids, small = prompt(3 * CHUNK), prompt(2 * CHUNK, 1)
    b.add_kv(ids)
    b.add_kv(small)
    assert b.hs.store_hidden_states(small, rows_of(small), non_blocking=True) == 0
    assert b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True) == 3
    assert b.hs.coverage(small) == 2 * CHUNK


def test_without_staging_memory_rows_are_waited_for(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "_STAGING_BYTES", 1 << 60)
    b = bench()
    for seed in range(2):
        ids = prompt(2 * CHUNK, seed)
        b.add_kv(ids)
        assert b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True) == 2
    assert caplog.text.count("are waited for, unstaged") == 1


@pytest.mark.parametrize("kept_as", ["native", "float32"])
def test_staging_memory_is_used_again_and_again_and_mixes_nothing(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, kept_as: str
) -> None:
    """By threads whose rows come at once, in pieces that end anywhere, in and out of inference
    mode."""
    monkeypatch.setattr(store_module, "_STAGING_BYTES", 4 * PAGE)
    b = bench(kept_as=kept_as, timeout=10.0, chunks=256)
    prompts = [prompt(6 * CHUNK, seed) for seed in range(3)]

    def write(ids: list[int]) -> None:
        draw, first = random.Random(ids[0]), 0
        while first < len(ids):
            end = min(len(ids), first + draw.randrange(1, 2 * CHUNK))
            with torch.inference_mode(draw.random() < 0.5):
                items = [
                    Rows(ids[:end], rows_of(ids, layer=layer)[first:end], layer, first)
                    for layer in (0, 1)
                ]
                b.hs.store_batch(items, non_blocking=True)
                for item in items:
                    item.hidden_states.fill_(-1)
            assert b.hs.flush(20)
            first = end

    for ids in prompts:
        b.add_kv(ids)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, prompts))
    # Rows may have been dropped, where all came at once: not so of one alone.
    alone = prompt(6 * CHUNK, 3)
    b.add_kv(alone)
    write(alone)
    assert len(b.hs.retrieve_layers(alone, [0, 1])[0]) == 6 * CHUNK
    for ids in (*prompts, alone):
        found = b.hs.retrieve_layers(ids, [0, 1]) or {}
        for layer, rows in found.items():
            assert torch.equal(rows, rows_of(ids, layer=layer)[: len(rows)].to(rows.dtype))


def test_an_error_of_the_helper_thread_is_logged(
    bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench()
    ids = prompt(CHUNK)
    b.add_kv(ids)
    real, b.memory.view = b.memory.view, lambda slot: 1 // 0
    b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True)
    assert b.hs.flush(10)
    assert "hidden states could not be stored" in caplog.text
    b.memory.view = real
    # Its place in the staging memory is free again.
    (staging,) = b.hs._staging.values()
    assert not staging.ring._parts


def test_a_place_is_free_once_its_stream_is_done(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that nobody had to read, too: they may still be on their way there."""
    b = bench()
    ids = prompt(CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True)
    assert b.hs.flush(10)
    (staging,) = b.hs._staging.values()
    parts = staging.ring._parts
    seen: list[Any] = []
    compute = SimpleNamespace(name="compute")
    staging.stream = SimpleNamespace(
        device=None,
        wait_stream=lambda stream: seen.append(stream.name),
        synchronize=lambda: seen.append(len(parts)),
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    b.hs.store_hidden_states(ids, rows_of(ids), non_blocking=True)
    assert b.hs.flush(10)
    assert (seen, len(parts)) == (["compute", 1], 0)


class Copyless(torch.Tensor):
    """Rows that cannot be copied."""

    @classmethod
    def __torch_function__(cls, function: Any, *how: Any) -> Any:
        if function is torch.Tensor.copy_:
            raise RuntimeError("no copy")
        return super().__torch_function__(function, *how)


def test_rows_that_cannot_be_copied_aside_take_no_place(bench: MakeBench) -> None:
    b = bench()
    ids = prompt(CHUNK)
    b.add_kv(ids)
    items = [Rows(ids, rows_of(ids)), Rows(ids, rows_of(ids).as_subclass(Copyless), 1)]
    with pytest.raises(RuntimeError, match="no copy"):
        b.hs.store_batch(items, non_blocking=True)
    (staging,) = b.hs._staging.values()
    assert not staging.ring._parts


@pytest.mark.parametrize("kind", [list, np.array, lambda ids: array("i", ids)])
def test_rows_are_those_of_the_ids_at_the_time_of_the_call(bench: MakeBench, kind: Any) -> None:
    """A runner's own list grows, and its buffer of ids is used again."""
    b = bench()
    ids, others = prompt(2 * CHUNK + 3), prompt(2 * CHUNK + 3, 1)
    for each in (ids, others):
        b.add_kv(each)
    gate, real = threading.Event(), b.memory.view
    b.memory.view = lambda slot: (gate.wait(20), real(slot))[1]
    first = prompt(CHUNK, 2)
    b.add_kv(first)
    b.hs.store_hidden_states(first, rows_of(first), non_blocking=True)  # The helper waits here.
    buffer = kind(ids)
    items = [Rows(buffer, rows_of(ids, layer=layer), layer) for layer in (0, 1)]
    b.hs.store_batch(items, non_blocking=True)
    if kind is list:
        buffer += [5, 6, 7, 8]
    else:
        buffer[:] = kind(others)
    gate.set()
    assert b.hs.flush(10)
    b.memory.view = real
    assert b.hs.coverage(others) == 0
    end = prompt(3 * CHUNK)
    b.add_kv(end)
    for layer in (0, 1):
        rows = rows_of(end, layer=layer)
        b.hs.store_hidden_states(end, rows[2 * CHUNK + 3 :], layer, 2 * CHUNK + 3)
        assert torch.equal(b.hs.retrieve_hidden_states(end, layer, dtype=None), rows)


# ---- tiers --------------------------------------------------------------------------------------


class SlowTier(MemoryTier):
    """Answers when it is told to, and keeps what it has over a close."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def contains(self, names: Sequence[str]) -> list[bool]:
        self.gate.wait(20)
        return super().contains(names)

    def close(self) -> None:
        pass


def settle(b: Bench) -> None:
    deadline = time.monotonic() + 10
    while b.engine._writing[0] or b.kv_engine._writing[0]:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_rows_come_back_after_a_restart(bench: MakeBench, kind: str, tmp_path: Any) -> None:
    tier = SlowTier()
    ids = prompt(5 * CHUNK)

    def start() -> Bench:
        each = tier if kind == "memory" else DiskTier(str(tmp_path), 1 << 30)
        return bench(tier=each, default=(torch.bfloat16, WIDTH), timeout=10)

    b = start()
    b.add_kv(ids)
    for layer in (0, -1):
        b.hs.store_hidden_states(ids, rows_of(ids, layer=layer), layer)
    settle(b)
    b.kv_engine.tiering.close()
    again = start()
    assert again.hs.coverage(ids, [0, -1]) == 5 * CHUNK
    found = again.hs.retrieve_layers(ids, [0, -1])
    assert all(torch.equal(found[layer], rows_of(ids, layer=layer)) for layer in (0, -1))


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_rows_are_read_in_the_mode_of_the_caller(bench: MakeBench, dtype: Any) -> None:
    """A model runner's: what it makes may only be written to in that mode."""
    b = bench()
    ids = prompt(4 * CHUNK)
    b.add_kv(ids)
    with torch.inference_mode():
        assert b.hs.store_hidden_states(ids, rows_of(ids)) == 4
        assert b.hs.retrieve_hidden_states(ids, dtype=dtype).is_inference()
        out = torch.zeros(4 * CHUNK, WIDTH)
        assert b.hs.retrieve_hidden_states(ids, out=out) is not None
        assert torch.equal(out, rows_of(ids).float())
    assert not b.hs.retrieve_hidden_states(ids, dtype=dtype).is_inference()


def test_clear_takes_hidden_states_along(bench: MakeBench) -> None:
    """Those whose KV a tier has, too."""
    b = bench(tier=SlowTier(), timeout=10)
    ids = prompt(4 * CHUNK)
    b.add_kv(ids)
    settle(b)
    b.hs.store_hidden_states(ids, rows_of(ids))
    settle(b)
    assert b.hs.num_cached_chunks == 4
    b.kv_engine.clear_namespace("")
    assert b.hs.num_cached_chunks == 0
    b.add_kv(ids)
    assert b.hs.retrieve_hidden_states(ids) is None


def rows_whose_kv_a_tier_has(bench: MakeBench) -> tuple[Bench, SlowTier, list[int]]:
    """And the pool no longer."""
    tier = SlowTier()
    b = bench(tier=tier, kv_chunks=4, timeout=10)
    ids, other = prompt(4 * CHUNK), prompt(4 * CHUNK, 1)
    for end in range(CHUNK, 5 * CHUNK, CHUNK):
        b.add_kv(ids[:end])
        settle(b)
    b.hs.store_hidden_states(ids, rows_of(ids))
    settle(b)
    b.add_kv(other)
    return b, tier, ids


def test_an_answer_that_comes_while_it_is_used_is_waited_for(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question about the KV is answered between two looks at it."""
    b, _, ids = rows_whose_kv_a_tier_has(bench)
    settle(b)
    add_to = Question.add_to

    def answered_late(self: Question, *args: Any, **how: Any) -> None:
        add_to(self, *args, **how)
        deadline = time.monotonic() + 10
        while not self.done and time.monotonic() < deadline:
            time.sleep(0.001)

    monkeypatch.setattr(Question, "add_to", answered_late)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))


def test_kv_in_a_tier_only_keeps_its_rows(bench: MakeBench) -> None:
    b, tier, ids = rows_whose_kv_a_tier_has(bench)
    assert b.kv_engine.stats().evicted == {"full": 4}
    assert b.hs.num_cached_chunks == 4
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))
    # The tier loses it too.
    tier.clear(NAMESPACE.hex()[:16])
    assert b.hs.retrieve_hidden_states(ids) is None


def test_rows_without_kv_in_any_tier_are_not_found_in_one(bench: MakeBench) -> None:
    tier = SlowTier()
    b = bench(tier=tier, timeout=10)
    ids = prompt(2 * CHUNK)
    b.hs.store_hidden_states(ids, rows_of(ids))
    settle(b)
    assert b.hs.retrieve_hidden_states(ids) is None
    b.add_kv(ids)
    assert torch.equal(b.hs.retrieve_hidden_states(ids, dtype=None), rows_of(ids))


def test_a_tier_that_does_not_answer_is_a_miss_in_time(bench: MakeBench) -> None:
    tier = SlowTier()
    b = bench(tier=tier, timeout=0.1)
    ids = prompt(2 * CHUNK)
    b.hs.store_hidden_states(ids[:CHUNK], rows_of(ids)[:CHUNK])
    tier.gate.clear()
    began = time.monotonic()
    assert b.hs.retrieve_hidden_states(ids) is None
    assert b.hs.coverage(ids) == 0
    assert time.monotonic() - began < 2
    tier.gate.set()


def test_clearing_hidden_states_leaves_the_kv_in_its_tiers(bench: MakeBench) -> None:
    tier = SlowTier()
    b = bench(tier=tier, timeout=10)
    ids = prompt(2 * CHUNK)
    b.add_kv(ids)
    b.hs.store_hidden_states(ids, rows_of(ids))
    settle(b)
    before = tier.stats().num_values
    assert b.engine.clear_namespace("") == 2
    b.engine.channels[0]._jobs["write"].join()
    assert tier.stats().num_values == before == 4


# ---- against brute force ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_it_does_what_a_simple_model_does(bench: MakeBench, seed: int) -> None:
    """Random calls on prompts that share heads, in a pool that fits them all: what is found is
    what was stored with its KV, neither more nor less."""
    rng = random.Random(seed)
    b = bench(400)
    head = [rng.randrange(3) for _ in range(2 * CHUNK)]
    prompts = [
        [*head[: rng.choice([0, CHUNK, 2 * CHUNK])], *(rng.randrange(3) for _ in range(40))]
        for _ in range(4)
    ]
    # Of each prompt: which rows were given without a hole since the start of their chunk.
    stored: dict[tuple[int, tuple[int, ...]], bool] = {}
    kv: set[tuple[int, ...]] = set()
    progress = {(which, layer): 0 for which in range(4) for layer in (0, -1)}
    for _ in range(120):
        which, layer = rng.randrange(4), rng.choice((0, -1))
        ids = prompts[which]
        action = rng.random()
        if action < 0.5:
            start = progress[which, layer]
            if rng.random() < 0.15:
                start = rng.randrange(len(ids)) // CHUNK * CHUNK
            end = min(len(ids), start + rng.randrange(1, 20))
            rows = rows_of(ids, layer=layer)[start:end]
            count = b.hs.store_hidden_states(ids[:end], rows, layer, start)
            assert count == end // CHUNK - start // CHUNK
            for chunk in range(start // CHUNK, end // CHUNK):
                stored[layer, tuple(ids[: (chunk + 1) * CHUNK])] = True
            progress[which, layer] = end if end < len(ids) else 0
        elif action < 0.65:
            b.add_kv(ids)
            kv |= {tuple(ids[:end]) for end in range(CHUNK, len(ids) + 1, CHUNK)}
        elif action < 0.7:
            first = rng.randrange(4)
            b.drop_kv(ids, first)
            for end in range((first + 1) * CHUNK, len(ids) + 1, CHUNK):
                key = tuple(ids[:end])
                if key in kv:
                    kv.discard(key)
                    for each in (0, -1):
                        stored.pop((each, key), None)
        else:
            layers = rng.choice(([0], [-1], [0, -1]))
            length = 0
            while length + CHUNK <= len(ids) and all(
                (each, tuple(ids[: length + CHUNK])) in stored for each in layers
            ):
                if tuple(ids[: length + CHUNK]) not in kv:
                    break
                length += CHUNK
            assert b.hs.coverage(ids, layers) == length
            found = b.hs.retrieve_layers(ids, layers)
            assert (found is None) == (length == 0)
            for each, rows in (found or {}).items():
                assert torch.equal(rows, rows_of(ids, layer=each)[:length])


def test_writers_and_readers_on_a_small_pool_never_see_a_wrong_row(bench: MakeBench) -> None:
    """A pool of a tenth of what is stored, KV that comes and goes; heads stay retrievable."""
    b = bench(96, kv_chunks=200)
    prompts = [prompt(24 * CHUNK + 3, seed) for seed in range(20)]
    truth = {
        (which, layer): torch.randn(len(ids), WIDTH).to(torch.bfloat16)
        for which, ids in enumerate(prompts)
        for layer in (0, -1)
    }
    stop, failures = threading.Event(), []
    served, written, heads, checks = [0], [0], [0], [0]

    def guard(work: Callable[[random.Random], None], seed: int) -> Callable[[], None]:
        def run() -> None:
            rng = random.Random(seed)
            try:
                while not stop.is_set():
                    work(rng)
            except BaseException as error:
                failures.append(error)
                stop.set()

        return run

    def write(rng: random.Random) -> None:
        which = rng.randrange(20)
        ids, first = prompts[which], 0
        b.add_kv(ids)
        while first < len(ids):
            end = min(len(ids), first + rng.choice((3, 8, 40, 100)))
            b.hs.store_batch(
                [
                    Rows(part, truth[which, layer][first:end], layer, first)
                    for part in [ids[:end]]
                    for layer in (0, -1)
                ],
                non_blocking=rng.random() < 0.3,
            )
            first = end
        assert b.hs.flush()
        # What was stored last is there, from its head on, unless its KV has gone.
        found = b.hs.retrieve_layers(ids, [0, -1])
        written[0] += 1
        heads[0] += found is not None
        for layer, rows in (found or {}).items():
            assert len(rows) == len(found[0])
            assert torch.equal(rows, truth[which, layer][: len(rows)]), "a wrong row"

    def read(rng: random.Random) -> None:
        which = rng.randrange(20)
        layers = rng.choice(([0], [-1], [0, -1]))
        found = b.hs.retrieve_layers(prompts[which], layers)
        for layer, rows in (found or {}).items():
            served[0] += 1
            assert torch.equal(rows, truth[which, layer][: len(rows)]), "a wrong row"

    def disturb(rng: random.Random) -> None:
        time.sleep(0.01)
        b.drop_kv(prompts[rng.randrange(20)], rng.randrange(24))
        b.engine.check_integrity()
        b.kv_engine.check_integrity()
        checks[0] += 1

    threads = [
        threading.Thread(target=guard(work, seed))
        for seed, work in enumerate((write, read, read, disturb))
    ]
    for thread in threads:
        thread.start()
    stop.wait(STRESS_SECONDS)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    assert served[0] > 10
    assert heads[0] > 0.8 * written[0]
    print(
        f"\n{STRESS_SECONDS:g} s, no wrong row: {written[0]} prompts stored, {heads[0]} found from "
        f"their heads on; {served[0]} other reads, {checks[0]} integrity checks"
    )
    # Head rows are retrievable: of a prompt larger than what is left, and of one that is not.
    for which, ids in enumerate(prompts[:2]):
        b.add_kv(ids)
        b.hs.store_batch([Rows(ids, truth[which, layer], layer) for layer in (0, -1)])
        found = b.hs.retrieve_layers(ids, [0, -1])
        for layer, rows in found.items():
            assert torch.equal(rows, truth[which, layer][: 24 * CHUNK])
    assert isinstance(b.session.stats(), StoreStats)
