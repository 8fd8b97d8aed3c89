#!/usr/bin/env python3
"""Whole engines on this machine's CPU: what a hit gains and what a miss costs, side by side.

usage: benchmarks/engine.py [family ...]      (of tools/tiny_models.py; default gemma3 qwen3next)

TTFT of one prompt of k chunks + 32 tokens: cold, restored by the connector, and from vLLM's own
prefix cache, which resumes at the same token. Then the time for a set of prompts that nothing is
held of, with the connector and without it, in turns.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 7
NUM_CHUNKS = 12
MISS_PROMPTS = 8

Answer = dict[str, list[float]]


def _engine(family: str, connector: bool) -> tuple[Any, int]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        # vLLM compiles parts of its sampler anew for many shapes, seconds each time.
        TORCHDYNAMO_DISABLE="1",
    )
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_models
    from vllm import LLM

    model = tiny_models.build(family)
    transfer = {"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both"}
    llm = LLM(
        **model.engine_args(),
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=12288,
        skip_tokenizer_init=True,
        **({"kv_transfer_config": transfer} if connector else {}),
    )
    return llm, model.chunk_tokens


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def _measure(family: str, connector: bool) -> Answer:
    """Seconds by situation, from one engine in this process."""
    llm, chunk = _engine(family, connector)
    from vllm import SamplingParams

    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def ask(prompts: list[list[int]]) -> tuple[float, int]:
        start = time.perf_counter()
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, one_token, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(output.num_cached_tokens or 0 for output in outputs)

    length = NUM_CHUNKS * chunk + 32
    answer: Answer = {"miss": []}
    ask([_prompt(1, length)])
    llm.reset_prefix_cache()
    # The pool's first extents are being touched on another thread; measured is what comes after.
    time.sleep(3)
    for repeat in range(REPEATS):
        prompts = [
            _prompt(1000 * (repeat + 1) + index, 2 * chunk + 32) for index in range(MISS_PROMPTS)
        ]
        answer["miss"].append(ask(prompts)[0])
        llm.reset_prefix_cache()
        if not connector:
            continue
        prompt = _prompt(repeat + 2, length)
        expected = NUM_CHUNKS * chunk
        situations: list[tuple[str, Callable[[], Any], int]] = [
            ("cold", llm.reset_prefix_cache, 0),
            ("restored", llm.reset_prefix_cache, expected),
            ("local", lambda: None, expected),
        ]
        for name, before, cached in situations:
            before()
            seconds, found = ask([prompt])
            assert found == cached, f"{name}: {found} tokens reused, expected {cached}"
            answer.setdefault(name, []).append(seconds)
        llm.reset_prefix_cache()
    return answer


def _in_own_process(family: str, connector: bool) -> Answer:
    """Engines are measured one at a time: they would share the cores."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", family, str(int(connector))],
        capture_output=True,
        text=True,
        cwd="/",
    )
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


def _median(*runs: list[float]) -> float:
    return statistics.median([value for run in runs for value in run])


def main(families: list[str]) -> None:
    print(f"engines on the CPU, prompts of {NUM_CHUNKS} chunks + 32 tokens, median of {REPEATS}")
    print(
        f"{'family':<12} {'cold ms':>8} {'restored ms':>12} {'local ms':>9} {'/ local':>8}", end=""
    )
    print(f" {'misses with/without':>20}")
    for family in families or ["gemma3", "qwen3next"]:
        runs = [_in_own_process(family, connector) for connector in (True, False, True, False)]
        ours, without = runs[::2], runs[1::2]
        cold, restored, local = (
            _median(*(run[name] for run in ours)) for name in ("cold", "restored", "local")
        )
        speed = _median(*(run["miss"] for run in without)) / _median(*(run["miss"] for run in ours))
        print(
            f"{family:<12} {cold * 1e3:>8.0f} {restored * 1e3:>12.1f} {local * 1e3:>9.1f} "
            f"{restored / local:>8.2f} {speed:>20.3f}"
        )
    print("budget: restored <= 1.15 of the local hit; misses >= 0.98 of the throughput without")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(_measure(sys.argv[2], sys.argv[3] == "1")))
    else:
        main(sys.argv[1:])
