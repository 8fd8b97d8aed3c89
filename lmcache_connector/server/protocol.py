"""Frames of the memory socket: one msgpack message per packet, both ways.

    worker                               owner of the pool
    Hello            ->
                     <-                  Welcome, or Refused and the end
                     <-                  ExtentOffer(0) with one file descriptor
    ExtentMapped(0)  ->
                     <-                  ExtentOffer(1) ...

One offer is open at a time, so neither side can flood the other. After the last extent the
connection only says that the worker lives: its end means that it maps the memory no more.

A hello without a rank is that of a scheduler side or the CLI. It is offered nothing but a token,
which its ZeroMQ requests carry (messages.py) and which ends with the connection.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeVar

import msgspec

from lmcache_connector.errors import ProtocolError

# Of these frames and of messages.py.
PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 4096

_F = TypeVar("_F")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first frame."""

    version: _Count
    rank: _Count | None
    # The engine core it works for, by the name of its registration; "" where there is only one.
    instance: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The pool's life and how many extents will be offered, or a token."""

    incarnation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    num_extents: Annotated[int, msgspec.Meta(ge=0, le=65536)]
    token: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why there is no welcome."""

    reason: str
    # It may be welcome later: the instance is not registered now.
    retry: bool = False


class ExtentOffer(msgspec.Struct, frozen=True, tag="extent"):
    """One extent; its memfd comes along with the packet."""

    extent: _Count
    nbytes: _Count


class ExtentMapped(msgspec.Struct, frozen=True, tag="mapped", forbid_unknown_fields=True):
    """The worker can copy to and from the extent."""

    extent: _Count


WorkerFrame = Hello | ExtentMapped
OwnerFrame = Welcome | Refused | ExtentOffer

_worker_frames: msgspec.msgpack.Decoder[WorkerFrame] = msgspec.msgpack.Decoder(WorkerFrame)
_owner_frames: msgspec.msgpack.Decoder[OwnerFrame] = msgspec.msgpack.Decoder(OwnerFrame)
# Bytes of one packet.
encode = msgspec.msgpack.Encoder().encode


def decode(decoder: msgspec.msgpack.Decoder[_F], data: bytes | msgspec.Raw) -> _F:
    """Raises ProtocolError for what the decoder does not take."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"malformed frame: {error}") from None


decode_worker_frame = partial(decode, _worker_frames)
decode_owner_frame = partial(decode, _owner_frames)
