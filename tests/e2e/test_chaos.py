"""Two engines and a server that are killed, stopped and started again, as a seed has it.

LMCACHE_CHAOS_SEED, LMCACHE_CHAOS_REQUESTS choose a run (`make chaos` is the long one); all that
happens is printed, and appended to the file LMCACHE_CHAOS_LOG.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from lmcache_connector.groups import WorkerGeometry
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.server import messages, sockets
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.management import managing
from lmcache_connector.server.store_client import StoreClient
from lmcache_connector.storage.base import LookupState
from lmcache_connector.storage.tiers.base import header_bytes, unpack_header

pytestmark = pytest.mark.engine

SEED = int(os.environ.get("LMCACHE_CHAOS_SEED", "1"))
REQUESTS = int(os.environ.get("LMCACHE_CHAOS_REQUESTS", "64"))
CHUNK = 256
TOKENS = 16
# A chunk is 768 KiB: 13 of them in the pool, some 30 in the tier.
POOL_BYTES, TIER_BYTES = 10 << 20, 24_000_000
LOAD_SECONDS, LOOKUP_SECONDS = 2.0, 1.0
# No request takes longer, whatever happens meanwhile; stopped engines are stopped for 4 s.
REQUEST_SECONDS = 60.0
QUIET_SECONDS = 30.0


def until(condition: Callable[[], Any], seconds: float = QUIET_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return found


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_maps(pid: int) -> int:
    """How many extents of pools a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:lmcache-pool")


