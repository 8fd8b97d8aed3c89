"""``redis://host:port/db`` and ``rediss://`` (TLS): Redis or Valkey; ``cluster=true``: a cluster.

Options: ``timeout``, the seconds a call may take in all (5); ``ttl``, the seconds a value lives
(for ever). Credentials come from LMCACHE_REDIS_USERNAME and LMCACHE_REDIS_PASSWORD, or
LMCACHE_REDIS_PASSWORD_FILE. What the server evicts is a miss; no room is a TierError.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers import base

_PARSERS = {"timeout": base.parse_seconds, "ttl": base.parse_seconds, "cluster": base.parse_flag}
# What redis-py makes of replies that make no sense.
_NONSENSE = (ValueError, TypeError, LookupError, RecursionError)


class _Call(threading.local):
    """The call that a thread is in: nothing waits past its deadline."""

    deadline = 0.0

    def time_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


_call = _Call()


class _Socket:
    """redis-py bounds single reads, not calls: in a cluster it tries each command of a pipeline
    anew when a node falls silent."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        # A timeout of 0 is redis-py's way to ask what has come already.
        if name in ("recv", "recv_into", "sendall") and self._wrapped.gettimeout() != 0:
            self._wrapped.settimeout(_call.time_left())
        return getattr(self._wrapped, name)


class _Connection(redis.Connection):
    def _connect(self) -> Any:
        self.socket_connect_timeout = self.socket_timeout = _call.time_left()
        return _Socket(super()._connect())  # type: ignore[no-untyped-call]

    def on_connect_check_health(self, check_health: bool = True) -> None:
        try:
            super().on_connect_check_health(check_health)
        except (RedisError, *_NONSENSE) as error:
            # A server's own words may quote AUTH; those of a timeout are redis-py's.
            if not isinstance(error, redis.TimeoutError):
                error.args = ("it does not let us in: check the credentials and the database",)
            raise


class _TlsConnection(_Connection, redis.SSLConnection):
    pass


class RedisTier(base.Tier):
    """See ``Tier``. The server may be absent when it is made."""

    def __init__(self, url: base.TierUrl) -> None:
        options: Any = base.take_options(url, _PARSERS)
        cluster = options.get("cluster", False)
        secret = os.environ.get("LMCACHE_REDIS_PASSWORD")
        file = os.environ.get("LMCACHE_REDIS_PASSWORD_FILE")
        try:
            database, named = int(url.path.strip("/") or 0), urlsplit(url.text)
            if not named.hostname or named.port == 0 or (database and cluster):
                raise ValueError(f"it must be {url.scheme}://host:port/N, N = 0 in a cluster")
            if file:
                secret = Path(file).read_text(errors="replace").strip()
        except (ValueError, OSError) as error:
            raise ConfigError(f"tiers: {url.text}: {error}") from None
        self._where, self._timeout = url.text, options.get("timeout", 5.0)
        self._expiry_ms = max(1, int(options["ttl"] * 1000)) if "ttl" in options else None
        arguments = {
            "connection_class": _TlsConnection if url.scheme == "rediss" else _Connection,
            "protocol": 2,  # in 3 servers may speak unasked
            "retry": Retry(NoBackoff(), 1, (redis.ConnectionError,)),
            "username": os.environ.get("LMCACHE_REDIS_USERNAME"),
            "password": secret,
        } | ({} if cluster else {"db": database})
        kind: Any = redis.RedisCluster if cluster else redis.Redis
        self._connect = partial(kind.from_url, f"redis://{url.host}", **arguments)
        self._client: Any = None

    @contextmanager
    def _call(self, name: str) -> Iterator[Any]:
        _call.deadline = time.monotonic() + self._timeout
        try:
            # Only now: a cluster's client asks for its nodes when it is made.
            client = self._client = self._client or self._connect()
            yield client
        except (RedisError, RedisClusterException, OSError, *_NONSENSE) as error:
            if isinstance(error, RedisClusterException):
                self._client = None  # nodes may all have moved: begin anew with the URL's host
            text = f"{self._where}: {name}: {type(error).__name__}: {error}"
            raise base.TierError(text[:400]) from None

    def contains(self, names: Sequence[str]) -> list[bool]:
        with self._call("contains") as client:
            return [reply == 1 for reply in _pipeline(client, "EXISTS", map(_key, names))]

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        value = None
        with self._call("get") as client:
            try:
                value = client.get(_key(name))
            except redis.ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
        return isinstance(value, bytes) and base.fill(buffers, value)

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        with self._call("put") as client:
            client.set(_key(name), b"".join(buffers), px=self._expiry_ms)

    def remove(self, name: str) -> None:
        with self._call("remove") as client:
            client.execute_command("UNLINK", _key(name))

    def clear(self, namespace: str) -> None:
        start = _key(f"{namespace}/")
        with self._call("clear") as client:
            keys = client.scan_iter(match=start + b"*", count=10_000)
            _pipeline(client, "UNLINK", (key for key in keys if key.startswith(start)))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


open_url = RedisTier


def _key(name: str) -> bytes:
    return b"lmcache:" + name.encode()


def _pipeline(client: Any, command: str, keys: Iterable[bytes]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command(command, key)
    replies: list[Any] = pipeline.execute()
    return replies
