"""Lookups over steps: waiting for tiers, deadlines, prefetch, and pins that never outlive them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from lmcache_connector.config import RequestParams, load_config
from lmcache_connector.counters import Counters
from lmcache_connector.groups import (
    FULL,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
)
from lmcache_connector.keys import namespace_digest
from lmcache_connector.layout import CacheLayout
from lmcache_connector.metadata import LoadReport, PoolRef, SlotRef, WorkerMeta
from lmcache_connector.scheduler import lookup as lookup_module
from lmcache_connector.scheduler.request import StepView
from lmcache_connector.scheduler.scheduler import CacheScheduler
from lmcache_connector.storage.base import (
    Commit,
    LookupReply,
    LookupState,
    NewRow,
    Row,
    RowKey,
    StoreStats,
)

CHUNK = 256
TIMEOUT = 2.0
RULES = (FULL, ReuseRule(ReuseKind.WINDOW, 255))
READY, PENDING, GONE = LookupState.READY, LookupState.PENDING, LookupState.GONE


def layout_of(rules: Sequence[ReuseRule]) -> CacheLayout:
    groups = tuple(
        KVLayerGroupInfo(
            engine_group_idx=index,
            layer_indices=(index,),
            kv_size=1,
            nl=1,
            nb=1000,
            bs=128,
            nh=1,
            hs=16,
            element_size=1,
            block_stride_elems=2048,
            dtype="int8",
            layout="NB,BS,HS",
            tokens_per_block=128,
            slots_per_block=128,
            sw_size_tokens=-1,
            recurrent_state=False,
            rule=rule,
            num_shards=1,
            num_runs=1,
            run_bytes=2048,
        )
        for index, rule in enumerate(rules)
    )
    return CacheLayout(
        [
            WorkerGeometry(
                rank=0,
                pp_rank=0,
                pp_size=1,
                tp_rank=0,
                tp_size=1,
                chunk_tokens=CHUNK,
                engine_groups=engine_group_infos(groups),
                kernel_groups=groups,
            )
        ]
    )


class FakeStore:
    """Rows in a pool and in a tier that answers and reads when it is told to."""

    def __init__(self, tags: Sequence[str]) -> None:
        self.pool_ref = PoolRef("/nowhere", "1")
        self.has_tiers = True
        self.tags = tags
        self.in_pool: set[RowKey] = set()
        self.in_tier: set[RowKey] = set()
        self.answers = self.reads = True
        # Rows that turn out not to be there when they are wanted.
        self.bad: set[RowKey] = set()
        self.always_gone = False
        # Lookup -> the pins it holds.
        self.pins: dict[int, set[RowKey]] = {}
        self.loads: set[int] = set()
        self.calls: Counter[str] = Counter()
        self.asked: dict[int, tuple[list[bytes], int]] = {}
        self.narrowed: list[list[RowKey]] = []

    def lookup(
        self, lookup_id: int, chunk_hashes: Sequence[bytes], first_chunk: int
    ) -> LookupReply:
        self.calls["lookup"] += 1
        self.asked[lookup_id] = (list(chunk_hashes), first_chunk)
        known = self.in_pool | self.in_tier if self.answers else self.in_pool
        masks = [
            sum(1 << bit for bit, chunk in enumerate(chunk_hashes) if (chunk, tag) in known)
            for tag in self.tags
        ]
        chunks = set(chunk_hashes)
        self.pins[lookup_id] = {key for key in self.in_pool if key[0] in chunks}
        return LookupReply(READY if self.answers else PENDING, [[mask] for mask in masks])

    def narrow(self, lookup_id: int, keep: Sequence[RowKey]) -> LookupState:
        self.calls["narrow"] += 1
        self.narrowed.append(list(keep))
        if lookup_id not in self.pins:
            return GONE if keep else READY
        if not keep:
            del self.pins[lookup_id]
            return READY
        if self.reads:
            self.in_tier -= self.bad
            self.in_pool -= self.bad
            self.in_pool |= self.in_tier.intersection(keep)
        self.pins[lookup_id] = self.in_pool.intersection(keep)
        if self.always_gone or not set(keep) <= self.in_pool | self.in_tier:
            return GONE
        return READY if set(keep) <= self.in_pool else PENDING

    def release(self, lookup_id: int) -> None:
        self.pins.pop(lookup_id, None)

    def prepare_load(
        self, load_id: int, lookup_id: int, wanted: Sequence[RowKey]
    ) -> list[Row] | None:
        if not set(wanted) <= self.pins.pop(lookup_id, set()):
            return None
        self.loads.add(load_id)
        return [Row([SlotRef(0, 0, 8)], [1]) for _ in wanted]

    def complete_load(self, load_id: int, drop: Sequence[RowKey] = ()) -> None:
        self.loads.remove(load_id)

    def prepare_store(
        self, store_id: int, rows: Sequence[NewRow], prefix: Sequence[bytes]
    ) -> list[list[SlotRef]]:
        return []

    def complete_store(self, store_id: int, commits: Sequence[Commit]) -> None:
        raise AssertionError

    def clear(self, namespace: bytes) -> None:
        self.in_pool.clear()

    def stats(self) -> StoreStats:
        return StoreStats(0, 0, 0, 0, 0, 0, {}, 0)

    def check_integrity(self, loads: Collection[int], stores: Collection[int]) -> None:
        assert self.loads <= set(loads)

    def close(self) -> None:
        pass


class Request:
    """A request as vllm_view shows it."""

    def __init__(self, request_id: str, prompt: Sequence[int]) -> None:
        self.request_id = request_id
        self.all_tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.skip_reading = False
        self.uncacheable: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_tokens)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        return self.all_tokens[start:end]

    def extra(self) -> None:
        return None


class Clock:
    """What the module under test takes for ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class World:
    """A scheduler side over the fake store."""

    def __init__(
        self,
        clock: Clock,
        *,
        can_load: bool = True,
        hidden_tags: Sequence[str] = (),
        **config: Any,
    ) -> None:
        self.clock = clock
        self.layout = layout_of(RULES)
        self.store = FakeStore([group.tag for group in self.layout.groups])
        self.counters = Counters()
        self.scheduler = CacheScheduler(
            load_config({"lookup_timeout": TIMEOUT, **config}, {}).config,
            lambda prints, nonce: namespace_digest({"nonce": nonce}),
            can_load=can_load,
            can_store=True,
            counters=self.counters,
        )
        # Rows of hidden states that a hit needs too, in a store of their own.
        self.hidden = FakeStore(hidden_tags) if hidden_tags else None
        self.scheduler.attach(self.layout, self.store, self.hidden, hidden_tags)

    def keys_of(self, request: Request) -> list[list[RowKey]]:
        """The rows of a prompt that is known to the scheduler, by chunk."""
        state = self.scheduler._requests[request.request_id]
        assert self.scheduler._open is not None
        self.scheduler._open.extend_chain(state)
        return [[(chunk, tag) for tag in self.store.tags] for chunk in state.chain.hashes]

    def arrive(
        self, request: Request, pool_chunks: int = 0, tier_chunks: int = 0, min_hit: int = 0
    ) -> Request:
        """A new request, of which so many chunks are in the pool and so many in the tier."""
        self.scheduler.on_new_request(request, RequestParams(min_hit, None))
        by_chunk = self.keys_of(request)
        self.store.in_pool.update(*by_chunk[:pool_chunks])
        self.store.in_tier.update(*by_chunk[:tier_chunks])
        return request

    def match(self, request: Request, local_tokens: int = 0) -> int | None:
        return self.scheduler.match(request.request_id, local_tokens)

    def step(self) -> Any:
        return self.scheduler.build_step(StepView({}, lambda _: None, {}))

    def settle(self) -> None:
        """Nothing is held any more."""
        self.scheduler.check_integrity()
        assert self.store.pins == {}
        assert not self.store.loads
        assert self.scheduler._open is not None
        assert not self.scheduler._open._backlog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lookup_module, "time", clock)
    return clock


