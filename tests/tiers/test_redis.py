"""``redis://``: what it does when servers, connections and replies are not as they should be."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from servers import Server, free_port, redis_cli, redis_server

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
NAMES = [value_name(NAMESPACE, number.to_bytes(32, "big"), "full") for number in range(300)]
SECRET = "pass-word-of-the-tests"


def open_at(port: int, options: str = "timeout=2", scheme: str = "redis") -> Tier:
    return open_tier(parse_tier_url(f"{scheme}://127.0.0.1:{port}?{options}"))


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


def try_until_done(call: Callable[[], object]) -> None:
    for _ in range(20):
        with suppress(TierError):
            call()
            return
        time.sleep(0.1)
    call()


@pytest.fixture(scope="module")
def shared() -> Iterator[int]:
    """The port of a server that no test mistreats."""
    with redis_server() as (_, port):
        yield port


@pytest.fixture(params=["server", "cluster"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int, str]]:
    """Its process, its port, and what to add to the options. A cluster tells of another address."""
    cluster = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    cluster += ["--bind", "127.0.0.1", "127.0.0.2", "--cluster-announce-ip", "127.0.0.2"]
    with redis_server(*(cluster if request.param == "cluster" else [])) as (process, port):
        yield process, port, "&cluster=true" if request.param == "cluster" else ""


def test_comes_back_after_a_restart_of_the_server(server: tuple[Server, int, str]) -> None:
    process, port, options = server
    tier = open_at(port, f"timeout=2{options}")
    value, read = filled(100, 0, 3_000_000, 7), room(100, 0, 3_000_000, 7)
    tier.put(NAMES[0], value)
    process.kill()
    for call in calls(tier).values():
        assert_fails_in_time(call, 1)
    process.start()
    assert not any(tier.contains(NAMES))
    tier.put(NAMES[0], value)
    assert tier.get(NAMES[0], read)
    assert read == value
    assert tier.contains(NAMES) == [True] + [False] * 299
    # Again; and of a cluster, no node is where it was.
    process.kill()
    if options:
        kept = [part for part in process.command if part != "127.0.0.2"]
        process.command = [*kept, "127.0.0.1"]
    process.start()
    if options:
        assert_fails_in_time(lambda: tier.contains(NAMES), 2)
    tier.put(NAMES[1], value)
    tier.close()


def test_a_server_that_falls_silent_holds_no_call(server: tuple[Server, int, str]) -> None:
    process, port, options = server
    tier = open_at(port, f"timeout=0.3{options}")
    tier.put(NAMES[0], filled(1000))
    with process.stopped():
        for call in calls(tier).values():
            assert_fails_in_time(call, 0.3)
    value, read = filled(1000), room(1000)
    try_until_done(lambda: tier.put(NAMES[1], value))
    assert tier.get(NAMES[1], read)
    assert read == value
    tier.close()


@pytest.mark.parametrize("first", [b"", b"$1000\r\n", b"$9\r\nha"])
def test_no_reply_that_comes_late_is_taken_for_anothers(first: bytes) -> None:
    late: dict[socket.socket, bytes] = {}

    def answer(connection: socket.socket, request: bytes) -> None:
        if b"GET" not in request:
            connection.sendall(b"+OK\r\n" * request.count(b"*"))
        elif not late:
            late[connection] = b"$9\r\nof-others\r\n"
            connection.sendall(first)
        else:
            connection.sendall(late.get(connection, b"") + b"$9\r\nof-itself\r\n")

    with peer(answer) as tier:
        with suppress(TierError):
            assert not tier.get(NAMES[0], room(9))
        read = room(9)
        assert tier.get(NAMES[1], read)
        assert read == [b"of-itself"]


def test_the_server_may_come_after_the_tier(shared: int) -> None:
    for options in ("timeout=1", "timeout=1&cluster=true"):
        tier = open_at(free_port(), options)
        assert_fails_in_time(lambda tier=tier: tier.contains(NAMES), 1)
    # No cluster, either: said so, not mistaken for a miss.
    assert "luster" in assert_fails_in_time(lambda: tier_of_cluster(shared).contains(NAMES), 1)


def tier_of_cluster(port: int) -> Tier:
    return open_at(port, "timeout=1&cluster=true")


def test_a_host_that_lets_nobody_connect_holds_no_call() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            tier = open_at(port, "timeout=0.2")
            for call in calls(tier).values():
                assert_fails_in_time(call, 0.2)


@contextmanager
def peer(
    answer: Callable[[socket.socket, bytes], None], seconds: float = 0.4, options: str = ""
) -> Iterator[Tier]:
    """The tier of a peer that sends what ``answer`` makes of what it receives."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while request := connection.recv(1 << 16):
                    answer(connection, request)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    tier = open_at(listener.getsockname()[1], f"timeout={seconds}{options}")
    try:
        yield tier
    finally:
        tier.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\r\n" * 100,
        b"x" * 5000,
        b"$-7\r\n",
        b"$12monkeys\r\n",
        b"$99999999999\r\n",
        b"$1000\r\nshort\r\n",
        b"*-5\r\n",
        b"*1\r\n" * 5000,
        b"*3\r\n$1\r\na\r\n:7\r\n+x\r\n",
        b":1\r\n",
        b"+PONG\r\n",
        b"-ERR no\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-\xff\xfe\r\n",
        b"%2\r\n+a\r\n",
        b"\x00\xff\r\n",
    ],
    ids=lambda reply: repr(reply[:20]),
)
def test_replies_that_make_no_sense(reply: bytes) -> None:
    """Neither to the greeting of a connection nor to its first command."""

    def greet_then_reply(connection: socket.socket, request: bytes) -> None:
        commands = re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)", request)
        greetings = sum(command in (b"CLIENT", b"SELECT") for command in commands)
        connection.sendall(b"+OK\r\n" * greetings or reply)

    for answer in (lambda connection, _: connection.sendall(reply), greet_then_reply):
        with peer(answer, seconds=0.1) as tier:
            for name, call in calls(tier).items():
                began = time.monotonic()
                try:
                    result = call()
                except TierError:
                    result = None
                assert time.monotonic() - began < 0.1 + SLACK_S
                assert name != "get" or not result


