"""The scheduler side: vLLM's hooks, in the order in which vLLM calls them.

The only client of the cache on the KV path. It looks up, pins and reserves; workers copy what a
step's metadata names and report back; then rows are published or dropped. Nothing here waits.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_connector import metadata
from lmcache_connector.config import Config, RequestParams
from lmcache_connector.counters import Counters
from lmcache_connector.groups import ReuseKind
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.scheduler import allocate
from lmcache_connector.scheduler.ledger import Ledger
from lmcache_connector.scheduler.lookup import Lookups
from lmcache_connector.scheduler.request import (
    Lookup,
    PendingLoad,
    PendingStore,
    RequestState,
    RequestView,
    StepView,
)
from lmcache_connector.storage.base import Commit, NewRow, RowKey, Store

logger = init_logger(__name__)

_NO_CHUNK = 1 << 62  # RequestState.next_chunk of a request that stores nothing more
# How far behind a request's newest chunk its last stored one is looked for.
_CHUNKS_IN_FLIGHT = 64
# The store's own figures are not worth a call per step.
_STATS_SECONDS = 0.5


class CacheScheduler:
    """State machine of all requests of one engine core.

    ``namespace`` maps the ranks' fingerprints and a reset's nonce to the digest that chunk hashes
    are chained from. ``checkpoint_groups`` are the engine groups whose kernels keep states inside
    a prefill step.
    """

    def __init__(
        self,
        config: Config,
        namespace: Callable[[Sequence[str], str], bytes],
        *,
        can_load: bool,
        can_store: bool,
        counters: Counters,
        checkpoint_groups: frozenset[int] = frozenset(),
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._can_load = can_load
        self._can_store = can_store
        self._checkpoint_groups = checkpoint_groups
        self.ledger = Ledger(counters)
        self.null_block_id = 0
        # What there is once the workers' geometry is known.
        self._open: Lookups | None = None
        self._next_stats = 0.0
        self._requests: dict[str, RequestState] = {}
        self._stores: dict[int, PendingStore] = {}
        self._loads: dict[int, PendingLoad] = {}
        self._new_loads: list[metadata.LoadOp] = []
        # (chunk hash, group tag) of rows that a store in flight will publish.
        self._storing: set[RowKey] = set()
        self._ids = itertools.count(1)
        self._generation = 0
        self._reset_nonce = ""
        self._trusts_local_hits = True

    def attach(
        self,
        layout: CacheLayout,
        store: Store,
        hidden: Store | None = None,
        hidden_tags: Sequence[str] = (),
    ) -> None:
        """Open for business. Until then everything is a miss. ``hidden`` has rows of all of
        ``hidden_tags``, in this order, that a hit needs too."""
        database = TokenDatabase(self.namespace(layout), layout.chunk_tokens)
        self._open = Lookups(
            self._config, layout, store, database, self._ids, self.ledger, hidden, hidden_tags
        )

    @property
    def chunk_namespace(self) -> bytes:
        """What chunk hashes are chained from now; empty before ``attach``."""
        return self._open.database.namespace if self._open is not None else b""

    def namespace(self, layout: CacheLayout) -> bytes:
        """The 32 bytes that this engine's chunk hashes are chained from."""
        return self._namespace(layout.fingerprints, self._reset_nonce)

    # ---- requests -----------------------------------------------------------------------------

    def on_new_request(self, view: RequestView, params: RequestParams) -> None:
        """A request arrived; one with the same id that is still known is replaced."""
        if self._open is None:
            return
        self.on_finished(view.request_id)
        state = self._requests[view.request_id] = RequestState(
            view, ChunkChain(self._open.database), params, num_prompt_tokens=view.num_prompt_tokens
        )
        if self._can_load and not view.skip_reading and not view.uncacheable:
            self._open.expect(state)

    def knows(self, request_id: str) -> bool:
        """Whether the request arrived and has not ended."""
        return request_id in self._requests

    def match(self, request_id: str, local_tokens: int) -> int | None:
        """Tokens that a load can add to the local hit; None: ask again next step.

        Idempotent: repeated calls give the same answer and hold the same pins.
        """
        state = self._requests.get(request_id)
        if state is None:
            return 0
        view = state.view
        state.next_chunk = 0
        state.attempt += 1
        if local_tokens and not self._trusts_local_hits:
            state.next_chunk = _NO_CHUNK
            return 0
        if view.skip_reading or not self._can_load or state.bypass or self._open is None:
            return 0
        if self._reason_uncacheable(state):
            return 0
        boundary = self._open.find(state, local_tokens)
        return None if boundary is None else boundary - local_tokens

    def _reason_uncacheable(self, state: RequestState) -> str | None:
        reason = state.view.uncacheable
        if reason is not None:
            warn_every(logger, reason, 600.0, f"not cached: {reason}")
        return reason

    def after_alloc(
        self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Blocks were allocated; vLLM loads exactly ``external_tokens`` more, or nothing.

        May come a second time, with 0, after the load.
        """
        state, opened = self._requests.get(request_id), self._open
        if external_tokens == 0:
            if state is not None and opened is not None:
                opened.drop(state)
            return
        # From here on vLLM waits for a report: whatever is wrong becomes a failed load.
        load_id, num_ranks, incarnation = next(self._ids), 1, ""
        objects: list[metadata.ObjectOp] = []
        rows: list[RowKey] = []
        if opened is not None:
            num_ranks, incarnation = opened.layout.num_ranks, opened.store.pool_ref.incarnation
            if state is not None and state.lookup is not None:
                rows = state.lookup.keep
                objects = self._plan_load(opened, state.lookup, load_id, block_ids, external_tokens)
        if state is not None:
            if opened is not None:
                opened.load(state)
            state.load_id = load_id
        deadline = time.monotonic() + self._config.load_timeout
        self._new_loads.append(metadata.LoadOp(load_id, request_id, incarnation, deadline, objects))
        self._loads[load_id] = PendingLoad(
            request_id, set(range(num_ranks)), rows if objects else [], external_tokens
        )

    def _plan_load(
        self,
        opened: Lookups,
        lookup: Lookup,
        load_id: int,
        block_ids: Sequence[Sequence[int]],
        external_tokens: int,
    ) -> list[metadata.ObjectOp]:
        """What is copied for ``lookup.keep``; nothing when that cannot be done as planned."""
        if lookup.boundary != lookup.local_tokens + external_tokens:
            # vLLM shortened the answer: what was looked up does not end there.
            return []
        objects = allocate.load_objects(
            opened.layout, lookup.boundary, lookup.local_tokens, block_ids, self.null_block_id
        )
        if not objects:
            return []
        stored = opened.store.prepare_load(load_id, lookup.lookup_id, lookup.keep)
        if stored is None:
            return []
        for obj, row in zip(objects, stored, strict=True):
            obj.slots[:] = row.slots
            obj.digests[:] = row.digests
        return objects

    # ---- steps --------------------------------------------------------------------------------

    def build_step(self, step: StepView) -> metadata.StepMeta:
        """What the workers are asked to copy in this step."""
        loads, self._new_loads = self._new_loads, []
        opened = self._open
        if opened is None:
            return metadata.StepMeta(loads=loads)
        opened.prefetch()
        stores = []
        for request_id, num_scheduled in step.scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            if state.reading is not None and state.view.num_tokens > state.reading.num_tokens:
                opened.read(state)
            end = state.view.num_computed_tokens + num_scheduled
            if self._can_store and (op := self._plan_store(opened, state, step, end)):
                stores.append(op)
        return metadata.StepMeta(opened.store.pool_ref, stores, loads)

    def _new_chunks(self, opened: Lookups, state: RequestState, step: StepView, end: int) -> range:
        """Chunks that this step completes and that are worth keeping."""
        view = state.view
        if view.num_prompt_tokens != state.num_prompt_tokens:
            # A session went on: what it had not computed by then may be other tokens now.
            state.chain.truncate(view.num_computed_tokens)
            state.num_prompt_tokens = view.num_prompt_tokens
        # A chunk that a draft ends is stored once the draft has been accepted.
        limit = end - len(step.drafts.get(view.request_id, ()))
        if not self._config.save_decode_cache:
            limit = min(limit, view.num_prompt_tokens)
        if state.params.max_offload_tokens is not None:
            limit = min(limit, state.params.max_offload_tokens)
        end_chunk = limit // opened.layout.chunk_tokens
        if end_chunk <= state.next_chunk or self._reason_uncacheable(state):
            return range(0)
        chunks = range(state.next_chunk, end_chunk)
        state.next_chunk = end_chunk
        is_named = len(state.chain.hashes) >= end_chunk or opened.extend_chain(state)
        return chunks if is_named else range(0)

    def _plan_store(
        self, opened: Lookups, state: RequestState, step: StepView, end: int
    ) -> metadata.StoreOp | None:
        """Reserve slots for new chunks."""
        view, chunks = state.view, self._new_chunks(opened, state, step, end)
        block_ids = step.block_ids(view.request_id) if chunks else None
        if block_ids is None:
            return None
        objects, parts = allocate.store_objects(
            opened.layout,
            state.chain.hashes,
            chunks,
            step_end=end,
            block_ids=block_ids,
            null_block_id=self.null_block_id,
            boundary_states=[
                (group, block, boundary)
                for group, block, boundary in step.boundary_states.get(view.request_id, ())
                # A state inside the step is one only where the model's kernels leave it there.
                if boundary == end or group in self._checkpoint_groups
            ],
            wanted=lambda chunk_hash, group: (chunk_hash, group) not in self._storing,
        )
        if not parts:
            return None
        store_id = next(self._ids)
        prefix = state.chain.hashes[max(0, chunks.start - _CHUNKS_IN_FLIGHT) : chunks.start]
        rows = [NewRow(part.sizes, part.key) for part in parts]
        slots = opened.store.prepare_store(store_id, rows, prefix)
        refused = parts[len(slots) :]
        self.ledger.dropped(refused)
        if any(opened.layout.by_tag[part.group].rule.kind is ReuseKind.FULL for part in refused):
            # Without this chunk nothing behind it can be served: the head keeps the room.
            state.next_chunk = _NO_CHUNK
        for obj, reserved in zip(objects, slots, strict=False):
            obj.slots[:] = reserved
        # Rows that are there already get no slots.
        objects = [obj for obj in objects if obj.slots]
        parts = [part for part, reserved in zip(parts, slots, strict=False) if reserved]
        if not parts:
            return None
        self._storing.update(part.key for part in parts if part.key is not None)
        self._stores[store_id] = PendingStore(
            generation=self._generation,
            request_id=view.request_id,
            attempt=state.attempt,
            num_prompt_tokens=view.num_prompt_tokens,
            waiting_ranks=set(range(opened.layout.num_ranks)),
            parts=parts,
            digests=[[None if size else 0 for size in part.sizes] for part in parts],
        )
        return metadata.StoreOp(store_id, opened.store.pool_ref.incarnation, objects)

    def on_worker_meta(self, meta: metadata.WorkerMeta) -> None:
        """Ranks are done with copies: publish, drop or release what they touched."""
        for store in meta.stores:
            self._on_store_report(store)
        for load in meta.loads:
            self._on_load_report(load)

    def _on_store_report(self, report: metadata.StoreReport) -> None:
        pending, opened = self._stores.get(report.store_id), self._open
        if pending is None or opened is None:
            return
        pending.waiting_ranks.discard(report.rank)
        parts = zip(pending.parts, pending.digests, report.digests, strict=True)
        for part, digests, digest in parts:
            shard = opened.layout.by_tag[part.group].owned_shard.get(report.rank)
            if shard is not None and part.sizes[shard]:
                digests[shard] = digest
        if not pending.waiting_ranks:
            del self._stores[report.store_id]
            self._finish_store(opened.store, report.store_id, pending)

    def _finish_store(self, store: Store, store_id: int, pending: PendingStore) -> None:
        self._bind_keys(pending)
        commits = []
        for part, digests in zip(pending.parts, pending.digests, strict=True):
            if part.chunk_hash is None:
                self.ledger.dropped([part])
                continue
            if not part.late:
                self._storing.discard((part.chunk_hash, part.group))
            whole = [digest for digest in digests if digest is not None]
            if pending.generation == self._generation and len(whole) == len(digests):
                commits.append(Commit(part.index, part.chunk_hash, part.parent, part.group, whole))
                self.ledger.stored(part)
            else:
                self.ledger.dropped([part])
        store.complete_store(store_id, commits)

    def _bind_keys(self, pending: PendingStore) -> None:
        """Give parts whose tokens were not known when the step was built their keys."""
        if all(part.chunk_hash is not None for part in pending.parts):
            return
        state = self._requests.get(pending.request_id)
        if (
            state is None
            or pending.generation != self._generation
            # The tokens at these positions may not be those that were fed to the model.
            or pending.attempt != state.attempt
            or pending.num_prompt_tokens != state.view.num_prompt_tokens
            or self._open is None
            or not self._open.extend_chain(state)
        ):
            return
        pending.bind(state.chain.hashes)

    def _on_load_report(self, report: metadata.LoadReport) -> None:
        pending, opened = self._loads.get(report.load_id), self._open
        if pending is None:
            return
        pending.waiting_ranks.discard(report.rank)
        pending.ok &= report.ok
        pending.corrupt.update(report.corrupt)
        if pending.waiting_ranks:
            return
        del self._loads[report.load_id]
        if opened is not None and pending.rows:
            drop = [pending.rows[index] for index in sorted(pending.corrupt)]
            opened.store.complete_load(report.load_id, drop)
        state = self._requests.get(pending.request_id)
        if state is not None and state.load_id == report.load_id:
            state.load_id = None
            state.bypass |= not pending.ok
        if not pending.ok:
            self.ledger.load_failed(pending)
        elif opened is not None:
            self.ledger.loaded(pending, opened.layout)

    # ---- ends ---------------------------------------------------------------------------------

    def on_finished(self, request_id: str) -> None:
        """The request ended, at whatever point. Copies in flight end by their reports."""
        state = self._requests.get(request_id)
        if state is None:
            return
        for pending in self._stores.values():
            if pending.request_id == request_id:
                self._bind_keys(pending)
        self._forget_lookups(state)
        del self._requests[request_id]

    def _forget_lookups(self, state: RequestState) -> None:
        if self._open is not None:
            self._open.drop(state)
            self._open.read(state)

    def has_pending_work(self) -> bool:
        """Whether workers' reports are awaited, so that an idle engine must keep stepping."""
        return bool(self._stores or self._loads)

    def reset(self, *, local_hits_are_new: bool | None = None) -> None:
        """Forget this engine's view at once. Keys of later stores and lookups are new ones.

        While vLLM may still hit what is of other weights, nothing that begins with a hit of its
        own is kept, nor added to. None: whether it may is as before."""
        self._generation += 1
        if local_hits_are_new is not None:
            self._trusts_local_hits = local_hits_are_new
        self._reset_nonce = os.urandom(16).hex()
        self._storing.clear()
        if (opened := self._open) is None:
            return
        namespace = self.namespace(opened.layout)
        database = TokenDatabase(namespace, opened.layout.chunk_tokens)
        for state in self._requests.values():
            self._forget_lookups(state)
            state.chain = ChunkChain(database)
            # Its blocks are of before: not kept under the new keys, unless it is recomputed.
            state.next_chunk = _NO_CHUNK
        opened.store.clear(namespace)
        if opened.hidden is not None:
            opened.hidden.clear(namespace)
        opened.database = database

    def take_counters(self) -> dict[str, Any]:
        """Plain counters since the last call."""
        stats = None
        if self._open is not None and time.monotonic() >= self._next_stats:
            self._next_stats = time.monotonic() + _STATS_SECONDS
            stats = self._open.store.stats()
        return self.ledger.take(stats)

    def check_integrity(self) -> None:
        """Raise AssertionError when the request table does not fit what is in flight."""
        expected = {
            part.key
            for pending in self._stores.values()
            if pending.generation == self._generation
            for part in pending.parts
            if part.key is not None and not part.late
        }
        assert self._storing == expected, (self._storing, expected)
        if self._open is not None:
            self._open.store.check_integrity(self._loads.keys(), self._stores.keys())
            if self._open.hidden is not None:
                self._open.hidden.check_integrity((), ())

    def shutdown(self) -> None:
        """Close the stores."""
        opened, self._open = self._open, None
        if opened is not None:
            if opened.hidden is not None:
                opened.hidden.close()
            opened.store.close()