@pytest.fixture
def world(clock: Clock) -> Iterator[World]:
    world = World(clock)
    yield world
    for request_id in list(world.scheduler._requests):
        world.scheduler.on_finished(request_id)
    world.settle()


def prompt(seed: int, num_chunks: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_chunks * CHUNK + 10)


# ---- waiting ------------------------------------------------------------------------------------


def test_a_tier_is_waited_for_and_its_rows_are_fetched(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), pool_chunks=1, tier_chunks=3)
    world.store.answers = world.store.reads = False
    assert world.match(request) is None
    assert world.match(request) is None
    world.store.answers = True
    assert world.match(request) is None
    assert world.store.calls == Counter({"lookup": 3, "narrow": 1})
    assert world.match(request) is None
    assert world.store.calls == Counter({"lookup": 3, "narrow": 2})
    world.store.reads = True
    assert world.match(request) == 3 * CHUNK
    # Final: the same answer and the same pins, without a further question.
    calls = Counter(world.store.calls)
    assert world.match(request) == 3 * CHUNK
    assert world.store.calls == calls
    (pins,) = world.store.pins.values()
    # The window needs its last 255 tokens only.
    chunks = [chunk for chunk, _ in (rows[0] for rows in world.keys_of(request))]
    full, window = world.store.tags
    assert pins == {*((chunk, full) for chunk in chunks[:3]), (chunks[2], window)}
    assert (world.counters.lookups, world.counters.hit_tokens) == (1, 3 * CHUNK)
    assert world.counters.expired_lookups == 0


