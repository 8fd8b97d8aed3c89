"""The command line against a real server in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from lmcache_connector import __version__
from lmcache_connector.errors import StartupError
from lmcache_connector.groups import (
    FULL,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
)
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.observability import cli, doctor
from lmcache_connector.server import management, messages, sockets
from lmcache_connector.server.cache_server import CacheServer, Instance
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.base import Commit, LookupState, NewRow
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession
from lmcache_connector.storage.tiering import open_tiering
from lmcache_connector.storage.tiers.base import TierError, value_name

CHUNK = 256
WINDOW = "window-255"
IDS = list(range(4 * CHUNK + 10))


def kernel_group(engine_group: int, rule: ReuseRule) -> KVLayerGroupInfo:
    return KVLayerGroupInfo(
        engine_group_idx=engine_group,
        layer_indices=(engine_group,),
        kv_size=1,
        nl=1,
        nb=8,
        bs=64,
        nh=1,
        hs=16,
        element_size=1,
        block_stride_elems=1024,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=64,
        slots_per_block=64,
        sw_size_tokens=rule.tokens + 1 if rule.kind is ReuseKind.WINDOW else -1,
        recurrent_state=False,
        rule=rule,
        num_shards=1,
        num_runs=1,
        run_bytes=1024,
    )


def layout() -> CacheLayout:
    groups = (kernel_group(0, FULL), kernel_group(1, ReuseRule(ReuseKind.WINDOW, 255)))
    one_rank = WorkerGeometry(
        rank=0,
        pp_rank=0,
        pp_size=1,
        tp_rank=0,
        tp_size=1,
        chunk_tokens=CHUNK,
        engine_groups=engine_group_infos(groups),
        kernel_groups=groups,
    )
    return CacheLayout([one_rank])


def chunk_hashes(namespace: bytes, ids: Sequence[int], extra: Any = None) -> list[bytes]:
    chain = ChunkChain(TokenDatabase(namespace, CHUNK))
    chain.extend(lambda start, end: ids[start:end], len(ids), extra)
    return chain.hashes


class Host:
    """A server with engines that store by themselves, without workers."""

    def __init__(self, endpoint: Path, tiers: Sequence[str], models: Sequence[str]) -> None:
        self.endpoint = f"ipc://{endpoint}"
        pool = MemoryPool(1 << 20, min_object_bytes=4096)
        self.tiering = open_tiering(tiers, pool)
        self.engine = StorageEngine(pool, self.tiering, shared=True)
        self.engine.mark_ready(0)
        self.service = PoolService(pool.extents, endpoint)
        self.sessions: list[StoreSession] = []
        self.server = CacheServer(self.engine, self.service)
        for number, model in enumerate(models):
            session = self.engine.open_session(
                bytes([number]) * 32, layout().shards(), self.service.pool_ref(model)
            )
            self.sessions.append(session)
            instance = Instance(model, model, "life", layout(), session, token="none")
            self.server._instances[model] = instance
        self._stores = 0

    def store(self, hashes: Sequence[bytes], *tags: str, model: int = 0) -> None:
        """Keep the rows of these groups."""
        keys = [(each, tag) for each in hashes for tag in tags]
        self._stores += 1
        session = self.sessions[model]
        slots = session.prepare_store(self._stores, [NewRow([4096])] * len(keys), [])
        assert len(slots) == len(keys)
        commits = [Commit(i, each, None, tag, [0]) for i, (each, tag) in enumerate(keys)]
        session.complete_store(self._stores, commits)

    def close(self) -> None:
        self.server.close()
        self.service.close()
        self.engine.close()


class Ended(NamedTuple):
    code: int
    out: str
    # Without frames and line breaks.
    err: str


Run = Callable[..., Ended]


@pytest.fixture(autouse=True)
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, with a name short enough for sockets; no configuration."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with tempfile.TemporaryDirectory(prefix="lc-") as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object, stdin: str = "") -> Ended:
        monkeypatch.setattr("sys.argv", ["lmcache-connector", *map(str, arguments)])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        code = ended.value.code
        return Ended(int(code or 0), out, " ".join(re.sub("[│╭╮╰╯─]", " ", err).split()))

    return call


@pytest.fixture
def start(temp: Path) -> Iterator[Callable[..., Host]]:
    """Makes hosts, found in this user's directory."""
    with contextlib.ExitStack() as stack:

        def make(*models: str, tiers: Sequence[str] = ()) -> Host:
            name = sockets.socket_path_for(f"engine {models}")
            host = Host(name, tiers, models or ("gemma",))
            stack.callback(host.close)
            return host

        yield make


