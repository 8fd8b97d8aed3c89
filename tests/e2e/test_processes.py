"""The default engine, whose core is another process, and tensor parallelism over two workers.

What lives in those processes is out of reach; the answers and vLLM's own figures are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TOKENS = 32


def same(family: str, assert_same: Callable[..., None], *answers: dict[str, Any]) -> None:
    is_mla = family == "deepseek_v3"
    assert_same(*answers, 0.05 if is_mla else 1e-4, bf16_mla=is_mla)


def check_family(
    engine: Any, family: str, spec: Any, prompt: list[int], assert_same: Callable[..., None]
) -> dict[str, Any]:
    """Cold = restored, and each group's poison shows; answers the cold run."""
    cold = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    restored = engine.one(prompt, max_tokens=TOKENS)
    assert cold["cached"] == 0
    assert restored["cached"] == len(prompt) // spec.chunk_tokens * spec.chunk_tokens
    same(family, assert_same, cold, restored)
    for group in spec.groups:
        engine.reset_local()
        poisoned = engine.run(
            "result = host.generate_poisoned(args['prompt'], args['group'], args['tokens'])",
            prompt=prompt,
            group=group,
            tokens=TOKENS,
        )
        with pytest.raises(AssertionError):
            same(family, assert_same, cold, poisoned)
    engine.reset_local()
    same(family, assert_same, cold, engine.one(prompt, max_tokens=TOKENS))
    return cold


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3", "gemma4", "gptoss", "llama4", "qwen3next", "deepseek_v3"]
)
def test_core_in_another_process(
    family: str,
    start_engine: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
    tiny_models: Any,
    assert_same: Callable[..., None],
) -> None:
    spec = tiny_models.FAMILIES[family]
    engine = start_engine(family, multiprocess=True)
    prompt = make_prompt(1, 2 * spec.chunk_tokens + 40)
    check_family(engine, family, spec, prompt, assert_same)
    engine.close()


@pytest.mark.parametrize("family", ["gptoss", "qwen3next"])
def test_two_workers(
    family: str,
    start_engine: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
    tiny_models: Any,
    assert_same: Callable[..., None],
) -> None:
    spec = tiny_models.FAMILIES[family]
    engine = start_engine(
        family,
        # The scheduler in this process, where it can be looked at; the workers in theirs.
        multiprocess=False,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
    )
    prompt = make_prompt(1, 2 * spec.chunk_tokens + 40)
    cold = check_family(engine, family, spec, prompt, assert_same)

    # The load of one rank fails: the request is recomputed, the engine lives on.
    for rank in range(2):
        engine.reset_local()
        engine.run("host.on_workers(fail_checks, args['rank'])", rank=rank)
        failed = engine.one(prompt, max_tokens=TOKENS)
        engine.run("host.on_workers(pass_checks)")
        assert failed["tokens"] == cold["tokens"]
        assert failed["cached"] == 0
        engine.settle()
        # The rows that failed were dropped and stored again by the recomputation.
        engine.reset_local()
        again = engine.one(prompt, max_tokens=TOKENS)
        assert again["cached"] > 0
        assert again["tokens"] == cold["tokens"]
        engine.settle()
    engine.close()
