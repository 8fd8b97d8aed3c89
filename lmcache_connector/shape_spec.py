"""KV cache shapes as text: ``(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec

_PART = re.compile(r"\((\d+),(\d+),(\d+),(\d+),(\d+)\):([^:]+):(\d+)")
_Size = Annotated[int, msgspec.Meta(gt=0)]


class KVCacheShape(msgspec.Struct, frozen=True, array_like=True):
    """One part of a KV cache shape spec: ``(kv_size,nb,bs,nh,hs):dtype:layers``."""

    kv_size: Annotated[int, msgspec.Meta(ge=1, le=2)]
    nb: _Size
    bs: _Size
    nh: _Size
    hs: _Size
    dtype: str
    num_layers: _Size


def parse_kvcache_shape_spec(text: str) -> tuple[KVCacheShape, ...]:
    """Parse ``(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2``.

    Raises:
        ValueError: names the part that cannot be read.
    """
    shapes = []
    for part in text.split(";"):
        match = _PART.fullmatch("".join(part.split()))
        try:
            fields = match.groups() if match is not None else ()
            shapes.append(msgspec.convert(fields, KVCacheShape, strict=False))
        except ValueError:
            raise ValueError(
                f"cannot read {part.strip()!r}: expected (kv_size,blocks,block_size,heads,"
                "head_size):dtype:layers, for example (2,1024,16,8,128):float16:30; sizes must be "
                "positive and kv_size 1 or 2"
            ) from None
    return tuple(shapes)


def format_kvcache_shape_spec(shapes: Iterable[KVCacheShape]) -> str:
    """Inverse of ``parse_kvcache_shape_spec``."""
    return ";".join(
        f"({s.kv_size},{s.nb},{s.bs},{s.nh},{s.hs}):{s.dtype}:{s.num_layers}" for s in shapes
    )
