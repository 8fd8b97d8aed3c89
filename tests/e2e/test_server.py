"""Several real engines on one cache server, and what restarts of either leave to find.

The tests of the server follow each other: an engine that is there before it, a second one, one of
another model and layout, one in place of a killed one, another server for these, all anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TOKENS = 32
HIT = 3 * 256
# Of the prompts below: chunks and groups.
ROWS = 2 * 3 * 2


def paths_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def shared_memory_files(pid: int) -> list[str]:
    """What a process has open or mapped and would leave in /dev/shm when it is killed."""
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in (*links, *maps) if "/dev/shm/" in line and "(deleted)" not in line]


class House:
    """A server with a tier, its engines by name, and two prompts with their cold answers."""

    def __init__(
        self,
        server: Any,
        start_engine: Callable[..., Any],
        make_prompt: Callable[..., list[int]],
        assert_same: Callable[..., None],
    ) -> None:
        self.server = server
        self.tier = server.directory / "tier"
        # Of the engines: what they leave there can be told from what others leave.
        self.temporary = server.directory / "engines"
        self.temporary.mkdir()
        self.prompts = {"a": make_prompt(41, HIT + 40), "b": make_prompt(42, HIT + 90)}
        self.cold: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self._start_engine = start_engine
        self._assert_same = assert_same

    def start_server(self) -> None:
        self.server.start(tiers=[f"file://{self.tier}"])

    def start(self, name: str, family: str = "gemma3", **options: Any) -> Any:
        # A slow machine is no reason for a miss.
        extra = {"server": self.server.endpoint, "lookup_timeout": 60, "load_timeout": 60}
        extra |= options.pop("extra", {})
        env = {"TMPDIR": str(self.temporary), **options.pop("env", {})}
        self.engines[name] = self._start_engine(family, extra=extra, env=env, **options)
        return self.engines[name]

    def kill(self, *names: str) -> None:
        for name in names:
            self.engines.pop(name).close()

    def wait_for(self, num_engines: int) -> Any:
        """The status once so many engines are registered, with all their workers."""
        deadline = time.monotonic() + 60
        while True:
            status = self.server.status()
            if sum(one.ready for one in status.instances) == len(status.instances) == num_engines:
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def ask(self, name: str, prompt: str, cached: int) -> None:
        """The engine finds so many tokens, and answers as without a cache."""
        engine = self.engines[name]
        answer = engine.one(self.prompts[prompt], max_tokens=TOKENS)
        engine.reset_local()
        assert answer["cached"] == cached
        self._assert_same(self.cold.setdefault(prompt, answer), answer, 1e-4)


@pytest.fixture(scope="module")
def house(
    start_server: Callable[..., Any],
    start_engine: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
    assert_same: Callable[..., None],
) -> Iterator[House]:
    house = House(start_server(later=True), start_engine, make_prompt, assert_same)
    yield house
    house.kill(*house.engines)
    house.server.kill()


def test_an_engine_that_is_there_before_its_server(house: House) -> None:
    engine = house.start("first")
    log = engine.log.read_text()
    assert "NOT attached yet" in log
    assert f"no cache, until there is a server at {house.server.sockets}/kv" in log
    # What its start waits for a server.
    began = time.monotonic()
    assert engine.run("result = host.store.wait_ready(10.0)") is False
    assert time.monotonic() - began < 2
    for prompt in house.prompts:
        house.ask("first", prompt, 0)
    house.ask("first", "a", 0)

    house.start_server()
    engine.run("host.attach()")
    house.ask("first", "a", 0)
    engine.settle()
    house.ask("first", "a", HIT)
    engine.settle()


def test_a_second_engine_hits_what_the_first_stored(house: House) -> None:
    house.start("second")
    house.ask("second", "a", HIT)
    house.ask("second", "b", 0)
    house.engines["second"].settle()
    house.ask("first", "b", HIT)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(house.ask, ("first", "second"), ("a", "b"), (HIT, HIT)))
    for engine in house.engines.values():
        engine.settle()
    status = house.wait_for(2)
    assert len({one.namespace for one in status.instances}) == 1
    assert status.pool.rows == ROWS


def test_another_model_and_layout_at_the_same_time(
    house: House, make_prompt: Callable[..., list[int]], assert_same: Callable[..., None]
) -> None:
    """Its core in a process of its own, and two workers in others."""
    engine = house.start(
        "other",
        "gptoss",
        multiprocess=True,
        extra={"chunk_size": 512},
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
    )
    assert sorted((one.chunk_tokens, one.num_ranks) for one in house.wait_for(3).instances) == [
        (256, 1),
        (256, 1),
        (512, 2),
    ]
    prompt = make_prompt(43, 2 * 512 + 40)
    answers = []
    with ThreadPoolExecutor(1) as threads:
        for cached in (0, 1024):
            beside = threads.submit(house.ask, "first", "a", HIT)
            answers.append(engine.one(prompt, max_tokens=TOKENS))
            assert answers[-1]["cached"] == cached
            beside.result()
            engine.reset_local()
    assert_same(*answers, 1e-4)
    house.kill("other")
    status = house.wait_for(2)
    assert len(status.namespaces) == 2
    house.engines["first"].settle()


def test_an_engine_in_place_of_a_killed_one(house: House) -> None:
    house.kill("first")
    house.start("third")
    house.ask("third", "a", HIT)
    house.ask("third", "b", HIT)
    house.engines["third"].settle()


def test_a_server_in_place_of_a_stopped_and_killed_one(house: House) -> None:
    house.server.stop()
    house.ask("third", "a", 0)
    house.server.cont()
    house.engines["third"].run("host.attach()")
    house.ask("third", "a", HIT)
    house.engines["third"].settle()

    house.server.kill()
    house.ask("third", "a", 0)
    house.ask("second", "a", 0)
    house.start_server()
    house.engines["third"].run("host.attach()")
    assert house.server.status().pool.rows == 0
    house.ask("third", "a", HIT)
    house.engines["second"].run("host.attach()")
    house.ask("second", "b", HIT)
    (tier,) = house.wait_for(2).tiers
    assert tier.counters.read_bytes > 0
    assert tier.counters.written_bytes == tier.counters.errors == 0


def test_both_anew_and_nothing_is_left(house: House) -> None:
    house.kill("second", "third")
    house.wait_for(0)
    assert not shared_memory_files(house.server.process.pid)
    house.server.kill()
    # The name of the dead socket is swept by the next server.
    assert paths_below(house.server.sockets) == ["kv", "kv.fd"]
    house.start_server()
    fourth = house.start("fourth")
    house.ask("fourth", "b", HIT)
    house.ask("fourth", "a", HIT)
    fourth.settle()
    assert not shared_memory_files(fourth.process.pid)
    house.server.terminate()
    house.ask("fourth", "a", 0)
    house.kill("fourth")
    assert paths_below(house.server.sockets) == []
    assert paths_below(house.server.temporary) == []
    assert paths_below(house.tier / "tmp") == []
    assert not [path for path in paths_below(house.temporary) if "lmcache" in path]


def test_an_embedded_cache_with_a_tier_outlives_its_engine(house: House) -> None:
    """Of a killed engine it leaves a name, which the next one removes."""
    sockets = house.temporary / f"lmcache-{house.temporary.stat().st_uid}"
    extra = {"server": None, "tiers": [f"file://{house.temporary}/tier"]}
    engine = house.start("killed", extra=extra)
    house.ask("killed", "a", 0)
    engine.settle()
    house.kill("killed")
    assert len(paths_below(sockets)) == 2
    engine = house.start("next", extra=extra)
    house.ask("next", "a", HIT)
    engine.settle()
    assert len(paths_below(sockets)) == 2
    assert engine.run("(tier,) = host.store.stats().tiers.values(); result = tier.read_bytes") > 0
    engine.run("llm.llm_engine.engine_core.shutdown()")
    assert paths_below(sockets) == []
    assert paths_below(house.temporary / "tier" / "tmp") == []