def test_a_server_that_is_slow_to_greet_is_not_one_that_refuses() -> None:
    with peer(lambda connection, request: None, seconds=0.2) as tier:
        for call in calls(tier).values():
            text = assert_fails_in_time(call, 0.2)
            assert "imeout" in text
            assert "credentials" not in text


def test_a_peer_that_drips_holds_no_call() -> None:
    def drip(connection: socket.socket, _: bytes) -> None:
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.03)

    with peer(drip, seconds=0.2) as tier:
        for call in calls(tier).values():
            assert_fails_in_time(call, 0.2)


def test_a_connection_that_ends_within_a_value_is_no_value() -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        greeted = b"+OK\r\n" * request.count(b"*")
        connection.sendall(b"$1000\r\nshort" if b"GET" in request else greeted)
        if b"GET" in request:
            connection.shutdown(socket.SHUT_RDWR)

    with peer(answer, seconds=60) as tier:
        assert "closed" in assert_fails_in_time(calls(tier)["get"], 0)


def test_a_wrong_value_of_the_right_length_does_not_verify() -> None:
    other = pack_header(NAMES[1], [8], [7])
    value = other + b"8 bytes."

    def answer(connection: socket.socket, request: bytes) -> None:
        commands = len(re.findall(rb"\*\d+\r\n", request))
        bulk = b"$%d\r\n%b\r\n" % (len(value), value)
        connection.sendall(bulk if b"GET" in request else b"+OK\r\n" * commands)

    with peer(answer) as tier:
        header, shard = room(len(other), 8)
        assert tier.get(NAMES[0], [header, shard])
        assert unpack_header(bytes(header), NAMES[0], [8]) is None
        assert unpack_header(bytes(header), NAMES[1], [8]) == [7]


def test_evicted_values_are_misses() -> None:
    with redis_server("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru") as (_, port):
        tier = open_at(port)
        value, read = filled(1_000_000), room(1_000_000)
        for name in NAMES[:40]:
            tier.put(name, value)
        there = tier.contains(NAMES[:40])
        assert 5 < sum(there) < 25
        assert [tier.get(name, read) for name in NAMES[:40]] == there
        tier.close()


