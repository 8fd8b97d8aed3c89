"""Two engines and a server that are killed, stopped and started again, as a seed has it.

LMCACHE_CHAOS_SEED, LMCACHE_CHAOS_REQUESTS choose a run (`make chaos` is the long one); all that
happens is printed, and appended to the file LMCACHE_CHAOS_LOG.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import audit
import msgspec
import pytest
from audit import until

from lmcache_connector.groups import WorkerGeometry
from lmcache_connector.server import messages

pytestmark = pytest.mark.engine

SEED = int(os.environ.get("LMCACHE_CHAOS_SEED", "1"))
REQUESTS = int(os.environ.get("LMCACHE_CHAOS_REQUESTS", "64"))
CHUNK = 256
TOKENS = 16
# A chunk is 768 KiB: 13 of them in the pool, some 30 in the tier.
POOL_BYTES, TIER_BYTES = 10 << 20, 24_000_000
LOAD_SECONDS, LOOKUP_SECONDS = 2.0, 1.0
# No request takes longer, whatever happens meanwhile.
REQUEST_SECONDS = 60.0


class House:
    """A server with a tier, and two engines on it: "books", whose scheduler can be looked at, and
    "core", which has it in another process."""

    def __init__(self, server: Any, start_engine: Callable[..., Any]) -> None:
        self.server = server
        self.tier = server.directory / "tier"
        self.engines: dict[str, Any] = {}
        self._start_engine = start_engine
        self._began = time.monotonic()
        self._shm = set(os.listdir("/dev/shm"))
        self.start_server()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self.start_engine, ("books", "core")))
        geometry = self.engines["books"].run(
            "import msgspec; result = msgspec.json.encode([host.worker.geometry]).decode()"
        )
        geometries = msgspec.json.decode(geometry, type=list[WorkerGeometry])
        namespace = self.server.status().instances[0].namespace_digest
        self._auditor = audit.Auditor(server.endpoint, namespace, geometries)

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.2f} {text}"
        print(line, flush=True)
        if path := os.environ.get("LMCACHE_CHAOS_LOG"):
            with open(path, "a") as file:
                file.write(line + "\n")

    def start_server(self) -> None:
        tier = f"file://{self.tier}?max_size={TIER_BYTES}B"
        self.server.start(f"{POOL_BYTES}B", [tier])
        self.say(f"server {self.server.process.pid} is up")

    def start_engine(self, name: str) -> None:
        temporary = self.server.directory / name
        temporary.mkdir(exist_ok=True)
        engine = self._start_engine(
            "gemma3",
            multiprocess=name == "core",
            extra={
                "server": self.server.endpoint,
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

    def wait_attached(self, num_engines: int) -> None:
        def attached() -> bool:
            ready = [one.instance for one in self.server.status().instances if one.ready]
            return len([name for name in ready if name != "audit"]) >= num_engines

        until(attached)

    def quiet(self, num_engines: int | None = None) -> messages.StatusReply:
        """Wait until so many engines are attached, nothing moves and the server's books balance."""
        status = self.server.status()

        def is_quiet() -> bool:
            nonlocal status
            status = self.server.status()
            pool, kept = status.pool, status.namespaces.values()
            busy = sum(one.open_loads + one.open_stores for one in status.instances)
            ready = [one.ready for one in status.instances]
            return (
                pool.leases == pool.busy_rows == busy == 0
                and pool.used_bytes == sum(held.num_bytes for held in kept) <= POOL_BYTES
                and pool.rows == sum(held.rows for held in kept)
                and (num_engines is None or ready == [True] * num_engines)
            )

        try:
            until(is_quiet, 30.0)
        finally:
            self.say(f"status: {msgspec.json.encode(status).decode()}")
        return status

    def audit(self, prompts: Sequence[Sequence[int]]) -> int:
        rows = self._auditor.audit(prompts)
        self.say(f"audit: {rows} rows verify")
        return rows

    def measure(self) -> dict[str, int]:
        """What may not grow."""
        processes = {"server": self.server, **self.engines}
        found = {}
        for name, one in processes.items():
            pids = audit.family(one.process.pid)
            found[f"processes of {name}"] = len(pids)
            found[f"descriptors of {name}"] = sum(map(audit.num_descriptors, pids))
            found[f"extents mapped by {name}"] = sum(map(audit.num_maps, pids))
        self.say(str(found))
        return found

    def leftovers(self) -> set[str]:
        """Names that killed processes have left, of ours: vLLM's rings are not."""
        names = set(os.listdir("/dev/shm")) - self._shm
        found = {name for name in names if not name.startswith(("psm_", "sem.", "torch_", "vllm_"))}
        for place in (self.server.sockets, self.server.temporary):
            found.update(path.name for path in place.iterdir())
        for name in self.engines:
            found.update(map(str, self.server.directory.glob(f"{name}/lmcache-*/*")))
        return found


