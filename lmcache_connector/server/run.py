"""``run_server``: a cache server as a process of its own. Loads neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lmcache_connector.errors import StartupError
from lmcache_connector.log import init_logger
from lmcache_connector.server import sockets
from lmcache_connector.server.cache_server import CacheServer
from lmcache_connector.server.hidden import HiddenService
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool, check_memory_budget
from lmcache_connector.storage.tiering import open_tiering

logger = init_logger(__name__)


def run_server(
    endpoint: str,
    max_local_cpu_bytes: int,
    tiers: Sequence[str],
    floor_bytes: int,
    allow_uids: Sequence[int],
    max_hidden_bytes: int = 0,
) -> None:
    """Serve at ``endpoint`` (ipc:///path) until SIGTERM or SIGINT; see the command's options.

    Raises:
        StartupError: it cannot be started as asked, with the problems.
    """
    began = time.monotonic()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    path = Path(endpoint.removeprefix("ipc://"))
    if problem := check_memory_budget(max_local_cpu_bytes, max_hidden_bytes):
        raise StartupError(problem)
    sockets.ensure_private_directory(path.parent, 0o711 if allow_uids else 0o700)
    pool = MemoryPool(max_local_cpu_bytes)
    # First of all: whoever has the name has what belongs to it, such as directories of tiers.
    service = PoolService(pool.extents, path, exclusive=True, allowed_uids=allow_uids)
    with contextlib.closing(service):
        engine = StorageEngine(pool, open_tiering(tiers, pool), floor_bytes, shared=True)
        # What came last is used first: workers touch memory as far as it is used.
        for extent in reversed(range(len(pool.extents))):
            engine.mark_ready(extent)
        server = CacheServer(engine, service)
        hidden = HiddenService(engine, service, max_hidden_bytes) if max_hidden_bytes else None
        logger.info(
            "cache server at %s ready in %.2f s: pool %.1f MiB, floor %.1f MiB, hidden states "
            "%.1f MiB, tiers %s",
            endpoint,
            time.monotonic() - began,
            max_local_cpu_bytes / 2**20,
            floor_bytes / 2**20,
            max_hidden_bytes / 2**20,
            ", ".join(channel.url for channel in engine.channels) or "none",
        )
        while not stop.wait(1.0):
            if not (server.thread.is_alive() and service.thread.is_alive()):
                raise RuntimeError("a thread of the server has ended")
        if hidden is not None:
            hidden.end()
    server.close()
    engine.close()
    logger.info("cache server at %s has ended", endpoint)
