"""What goes over the server's ZeroMQ socket: msgpack structs, versioned, never pickle.

A request is [token, call id, message]; each gets exactly one reply [call id, result], errors
included. The token comes from the memory socket (protocol.py), which knows who asks and of which
version: it names a session, and the session's end there ends it here. Order within a session is
kept. What a result looks like depends on the request: see ``_RESULTS``.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Union

import msgspec

from lmcache_connector.groups import WorkerGeometry
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server.protocol import decode, encode
from lmcache_connector.storage import base

MAX_MESSAGE_BYTES = 16 << 20
# What peers call themselves is logged, and shown on terminals: no control characters.
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
_Name = Annotated[str, msgspec.Meta(max_length=256, pattern=_PRINTABLE)]
_Model = Annotated[str, msgspec.Meta(max_length=4096, pattern=_PRINTABLE)]
# As in InstanceStatus. Tiers take it for a prefix or a pattern: "/" would be a whole bucket.
_Namespace = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]
_Chunks = Annotated[list[base.ChunkHash], msgspec.Meta(max_length=1 << 17)]
_Groups = Annotated[list[base.GroupShards], msgspec.Meta(max_length=1024)]
_Position = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Message(msgspec.Struct):
    """What can be asked for."""


class RegisterKVCache(Message, tag="REGISTER_KV_CACHE"):
    """An engine core introduces itself: first message of a session that stores or loads.

    Each rank's geometry carries its ``list[EngineGroupInfo]`` and its kernel groups.
    """

    # Names an engine core: its workers say it too, before anybody else could tell them.
    instance: _Name
    model: _Model
    # 32 bytes that chunk hashes are chained from (keys.TokenDatabase).
    namespace: base.ChunkHash
    geometries: Annotated[list[WorkerGeometry], msgspec.Meta(max_length=1024)]
    # Unique to one life of it: only the same one goes on with what it had open.
    life: _Name = ""
    # Still open after an earlier session was lost; whatever else the server holds is ended.
    open_loads: list[int] = []
    open_stores: list[int] = []


class RegisterHiddenStates(Message, tag="REGISTER_HIDDEN_STATES"):
    """The same at an endpoint for hidden states, whose groups come as layers do."""

    instance: _Name
    model: _Model
    namespace: base.ChunkHash
    chunk_tokens: Annotated[int, msgspec.Meta(gt=0)]
    # Of the worker that maps the memory; 0: of who only looks up.
    num_ranks: Annotated[int, msgspec.Meta(ge=0, le=1)]
    groups: _Groups = []
    life: _Name = ""
    open_loads: list[int] = []
    open_stores: list[int] = []


class AddGroups(Message, tag="ADD_GROUPS"):
    groups: _Groups


class Registered(msgspec.Struct, frozen=True):
    """``resumed``: loads and stores named as open are. Else they are unknown here."""

    resumed: bool
    has_tiers: bool


class Lookup(Message, tag="LOOKUP"):
    lookup_id: int
    chunk_hashes: _Chunks
    first_chunk: _Position


class Narrow(Message, tag="NARROW"):
    lookup_id: int
    keep: list[base.RowKey]


class Release(Message, tag="RELEASE"):
    lookup_id: int


class PrepareLoad(Message, tag="PREPARE_RETRIEVE"):
    load_id: int
    lookup_id: int
    wanted: list[base.RowKey]


class CompleteLoad(Message, tag="COMPLETE_RETRIEVE"):
    load_id: int
    drop: list[base.RowKey]


class PrepareStore(Message, tag="PREPARE_STORE"):
    store_id: int
    rows: list[base.NewRow]
    prefix: _Chunks


class CompleteStore(Message, tag="COMPLETE_STORE"):
    store_id: int
    commits: list[base.Commit]


class Clear(Message, tag="CLEAR"):
    """Of a session: ``Store.clear``. What the tiers and other engines have stays."""

    namespace: base.ChunkHash


class Unregister(Message, tag="UNREGISTER"):
    """The engine core shuts down; its workers' connections end on their own."""


class Ping(Message, tag="PING"):
    """The answer is whether all workers of the session have mapped the pool."""


class Stats(Message, tag="STATS"):
    """``Store.stats``. With ``open``, (loads, stores), ``Store.check_integrity`` first."""

    open: tuple[list[int], list[int]] | None = None


class Status(Message, tag="STATUS"):
    """Management: what the whole server holds. Answered by StatusReply."""


class Probe(Message, tag="PROBE"):
    """Management: which rows of a prompt's chunks are there, without pinning anything. Repeat it
    while the answer is pending."""

    namespace: _Namespace
    chunk_hashes: _Chunks


class ClearNamespace(Message, tag="CLEAR_NAMESPACE"):
    """Management: delete a namespace's rows, in the pool and in the tiers; StatusReply tells when
    that is done. "" is all that are in the pool or of an attached engine."""

    namespace: _Namespace


