"""Rows of hidden states as values of a tier, for readers that share no file system with us.

``<URL of the tier>#<64 hex digits>`` names two of them: the rows with their token ids, and the
head, which is written after them and says what they are, or why they never come. Both have the
form of all values of tiers, checksums included.
"""

from __future__ import annotations

import atexit
import time
from typing import Annotated, Literal

import msgspec
import torch
from xxhash import xxh3_64_intdigest

from lmcache_connector.errors import ExtractionError
from lmcache_connector.hidden_states.settings import URL
from lmcache_connector.storage.tiers import base

_NAMESPACE = b"hiddenst".hex()
_HEAD_BYTES = 4096
_MAX_REASON = 500  # characters, 6 bytes each at most
# A tier that cannot even take a head is left alone for so long: nothing piles up before it.
_REST_SECONDS = 5.0
_POLL_SECONDS = 0.05
_Length = Annotated[int, msgspec.Meta(gt=0)]
_Dtype = Literal["bfloat16", "float16", "float32", "float64"]
# Error; dtype; tokens, layers, hidden; tap ids with commas between; digests of rows and token ids.
_Head = tuple[str, _Dtype, tuple[_Length, _Length, _Length], str, tuple[int, ...]]


class _Outlet:
    """A tier by its URL."""

    def __init__(self, url: str) -> None:
        self.tier = base.open_tier(base.parse_tier_url(url))
        self.rests_until = 0.0
        atexit.register(self.tier.close)

    def put(self, name: str, *parts: memoryview) -> list[int]:
        """The digests of ``parts``."""
        if time.monotonic() < self.rests_until:
            raise base.TierError("it took nothing a moment ago; it is not tried again yet")
        digests = [*map(xxh3_64_intdigest, parts)]
        header = base.pack_header(name, [*map(len, parts)], digests)
        self.tier.put(name, [memoryview(header), *parts])
        return digests

    def get(self, name: str, *parts: memoryview) -> list[int] | None:
        """Fill ``parts``, and their digests; None when there is no value of their sizes."""
        header = memoryview(bytearray(base.header_bytes(len(parts))))
        if not self.tier.get(name, [header, *parts]):
            return None
        digests = base.unpack_header(bytes(header), name, [*map(len, parts)])
        if digests != [*map(xxh3_64_intdigest, parts)]:
            raise ExtractionError(f"{name} is damaged: its checksums do not match")
        return digests


_opened: dict[str, _Outlet] = {}


def open_outlet(url: str) -> _Outlet:
    """The same for all in a process: no other knows what is in its memory://.

    Raises:
        ConfigError, TierError: the tier cannot be used as written.
    """
    # Without a lock, which a forked child might never get: of two that were opened one is used.
    return _opened.get(url) or _opened.setdefault(url, _Outlet(url))


def write(url: str, rows: torch.Tensor, token_ids: torch.Tensor, layers: str) -> None:
    """Raises TierError when it could not be done; no reader has seen anything then."""
    outlet, rows_name, head_name = _place(url)
    digests = outlet.put(rows_name, _bytes_of(rows), _bytes_of(token_ids))
    dtype = str(rows.dtype).removeprefix("torch.")
    outlet.put(head_name, _pack("", dtype, rows.shape, layers, digests))


def write_error(url: str, reason: str) -> None:
    """Say that the rows never come."""
    outlet, _, head_name = _place(url)
    try:
        outlet.put(head_name, _pack(reason[:_MAX_REASON], "float32", (1, 1, 1), "", ()))
    except base.TierError:
        outlet.rests_until = time.monotonic() + _REST_SECONDS
        raise


def load(url: str, timeout: float) -> tuple[dict[str, torch.Tensor], str]:
    """See ``files.load_with_layers``; the last call to the tier may outlast ``timeout``."""
    outlet, rows_name, head_name = _place(url)
    packed, deadline = bytearray(_HEAD_BYTES), time.monotonic() + timeout
    while not outlet.get(head_name, memoryview(packed)):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{url} is not there after {timeout:g} s")
        time.sleep(_POLL_SECONDS)
    try:
        error, dtype, shape, layers, digests = msgspec.json.decode(packed, type=_Head)
        rows = torch.empty(shape, dtype=getattr(torch, dtype))
        token_ids = torch.empty(shape[0], dtype=torch.int64)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise ExtractionError(f"{url}: its head makes no sense: {problem}") from None
    if error:
        raise ExtractionError(f"{url}: {error}")
    found = outlet.get(rows_name, _bytes_of(rows), _bytes_of(token_ids))
    if found is None:
        raise ExtractionError(f"{url}: the tier does not have its rows any more")
    if found != [*digests]:
        raise ExtractionError(f"{url}: its rows are not those that its head tells of")
    return {"hidden_states": rows, "token_ids": token_ids}, layers


def remove(url: str) -> None:
    """Forget rows and head; what is not there is fine."""
    outlet, *names = _place(url)
    for name in names:
        outlet.tier.remove(name)


def _place(url: str) -> tuple[_Outlet, str, str]:
    """The tier, and the names of rows and head."""
    tier_url, digits = URL.fullmatch(url).groups()  # type: ignore[union-attr]
    name = f"{_NAMESPACE}/{digits}"
    return open_outlet(tier_url), f"{name}-rows", f"{name}-head"


def _pack(*head: object) -> memoryview:
    packed = msgspec.json.encode(head).ljust(_HEAD_BYTES)
    if len(packed) > _HEAD_BYTES:
        raise base.TierError("it has too many layers for a value: choose some")
    return memoryview(packed)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
