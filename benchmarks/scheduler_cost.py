#!/usr/bin/env python3
"""What the scheduler side costs a step: first lookup, later polls, step metadata, by prompt size.

usage: benchmarks/scheduler_cost.py

A model of three object groups (full attention, a 1024-token window, a recurrent state) on eight
tensor-parallel ranks; everything that is asked for is there. Beside it, in the same run: SHA-256
over the same number of token bytes, the least that any content hash costs.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

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
from lmcache_connector.metadata import LoadReport, PoolRef, StoreReport, WorkerMeta
from lmcache_connector.scheduler.request import StepView
from lmcache_connector.scheduler.scheduler import CacheScheduler
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool

CHUNK = 256
BLOCK = 256
RANKS = 8
PAGE_BYTES = 4096
RULES = (FULL, ReuseRule(ReuseKind.WINDOW, 1023), STATE)
REPEATS = 5
WARM_REQUESTS = 256


class _Request:
    """A request as vllm_view shows it."""

    skip_reading = False
    uncacheable = None

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        self.request_id = request_id
        self._tokens = tokens
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0

    def tokens(self, start: int, end: int) -> Sequence[int]:
        return self._tokens[start:end]

    def extra(self) -> None:
        return None


def _kernel_group(index: int, rule: ReuseRule) -> KVLayerGroupInfo:
    slots = 1 if rule.kind is ReuseKind.STATE else BLOCK
    return KVLayerGroupInfo(
        engine_group_idx=index,
        layer_indices=(index,),
        kv_size=1,
        nl=1,
        nb=1 << 20,
        bs=slots,
        nh=1,
        hs=PAGE_BYTES // slots,
        element_size=1,
        block_stride_elems=PAGE_BYTES,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=BLOCK,
        slots_per_block=slots,
        sw_size_tokens=-1,
        recurrent_state=rule.kind is ReuseKind.STATE,
        rule=rule,
        num_shards=RANKS,
        num_runs=1,
        run_bytes=PAGE_BYTES,
    )


def _scheduler() -> CacheScheduler:
    groups = tuple(_kernel_group(index, rule) for index, rule in enumerate(RULES))
    layout = CacheLayout(
        [
            WorkerGeometry(
                rank=rank,
                pp_rank=0,
                pp_size=1,
                tp_rank=rank,
                tp_size=RANKS,
                chunk_tokens=CHUNK,
                engine_groups=engine_group_infos(groups),
                kernel_groups=groups,
            )
            for rank in range(RANKS)
        ]
    )
    pool = MemoryPool(1 << 30)
    scheduler = CacheScheduler(
        load_config({}, {}).config,
        lambda fingerprints, nonce: namespace_digest({"nonce": nonce}),
        can_load=True,
        can_store=True,
        counters=Counters(),
    )
    engine = StorageEngine(pool)
    for extent in range(len(pool.extents)):
        engine.mark_ready(extent)
    namespace = scheduler.namespace(layout)
    session = engine.open_session(namespace, layout.shards(), PoolRef("/nowhere", "benchmark"))
    scheduler.attach(layout, session)
    return scheduler


def _tables(num_tokens: int) -> list[list[int]]:
    blocks = list(range(1, 2 + num_tokens // BLOCK))
    return [blocks for _ in RULES]


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _fill(scheduler: CacheScheduler, request: _Request) -> None:
    """Store every chunk of the prompt, every state included, in steps of one chunk."""
    params = RequestParams(0, None)
    scheduler.on_new_request(request, params)
    scheduler.match(request.request_id, 0)
    tables = _tables(request.num_tokens)
    while request.num_computed_tokens < request.num_tokens:
        count = min(CHUNK, request.num_tokens - request.num_computed_tokens)
        step = StepView({request.request_id: count}, lambda _: tables, {})
        for op in scheduler.build_step(step).stores:
            reports = [
                StoreReport(op.store_id, rank, [1] * len(op.objects)) for rank in range(RANKS)
            ]
            scheduler.on_worker_meta(WorkerMeta(stores=reports))
        request.num_computed_tokens += count
    scheduler.on_finished(request.request_id)


def _measure(num_tokens: int) -> dict[str, float]:
    scheduler = _scheduler()
    tokens = [(7 * index) % 50_000 for index in range(num_tokens + 32)]
    _fill(scheduler, _Request("fill", tokens))
    # Requests in decode: the cost of a step must not grow with them.
    for index in range(WARM_REQUESTS):
        idle = _Request(f"idle-{index}", tokens[:300])
        scheduler.on_new_request(idle, RequestParams(0, None))
    runs = [_one_request(scheduler, f"r{repeat}", tokens) for repeat in range(REPEATS)]
    scheduler.shutdown()
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _one_request(scheduler: CacheScheduler, request_id: str, tokens: list[int]) -> dict[str, float]:
    """Seconds of each hook over the life of one request that hits all but its last tokens."""
    num_tokens = len(tokens) - 32
    request = _Request(request_id, tokens)
    scheduler.on_new_request(request, RequestParams(0, None))
    seconds = {"first": _seconds(lambda: scheduler.match(request_id, 0))}
    assert scheduler.match(request_id, 0) == num_tokens
    seconds["poll"] = _seconds(lambda: [scheduler.match(request_id, 0) for _ in range(100)]) / 100
    tables = _tables(len(tokens))
    scheduler.after_alloc(request_id, tables, num_tokens)
    (load,) = scheduler.build_step(StepView({}, lambda _: None, {})).loads
    reports = [LoadReport(load.load_id, rank, True) for rank in range(RANKS)]
    scheduler.on_worker_meta(WorkerMeta(loads=reports))
    request.num_computed_tokens = num_tokens
    scheduler.build_step(StepView({request_id: 32}, lambda _: tables, {}))
    decode = StepView({request_id: 1}, lambda _: tables, {})
    seconds["step"] = _seconds(lambda: [scheduler.build_step(decode) for _ in range(100)]) / 100
    content = array("I", tokens[:num_tokens]).tobytes()
    seconds["sha256"] = _seconds(lambda: hashlib.sha256(content).digest())
    scheduler.on_finished(request_id)
    return seconds


def main() -> None:
    print(f"scheduler cost, {platform.processor() or platform.machine()}, {RANKS} ranks, ", end="")
    print(f"{len(RULES)} groups, chunk {CHUNK}, median of {REPEATS}")
    print(f"{'tokens':>8} {'first ms':>9} {'/ sha256':>9} {'poll us':>8} {'decode step us':>15}")
    for num_tokens in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17):
        found = _measure(num_tokens)
        print(
            f"{num_tokens:>8} {found['first'] * 1e3:>9.2f} "
            f"{found['first'] / found['sha256']:>9.2f} {found['poll'] * 1e6:>8.1f} "
            f"{found['step'] * 1e6:>15.1f}"
        )
    print("budget at 131072 tokens: first lookup <= 5 ms, each later poll <= 50 us")


if __name__ == "__main__":
    main()