def resident(pid: int, kind: str) -> int:
    """Bytes of a process in memory: RssAnon, RssShmem."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class House:
    """A server with a tier, and two engines on it."""

    def __init__(self, start_engine: Callable[..., Any]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lc-"))
        self.tier = self.directory / "tier"
        self.endpoint = f"ipc://{self.directory}/kv"
        self.server_log = self.directory / "server.log"
        self._start_engine = start_engine
        self._began = time.monotonic()
        self._shm = set(os.listdir("/dev/shm"))
        self.engines: dict[str, Any] = {}
        self.start_server()

    def open(self) -> None:
        """Start the engines: "books", whose scheduler can be looked at, and "core", which has it
        in another process."""
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self.start_engine, ("books", "core")))
        geometry = "result = msgspec.json.encode([host.worker.geometry]).decode()"
        self.geometries = msgspec.json.decode(
            self.engines["books"].run(f"import msgspec; {geometry}"), type=list[WorkerGeometry]
        )
        self.namespace = self.status().instances[0].namespace_digest

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.2f} {text}"
        print(line, flush=True)
        if path := os.environ.get("LMCACHE_CHAOS_LOG"):
            with open(path, "a") as file:
                file.write(line + "\n")

    # ---- engines --------------------------------------------------------------------------------

    def start_engine(self, name: str) -> None:
        temporary = self.directory / name
        temporary.mkdir(exist_ok=True)
        engine = self._start_engine(
            "gemma3",
            multiprocess=name == "core",
            extra={
                "server": self.endpoint,
                "load_timeout": LOAD_SECONDS,
                "lookup_timeout": LOOKUP_SECONDS,
            },
            env={
                # What it leaves there can be told from what others leave.
                "TMPDIR": str(temporary),
                # Threads of several engines would wait for each other's cores.
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
        )
        engine._socket.settimeout(REQUEST_SECONDS)
        self.engines[name] = engine
        self.say(f"engine {name} has started: {engine.process.pid}")

    def core_pid(self, name: str) -> int:
        """The process in which an engine schedules and copies."""
        source = "import os; result = host.on_workers(lambda worker: os.getpid())[0]"
        return int(self.engines[name].run(source))

    # ---- server ---------------------------------------------------------------------------------

    def start_server(self) -> None:
        command = [sys.executable, "-m", "lmcache_connector.server", "--socket", self.endpoint]
        command += ["--max-local-cpu-size", f"{POOL_BYTES}B"]
        command += ["--tier", f"file://{self.tier}?max_size={TIER_BYTES}B"]
        with self.server_log.open("ab") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        self.say(f"server started: {self.server.pid}")

    def signal_server(self, number: signal.Signals) -> None:
        self.say(f"server gets {number.name}")
        self.server.send_signal(number)

    def end_server(self, number: signal.Signals) -> None:
        self.signal_server(number)
        code = self.server.wait(QUIET_SECONDS)
        assert code == (0 if number is signal.SIGTERM else -number), f"it ended with {code}"

    def status(self) -> messages.StatusReply:
        with managing(self.endpoint) as ask:
            reply: messages.StatusReply = ask(messages.Status())
            return reply

    def is_up(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return bool(self.status())
        return False

    def quiet(self, num_instances: int) -> messages.StatusReply:
        """Wait until nothing moves, and look at the server's books."""
        status = until(self.status)

        def is_quiet() -> bool:
            nonlocal status
            status = self.status()
            busy = [one.open_loads + one.open_stores + (not one.ready) for one in status.instances]
            return (
                len(status.instances) == num_instances
                and not any(busy)
                and status.pool.leases == status.pool.pinned_rows == 0
            )

        try:
            until(is_quiet)
        finally:
            self.say(f"status: {json.dumps(msgspec.to_builtins(status), default=str)}")
        kept = status.namespaces.values()
        assert status.pool.used_bytes == sum(held.num_bytes for held in kept)
        assert status.pool.rows == sum(held.rows for held in kept)
        assert status.pool.used_bytes <= POOL_BYTES
        return status

    def hashes(self, prompt: Sequence[int]) -> list[bytes]:
        chain = ChunkChain(TokenDatabase(self.namespace, CHUNK))
        chain.extend(lambda start, end: prompt[start:end], len(prompt), None)
        return chain.hashes

    def audit(self, prompts: Sequence[Sequence[int]]) -> int:
        """Check the bytes of every row of ``prompts`` that pool or tier hold, as an engine reads
        them; how many there are."""
        groups = CacheLayout(self.geometries).shards()
        said = messages.RegisterKVCache("audit", "audit", self.namespace, self.geometries)
        path = sockets.memory_path(self.directory / "kv")
        ids = iter(range(1, 1 << 30))
        checked = set()
        with (
            contextlib.closing(StoreClient(self.endpoint, said)) as client,
            contextlib.closing(PoolClient(path, 0, "audit")) as memory,
        ):
            memory.start()
            until(lambda: client.wait_ready(1.0))
            for prompt in prompts:
                hashes = self.hashes(prompt)
                # One chunk at a time: a pool full of leases has room for no more.
                for chunk, chunk_hash in enumerate(hashes):
                    lookup_id, load_id = next(ids), next(ids)
                    state, keys = LookupState.PENDING, []
                    while state is not LookupState.READY:
                        reply = client.lookup(lookup_id, [chunk_hash], chunk)
                        if reply.state is LookupState.READY:
                            there = zip(groups, reply.present, strict=True)
                            keys = [(chunk_hash, group.tag) for group, (mask,) in there if mask]
                            state = client.narrow(lookup_id, keys)
                    rows = client.prepare_load(load_id, lookup_id, keys) or []
                    for key, row in zip(keys, rows, strict=True):
                        with memory.view(row.slots[0]) as view:
                            assert xxhash.xxh3_64_intdigest(view) == row.digests[0], key
                        checked.add(key)
                    client.complete_load(load_id)
        self.say(f"audit: {len(checked)} rows verify")
        return len(checked)

    def audit_tier(self) -> int:
        """Check every file of the tier while no server runs; how many there are."""
        files = [path for path in self.tier.rglob("*") if path.is_file()]
        assert list(self.tier.glob("tmp/*")) == []
        assert sum(path.stat().st_size for path in files) <= TIER_BYTES
        for path in files:
            data = memoryview(path.read_bytes())
            name = f"{path.parent.parent.name}/{path.name}"
            shard = data[header_bytes(1) :]
            digests = unpack_header(bytes(data[: header_bytes(1)]), name, [len(shard)])
            assert digests == [xxhash.xxh3_64_intdigest(shard)], name
        return len(files)

    def leftovers(self) -> set[str]:
        """Names that killed processes have left, of ours: vLLM's rings are not."""
        names = set(os.listdir("/dev/shm")) - self._shm
        found = {name for name in names if not name.startswith(("psm_", "sem.mp-", "torch_"))}
        found.update(str(path) for path in self.directory.glob("*/lmcache-*/*"))
        return found | {path.name for path in self.directory.iterdir()}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.server.kill()
        self.server.wait()
        shutil.rmtree(self.directory)


