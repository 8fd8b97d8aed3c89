"""``EmbeddedStore``: an engine core's own pool, with the sockets for its workers and the CLI."""

from __future__ import annotations

from pathlib import Path

from lmcache_connector.config import Config
from lmcache_connector.layout import CacheLayout
from lmcache_connector.server.cache_server import CacheServer, Instance
from lmcache_connector.server.hidden import HiddenService
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession
from lmcache_connector.storage.tiering import open_tiering


class EmbeddedStore(StoreSession):
    """The one session of a pool that ends with it.

    Raises:
        StartupError: the pool has no room for a row, or a tier cannot be used.
        OSError: no such pool can be made, see ``MemoryPool``.
    """

    def __init__(
        self, endpoint: Path, model: str, namespace: bytes, layout: CacheLayout, config: Config
    ) -> None:
        row_bytes = layout.largest_row_bytes()
        pool = MemoryPool(config.max_local_cpu_bytes, min_object_bytes=row_bytes)
        engine = StorageEngine(pool, open_tiering(config.tier_urls, pool))
        self._service = PoolService(
            pool.extents, endpoint, on_mapped=lambda count: engine.mark_ready(count - 1)
        )
        self._service.add_instance("", layout.num_ranks)
        super().__init__(engine, namespace, layout.shards(), self._service.pool_ref())
        instance = Instance("", model, "", layout, self)
        self._server = CacheServer(engine, self._service, instance)
        size = config.hidden_bytes
        self.hidden = HiddenService(engine, self._service, size) if size else None

    def wait_ready(self, timeout: float) -> bool:
        """Whether all workers have mapped the whole pool within ``timeout`` seconds."""
        return self._service.wait_ready(timeout)

    def close(self) -> None:
        if self.hidden is not None:
            self.hidden.end()
        self._service.close()
        self._server.close()
        super().close()
        self._engine.close()
