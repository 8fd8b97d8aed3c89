"""``mooncake://`` on a real master and store: what is its own, beside the contract of all tiers."""

from __future__ import annotations

import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import servers

from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers import mooncake
from lmcache_connector.storage.tiers.base import TierError, open_tier, parse_tier_url

NAMESPACE = "0123456789abcdef"
MIB = 1 << 20


def name(number: int, namespace: str = NAMESPACE) -> str:
    return f"{namespace}/{number:064x}-full"


def open_mooncake(url: str) -> mooncake.MooncakeTier:
    tier = open_tier(parse_tier_url(url))
    assert isinstance(tier, mooncake.MooncakeTier)
    return tier


def pool_memory(num_bytes: int) -> memoryview:
    """Touched memory of a memfd, like an extent of the pool."""
    fd = os.memfd_create("pool")
    os.ftruncate(fd, num_bytes)
    memory = memoryview(mmap.mmap(fd, num_bytes))
    os.close(fd)
    memory[:] = bytes(num_bytes)
    return memory


def fails(call: Callable[..., object], *arguments: object) -> float:
    """Seconds until its TierError."""
    began = time.monotonic()
    with pytest.raises(TierError):
        call(*arguments)
    return time.monotonic() - began


def eventually(call: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(TierError):
            if call():
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    with servers.mooncake_url() as url:
        yield url


@pytest.fixture(scope="module")
def module_tier(shared: str) -> Iterator[mooncake.MooncakeTier]:
    tier = open_mooncake(shared)
    yield tier
    tier.close()


@pytest.fixture
def tier(module_tier: mooncake.MooncakeTier) -> mooncake.MooncakeTier:
    module_tier.clear(NAMESPACE)
    return module_tier


@pytest.fixture
def own(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[servers.Server, servers.Server, str]]:
    """A master and a store for a test to maltreat. Who hangs is given up after 1 s, not 3."""
    for variable in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        monkeypatch.setenv(variable, "1")
    with servers.mooncake_servers() as all_of_it:
        yield all_of_it


def test_values_go_into_the_memory_given_and_nowhere_else(tier: mooncake.MooncakeTier) -> None:
    memory = pool_memory(130 * MIB)
    tier.register(memory)
    memory[: 64 * MIB] = os.urandom(64 * MIB)
    header = os.urandom(48)
    tier.put(name(1), [memoryview(header), memory[5 : 40 * MIB], memoryview(b""), memory[:7]])

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = peak_mib()
    read = bytearray(48)
    there = [memoryview(read), memory[80 * MIB + 5 : 120 * MIB], memory[70 * MIB : 70 * MIB + 7]]
    assert tier.get(name(1), there)
    assert peak_mib() - before < 20  # a copy would take 40
    assert read == header
    assert memory[80 * MIB + 5 : 120 * MIB] == memory[5 : 40 * MIB]
    assert memory[70 * MIB : 70 * MIB + 7] == memory[:7]
    assert not any(memory[64 * MIB : 70 * MIB])
    assert not any(memory[70 * MIB + 7 : 80 * MIB + 5])
    assert not any(memory[120 * MIB :])


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes) / 1024