def test_a_lookup_behind_a_local_hit_asks_for_what_is_behind_it(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), tier_chunks=4)
    assert world.match(request, 2 * CHUNK) == 2 * CHUNK
    ((hashes, first_chunk),) = world.store.asked.values()
    assert first_chunk == 2
    assert hashes == [rows[0][0] for rows in world.keys_of(request)[2:4]]


def test_short_hits_are_not_worth_a_fetch(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), tier_chunks=1, min_hit=300)
    assert world.match(request) == 0
    assert world.store.narrowed == [[]]
    assert world.store.pins == {}


# ---- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_chunks", [0, 2])
def test_a_tier_that_does_not_answer_in_time_leaves_what_the_pool_had(
    world: World, pool_chunks: int
) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), pool_chunks, tier_chunks=4)
    world.store.answers = False
    assert world.match(request) is None
    world.clock.now += TIMEOUT - 0.01
    assert world.match(request) is None
    world.clock.now += 0.02
    assert world.match(request) == pool_chunks * CHUNK
    assert world.match(request) == pool_chunks * CHUNK
    assert world.counters.expired_lookups == 1
    assert (world.counters.lookups, world.counters.hit_tokens) == (1, pool_chunks * CHUNK)
    assert len(world.store.pins) == (1 if pool_chunks else 0)
    # An answer that comes later changes nothing for this request.
    world.store.answers = True
    assert world.match(request) == pool_chunks * CHUNK


def test_rows_that_do_not_come_in_time_leave_what_the_pool_had(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), pool_chunks=2, tier_chunks=4)
    world.store.answers = world.store.reads = False
    assert world.match(request) is None
    world.store.answers = True
    assert world.match(request) is None
    world.clock.now += TIMEOUT
    assert world.match(request) == 2 * CHUNK
    assert world.counters.expired_lookups == 1
    (pins,) = world.store.pins.values()
    assert len(pins) == 3


@pytest.mark.parametrize("answers_first", [False, True])
def test_what_the_pool_had_may_be_gone_by_the_deadline(world: World, answers_first: bool) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), pool_chunks=2, tier_chunks=4)
    world.store.answers = world.store.reads = False
    assert world.match(request, CHUNK) is None
    world.store.answers = answers_first
    assert world.match(request, CHUNK) is None
    world.store.in_pool.clear()
    world.clock.now += TIMEOUT
    assert world.match(request, CHUNK) == 0
    assert world.store.pins == {}


def test_a_tier_that_was_ready_at_once_may_still_be_late(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), tier_chunks=4)
    world.store.reads = False
    assert world.match(request, CHUNK) is None
    world.clock.now += TIMEOUT
    # Nothing is known of the pool alone.
    assert world.match(request, CHUNK) == 0
    assert world.store.pins == {}


def test_the_deadline_counts_from_the_first_question_of_vllm(world: World) -> None:
    world.store.answers = False
    request = world.arrive(Request("a", prompt(1, 4)), tier_chunks=4)
    for _ in range(3):
        world.step()
        world.clock.now += 10 * TIMEOUT
    assert world.store.calls["lookup"] == 3
    assert world.match(request) is None
    world.clock.now += TIMEOUT
    assert world.match(request) == 0
    assert world.counters.expired_lookups == 1