@pytest.fixture
def prompt(temp: Path) -> Path:
    file = temp / "ids"
    file.write_text(json.dumps(IDS))
    return file


# ---- prompts ------------------------------------------------------------------------------------


def test_lookup_names_the_group_that_limits(start: Any, run: Run, prompt: Path) -> None:
    host = start()
    hashes = chunk_hashes(bytes(32), IDS)
    host.store(hashes, "full")
    host.store(hashes[1:2], WINDOW)
    ended = run("lookup", "--tokens", prompt)
    assert ended.code == 0, ended
    assert (
        "1034 tokens, 4 chunks of 256: 512 tokens hit in the pool, 512 with the tiers; "
        "1024 are possible"
    ) in ended.out
    rows = [line.replace("│", " ").split() for line in ended.out.splitlines()]
    assert ["full", "4", "4", "512"] in rows
    assert [WINDOW, "1", "1", "1024"] in rows
    assert f"limited by {WINDOW}\n" in ended.out


def test_lookup_names_groups_that_limit_only_together(start: Any, run: Run, prompt: Path) -> None:
    start().store(chunk_hashes(bytes(32), IDS)[:3], "full", WINDOW)
    ended = run("lookup", "--tokens", prompt)
    assert "768 tokens hit in the pool" in ended.out
    assert f"limited by full and {WINDOW}\n" in ended.out


def test_lookup_of_all_that_can_hit_names_no_limit(start: Any, run: Run, prompt: Path) -> None:
    # A window needs no chunk before the last.
    hashes = chunk_hashes(bytes(32), IDS)
    host = start()
    host.store(hashes, "full")
    host.store(hashes[3:], WINDOW)
    ended = run("lookup", "--tokens", prompt)
    assert "1024 tokens hit" in ended.out
    assert "limited" not in ended.out


def test_lookup_counts_what_only_a_tier_has(start: Any, run: Run, prompt: Path) -> None:
    host = start(tiers=["memory://"])
    hashes = chunk_hashes(bytes(32), IDS)
    tier = host.tiering.channels[0].tier
    for name in [value_name("00" * 8, each, "full") for each in hashes]:
        tier.put(name, [memoryview(b"row")])
    tier.put(value_name("00" * 8, hashes[2], WINDOW), [memoryview(b"row")])
    ended = run("lookup", "--tokens", prompt)
    assert "0 tokens hit in the pool, 768 with the tiers" in ended.out
    assert f"limited by {WINDOW}\n" in ended.out