def test_another_process_reads_what_one_that_ended_has_put(
    tier: mooncake.MooncakeTier, shared: str
) -> None:
    program = (
        "import sys\n"
        "from lmcache_connector.storage.tiers.base import open_tier, parse_tier_url\n"
        "tier = open_tier(parse_tier_url(sys.argv[1]))\n"
        "tier.put(sys.argv[2], [memoryview(b'head'), memoryview(bytes(range(256)) * 4096)])\n"
        "tier.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, shared, name(2)], check=True, timeout=30)
    value = bytearray(4 + 256 * 4096)
    assert tier.get(name(2), [memoryview(value)])
    assert value == b"head" + bytes(range(256)) * 4096


def test_a_value_of_another_length_is_a_miss_and_makes_way(tier: mooncake.MooncakeTier) -> None:
    buffer = memoryview(bytearray(1000))
    assert not tier.get(name(3), [buffer])
    tier.put(name(3), [memoryview(b"x" * 1000)])
    assert not tier.get(name(3), [buffer[:999]])
    assert not tier.get(name(3), [buffer, buffer[:1]])
    assert tier.contains([name(3)]) == [True]  # which leases it for 10 s
    tier.put(name(3), [memoryview(b"y" * 10)])
    assert tier.get(name(3), [buffer[:10]])
    assert bytes(buffer[:10]) == b"y" * 10
    tier.remove(name(3))
    tier.remove(name(3))
    assert tier.contains([name(3)]) == [False]


def test_clear_takes_one_namespace(tier: mooncake.MooncakeTier) -> None:
    other = name(4, "fedcba9876543210")
    for each in (name(4), name(5), other):
        tier.put(each, [memoryview(b"value")])
    tier.clear(NAMESPACE)
    assert tier.contains([name(4), other, name(5)]) == [False, True, False]


def test_no_room_is_an_error(tier: mooncake.MooncakeTier) -> None:
    memory = pool_memory(300 * MIB)
    with pytest.raises(TierError, match="no store has room"):
        tier.put(name(6), [memory])
    assert tier.contains([name(6)]) == [False]


def test_the_network_can_neither_read_nor_write_the_pool(tier: mooncake.MooncakeTier) -> None:
    memory = pool_memory(MIB)
    tier.register(memory)
    memory[:] = b"s" * MIB
    tier.put(name(7), [memory])
    address = np.frombuffer(memory, np.uint8).ctypes.data
    sockets = {
        os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()
    }
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    lines = [line.split() for line in tables.splitlines()]
    ports = [
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in sockets
    ]
    assert ports
    for port in ports:
        for opcode, body in [(0x80, b""), (0x81, b"EVIL" * 4), (0, b""), (1, b"EVIL" * 4)]:
            with socket.create_connection(("127.0.0.1", port), timeout=0.5) as peer:
                peer.sendall(struct.pack("<QQB7x", 16, address, opcode) + body)
                with suppress(OSError):
                    assert b"ssss" not in peer.recv(64)
    assert memory == b"s" * MIB


def test_other_networks_than_tcp_get_the_pool_registered(shared: str) -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("takes a machine without RDMA: there the library falls back to TCP")
    tier = open_mooncake(f"{shared}?protocol=rdma&host=127.0.0.1")
    memory = pool_memory(2 * MIB)
    tier.register(memory)
    try:
        for round in range(3):  # the header's place is taken again and again
            header, read = os.urandom(40), bytearray(40)
            memory[:MIB] = os.urandom(MIB)
            tier.put(name(8 + round), [memoryview(header), memory[:MIB]])
            assert tier.get(name(8 + round), [memoryview(read), memory[MIB:]])
            assert read == header
            assert memory[MIB:] == memory[:MIB]
    finally:
        tier.close()


def test_a_dead_master_is_an_error_and_a_new_one_is_found(
    own: tuple[servers.Server, servers.Server, str],
) -> None:
    master, _, url = own
    tier = open_mooncake(url)
    buffer = memoryview(bytearray(b"z" * 1000))
    tier.put(name(1), [buffer])
    master.stop()
    assert fails(tier.get, name(1), [buffer]) < 5
    master.resume()
    eventually(lambda: tier.get(name(1), [buffer]), 5)
    master.kill()
    assert fails(tier.put, name(2), [buffer]) < 10
    master.start()  # it knows of no value any more
    eventually(lambda: tier.contains([name(1)]) == [False], 10)
    eventually(lambda: tier.put(name(3), [buffer]) or tier.get(name(3), [buffer]), 20)
    tier.close()
    assert fails(tier.contains, [name(1)]) < 0.1


def test_without_a_master_it_opens_and_halts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    monkeypatch.setattr(mooncake, "_RETRY_SECONDS", 1.2)
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.wait(0.01):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    ticker = threading.Thread(target=tick)
    ticker.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects by its backlog, says nothing
        tier = open_mooncake(f"mooncake://127.0.0.1:{silent.getsockname()[1]}")
        assert 0.5 < fails(tier.contains, [name(1)]) < 2
        assert fails(tier.contains, [name(1)]) < 0.1  # not tried again yet
        time.sleep(0.3)
    assert fails(tier.contains, [name(1)]) < 0.5  # refused
    tier.close()
    done.set()
    ticker.join()
    assert max(gaps) < 1.5  # setup() would hold them for 2 s


def test_a_master_that_comes_later_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_RETRY_SECONDS", 0.2)
    with servers.mooncake_servers() as (master, _, url):
        master.kill()
        tier = open_mooncake(url)
        assert fails(tier.contains, [name(1)]) < 0.5
        master.start()
        eventually(lambda: tier.contains([name(1)]) == [False], 5)
        tier.close()


@pytest.mark.parametrize("ended_seconds", [50.0, 0.0], ids=["ended", "doubtful"])
def test_a_transfer_given_up_never_writes_again(
    own: tuple[servers.Server, servers.Server, str],
    monkeypatch: pytest.MonkeyPatch,
    ended_seconds: float,
) -> None:
    """In doubt whether the transfer runs, the client is closed before ``get`` returns."""
    monkeypatch.setattr(mooncake, "_ENDED_SECONDS", ended_seconds)
    _, store, url = own
    tier = open_mooncake(url)
    memory = pool_memory(130 * MIB)
    value, target = memory[: 64 * MIB], memory[66 * MIB :]
    value[:] = b"v" * len(value)
    tier.put(name(1), [value])
    client = tier._client

    def stop_midway() -> None:
        while target[0] == 0:
            pass
        store.stop()

    stopper = threading.Thread(target=stop_midway)
    stopper.start()
    assert fails(tier.get, name(1), [target]) < 10
    stopper.join()
    halfway = target.tobytes()
    assert halfway[0]
    assert not halfway[-1]
    assert (tier._client is client) == (ended_seconds > 0)
    store.resume()
    time.sleep(1.5)
    assert target == halfway
    eventually(lambda: tier.get(name(1), [target]), 10)
    assert target == value
    tier.close()


def test_closing_waits_for_calls_that_are_inside(
    own: tuple[servers.Server, servers.Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_ENDED_SECONDS", 0.0)
    _, store, url = own
    tier = open_mooncake(url)
    tier.put(name(1), [memoryview(b"v" * 1000)])
    store.stop()
    buffers = [memoryview(bytearray(1000)) for _ in range(4)]
    took: list[float] = []

    def read(buffer: memoryview) -> None:
        took.append(fails(tier.get, name(1), [buffer]))

    readers = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
    for reader in readers:
        reader.start()
        time.sleep(0.25)
    for reader in readers:
        reader.join()
    # Each waits 1 s for the store; the first then for the last, begun 0.75 s later.
    assert len(took) == 4
    assert max(took) > 1.5
    assert max(took) < 10
    store.resume()
    eventually(lambda: tier.get(name(1), buffers[:1]), 10)
    tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://127.0.0.1",
        "mooncake://127.0.0.1:50051/path",
        "mooncake://127.0.0.1:50051?segment=much",
        "mooncake://127.0.0.1:50051?size=1GB",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_tier(parse_tier_url(url))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"lmcache-connector\[mooncake\].*libibverbs1"):
        open_tier(parse_tier_url("mooncake://127.0.0.1:50051"))
