"""``s3://``, ``gs://``, ``az://``: what they do when servers and replies are not as they ought."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
import pytest
from forks import holds_in_a_child
from servers import AWS, Server, free_port, s3_server

from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers.base import (
    Tier,
    TierError,
    open_tier,
    pack_header,
    parse_tier_url,
    unpack_header,
    value_name,
)

NAMESPACE = "0123456789abcdef"
# Of a busy machine.
SLACK_S = 2
NAMES = [value_name(NAMESPACE, number.to_bytes(32, "big"), "full") for number in range(100)]
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
SIGNATURE = "c2lnbmF0dXJlLW9mLXRoZS10ZXN0cw"


def open_at(endpoint: str, seconds: float = 5, store: str = "s3://bucket/prefix") -> Tier:
    return open_tier(parse_tier_url(f"{store}?endpoint={endpoint}&timeout={seconds}"))


def room(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(b"\xee" * size)) for size in sizes]


def filled(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(os.urandom(size))) for size in sizes]


def calls(tier: Tier) -> dict[str, Callable[[], object]]:
    return {
        "contains": lambda: tier.contains(NAMES),
        "get": lambda: tier.get(NAMES[0], room(1000)),
        "put": lambda: tier.put(NAMES[0], filled(5_000_000)),
        "remove": lambda: tier.remove(NAMES[0]),
        "clear": lambda: tier.clear(NAMESPACE),
    }


def assert_fails_in_time(call: Callable[[], object], seconds: float) -> str:
    began = time.monotonic()
    with pytest.raises(TierError) as caught:
        call()
    assert time.monotonic() - began < seconds + SLACK_S
    return str(caught.value)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Server, str]]:
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(variable)
    for variable, value in AWS.items():
        monkeypatch.setenv(variable, value)


def test_a_server_that_falls_silent_holds_no_call(s3: tuple[Server, str]) -> None:
    server, endpoint = s3
    tier = open_at(endpoint, 0.4)
    value, read = filled(100, 0, 2_000_000, 7), room(100, 0, 2_000_000, 7)
    open_at(endpoint).put(NAMES[1], value)
    with server.stopped():
        for call in calls(tier).values():
            assert "Timeout" in assert_fails_in_time(call, 0.4)
    tier = open_at(endpoint)
    assert tier.get(NAMES[1], read)
    assert read == value


def test_comes_back_after_a_restart_of_the_server() -> None:
    with s3_server() as (server, endpoint):
        tier = open_at(endpoint)
        value, read = filled(1000), room(1000)
        tier.put(NAMES[0], value)
        server.kill()
        for call in calls(tier).values():
            assert "ConnectionRefused" in assert_fails_in_time(call, 1.5)
        server.start()
        assert not tier.get(NAMES[0], read)
        tier.put(NAMES[0], value)
        assert tier.get(NAMES[0], read)
        assert read == value


def test_a_forked_child_is_told_why_it_cannot(s3: tuple[Server, str]) -> None:
    """obstore's threads are not there, and it would wait for them for the whole of each timeout."""
    tier = open_at(s3[1], 5)
    assert tier.contains(NAMES[:1]) == [False]

    def is_told() -> bool:
        told = [
            assert_fails_in_time(call, 0)
            for one in (tier, open_at(s3[1], 5))
            for call in calls(one).values()
        ]
        return all("spawn it instead" in text for text in told)

    assert holds_in_a_child(is_told)
    assert tier.contains(NAMES[:1]) == [False]


def test_no_bucket_is_an_error_where_it_shows(s3: tuple[Server, str]) -> None:
    tier = open_at(s3[1], store="s3://other-bucket")
    assert tier.contains(NAMES) == [False] * 100
    assert not tier.get(NAMES[0], room(10))
    for name in ("put", "clear"):
        assert "NoSuchBucket" in assert_fails_in_time(calls(tier)[name], 5)


def test_prefixes_are_apart(s3: tuple[Server, str]) -> None:
    one, other = (open_at(s3[1], store=f"s3://bucket/{prefix}") for prefix in ("a", "a/b"))
    one.put(NAMES[2], filled(10))
    assert one.contains(NAMES[2:3]) == [True]
    assert other.contains(NAMES[2:3]) == [False]
    other.clear(NAMESPACE)
    assert one.contains(NAMES[2:3]) == [True]