class Pin(Message, tag="PIN"):
    """Management: keep the rows of these chunks that are in the pool from being evicted, until
    unpinned. The answer is how many there are."""

    chunk_hashes: _Chunks
    pinned: bool


class GroupStatus(msgspec.Struct, frozen=True):
    """An object group of a registration."""

    tag: str
    # groups.ReuseRule: kind and tokens
    kind: str
    tokens: int
    # Bytes of a chunk's row, the largest.
    row_bytes: int


class InstanceStatus(msgspec.Struct, frozen=True):
    """A registered engine core."""

    instance: str
    model: str
    namespace: str
    # 32 bytes: TokenDatabase(namespace_digest, chunk_tokens)
    namespace_digest: bytes
    chunk_tokens: int
    num_ranks: int
    # All ranks have mapped the pool.
    ready: bool
    groups: list[GroupStatus]
    open_loads: int
    open_stores: int
    # Rows asked for by LOOKUP and rows found, since the registration.
    asked_rows: int
    found_rows: int


class NamespaceStatus(msgspec.Struct, frozen=True):
    """What of one namespace is in the pool."""

    rows: int
    num_bytes: int
    pinned_rows: int


class TierStatus(msgspec.Struct, frozen=True):
    """One tier, nearest first."""

    url: str
    usable: bool
    used_bytes: int | None
    capacity_bytes: int | None
    counters: base.TierCounters
    # Namespaces to delete that are not dealt with yet, and how many could not be.
    open_clears: int
    failed_clears: int


class StatusReply(msgspec.Struct, frozen=True):
    version: str
    pid: int
    incarnation: str
    uptime_seconds: float
    embedded: bool
    pool: base.StoreStats
    floor_bytes: int
    # Clears of the pool that have not ended, and how many rows those that have did delete.
    open_clears: int
    cleared_rows: int
    instances: list[InstanceStatus]
    namespaces: dict[str, NamespaceStatus]
    tiers: list[TierStatus]


class ProbeReply(msgspec.Struct, frozen=True):
    """By group tag, bit i = the row of ``chunk_hashes[i]`` is there; whole rows, not shards."""

    # The tiers have not answered yet.
    pending: bool
    # Hexadecimal: masks are longer than 64 bits.
    in_pool: dict[str, str]
    in_tiers: dict[str, str]


class _Found(msgspec.Struct, array_like=True):
    """A LookupReply with hexadecimal masks: they are longer than 64 bits."""

    state: base.LookupState
    present: list[list[str]]


class Request(msgspec.Struct, array_like=True):
    """``message`` is looked at once the token is known to be good."""

    token: Annotated[str, msgspec.Meta(max_length=64)]
    call: Annotated[int, msgspec.Meta(ge=0)]
    message: msgspec.Raw


class Reply(msgspec.Struct, array_like=True):
    """``error``: why there is no result. ``renew``: register anew, the session is not known."""

    call: int
    result: msgspec.Raw
    error: str | None = None
    renew: bool = False


# What each is answered with; the others with None.
_RESULTS: dict[type[Message], Any] = {
    RegisterKVCache: Registered,
    RegisterHiddenStates: Registered,
    Lookup: _Found | None,
    Narrow: base.LookupState,
    PrepareLoad: list[base.Row] | None,
    PrepareStore: list[list[SlotRef]],
    Ping: bool,
    Stats: base.StoreStats,
    Status: StatusReply,
    Probe: ProbeReply,
    Pin: int,
}
_messages = msgspec.msgpack.Decoder(Union[tuple(Message.__subclasses__())])  # noqa: UP007
_results = {kind: msgspec.msgpack.Decoder(_RESULTS.get(kind)) for kind in Message.__subclasses__()}
# Raise ProtocolError for anything but a request, of whatever message, and for anything but a reply.
decode_request = partial(decode, msgspec.msgpack.Decoder(Request))
decode_reply = partial(decode, msgspec.msgpack.Decoder(Reply))


def encode_request(token: str, call: int, message: Message) -> bytes:
    """A server takes MAX_MESSAGE_BYTES of it."""
    return encode(Request(token, call, msgspec.Raw(encode(message))))


def decode_message(request: Request) -> Message:
    """Raises ProtocolError for anything but a message."""
    message: Message = decode(_messages, request.message)
    return message


def encode_reply(call: int, result: object, error: str | None = None, renew: bool = False) -> bytes:
    """See ``Reply``."""
    if isinstance(result, base.LookupReply):
        result = _Found(result.state, [[f"{m:x}" for m in shards] for shards in result.present])
    return encode(Reply(call, msgspec.Raw(encode(result)), error, renew))


def decode_result(message: Message, reply: Reply) -> Any:
    """What the message is answered with. Raises ProtocolError when this is something else."""
    result = decode(_results[type(message)], reply.result)
    if isinstance(result, _Found):
        return base.LookupReply(result.state, [[int(m, 16) for m in s] for s in result.present])
    return result
