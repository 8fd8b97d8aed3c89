"""Requests and replies survive the wire; hostile frames are refused and cost nothing."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.errors import ProtocolError
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import messages
from lmcache_connector.storage.base import (
    Commit,
    GroupShards,
    LookupReply,
    LookupState,
    NewRow,
    Row,
    StoreStats,
    TierCounters,
)

TOKEN = "ab" * 32
HASH = b"h" * 32

ids = st.integers(0, 2**62)
hashes = st.binary(min_size=32, max_size=32)
keys = st.tuples(hashes, st.sampled_from(["full", "window-255", "state"]))
namespaces = st.just("") | st.text("0123456789abcdef", min_size=16, max_size=16)
texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=9)
digests = st.lists(st.integers(0, 2**64 - 1), max_size=4)
slots = st.builds(SlotRef, ids, ids, ids)
groups = st.lists(
    st.builds(
        GroupShards,
        st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True),
        st.lists(st.lists(ids)),
        st.booleans(),
    )
)
MESSAGES: dict[type[messages.Message], st.SearchStrategy[Any]] = {
    messages.RegisterKVCache: st.builds(
        messages.RegisterKVCache,
        texts,
        texts,
        hashes,
        st.just([]),
        texts,
        st.lists(ids),
        st.lists(ids),
    ),
    messages.RegisterHiddenStates: st.builds(
        messages.RegisterHiddenStates,
        texts,
        texts,
        hashes,
        st.integers(1, 1 << 40),
        st.integers(0, 1),
        groups,
        texts,
        st.lists(ids),
        st.lists(ids),
    ),
    messages.AddGroups: st.builds(messages.AddGroups, groups),
    messages.Lookup: st.builds(messages.Lookup, ids, st.lists(hashes), st.integers(0, 1 << 40)),
    messages.Narrow: st.builds(messages.Narrow, ids, st.lists(keys)),
    messages.Release: st.builds(messages.Release, ids),
    messages.PrepareLoad: st.builds(messages.PrepareLoad, ids, ids, st.lists(keys)),
    messages.CompleteLoad: st.builds(messages.CompleteLoad, ids, st.lists(keys)),
    messages.PrepareStore: st.builds(
        messages.PrepareStore,
        ids,
        st.lists(st.builds(NewRow, st.lists(ids, max_size=3), st.none() | keys)),
        st.lists(hashes),
    ),
    messages.CompleteStore: st.builds(
        messages.CompleteStore,
        ids,
        st.lists(st.builds(Commit, ids, hashes, st.none() | hashes, st.text(max_size=64), digests)),
    ),
    messages.Clear: st.builds(messages.Clear, hashes),
    messages.Unregister: st.just(messages.Unregister()),
    messages.Ping: st.just(messages.Ping()),
    messages.Stats: st.builds(messages.Stats, st.none() | st.tuples(st.lists(ids), st.lists(ids))),
    messages.Status: st.just(messages.Status()),
    messages.Probe: st.builds(messages.Probe, namespaces, st.lists(hashes)),
    messages.ClearNamespace: st.builds(messages.ClearNamespace, namespaces),
    messages.Pin: st.builds(messages.Pin, st.lists(hashes), st.booleans()),
}
any_message = st.one_of(*MESSAGES.values())


def test_every_message_is_tried() -> None:
    assert set(MESSAGES) == set(messages.Message.__subclasses__())


@given(any_message, ids)
@settings(max_examples=200, deadline=None)
def test_a_request_survives_the_wire(message: messages.Message, call: int) -> None:
    request = messages.decode_request(messages.encode_request(TOKEN, call, message))
    assert (request.token, request.call) == (TOKEN, call)
    assert messages.decode_message(request) == message


STATS = StoreStats(1, 2, 3, 4, 5, 6, {"full": 7}, 8, {"file:///x": TierCounters(1, 2, 3, 4, 5, 6)})


@given(
    st.sampled_from(LookupState),
    st.lists(st.lists(st.integers(0, 2**300), min_size=1, max_size=3), max_size=4),
)
def test_masks_longer_than_64_bits_survive(state: LookupState, masks: list[list[int]]) -> None:
    reply = LookupReply(state, masks)
    assert answer(messages.Lookup(1, [], 0), reply) == reply


@pytest.mark.parametrize(
    ("message", "result"),
    [
        (messages.RegisterKVCache("i", "m", HASH, []), messages.Registered(True, False)),
        (messages.Lookup(1, [HASH], 0), None),
        (messages.Narrow(1, []), LookupState.GONE),
        (messages.Release(1), None),
        (messages.PrepareLoad(1, 1, []), [Row([SlotRef(1, 2, 3)], [2**64 - 1])]),
        (messages.PrepareLoad(1, 1, []), None),
        (messages.PrepareStore(1, [], []), [[SlotRef(1, 4096, 3)], []]),
        (messages.CompleteStore(1, []), None),
        (messages.Ping(), True),
        (messages.Stats(), STATS),
        (messages.Pin([HASH], True), 3),
    ],
)
def test_results_are_what_the_request_asked_for(message: messages.Message, result: Any) -> None:
    assert answer(message, result) == result


def answer(message: messages.Message, result: object) -> Any:
    reply = messages.decode_reply(messages.encode_reply(7, result))
    assert (reply.call, reply.error, reply.renew) == (7, None, False)
    return messages.decode_result(message, reply)


def test_an_error_tells_whether_to_begin_anew() -> None:
    reply = messages.decode_reply(messages.encode_reply(9, None, "no", renew=True))
    assert (reply.call, reply.error, reply.renew) == (9, "no", True)
    with pytest.raises(ProtocolError):
        messages.decode_result(messages.Ping(), messages.decode_reply(messages.encode_reply(1, 5)))


def raw(**fields: Any) -> bytes:
    return messages.encode_request(TOKEN, 1, msgspec.convert({}, messages.Ping)).replace(
        msgspec.msgpack.encode({"type": "PING"}), msgspec.msgpack.encode(fields)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": "NO_SUCH"},
        {"type": "LOOKUP", "lookup_id": 1, "chunk_hashes": [b"short"], "first_chunk": 0},
        {"type": "LOOKUP", "lookup_id": 1, "chunk_hashes": ["x" * 32], "first_chunk": 0},
        {"type": "LOOKUP", "lookup_id": 1, "chunk_hashes": [], "first_chunk": -1},
        {"type": "LOOKUP", "lookup_id": 1, "chunk_hashes": [HASH] * (2**17 + 1), "first_chunk": 0},
        {"type": "NARROW", "lookup_id": 1, "keep": [[HASH, "../../etc/passwd" * 5]]},
        {"type": "NARROW", "lookup_id": 1, "keep": [[HASH + b"/", "full"]]},
        {"type": "CLEAR", "namespace": b""},
        {
            "type": "COMPLETE_STORE",
            "store_id": 1,
            "commits": [
                {"index": 0, "chunk_hash": HASH, "parent": None, "group": "full", "digests": [-1]}
            ],
        },
        {"type": "PROBE", "namespace": "x" * 257, "chunk_hashes": []},
    ],
)
def test_what_breaks_a_limit_is_refused(fields: dict[str, Any]) -> None:
    request = messages.decode_request(raw(**fields))
    with pytest.raises(ProtocolError):
        messages.decode_message(request)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\x93\xa1a\x01" + b"\x91" * 1_000_000,
        b"\x93\xa1a\x01\xdd\xff\xff\xff\xff",
        b"\x93\xa1a\x01\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff" + b"\xa1a" * 10,
        b"\xc6\xff\xff\xff\xff",
        msgspec.msgpack.encode(["x" * 65, 1, None]),
        msgspec.msgpack.encode([TOKEN, -1, None]),
        msgspec.msgpack.encode([b"bytes", 1, None]),
    ],
)
def test_hostile_frames_are_refused_without_much_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            messages.decode_message(messages.decode_request(data))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(any_message, st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_frames_are_messages_or_refused(message: messages.Message, data: Any) -> None:
    frame = bytearray(messages.encode_request(TOKEN, 1, message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    try:
        decoded = messages.decode_message(messages.decode_request(bytes(frame)))
    except ProtocolError:
        return
    assert isinstance(decoded, messages.Message)
