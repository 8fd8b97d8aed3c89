#!/usr/bin/env python3
"""Engines with a cache server beside them: ours, LMCache 0.5.6 and none, asked in turns.

usage: benchmarks/shared_server.py [family ...]  (of tools/tiny_models.py; default gemma3 qwen3next)

All three run at once, in one environment, and one works at a time: what slows the machine slows
all alike. Prompts are restored after the engine's own prefix cache was dropped; their answers, and
those of prompts that leave them half way, are compared with the engine's that has no cache. LMCache
takes part once scripts/setup_lmcache_venv.sh has been run, without its observability. A side that
does not start is left out and says why.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
NUM_CHUNKS = 12
NUM_PROMPTS = 3
ROUNDS = 8
# A wrong page shows within a few tokens, a wrong recurrent state within about twelve.
COMPARED_TOKENS = 32
IDLE_SECONDS = 3
# Run in the engine's process, where ``host`` is what tests/e2e/host.py makes of it.
SETUP = "sys.path.append(args['path']); import shared_server as s; host.probe = s.Probe(host)"
DROP = "host.probe.drop_local()"
ASK = "result = host.probe.ask(**args)"
# What the table shows, and how it is made of the samples.
FIGURES: dict[str, Callable[[list[float]], float]] = {
    "TTFT, ms": statistics.median,
    "TTFT local hit, ms": statistics.median,
    "lookup, ms": statistics.median,
    "CPU per request, ms": statistics.fmean,
    "  of the server": statistics.fmean,
    "CPU idle, ms/s": statistics.fmean,
    "peak PSS, MiB": max,  # What engine and server share counts once.
    "peak RSS of engine": max,
    "peak RSS of server": max,
    "tokens restored": statistics.median,
    "answers right, %": statistics.fmean,
}


class Probe:
    """In the engine's process: asks, and times a lookup from the first poll to the last."""

    def __init__(self, host: Any) -> None:
        self._llm = host.llm
        self._clock: list[float] = []
        if host.connector is not None:
            self._lookup = host.connector.get_num_new_matched_tokens
            host.connector.get_num_new_matched_tokens = self._timed_lookup

    def _timed_lookup(self, request: Any, num_computed_tokens: int) -> Any:
        self._clock.append(time.perf_counter())
        answer = self._lookup(request, num_computed_tokens)
        self._clock.append(time.perf_counter())
        return answer

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._clock.clear()
        start = time.perf_counter()
        [output] = self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answer = {"ms": (time.perf_counter() - start) * 1e3, "cached": output.num_cached_tokens}
        lookup = [(self._clock[-1] - self._clock[0]) * 1e3] if self._clock else []
        return {**answer, "lookup": lookup, "tokens": list(output.outputs[0].token_ids)}

    def drop_local(self) -> None:
        """Drop the engine's own prefix cache, once nothing is being stored from it."""
        deadline = time.monotonic() + 30
        while not self._llm.reset_prefix_cache():
            assert time.monotonic() < deadline, "blocks are held for ever"
            # A connector is asked whether it still holds blocks only while the engine steps.
            self.ask([3, 4, 5], 1)
            self._llm.llm_engine.step()
            time.sleep(0.01)


class Side:
    """An engine, its server if it has one, and the samples of both."""

    def __init__(self, engine: Any, *server_pid: int) -> None:
        self.run = engine.run
        self._pids = [engine.process.pid, *server_pid]
        self.samples: dict[str, list[float]] = defaultdict(list)

    def cpu_ms(self) -> list[float]:
        """User and system time so far of each process, by its clock_getcpuclockid(3)."""
        return [time.clock_gettime((~pid << 3) | 2) * 1e3 for pid in self._pids]

    def measure(self, prompt: list[int]) -> None:
        self.run(DROP)
        before = self.cpu_ms()
        restored = self.run(ASK, prompt=prompt, max_tokens=1)
        # What the server still does for this request belongs to it.
        time.sleep(0.02)
        cpu_ms = [after - at for after, at in zip(self.cpu_ms(), before, strict=True)]
        self.samples["TTFT, ms"].append(restored["ms"])
        self.samples["TTFT local hit, ms"].append(self.run(ASK, prompt=prompt, max_tokens=1)["ms"])
        self.samples["lookup, ms"] += restored["lookup"]
        self.samples["tokens restored"].append(restored["cached"])
        self.samples["CPU per request, ms"].append(sum(cpu_ms))
        self.samples["peak PSS, MiB"].append(_mib("smaps_rollup", "Pss", *self._pids))
        for process, pid, ms in zip(("engine", "server"), self._pids, cpu_ms, strict=False):
            self.samples[f"  of the {process}"].append(ms)
            self.samples[f"peak RSS of {process}"].append(_mib("status", "VmHWM", pid))


def _mib(file: str, name: str, *pids: int) -> float:
    texts = [Path(f"/proc/{pid}/{file}").read_text() for pid in pids]
    return sum(int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) for text in texts) / 1024


