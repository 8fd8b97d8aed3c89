"""Counts what the scheduler side does, and says what a fleet's engineer should hear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lmcache_connector.counters import Counters, count_group
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.scheduler import allocate
from lmcache_connector.scheduler.request import Lookup, PendingLoad, StorePart
from lmcache_connector.scheduler.watch import ServedWatch
from lmcache_connector.storage.base import StoreStats, TierCounters

logger = init_logger(__name__)


class Ledger:
    """One per scheduler side."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._watch = ServedWatch()
        # The store's own figures as of the last take.
        self._used_bytes = -1
        self._evicted: dict[str, int] = {}
        self._tiers: dict[str, TierCounters] = {}

    def lookup(self, lookup: Lookup) -> None:
        """A request's first answer was found."""
        assert lookup.boundary is not None
        self.counters.lookups += 1
        self.counters.asked_tokens += lookup.num_tokens - lookup.local_tokens
        self.counters.hit_tokens += lookup.boundary - lookup.local_tokens
        if warning := self._watch.observe_request():
            logger.warning(warning)

    def stored(self, part: StorePart) -> None:
        """A row became visible."""
        count_group(self.counters.stored_rows, part.group)
        self._watch.observe_stored(sum(part.sizes), part.group)

    def dropped(self, parts: Sequence[StorePart]) -> None:
        """Rows that were wanted and are not kept."""
        for part in parts:
            count_group(self.counters.dropped_rows, part.group)

    def loaded(self, pending: PendingLoad, layout: CacheLayout) -> None:
        """All ranks copied a load."""
        by_group = allocate.tokens_by_group(layout, pending.rows, pending.num_tokens)
        for group, tokens in by_group.items():
            count_group(self.counters.loaded_group_tokens, group, tokens)
        self.counters.loaded_tokens += pending.num_tokens
        self._watch.observe_served(pending.num_tokens)

    def load_failed(self, pending: PendingLoad) -> None:
        """A load ended without all its bytes; the request is recomputed."""
        for index in pending.corrupt:
            count_group(self.counters.corrupt_objects, pending.rows[index][1])
        self.counters.failed_tokens += pending.num_tokens
        text = (
            f"a load of {pending.num_tokens} tokens failed for request {pending.request_id} "
            f"({len(pending.corrupt)} corrupt objects): its prompt is recomputed"
        )
        warn_every(logger, "failed load", 60.0, text)

    def take(self, stats: StoreStats | None) -> dict[str, Any]:
        """Plain counters since the last call; the pool's gauges when they changed."""
        if stats is not None:
            if stats.used_bytes != self._used_bytes:
                self._used_bytes = stats.used_bytes
                self.counters.pool_used_bytes = stats.used_bytes
                self.counters.pool_capacity_bytes = stats.capacity_bytes
            for group, evicted in stats.evicted.items():
                grown = _growth(evicted, self._evicted.get(group, 0))
                count_group(self.counters.evicted_rows, group, grown)
            self._evicted = stats.evicted
            for url, tier in stats.tiers.items():
                known = self._tiers.get(url, TierCounters())
                for name in TierCounters.__struct_fields__:
                    grown = _growth(getattr(tier, name), getattr(known, name))
                    count_group(getattr(self.counters, f"tier_{name}"), url.split("?")[0], grown)
                self._tiers[url] = msgspec.structs.replace(tier)
        return self.counters.take()


def _growth(count: int, known: int) -> int:
    """How far a counter has grown; one that fell began anew, in another store."""
    return count - known if count >= known else count
