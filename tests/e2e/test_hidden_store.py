"""HiddenStateStore in a real engine: the attribute chain, hits only with rows, restarts, ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

EXTRA = {
    "enable_hidden_state_cache": True,
    "max_hidden_state_cpu_size": "64MiB",
    "hidden_state_layers": [0, -1],
}
# As a fork of vLLM finds the store, on each worker.
HELPERS = """
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

def rows_of(ids, layer, model):
    rows = torch.tensor(ids)[:, None] % 199 + layer * torch.ones(model.get_hidden_size())
    return rows.to(model.dtype)

def keep(worker, ids, layers):
    model = worker.vllm_config.model_config
    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    hs = engine.hidden_state_store
    if hs is None:
        return None
    assert get_kv_transfer_group().worker_side._hidden[1].wait_ready(20)
    return [hs.store_hidden_states(ids, rows_of(ids, layer, model), layer) for layer in layers]

def look(worker, ids, layers):
    model = worker.vllm_config.model_config
    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    hs = engine.hidden_state_store
    if hs is None:
        return None
    found = hs.retrieve_layers(ids, layers)
    if found is None:
        return 0
    (length,) = {len(rows) for rows in found.values()}
    same = all(torch.equal(found[i], rows_of(ids[:length], i, model)) for i in layers)
    return length if same and length % engine.config.chunk_size == 0 else -1
"""


def on_workers(engine: Any, function: str, ids: list[int], layers: list[int]) -> list[Any]:
    answers: list[Any] = engine.run(
        HELPERS + f"result = llm.collective_rpc({function}, args=(args['ids'], args['layers']))",
        ids=ids,
        layers=layers,
    )
    return answers


def test_kv_is_a_hit_only_with_the_rows_of_all_layers(
    start_bed: Callable[..., Any], make_prompt: Callable[..., list[int]], tmp_path: Path
) -> None:
    extra = {**EXTRA, "tiers": [f"file://{tmp_path}"]}
    bed = start_bed("qwen2", extra=extra)
    engine, chunk = bed.engine, bed.chunk
    prompt = make_prompt(1, 4 * chunk + 9)
    bed.cold(prompt)
    bed.fill(prompt)
    bed.same(bed.cold(prompt), engine.one(prompt, max_tokens=bed.TOKENS))
    assert bed.last_match() == (0, 0)
    engine.reset_local()
    assert on_workers(engine, "look", prompt, [0]) == [0]
    assert on_workers(engine, "keep", prompt, [0]) == [[4]]
    assert on_workers(engine, "look", prompt, [0]) == [4 * chunk]
    assert on_workers(engine, "look", prompt, [0, -1]) == [0]
    bed.same(bed.cold(prompt), engine.one(prompt, max_tokens=bed.TOKENS))
    assert bed.last_match() == (0, 0)
    engine.reset_local()
    part = prompt[: 3 * chunk]
    assert on_workers(engine, "keep", part, [-1]) == [[3]]
    bed.same(bed.cold(prompt), engine.one(prompt, max_tokens=bed.TOKENS))
    assert bed.last_match() == (0, 3 * chunk)
    assert on_workers(engine, "look", prompt, [0, -1]) == [3 * chunk]
    assert on_workers(engine, "keep", part, [5]) == [[0]]
    engine.settle()
    # An own prefix hit needs rows too, and a reset forgets them.
    engine.reset_local()
    engine.one(prompt[: chunk + 1], max_tokens=1)
    engine.one(prompt, max_tokens=1)
    local, added = bed.last_match()
    assert (local + added, local > 0) == (3 * chunk, True)
    engine.settle()
    engine.close()

    again = start_bed("qwen2", bed._cold_answers, extra=extra)
    again.same(bed.cold(prompt), again.engine.one(prompt, max_tokens=bed.TOKENS))
    assert again.last_match() == (0, 3 * chunk)
    assert on_workers(again.engine, "look", prompt, [0, -1]) == [3 * chunk]
    again.engine.run("llm.reset_prefix_cache(reset_connector=True)")
    again.engine.one(make_prompt(2, 9), max_tokens=1)
    assert on_workers(again.engine, "look", prompt, [0, -1]) == [0]
    again.same(bed.cold(prompt), again.engine.one(prompt, max_tokens=bed.TOKENS))
    assert again.last_match() == (0, 0)
    assert on_workers(again.engine, "keep", prompt, [0, -1]) == [[4, 4]]
    assert on_workers(again.engine, "look", prompt, [0, -1]) == [4 * chunk]
    again.engine.settle()
    again.engine.close()


def test_without_the_option_there_is_no_store(start_engine: Callable[..., Any]) -> None:
    engine = start_engine("qwen2")
    assert on_workers(engine, "keep", [1, 2, 3], [0]) == [None]
    engine.close()


def test_one_rank_keeps_them_at_a_server(
    start_engine: Callable[..., Any],
    start_server: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
    tiny_models: Any,
) -> None:
    extra = {**EXTRA, "server": start_server(hidden="64MiB").endpoint}
    engine = start_engine(
        "qwen2",
        multiprocess=True,
        extra=extra,
        tensor_parallel_size=2,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    chunk = tiny_models.FAMILIES["qwen2"].chunk_tokens
    prompt = make_prompt(3, 3 * chunk + 5)
    cold = engine.one(prompt, max_tokens=8)
    stored = on_workers(engine, "keep", prompt, [0, -1])
    assert stored == [[3, 3], None]
    assert engine.run("result = llm.reset_prefix_cache()")
    restored = engine.one(prompt, max_tokens=8)
    assert restored["tokens"] == cold["tokens"]
    assert restored["cached"] == 3 * chunk
    assert on_workers(engine, "look", prompt, [0, -1]) == [3 * chunk, None]
    engine.close()