def test_a_question_whose_details_change_has_no_new_deadline(world: World) -> None:
    world.store.answers = False
    request = world.arrive(Request("a", prompt(1, 6)), tier_chunks=6)
    for turn in range(4):
        assert world.match(request, turn * 128) is None
        world.clock.now += TIMEOUT / 4
    assert world.match(request, 512) == 0
    assert world.counters.expired_lookups == 1
    assert world.store.pins == {}
    # The next attempt, after a preemption, has one of its own.
    assert world.match(request, 0) is None
    world.clock.now += TIMEOUT
    assert world.match(request, 0) == 0


# ---- rows that vanish ---------------------------------------------------------------------------


def test_rows_that_vanish_make_the_answer_smaller_until_it_holds(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 6)), tier_chunks=6)
    by_chunk = world.keys_of(request)
    answers = []
    # One more is found to be bad in every round, from the end of the prompt on.
    for rows in reversed(by_chunk[3:]):
        world.store.bad = {rows[0]}
        answers.append(world.match(request))
    assert answers == [None, None, None]
    world.store.bad.clear()
    assert world.match(request) == 3 * CHUNK
    assert world.counters.expired_lookups == 0


def test_an_answer_that_never_holds_ends_at_the_deadline(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 6)), pool_chunks=6)
    world.store.always_gone = True
    for _ in range(5):
        assert world.match(request) is None
    world.clock.now += TIMEOUT
    assert world.match(request) == 0
    assert world.store.pins == {}


def test_a_store_that_was_lost_is_a_miss(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 6)), pool_chunks=6)
    world.store.always_gone = True
    assert world.match(request) is None
    # What a client says of a server that does not answer.
    world.store.in_pool.clear()
    world.store.pins.clear()
    assert world.match(request) == 0


# ---- before vLLM asks ---------------------------------------------------------------------------


def test_requests_that_wait_have_their_rows_brought_meanwhile(world: World) -> None:
    requests = [Request(name, prompt(seed, 4)) for seed, name in enumerate("abc")]
    for request in requests:
        world.arrive(request, tier_chunks=4)
    world.store.answers = world.store.reads = False
    # One more a step is begun, and all that have begun go on.
    for calls in (1, 3, 6, 9):
        world.step()
        assert world.store.calls == Counter({"lookup": calls})
    world.store.answers = True
    world.step()
    world.store.reads = True
    world.step()
    assert world.store.calls == Counter({"lookup": 12, "narrow": 6})
    # All is there: nothing is left to do for them, and vLLM has its answer at once.
    world.step()
    for request in requests:
        assert world.match(request) == 4 * CHUNK
    assert world.store.calls == Counter({"lookup": 12, "narrow": 6})
    assert world.counters.lookups == 3


def test_what_vllm_asks_about_itself_is_not_prefetched(world: World) -> None:
    first, second = (Request(name, prompt(seed, 4)) for seed, name in enumerate("ab"))
    world.arrive(first, tier_chunks=4)
    world.arrive(second, tier_chunks=4)
    world.store.answers = False
    assert world.match(first) is None
    world.store.calls.clear()
    world.step()
    assert world.store.calls == Counter({"lookup": 1})
    assert len(world.store.asked) == 2
    world.scheduler.on_finished("b")
    world.step()
    assert world.store.calls == Counter({"lookup": 1})


def test_only_the_requests_that_wait_longest_are_prefetched(world: World) -> None:
    requests = [Request(f"r{number}", prompt(number, 2)) for number in range(20)]
    for request in requests:
        world.arrive(request, tier_chunks=2)
    for turn in range(20):
        world.step()
        assert len(world.store.pins) == min(turn + 1, 16)
    # One is asked for, one ends: the next two have their turn.
    assert world.match(requests[0]) == 2 * CHUNK
    world.scheduler.on_finished("r1")
    for _ in range(4):
        world.step()
    assert len(world.store.pins) == 17
    asked = {tuple(hashes) for hashes, _ in world.store.asked.values()}
    for request in requests[:18]:
        if request.request_id != "r1":
            assert tuple(rows[0][0] for rows in world.keys_of(request)[:2]) in asked
    assert len(asked) == 18


