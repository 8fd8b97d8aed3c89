"""Temporary: findings of the review of the server."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

sys.path[:0] = [str(Path(__file__).parent)]
import test_cache_server as t

from lmcache_connector.config import load_config
from lmcache_connector.errors import ConfigError, ProtocolError
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import messages, store_client
from lmcache_connector.server.cache_server import CacheServer
from lmcache_connector.server.service import PoolService
from lmcache_connector.server.session import RefusedError
from lmcache_connector.storage.base import LookupReply, LookupState, NewRow
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.tiers.base import parse_tier_url

directory, house, lonely = t.directory, t.house, t.lonely


@pytest.mark.parametrize("name", ["/", ".*", "..", "no such", "0123456789abcdef\n", "0" * 17])
def test_only_a_whole_namespace_can_be_cleared(house: t.House, name: str) -> None:
    with pytest.raises(RefusedError, match="malformed"):
        house.session().call(messages.ClearNamespace(name), t.TIMEOUT)


def test_control_characters_reach_no_log(house: t.House) -> None:
    for message in (t.registration("a\nb"), msgspec.structs.replace(t.registration(), model="\x1b[2J")):
        with pytest.raises(RefusedError, match="malformed"):
            house.session().call(message, t.TIMEOUT)


def test_ranks_that_contradict_each_other_are_refused(house: t.House) -> None:
    ranks = [t.geometry(rank, 2) for rank in range(2)]
    groups = [t.kernel_group(0, t.ReuseRule(t.ReuseKind.STATE, 5), 16)]
    other = msgspec.structs.replace(
        ranks[1], pp_size=1 << 40, kernel_groups=tuple(groups),
        engine_groups=t.engine_group_infos(groups),
    )
    message = msgspec.structs.replace(t.registration(), geometries=[ranks[0], other])
    with pytest.raises(RefusedError, match="rank 1"):
        house.session().call(message, 5.0)


def test_rows_without_bytes_are_refused(house: t.House) -> None:
    groups = [t.kernel_group(0, t.ReuseRule(t.ReuseKind.CHUNKED, 512), 16)]
    geometry = msgspec.structs.replace(
        t.geometry(), engine_groups=t.engine_group_infos(groups), kernel_groups=tuple(groups)
    )
    session = house.session()
    session.call(msgspec.structs.replace(t.registration(), geometries=[geometry]), t.TIMEOUT)
    house.worker()
    t.until(lambda: session.call(messages.Ping(), t.TIMEOUT))
    with pytest.raises(RefusedError, match="other sizes"):
        session.call(messages.PrepareStore(1, [NewRow([0])], []), t.TIMEOUT)


def test_the_answer_to_another_question_is_not_repeated(lonely: Any) -> None:
    key = [(t.chunk(0), "full")]
    lonely._session = t.Answers(LookupState.PENDING, LookupState.READY)
    assert lonely.narrow(1, [*key, (t.chunk(1), "full")]) is LookupState.PENDING
    assert lonely.narrow(1, key) is LookupState.READY


OTHER_USER = """
import os, sys, zmq
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
    peer.linger = 0
    peer.connect(f"ipc://{sys.argv[1]}")
    peer.send(b"?")
    print(bool(peer.poll(int(sys.argv[3]))))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_even_heard(directory: Path) -> None:
    directory.chmod(0o711)
    pool = MemoryPool(t.MIB)
    service = PoolService(pool.extents, directory / "kv", exclusive=True, allowed_uids=[1234])
    service.start()
    server = CacheServer(StorageEngine(pool, shared=True), service)
    server.start()

    def heard(uid: int, milliseconds: int) -> str:
        command = [sys.executable, "-c", OTHER_USER, str(service.endpoint), str(uid)]
        return subprocess.run([*command, str(milliseconds)], capture_output=True, text=True).stdout

    try:
        assert heard(1234, 10_000) == "True\n"
        assert heard(1235, 500) == "False\n"
    finally:
        service.close()
        server.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/ss@host:6379",
        "redis://:pa#ss@host:6379",
        "redis://:pa?ss@host:6379",
        "s3://bucket?endpoint=http%3A%2F%2Fuser%3Apass%40host",
        "redis://:pass%40host:6379",
    ],
)
def test_credentials_are_found_wherever_they_hide(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials") as refused:
        load_config({"tiers": ["file:///a", url]}, {})
    assert "pa" not in str(refused.value).replace("expected a pa", "").split("credentials")[0]
    with pytest.raises(ConfigError, match="credentials") as refused:
        parse_tier_url(url)
    assert "ss" not in str(refused.value).split("credentials")[0]
    assert load_config({"tiers": ["file:///mnt/a@b"]}, {}).config.tiers == ("file:///mnt/a@b",)


def test_the_command_line_does_not_repeat_credentials() -> None:
    command = [sys.executable, "-m", "lmcache_connector.server", "--socket", "ipc:///tmp/x"]
    done = subprocess.run(
        [*command, "--tier", "redis://:secret@host"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "secret" not in done.stdout + done.stderr
    assert "credentials" in done.stderr


def test_a_server_without_its_memory_service_ends(directory: Path) -> None:
    code = """
import sys, threading, time
from pathlib import Path
from lmcache_connector.server import run, service
def fail(self):
    time.sleep(0.5)
    raise RuntimeError("gone")
service.PoolService._serve_events = fail
run.run_server(sys.argv[1], 1 << 20, [], 0, [])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, f"ipc://{directory}/s/kv"],
        capture_output=True, text=True, timeout=15,
    )
    assert done.returncode == 1, done.stderr