def test_no_room_is_an_error_and_keeps_what_is_there() -> None:
    with redis_server("--maxmemory", "10mb", "--maxmemory-policy", "noeviction") as (_, port):
        tier = open_at(port)
        value, read = filled(1_000_000), room(1_000_000)
        tier.put(NAMES[0], value)
        texts = []
        for name in NAMES[1:40]:
            try:
                tier.put(name, value)
            except TierError as error:
                texts.append(str(error))
        assert len(texts) > 25
        assert "OutOfMemory" in texts[0]
        assert "maxmemory" in texts[0]
        assert tier.get(NAMES[0], read)
        assert read == value
        tier.close()


def test_a_password_opens_and_is_never_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server("--requirepass", SECRET) as (_, port):
        monkeypatch.delenv("LMCACHE_REDIS_PASSWORD", raising=False)
        assert "AuthenticationError" in assert_fails_in_time(
            lambda: open_at(port).contains(NAMES), 1
        )
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", SECRET)
        tier = open_at(port)
        tier.put(NAMES[0], filled(10))
        assert SECRET not in repr(tier)
        file = tmp_path / "password"
        file.write_text(f"{SECRET}\n")
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", "something-else")
        wrong = open_at(port)
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD_FILE", str(file))
        assert open_at(port).contains(NAMES[:1]) == [True]
        for call in calls(wrong).values():
            text = assert_fails_in_time(call, 1)
            assert "something-else" not in text
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD_FILE", str(tmp_path / "absent"))
        with pytest.raises(ConfigError, match="No such file"):
            open_at(port)
    assert SECRET not in caplog.text
    assert "something-else" not in caplog.text


QUOTES: dict[str, Callable[[bytes], bytes]] = {
    "all": lambda request: b"-ERR unknown: " + request.replace(b"\r\n", b" ") + b"\r\n",
    "the beginning": lambda request: b"-ERR what is " + request.split()[-1][:60] + b"?\r\n",
    "the end": lambda request: b"-WRONGPASS .." + request.split()[-1][-60:] + b"\r\n",
    "escaped": lambda request: b"-NOPERM " + repr(request).encode() + b"\r\n",
    "no error": lambda request: request.replace(b"\r\n", b" ") + b"\r\n",
    "no number": lambda request: b":" + request.split()[-1] + b"\r\n",
    "no type": lambda request: b"?" + request.split()[-1] + b"\r\n",
    "an array": lambda request: request,
}


@pytest.mark.parametrize("options", ["", "&cluster=true"])
@pytest.mark.parametrize("quote", QUOTES.values(), ids=QUOTES)
@pytest.mark.parametrize("secret", [SECRET, f"{SECRET}'\"%" * 20])
def test_a_server_that_quotes_the_password_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
    quote: Callable[[bytes], bytes],
    secret: str,
    options: str,
) -> None:
    monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", secret)
    told: list[str] = []
    with peer(
        lambda connection, request: connection.sendall(quote(request)), options=options
    ) as tier:
        for call in calls(tier).values():
            told.append(assert_fails_in_time(call, 0.4))
    assert options or all("check the credentials" in text for text in told), told
    parts = {SECRET[start : start + 6] for start in range(len(SECRET) - 5)}
    assert not [text for text in told for part in parts if part in text]


@pytest.mark.parametrize(
    "command", ["lpush KEY x", "sadd KEY x", "zadd KEY 1 x", "hset KEY x y", "xadd KEY * x y"]
)
def test_a_key_of_another_type_is_no_value(server: tuple[Server, int, str], command: str) -> None:
    _, port, options = server
    tier = open_at(port, f"timeout=2{options}")
    redis_cli(port, *command.replace("KEY", f"lmcache:{NAMES[7]}").split())
    assert tier.contains([NAMES[7]]) == [True]
    assert not tier.get(NAMES[7], room(1))
    tier.remove(NAMES[7])
    assert tier.contains([NAMES[7]]) == [False]
    tier.put(NAMES[7], filled(5))
    assert tier.get(NAMES[7], room(5))
    tier.close()