def test_a_prefetch_for_another_local_hit_is_let_go(world: World) -> None:
    request = world.arrive(Request("a", prompt(1, 4)), tier_chunks=4)
    world.step()
    (before,) = world.store.pins
    assert world.match(request, 128) == 4 * CHUNK - 128
    (after,) = world.store.pins
    assert before != after
    # The request goes on growing: another question.
    request.all_tokens += prompt(2, 1)
    assert world.match(request, 128) == 4 * CHUNK - 128
    assert len(world.store.pins) == 1


def test_without_tiers_nothing_is_asked_early(world: World) -> None:
    world.store.has_tiers = False
    request = world.arrive(Request("a", prompt(1, 4)), pool_chunks=4)
    world.step()
    assert world.store.calls == Counter()
    assert world.match(request) == 4 * CHUNK


@pytest.mark.parametrize("reason", ["skip_reading", "uncacheable", "producer"])
def test_what_may_not_be_loaded_is_not_fetched(clock: Clock, reason: str) -> None:
    world = World(clock, can_load=reason != "producer")
    request = Request("a", prompt(1, 4))
    request.skip_reading = reason == "skip_reading"
    request.uncacheable = "no identity" if reason == "uncacheable" else None
    world.arrive(request, tier_chunks=4)
    world.step()
    assert world.match(request) == 0
    assert world.store.calls == Counter()
    world.scheduler.on_finished("a")
    world.settle()


def test_a_request_that_cannot_be_keyed_is_no_trouble(world: World) -> None:
    request = Request("a", [-1] * 600)
    world.scheduler.on_new_request(request, RequestParams(0, None))
    world.step()
    assert world.match(request) == 0
    assert world.store.calls == Counter()


# ---- ends ---------------------------------------------------------------------------------------

STAGES = (
    "arrived",
    "prefetch waits",
    "prefetch reads",
    "prefetched",
    "asked",
    "reading",
    "matched",
    "expired",
    "nothing external",
    "allocated",
    "loading",
)


def bring_to(world: World, request: Request, stage: str) -> None:
    """Let a request come as far as ``stage``."""
    store, tables = world.store, [[7] * 20 for _ in RULES]
    world.arrive(request, pool_chunks=1, tier_chunks=4)
    store.answers = stage not in ("prefetch waits", "asked", "expired")
    store.reads = stage not in ("prefetch reads", "reading")
    if stage in ("prefetch waits", "prefetch reads", "prefetched"):
        world.step()
    elif stage != "arrived":
        expected = None if stage in ("asked", "reading", "expired") else 4 * CHUNK
        assert world.match(request) == expected
    if stage == "expired":
        world.clock.now += TIMEOUT
        assert world.match(request) == CHUNK
    if stage == "nothing external":
        world.scheduler.after_alloc(request.request_id, tables, 0)
        assert store.pins == {}
    if stage in ("allocated", "loading"):
        world.scheduler.after_alloc(request.request_id, tables, 4 * CHUNK)
        assert store.pins == {}
        assert len(store.loads) == 1
    if stage == "loading":
        (op,) = world.step().loads
        assert len(op.objects) == 5


@pytest.mark.parametrize("end", ["finished", "replaced", "reset"])
@pytest.mark.parametrize("stage", STAGES)
def test_pins_end_with_their_request_at_every_stage(world: World, stage: str, end: str) -> None:
    request = Request("a", prompt(1, 5))
    bring_to(world, request, stage)
    match end:
        case "finished":
            world.scheduler.on_finished("a")
        case "replaced":
            # Another request under the same id, which asks for nothing.
            other = Request("a", prompt(2, 5))
            other.skip_reading = True
            world.scheduler.on_new_request(other, RequestParams(0, None))
        case "reset":
            world.scheduler.reset()
    assert world.store.pins == {}
    world.step()
    if stage in ("allocated", "loading"):
        # The worker reads until it says that it does not.
        (load_id,) = world.store.loads
        world.scheduler.on_worker_meta(WorkerMeta(loads=[LoadReport(load_id, 0, True)]))
    world.scheduler.on_finished("a")
    world.settle()