@pytest.fixture(scope="module")
def house(
    start_server: Callable[..., Any], start_engine: Callable[..., Any], tiny_models: Any
) -> House:
    # Two engines that start at once would both make it.
    tiny_models.build("gemma3")
    return House(start_server(later=True), start_engine)


@pytest.mark.parametrize("copy", ["store", "load"])
@pytest.mark.parametrize("meanwhile", ["the pool is filled", "the server is killed"])
def test_an_engine_that_was_stopped_inside_a_copy(
    house: House, make_prompt: Callable[..., list[int]], assert_same: Any, copy: str, meanwhile: str
) -> None:
    filler, victim = house.engines["books"], house.engines["core"]
    # Of no other case.
    seed = 100 * len(copy + meanwhile)
    prompt = make_prompt(seed, 3 * CHUNK + 40)
    others = [make_prompt(seed + index, 4 * CHUNK + 40) for index in range(1, 6)]
    filler.run("host.scheduler._can_store = args['store']", store=copy == "load")
    cold = filler.one(prompt, max_tokens=TOKENS)
    filler.run("host.scheduler._can_store = True")
    assert cold["cached"] == 0
    filler.reset_local()
    pid = victim.run(f"result = host.on_workers(trap, '{copy}', 1, {int(signal.SIGSTOP)})[0]")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(victim.one, prompt, max_tokens=TOKENS)
        try:
            until(lambda: audit.is_stopped(pid))
            stopped = time.monotonic()
            if meanwhile == "the server is killed":
                house.server.kill()
                house.start_server()
                house.wait_attached(1)
            colds = [filler.one(other, max_tokens=TOKENS) for other in others]
            filler.reset_local()
            assert house.audit([prompt, *others]) > 0
            # All deadlines of client, server and engine are over.
            time.sleep(max(0.0, stopped + LOAD_SECONDS + LOOKUP_SECONDS - time.monotonic()))
            if meanwhile == "the pool is filled":
                instances = house.server.status().instances
                assert sum(one.open_stores for one in instances) == (copy == "store")
                assert sum(one.open_loads for one in instances) == (copy == "load")
        finally:
            os.kill(pid, signal.SIGCONT)
        answer = late.result(REQUEST_SECONDS)
    assert_same(cold, answer, 1e-4)
    assert (answer["cached"] > 0) == (copy == "load")
    assert house.audit([prompt, *others]) > 0
    house.wait_attached(2)
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
        # Engines that are to die, and whether they have, until they are there again; of them those
        # that wait for the copy that kills them.
        self._doomed: dict[str, bool] = {}
        self._traps: dict[str, str] = {}
        self._ended: BaseException | bool = False

    def plan(self) -> list[tuple[str, str, float]]:
        """(what, to whom or which, for how long)"""
        plan: list[tuple[str, str, float]] = []
        longest = 3.0 if REQUESTS < 100 else 8.0
        seconds = self.random.uniform
        for number in range(max(1, REQUESTS // 50)):
            # It dies inside a copy, or at any time.
            death = ("store", "load", "kill")[number % 3]
            victim = ("core", "books")[(number + SEED) % 2]
            part = [
                # The server is back before clients look for it again, or later.
                ("kill", "server", seconds(0.0, 0.1)),
                ("kill", "server", seconds(1.0, 3.0)),
                ("term", "server", seconds(0.0, 1.0)),
                ("stop", "server", seconds(0.1, 0.6)),
                ("stop", "server", seconds(1.0, longest)),
                ("stop and kill", "server", seconds(0.2, 2.0)),
                ("stop", self.random.choice(["books", "core"]), seconds(0.3, longest)),
                (death, victim, seconds(0.0, 1.0)),
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
                if self.random.random() < 0.7 or what in ("store", "load"):
                    # Else it comes before they have recovered from the one before.
                    self.house.wait_attached(len(self.house.engines) - len(self._doomed))
                # One is left for a server that is stopped.
                self._issue(count - (what == "stop"), 0.5 + seconds)
                time.sleep(self.random.uniform(0.0, 0.5))
                self.house.say(f"event {number}: {what} {whom} {seconds:.2f} s, {count} requests")
                if whom == "server":
                    self._disturb_server(what, seconds)
                else:
                    self._disturb_engine(what, whom, seconds)
                self._wait(lambda: not self._unanswered)
                if whom in self._doomed:
                    self._wait(lambda name=whom: self._doomed.get(name, True))
                    self.house.quiet()
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

    def _wait(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Until it holds; not beyond a failure."""
        with self._changed:
            held = self._changed.wait_for(lambda: self._ended or condition(), seconds)
        assert held, "requests hang"

    def _disturb_server(self, what: str, seconds: float) -> None:
        server = self.house.server
        if what.startswith("stop"):
            server.stop()
            time.sleep(seconds)
        if what == "stop":
            self._issue(1, 0.0)
            if seconds > 1.0:
                self._wait(lambda: not self._unanswered, 30.0)
            return server.cont()
        (server.terminate if what == "term" else server.kill)()
        time.sleep(seconds if what != "stop and kill" else 0.0)
        self.house.start_server()

    def _disturb_engine(self, what: str, whom: str, seconds: float) -> None:
        self._wait(lambda: whom not in self._doomed)
        pid = self.house.engines[whom].process.pid
        if what == "stop":
            os.killpg(pid, signal.SIGSTOP)
            time.sleep(seconds)
            self._issue(1, 0.0)
            return os.killpg(pid, signal.SIGCONT)
        with self._changed:
            self._doomed[whom] = False
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
                self._doomed[name] = True
                if indexes:
                    self._batches.appendleft(batch)
                self._changed.notify_all()
            self.house.say(f"{name} has died: {str(error).splitlines()[0]}")
            self.house.engines[name].close()
            self.house.start_engine(name)
            with self._changed:
                del self._doomed[name]
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
        known = self.prompts[0]

        def hits() -> bool:
            engine.reset_local()
            cached: int = engine.one(known, max_tokens=TOKENS)["cached"]
            return cached > 0

        try:
            until(hits)
            engine.reset_local()
            engine.run(f"host.on_workers(trap, '{copy}', 1, {int(signal.SIGKILL)})")
            new = random.Random(f"{SEED} {len(self.unfinished)}")
            self.unfinished.append([new.randrange(3, 500) for _ in range(3 * CHUNK + 40)])
            engine.one(self.unfinished[-1] if copy == "store" else known, max_tokens=TOKENS)
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
    check_hits(house, prompts[-1], colds[-1], assert_same)
    before = house.measure()

    chaos = Chaos(house, prompts, colds, assert_same)
    chaos.run()
    house.say(f"{chaos.hits} tokens from the cache; the slowest answer took {chaos.slowest:.2f} s")
    assert chaos.hits > 0
    check_hits(house, prompts[-1], colds[-1], assert_same)
    house.engines["books"].settle()
    house.quiet(2)
    # Of connections that were closed a moment ago, the server may not know yet.
    until(lambda: all(now <= before[what] for what, now in house.measure().items()))
    pid = house.server.process.pid
    assert audit.resident(pid, "RssAnon") < 200 << 20
    assert audit.resident(pid, "RssShmem") <= POOL_BYTES + (1 << 20)
    assert house.audit(prompts) > 0
    assert house.audit(chaos.unfinished) == 0

    for engine in house.engines.values():
        engine.close()
    assert house.quiet(0).pool.rows > 0
    house.server.terminate()
    assert house.leftovers() == set()
    assert audit.audit_tier(house.tier, TIER_BYTES) > 0
    assert "Traceback" not in house.server.log.read_text()


def check_hits(house: House, prompt: list[int], cold: Any, same: Callable[..., None]) -> None:
    """Both engines serve, and what one stores the other finds."""
    house.wait_attached(2)
    cached = []
    for engine in [*house.engines.values()] * 2:
        engine.reset_local()
        answer = engine.one(prompt, max_tokens=TOKENS)
        same(cold, answer, 1e-4)
        engine.reset_local()
        cached.append(answer["cached"])
    assert min(cached[2:]) > CHUNK
