"""Too few blocks and too little memory: preemption and eviction under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any]) -> Iterator[Any]:
    engine = start_engine(
        "gptoss",
        num_gpu_blocks_override=20,
        max_model_len=1024,
        extra={"max_local_cpu_size": "512KiB", "save_decode_cache": True},
    )
    yield engine
    engine.close()


def test_preemption_and_eviction(engine: Any, make_prompt: Callable[..., list[int]]) -> None:
    prompts = [make_prompt(100 + index, 370 + index) for index in range(6)]
    engine.run("host.scheduler._can_load = host.scheduler._can_store = False")
    colds = []
    for prompt in prompts:
        colds.append(engine.one(prompt, max_tokens=60)["tokens"])
        engine.reset_local()
    engine.run("host.scheduler._can_load = host.scheduler._can_store = True")
    free = engine.settle()["free_blocks"]
    hits = 0
    for turn in range(3):
        answers = engine.generate(prompts[turn:] + prompts[:turn], max_tokens=60)
        hits += sum(answer["cached"] for answer in answers)
        found = [answer["tokens"] for answer in answers]
        assert found == colds[turn:] + colds[:turn]
        engine.settle()
        engine.reset_local()
    preemptions, evicted = engine.run(
        """
metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
result = metrics["vllm:num_preemptions"], sum(host.engine.stats().evicted.values())
"""
    )
    assert preemptions > 0
    assert evicted > 0
    assert hits > 0
    assert engine.settle()["free_blocks"] == free


def test_a_pool_smaller_than_one_prompt_keeps_the_head(
    engine: Any, make_prompt: Callable[..., list[int]]
) -> None:
    prompt = make_prompt(200, 1000)
    engine.run("host.forget()")
    cold = engine.one(prompt, max_tokens=24)
    engine.reset_local()
    restored = engine.one(prompt, max_tokens=24)
    assert restored["tokens"] == cold["tokens"]
    assert 0 < restored["cached"] < 768
    engine.reset_local()
    engine.settle()