def test_random_lives_hold_no_pins_at_their_end(world: World) -> None:
    rng = random.Random(11)
    names = itertools.count()
    living: dict[str, Request] = {}
    for _ in range(400):
        match rng.randrange(8):
            case 0 | 1:
                request = Request(f"r{next(names)}", prompt(rng.randrange(12), 4))
                living[request.request_id] = request
                world.arrive(request, rng.randrange(3), rng.randrange(5))
            case 2 | 3 if living:
                request = rng.choice(list(living.values()))
                answer = world.match(request, 128 * rng.randrange(3))
                assert answer is None or answer >= 0
            case 4 if living:
                request_id = rng.choice(list(living))
                del living[request_id]
                world.scheduler.on_finished(request_id)
            case 5:
                world.store.answers, world.store.reads = rng.random() < 0.5, rng.random() < 0.5
                world.clock.now += rng.choice([0.0, 1.0, TIMEOUT])
            case 6 if world.store.in_tier | world.store.in_pool:
                lost = set(rng.sample(sorted(world.store.in_tier | world.store.in_pool), 1))
                world.store.in_tier -= lost
                world.store.in_pool -= lost
            case _:
                world.step()
        # A lookup a request at most.
        assert len(world.store.pins) <= len(living)
    for request_id in living:
        world.scheduler.on_finished(request_id)
    world.settle()


# ---- hidden states that are needed with the KV --------------------------------------------------

LAYERS = ("hs0-bfloat16-64", "hsm1-bfloat16-64")
TABLES = [[7] * 20 for _ in RULES]


@pytest.fixture
def both(clock: Clock) -> Iterator[World]:
    world = World(clock, hidden_tags=LAYERS)
    yield world
    for request_id in list(world.scheduler._requests):
        world.scheduler.on_finished(request_id)
    world.settle()
    assert world.hidden is not None
    assert world.hidden.pins == {}


def add_rows(world: World, request: Request, chunks: Sequence[int], *, tier: bool = False) -> None:
    """Rows of all layers, or of the one by the number of chunks that it has."""
    names = [rows[0][0] for rows in world.keys_of(request)]
    keys = {
        (names[chunk], tag)
        for tag, count in zip(LAYERS, chunks, strict=True)
        for chunk in range(count)
    }
    (world.hidden.in_tier if tier else world.hidden.in_pool).update(keys)


def test_a_hit_reaches_as_far_as_kv_and_rows_of_every_layer(both: World) -> None:
    request = both.arrive(Request("a", prompt(1, 6)), pool_chunks=5)
    assert both.match(request) == 0
    both.scheduler.on_finished("a")
    for chunks, answer in (((6, 0), 0), ((6, 3), 3), ((4, 6), 4), ((6, 6), 5)):
        both.hidden.in_pool.clear()
        request = both.arrive(Request("a", prompt(1, 6)))
        add_rows(both, request, chunks)
        assert both.match(request) == answer * CHUNK
        assert both.match(request) == answer * CHUNK
        names = [rows[0][0] for rows in both.keys_of(request)]
        pins = {(name, tag) for name in names[:answer] for tag in LAYERS}
        assert list(both.hidden.pins.values()) == ([pins] if pins else [])
        assert len(both.store.pins) == (answer > 0)


def test_rows_of_what_the_engine_has_itself_are_needed_too(both: World) -> None:
    """Who reads them reads those of the whole prefix."""
    request = both.arrive(Request("a", prompt(1, 5)), pool_chunks=5)
    add_rows(both, request, (5, 5))
    assert both.match(request, 2 * CHUNK) == 3 * CHUNK
    ((hashes, first_chunk),) = both.hidden.asked.values()
    assert (len(hashes), first_chunk) == (5, 0)
    (pins,) = both.hidden.pins.values()
    assert len(pins) == 5 * len(LAYERS)
    first = both.keys_of(request)[0][0][0]
    both.hidden.in_pool.discard((first, LAYERS[1]))
    assert both.match(request, CHUNK) == 0
    assert both.match(request, CHUNK + 5) == 0


def test_rows_in_a_tier_are_waited_for_until_the_deadline(both: World) -> None:
    request = both.arrive(Request("a", prompt(1, 5)), pool_chunks=5)
    add_rows(both, request, (2, 2))
    add_rows(both, request, (5, 5), tier=True)
    both.hidden.answers = both.hidden.reads = False
    assert both.match(request) is None
    both.hidden.answers = True
    assert both.match(request) is None
    assert both.match(request) is None
    both.hidden.reads = True
    assert both.match(request) == 5 * CHUNK


