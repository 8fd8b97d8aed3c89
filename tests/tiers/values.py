"""Values as the tiering writes and checks them, for tests; imported by path."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

import xxhash

from lmcache_connector.storage.tiers.base import (
    Tier,
    header_bytes,
    pack_header,
    unpack_header,
    value_name,
)


class DamagedError(Exception):
    """A tier returned bytes that were never stored under this name."""


def random_namespace() -> str:
    return secrets.token_hex(8)


def random_name(namespace: str | None = None, group: str = "full") -> str:
    return value_name(namespace or random_namespace(), secrets.token_bytes(32), group)


def make_shards(sizes: Sequence[int], seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


def put_value(tier: Tier, name: str, sizes: Sequence[int], seed: int = 0) -> list[bytes]:
    """Store a value; returns its shards."""
    shards = make_shards(sizes, seed)
    digests = [xxhash.xxh3_64_intdigest(shard) if shard else 0 for shard in shards]
    header = pack_header(name, sizes, digests)
    tier.put(name, [memoryview(header), *[memoryview(shard) for shard in shards]])
    return shards


def read_verified(tier: Tier, name: str, sizes: Sequence[int]) -> list[bytes] | None:
    """The shards, or None when the tier has no value of this name and length.

    Raises:
        DamagedError: what it has is not a value that somebody stored.
    """
    header = bytearray(header_bytes(len(sizes)))
    shards = [bytearray(size) for size in sizes]
    if not tier.get(name, [memoryview(header), *[memoryview(shard) for shard in shards]]):
        return None
    digests = [xxhash.xxh3_64_intdigest(shard) if shard else 0 for shard in shards]
    if unpack_header(bytes(header), name, sizes) != digests:
        raise DamagedError(name)
    return [bytes(shard) for shard in shards]
