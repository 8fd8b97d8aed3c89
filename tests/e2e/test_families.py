"""Cold run = restored run on real vLLM, for every family, with the twin that must fail.

One engine per family, in this process's child, serves all cases of this file; then another does
whose cache is in a server that all families share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.engine

FAMILIES = ["qwen2", "gemma3", "gemma4", "gptoss", "llama4", "qwen3next", "deepseek_v3"]
TOKENS = 32
COLD_ANSWERS: dict[str, Any] = {family: {} for family in FAMILIES}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    server = start_server()
    yield server
    server.terminate()


@pytest.fixture(scope="module", params=["embedded", "server"])
def mode(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def bed(mode: str, request: Any, start_bed: Callable[..., Any]) -> Iterator[Any]:
    extra = {}
    if mode == "server":
        extra["server"] = request.getfixturevalue("server").endpoint
    bed = start_bed(request.param, COLD_ANSWERS[request.param], extra=extra)
    yield bed
    bed.engine.close()


def test_restored_equals_cold(bed: Any, make_prompt: Callable[..., list[int]]) -> None:
    prompt = make_prompt(1, 3 * bed.chunk + 40)
    cold = bed.cold(prompt)
    bed.clear()
    bed.fill(prompt)
    restored = bed.engine.one(prompt, max_tokens=TOKENS)
    assert bed.last_match() == (0, 3 * bed.chunk)
    assert restored["cached"] == 3 * bed.chunk
    bed.same(cold, restored)
    bed.engine.settle()


def test_restored_pages_hold_the_stored_bytes(
    bed: Any, make_prompt: Callable[..., list[int]]
) -> None:
    prompt = make_prompt(1, 3 * bed.chunk + 40)
    bed.clear()
    bed.fill(prompt)
    bed.engine.run("host.on_workers(watch_pages)")
    bed.engine.one(prompt, max_tokens=2)
    (seen,) = bed.engine.run("result = host.on_workers(pages_seen)")
    assert seen["pages"] > 0
    assert seen["others"] > 0
    assert seen["wrong"] == 0
    bed.engine.reset_local()
    bed.engine.settle()


def test_poisoned_group_shows(bed: Any, make_prompt: Callable[..., list[int]]) -> None:
    """The oracle's twin: bytes of one group changed behind the check must change the answer."""
    prompt = make_prompt(1, 3 * bed.chunk + 40)
    cold = bed.cold(prompt)
    bed.clear()
    bed.fill(prompt)
    for group in bed.groups:
        poisoned = bed.poisoned(prompt, group)
        with pytest.raises(AssertionError):
            bed.same(cold, poisoned)
    bed.engine.reset_local()
    bed.same(cold, bed.engine.one(prompt, max_tokens=TOKENS))
    bed.engine.settle()


def test_prompt_lengths_around_a_boundary(
    bed: Any, mode: str, make_prompt: Callable[..., list[int]]
) -> None:
    whole = make_prompt(2, 3 * bed.chunk + 1)
    bed.clear()
    bed.fill(whole)
    boundaries = (1, 2, 3) if mode == "embedded" else (2,)
    for chunks, extra in itertools.product(boundaries, (-1, 0, 1)):
        prompt = whole[: chunks * bed.chunk + extra]
        cold = bed.cold(prompt)
        restored = bed.engine.one(prompt, max_tokens=TOKENS)
        expected = chunks if extra == 1 else chunks - 1
        assert bed.last_match() == (0, expected * bed.chunk)
        bed.same(cold, restored)
        bed.engine.reset_local()
    bed.engine.settle()


def test_local_prefix_and_external_hit_together(
    bed: Any, mode: str, make_prompt: Callable[..., list[int]]
) -> None:
    """Local prefix of 0, 1, 2 chunks times external 0 to 3; with a server only some of them."""
    locals_, externals = (range(3), range(4)) if mode == "embedded" else ((0, 1, 2), (3,))
    prompt = make_prompt(3, 3 * bed.chunk + 40)
    other = make_prompt(4, bed.chunk)
    cold = bed.cold(prompt)
    seen = set()
    for external, local in itertools.product(externals, locals_):
        bed.clear()
        if external:
            bed.fill(prompt[: external * bed.chunk] + other[:40])
        bed.use(load=False, store=False)
        if local:
            bed.engine.one(prompt[: local * bed.chunk] + other[40:80], max_tokens=1)
        bed.use(load=True, store=True)
        answer = bed.engine.one(prompt, max_tokens=TOKENS)
        found_local, added = bed.last_match()
        seen.add((found_local // bed.chunk, added // bed.chunk))
        assert found_local <= local * bed.chunk
        assert found_local + added == max(found_local, external * bed.chunk)
        bed.same(cold, answer)
    if bed.family != "deepseek_v3":  # vLLM has no local prefix cache for MLA on CPU
        assert {local for local, _ in seen} >= {0, 1, 2}, seen
    assert any(local and added for local, added in seen) or bed.family == "deepseek_v3", seen
    bed.engine.settle()


def test_eight_requests_share_a_prefix_at_once(
    bed: Any, make_prompt: Callable[..., list[int]]
) -> None:
    shared = make_prompt(5, 2 * bed.chunk)
    prompts = [shared + make_prompt(50 + index, 30 + index) for index in range(8)]
    colds = [bed.cold(prompt) for prompt in prompts]
    bed.clear()
    together = bed.engine.generate(prompts, max_tokens=TOKENS)
    for cold, answer in zip(colds, together, strict=True):
        assert answer["tokens"] == cold["tokens"]
    bed.fill(prompts[0])
    restored = bed.engine.generate(prompts, max_tokens=TOKENS)
    for cold, answer in zip(colds, restored, strict=True):
        assert answer["tokens"] == cold["tokens"]
        assert answer["cached"] == 2 * bed.chunk
    bed.engine.settle()


def test_a_hit_and_a_cold_request_in_one_batch(
    bed: Any, make_prompt: Callable[..., list[int]]
) -> None:
    hit, miss = make_prompt(6, 2 * bed.chunk + 20), make_prompt(7, bed.chunk + 50)
    colds = [bed.cold(hit), bed.cold(miss)]
    bed.clear()
    bed.fill(hit)
    answers = bed.engine.generate([hit, miss], max_tokens=TOKENS)
    assert [answer["cached"] for answer in answers] == [2 * bed.chunk, 0]
    for cold, answer in zip(colds, answers, strict=True):
        assert answer["tokens"] == cold["tokens"]
    bed.engine.settle()