def _server(stack: ExitStack, folder: Path, ready: str, *command: Any) -> int:
    """Start a server; it is up when its log says ``ready``. Answers its pid."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    # Last comes first: told to end, waited for, killed if that was in vain.
    stack.callback(process.kill)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    for _ in range(900):  # 90 s
        if ready in log.read_text(errors="replace"):
            return process.pid
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(log.read_text(errors="replace"))


def _engine(stack: ExitStack, folder: Path, model: Any, connector: str = "", **extra: Any) -> Any:
    from conftest import Engine

    arguments = {**model.engine_args(), "enforce_eager": True, "enable_prefix_caching": True}
    arguments |= {"max_model_len": 12288, "skip_tokenizer_init": True}
    # LMCache serves one group only, unless this is said.
    arguments["disable_hybrid_kv_cache_manager"] = False
    if connector:
        transfer = {"kv_connector": connector, "kv_role": "kv_both"}
        arguments["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": extra}
    engine = Engine(arguments, {"TMPDIR": str(folder)}, folder / "engine.log", [])
    stack.callback(engine.close)
    engine.run(SETUP, path=str(ROOT / "benchmarks"))
    return engine


def _ours(stack: ExitStack, folder: Path, model: Any) -> Side:
    url = f"ipc://{folder}/cache.sock"
    options = f"-m lmcache_connector.server --socket {url} --max-local-cpu-size 2"
    server = _server(stack, folder, "ready in", sys.executable, *options.split())
    return Side(_engine(stack, folder, model, "LMCacheHybridConnector", server=url), server)


def _lmcache(stack: ExitStack, folder: Path, model: Any) -> Side:
    program = PEER_PYTHON.with_name("lmcache")
    if not program.exists():
        raise RuntimeError("scripts/setup_lmcache_venv.sh has not been run")
    with create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    options = f"""--host {host} --port {port} --http-port 0 --disable-observability --l1-size-gb 2
        --eviction-policy LRU --supported-transfer-mode auto --chunk-size {model.chunk_tokens}"""
    server = _server(stack, folder, "Uvicorn running", program, "server", *options.split())
    stack.callback(_sweep)
    peer = {"host": f"tcp://{host}", "port": port, "mp_transfer_mode": "lmcache_driven"}
    extra = {f"lmcache.mp.{key}": value for key, value in peer.items()}
    return Side(_engine(stack, folder, model, "LMCacheMPConnector", **extra), server)


def _sweep() -> None:
    """LMCache leaves an engine's segment, named after its process, when that is killed."""
    for segment in Path("/dev/shm").glob("lmcache_kv_*_*"):
        if not Path("/proc", segment.name.split("_")[2]).exists():
            segment.unlink(missing_ok=True)


SIDES = {"ours": _ours, "LMCache": _lmcache, "recompute": lambda *where: Side(_engine(*where))}


def _start(stack: ExitStack, family: str, model: Any) -> dict[str, Side]:
    from conftest import EngineError

    sides = {}
    for name, start in SIDES.items():
        with ExitStack() as attempt:
            folder = Path(attempt.enter_context(tempfile.TemporaryDirectory()))
            try:
                sides[name] = start(attempt, folder, model)
                stack.enter_context(attempt.pop_all())
            except (RuntimeError, EngineError) as error:
                raised = re.findall(r"^[\w.]*Error: .*", str(error), re.M)
                print(f"{family}: without {name}: {(raised or [str(error).strip()])[0]}")
    return sides


def _measure(sides: dict[str, Side], chunk: int) -> None:
    draw = random.Random(1).choices
    prompts = [draw(range(3, 500), k=NUM_CHUNKS * chunk + 32) for _ in range(NUM_PROMPTS)]
    for prompt in prompts:
        branch = prompt[: NUM_CHUNKS // 2 * chunk] + prompt[-chunk:]
        # Computed, restored, restored in part; the last side never has a cache.
        for text in (prompt, prompt, branch):
            right: list[int] = []
            for side in reversed(sides.values()):
                answer = side.run(f"{DROP}; {ASK}", prompt=text, max_tokens=COMPARED_TOKENS)
                right = right or answer["tokens"]
                side.samples["answers right, %"].append(100 * (answer["tokens"] == right))
    for side in sides.values():
        before = sum(side.cpu_ms())
        time.sleep(IDLE_SECONDS)
        side.samples["CPU idle, ms/s"].append((sum(side.cpu_ms()) - before) / IDLE_SECONDS)
    for index in range(ROUNDS):
        for side in list(sides.values())[:: -1 if index % 2 else 1]:
            for prompt in prompts:
                side.measure(prompt)


def main(families: list[str]) -> None:
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "e2e")]
    import tiny_models

    what = f"{ROUNDS * NUM_PROMPTS} times {NUM_CHUNKS} chunks"
    print(("{:<32}" + "{:>13}" * 5).format(what, *SIDES, "/ LMCache", "/ recompute"))
    for family in families or ["gemma3", "qwen3next"]:
        model = tiny_models.build(family)
        with ExitStack() as stack:
            sides = _start(stack, family, model)
            _measure(sides, model.chunk_tokens)
        for figure, combine in FIGURES.items():
            samples = [sides[name].samples[figure] if name in sides else [] for name in SIDES]
            values = [combine(some) if some else None for some in samples]
            values += [values[0] / other if values[0] and other else None for other in values[1:]]
            texts = ["-" if value is None else f"{value:.2f}" for value in values]
            print(f"{family:<12}{figure:<20}" + "".join(f"{text:>13}" for text in texts))


if __name__ == "__main__":
    if PEER_PYTHON.exists() and Path(sys.executable) != PEER_PYTHON:
        os.execv(PEER_PYTHON, [str(PEER_PYTHON), *sys.argv])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # The others end with it.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LMCACHE_TRACK_USAGE": "false"}
    main(sys.argv[1:])
