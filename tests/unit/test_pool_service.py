"""The memory socket: hand-out, readiness, hostile peers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_connector.errors import ProtocolError
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import protocol, sockets
from lmcache_connector.server.client import PoolClient, open_control
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.pool import MemoryPool

PAGE = 4096
TIMEOUT = 20.0

# A rank as its own process: attaches, then obeys lines of "read|write EXTENT OFFSET TEXT".
WORKER = """
import sys
from pathlib import Path
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server.client import PoolClient

client = PoolClient(Path(sys.argv[1]), int(sys.argv[2]))
assert client._attached.wait(20)
assert client.hold(client.incarnation)
print("attached", client.incarnation, flush=True)
for line in sys.stdin:
    verb, extent, offset, text = line.split()
    view = client.view(SlotRef(int(extent), int(offset), len(text)))
    if verb == "write":
        view[:] = text.encode()
    print(bytes(view).decode(), flush=True)
    del view
client.close()
print("closed", flush=True)
sys.stdin.close()
"""


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Rank:
    """A worker process."""

    def __init__(self, path: str, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, path, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.line()[0]

    def end(self) -> None:
        kill(self.process)


@pytest.fixture
def temp() -> Iterator[Path]:
    """A directory with a name short enough for sockets (tmp_path has a long one)."""
    with tempfile.TemporaryDirectory(prefix="lc-") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def _warnings_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_connector.log._last", {})


@pytest.fixture
def directory(temp: Path) -> Path:
    path = temp / "lmcache"
    path.mkdir(mode=0o700)
    return path


class Served:
    """A pool of extents of 4 pages with its service, and what the service told."""

    def __init__(self, endpoint: Path, ranks: int, extents: int, allow: Sequence[int]) -> None:
        self.pool = MemoryPool(extents * 4 * PAGE, 4 * PAGE)
        self.ended: list[str] = []
        self.controls: list[str] = []
        self.ready: list[int] = []
        self.service = PoolService(
            self.pool.extents, endpoint, allowed_uids=allow, on_mapped=self.ready.append
        )
        self.service.on_workers_gone = self.ended.append
        self.service.on_control_end = self.controls.append
        self.service.add_instance("", ranks)
        self.path = Path(self.service.pool_ref().socket_path)
        self.clients: list[PoolClient] = []

    def client(self, rank: int, **kwargs: Any) -> PoolClient:
        client = PoolClient(self.path, rank, **kwargs)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.service.close()
        self.pool.close()


Serve = Callable[..., Served]


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    made: list[Served] = []

    def start(
        ranks: int = 1, extents: int = 2, endpoint: Path | None = None, allow: Sequence[int] = ()
    ) -> Served:
        made.append(Served(endpoint or directory / f"{'0' * 24}.sock", ranks, extents, allow))
        return made[-1]

    yield start
    for served in made:
        served.close()
    assert os.listdir(directory) == []


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@contextlib.contextmanager
def raw_peer(path: Path) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket(socket.AF_UNIX, sockets.SOCKET_TYPE)) as peer:
        peer.settimeout(TIMEOUT)
        peer.connect(str(path))
        yield peer


def round_trip(path: Path) -> None:
    """Return when the service has handled all that came before (it drops this one)."""
    with raw_peer(path) as peer:
        peer.send(b"\xc1")
        assert peer.recv(1) == b""


def hello(rank: int = 0, version: int = protocol.PROTOCOL_VERSION, instance: str = "") -> bytes:
    return protocol.encode(protocol.Hello(version, rank, instance))


def reply(peer: socket.socket) -> protocol.OwnerFrame:
    return protocol.decode_owner_frame(peer.recv(protocol.MAX_FRAME_BYTES))


# ---- memory -------------------------------------------------------------------------------------


def test_ranks_in_other_processes_share_the_memory(serve: Serve) -> None:
    names = set(os.listdir("/dev/shm"))
    served = serve(ranks=2)
    own = served.client(0)
    other = Rank(str(served.path), 1)
    try:
        assert other.line() == ["attached", served.service.incarnation]
        assert served.service.wait_ready(TIMEOUT)
        assert served.ready == [1, 2]
        slot = SlotRef(1, PAGE, 5)
        assert other.ask(f"write 1 {PAGE} hello") == "hello"
        assert bytes(own.view(slot)) == b"hello"
        own.view(slot)[:] = b"world"
        assert other.ask(f"read 1 {PAGE} .....") == "world"
        assert os.pread(served.pool.extents[1].fd, 5, PAGE) == b"world"
        assert "memfd:" in Path(f"/proc/{other.process.pid}/maps").read_text()
        assert set(os.listdir("/dev/shm")) == names
        assert other.process.stdin is not None
        other.process.stdin.close()
        assert other.line() == ["closed"]
        own.close()
        until(lambda: served.ended == [""])
    finally:
        other.end()


def test_an_extent_is_ready_once_every_rank_has_mapped_it(serve: Serve) -> None:
    served = serve(ranks=2, extents=3)
    fast = served.client(0)
    assert fast._attached.wait(TIMEOUT)
    assert served.ready == []
    with raw_peer(served.path) as slow:
        slow.send(hello(rank=1))
        for extent in range(2):
            slow.send(protocol.encode(protocol.ExtentMapped(extent)))
        until(lambda: served.ready == [1, 2])
        assert not served.service.wait_ready(0.05)
    # It is gone before the last one; its successor has to map all of them.
    successor = served.client(1)
    assert served.service.wait_ready(TIMEOUT)
    assert served.ready == [1, 2, 3]
    assert served.ended == []
    fast.close()
    successor.close()
    until(lambda: served.ended == [""])
    assert not served.service.wait_ready(0.0)
    # What was told once is not told again.
    served.client(0)
    served.client(1)
    assert served.service.wait_ready(TIMEOUT)
    assert served.ready == [1, 2, 3]


def test_extents_are_registered_before_they_count_as_mapped(serve: Serve) -> None:
    served = serve()
    seen: list[tuple[int, int, bool, list[int]]] = []

    def register(address: int, nbytes: int) -> None:
        until(lambda: served.clients)  # made, and not only at work
        seen.append(
            (address, nbytes, (len(seen) < len(served.clients[0]._addresses)), list(served.ready))
        )

    client = served.client(0, register_extent=register)
    assert client._attached.wait(TIMEOUT)
    assert [nbytes for _, nbytes, _, _ in seen] == [4 * PAGE] * 2
    assert not any(mapped for _, _, mapped, _ in seen)
    assert 1 not in seen[0][3]
    assert 2 not in seen[1][3]
    assert client.address(SlotRef(1, 100, 1)) == seen[1][0] + 100


def test_a_worker_that_cannot_pin_keeps_what_it_has(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served, pinned = serve(), []

    def register(address: int, nbytes: int) -> None:
        if pinned:
            raise RuntimeError("no more pinned memory")
        pinned.append(address)

    client = served.client(0, register_extent=register)
    until(lambda: "no more pinned memory" in caplog.text)
    assert len(client._addresses) > 0
    assert not (len(client._addresses) > 1)
    until(lambda: served.ready == [1])
    # It may still be copying to extent 0: it must not be taken for dead.
    time.sleep(0.05)
    assert served.ended == []


@pytest.mark.parametrize("extent", [0, 1, 2])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "no descriptor"),
        RuntimeError("no pin"),
        ProtocolError("a packet was cut"),
    ],
    ids=["map", "pin", "receive"],
)
def test_a_worker_that_could_not_map_all_begins_anew(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, error: Exception, extent: int
) -> None:
    monkeypatch.setattr("lmcache_connector.server.client._MIN_PARTIAL_SECONDS", 0.1)
    served, failures, map_extent = serve(extents=3), [0.0, 0.0], PoolClient._map

    def fail_twice(client: PoolClient, fd: int | None, nbytes: int) -> None:
        if failures and len(client._maps) == extent:
            failures.pop()
            raise error
        map_extent(client, fd, nbytes)

    monkeypatch.setattr(PoolClient, "_map", fail_twice)
    client = served.client(0)
    if extent:
        # A copy that runs is waited for.
        until(
            lambda: (
                (extent - 1 < len(client._addresses)) and client.hold(served.service.incarnation)
            )
        )
        until(lambda: client.incarnation is None)
        assert extent - 1 < len(client._addresses)
        client.drop()
    assert client._attached.wait(TIMEOUT)
    assert not failures
    assert served.service.wait_ready(TIMEOUT)
    assert client._partial_seconds == 0.1
    # It stays.
    time.sleep(0.25)
    assert client._attached.wait(0)


def test_who_keeps_failing_to_map_all_tries_less_and_less(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_connector.server.client._MIN_PARTIAL_SECONDS", 0.02)
    monkeypatch.setattr("lmcache_connector.server.client._MAX_PARTIAL_SECONDS", 0.1)
    served, tries = serve(), []

    def register(address: int, nbytes: int) -> None:
        until(lambda: served.clients)
        if len(served.clients[0]._addresses) > 0:
            tries.append(time.monotonic())
            raise OSError("never")

    served.client(0, register_extent=register)
    until(lambda: len(tries) == 6)
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert all(
        wait > least for wait, least in zip(waits, [0.02, 0.04, 0.08, 0.1, 0.1], strict=True)
    )
    assert served.clients[0]._partial_seconds == 0.1


def test_peers_are_refused_before_descriptors_run_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq would abort the process."""
    served = serve()
    limit = len(os.listdir("/proc/self/fd")) + 64 + 40
    monkeypatch.setattr("lmcache_connector.server.service.getrlimit", lambda _: (limit, limit))
    control = protocol.encode(protocol.Hello(protocol.PROTOCOL_VERSION, None))
    with contextlib.ExitStack() as peers:
        for number in range(40):
            peer = peers.enter_context(raw_peer(served.path))
            peer.send(control if number % 2 else hello())
            answer = reply(peer)
            if isinstance(answer, protocol.Refused):
                break
        assert 10 < number < 39
        assert isinstance(answer, protocol.Refused)
        assert (answer.retry, "ulimit -n" in answer.reason) == (True, True)
        for each in (control, hello()):
            with raw_peer(served.path) as peer:
                peer.send(each)
                assert isinstance(reply(peer), protocol.Refused)
                assert peer.recv(1) == b""
    until(lambda: not served.service._sessions)
    with raw_peer(served.path) as peer:
        peer.send(control)
        assert isinstance(reply(peer), protocol.Welcome)


