"""``memory://``: the reference of what a tier does. Lives and dies with the process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmcache_connector.storage.tiers.base import Tier, TierStats, TierUrl, fill, take_options


def open_url(url: TierUrl) -> MemoryTier:
    take_options(url, {})
    return MemoryTier()


class MemoryTier(Tier):
    """See ``Tier``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def contains(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self._values for name in names]

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        with self._lock:
            value = self._values.get(name)
        return value is not None and fill(buffers, value)

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        value = b"".join(buffers)
        with self._lock:
            self._values[name] = value

    def remove(self, name: str) -> None:
        with self._lock:
            self._values.pop(name, None)

    def clear(self, namespace: str) -> None:
        with self._lock:
            for name in [name for name in self._values if name.startswith(f"{namespace}/")]:
                del self._values[name]

    def stats(self) -> TierStats:
        with self._lock:
            used = sum(map(len, self._values.values()))
            return TierStats(used_bytes=used, num_values=len(self._values))

    def close(self) -> None:
        with self._lock:
            self._values.clear()
