"""The default engine, whose core is another process, and tensor parallelism over two workers.

What lives in those processes is out of reach; the answers and vLLM's own figures are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TOKENS = 32


def assert_same(family: str, cold: dict[str, Any], restored: dict[str, Any]) -> None:
    tolerance = 0.05 if family == "deepseek_v3" else 1e-4
    assert restored["tokens"] == cold["tokens"]
    worst = max(abs(a - b) for a, b in zip(cold["logprobs"], restored["logprobs"], strict=True))
    assert worst <= tolerance


def check_family(engine: Any, family: str, spec: Any, prompt: list[int]) -> dict[str, Any]:
    """Cold = restored, and each group's poison shows; answers the cold run."""
    cold = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    restored = engine.one(prompt, max_tokens=TOKENS)
    assert cold["cached"] == 0
    assert restored["cached"] == len(prompt) // spec.chunk_tokens * spec.chunk_tokens
    assert_same(family, cold, restored)
    for group in spec.groups:
        engine.reset_local()
        poisoned = engine.run(
            "result = host.generate_poisoned(args['prompt'], args['group'], args['tokens'])",
            prompt=prompt,
            group=group,
            tokens=TOKENS,
        )
        with pytest.raises(AssertionError):
            assert_same(family, cold, poisoned)
    engine.reset_local()
    assert_same(family, cold, engine.one(prompt, max_tokens=TOKENS))
    return cold


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3", "gemma4", "gptoss", "llama4", "qwen3next", "deepseek_v3"]
)
def test_core_in_another_process(
    family: str,
    start_engine: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
    tiny_models: Any,
) -> None:
    spec = tiny_models.FAMILIES[family]
    engine = start_engine(family, multiprocess=True)
    check_family(engine, family, spec, make_prompt(1, 2 * spec.chunk_tokens + 40))
    engine.close()


@pytest.mark.parametrize("family", ["gptoss", "qwen3next"])
def test_two_workers(
    family: str,
    start_engine: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
    tiny_models: Any,
) -> None:
    spec = tiny_models.FAMILIES[family]
    engine = start_engine(
        family,
        multiprocess=True,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
    )
    prompt = make_prompt(1, 2 * spec.chunk_tokens + 40)
    cold = check_family(engine, family, spec, prompt)

    # The load of one rank fails: the request is recomputed, the engine lives on.
    for rank in range(2):
        engine.reset_local()
        engine.run("host.on_workers(fail_checks, args['rank'])", rank=rank)
        failed = engine.one(prompt, max_tokens=TOKENS)
        engine.run("host.on_workers(pass_checks)")
        assert failed["tokens"] == cold["tokens"]
        # The rows that failed were dropped and stored again by the recomputation.
        engine.reset_local()
        again = engine.one(prompt, max_tokens=TOKENS)
        assert again["cached"] > 0
        assert again["tokens"] == cold["tokens"]
    engine.close()
