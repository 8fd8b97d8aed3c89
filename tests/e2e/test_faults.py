"""What goes wrong costs a recomputation and nothing else: same tokens, engine alive, no pins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TOKENS = 24
CHUNK = 256


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any]) -> Iterator[Any]:
    engine = start_engine("gemma3", extra={"load_timeout": 0.5}, enable_prompt_embeds=True)
    # One request first, so that free blocks and memory have their resting values.
    engine.one([5] * 40, max_tokens=2)
    engine.reset_local()
    yield engine
    engine.close()


@pytest.fixture
def filled(engine: Any, make_prompt: Callable[..., list[int]]) -> Iterator[tuple[list[int], Any]]:
    """A prompt that is stored and not in the engine's own cache, and its cold answer."""
    prompt = make_prompt(11, 3 * CHUNK + 40)
    engine.run("host.forget()")
    engine.reset_local()
    cold = engine.one(prompt, max_tokens=TOKENS)
    assert cold["cached"] == 0
    engine.reset_local()
    before = engine.settle()
    yield prompt, cold
    after = engine.settle()
    engine.reset_local()
    assert engine.settle()["free_blocks"] == before["free_blocks"]
    assert after["rows"] > 0


def check_recomputed(engine: Any, prompt: list[int], cold: Any, source: str, **args: Any) -> Any:
    """Run ``source``, which breaks something around one request; the answer must be cold's."""
    answer = engine.run(source, prompt=prompt, tokens=TOKENS, **args)
    assert answer["tokens"] == cold["tokens"]
    engine.reset_local()
    # Nothing is left of the fault: the next one is served and right.
    again = engine.one(prompt, max_tokens=TOKENS)
    assert again["tokens"] == cold["tokens"]
    assert again["cached"] > 0
    return answer


