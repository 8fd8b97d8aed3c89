"""What the cache can add to a request: found over as many steps as the tiers need, then held."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from lmcache_connector.config import Config
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.scheduler import allocate
from lmcache_connector.scheduler.hit import servable_boundary
from lmcache_connector.scheduler.ledger import Ledger
from lmcache_connector.scheduler.request import Lookup, RequestState
from lmcache_connector.storage.base import LookupState, RowKey, Store

logger = init_logger(__name__)

# Requests that wait for vLLM's attention and have their rows brought into the pool meanwhile.
# Each pins what it has found.
_NUM_PREFETCHED = 16


class Lookups:
    """All lookups of one store. No call waits."""

    def __init__(
        self,
        config: Config,
        layout: CacheLayout,
        store: Store,
        ids: Iterator[int],
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._layout = layout
        self._store = store
        self._ids = ids
        self._ledger = ledger
        # Requests that vLLM has not asked about yet, oldest first.
        self._backlog: dict[str, RequestState] = {}

    def expect(self, state: RequestState) -> None:
        """A request arrived. What it needs from a tier is worth fetching before its turn."""
        if self._store.has_tiers:
            self._backlog[state.view.request_id] = state

    def prefetch(self) -> None:
        """Go on with lookups of the requests that wait longest; once per step."""
        for state in itertools.islice(self._backlog.values(), _NUM_PREFETCHED):
            is_new = state.lookup is None
            self._find(state, 0)
            if is_new:
                return  # To hash a long prompt takes milliseconds: one a step.

    def find(self, state: RequestState, local_tokens: int) -> int | None:
        """The boundary that a load can reach; None: a tier is still answering."""
        self._backlog.pop(state.view.request_id, None)
        lookup = self._find(state, local_tokens)
        if lookup.asked is None:
            lookup.asked = time.monotonic()
        if lookup.boundary is None:
            if time.monotonic() - lookup.asked < self._config.lookup_timeout:
                return None
            self._ledger.counters.expired_lookups += 1
            self._expire(state, lookup)
        assert lookup.boundary is not None
        if not state.counted:
            state.counted = True
            self._ledger.lookup(lookup)
        return lookup.boundary

    def drop(self, state: RequestState) -> None:
        """Let go of what a request's lookup holds."""
        self._backlog.pop(state.view.request_id, None)
        self._release(state)

    def _release(self, state: RequestState) -> None:
        if state.lookup is not None:
            self._store.release(state.lookup.lookup_id)
            state.lookup = None

    def extend_chain(self, state: RequestState) -> bool:
        """Hash what is confirmed; False when the request's tokens cannot be keyed."""
        view = state.view
        try:
            state.chain.truncate(view.num_tokens)
            state.chain.extend(view.tokens, view.num_tokens, view.extra())
        except (ValueError, OSError) as error:
            # Token ids that are no ids, or adapter files that cannot be read.
            warn_every(logger, "unkeyed", 60.0, f"not cached: {error}")
            return False
        return True

    def _find(self, state: RequestState, local_tokens: int) -> Lookup:
        lookup, num_tokens = state.lookup, state.view.num_tokens
        if lookup is None or (lookup.local_tokens, lookup.num_tokens) != (local_tokens, num_tokens):
            # The deadline of a question goes on when its details change.
            asked = lookup.asked if lookup is not None and lookup.boundary is None else None
            self._release(state)
            lookup = state.lookup = Lookup(next(self._ids), local_tokens, num_tokens, asked)
        if lookup.boundary is None:
            self._advance(state, lookup)
        return lookup

    def _advance(self, state: RequestState, lookup: Lookup) -> None:
        """One round: which rows are there, then those of the best boundary into the pool."""
        chunk_tokens = self._layout.chunk_tokens
        if lookup.best is None:
            base = lookup.local_tokens // chunk_tokens
            wanted = []
            if self.extend_chain(state):
                wanted = state.chain.hashes[base : (lookup.num_tokens - 1) // chunk_tokens]
            if not wanted:
                lookup.boundary = lookup.local_tokens
                return
            reply = self._store.lookup(lookup.lookup_id, wanted, base)
            if reply.state is LookupState.PENDING:
                lookup.in_pool = reply.present
                return
            lookup.best = self._best_boundary(state, lookup, reply.present)
            lookup.keep = self._rows_of(state, lookup, lookup.best)
        match self._store.narrow(lookup.lookup_id, lookup.keep):
            case LookupState.READY:
                lookup.boundary = lookup.best
            case LookupState.GONE:
                lookup.best = None

    def _best_boundary(self, state: RequestState, lookup: Lookup, present: list[list[int]]) -> int:
        boundary = servable_boundary(
            [group.rule for group in self._layout.groups],
            present,
            chunk_tokens=self._layout.chunk_tokens,
            local_tokens=lookup.local_tokens,
            num_tokens=lookup.num_tokens,
        )
        is_worth_it = boundary - lookup.local_tokens >= max(1, state.params.min_hit_tokens)
        return boundary if is_worth_it else lookup.local_tokens

    def _expire(self, state: RequestState, lookup: Lookup) -> None:
        """No tier answered in time: serve what lay in the pool when it was asked, if it still
        does. Rows on their way go on, for the next request."""
        lookup.boundary = lookup.local_tokens
        if lookup.in_pool:
            boundary = self._best_boundary(state, lookup, lookup.in_pool)
            keep = self._rows_of(state, lookup, boundary)
            if self._store.narrow(lookup.lookup_id, keep) is LookupState.READY:
                lookup.boundary = boundary
                return
        self._store.release(lookup.lookup_id)

    def _rows_of(self, state: RequestState, lookup: Lookup, boundary: int) -> list[RowKey]:
        return allocate.wanted_rows(self._layout, state.chain, boundary, lookup.local_tokens)
