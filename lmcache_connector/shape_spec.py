"""KV cache shapes as text: ``(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2``."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class KVCacheShape(msgspec.Struct, frozen=True):
    """One part of a KV cache shape spec: ``(kv_size,nb,bs,nh,hs):dtype:layers``."""

    kv_size: int
    nb: int
    bs: int
    nh: int
    hs: int
    dtype: str
    num_layers: int


def parse_kvcache_shape_spec(text: str) -> tuple[KVCacheShape, ...]:
    """Parse ``(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2``.

    Raises:
        ValueError: names the part that cannot be read.
    """
    shapes = []
    for part in text.split(";"):
        fields = [field.strip() for field in part.split(":")]
        try:
            dims, dtype, layers = fields
            if not (dims.startswith("(") and dims.endswith(")")):
                raise ValueError
            kv_size, nb, bs, nh, hs = (int(number) for number in dims[1:-1].split(","))
            shape = KVCacheShape(kv_size, nb, bs, nh, hs, dtype, int(layers))
        except ValueError:
            raise ValueError(
                f"cannot read {part.strip()!r}: expected (kv_size,blocks,block_size,heads,"
                "head_size):dtype:layers, for example (2,1024,16,8,128):float16:30"
            ) from None
        if min(kv_size, nb, bs, nh, hs, shape.num_layers) <= 0 or kv_size > 2 or not shape.dtype:
            raise ValueError(f"{part.strip()!r}: sizes must be positive and kv_size 1 or 2")
        shapes.append(shape)
    return tuple(shapes)


def format_kvcache_shape_spec(shapes: Iterable[KVCacheShape]) -> str:
    """Inverse of ``parse_kvcache_shape_spec``."""
    return ";".join(
        f"({s.kv_size},{s.nb},{s.bs},{s.nh},{s.hs}):{s.dtype}:{s.num_layers}" for s in shapes
    )
