"""Cold run = restored run on real vLLM, for every family, with the twin that must fail.

One engine per family, in this process's child, serves all cases of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

FAMILIES = ["qwen2", "gemma3", "gemma4", "gptoss", "llama4", "qwen3next", "deepseek_v3"]
TOKENS = 32


class Bed:
    """One family's engine and the ways to bring it into a state."""

    def __init__(
        self, family: str, engine: Any, chunk: int, assert_same: Callable[..., None]
    ) -> None:
        self.family = family
        self.engine = engine
        self.chunk = chunk
        self._assert_same = assert_same
        self.cold_answers: dict[tuple[int, ...], dict[str, Any]] = {}
        engine.run(
            """
scheduler = host.scheduler
host.matches = []
inner = scheduler.match
def match(request_id, local_tokens):
    answer = inner(request_id, local_tokens)
    host.matches.append((local_tokens, answer))
    return answer
scheduler.match = match
"""
        )

    def same(self, cold: dict[str, Any], restored: dict[str, Any]) -> None:
        self._assert_same(cold, restored, 1e-4)

    def use(self, *, load: bool, store: bool) -> None:
        self.engine.run(
            "host.scheduler._can_load, host.scheduler._can_store = args['load'], args['store']",
            load=load,
            store=store,
        )

    def clear(self) -> None:
        """Forget everything, ours and the engine's."""
        self.engine.run("host.engine.clear(); host.matches.clear()")
        self.engine.reset_local()

    def cold(self, prompt: list[int]) -> dict[str, Any]:
        """The answer without any cache."""
        key = tuple(prompt)
        if key not in self.cold_answers:
            self.use(load=False, store=False)
            self.engine.reset_local()
            self.cold_answers[key] = self.engine.one(prompt, max_tokens=TOKENS)
            self.engine.reset_local()
            self.use(load=True, store=True)
        return self.cold_answers[key]

    def fill(self, prompt: list[int]) -> None:
        """Store a prompt's chunks, every boundary's state included."""
        self.use(load=False, store=True)
        if self.family == "qwen3next":
            for end in range(self.chunk, len(prompt), self.chunk):
                # A step that ends at the boundary leaves its state.
                self.engine.reset_local()
                self.engine.one(prompt[: end + 1], max_tokens=1)
        self.engine.reset_local()
        self.engine.one(prompt, max_tokens=1)
        self.engine.reset_local()
        self.use(load=True, store=True)

    def last_match(self) -> tuple[int, int]:
        """(local tokens, tokens that we added) of the last request's last lookup."""
        return tuple(self.engine.run("result = host.matches[-1]"))


@pytest.fixture(scope="module", params=FAMILIES)
def bed(
    request: Any,
    start_engine: Callable[..., Any],
    tiny_models: Any,
    assert_same: Callable[..., None],
) -> Any:
    family = request.param
    chunk = tiny_models.FAMILIES[family].chunk_tokens
    # In bf16 MLA's answers depend on batch shapes; test_processes.py has it so.
    options = {"dtype": "float32"} if family == "deepseek_v3" else {}
    engine = start_engine(family, **options)
    yield Bed(family, engine, chunk, assert_same)
    engine.close()


def test_restored_equals_cold(bed: Bed, make_prompt: Callable[..., list[int]]) -> None:
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
    bed: Bed, make_prompt: Callable[..., list[int]]
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


def test_poisoned_group_shows(
    bed: Bed, make_prompt: Callable[..., list[int]], tiny_models: Any
) -> None:
    """The oracle's twin: bytes of one group changed behind the check must change the answer."""
    prompt = make_prompt(1, 3 * bed.chunk + 40)
    cold = bed.cold(prompt)
    bed.clear()
    bed.fill(prompt)
    for group in tiny_models.FAMILIES[bed.family].groups:
        bed.engine.reset_local()
        poisoned = bed.engine.run(
            "result = host.generate_poisoned(args['prompt'], args['group'], args['tokens'])",
            prompt=prompt,
            group=group,
            tokens=TOKENS,
        )
        with pytest.raises(AssertionError):
            bed.same(cold, poisoned)
    bed.engine.reset_local()
    bed.same(cold, bed.engine.one(prompt, max_tokens=TOKENS))
    bed.engine.settle()


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_prompt_lengths_around_a_boundary(
    bed: Bed, make_prompt: Callable[..., list[int]], chunks: int
) -> None:
    whole = make_prompt(2, 3 * bed.chunk + 1)
    bed.clear()
    bed.fill(whole)
    for extra in (-1, 0, 1):
        prompt = whole[: chunks * bed.chunk + extra]
        cold = bed.cold(prompt)
        restored = bed.engine.one(prompt, max_tokens=TOKENS)
        expected = chunks if extra == 1 else chunks - 1
        assert bed.last_match() == (0, expected * bed.chunk)
        bed.same(cold, restored)
        bed.engine.reset_local()
    bed.engine.settle()


def test_local_prefix_and_external_hit_together(
    bed: Bed, make_prompt: Callable[..., list[int]]
) -> None:
    """Local prefix of 0, 1, 2 chunks times external 0 to 3."""
    prompt = make_prompt(3, 3 * bed.chunk + 40)
    other = make_prompt(4, bed.chunk)
    cold = bed.cold(prompt)
    seen = set()
    for external in range(4):
        for local in range(3):
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
    bed: Bed, make_prompt: Callable[..., list[int]]
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
    bed: Bed, make_prompt: Callable[..., list[int]]
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
