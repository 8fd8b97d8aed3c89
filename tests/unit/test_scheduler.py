"""The scheduler side's life of requests, over the real store and a worker that is played here."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lmcache_connector.config import RequestParams, load_config
from lmcache_connector.counters import Counters
from lmcache_connector.groups import (
    FULL,
    STATE,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
)
from lmcache_connector.keys import namespace_digest
from lmcache_connector.layout import CacheLayout
from lmcache_connector.metadata import (
    LoadOp,
    LoadReport,
    PoolRef,
    StepMeta,
    StoreOp,
    StoreReport,
    WorkerMeta,
)
from lmcache_connector.scheduler.request import StepView
from lmcache_connector.scheduler.scheduler import CacheScheduler
from lmcache_connector.storage.base import LookupReply, LookupState
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession

CHUNK = 256
WINDOW = ReuseRule(ReuseKind.WINDOW, 255)


def kernel_group(engine_group: int, rule: ReuseRule, tokens: int) -> KVLayerGroupInfo:
    return KVLayerGroupInfo(
        engine_group_idx=engine_group,
        layer_indices=(engine_group,),
        kv_size=1,
        nl=1,
        nb=1000,
        bs=1 if rule.kind is ReuseKind.STATE else tokens,
        nh=1,
        hs=tokens * 16 if rule.kind is ReuseKind.STATE else 16,
        element_size=1,
        block_stride_elems=tokens * 16,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=tokens,
        slots_per_block=1 if rule.kind is ReuseKind.STATE else tokens,
        sw_size_tokens=-1,
        recurrent_state=rule.kind is ReuseKind.STATE,
        rule=rule,
        num_shards=1,
        num_runs=1,
        run_bytes=tokens * 16,
    )


class Request:
    """A request as vllm_view shows it."""

    def __init__(self, request_id: str, prompt: Sequence[int], extra: object = None) -> None:
        self.request_id = request_id
        self.all_tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.skip_reading = False
        self.uncacheable: str | None = None
        self._extra = extra

    @property
    def num_tokens(self) -> int:
        return len(self.all_tokens)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        return self.all_tokens[start:end]

    def extra(self) -> Any:
        return None if self._extra is None else (lambda start, end: self._extra)


class World:
    """A scheduler side, its store, and workers that answer as told."""

    def __init__(
        self,
        rules: Sequence[ReuseRule] = (FULL, WINDOW),
        *,
        ranks: int = 1,
        pool_bytes: int = 8 << 20,
        can_load: bool = True,
        can_store: bool = True,
        checkpoint_groups: set[int] | None = None,
        **config: Any,
    ) -> None:
        groups = tuple(kernel_group(i, rule, 128) for i, rule in enumerate(rules))
        if any(rule.kind is ReuseKind.STATE for rule in rules):
            groups = tuple(
                kernel_group(i, rule, CHUNK if rule.kind is ReuseKind.STATE else 128)
                for i, rule in enumerate(rules)
            )
        geometries = [
            WorkerGeometry(
                rank=rank,
                pp_rank=0,
                pp_size=1,
                tp_rank=rank,
                tp_size=ranks,
                chunk_tokens=CHUNK,
                engine_groups=engine_group_infos(groups),
                kernel_groups=tuple(
                    msgspec.structs.replace(group, num_shards=ranks) for group in groups
                ),
            )
            for rank in range(ranks)
        ]
        self.ranks = ranks
        self.num_groups = len(rules)
        self.layout = CacheLayout(geometries)
        pool = MemoryPool(pool_bytes)
        self.engine = StorageEngine(pool)
        for extent in range(len(pool.extents)):
            self.engine.mark_ready(extent)
        loaded = load_config(config, {})
        self.params = RequestParams(loaded.config.min_hit_tokens, loaded.config.max_offload_tokens)
        self.scheduler = CacheScheduler(
            loaded.config,
            lambda prints, nonce: namespace_digest({"prints": ",".join(prints), "nonce": nonce}),
            can_load=can_load,
            can_store=can_store,
            counters=Counters(),
            checkpoint_groups=frozenset(checkpoint_groups or ()),
        )
        self.session = self.engine.open_session(
            self.scheduler.namespace(self.layout),
            self.layout.shards(),
            PoolRef("/nowhere", "life-1"),
        )
        self.scheduler.attach(self.layout, self.session)
        self.states: dict[str, list[tuple[int, int, int]]] = {}

    def tables(self, num_tokens: int) -> list[list[int]]:
        return [
            [1 + 100 * group + block for block in range(-(-num_tokens // 128))]
            for group in range(self.num_groups)
        ]

    def step(
        self,
        requests: dict[Request, int],
        tables: dict[str, Any] | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> StepMeta:
        def block_ids(request_id: str) -> Any:
            if tables and request_id in tables:
                return tables[request_id]
            request = next(r for r in requests if r.request_id == request_id)
            return self.tables(request.num_computed_tokens + requests[request])

        scheduled = {request.request_id: count for request, count in requests.items()}
        meta = self.scheduler.build_step(StepView(scheduled, block_ids, self.states, drafts or {}))
        for request, count in requests.items():
            request.num_computed_tokens += count
        return meta

    def stored(self, op: StoreOp, *, fail: bool = False) -> WorkerMeta:
        meta = WorkerMeta()
        for rank in range(self.ranks):
            digests = [None if fail and rank == self.ranks - 1 else 7 + rank for _ in op.objects]
            by_rank = StoreReport(op.store_id, rank, digests)
            meta = meta.aggregate(WorkerMeta(stores=[by_rank]))
        return meta

    def loaded(self, op: LoadOp, *, ok: bool = True, corrupt: Sequence[int] = ()) -> WorkerMeta:
        reports = [
            LoadReport(op.load_id, rank, ok or rank > 0, list(corrupt) if rank == 0 else [])
            for rank in range(self.ranks)
        ]
        return WorkerMeta(loads=reports)

    def arrive(self, request: Request, local: int = 0) -> int | None:
        self.scheduler.on_new_request(request, self.params)
        return self.scheduler.match(request.request_id, local)

    def run_cold(self, request: Request) -> StepMeta:
        """Prefill the whole prompt in one step; the workers store what they are told."""
        assert self.arrive(request) == 0
        self.scheduler.after_alloc(request.request_id, self.tables(request.num_tokens), 0)
        meta = self.step({request: request.num_tokens})
        for op in meta.stores:
            self.scheduler.on_worker_meta(self.stored(op))
        return meta

    def settle(self) -> None:
        self.scheduler.check_integrity()
        assert not self.scheduler.has_pending_work()
        stats = self.engine.stats()
        assert (stats.busy_rows, stats.leases) == (0, 0)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.settle()


def test_stored_chunks_are_found_and_loaded(world: World) -> None:
    first = Request("a", prompt(1, 800))
    meta = world.run_cold(first)
    assert [op.objects[0].end_tokens for op in meta.stores] == [256]
    world.scheduler.on_finished("a")
    again = Request("b", first.all_tokens)
    assert world.arrive(again) == 768
    assert world.scheduler.match("b", 0) == 768
    world.scheduler.after_alloc("b", world.tables(800), 768)
    loads = world.step({}).loads
    assert len(loads) == 1
    by_group = [(obj.group, obj.end_tokens) for obj in loads[0].objects]
    # The window needs its last 255 tokens only.
    assert by_group == [("full", 256), ("full", 512), ("full", 768), ("window-255", 768)]
    assert loads[0].objects[-1].block_ids == {1: [105, 106]}
    assert world.scheduler.has_pending_work()
    world.scheduler.on_worker_meta(world.loaded(loads[0]))
    world.scheduler.after_alloc("b", world.tables(800), 0)
    world.scheduler.on_finished("b")


def test_blocks_computed_locally_are_never_written(world: World) -> None:
    first = Request("a", prompt(1, 800))
    world.run_cold(first)
    world.scheduler.on_finished("a")
    again = Request("b", first.all_tokens)
    # A local hit that ends inside a chunk: only the rest of it is loaded.
    assert world.arrive(again, 384) == 384
    world.scheduler.after_alloc("b", world.tables(800), 384)
    (load,) = world.step({}).loads
    assert [(obj.group, obj.end_tokens, obj.block_ids) for obj in load.objects] == [
        ("full", 512, {0: [4]}),
        ("full", 768, {0: [5, 6]}),
        ("window-255", 768, {1: [105, 106]}),
    ]
    world.scheduler.on_worker_meta(world.loaded(load))
    world.scheduler.on_finished("b")


@pytest.mark.parametrize("when", ["matched", "allocated", "loading"])
def test_an_abort_releases_every_pin(world: World, when: str) -> None:
    first = Request("a", prompt(1, 800))
    world.run_cold(first)
    world.scheduler.on_finished("a")
    again = Request("b", first.all_tokens)
    assert world.arrive(again) == 768
    load = None
    if when != "matched":
        world.scheduler.after_alloc("b", world.tables(800), 768)
        (load,) = world.step({}).loads
    if when == "loading":
        world.scheduler.on_finished("b")
        assert world.engine.stats().busy_rows > 0, "slots are read until the worker says so"
    if load is not None:
        world.scheduler.on_worker_meta(world.loaded(load))
    world.scheduler.on_finished("b")
    world.settle()


def test_a_failed_load_is_not_answered_again_and_drops_corrupt_rows(world: World) -> None:
    first = Request("a", prompt(1, 800))
    world.run_cold(first)
    world.scheduler.on_finished("a")
    rows = world.engine.stats().rows
    again = Request("b", first.all_tokens)
    assert world.arrive(again) == 768
    world.scheduler.after_alloc("b", world.tables(800), 768)
    (load,) = world.step({}).loads
    world.scheduler.on_worker_meta(world.loaded(load, ok=False, corrupt=[1]))
    assert world.engine.stats().rows == rows - 1
    assert world.scheduler.match("b", 0) == 0
    # Another request is served up to the hole.
    third = Request("c", first.all_tokens)
    assert world.arrive(third) == 256
    for request_id in ("b", "c"):
        world.scheduler.on_finished(request_id)


@pytest.mark.parametrize(
    "trouble", ["evicted", "shortened", "null block", "short table", "unknown request"]
)
def test_what_cannot_be_loaded_as_planned_is_reported_as_failed(world: World, trouble: str) -> None:
    first = Request("a", prompt(1, 800))
    world.run_cold(first)
    world.scheduler.on_finished("a")
    again = Request("b", first.all_tokens)
    assert world.arrive(again) == 768
    tables, external = world.tables(800), 768
    match trouble:
        case "evicted":
            world.session.clear(b"x" * 32)
        case "shortened":
            external = 512
        case "null block":
            tables[1][5] = 0
        case "short table":
            tables[0] = tables[0][:3]
        case "unknown request":
            world.scheduler.on_finished("b")
    world.scheduler.after_alloc("b", tables, external)
    (load,) = world.step({}).loads
    assert load.objects == []
    world.scheduler.on_worker_meta(world.loaded(load, ok=False))
    world.scheduler.on_finished("b")


def test_roles() -> None:
    producer = World(can_load=False)
    request = Request("a", prompt(1, 600))
    producer.run_cold(request)
    assert producer.engine.stats().rows == 4
    assert producer.arrive(Request("b", request.all_tokens)) == 0
    consumer = World(can_store=False)
    assert consumer.run_cold(Request("a", request.all_tokens)).stores == []
    assert consumer.engine.stats().rows == 0


def test_a_request_may_opt_out_of_reading(world: World) -> None:
    world.run_cold(Request("a", prompt(1, 600)))
    again = Request("b", prompt(1, 600))
    again.skip_reading = True
    assert world.arrive(again) == 0
    for request_id in ("a", "b"):
        world.scheduler.on_finished(request_id)


def test_a_request_without_trustworthy_identity_is_neither_read_nor_stored(world: World) -> None:
    request = Request("a", prompt(1, 600))
    request.uncacheable = "its images are counters"
    assert world.run_cold(request).stores == []
    world.scheduler.on_finished("a")
    impossible = Request("b", [-1] * 600)
    assert world.run_cold(impossible).stores == []
    world.scheduler.on_finished("b")


def test_other_identity_is_another_key(world: World) -> None:
    world.run_cold(Request("a", prompt(1, 600), extra=("lora", "x")))
    assert world.arrive(Request("b", prompt(1, 600))) == 0
    assert world.arrive(Request("c", prompt(1, 600), extra=("lora", "y"))) == 0
    assert world.arrive(Request("d", prompt(1, 600), extra=("lora", "x"))) == 512
    for request_id in "abcd":
        world.scheduler.on_finished(request_id)


def test_only_the_prompt_is_stored_unless_asked(world: World) -> None:
    request = Request("a", prompt(1, 500))
    world.run_cold(request)
    for _ in range(100):
        request.all_tokens.append(5)
        assert world.step({request: 1}).stores == []
    world.scheduler.on_finished("a")


@pytest.mark.parametrize("finished_first", [False, True])
def test_decode_tokens_get_their_key_at_commit(finished_first: bool) -> None:
    world = World(save_decode_cache=True)
    request = Request("a", prompt(1, 500))
    world.run_cold(request)
    # Async scheduling: the step that completes the chunk is built before its tokens are known.
    pending = None
    for _ in range(500, 512):
        meta = world.step({request: 1})
        if meta.stores:
            pending = meta.stores[0]
    assert pending is not None
    assert [obj.end_tokens for obj in pending.objects] == [512, 512]
    request.all_tokens += prompt(2, 13)
    if finished_first:
        world.scheduler.on_finished("a")
    world.scheduler.on_worker_meta(world.stored(pending))
    world.scheduler.on_finished("a")
    assert world.arrive(Request("b", request.all_tokens)) == 512
    world.scheduler.on_finished("b")
    world.settle()


def test_tokens_never_confirmed_are_never_stored() -> None:
    world = World(save_decode_cache=True)
    request = Request("a", prompt(1, 500))
    world.run_cold(request)
    rows = world.engine.stats().rows
    meta = world.step({request: 12})
    world.scheduler.on_finished("a")
    world.scheduler.on_worker_meta(world.stored(meta.stores[0]))
    assert world.engine.stats().rows == rows
    world.settle()


def test_a_chunk_that_a_draft_ends_waits_until_it_is_accepted() -> None:
    world = World(save_decode_cache=True)
    request = Request("a", prompt(1, 510))
    world.run_cold(request)
    request.all_tokens += prompt(2, 1)
    assert not world.step({request: 2}, drafts={"a": [7]}).stores
    # Rejected: its place is computed again, with another token.
    request.num_computed_tokens -= 1
    request.all_tokens += prompt(3, 1)
    (op,) = world.step({request: 2}, drafts={"a": [8]}).stores
    assert {obj.end_tokens for obj in op.objects} == {512}
    world.scheduler.on_worker_meta(world.stored(op))
    world.scheduler.on_finished("a")
    assert world.arrive(Request("b", [*request.all_tokens, 9])) == 512
    world.scheduler.on_finished("b")
    world.settle()


def test_window_blocks_that_are_gone_are_not_stored(world: World) -> None:
    request = Request("a", prompt(1, 600))
    world.arrive(request)
    tables = world.tables(600)
    tables[1][1] = 0
    meta = world.step({request: 600}, {"a": tables})
    assert [(obj.group, obj.end_tokens) for obj in meta.stores[0].objects] == [
        ("full", 256),
        ("full", 512),
        ("window-255", 512),
    ]
    world.scheduler.on_worker_meta(world.stored(meta.stores[0]))
    world.scheduler.on_finished("a")


def test_states_are_stored_where_they_are_and_nowhere_else() -> None:
    world = World(rules=(FULL, STATE))
    request = Request("a", prompt(1, 1100))
    world.arrive(request)
    # The step passes 256 and ends at 512: the table holds the state of 512 only.
    meta = world.step({request: 512})
    states = [obj for obj in meta.stores[0].objects if obj.group == "state"]
    assert [(obj.end_tokens, obj.block_ids) for obj in states] == [(512, {1: [102]})]
    world.scheduler.on_worker_meta(world.stored(meta.stores[0]))
    # vLLM hands off the state of 768 in another block than the table's.
    world.states["a"] = [(1, 77, 768)]
    meta = world.step({request: 256})
    states = [obj for obj in meta.stores[0].objects if obj.group == "state"]
    assert [(obj.end_tokens, obj.block_ids) for obj in states] == [(768, {1: [77]})]
    world.scheduler.on_worker_meta(world.stored(meta.stores[0]))
    world.scheduler.on_finished("a")
    assert world.arrive(Request("b", request.all_tokens[:600])) == 512
    assert world.arrive(Request("c", request.all_tokens[:1000])) == 768
    assert world.arrive(Request("d", request.all_tokens[:500])) == 0
    for request_id in "bcd":
        world.scheduler.on_finished(request_id)
    world.settle()


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_state_inside_a_step_is_trusted_only_with_checkpoints(has_checkpoints: bool) -> None:
    world = World(rules=(FULL, STATE), checkpoint_groups={1} if has_checkpoints else set())
    request = Request("a", prompt(1, 700))
    world.arrive(request)
    world.states["a"] = [(1, 77, 512)]
    meta = world.step({request: 600})
    states = [obj for obj in meta.stores[0].objects if obj.group == "state"]
    assert [obj.block_ids for obj in states] == ([{1: [77]}] if has_checkpoints else [])
    world.scheduler.on_worker_meta(world.stored(meta.stores[0]))
    world.scheduler.on_finished("a")
    world.settle()


def decode_to(world: World, request: Request, end: int) -> StoreOp:
    """Steps of one token whose ids are not confirmed yet; the store that completes a chunk."""
    while request.num_computed_tokens < end:
        meta = world.step({request: 1})
    (op,) = meta.stores
    return op


def test_a_session_that_goes_on_does_not_key_what_it_replaced() -> None:
    world = World(save_decode_cache=True)
    request = Request("a", prompt(1, 250))
    world.run_cold(request)
    op = decode_to(world, request, 256)
    request.all_tokens += [7] * 6
    # The last token was a stop token; new input takes its place.
    request.all_tokens[255:] = prompt(2, 300)
    request.num_prompt_tokens = request.num_tokens
    request.num_computed_tokens = 255
    world.scheduler.on_worker_meta(world.stored(op))
    assert world.engine.stats().rows == 0
    world.scheduler.on_finished("a")
    world.settle()


def test_a_session_that_goes_on_forgets_hashes_of_what_it_replaced() -> None:
    world = World(save_decode_cache=True)
    request = Request("a", prompt(1, 250))
    world.run_cold(request)
    op = decode_to(world, request, 256)
    request.all_tokens += [7] * 6
    world.scheduler.on_worker_meta(world.stored(op))
    before = list(request.all_tokens)
    request.all_tokens[255:] = [8, *prompt(2, 300)]
    request.num_prompt_tokens = request.num_tokens
    request.num_computed_tokens = 255
    for store in world.step({request: request.num_tokens - 255}).stores:
        world.scheduler.on_worker_meta(world.stored(store))
    world.scheduler.on_finished("a")
    assert world.arrive(Request("b", before[:256] + request.all_tokens[256:])) == 256
    world.scheduler.on_finished("b")
    world.settle()


def test_a_copy_of_before_a_preemption_is_not_keyed_by_later_tokens() -> None:
    world = World(save_decode_cache=True)
    request = Request("a", prompt(1, 250))
    world.run_cold(request)
    op = decode_to(world, request, 256)
    # Outputs in flight are dropped with the preemption and sampled again.
    world.scheduler.match("a", 0)
    request.all_tokens += prompt(3, 20)
    world.scheduler.on_worker_meta(world.stored(op))
    assert world.engine.stats().rows == 0
    world.scheduler.on_finished("a")
    world.settle()


def test_books_balance_while_a_late_key_is_in_flight() -> None:
    world = World(save_decode_cache=True)
    requests = [Request(name, prompt(1, 250)) for name in "ab"]
    ops = []
    for request in requests:
        world.run_cold(request)
        ops.append(decode_to(world, request, 256))
        request.all_tokens += [7] * 10
        world.scheduler.on_finished(request.request_id)
        world.scheduler.check_integrity()
    for op in ops:
        world.scheduler.on_worker_meta(world.stored(op))
        world.scheduler.check_integrity()
    world.settle()


def test_a_running_request_does_not_refill_what_was_reset(world: World) -> None:
    request = Request("a", prompt(1, 800))
    world.arrive(request)
    (store,) = world.step({request: 300}).stores
    world.scheduler.on_worker_meta(world.stored(store))
    world.scheduler.reset()
    assert world.step({request: 500}).stores == []
    assert world.engine.stats().rows == 0
    # Recomputed from the start, it is stored again.
    request.num_computed_tokens = 0
    assert world.scheduler.match("a", 0) == 0
    (store,) = world.step({request: 800}).stores
    world.scheduler.on_worker_meta(world.stored(store))
    assert world.engine.stats().rows == 6
    world.scheduler.on_finished("a")


def test_concurrent_requests_store_a_shared_prefix_once(world: World) -> None:
    shared = prompt(1, 512)
    first, second = Request("a", shared + [1] * 50), Request("b", shared + [2] * 50)
    world.arrive(first)
    world.arrive(second)
    meta = world.step({first: 562, second: 562})
    assert [op.objects[0].end_tokens for op in meta.stores] == [256]
    world.scheduler.on_worker_meta(world.stored(meta.stores[0]))
    for request_id in "ab":
        world.scheduler.on_finished(request_id)


def test_one_rank_that_wrote_nothing_spoils_the_row() -> None:
    world = World(ranks=2)
    request = Request("a", prompt(1, 600))
    world.arrive(request)
    (store,) = world.step({request: 600}).stores
    assert all(len(obj.slots) == 2 for obj in store.objects)
    world.scheduler.on_worker_meta(world.stored(store, fail=True))
    assert world.engine.stats().rows == 0
    world.scheduler.on_finished("a")
    world.settle()


def test_one_rank_whose_load_failed_fails_the_request() -> None:
    world = World(ranks=2)
    request = Request("a", prompt(1, 600))
    world.arrive(request)
    (store,) = world.step({request: 600}).stores
    reports = [
        StoreReport(
            store.store_id,
            rank,
            [5 if obj.slots[rank].nbytes else None for obj in store.objects],
        )
        for rank in range(2)
    ]
    # Each rank knows the digest of its own shard only.
    for rank, report in enumerate(reports):
        world.scheduler.on_worker_meta(WorkerMeta(stores=[report]))
        assert (world.engine.stats().rows > 0) == (rank == 1)
    world.scheduler.on_finished("a")
    again = Request("b", request.all_tokens)
    assert world.arrive(again) == 512
    world.scheduler.after_alloc("b", world.tables(600), 512)
    (load,) = world.step({}).loads
    world.scheduler.on_worker_meta(WorkerMeta(loads=[LoadReport(load.load_id, 1, True)]))
    assert world.scheduler.has_pending_work()
    world.scheduler.on_worker_meta(WorkerMeta(loads=[LoadReport(load.load_id, 0, False)]))
    assert world.scheduler.match("b", 0) == 0
    world.scheduler.on_finished("b")
    world.settle()


def test_a_reset_before_there_is_a_store_counts() -> None:
    """Weights may have changed while the server was away."""
    roots = [World(), World(), World()]
    for world in roots[1:]:
        world.scheduler.reset()
    names = [world.scheduler.namespace(world.layout) for world in roots]
    assert len(set(names)) == 3
    assert names == [world.scheduler.namespace(world.layout) for world in roots]


def test_what_vllm_still_has_of_other_weights_is_not_kept(world: World) -> None:
    """Its own prefix cache could not be reset with the weights."""
    world.scheduler.reset(local_hits_are_new=False)
    old = Request("a", prompt(1, 800))
    old.num_computed_tokens = 512
    assert world.arrive(old, 512) == 0
    assert world.step({old: 288}).stores == []
    world.run_cold(Request("b", old.all_tokens))
    assert world.engine.stats().rows > 0
    # Nothing is added to what it has either; after a reset of both it is as ever.
    again = Request("c", old.all_tokens)
    assert world.arrive(again, 256) == 0
    assert world.scheduler.match("c", 0) == 768
    world.scheduler.reset()  # of ours alone: vLLM's is as it was
    world.run_cold(Request("d", old.all_tokens))
    assert world.arrive(Request("e", old.all_tokens), 128) == 0
    assert world.scheduler.match("e", 0) == 768
    world.scheduler.reset(local_hits_are_new=True)
    world.run_cold(Request("f", old.all_tokens))
    assert world.arrive(Request("g", old.all_tokens), 128) == 640
    for request_id in "abcdefg":
        world.scheduler.on_finished(request_id)


def test_reset_forgets_at_once_and_drops_what_is_in_flight(world: World) -> None:
    request = Request("a", prompt(1, 600))
    world.arrive(request)
    (store,) = world.step({request: 300}).stores
    world.scheduler.on_worker_meta(world.stored(store))
    (store,) = world.step({request: 300}).stores
    world.scheduler.reset()
    world.scheduler.on_worker_meta(world.stored(store))
    assert world.engine.stats().rows == 0
    assert world.arrive(Request("b", request.all_tokens)) == 0
    for request_id in "ab":
        world.scheduler.on_finished(request_id)


def test_limits_per_request(world: World) -> None:
    request = Request("a", prompt(1, 800))
    world.scheduler.on_new_request(request, RequestParams(0, 300))
    world.scheduler.match("a", 0)
    (store,) = world.step({request: 800}).stores
    assert {obj.end_tokens for obj in store.objects} == {256}
    world.scheduler.on_worker_meta(world.stored(store))
    world.scheduler.on_new_request(Request("b", request.all_tokens), RequestParams(300, None))
    assert world.scheduler.match("b", 0) == 0
    world.scheduler.on_new_request(Request("c", request.all_tokens), RequestParams(256, None))
    assert world.scheduler.match("c", 0) == 256
    for request_id in "abc":
        world.scheduler.on_finished(request_id)


def test_a_pool_smaller_than_a_prompt_keeps_its_head() -> None:
    # A chunk is 2 x 4 KiB; there is room for three.
    world = World(pool_bytes=3 * 8192)
    request = Request("a", prompt(1, 256 * 6 + 10))
    world.arrive(request)
    for _ in range(6):
        for op in world.step({request: 256}).stores:
            world.scheduler.on_worker_meta(world.stored(op))
    world.scheduler.on_finished("a")
    assert world.arrive(Request("b", request.all_tokens)) == 768
    world.scheduler.on_finished("b")
    world.settle()


class SlowStore(StoreSession):
    """A tier that is still answering."""

    pending = True

    def lookup(
        self, lookup_id: int, chunk_hashes: Sequence[bytes], first_chunk: int
    ) -> LookupReply:
        reply = super().lookup(lookup_id, chunk_hashes, first_chunk)
        if self.pending:
            nothing = [[0] * len(shards) for shards in reply.present]
            return LookupReply(LookupState.PENDING, nothing)
        return reply


def test_a_late_tier_is_a_miss_and_then_a_hit() -> None:
    world = World(lookup_timeout=0.05)
    world.session.__class__ = SlowStore
    request = Request("a", prompt(1, 600))
    assert world.arrive(request) is None
    assert world.scheduler.match("a", 0) is None
    time.sleep(0.06)
    assert world.scheduler.match("a", 0) == 0
    (store,) = world.step({request: 600}).stores
    world.scheduler.on_worker_meta(world.stored(store))
    world.scheduler.on_finished("a")
    world.session.pending = False
    assert world.arrive(Request("b", request.all_tokens)) == 512
    world.scheduler.on_finished("b")
    world.settle()


def test_random_lives_leave_nothing_behind() -> None:
    """Requests, loads, stores, failures, aborts and resets in any order: books balance."""
    rng = random.Random(7)
    world = World(ranks=2, pool_bytes=40 * 8192, save_decode_cache=True)
    running: dict[str, Request] = {}
    waiting: dict[str, tuple[LoadOp, int]] = {}
    reports: list[WorkerMeta] = []
    for turn in range(1500):
        action = rng.random()
        if action < 0.25 and len(running) < 6:
            request = Request(f"r{turn}", prompt(rng.randrange(6), rng.randrange(1, 1500)))
            running[request.request_id] = request
            local = 128 * rng.randrange(0, 1 + (request.num_tokens - 1) // 128)
            local = local if rng.random() < 0.3 else 0
            added = world.arrive(request, local)
            assert added is not None
            external = added if rng.random() < 0.9 else 0
            world.scheduler.after_alloc(
                request.request_id, world.tables(request.num_tokens), external
            )
            request.num_computed_tokens = local + external
            if external:
                waiting[request.request_id] = None  # type: ignore[assignment]
        elif action < 0.4 and running:
            request_id = rng.choice(list(running))
            if waiting.get(request_id, 1) is not None:
                del running[request_id]
                world.scheduler.on_finished(request_id)
        elif action < 0.42:
            world.scheduler.reset()
        scheduled = {}
        for request in running.values():
            if request.request_id in waiting:
                continue
            left = request.num_tokens - request.num_computed_tokens
            if left == 0:
                request.all_tokens.append(rng.randrange(1000))
            scheduled[request] = max(1, min(left, rng.randrange(1, 600)))
        meta = world.step(scheduled)
        for load in meta.loads:
            ok = rng.random() < 0.8
            corrupt = [0] if not ok and load.objects and rng.random() < 0.5 else []
            reports.append(world.loaded(load, ok=ok, corrupt=corrupt))
            waiting[load.request_id] = (load, turn)
        for store in meta.stores:
            reports.append(world.stored(store, fail=rng.random() < 0.1))
        rng.shuffle(reports)
        while reports and rng.random() < 0.7:
            report = reports.pop()
            world.scheduler.on_worker_meta(report)
            for load_report in report.loads:
                for request_id, value in list(waiting.items()):
                    if value is not None and value[0].load_id == load_report.load_id:
                        del waiting[request_id]
                        if not load_report.ok and request_id in running:
                            running[request_id].num_computed_tokens = 0
        world.scheduler.check_integrity()
    for request_id in list(running):
        world.scheduler.on_finished(request_id)
    for report in reports:
        world.scheduler.on_worker_meta(report)
    world.settle()
    stats = world.engine.stats()
    assert stats.rows > 0
    assert sum(stats.evicted.values()) > 0
