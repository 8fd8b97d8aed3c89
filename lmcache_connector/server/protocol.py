"""Frames of the memory socket: one msgpack message per packet, both ways.

    worker                               owner of the pool
    Hello            ->
                     <-                  Welcome, or Refused and the end
                     <-                  ExtentOffer(0) with one file descriptor
    ExtentMapped(0)  ->
                     <-                  ExtentOffer(1) ...

One offer is open at a time, so neither side can flood the other. After the last extent the
connection only says that the worker lives: its end means that it maps the memory no more.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from lmcache_connector.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4096

_F = TypeVar("_F")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """A worker's first frame."""

    version: _Count
    rank: _Count


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The pool's life and how many extents will be offered."""

    incarnation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    num_extents: Annotated[int, msgspec.Meta(ge=1, le=65536)]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why there is no welcome."""

    reason: str


class ExtentOffer(msgspec.Struct, frozen=True, tag="extent"):
    """One extent; its memfd comes along with the packet."""

    extent: _Count
    nbytes: _Count


class ExtentMapped(msgspec.Struct, frozen=True, tag="mapped", forbid_unknown_fields=True):
    """The worker can copy to and from the extent."""

    extent: _Count


WorkerFrame = Hello | ExtentMapped
OwnerFrame = Welcome | Refused | ExtentOffer

_encoder = msgspec.msgpack.Encoder()
_worker_frames: msgspec.msgpack.Decoder[WorkerFrame] = msgspec.msgpack.Decoder(WorkerFrame)
_owner_frames: msgspec.msgpack.Decoder[OwnerFrame] = msgspec.msgpack.Decoder(OwnerFrame)


def encode(frame: WorkerFrame | OwnerFrame) -> bytes:
    """Bytes of one packet."""
    return _encoder.encode(frame)


def decode_worker_frame(data: bytes) -> WorkerFrame:
    """Raises ProtocolError for anything but a worker's frame."""
    return _decode(_worker_frames, data)


def decode_owner_frame(data: bytes) -> OwnerFrame:
    """Raises ProtocolError for anything but an owner's frame."""
    return _decode(_owner_frames, data)


def _decode(decoder: msgspec.msgpack.Decoder[_F], data: bytes) -> _F:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed frame: {error}") from None