def test_slots_beyond_the_memory_are_refused(serve: Serve) -> None:
    served = serve(extents=1)
    client = served.client(0)
    assert client._attached.wait(TIMEOUT)
    assert client.incarnation == served.service.incarnation
    assert len(client.view(SlotRef(0, 0, 4 * PAGE))) == 4 * PAGE
    for bad in (
        SlotRef(1, 0, 1),
        SlotRef(-1, 0, 1),
        SlotRef(0, -1, 1),
        SlotRef(0, 0, -1),
        SlotRef(0, 0, 4 * PAGE + 1),
        SlotRef(0, 4 * PAGE, 1),
    ):
        with pytest.raises(ProtocolError):
            client.address(bad)
        with pytest.raises(ProtocolError):
            client.view(bad)


def test_memory_goes_with_the_service_once_no_copy_holds_it(serve: Serve) -> None:
    unpinned: list[int] = []
    served = serve()
    client = served.client(0, unregister_extent=unpinned.append)
    assert client._attached.wait(TIMEOUT)
    life = served.service.incarnation
    assert not client.hold("another")
    assert client.hold(life)
    assert client.hold(life)
    client.drop()
    client.view(SlotRef(0, 0, 3))[:] = b"abc"
    pinned = [client.address(SlotRef(extent, 0, 1)) for extent in range(2)]
    served.service.close()
    until(lambda: client.incarnation is None)
    assert not client.hold(life)
    assert bytes(client.view(SlotRef(0, 0, 3))) == b"abc"
    assert not unpinned
    # Whoever starts a copy is refused; the one that runs ends in peace.
    left = client.view(SlotRef(0, 0, 3))
    client.drop()
    until(lambda: unpinned == pinned)
    time.sleep(0.1)
    left.release()
    until(lambda: not client._maps)
    assert served.ended == []