@pytest.fixture(scope="module")
def house(
    start_engine: Callable[..., Any], tiny_models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    # What two engines that start at once would both make.
    tiny_models.build("gemma3")
    tmp_path_factory.getbasetemp()
    with contextlib.closing(House(start_engine)) as house:
        house.open()
        yield house


@pytest.fixture(autouse=True)
def server_is_up(house: House) -> None:
    until(house.is_up)


@pytest.mark.parametrize("copy", ["store", "load"])
@pytest.mark.parametrize("meanwhile", ["the pool is filled", "the server is killed"])
def test_an_engine_that_was_stopped_inside_a_copy(
    house: House, make_prompt: Callable[..., list[int]], assert_same: Any, copy: str, meanwhile: str
) -> None:
    filler, victim = house.engines["books"], house.engines["core"]
    prompt = make_prompt(len(copy + meanwhile), 3 * CHUNK + 40)
    others = [make_prompt(1000 + index, 4 * CHUNK + 40) for index in range(5)]
    with managing(house.endpoint) as ask:
        ask(messages.ClearNamespace(""))
    cold = filler.one(prompt, max_tokens=TOKENS)
    assert cold["cached"] == 0
    filler.reset_local()
    if copy == "store":
        with managing(house.endpoint) as ask:
            ask(messages.ClearNamespace(""))
    pid = victim.run(f"result = host.on_workers(trap, '{copy}', 1, {int(signal.SIGSTOP)})[0]")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(victim.one, prompt, max_tokens=TOKENS)
        try:
            until(lambda: is_stopped(pid))
            stopped = time.monotonic()
            if meanwhile == "the server is killed":
                house.end_server(signal.SIGKILL)
                house.start_server()
                until(lambda: house.is_up() and house.status().instances)
            else:
                books = house.status()
                assert sum(one.open_stores for one in books.instances) == (copy == "store")
                assert sum(one.open_loads for one in books.instances) == (copy == "load")
            colds = [filler.one(other, max_tokens=TOKENS) for other in others]
            filler.reset_local()
            assert house.audit([prompt, *others]) > 0
            # All deadlines of client, server and engine are over.
            time.sleep(max(0.0, stopped + LOAD_SECONDS + LOOKUP_SECONDS - time.monotonic()))
        finally:
            os.kill(pid, signal.SIGCONT)
        answer = late.result(REQUEST_SECONDS)
    assert_same(cold, answer, 1e-4)
    assert (answer["cached"] > 0) == (copy == "load")
    victim.reset_local()
    for other, expected in zip(others, colds, strict=True):
        assert_same(expected, victim.one(other, max_tokens=TOKENS), 1e-4)
    victim.reset_local()
    again = [engine.one(prompt, max_tokens=TOKENS) for engine in (filler, victim)]
    for one in again:
        assert_same(cold, one, 1e-4)
    assert again[1]["cached"] == 3 * CHUNK
    filler.reset_local()
    victim.reset_local()
    filler.settle()
    house.quiet(2)
    assert house.audit([prompt, *others]) > 0


class Chaos:
    """Serves requests on both engines, a thread each, while a plan that follows from the seed is
    carried out. Some of the requests are issued with every event."""

    def __init__(
        self, house: House, prompts: list[list[int]], colds: list[Any], same: Callable[..., None]
    ) -> None:
        self.house, self.prompts, self.colds, self.same = house, prompts, colds, same
        self.random = random.Random(SEED)
        self.slowest, self.hits = 0.0, 0
        # What engines died with when they stored it.
        self.unfinished: list[list[int]] = []
        self._changed = threading.Condition()
        # When to serve them, indexes of prompts, and whether to forget the local cache then.
        self._batches: deque[tuple[float, list[int], bool]] = deque()
        self._unanswered = 0
        # Engines that are to die or have died, until they are there again; of them those that
        # wait for the copy that kills them.
        self._doomed: set[str] = set()
        self._traps: dict[str, str] = {}
        self._ended: BaseException | bool = False

    def plan(self) -> list[tuple[str, str, float]]:
        """(what, to whom or which, for how long)"""
        plan: list[tuple[str, str, float]] = []
        longest = 3.0 if REQUESTS < 100 else 8.0
        for _ in range(max(1, REQUESTS // 40)):
            pick, seconds = self.random.choice, self.random.uniform
            part = [
                # The server is back before clients look for it again, or later.
                ("kill", "server", seconds(0.0, 0.1)),
                ("kill", "server", seconds(1.0, 3.0)),
                ("term", "server", pick([0.0, seconds(0.0, 2.0)])),
                ("stop", "server", seconds(0.1, 0.6)),
                ("stop", "server", seconds(1.0, longest)),
                ("stop and kill", "server", seconds(0.2, 2.0)),
                ("stop", pick(["books", "core"]), seconds(0.3, longest)),
                (pick(["kill", "store", "store", "load"]), pick(["books", "core"]), seconds(0, 1)),
            ]
            self.random.shuffle(part)
            plan += part
        return plan

    def run(self) -> None:
        plan = self.plan()
        threads = [
            threading.Thread(target=self._drive, args=(name,)) for name in self.house.engines
        ]
        for thread in threads:
            thread.start()
        try:
            for number, (what, whom, seconds) in enumerate(plan):
                count = (number + 1) * REQUESTS // len(plan) - number * REQUESTS // len(plan)
                self._issue(count, 0.5 + seconds)
                time.sleep(self.random.uniform(0.0, 0.5))
                self.house.say(f"event {number}: {what} {whom} {seconds:.2f} s, {count} requests")
                if whom == "server":
                    self._disturb_server(what, seconds)
                else:
                    self._disturb_engine(what, whom, seconds)
                self._wait(lambda: not self._unanswered)
            self._wait(lambda: not self._doomed)
        finally:
            with self._changed:
                self._ended = self._ended or True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        if isinstance(self._ended, BaseException):
            raise self._ended

    def _issue(self, count: int, seconds: float) -> None:
        """Some requests, over the next seconds."""
        batches, begin = [], time.monotonic()
        while (left := count - sum(len(indexes) for _, indexes, _ in batches)) > 0:
            size = min(left, self.random.choice([1, 1, 2, 3]))
            indexes = [self.random.randrange(len(self.prompts)) for _ in range(size)]
            due = begin + self.random.uniform(0.0, seconds)
            batches.append((due, indexes, self.random.random() < 0.8))
        with self._changed:
            self._unanswered += count
            self._batches.extend(sorted(batches))
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; not beyond a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or condition())

    def _disturb_server(self, what: str, seconds: float) -> None:
        if what.startswith("stop"):
            self.house.signal_server(signal.SIGSTOP)
            time.sleep(seconds)
        if what == "stop":
            self.house.signal_server(signal.SIGCONT)
            return
        self.house.end_server(signal.SIGTERM if what == "term" else signal.SIGKILL)
        time.sleep(seconds if what != "stop and kill" else 0.0)
        self.house.start_server()

    def _disturb_engine(self, what: str, whom: str, seconds: float) -> None:
        self._wait(lambda: whom not in self._doomed)
        pid = self.house.engines[whom].process.pid
        if what == "stop":
            os.killpg(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.killpg(pid, signal.SIGCONT)
            return
        with self._changed:
            self._doomed.add(whom)
            if what != "kill":
                self._traps[whom] = what
            self._changed.notify_all()
        if what == "kill":
            time.sleep(seconds)
            os.killpg(pid, signal.SIGKILL)

    # ---- an engine's thread ---------------------------------------------------------------------

    def _drive(self, name: str) -> None:
        try:
            while self._step(name):
                pass
        except BaseException as error:
            self.house.say(f"{name}: {type(error).__name__}")
            with self._changed:
                self._ended = error
                self._changed.notify_all()

    def _step(self, name: str) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._batches or name in self._traps or self._ended)
            if self._ended:
                return False
            trap = self._traps.pop(name, None)
            batch = self._batches.popleft() if trap is None else (0.0, [], False)
        due, indexes, forget = batch
        time.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        try:
            answers = self._sacrifice(name, trap) if trap else self._serve(name, indexes, forget)
        except Exception as error:
            with self._changed:
                if name not in self._doomed:
                    raise
                if indexes:
                    self._batches.appendleft(batch)
            self.house.say(f"{name} has died: {str(error).splitlines()[0]}")
            self.house.engines[name].close()
            self.house.start_engine(name)
            with self._changed:
                self._doomed.discard(name)
                self._changed.notify_all()
            return True
        took = time.monotonic() - began
        cached = [answer["cached"] for answer in answers]
        self.house.say(f"{name}: {indexes} in {took:.2f} s, cached {cached}")
        for index, answer in zip(indexes, answers, strict=True):
            self.same(self.colds[index], answer, 1e-3)
        with self._changed:
            self.hits += sum(cached)
            self.slowest = max(self.slowest, took)
            self._unanswered -= len(answers)
            self._changed.notify_all()
        return True

    def _serve(self, name: str, indexes: list[int], forget: bool) -> list[dict[str, Any]]:
        engine = self.house.engines[name]
        prompts = [self.prompts[index] for index in indexes]
        answers: list[dict[str, Any]] = engine.generate(prompts, max_tokens=TOKENS)
        if forget:
            engine.reset_local()
        return answers

    def _sacrifice(self, name: str, copy: str) -> list[dict[str, Any]]:
        """Let an engine die inside a copy; at its end, when there was none without a server."""
        engine = self.house.engines[name]
        engine.reset_local()
        engine.run(f"host.on_workers(trap, '{copy}', 1, {int(signal.SIGKILL)})")
        prompt = self.prompts[0]
        if copy == "store":
            prompt = [random.randrange(3, 500) for _ in range(3 * CHUNK)]
            self.unfinished.append(prompt)
        try:
            engine.one(prompt, max_tokens=TOKENS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.process.pid, signal.SIGKILL)
        self.house.say(f"{name} had no {copy} to die in")
        engine.run("")
        raise AssertionError("it lives")


def test_chaos(house: House, make_prompt: Callable[..., list[int]], assert_same: Any) -> None:
    house.say(f"LMCACHE_CHAOS_SEED={SEED} LMCACHE_CHAOS_REQUESTS={REQUESTS}")
    documents = [make_prompt(2000 + index, 500 + 130 * index) for index in range(3)]
    prompts = [
        document + make_prompt(3000 + 10 * number + end, 30 + 140 * end)
        for number, document in enumerate(documents)
        for end in range(3 if REQUESTS < 100 else 8)
    ]
    books = house.engines["books"]
    books.run("host.scheduler._can_load = host.scheduler._can_store = False")
    colds = []
    for prompt in prompts:
        books.reset_local()
        colds.append(books.one(prompt, max_tokens=TOKENS))
    books.reset_local()
    books.run("host.scheduler._can_load = host.scheduler._can_store = True")
    assert not any(cold["cached"] for cold in colds)
    check_hits(house, prompts, colds, assert_same)
    before = measure(house)
    chaos = Chaos(house, prompts, colds, assert_same)
    chaos.run()
    house.say(f"{chaos.hits} tokens from the cache; the slowest answer took {chaos.slowest:.2f} s")
    until(house.is_up)
    check_hits(house, prompts, colds, assert_same)
    assert house.engines["books"].settle()["used_bytes"] <= POOL_BYTES
    house.quiet(2)
    after = measure(house)
    for what, amount in after.items():
        assert amount <= before[what], (what, before, after)
    assert resident(house.server.pid, "RssAnon") < 200 << 20
    assert resident(house.server.pid, "RssShmem") <= POOL_BYTES + (1 << 20)
    assert house.audit(prompts) > 0
    assert house.audit(chaos.unfinished) == 0

    for engine in house.engines.values():
        engine.close()
    assert house.quiet(0).pool.rows > 0
    house.end_server(signal.SIGTERM)
    assert house.leftovers() == {"tier", "server.log", *house.engines}
    assert house.audit_tier() > 0
    assert "Traceback" not in house.server_log.read_text()


def check_hits(
    house: House, prompts: Sequence[list[int]], colds: Sequence[Any], same: Callable[..., None]
) -> None:
    """Both engines serve, and what one stores the other finds."""
    until(lambda: sum(one.ready for one in house.status().instances) == len(house.engines))
    for _ in range(2):
        for engine in house.engines.values():
            engine.reset_local()
            answer = engine.one(prompts[-1], max_tokens=TOKENS)
            same(colds[-1], answer, 1e-4)
            engine.reset_local()
    assert answer["cached"] > CHUNK


def measure(house: House) -> dict[str, int]:
    """What may not grow."""
    pids = {"server": house.server.pid, **{name: house.core_pid(name) for name in house.engines}}
    found = {f"descriptors of {name}": num_fds(pid) for name, pid in pids.items()}
    found |= {f"pool maps of {name}": num_maps(pid) for name, pid in pids.items()}
    house.say(str(found))
    return found