def test_lookup_says_when_a_tier_does_not_answer(
    start: Any, run: Run, prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start()
    host.engine.probe = lambda *_: ({}, {}, True)
    monkeypatch.setattr(cli, "TIMEOUT_SECONDS", 0.1)
    ended = run("lookup", "--tokens", prompt)
    assert "the tiers did not answer within 0.1 s" in ended.out


@pytest.mark.parametrize("tagged", [True, False])
def test_a_salt_is_part_of_the_prompt(start: Any, run: Run, prompt: Path, tagged: bool) -> None:
    extra = cli.salted_extra("tenant", tagged=tagged)
    start().store(chunk_hashes(bytes(32), IDS, extra), "full", WINDOW)
    assert "1024 tokens hit" in run("lookup", "--tokens", prompt, "--salt", "tenant").out
    assert "1024 tokens hit" not in run("lookup", "--tokens", prompt, "--salt", "other").out
    assert "1024 tokens hit" not in run("lookup", "--tokens", prompt).out


def test_of_several_models_one_must_be_chosen(start: Any, run: Run, prompt: Path) -> None:
    host = start("gemma", "qwen")
    host.store(chunk_hashes(b"\1" * 32, IDS), "full", WINDOW, model=1)
    ended = run("lookup", "--tokens", prompt)
    assert ended.code == 2
    assert "0000000000000000 (gemma)" in ended.err
    assert "0101010101010101 (qwen)" in ended.err
    hit = run("lookup", "--tokens", prompt, "--namespace", "01" * 8)
    assert "1024 tokens hit" in hit.out
    miss = run("lookup", "--tokens", prompt, "--namespace", "00" * 8)
    assert "0 tokens hit in the pool" in miss.out
    assert "no such engine is attached" in run("pin", "--tokens", prompt, "--namespace", "x").err


@pytest.mark.parametrize("text", [json.dumps(IDS), " ".join(map(str, IDS)) + "\n"])
def test_token_ids_come_from_standard_input_too(start: Any, run: Run, text: str) -> None:
    start().store(chunk_hashes(bytes(32), IDS), "full", WINDOW)
    assert "1024 tokens hit" in run("lookup", "--tokens", "-", stdin=text).out


def test_text_is_tokenized(
    start: Any, run: Run, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        @staticmethod
        def from_pretrained(path: Path) -> Any:
            assert path == temp
            return lambda text: {"input_ids": [ord(letter) for letter in text]}

    fake = types.ModuleType("transformers")
    fake.AutoTokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    start().store(chunk_hashes(bytes(32), [97] * CHUNK), "full", WINDOW)
    (temp / "text").write_text("a" * (CHUNK + 1))
    ended = run("lookup", "--text", temp / "text", "--tokenizer", temp)
    assert "256 tokens hit in the pool" in ended.out


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ([], "", "give --tokens FILE, or --text FILE and --tokenizer DIRECTORY"),
        (["--tokens", "-", "--text", "-"], "", "give --tokens FILE, or"),
        (["--text", "-"], "", "--tokenizer"),
        (["--tokens", "-"], "1 2 x", "cannot be read"),
        (["--tokens", "-"], "[1, -2]", "cannot be read"),
        (["--tokens", "-"], "[1, 5000000000]", "cannot be read"),
        (["--tokens", "-"], "{}", "cannot be read"),
        (["--tokens", "/nowhere"], "", "No such file"),
        (["--text", "-", "--tokenizer", "/nowhere"], "", "does not exist"),
    ],
)
def test_prompts_that_cannot_be_read_are_wrong_usage(
    run: Run, arguments: list[str], stdin: str, said: str
) -> None:
    ended = run("lookup", *arguments, stdin=stdin)
    assert ended.code == 2
    assert said in ended.err


def test_pin_and_unpin(start: Any, run: Run, prompt: Path) -> None:
    host = start()
    host.store(chunk_hashes(bytes(32), IDS)[:2], "full", WINDOW)
    assert "4 rows of 4 chunks pinned" in run("pin", "--tokens", prompt).out
    assert host.engine.namespaces() == {"00" * 8: (4, 4 * 4096, 4)}
    assert run("unpin", "--tokens", prompt)[:2] == (0, "4 rows of 4 chunks unpinned\n")
    assert host.engine.namespaces() == {"00" * 8: (4, 4 * 4096, 0)}
    nothing = run("pin", "--tokens", "-", stdin=" ".join(["7"] * CHUNK))
    assert nothing[:2] == (1, "0 rows of 1 chunks pinned\n")