@pytest.mark.parametrize("group", ["full", "window-255"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_lost_row(engine: Any, filled: Any, group: str, chunk: int) -> None:
    prompt, cold = filled
    answer = check_recomputed(
        engine,
        prompt,
        cold,
        """
index = host.engine.rows.index
# Rows in the order of their chunks: LRU order of one prompt is tail first.
rows = [entry for entry in index.entries() if entry.key[1] == args["group"]]
rows.sort(key=lambda entry: entry.row.slots[0].offset)
host.engine.rows.remove(rows[args["chunk"]])
result = host.generate([args["prompt"]], args["tokens"])[0]
""",
        group=group,
        chunk=chunk,
    )
    # A hole in the full group ends the hit there; the window is asked at the boundary only.
    expected = chunk if group == "full" else (2 if chunk == 2 else 3)
    assert answer["cached"] == expected * CHUNK


@pytest.mark.parametrize("group", ["full", "window-255"])
@pytest.mark.parametrize("position", ["first byte", "last byte", "middle"])
def test_a_corrupt_object(engine: Any, filled: Any, group: str, position: str) -> None:
    prompt, cold = filled
    answer = check_recomputed(
        engine,
        prompt,
        cold,
        """
rows = [entry for entry in host.engine.rows.index.entries() if entry.key[1] == args["group"]]
slot = max((entry.row.slots[0] for entry in rows), key=lambda slot: slot.offset)
view = host.worker._clients[0].view(slot)
length = {"full": 131072, "window-255": 655360}[args["group"]]
at = {"first byte": 0, "last byte": length - 1, "middle": length // 2}[args["position"]]
view[at] ^= 1
view.release()
result = host.generate([args["prompt"]], args["tokens"])[0]
""",
        group=group,
        position=position,
    )
    assert answer["cached"] == 0


def test_rows_evicted_between_match_and_allocation(engine: Any, filled: Any) -> None:
    prompt, cold = filled
    answer = check_recomputed(
        engine,
        prompt,
        cold,
        """
scheduler = host.scheduler
inner = scheduler.after_alloc
def after_alloc(request_id, block_ids, external_tokens):
    if external_tokens:
        host.forget()
    inner(request_id, block_ids, external_tokens)
scheduler.after_alloc = after_alloc
try:
    result = host.generate([args["prompt"]], args["tokens"])[0]
finally:
    scheduler.after_alloc = inner
""",
    )
    assert answer["cached"] == 0


def test_a_load_that_begins_after_its_deadline_is_refused(engine: Any, filled: Any) -> None:
    prompt, cold = filled
    answer = check_recomputed(
        engine,
        prompt,
        cold,
        """
import time
worker = host.worker
inner = worker.start_loads
def start_loads(meta):
    time.sleep(0.6)
    return inner(meta)
worker.start_loads = start_loads
try:
    result = host.generate([args["prompt"]], args["tokens"])[0]
finally:
    del worker.start_loads
""",
    )
    assert answer["cached"] == 0


def test_a_copy_that_ends_after_its_deadline_is_waited_for(engine: Any, filled: Any) -> None:
    """While it may still write, its blocks belong to it: nothing is reported before it ends."""
    prompt, cold = filled
    check_recomputed(
        engine,
        prompt,
        cold,
        """
import time
copier = host.worker._copier
inner = copier.result
end = time.monotonic() + 1.2
asked = []
def result_late(ticket):
    asked.append(ticket)
    return None if time.monotonic() < end else inner(ticket)
copier.result = result_late
try:
    result = host.generate([args["prompt"]], args["tokens"])[0]
    assert time.monotonic() >= end
finally:
    del copier.result
assert len(asked) > 1
""",
    )


ABORT = """
import itertools, random, time
from vllm import SamplingParams
engine = llm.llm_engine
copier = host.worker._copier
inner = copier.result
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
for turn in range(args["turns"]):
    name = f"abort-{args['when']}-{turn}"
    length = args["lengths"][turn % len(args["lengths"])]
    prompt = args["prompt"][:length]
    llm.reset_prefix_cache()
    if args["when"] == "storing":
        prompt = [3 + (turn * 7 + token) % 400 for token in prompt]
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    if args["when"] == "loading":
        copier.result = lambda ticket: None
        engine.step()
        assert host.scheduler._loads or length < 257
    elif args["when"] == "storing":
        copier.result = lambda ticket: None
        engine.step()
        assert host.scheduler._stores or length < 257
    elif args["when"] == "decoding":
        while not host.core.scheduler.running:
            engine.step()
        for _ in range(3):
            engine.step()
    engine.abort_request([name])
    vars(copier).pop("result", None)
    for _ in range(50):
        if not (engine.has_unfinished_requests() or host.core.scheduler.has_requests()):
            break
        engine.step()
        host.core.step()
result = host.settle()
"""


@pytest.mark.parametrize("when", ["waiting", "loading", "decoding", "storing"])
def test_aborts_leave_nothing_behind(engine: Any, filled: Any, when: str) -> None:
    prompt, cold = filled
    figures = engine.run(ABORT, when=when, turns=12, prompt=prompt, lengths=[808, 513, 300, 200])
    assert figures["rows"] > 0
    engine.reset_local()
    again = engine.one(prompt, max_tokens=TOKENS)
    assert again["tokens"] == cold["tokens"]


def test_prompts_that_make_no_chunk(engine: Any, make_prompt: Callable[..., list[int]]) -> None:
    short = make_prompt(21, 100)
    first = engine.one(short, max_tokens=TOKENS)
    engine.reset_local()
    second = engine.one(short, max_tokens=TOKENS)
    assert second["tokens"] == first["tokens"]
    assert second["cached"] == 0
    single = engine.one([7], max_tokens=1)
    assert len(single["tokens"]) == 1
    engine.settle()


def test_an_empty_prompt_is_vllms_to_refuse(engine: Any, filled: Any) -> None:
    prompt, cold = filled
    with pytest.raises(Exception, match="prompt"):
        engine.one([])
    assert engine.one(prompt, max_tokens=TOKENS)["tokens"] == cold["tokens"]


def test_one_token_answers(engine: Any, filled: Any) -> None:
    prompt, cold = filled
    answer = engine.one(prompt, max_tokens=1)
    assert answer["cached"] == 3 * CHUNK
    assert answer["tokens"] == cold["tokens"][:1]


def test_prompt_logprobs_are_not_served_from_the_cache(engine: Any, filled: Any) -> None:
    prompt, cold = filled
    answer = engine.one(prompt, max_tokens=TOKENS, prompt_logprobs=1)
    assert answer["cached"] == 0
    assert answer["tokens"] == cold["tokens"]


def test_salts_do_not_share(engine: Any, filled: Any) -> None:
    prompt, _ = filled
    source = """
from vllm import SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
request = {"prompt_token_ids": args["prompt"], "cache_salt": args["salt"]}
result = llm.generate([request], params, use_tqdm=False)[0].num_cached_tokens
llm.reset_prefix_cache()
"""
    assert engine.run(source, prompt=prompt, salt="a") == 0
    assert engine.run(source, prompt=prompt, salt="a") == 3 * CHUNK
    assert engine.run(source, prompt=prompt, salt="b") == 0


def test_prompt_embeds_are_keyed_by_content(engine: Any) -> None:
    source = """
import torch
from vllm import SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
result = []
for seed in args["seeds"]:
    torch.manual_seed(seed)
    embeds = torch.randn(600, 128) * 0.3
    output = llm.generate([{"prompt_embeds": embeds}], params, use_tqdm=False)[0]
    result.append([list(output.outputs[0].token_ids), output.num_cached_tokens])
    llm.reset_prefix_cache()
"""
    first, other, again = engine.run(source, seeds=[1, 2, 1])
    assert first[1] == 0
    assert other[1] == 0
    assert other[0] != first[0]
    assert again[1] == 2 * CHUNK
    assert again[0] == first[0]
    engine.settle()


def test_per_request_limits(engine: Any, filled: Any) -> None:
    prompt, _ = filled
    source = """
from vllm import SamplingParams
params = SamplingParams(
    temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False,
    extra_args={"kv_transfer_params": args["transfer"]},
)
request = {"prompt_token_ids": args["prompt"]}
result = llm.generate([request], params, use_tqdm=False)[0].num_cached_tokens
llm.reset_prefix_cache()
"""

    def cached(transfer: dict[str, Any]) -> int:
        return engine.run(source, prompt=prompt, transfer=transfer)

    assert cached({"min_hit_tokens": 3 * CHUNK + 1}) == 0
    assert cached({"min_hit_tokens": 3 * CHUNK}) == 3 * CHUNK
    assert cached({"min_hit_tokens": "many"}) == 3 * CHUNK
    assert cached({"some_other_connector": 1}) == 3 * CHUNK


def test_reset_with_the_connector_forgets(engine: Any, filled: Any) -> None:
    prompt, cold = filled
    engine.run("result = llm.reset_prefix_cache(reset_connector=True)")
    answer = engine.one(prompt, max_tokens=TOKENS)
    assert answer["cached"] == 0
    assert answer["tokens"] == cold["tokens"]
    engine.reset_local()
    assert engine.one(prompt, max_tokens=TOKENS)["cached"] == 3 * CHUNK
