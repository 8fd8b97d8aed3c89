"""Real servers for the tests of tiers: processes of their own, on ports of the loopback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process and how to treat it badly. ``is_ready`` raises OSError while it does not answer."""

    def __init__(self, command: list[str], directory: str, is_ready: Callable[[], bool]) -> None:
        self.command = command
        self._directory = directory
        self._is_ready = is_ready
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                if self._is_ready():
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.command} did not start")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """It answers no more, but its connections stay."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.resume()


@contextmanager
def running(command: list[str], is_ready: Callable[[], bool]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        server = Server(command, directory, is_ready)
        try:
            yield server
        finally:
            server.kill()


def redis_cli(port: int, *arguments: str) -> str:
    command = ["redis-cli", "-p", str(port), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()


@contextmanager
def redis_server(*options: str) -> Iterator[tuple[Server, int]]:
    """The server and its port; ``options`` as on its command line. It stores nothing on disk."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on PATH")
    port = free_port()

    def is_ready() -> bool:
        if "--cluster-enabled" not in options:
            return redis_cli(port, "ping") not in ("", "LOADING")  # NOAUTH is an answer, too
        state = redis_cli(port, "cluster", "info")
        if "cluster_slots_assigned:0" in state:
            redis_cli(port, "cluster", "addslotsrange", "0", "16383")
        return "cluster_state:ok" in state

    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with running([*command, *options], is_ready) as server:
        yield server, port


@contextmanager
def redis_url(options: str = "timeout=2") -> Iterator[str]:
    with redis_server() as (_, port):
        yield f"redis://127.0.0.1:{port}/0?{options}"


@contextmanager
def redis_cluster_url(options: str = "timeout=2") -> Iterator[str]:
    """A cluster of one node."""
    bus = str(free_port())
    with redis_server("--cluster-enabled", "yes", "--cluster-port", bus) as (_, port):
        yield f"redis://127.0.0.1:{port}?cluster=true&{options}"


AWS = {
    "AWS_ACCESS_KEY_ID": "AKIAOFTHETESTS",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1",
}


@contextmanager
def s3_server(bucket: str = "bucket") -> Iterator[tuple[Server, str]]:
    """The server and its endpoint, with an empty bucket."""
    pytest.importorskip("moto", reason="moto is not installed")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
        with urllib.request.urlopen(request, timeout=5):
            return True

    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, is_ready) as server, mock.patch.dict(os.environ, AWS):
        yield server, endpoint


@contextmanager
def s3_url(options: str = "timeout=5") -> Iterator[str]:
    with s3_server() as (_, endpoint):
        yield f"s3://bucket/a/prefix?endpoint={endpoint}&{options}"


# A store: memory for the values of others.
_MOONCAKE_STORE = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
if store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]):
    sys.exit("no master")
signal.pause()
"""


@contextmanager
def mooncake_servers(segment_bytes: int = 256 << 20) -> Iterator[tuple[Server, Server, str]]:
    """A master, the one store that it has, and the tier's URL."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    address, metrics = f"127.0.0.1:{free_port()}", free_port()

    def segments() -> bytes:
        url = f"http://127.0.0.1:{metrics}/get_all_segments"
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bytes(answer.read()).strip()

    master_command = [
        str(Path(sys.executable).parent / "mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={address.rpartition(':')[2]}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}",
    ]
    store_command = [sys.executable, "-c", _MOONCAKE_STORE, address, str(segment_bytes)]
    with (
        running(master_command, lambda: segments() is not None) as master,
        running(store_command, lambda: segments() != b"") as store,
    ):
        yield master, store, f"mooncake://{address}"


@contextmanager
def mooncake_url() -> Iterator[str]:
    """The tier's URL of a master and a store of their own."""
    with mooncake_servers() as (_, _, url):
        yield url
