"""What the cache can add to a request: found over as many steps as the tiers need, then held."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lmcache_connector.config import Config
from lmcache_connector.groups import FULL
from lmcache_connector.keys import TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.scheduler import allocate
from lmcache_connector.scheduler.hit import servable_boundary
from lmcache_connector.scheduler.ledger import Ledger
from lmcache_connector.scheduler.request import Lookup, RequestState
from lmcache_connector.storage.base import LookupReply, LookupState, Store

logger = init_logger(__name__)

# Requests that wait for vLLM's attention and have their rows brought into the pool meanwhile.
# Each pins what it has found.
_NUM_PREFETCHED = 16


@dataclass(eq=False)
class Lookups:
    """A store that is open, once the workers' geometry is known, and all lookups in it. No call
    waits."""

    _config: Config
    layout: CacheLayout
    store: Store
    # Where the keys of this generation start.
    database: TokenDatabase
    _ids: Iterator[int]
    _ledger: Ledger
    # Rows of all these tags are needed with the KV of a chunk.
    hidden: Store | None
    _hidden_tags: Sequence[str]
    # Requests that vLLM has not asked about yet, oldest first.
    _backlog: dict[str, RequestState] = field(default_factory=dict)

    def expect(self, state: RequestState) -> None:
        """A request arrived. What it needs from a tier is worth fetching before its turn."""
        if self.store.has_tiers:
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
            self._let_go(state.lookup)
            state.lookup = None

    def _let_go(self, lookup: Lookup) -> None:
        self.store.release(lookup.lookup_id)
        if self.hidden is not None:
            self.hidden.release(lookup.lookup_id)

    def load(self, state: RequestState) -> None:
        """A load has taken over the pins of the KV. Those of hidden states stay until ``read``."""
        self.read(state)
        if self.hidden is not None and state.lookup is not None:
            self.store.release(state.lookup.lookup_id)
            state.reading, state.lookup = state.lookup, None
        self.drop(state)

    def read(self, state: RequestState) -> None:
        """Hidden states were read with the request's first step, or never will be."""
        if state.reading is not None:
            self._let_go(state.reading)
            state.reading = None

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
        chunk_tokens = self.layout.chunk_tokens
        if lookup.best is None:
            base = lookup.local_tokens // chunk_tokens
            wanted = []
            if self.extend_chain(state):
                wanted = state.chain.hashes[base : (lookup.num_tokens - 1) // chunk_tokens]
            if not wanted:
                lookup.boundary = lookup.local_tokens
                return
            reply = self.store.lookup(lookup.lookup_id, wanted, base)
            hidden = self._find_hidden(state, lookup, base)
            present = reply.present + hidden.present
            if LookupState.PENDING in (reply.state, hidden.state):
                lookup.in_pool = present
                return
            lookup.best = self._best_boundary(state, lookup, present)
        match self._narrow(state, lookup, lookup.best):
            case LookupState.READY:
                lookup.boundary = lookup.best
            case LookupState.GONE:
                lookup.best = None

    def _find_hidden(self, state: RequestState, lookup: Lookup, base: int) -> LookupReply:
        """As of the KV, but a chunk has its rows only if all before it have them: who reads them
        reads those of what the engine's own cache serves too."""
        if self.hidden is None:
            return LookupReply(LookupState.READY, [])
        last = (lookup.num_tokens - 1) // self.layout.chunk_tokens
        reply = self.hidden.lookup(lookup.lookup_id, state.chain.hashes[:last], 0)
        head = (1 << base) - 1
        masks = [mask >> base if mask & head == head else 0 for (mask,) in reply.present]
        return LookupReply(reply.state, [[mask] for mask in masks])

    def _narrow(self, state: RequestState, lookup: Lookup, boundary: int) -> LookupState:
        """Bring what a load up to ``boundary`` needs into the pools."""
        if lookup.kept != boundary:
            lookup.kept = boundary
            lookup.keep = allocate.wanted_rows(
                self.layout, state.chain, boundary, lookup.local_tokens
            )
            end = boundary // self.layout.chunk_tokens if lookup.keep else 0
            hashes = state.chain.hashes[:end]
            lookup.keep_hidden = [(name, tag) for name in hashes for tag in self._hidden_tags]
        states = [self.store.narrow(lookup.lookup_id, lookup.keep)]
        if self.hidden is not None:
            states.append(self.hidden.narrow(lookup.lookup_id, lookup.keep_hidden))
        order = (LookupState.GONE, LookupState.PENDING, LookupState.READY)
        return min(states, key=order.index)

    def _best_boundary(self, state: RequestState, lookup: Lookup, present: list[list[int]]) -> int:
        rules = [group.rule for group in self.layout.groups] + [FULL] * len(self._hidden_tags)
        boundary = servable_boundary(
            rules,
            present,
            chunk_tokens=self.layout.chunk_tokens,
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
            if self._narrow(state, lookup, boundary) is LookupState.READY:
                lookup.boundary = boundary
                return
        self._let_go(lookup)