def test_clear_takes_all_pages_of_a_namespace(
    s3: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_at(s3[1], store="s3://bucket/clear")
    kept = value_name("f" * 16, bytes(32), "full")
    for name in [*NAMES[:25], kept]:
        tier.put(name, filled(1))
    pages = obstore.list
    monkeypatch.setattr(
        obstore, "list", lambda store, prefix, chunk_size: pages(store, prefix, chunk_size=10)
    )
    tier.clear(NAMESPACE)
    assert tier.contains([*NAMES[:25], kept]) == [False] * 25 + [True]


class Peer(BaseHTTPRequestHandler):
    """Keeps what is put, and answers what a test says instead."""

    protocol_version = "HTTP/1.1"
    values: dict[str, bytes]
    odd: Callable[[Peer], None] | None

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.odd is not None:
            return self.odd()
        if self.command == "PUT":
            self.values[path] = body
        if path not in self.values:
            return self.reply(404)
        if self.command == "DELETE":
            del self.values[path]
        self.reply(
            {"PUT": 201, "DELETE": 202}.get(self.command, 200),
            self.values[path] if self.command in ("GET", "HEAD") else b"",
        )

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = answer

    def reply(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Last-Modified", DATE)
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class PeerServer(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def peer(odd: Callable[[Peer], None] | None = None) -> Iterator[str]:
    """An endpoint."""
    handler = type("Handler", (Peer,), {"values": {}, "odd": odd})
    with PeerServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("store", ["s3://bucket/a/b", "gs://bucket/a/b", "az://container/a/b"])
def test_every_kind_stores_and_finds(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    with peer() as endpoint:
        tier = open_at(endpoint, store=store)
        value, read = filled(100, 0, 200_000, 7), room(100, 0, 200_000, 7)
        assert not tier.get(NAMES[0], read)
        tier.put(NAMES[0], value)
        assert tier.contains(NAMES[:3]) == [True, False, False]
        assert tier.get(NAMES[0], read)
        assert read == value
        assert not tier.get(NAMES[0], room(200_106))
        if store.startswith("gs"):  # the others take a list of names to delete
            tier.remove(NAMES[0])
            tier.remove(NAMES[0])
            assert tier.contains(NAMES[:1]) == [False]


def forbid(peer: Peer) -> None:
    """As S3: with all that was signed, in its own words."""
    secrets = f"{peer.path} {peer.headers} {AWS['AWS_SECRET_ACCESS_KEY']}".encode()
    text = b"<Error><Code>SignatureDoesNotMatch</Code><Said>%b</Said></Error>" % secrets
    peer.reply(403, text)


@pytest.mark.parametrize("store", ["s3://bucket", "az://container"])
def test_forbidden_is_an_error_that_tells_no_secret(
    store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=2021&sig={SIGNATURE}")
    with peer(forbid) as endpoint:
        tier = open_at(endpoint, store=store)
        told = repr(tier) + caplog.text
        for name, call in calls(tier).items():
            text = assert_fails_in_time(call, 1)
            assert "403" in text
            assert name == "contains" or "SignatureDoesNotMatch" in text
            told += text
    for secret in (SIGNATURE, *list(AWS.values())[:2], "Signature="):
        assert secret not in told


def test_credentials_that_do_not_parse_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", f'{{"private_key": "{SIGNATURE}" 1')
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"{SIGNATURE}!")
    for url, problem in (("gs://bucket", "DecodeCredentials"), ("az://c", "InvalidAccessKey")):
        with pytest.raises(ConfigError, match=problem) as caught:
            open_tier(parse_tier_url(url))
        assert SIGNATURE not in str(caught.value)


def test_many_names_share_one_deadline() -> None:
    def take_time(peer: Peer) -> None:
        time.sleep(0.2)
        peer.reply(404)

    with peer(take_time) as endpoint:
        tier = open_at(endpoint, 1)
        assert tier.contains(NAMES[:60]) == [False] * 60
        assert_fails_in_time(lambda: tier.contains(NAMES * 20), 1)


def test_bodies_that_end_early_are_errors() -> None:
    def end_early(peer: Peer) -> None:
        peer.close_connection = True
        peer.reply(200, b"x" * 500, length=1000)

    with peer(end_early) as endpoint:
        text = assert_fails_in_time(calls(open_at(endpoint))["get"], 5)
    assert "GenericError" in text


def test_a_body_of_another_length_is_not_read() -> None:
    def offer_much(peer: Peer) -> None:
        peer.reply(200, b"x" * 1000, length=10**12)
        peer.close_connection = True

    with peer(offer_much) as endpoint:
        assert not open_at(endpoint).get(NAMES[0], room(1000))


def test_a_wrong_value_of_the_right_length_does_not_verify() -> None:
    other = pack_header(NAMES[1], [8], [7])
    with peer(lambda peer: peer.reply(200, other + b"8 bytes.")) as endpoint:
        header, shard = room(len(other), 8)
        assert open_at(endpoint).get(NAMES[0], [header, shard])
        assert unpack_header(bytes(header), NAMES[0], [8]) is None
        assert unpack_header(bytes(header), NAMES[1], [8]) == [7]


HEADERS = (
    b'Content-Length: 1000\r\nETag: "1"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n'
)


@pytest.mark.parametrize("first", [b"", b"x" * 100, b"HTTP/1.1 200 OK\r\n" + HEADERS + b"x" * 10])
def test_peers_that_fall_silent_in_the_middle_hold_no_call(first: bytes) -> None:
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.sendall(first)
            stop.wait(10)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,)).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        tier = open_at(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.3)
        try:
            for name, call in calls(tier).items():
                if HEADERS not in first or name == "get":
                    assert_fails_in_time(call, 0.3)
        finally:
            stop.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_no_buffer_is_held_once_a_put_has_failed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        memory = bytearray(8_000_000)
        tier = open_at(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        with memoryview(memory) as view:
            with pytest.raises(TierError):
                tier.put(NAMES[0], [view])
            for _ in range(100):
                try:
                    view.release()
                    break
                except BufferError:
                    time.sleep(0.02)
        memory.extend(b"x")  # is refused to who is looked at


def test_the_store_may_come_after_the_tier() -> None:
    tier = open_at(f"http://127.0.0.1:{free_port()}")
    for call in calls(tier).values():
        assert "ConnectionRefused" in assert_fails_in_time(call, 1.5)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3:///prefix", "MissingBucketName"),
        ("az://container", "MissingAccount"),
        ("gs://bucket?region=x", "no option 'region'; it has endpoint, timeout"),
        ("s3://bucket?access_key_id=x", "no option"),
        ("s3://bucket?timeout=-1", "timeout=-1"),
    ],
)
def test_bad_urls_are_refused_at_once(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_tier(parse_tier_url(url))


def test_without_obstore_the_fix_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lmcache_connector.storage.tiers.object_store"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'lmcache-connector\[object-store\]'"):
        open_tier(parse_tier_url("s3://bucket"))
