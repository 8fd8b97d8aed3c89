"""What must hold for every runner class with the methods that are wrapped: the same for Omni's own
and for a stand-in."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from steps import CHUNK, LAYERS, NAMES, Stage, hooked, open_store, rows_of

TOKENS = [(17 * i + 3) % 251 for i in range(200)]


def run_whole(stage: Stage, name: str, tokens: list[int], num_prompt: int, step: int) -> None:
    for first in range(0, num_prompt, step):
        stage.step((name, tokens, num_prompt, first, min(first + step, num_prompt)))
    for first in range(num_prompt, len(tokens)):
        stage.step((name, tokens, num_prompt, first, first + 1))


class HandOn:
    """Tests; a subclass has the ``runner_class``."""

    runner_class: Any

    @pytest.mark.parametrize("step", [1, 5, 64])
    @pytest.mark.parametrize("hit", [CHUNK, 3 * CHUNK - 1, 2 * CHUNK + 3, 8 * CHUNK - 1])
    def test_a_restored_prefix_is_handed_on_with_its_rows(self, hit: int, step: int) -> None:
        # 8 chunks of prompt: a hit of all but its last token, too.
        tokens, num_prompt = TOKENS[: 8 * CHUNK + 10], 8 * CHUNK
        with open_store() as store, hooked(self.runner_class, store):
            cold = Stage(self.runner_class)
            run_whole(cold, "cold", tokens, num_prompt, step)
            assert cold.whole("cold", tokens, len(tokens))
            warm = Stage(self.runner_class)
            warm.step(("warm", tokens, num_prompt, hit, min(hit + step, num_prompt)))
            done = min(hit + step, num_prompt)
            assert warm.whole("warm", tokens, done)
            for first in range(done, len(tokens)):
                warm.step(("warm", tokens, num_prompt, first, first + 1))
            assert warm.whole("warm", tokens, len(tokens))
            for name in NAMES:
                cold_rows = torch.cat(cold.sent["cold"][name])
                assert torch.equal(cold_rows, torch.cat(warm.sent["warm"][name]))
            # Generated tokens are kept too, and what a resumed request adds to a chunk's start.
            assert store.coverage(tokens, LAYERS) == len(tokens) // CHUNK * CHUNK

    @pytest.mark.parametrize("captured", [(0,), (), [0, 2], None])
    def test_a_step_without_rows_of_a_layer_is_no_seam(self, captured: Any) -> None:
        """What comes after it does not close up to what came before it."""
        tokens, half = TOKENS[: 4 * CHUNK], CHUNK // 2
        with open_store() as store, hooked(self.runner_class, store):
            stage = Stage(self.runner_class)
            stage.step(("a", tokens, len(tokens), 0, half))
            layers = list(captured) if isinstance(captured, list) else captured
            stage.step(("a", tokens, len(tokens), half, CHUNK), captured=layers)
            stage.step(("a", tokens, len(tokens), CHUNK, CHUNK + half))
            stage.step(("a", tokens, len(tokens), CHUNK + half, len(tokens)))
            found = store.retrieve_layers(tokens, LAYERS) or {}
            for layer, rows in found.items():
                assert torch.equal(rows, rows_of(tokens, layer)[: len(rows)])

    def test_what_comes_after_an_unaligned_hit_is_filed_where_it_belongs(self) -> None:
        tokens = TOKENS[:64]
        with open_store() as store, hooked(self.runner_class, store):
            first = Stage(self.runner_class)
            first.step(("a", tokens[:16], 16, 0, 16))
            stage = Stage(self.runner_class)
            stage.step(("b", tokens, 64, 15, 64))
            assert stage.whole("b", tokens, 64)
            found = store.retrieve_layers(tokens, LAYERS)
            assert found is not None
            assert all(torch.equal(found[layer], rows_of(tokens, layer)) for layer in LAYERS)

    def test_requests_of_one_step_do_not_mix(self) -> None:
        one, two, three = TOKENS[:40], TOKENS[60:124], TOKENS[130:150]
        with open_store() as store, hooked(self.runner_class, store):
            stage = Stage(self.runner_class)
            stage.step(("one", one, 40, 0, 30), ("two", two, 64, 0, 64))
            stage.step(("three", three, 20, 0, 20), ("one", one, 40, 30, 40))
            assert stage.whole("one", one, 40)
            assert stage.whole("two", two, 64)
            stage.step(("again", two, 64, 40, 64), ("four", one, 40, 32, 40))
            assert stage.whole("again", two, 64)
            assert stage.whole("four", one, 40)
            assert stage.whole("three", three, 20)

    @pytest.mark.parametrize("resumed_at", [0, CHUNK, 2 * CHUNK, 4 * CHUNK])
    def test_a_preempted_request_hands_on_each_row_once(self, resumed_at: int) -> None:
        tokens, num_prompt = TOKENS[:60], 40
        with open_store() as store, hooked(self.runner_class, store):
            stage = Stage(self.runner_class)
            stage.step(("a", tokens, num_prompt, 0, 20))
            if resumed_at == 4 * CHUNK:
                # More than it had itself: another request has stored the prompt meanwhile.
                run_whole(stage, "other", tokens[:40], 40, 40)
            stage.step(("b", TOKENS[100:110], 10, 0, 10))
            for first in range(resumed_at, 40, 6):
                stage.step(("a", tokens, num_prompt, first, min(first + 6, 40)))
            for first in range(40, 50):
                stage.step(("a", tokens[: first + 1], num_prompt, first, first + 1))
            # Preempted while it generates.
            stage.step(("a", tokens[:51], num_prompt, resumed_at, 51))
            for first in range(51, 60):
                stage.step(("a", tokens[: first + 1], num_prompt, first, first + 1))
            assert stage.whole("a", tokens, 60)
            found = store.retrieve_layers(tokens, LAYERS)
            assert found is not None
            assert all(torch.equal(found[k], rows_of(tokens, k)[:56]) for k in LAYERS)

    def test_an_id_that_is_used_again_is_another_request(self) -> None:
        with open_store() as store, hooked(self.runner_class, store) as rows:
            stage, other = Stage(self.runner_class), TOKENS[50:80]
            stage.step(("b", other, 30, 0, 24))
            stage.step(("a", TOKENS[:20], 20, 0, 20))
            stage.finish("a")
            stage.sent.clear()
            # It begins where the first one ended.
            stage.step(("a", other, 30, 20, 30))
            assert stage.whole("a", other, 30)
            assert rows._requests.keys() == {"a", "b"}
            stage.finish("a")
            stage.step(("b", other, 30, 24, 30))
            assert rows._requests.keys() == {"b"}

    def test_a_step_that_nobody_asked_for_leaves_a_gap(self) -> None:
        tokens = TOKENS[:40]
        with open_store() as store, hooked(self.runner_class, store):
            stage = Stage(self.runner_class)
            stage.step(("a", tokens, 40, 0, 40))
            stage.step(("b", tokens, 40, 16, 24), asked=False)
            assert stage.step(("b", tokens, 40, 24, 40))[0].keys() == {"embed.tts_bos"}

    def test_rows_that_are_lost_are_never_handed_on_short(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tokens = TOKENS[:80]
        with open_store() as store, hooked(self.runner_class, store):
            stage = Stage(self.runner_class)
            # Only half of what is restored is there; of another request, nothing.
            stage.step(("half", tokens[:32], 32, 0, 32))
            for name, hit in (("a", 40), ("b", 64)):
                with caplog.at_level(logging.ERROR):
                    payload = stage.step((name, tokens, 72, hit, 72))[0]
                assert payload.keys() == {"embed.tts_bos"}
                assert "they are not in the store" in caplog.text
                caplog.clear()
                for first in range(72, 80):
                    payload = stage.step((name, tokens, 72, first, first + 1))[0]
                    assert payload.keys() == {"embed.tts_bos"}
                assert name not in stage.sent
            # Preempted, and computed from the start: everything is there again.
            stage.step(("a", tokens, 72, 0, 80))
            assert stage.whole("a", tokens, 80)

    def test_one_lost_layer_is_as_good_as_all(self) -> None:
        tokens = TOKENS[:32]
        with open_store() as store, hooked(self.runner_class, store):
            for layer in (-1, 2):
                store.store_hidden_states(tokens, rows_of(tokens, layer), layer)
            stage = Stage(self.runner_class)
            assert stage.step(("a", tokens, 32, 24, 32))[0].keys() == {"embed.tts_bos"}

    def test_rows_that_nobody_knows_are_not_handed_on_short_either(self) -> None:
        tokens = TOKENS[:32]
        with open_store() as store, hooked(self.runner_class, store) as rows:
            stage = Stage(self.runner_class)
            stage.step(("a", tokens, 32, 0, 32))
            stage.step(("b", tokens, 32, 24, 32))
            payload = {"other": torch.zeros(8, 3), "one": torch.zeros(1, 3), "flag": 1}
            rows._requests["b"].delivered = 0
            assert rows.complete("b", payload).keys() == {"one", "flag"}

    def test_a_chunk_that_is_not_stored_stops_all_behind_it(self) -> None:
        tokens = TOKENS[:120]
        with open_store() as store:
            asked: list[tuple[int, int]] = []
            failing = 2

            class Failing:
                retrieve_layers = store.retrieve_layers

                def store_batch(self, items: Any) -> list[int]:
                    asked.append((items[0].token_offset, len(items[0].token_ids)))
                    if len(asked) <= failing:
                        return [*store.store_batch(items[:1]), *[0] * (len(items) - 1)]
                    return store.store_batch(items)

            with hooked(self.runner_class, Failing()):
                # Twice in a row: given up, and nothing is found then.
                stage = Stage(self.runner_class)
                run_whole(stage, "a", tokens, 60, 20)
                assert stage.whole("a", tokens, 120)
                assert asked == [(0, 16), (0, 40)]
                assert store.coverage(tokens, LAYERS) == 0
                # Once: the same chunks come with the next step's.
                asked.clear()
                failing = 1
                run_whole(stage, "b", tokens, 60, 20)
                assert asked[:3] == [(0, 16), (0, 40), (40, 56)]
                assert store.coverage(tokens, LAYERS) == 120
                found = store.retrieve_layers(tokens, LAYERS)
                assert found is not None
                assert all(torch.equal(found[k], rows_of(tokens, k)) for k in LAYERS)

    @pytest.mark.parametrize("error", [RuntimeError, ValueError, MemoryError])
    @pytest.mark.parametrize("where", ["store_batch", "retrieve_layers", "cat", "cpu", "name"])
    def test_no_trouble_ends_the_engine_or_hands_on_less(
        self, monkeypatch: pytest.MonkeyPatch, where: str, error: type[Exception]
    ) -> None:
        tokens, other = TOKENS[:40], TOKENS[40:80]

        def fail(*args: Any, **how: Any) -> Any:
            raise error("no room")

        with open_store() as store, hooked(self.runner_class, store) as rows:
            stage = Stage(self.runner_class)
            run_whole(stage, "a", tokens, 40, 40)
            owner = {"cat": torch, "cpu": torch.Tensor, "name": rows}.get(where, store)
            name = "_extra_of" if where == "name" else where
            with monkeypatch.context() as patch:
                real = getattr(owner, name)

                def of_hooks(*args: Any, **how: Any) -> Any:
                    caller = sys._getframe(1).f_code.co_filename
                    return (fail if "omni.py" in caller and "hidden" in caller else real)(
                        *args, **how
                    )

                patch.setattr(owner, name, of_hooks)
                payload = stage.step(("b", tokens, 40, 32, 40))[0]
                is_whole = "hidden" in payload
                assert is_whole is (where in ("store_batch", "cpu"))
                assert not is_whole or len(payload["hidden"]) == 40
                run_whole(stage, "c", other, 40, 40)
                assert stage.whole("c", other, 40)
            assert store.coverage(tokens, LAYERS) == 40
            covered = store.coverage(other, LAYERS)
            assert covered == (40 if where == "retrieve_layers" else 0)

    def test_a_full_pool_keeps_the_head_and_tells_no_lies(self) -> None:
        tokens = TOKENS[:160]
        with open_store(num_chunks=24) as store, hooked(self.runner_class, store):
            stage = Stage(self.runner_class)
            run_whole(stage, "a", tokens, 160, 16)
            assert stage.whole("a", tokens, 160)
            reach = store.coverage(tokens, LAYERS)
            assert 0 < reach < 160
            stage.step(("b", tokens, 160, reach, 160))
            assert stage.whole("b", tokens, 160)
            assert stage.step(("c", tokens, 160, reach + CHUNK, 160))[0].keys() == {"embed.tts_bos"}

    def test_other_images_under_the_same_tokens_share_no_rows(self) -> None:
        tokens = TOKENS[:48]
        images = {"cat": "hash-cat", "dog": "hash-dog", "cat again": "hash-cat"}

        def extra_of(name: str, state: Any) -> Any:
            # An image from token 10 to 20.
            return lambda first, end: (images[name], 10 - first) if first < 20 else None

        with open_store() as store, hooked(self.runner_class, store, extra_of):
            cat, dog = Stage(self.runner_class, seed=1), Stage(self.runner_class, seed=2)
            cat.step(("cat", tokens, 48, 0, 48))
            assert dog.step(("dog", tokens, 48, 40, 48))[0].keys() == {"embed.tts_bos"}
            dog.step(("dog", tokens, 48, 0, 48))
            assert dog.whole("dog", tokens, 48)
            cat.step(("cat again", tokens, 48, 40, 48))
            assert cat.whole("cat again", tokens, 48)
            dog.finish("dog")
            dog.sent.clear()
            dog.step(("dog", tokens, 48, 40, 48))
            assert dog.whole("dog", tokens, 48)

    def test_a_request_without_a_name_is_neither_kept_nor_completed(self) -> None:
        tokens = TOKENS[:32]

        def extra_of(name: str, state: Any) -> None:
            if name != "named":
                raise ValueError("a prompt of embeddings")

        with open_store() as store, hooked(self.runner_class, store, extra_of):
            stage = Stage(self.runner_class)
            stage.step(("a", tokens, 32, 0, 32))
            assert stage.whole("a", tokens, 32)
            assert store.coverage(tokens, LAYERS) == 0
            stage.step(("named", tokens, 32, 0, 32))
            assert stage.step(("b", tokens, 32, 24, 32))[0].keys() == {"embed.tts_bos"}

    def test_tokens_that_are_not_known_yet_are_not_stored(self) -> None:
        tokens = TOKENS[:64]
        with open_store() as store, hooked(self.runner_class, store, prompt_only=True):
            stage = Stage(self.runner_class)
            run_whole(stage, "a", tokens, 36, 20)
            assert stage.whole("a", tokens, 64)
            assert store.coverage(tokens, LAYERS) == 32

    def test_rows_of_omnis_own_cache_are_not_doubled(self) -> None:
        tokens = TOKENS[:32]
        with open_store() as store, hooked(self.runner_class, store) as rows:
            stage = Stage(self.runner_class)
            stage.step(("a", tokens, 32, 0, 32))
            stage.step(("b", tokens, 32, 24, 32))
            rows._requests["b"].delivered = 0
            merged = {"hidden": rows_of(tokens, -1)}
            assert torch.equal(rows.complete("b", merged)["hidden"], merged["hidden"])

    def test_hooks_come_off(self) -> None:
        before = [getattr(self.runner_class, name) for name in ("_prefix_cache_save_step",)]
        with open_store() as store, hooked(self.runner_class, store):
            assert self.runner_class._prefix_cache_save_step is not before[0]
        assert self.runner_class._prefix_cache_save_step is before[0]
        stage = Stage(self.runner_class)
        payload = stage.step(("a", TOKENS[:32], 32, 24, 32))[0]
        # Without them it is short, which is why they are there.
        assert len(payload["hidden"]) == 8
