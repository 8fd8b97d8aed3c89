"""``Tier``: storage behind the pool, and the form of what is stored in one.

A value is one row: a header, then the row's shards. Tiers move bytes and know names; what a value
must look like is checked here, by whoever reads it.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec
import xxhash

from lmcache_connector.config import parse_url
from lmcache_connector.errors import ConfigError, ConnectorError

# namespace / chunk hash - group tag
NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}-[a-z0-9][a-z0-9-]{0,63}")
_MAGIC = b"LMCHYBRD"
# Raise it when the form of values changes: what was stored before is then a miss.
_VERSION = 1
_FIXED = struct.Struct("<8sIIQ")
_SHARD = struct.Struct("<QQ")
_CHECK = struct.Struct("<Q")
_Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
# Parsers for take_options.
parse_flag: Callable[[str], bool] = partial(msgspec.convert, type=bool, strict=False)
parse_seconds: Callable[[str], float] = partial(msgspec.convert, type=_Seconds, strict=False)


class TierError(ConnectorError):
    """A tier could not do as asked: no answer, no room, no permission. Never "not there"."""


class DroppedError(TierError):
    """A value is not taken now, and nothing is wrong."""


class TierUrl(msgspec.Struct, frozen=True):
    """``scheme://host/path?options``; it holds no credentials and may be logged."""

    text: str
    scheme: str
    # host:port, or a bucket
    host: str
    path: str
    options: dict[str, str]


class TierStats(msgspec.Struct):
    """None where the tier cannot tell at the cost of a call."""

    used_bytes: int | None = None
    capacity_bytes: int | None = None
    num_values: int | None = None


class Tier(Protocol):
    """A store of values by name. All methods may be called from any thread, at the same time.

    Every call ends within the tier's own deadline and raises TierError when it cannot be done.
    ``register``, ``stats`` and ``close`` are for tiers that have something to do then.
    """

    def register(self, memory: memoryview) -> None:
        """Most buffers of later calls will lie in ``memory``, which stays until ``close``."""
        return

    def contains(self, names: Sequence[str]) -> list[bool]:
        """By name, whether it is there; one round trip for all of them. A hint."""

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        """Fill the writable ``buffers`` with the value, in order. False when it is not there, its
        length is another than theirs together, or it alone cannot be read: its reader removes
        it. What the buffers hold then means nothing."""

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Store ``buffers`` as one value, visible to readers as a whole or not at all."""

    def remove(self, name: str) -> None:
        """Forget a value; one that is not there is fine."""

    def clear(self, namespace: str) -> None:
        """Forget all values whose name begins with ``namespace`` + "/"."""

    def stats(self) -> TierStats:
        """What is known without asking around; must not wait."""
        return TierStats()

    def close(self) -> None:
        """End it. What was put stays, where the medium lasts."""
        return


def parse_tier_url(text: str) -> TierUrl:
    """Raises ConfigError for anything but a known scheme without credentials."""
    try:
        parse_url(text)  # from here on it may be told
    except ValueError as error:
        raise ConfigError(f"tiers: {error}") from None
    try:
        parts = urlsplit(text)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"tiers: {text!r} is no URL: {error}") from None
    if parts.scheme not in _MODULES:
        known = ", ".join(f"{scheme}://" for scheme in _MODULES)
        raise ConfigError(f"tiers: the scheme of {text!r} is none of {known}")
    return TierUrl(text, parts.scheme, parts.netloc, parts.path, dict(pairs))


def take_options(url: TierUrl, parsers: Mapping[str, Callable[[str], object]]) -> dict[str, object]:
    """The URL's options, parsed; ones not given are left out.

    Raises:
        ConfigError: an unknown option, or a value its parser raises ValueError for.
    """
    parsed: dict[str, object] = {}
    for key, value in url.options.items():
        if key not in parsers:
            raise ConfigError(
                f"tiers: {url.scheme}:// has no option {key!r}; it has {', '.join(parsers)}"
            )
        try:
            parsed[key] = parsers[key](value)
        except ValueError as error:
            raise ConfigError(f"tiers: {key}={value} of {url.scheme}://: {error}") from None
    return parsed


def open_tier(url: TierUrl) -> Tier:
    """Raises ConfigError or TierError when the tier cannot be used as written."""
    name = _MODULES[url.scheme]
    try:
        module = importlib.import_module(f"lmcache_connector.storage.tiers.{name}")
    except ModuleNotFoundError as error:
        extra = f"pip install 'lmcache-connector[{name.replace('_', '-')}]'"
        raise ConfigError(f"tiers: {url.scheme}:// needs {error.name}: {extra}") from None
    tier: Tier = module.open_url(url)
    return tier


def value_name(namespace: str, chunk_hash: bytes, group: str) -> str:
    """``namespace``: 16 hex digits."""
    return f"{namespace}/{chunk_hash.hex()}-{group}"


def fill(buffers: Sequence[memoryview], value: bytes) -> bool:
    """Copy a value to ``buffers``, in order; False when its length is another than theirs."""
    if len(value) != sum(map(len, buffers)):
        return False
    start = 0
    for buffer in buffers:
        buffer[:] = value[start : start + len(buffer)]
        start += len(buffer)
    return True


def header_bytes(num_shards: int) -> int:
    """Length of a header."""
    return _FIXED.size + num_shards * _SHARD.size + _CHECK.size


def pack_header(name: str, sizes: Sequence[int], digests: Sequence[int]) -> bytes:
    """``sizes`` and xxh3_64 ``digests`` by shard; a shard of 0 bytes has digest 0."""
    fixed = _FIXED.pack(_MAGIC, _VERSION, len(sizes), xxhash.xxh3_64_intdigest(name.encode()))
    shards = b"".join(map(_SHARD.pack, sizes, digests))
    return fixed + shards + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed + shards))


def unpack_header(header: bytes, name: str, sizes: Sequence[int]) -> list[int] | None:
    """The digests, or None when it is not the header of a value of this name and these sizes."""
    if len(header) != header_bytes(len(sizes)):
        return None
    shards = _SHARD.iter_unpack(header[_FIXED.size : -_CHECK.size])
    digests = [digest for _, digest in shards]
    return digests if header == pack_header(name, sizes, digests) else None


_MODULES = {
    "memory": "memory",
    "file": "disk",
    "redis": "redis",
    "rediss": "redis",
    "s3": "object_store",
    "gs": "object_store",
    "az": "object_store",
    "mooncake": "mooncake",
}
