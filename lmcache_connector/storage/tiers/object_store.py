"""``s3://bucket/prefix``, ``gs://bucket/prefix`` and ``az://container/prefix``, through obstore.

Options: ``endpoint`` of a compatible store, ``region`` (s3), ``timeout``, the seconds a call may
take in all (10; clear: a thousand values). Credentials come from the environment that obstore
reads, AWS_*, GOOGLE_* or AZURE_*; they must allow to list, or S3 "forbids" what is not there.
A put is one request: a value is there whole or not. No object store tells of many names in one
request: ``contains`` sends HEADs at the same time, over connections that stay open, since a LIST
would page through all that the namespace holds.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers import base

_KINDS: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
# All that is told of an error: its text holds URLs, which may hold signatures.
_TOLD = re.compile(r"(?<=status: )\d+|(?<=<Code>)\w+|(?<=kind: )\w+|(?<=source: )[A-Z]\w+(?=[ ,(])")
# obstore has threads, which a forked child of the process that it was first used in has not.
_user: dict[str, int] = {}


class ObjectStoreTier(base.Tier):
    """See ``Tier``. The store may be out of reach when it is made."""

    def __init__(self, url: base.TierUrl) -> None:
        parsers: Any = {"endpoint": str, "timeout": base.parse_seconds}
        parsers |= {"region": str} if url.scheme == "s3" else {}
        options: dict[str, Any] = base.take_options(url, parsers)
        self._where, self._timeout = url.text, options.pop("timeout", 10.0)
        options["client_options"] = {"timeout": timedelta(seconds=self._timeout)}
        if options.get("endpoint", "").startswith("http://"):
            options["client_options"]["allow_http"] = True
        if url.scheme == "gs" and "endpoint" in options:
            options["base_url"] = options.pop("endpoint")
        options |= {"prefix": url.path.strip("/") or None, "retry_config": {"max_retries": 2}}
        try:
            self._store = _KINDS[url.scheme](url.host or None, **options)
        except (BaseError, OSError, ValueError) as error:
            raise ConfigError(f"tiers: {url.text} cannot be set up: {_told(error)}") from None

    def _run(self, what: str, start: Callable[[], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(start(), self._timeout)

        if _user.setdefault("pid", os.getpid()) != os.getpid():
            text = "this process was forked from one that used an object store: spawn it instead"
            raise base.TierError(f"{self._where}: {what}: {text}")
        try:
            return asyncio.run(bounded())
        except (BaseError, OSError, ValueError) as error:
            raise base.TierError(f"{self._where}: {what}: {_told(error)}") from None

    def contains(self, names: Sequence[str]) -> list[bool]:
        room = asyncio.Semaphore(64)  # as many connections

        async def head(name: str) -> bool:
            with suppress(FileNotFoundError):
                async with room:
                    return bool(await obstore.head_async(self._store, name))
            return False

        return list(self._run("contains", lambda: asyncio.gather(*map(head, names))))

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        async def fill() -> bool:
            with suppress(FileNotFoundError):
                found, start = await obstore.get_async(self._store, name), 0
                if found.meta["size"] == sum(map(len, buffers)):
                    value: Any = await found.bytes_async()
                    for buffer in buffers:  # numpy copies without the GIL
                        part = np.frombuffer(value, np.uint8, len(buffer), start)
                        np.frombuffer(buffer, np.uint8)[:] = part
                        start += len(buffer)
                    return True
            return False

        return bool(self._run("get", fill))

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._run("put", lambda: obstore.put_async(self._store, name, buffers, use_multipart=False))

    def remove(self, name: str) -> None:
        async def delete() -> None:
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._store, name)

        self._run("remove", delete)

    def clear(self, namespace: str) -> None:
        async def page() -> int:
            found: Any = await anext(pages, [])
            await obstore.delete_async(self._store, [meta["path"] for meta in found])
            return len(found)

        pages = aiter(obstore.list(self._store, namespace, chunk_size=1000))
        while self._run("clear", page):
            pass


open_url = ObjectStoreTier


def _told(error: Exception) -> str:
    return " ".join(dict.fromkeys([type(error).__name__, *_TOLD.findall(str(error))]))