def test_values_of_another_length_leave_the_connection_usable(shared: int) -> None:
    tier = open_at(shared)
    value, read = filled(1_000_000), room(1_000_000)
    tier.put(NAMES[8], value)
    for size in (0, 1, 999_999, 1_000_001, 2_000_000):
        assert not tier.get(NAMES[8], room(size))
    assert tier.get(NAMES[8], read)
    assert read == value
    assert not tier.get(NAMES[9], room(0))
    tier.close()


def test_values_live_as_long_as_ttl_says(shared: int) -> None:
    tier = open_at(shared, "ttl=0.3")
    tier.put(NAMES[10], filled(10))
    assert tier.contains(NAMES[10:11]) == [True]
    time.sleep(0.4)
    assert tier.contains(NAMES[10:11]) == [False]
    open_at(shared).put(NAMES[10], filled(10))
    assert redis_cli(shared, "ttl", f"lmcache:{NAMES[10]}") == "-1"


def test_databases_are_apart(shared: int) -> None:
    third = open_tier(parse_tier_url(f"redis://127.0.0.1:{shared}/3"))
    third.put(NAMES[11], filled(10))
    assert third.contains(NAMES[11:12]) == [True]
    assert open_at(shared).contains(NAMES[11:12]) == [False]


def test_clear_finds_all_of_a_namespace_and_nothing_else() -> None:
    with redis_server() as (_, port):
        tier = open_at(port, "timeout=5")
        other = value_name("f" * 16, bytes(32), "full")
        redis_cli(port, "set", f"{NAMESPACE}/foreign", "x")
        names = [value_name(NAMESPACE, i.to_bytes(32, "big"), "full") for i in range(2500)]
        for name in [*names, other]:
            tier.put(name, filled(1))
        tier.clear("*")
        assert all(tier.contains([*names, other]))
        tier.clear(NAMESPACE)
        assert tier.contains([*names, other]) == [False] * 2500 + [True]
        assert redis_cli(port, "dbsize") == "2"
        tier.close()


def test_threads_share_a_tier(shared: int) -> None:
    tier = open_at(shared, "timeout=20")
    failed: list[int] = []

    def work(number: int) -> None:
        value, read = filled(10, 200_000), room(10, 200_000)
        for _ in range(10):
            tier.put(NAMES[20 + number], value)
            if not (tier.get(NAMES[20 + number], read) and read == value):
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    tier.close()


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on PATH")
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name]
    subprocess.run([*request, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key]
    try:
        with redis_server(*options, "--tls-auth-clients", "no"):
            with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED"):
                open_at(port, scheme="rediss").contains(NAMES)
            monkeypatch.setenv("SSL_CERT_FILE", certificate)
            tier = open_at(port, scheme="rediss")
            value, read = filled(100, 0, 3_000_000, 7), room(100, 0, 3_000_000, 7)
            tier.put(NAMES[0], value)
            assert tier.get(NAMES[0], read)
            assert read == value
            assert tier.contains(NAMES[:2]) == [True, False]
            tier.close()
    except RuntimeError:
        pytest.skip("redis-server is built without TLS")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://", "it must be redis://host:port/N"),
        ("redis://host:x", "Port"),
        ("redis://host/one", "invalid literal"),
        ("rediss://host/1?cluster=true", "0 in a cluster"),
        ("redis://host?cluster=maybe", "cluster=maybe"),
        ("redis://host?timeout=0", "timeout=0"),
        ("redis://host?ttl=nan", "ttl=nan"),
        ("redis://host?password=x", "no option 'password'; it has timeout, ttl, cluster"),
    ],
)
def test_bad_urls_are_refused_at_once(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_tier(parse_tier_url(url))


def test_without_redis_py_the_fix_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("redis", "redis_connection"):
        monkeypatch.delitem(sys.modules, f"lmcache_connector.storage.tiers.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'lmcache-connector\[redis\]'"):
        open_tier(parse_tier_url("redis://host"))
