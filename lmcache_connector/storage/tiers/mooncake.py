"""``mooncake://host:port``, the master of a Mooncake Store, whose stores keep values in memory.

Options: ``segment``, memory this process adds (none; its values go with it); ``protocol`` (tcp) and
``device``; ``metadata`` (P2PHANDSHAKE); ``host``, our name for peers (our address to the master).

Bytes go straight between buffers and stores; no call returns while its transfer runs. Who does not
answer is given up after 3 s (_ENVIRONMENT), after 60 s a store that hangs before our first word to
it, or a transfer that trickles. The library leaves the latter running: we close the client then.

Mooncake trusts its network: whoever can connect may read and write registered memory. Over TCP the
pool is not registered, which does well without; RDMA does not.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmcache_connector.config import parse_size
from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers.base import Tier, TierError, TierUrl, take_options

_DEFAULTS = {"metadata": "P2PHANDSHAKE", "segment": 0, "protocol": "tcp", "device": "", "host": ""}
_ENVIRONMENT = """MC_RPC_TIMEOUT_MS=2000 MC_RPC_CONNECT_TIMEOUT_MS=1000 MC_LOG_LEVEL=ERROR
MC_TCP_STATUS_TIMEOUT_SEC=3 MC_TCP_PROGRESS_TIMEOUT_SEC=3 MC_STORE_CLIENT_SETUP_RETRIES=1"""
# A transfer that fails in less than _ENDED_SECONDS has ended.
_MAX_CALLS, _RETRY_SECONDS, _ENDED_SECONDS = 16, 2.0, 50.0
_FAILED = -800
_MISSES = (-600, -703, -704, -707)  # too long, being written, not there, evicted meanwhile
_REASONS = {-200: "no store has room", _FAILED: "a store fails", -900: "no master answers"}


def open_url(url: TierUrl) -> MooncakeTier:
    """The master may be absent."""
    options: Any = take_options(url, dict.fromkeys(_DEFAULTS, str) | {"segment": parse_size})
    if not url.host.rpartition(":")[2].isdigit() or url.path.strip("/"):
        raise ConfigError(f"tiers: {url.text}: it must be mooncake://host:port of the master")
    for setting in _ENVIRONMENT.split():
        os.environ.setdefault(*setting.split("="))
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        problem = f"tiers: mooncake:// cannot be used: {error}; pip install 'lmcache-connector"
        problem += "[mooncake]' (with CUDA: mooncake-transfer-engine), on Debian also apt-get "
        raise ConfigError(f"{problem}install libcurl4 libibverbs1 libnuma1 librdmacm1") from None
    return MooncakeTier(MooncakeDistributedStore, url.host, _DEFAULTS | options)


class MooncakeTier(Tier):
    """See ``Tier``. The library by itself comes back to a master that does."""

    def __init__(self, make_client: Any, master: str, options: dict[str, Any]) -> None:
        metadata, segment, protocol, device, self._host = options.values()
        self._setup = metadata, segment, 0, protocol, device, master
        self._make_client, self._master, self._registers = make_client, master, protocol != "tcp"
        self._memory: list[memoryview] = []
        # A call into a client that is being closed would crash: closing takes all entries.
        self._lock, self._entries = threading.Lock(), threading.Semaphore(_MAX_CALLS)
        self._client: Any = None
        self._retry_at = 0.0

    def register(self, memory: memoryview) -> None:
        if self._registers:
            self._memory.append(memory)
            self._end()  # the next client knows it

    def contains(self, names: Sequence[str]) -> list[bool]:
        return [_checked(code) == 1 for code in self._call("batch_is_exist", list(names))]

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        total = sum(map(len, buffers))
        moved = self._transfer("batch_get_into_multi_buffers", name, buffers)
        if moved == _FAILED and (size := self._call("get_size", name)) != total:
            moved = size  # so ends, too, what asks for more than there is
        return _checked(moved, *_MISSES) == total

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        size = _checked(self._call("get_size", name), *_MISSES)
        if 0 <= size != sum(map(len, buffers)):
            self.remove(name)  # the store would keep it
        _checked(self._transfer("batch_put_from_multi_buffers", name, buffers))

    def remove(self, name: str) -> None:
        # By force: every lookup leases. Whoever reads it now is warned by the checksum.
        _checked(self._call("remove", name, True), *_MISSES)

    def clear(self, namespace: str) -> None:
        _checked(self._call("remove_by_regex", f"^{namespace}/", True))

    def close(self) -> None:
        self._retry_at = float("inf")
        self._end()

    def _transfer(self, method: str, name: str, buffers: Sequence[memoryview]) -> int:
        """The library's result; from then on nothing touches the buffers."""
        places = [_place(buffer) for buffer in buffers if len(buffer)]
        arguments = [name], [[address for address, _ in places]], [[size for _, size in places]]
        small = [place for place in places if self._registers and place[1] <= 4096]
        # A header. What is small but in the pool is refused.
        added = [place for place in small if self._call("register_buffer", *place) == 0]
        # The library counts its 60 s by a clock that somebody may set.
        began = time.monotonic(), time.time()
        result: int = self._call(method, *arguments)[0]
        if result < 0 and max(time.monotonic() - began[0], time.time() - began[1]) > _ENDED_SECONDS:
            self._end()
        for address, _ in added:
            self._call("unregister_buffer", address)
        return result

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            client = self._client or self._connect()
            self._entries.acquire()
        try:
            return getattr(client, method)(*arguments)
        finally:
            self._entries.release()

    def _connect(self) -> Any:
        if time.monotonic() < self._retry_at:
            raise TierError("no master answers; it is not tried again yet")
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        host, _, port = self._master.rpartition(":")
        try:
            # setup() halts all Python threads until the master answers: see first that it hangs up.
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as connection:
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
                address = self._host or connection.getsockname()[0]
        except OSError as error:
            raise TierError(f"no master answers at {self._master}: {error}") from None
        client = self._make_client()
        code = client.setup(address, *self._setup)
        for memory in self._memory:
            code = code or client.register_buffer(*_place(memory))
        if code:
            raise TierError(f"cannot join {self._master}: error {code}; the library logged why")
        self._client = client
        return client

    def _end(self) -> None:
        with self._lock:
            for _ in range(_MAX_CALLS):
                self._entries.acquire()
            if self._client is not None:
                self._client.close()
            self._client = None
            self._entries.release(_MAX_CALLS)


def _place(buffer: memoryview) -> tuple[int, int]:
    return np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)


def _checked(code: int, *allowed: int) -> int:
    if code < 0 and code not in allowed:
        raise TierError(f"{_REASONS.get(code, 'no success')} (Mooncake's error {code})")
    return code
