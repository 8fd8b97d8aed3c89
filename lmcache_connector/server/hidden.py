"""``HiddenService``: the pool of hidden states beside one of KV, with an endpoint of its own."""

from __future__ import annotations

from lmcache_connector.server.cache_server import CacheServer
from lmcache_connector.server.service import PoolService
from lmcache_connector.server.sockets import hidden_endpoint
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool


class HiddenService:
    """``engine`` keeps rows that go with the KV in ``kv``, which ``beside`` serves, and is closed
    with it.

    Raises:
        OSError: no such pool or socket can be made.
        StartupError: the pool is too small, or the endpoint of a server is taken.
    """

    def __init__(self, kv: StorageEngine, beside: PoolService, capacity_bytes: int) -> None:
        pool = MemoryPool(capacity_bytes)
        self.engine = StorageEngine(pool, kv.tiering.for_pool(pool), shared=kv.shared, kv=kv)
        for extent in range(len(pool.extents)):
            self.engine.mark_ready(extent)
        self._service = PoolService(
            pool.extents,
            hidden_endpoint(beside.endpoint),
            exclusive=kv.shared,
            allowed_uids=beside.allowed_uids,
        )
        # Where to register.
        self.endpoint = f"ipc://{self._service.endpoint}"
        self._server = CacheServer(self.engine, self._service)

    def end(self) -> None:
        """Serve no more."""
        self._service.close()
        self._server.close()