def test_the_next_service_is_attached_to(serve: Serve) -> None:
    first = serve()
    client = first.client(0)
    assert client._attached.wait(TIMEOUT)
    assert client.hold(first.service.incarnation)
    first.service.close()
    until(lambda: client.incarnation is None)
    second = serve()
    # Not before the last copy has let go of the first one's memory.
    assert not second.service.wait_ready(0.3)
    client.drop()
    assert second.service.wait_ready(TIMEOUT)
    assert client.hold(second.service.incarnation)
    assert not client.hold(first.service.incarnation)
    client.view(SlotRef(1, 0, 3))[:] = b"new"
    assert os.pread(second.pool.extents[1].fd, 3, 0) == b"new"
    client.drop()
    client.close()
    until(lambda: second.ended == [""])


def test_memory_that_is_still_viewed_is_not_given_up(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(extents=1)
    client = served.client(0)
    assert client._attached.wait(TIMEOUT)
    view = client.view(SlotRef(0, 0, 3))
    client.close()
    assert "stays mapped" in caplog.text
    view[:] = b"abc"
    time.sleep(0.05)
    assert served.ended == []
    view.release()
    client.close()
    until(lambda: served.ended == [""])


def test_a_worker_may_come_before_the_service_and_before_its_instance(
    directory: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = directory / f"{'1' * 24}.sock"
    client = PoolClient(sockets.memory_path(endpoint), 0, "engine")
    assert not client._attached.wait(0.1)
    served = serve(endpoint=endpoint)
    served.clients.append(client)
    assert not client._attached.wait(0.2)
    served.service.add_instance("engine", 1)
    assert client._attached.wait(TIMEOUT)
    # That is how every start looks.
    assert caplog.text == ""


# ---- instances and control connections ----------------------------------------------------------


def test_instances_are_ready_and_gone_each_on_its_own(serve: Serve) -> None:
    served = serve()
    service = served.service
    service.add_instance("one", 2)
    service.add_instance("two", 1)
    first, last = served.client(0, instance="one"), served.client(0, instance="two")
    assert service.wait_ready(TIMEOUT, "two")
    assert not service.wait_ready(0.05, "one")
    second = served.client(1, instance="one")
    assert service.wait_ready(TIMEOUT, "one")
    assert not service.wait_ready(0.0)
    assert service.pool_ref("one").instance == "one"
    first.close()
    last.close()
    until(lambda: served.ended == ["two"])
    # Its other rank may still write.
    assert not service.remove_instance("one")
    second.close()
    until(lambda: served.ended == ["two", "one"])
    assert service.remove_instance("one")
    assert service.remove_instance("never known")


def test_workers_of_an_instance_that_was_removed_are_refused_until_it_is_back(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    served.service.add_instance("engine", 2)
    assert served.client(0, instance="engine")._attached.wait(TIMEOUT)
    assert not served.service.remove_instance("engine")
    with raw_peer(served.path) as peer:
        peer.send(hello(rank=1, instance="engine"))
        refused = reply(peer)
        assert isinstance(refused, protocol.Refused)
        assert refused.retry
        assert peer.recv(1) == b""
    late = served.client(1, instance="engine")
    assert not late._attached.wait(0.1)
    served.service.add_instance("engine", 2)
    assert late._attached.wait(TIMEOUT)
    assert served.service.wait_ready(TIMEOUT, "engine")
    assert caplog.text == ""


def test_a_token_lives_as_long_as_its_connection(serve: Serve) -> None:
    served = serve()
    ours, welcome = open_control(served.path, TIMEOUT)
    other, another = open_control(served.path, TIMEOUT)
    assert welcome.incarnation == served.service.incarnation
    assert welcome.token != another.token
    assert welcome.token in served.service.tokens
    assert "0" * 64 not in served.service.tokens
    ours.close()
    until(lambda: served.controls == [welcome.token])
    assert welcome.token not in served.service.tokens
    assert another.token in served.service.tokens
    other.close()
    until(lambda: len(served.controls) == 2)
    assert served.ended == []


@pytest.mark.parametrize(
    "frame", [hello(), protocol.encode(protocol.ExtentMapped(0)), b"\xc1", bytes(5000)]
)
def test_a_control_connection_is_nothing_else(serve: Serve, frame: bytes) -> None:
    served = serve()
    connection, welcome = open_control(served.path, TIMEOUT)
    with connection:
        connection.send(frame)
        assert connection.recv(100) == b""
    until(lambda: served.controls == [welcome.token])


def test_a_control_connection_of_another_version_hears_why(serve: Serve) -> None:
    served = serve()
    with raw_peer(served.path) as peer:
        peer.send(protocol.encode(protocol.Hello(1, None)))
        refused = reply(peer)
        assert isinstance(refused, protocol.Refused)
        assert "install the same" in refused.reason
    assert served.controls == []


def test_closing_a_worker_that_waits_ends_its_thread(directory: Path, serve: Serve) -> None:
    waiting = PoolClient(directory / "nobody.sock", 0)
    waiting.close()


# ---- peers that misbehave -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1 no msgpack"],
        [msgspec.msgpack.encode({"type": "hello"})],
        [msgspec.msgpack.encode({"type": "unknown", "rank": 0})],
        [msgspec.msgpack.encode({"type": "hello", "version": 1, "rank": -1})],
        [msgspec.msgpack.encode({"type": "hello", "version": 1, "rank": "0"})],
        [msgspec.msgpack.encode({"type": "hello", "version": 1, "rank": 0, "more": 0})],
        [msgspec.msgpack.encode({"type": "hello", "version": 2, "rank": 0, "instance": "x" * 257})],
        [msgspec.msgpack.encode({"type": "hello", "version": 2})],
        [b"\x00" * (protocol.MAX_FRAME_BYTES + 1)],
        [protocol.encode(protocol.ExtentMapped(0))],
        [hello(version=999)],
        [hello(rank=1)],
        [hello(), hello()],
        [hello(), protocol.encode(protocol.ExtentMapped(1))],
        [hello(), b"\xc1"],
    ],
)
def test_a_malformed_frame_ends_only_its_own_connection(
    serve: Serve, caplog: pytest.LogCaptureFixture, frames: list[bytes]
) -> None:
    served = serve()
    with raw_peer(served.path) as peer:
        for frame in frames:
            with contextlib.suppress(BrokenPipeError):
                peer.send(frame)
        while True:
            data, fds, _, _ = socket.recv_fds(peer, protocol.MAX_FRAME_BYTES, 1)
            for fd in fds:
                os.close(fd)
            if not data:
                break
        assert caplog.text.count("memory socket: dropped") == 1
        with contextlib.suppress(BrokenPipeError):
            peer.send(b"\xc1")
        round_trip(served.path)
        assert caplog.text.count("memory socket: dropped") == 2
        # Memory was handed out after a good hello: only the peer's own end says that it is gone.
        assert served.ended == []
    accepted = frames[0] == hello()
    until(lambda: served.ended == [""] * accepted)
    client = served.client(0)
    assert client._attached.wait(TIMEOUT)
    assert served.service.wait_ready(TIMEOUT)


def test_a_refused_worker_hears_why(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(ranks=1)
    served.client(7)
    until(lambda: "rank 7 is not one of 1 ranks" in caplog.text and "failed" in caplog.text)
    with raw_peer(served.path) as peer:
        peer.send(hello(version=1))
        refused = reply(peer)
        assert isinstance(refused, protocol.Refused)
        assert "version 1 of the worker" in refused.reason
        assert not refused.retry


def test_a_long_frame_is_named_as_such(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve()
    with raw_peer(served.path) as peer:
        peer.send(hello() + bytes(protocol.MAX_FRAME_BYTES))
        assert peer.recv(1) == b""
    assert "a frame of more than 4096 bytes" in caplog.text


def test_workers_are_gone_with_their_last_connection(serve: Serve) -> None:
    served = serve()
    client = served.client(0)
    assert client._attached.wait(TIMEOUT)
    with raw_peer(served.path) as second:
        second.send(hello())
        assert second.recv(protocol.MAX_FRAME_BYTES)
    round_trip(served.path)
    assert served.ended == []
    client.close()
    until(lambda: served.ended == [""])


def test_a_peer_that_reads_nothing_does_not_stop_the_service(serve: Serve) -> None:
    served = serve(ranks=1, extents=100)
    with raw_peer(served.path) as peer:
        peer.send(hello())
        for extent in range(100):
            try:
                peer.send(protocol.encode(protocol.ExtentMapped(extent)))
            except BrokenPipeError:
                break
        client = served.client(0)
        assert client._attached.wait(TIMEOUT)


def test_other_users_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setattr(sockets, "peer_uid", lambda connection: os.geteuid() + 1)
    with raw_peer(served.path) as peer, contextlib.suppress(ConnectionError):
        peer.send(hello())
        assert peer.recv(100) == b""
    monkeypatch.undo()
    client = served.client(0)
    assert client._attached.wait(TIMEOUT)
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600


def test_another_user_who_is_allowed_is_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    served = serve(allow=[other])
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o666
    monkeypatch.setattr(sockets, "peer_uid", lambda connection: other)
    with raw_peer(served.path) as peer:
        peer.send(hello())
        assert isinstance(reply(peer), protocol.Welcome)
    # It is not the owner of the directory, for whom a client takes it.
    with pytest.raises(ProtocolError, match="run by user"):
        sockets.connect(served.path, TIMEOUT)
    monkeypatch.setattr(sockets, "peer_uid", lambda connection: os.geteuid())
    monkeypatch.setattr(sockets, "is_trusted", lambda uid: False)
    sockets.connect(served.path, TIMEOUT).close()


def test_a_service_of_another_user_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    monkeypatch.setattr(sockets, "peer_uid", lambda connection: os.geteuid() + 1)
    client = PoolClient(served.path, 0)
    until(lambda: f"{served.path} is run by user" in caplog.text)
    assert client.incarnation is None
    client.close()


@pytest.mark.parametrize(
    ("nbytes", "size", "problem"),
    [
        (4 * PAGE, 2 * PAGE, "came as a file of 8192 bytes"),
        (2 * PAGE, 4 * PAGE, "came as a file of 16384 bytes"),
        (PAGE + 1, PAGE + 1, "an extent of 4097 bytes"),
        (0, 0, "an extent of 0 bytes"),
        (4 * PAGE, None, "without its memory"),
    ],
)
def test_a_worker_checks_what_it_is_offered(
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    nbytes: int,
    size: int | None,
    problem: str,
) -> None:
    listener, endpoint = sockets.listen_private(directory / "service.sock")
    client = PoolClient(sockets.memory_path(endpoint), 0)
    connection, _ = listener.accept()
    protocol.decode_worker_frame(connection.recv(100))
    connection.send(protocol.encode(protocol.Welcome("0" * 32, 1)))
    fd = os.memfd_create("test")
    os.ftruncate(fd, size or 0)
    offer = protocol.encode(protocol.ExtentOffer(0, nbytes))
    socket.send_fds(connection, [offer], [] if size is None else [fd])
    until(lambda: problem in caplog.text)
    assert not client._addresses
    client.close()
    os.close(fd)
    connection.close()
    listener.close()


def test_descriptors_are_not_leaked(serve: Serve) -> None:
    served = serve(extents=4)

    def attach_and_leave() -> None:
        client = served.client(0)
        assert client._attached.wait(TIMEOUT)
        client.close()
        until(lambda: len(served.service._sessions) == 0)

    attach_and_leave()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        attach_and_leave()
    assert len(os.listdir("/proc/self/fd")) == before
