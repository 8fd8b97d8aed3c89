"""How the connector is named, what is refused at start, and beside which others it lives."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TOKENS = 24
OURS = {"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both"}
MODULE = {"kv_connector_module_path": "lmcache_connector.connector"}


@pytest.mark.parametrize("plugins", ["lmcache_connector", "none"])
def test_by_module_path_with_and_without_the_entry_point(
    start_engine: Callable[..., Any], make_prompt: Callable[..., list[int]], plugins: str
) -> None:
    engine = start_engine("qwen2", transfer=MODULE, env={"VLLM_PLUGINS": plugins})
    prompt = make_prompt(1, 600)
    cold = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    restored = engine.one(prompt, max_tokens=TOKENS)
    assert restored["cached"] == 512
    assert restored["tokens"] == cold["tokens"]
    # An idle engine does not spin: nothing is awaited and nothing keeps it stepping.
    engine.settle()
    assert engine.run("host.core.step(); result = not host.core.scheduler.has_requests()")
    engine.close()


def test_beside_another_child_of_a_multi_connector(
    start_engine: Callable[..., Any], make_prompt: Callable[..., list[int]]
) -> None:
    children = [
        # Its handshake, with another chunk, is what all children are handed.
        {**OURS, "kv_connector_extra_config": {"chunk_size": 512}},
        OURS,
    ]
    engine = start_engine(
        "gptoss",
        multiprocess=True,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        },
    )
    prompt = make_prompt(1, 1200)
    engine.one(make_prompt(2, 40), max_tokens=2)
    cold = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    restored = engine.one(prompt, max_tokens=TOKENS)
    assert restored["cached"] == 1024
    assert restored["tokens"] == cold["tokens"]
    engine.close()


def test_vllms_own_failure_policy_on_request(
    start_engine: Callable[..., Any], make_prompt: Callable[..., list[int]]
) -> None:
    engine = start_engine("qwen2", extra={"fail_on_load_error": True})
    prompt = make_prompt(1, 600)
    cold = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    reason = engine.run(
        """
from vllm import SamplingParams
host.on_workers(fail_checks, 0)
params = SamplingParams(max_tokens=4, detokenize=False)
request = {"prompt_token_ids": args["prompt"]}
result = llm.generate([request], params, use_tqdm=False)[0].outputs[0].finish_reason
host.on_workers(pass_checks)
llm.reset_prefix_cache()
""",
        prompt=prompt,
    )
    assert reason == "error"
    # That request failed, the engine did not.
    assert engine.one(prompt, max_tokens=TOKENS)["tokens"] == cold["tokens"]
    engine.settle()
    engine.close()


@pytest.mark.parametrize(
    ("extra", "role", "words"),
    [
        ({"chunk_sizes": 256}, "kv_both", ["chunk_sizes", "chunk_size"]),
        ({"max_local_cpu_size": "8KiB"}, "kv_both", ["max_local_cpu_size", "at least"]),
        ({"max_local_cpu_size": 10**6}, "kv_both", ["max_local_cpu_size", "MemAvailable"]),
    ],
    ids=["unknown key", "pool smaller than one object", "pool larger than the host"],
)
def test_refused_at_start(
    start_engine: Callable[..., Any], extra: dict[str, Any], role: str, words: list[str]
) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011
        start_engine("qwen2", extra=extra, role=role)
    for word in words:
        assert word in str(refused.value)


def test_a_container_with_little_shared_memory(
    start_engine: Callable[..., Any], make_prompt: Callable[..., list[int]]
) -> None:
    """Docker gives /dev/shm 64 MB; the pool does not live there."""
    shell = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "
    prefix = ["unshare", "--mount", "sh", "-c", f'{shell} "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    engine = start_engine("qwen2", prefix=prefix)
    prompts = [make_prompt(seed, 4000) for seed in range(10)]
    colds = [engine.one(prompt, max_tokens=TOKENS)["tokens"] for prompt in prompts]
    engine.reset_local()
    assert engine.settle()["used_bytes"] > 64 << 20
    for prompt, cold in zip(prompts, colds, strict=True):
        restored = engine.one(prompt, max_tokens=TOKENS)
        assert restored["cached"] == 3840
        assert restored["tokens"] == cold
    engine.close()


def test_a_lost_block_size_is_set_back(
    start_engine: Callable[..., Any], make_prompt: Callable[..., list[int]]
) -> None:
    """vLLM's default engine forgets the block size of a state model on CPU; steps that begin
    inside a state block would leave wrong states, in vLLM's own cache too."""
    engine = start_engine(
        "qwen3next", multiprocess=True, block_size=None, max_num_batched_tokens=1000
    )
    prompt = make_prompt(5, 2300)
    colds = [
        engine.one(prompt[:length], max_tokens=TOKENS, salt=f"cold {length}")
        for length in (2300, 2200)
    ]
    first = engine.one(prompt, max_tokens=TOKENS)
    local = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    restored = engine.one(prompt, max_tokens=TOKENS)
    engine.reset_local()
    shorter = engine.one(prompt[:2200], max_tokens=TOKENS)
    assert local["cached"] == restored["cached"] == shorter["cached"] == 1920
    for answer in (first, local, restored):
        assert answer["tokens"] == colds[0]["tokens"]
    assert shorter["tokens"] == colds[1]["tokens"]
    assert "--block-size 640" in engine.log.read_text()
    engine.close()