@pytest.mark.parametrize("answers_first", [False, True])
def test_rows_that_do_not_come_in_time_leave_what_the_pools_had(
    both: World, answers_first: bool
) -> None:
    request = both.arrive(Request("a", prompt(1, 5)), pool_chunks=4)
    add_rows(both, request, (3, 2))
    add_rows(both, request, (5, 5), tier=True)
    both.hidden.answers = both.hidden.reads = False
    assert both.match(request) is None
    both.hidden.answers = answers_first
    assert both.match(request) is None
    both.clock.now += TIMEOUT
    assert both.match(request) == 2 * CHUNK
    assert len(both.hidden.pins) == len(both.store.pins) == 1


def test_rows_that_vanish_are_looked_for_again(both: World) -> None:
    request = both.arrive(Request("a", prompt(1, 5)), pool_chunks=5)
    add_rows(both, request, (5, 5), tier=True)
    both.hidden.bad = {(both.keys_of(request)[4][0][0], LAYERS[0])}
    assert both.match(request) is None
    assert both.match(request) == 4 * CHUNK
    both.hidden.always_gone = True
    other = both.arrive(Request("b", prompt(2, 5)), pool_chunks=5)
    add_rows(both, other, (5, 5))
    assert both.match(other) is None
    both.clock.now += TIMEOUT
    assert both.match(other) == 0
    assert len(both.hidden.pins) == len(both.store.pins) == 1


def test_rows_stay_pinned_until_the_request_has_run(both: World) -> None:
    request = both.arrive(Request("a", prompt(1, 4)), pool_chunks=4)
    add_rows(both, request, (4, 4))
    assert both.match(request) == 4 * CHUNK
    both.scheduler.after_alloc("a", TABLES, 4 * CHUNK)
    assert both.store.pins == {}
    (pins,) = both.hidden.pins.values()
    assert len(pins) == 4 * len(LAYERS)
    (op,) = both.step().loads
    both.scheduler.on_worker_meta(WorkerMeta(loads=[LoadReport(op.load_id, 0, True)]))
    # vLLM comes back after the load, and the request's first step is built.
    both.scheduler.after_alloc("a", TABLES, 0)
    scheduled = StepView({"a": 10}, lambda _: TABLES, {})
    both.scheduler.build_step(scheduled)
    both.scheduler.build_step(scheduled)
    assert len(both.hidden.pins) == 1
    # It has an output: its first step is done.
    request.all_tokens.append(1)
    both.scheduler.build_step(scheduled)
    assert both.hidden.pins == {}


@pytest.mark.parametrize("end", ["finished", "reset", "preempted"])
def test_rows_are_let_go_with_their_request(both: World, end: str) -> None:
    request = both.arrive(Request("a", prompt(1, 4)), pool_chunks=4)
    add_rows(both, request, (4, 4))
    assert both.match(request) == 4 * CHUNK
    both.scheduler.after_alloc("a", TABLES, 4 * CHUNK)
    (op,) = both.step().loads
    both.scheduler.on_worker_meta(WorkerMeta(loads=[LoadReport(op.load_id, 0, True)]))
    (before,) = both.hidden.pins
    if end == "finished":
        both.scheduler.on_finished("a")
    elif end == "reset":
        both.scheduler.reset()
    else:
        assert both.match(request) == 4 * CHUNK
        both.scheduler.after_alloc("a", TABLES, 4 * CHUNK)
        (op,) = both.step().loads
        both.scheduler.on_worker_meta(WorkerMeta(loads=[LoadReport(op.load_id, 0, True)]))
    assert before not in both.hidden.pins
    assert len(both.hidden.pins) == (end == "preempted")


def test_random_prefixes_are_answered_as_a_simple_model_says(both: World) -> None:
    rng = random.Random(5)
    for turn in range(200):
        request = Request(f"r{turn}", prompt(turn, 4))
        kv, layers = rng.randrange(5), (rng.randrange(5), rng.randrange(5))
        local = rng.choice([0, 0, 128, CHUNK, 2 * CHUNK + 128])
        both.arrive(request, pool_chunks=kv)
        add_rows(both, request, layers, tier=rng.random() < 0.5)
        boundary = min(kv, *layers) * CHUNK
        assert both.match(request, local) == max(0, boundary - local)
        both.scheduler.on_finished(request.request_id)