# ---- status, clear ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_status_shows_all(
    start: Any, run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(cli.console, "_width", width)
    host = start("google/gemma", tiers=["memory://"])
    hashes = chunk_hashes(bytes(32), IDS)
    host.store(hashes[:3], "full", WINDOW)
    while host.sessions[0].lookup(99, hashes, 0).state is LookupState.PENDING:
        pass
    ended = run("status")
    assert ended.code == 0
    assert "…" not in ended.out
    for shown in (
        __version__,
        str(os.getpid()),
        "google/gemma",
        "00" * 8,
        "full 4.0 KiB, window-255 4.0 KiB",
        "75.0%",
        "1.0 MiB",
        "memory://",
        "hit_rows 0",
    ):
        assert shown in ended.out, shown


def test_status_for_programs(start: Any, run: Run) -> None:
    host = start()
    ended = run("status", "--json", "--socket", host.endpoint)
    reply = msgspec.json.decode(ended.out, type=messages.StatusReply)
    assert reply.incarnation == host.service.incarnation
    assert reply.instances[0].namespace_digest == bytes(32)


def test_watch_repeats_until_interrupted(
    start: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = iter([None, None])

    def sleep(_: float) -> None:
        if next(naps, "over") == "over":
            raise KeyboardInterrupt

    start()
    monkeypatch.setattr(cli.time, "sleep", sleep)
    ended = run("status", "--watch")
    assert (ended.code, ended.out.count("incarnation")) == (130, 3)


def test_clear_asks_first(start: Any, run: Run) -> None:
    host = start("gemma", "qwen")
    for number in (0, 1):
        hashes = chunk_hashes(bytes([number]) * 32, IDS)
        host.store(hashes, "full", model=number)
    assert run("clear").code == 2
    assert run("clear", "--all", "--namespace", "01" * 8).code == 2
    assert "as `status` names it" in run("clear", "--namespace", "x", "--yes").err
    assert run("clear", "--all", stdin="n\n").code == 1
    assert len(host.engine.namespaces()) == 2
    ended = run("clear", "--namespace", "01" * 8, stdin="y\n")
    assert (ended.code, "4 rows deleted" in ended.out) == (0, True)
    assert list(host.engine.namespaces()) == ["00" * 8]
    assert "4 rows deleted" in run("clear", "--all", "--yes").out
    assert not host.engine.namespaces()


def test_clear_waits_for_the_tiers_and_names_those_that_fail(
    start: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start("gemma", tiers=["memory://", "memory://"])
    far = host.engine.channels[1]
    far.url = "redis://far"
    name, is_broken, clear = value_name("00" * 8, bytes(32), "full"), [True], far.tier.clear

    def clear_slowly(namespace: str) -> None:
        time.sleep(0.2)
        if is_broken.pop():
            raise TierError("it does not answer")
        clear(namespace)

    far.tier.put(name, [memoryview(b"row")])
    monkeypatch.setattr(far.tier, "clear", clear_slowly)
    ended = run("clear", "--all", "--yes")
    assert (ended.code, "1 tiers cleared" in ended.out) == (1, True)
    assert ended.err == "error: redis://far was not cleared: once it answers, run this again"
    assert far.tier.contains([name]) == [True]
    # One that has just failed is not even asked.
    assert run("clear", "--namespace", "00" * 8, "--yes").code == 1
    is_broken[:] = [False]
    far._suspended_until["write"] = 0.0
    ended = run("clear", "--namespace", "00" * 8, "--yes")
    assert (ended.code, "2 tiers cleared" in ended.out) == (0, True)
    assert far.tier.contains([name]) == [False]


def test_clear_waits_for_the_pool(
    start: Any, run: Run, prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: it counts then, and only then."""
    host = start()
    host.store(chunk_hashes(bytes(32), IDS), "full")
    clear, seconds = host.engine.clear_namespace, [1.0, 3.0]

    def slow(namespace: str) -> int:
        time.sleep(seconds.pop())
        return int(clear(namespace))

    monkeypatch.setattr(host.engine, "clear_namespace", slow)
    ended = run("clear", "--all", "--yes")
    assert (ended.code, "4 rows deleted" in ended.out, ended.err) == (0, True, "")
    monkeypatch.setattr(cli, "_CLEAR_SECONDS", 0.1)
    ended = run("clear", "--all", "--yes")
    assert (ended.code, ended.err) == (
        1,
        "error: the pool was not cleared: once it answers, run this again",
    )


def test_lookup_of_a_very_long_prompt(start: Any, run: Run, temp: Path) -> None:
    """More chunks than Python writes decimal digits."""
    ids = [number % 1000 for number in range(15_000 * CHUNK)]
    host = start()
    host.store(chunk_hashes(bytes(32), ids)[:10], "full")
    in_pool = {"full": (1 << 15_000) - 1, "window-255": 1 << 14_999}
    host.engine.probe = lambda namespace, hashes: (in_pool, {"window-255": 1}, False)
    (temp / "many").write_text(json.dumps(ids))
    ended = run("lookup", "--tokens", temp / "many")
    assert (ended.code, f"15000 chunks of {CHUNK}" in ended.out) == (0, True), ended.err


# ---- endpoints ----------------------------------------------------------------------------------


def test_an_endpoint_is_chosen_or_found(
    start: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("status").code == 2
    first = start("gemma")
    assert "gemma" in run("status").out
    second = start("qwen")
    ended = run("status")
    assert ended.code == 2
    assert all(host.endpoint in ended.err.replace(" ", "") for host in (first, second))
    monkeypatch.setenv("LMCACHE_SERVER", second.endpoint)
    assert "qwen" in run("status").out
    assert "gemma" in run("status", "--socket", first.endpoint).out


def test_what_cannot_be_reached_is_told_in_one_line(
    run: Run, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "TIMEOUT_SECONDS", 0.2)
    endpoint = f"ipc://{temp}/kv"
    ended = run("status", "--socket", endpoint)
    assert ended[::2] == (
        1,
        f"error: {endpoint}: nobody listens there: start the server, or an engine",
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(f"{temp}/kv.fd")
        assert "has died" in run("status", "--socket", endpoint).err
        mute.listen()
        assert "it is stopped, or overloaded" in run("status", "--socket", endpoint).err


def test_a_server_that_stops_answering_is_told(
    start: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start()
    monkeypatch.setattr(management, "TIMEOUT_SECONDS", 0.2)
    goes_on = threading.Event()
    host.server._status = lambda: goes_on.wait(10)
    ended = run("status")
    goes_on.set()
    assert ended.code == 1
    assert ended.err.startswith(f"error: {host.endpoint}: no answer within")


def test_an_error_of_the_server_is_told(start: Any, run: Run) -> None:
    def refuse() -> None:
        raise StartupError("never")

    start().server._status = refuse
    ended = run("status")
    assert (ended.code, ended.err) == (1, "error: - never")


# ---- server -------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cli, "run_server", lambda *arguments: calls.append(arguments))
    return calls


def test_server_takes_its_options(started: Any, run: Run) -> None:
    tiers = ["file:///a?quota=1GiB", "redis://host:1"]
    ended = run(
        *("server", "--socket", "ipc:///run/kv", "--max-local-cpu-size", "512MiB"),
        *("--tier", tiers[0], "--tier", tiers[1], "--floor", "256MiB", "--allow-uid", 7),
        *("--max-hidden-state-cpu-size", "64MiB"),
    )
    assert ended.code == 0, ended
    assert started == [("ipc:///run/kv", 512 << 20, tiers, 256 << 20, [7], 64 << 20)]


def test_server_takes_the_configuration(
    started: Any, run: Run, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temp / "c.yaml").write_text("server: ipc:///run/yaml\ntiers: ['file:///a']\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(temp / "c.yaml"))
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "2")
    monkeypatch.setenv("LMCACHE_TEIRS", "x")
    ended = run("server", "--socket", "ipc:///run/kv")
    assert started == [("ipc:///run/kv", 2 << 30, ("file:///a",), 0, [], 0)]
    assert "LMCACHE_TEIRS is not read: did you mean LMCACHE_TIERS?" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "give --socket ipc:///path, or set LMCACHE_SERVER"),
        (["--socket", "tcp://host:1"], 2, "share a host"),
        (["--socket", "/run/kv"], 2, "expected ipc:///path"),
        (["--socket", "ipc:///a", "--max-local-cpu-size", "lots"], 2, "expected a size"),
        (["--socket", "ipc:///a", "--floor", "-1"], 2, "expected a size"),
        (["--socket", "ipc:///a", "--floor", "512GiB"], 2, "above the pool"),
        (["--socket", "ipc:///a", "--tier", "/var/cache"], 2, "expected a URL"),
    ],
)
def test_server_refuses_with_the_fix(
    started: Any, run: Run, arguments: list[str], code: int, said: str
) -> None:
    ended = run("server", *arguments)
    assert ended.code == code
    assert said in ended.err
    assert not started


def test_server_tells_every_problem_of_the_configuration(
    started: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_LOAD_TIMEOUT", "soon")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "0")
    ended = run("server", "--socket", "ipc:///a")
    assert (ended.code, ended.err.count("error: ")) == (1, 2)
    assert "LMCACHE_LOAD_TIMEOUT is 'soon'" in ended.err


# ---- doctor -------------------------------------------------------------------------------------


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is like."""
    monkeypatch.setattr(doctor, "getrlimit", lambda _: (doctor.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(doctor, "check_memory_budget", lambda _: None)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: ["found"])
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["msgspec>=0.18"])


def line_of(ended: Ended, text: str) -> str:
    (line,) = [line for line in ended.out.splitlines() if text in line]
    return line


@pytest.mark.usefixtures("healthy")
def test_doctor_finds_nothing(start: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    host = start()
    monkeypatch.setenv("LMCACHE_TIERS", "memory://")
    ended = run("doctor")
    assert ended.code == 0, ended.out
    assert {line.split()[0] for line in ended.out.splitlines()} == {"ok"}
    for what in ("configuration", "msgspec", host.endpoint, "tier memory://", "/dev/shm"):
        assert line_of(ended, what)


@pytest.mark.usefixtures("healthy")
def test_doctor_looks_at_packages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["nosuchthing>=1", "msgspec<0.1", "PyYAML>=1", "nosuch; extra == 'dev'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: [*wanted, "vllm<9; extra=='vllm'"])
    monkeypatch.setattr(doctor, "_version", {"msgspec": "0.23", "PyYAML": "6.0"}.get)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    ended = run("doctor")
    assert ended.code == 1
    assert (
        line_of(ended, "nosuchthing")
        == "FAIL  nosuchthing is missing: pip install 'nosuchthing>=1'"
    )
    assert line_of(ended, "msgspec") == "FAIL  msgspec 0.23: pip install 'msgspec<0.1'"
    assert line_of(ended, "PyYAML") == "ok    PyYAML 6.0"
    assert line_of(ended, "vllm is").startswith("note  vllm is missing")
    assert line_of(ended, "VLLM_PLUGINS=other").startswith("FAIL")
    assert "nosuch " not in ended.out


def test_packages_are_found_by_any_spelling() -> None:
    assert doctor._version("PyYAML") == doctor._version("pyyaml") is not None
    assert doctor._version("no-such-package") is None


@pytest.mark.usefixtures("healthy")
def test_doctor_looks_at_limits(start: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {doctor.RLIMIT_NOFILE: 1024, doctor.RLIMIT_MEMLOCK: 4 << 20}
    monkeypatch.setattr(doctor, "getrlimit", lambda which: (limits[which], limits[which]))
    monkeypatch.setattr(doctor, "check_memory_budget", lambda _: "too much")
    assert line_of(run("doctor"), "ulimit -n").startswith("ok")
    limits[doctor.RLIMIT_NOFILE] = 1023
    ended = run("doctor")
    assert ended.code == 1
    assert line_of(ended, "ulimit -n (").startswith("FAIL")
    assert line_of(ended, "ulimit -l").startswith("note")
    assert line_of(ended, "4096 MiB") == "FAIL  memory for one more pool of 4096 MiB: too much"
    # A pool that exists has its memory.
    start()
    assert line_of(run("doctor"), "4096 MiB").startswith("note")


@pytest.mark.usefixtures("healthy")
def test_doctor_looks_at_sockets(run: Run, temp: Path) -> None:
    directory = sockets.socket_path_for("").parent
    name = directory / f"{'0' * 24}.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(name))
    ended = run("doctor", "--socket", f"ipc://{temp}/absent")
    assert ended.code == 1
    assert line_of(ended, str(name)).startswith("note")
    assert "nobody listens there" in line_of(ended, f"socket ipc://{temp}/absent")
    temp.chmod(0o777)
    assert "others can write" in line_of(run("doctor", "--socket", f"ipc://{temp}/a"), "/a:")
    directory.chmod(0o777)
    assert line_of(run("doctor"), "directory of sockets").startswith("FAIL")


@pytest.mark.usefixtures("healthy")
def test_doctor_compares_versions(start: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    host = start()
    monkeypatch.setattr(doctor, "__version__", "0.0.9")
    ended = run("doctor")
    assert ended.code == 1
    assert "install the same" in line_of(ended, host.endpoint)


@pytest.mark.usefixtures("healthy")
def test_doctor_looks_at_tiers(run: Run, temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tier:
        def __init__(self, url: Any) -> None:
            self.path = url.path

        def put(self, name: str, buffers: Any) -> None:
            if self.path == "/hangs":
                never.wait(10)

        def get(self, name: str, buffers: Any) -> bool:
            return False

        def remove(self, name: str) -> None:
            pass

        def close(self) -> None:
            pass

    never = threading.Event()
    urls = ["nosuch:///a", "memory:///hangs", "memory:///forgets"]
    monkeypatch.setenv("LMCACHE_TIERS", ",".join(urls))
    monkeypatch.setattr(doctor, "_TIER_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "open_tier", Tier)
    ended = run("doctor")
    never.set()
    assert ended.code == 1
    assert "secret" not in ended.out
    assert "is none of" in line_of(ended, "tier nosuch:///a")
    assert "no answer within 0.2 s" in line_of(ended, "tier memory:///hangs")
    assert "does not give back" in line_of(ended, "tier memory:///forgets")


@pytest.mark.usefixtures("healthy")
def test_doctor_looks_at_the_tiers_of_those_who_run(
    start: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start(tiers=["memory://"])
    assert line_of(run("doctor"), "tier memory://").startswith("ok")
    host.engine.channels[0].url = "nosuch://x"
    ended = run("doctor")
    assert (ended.code, "is none of" in line_of(ended, "tier nosuch://x")) == (1, True)


@pytest.mark.usefixtures("healthy")
def test_doctor_tells_what_is_wrong_with_the_configuration(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "many")
    monkeypatch.setenv("LMCACHE_TEIRS", "x")
    ended = run("doctor")
    assert ended.code == 1
    assert "LMCACHE_CHUNK_SIZE is 'many'" in line_of(ended, "FAIL  configuration")
    monkeypatch.delenv("LMCACHE_CHUNK_SIZE")
    ended = run("doctor")
    assert ended.code == 0
    assert "LMCACHE_TEIRS" in line_of(ended, "note  configuration")


# ---- start --------------------------------------------------------------------------------------


def test_the_command_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; sys.argv = ['lmcache-connector', 'doctor']\n"
        "from lmcache_connector.observability import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'triton', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert output.stdout.splitlines()[-1] == "[]", output
