"""Hooks for vLLM-Omni's runner, on a stand-in with its methods' parameters."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scenarios import HandOn

from lmcache_connector import omni_stage
from lmcache_connector.hidden_states.omni import install


class StandIn:
    """Does what Omni's runner does where its own cache is off."""

    def _prefix_cache_save_step(
        self,
        hidden_states: torch.Tensor,
        multimodal_outputs: dict[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int | None:
        return None

    def _build_omni_pooler_payload(
        self,
        *,
        rid: str,
        idx: int,
        start: int,
        end: int,
        hidden_states_cpu: torch.Tensor | None,
        req_hidden_states_cpu: dict[str, torch.Tensor] | None,
        combined_hidden_states: dict[str, torch.Tensor] | None,
        combined_multimodal_outputs: dict[str, Any] | None,
        mm_cpu: dict[str, object] | None,
        audio_sparse_output: bool,
        sparse_mm_index: dict[str, int],
        hidden_seq_len: int,
        scheduled_seq_len: int,
    ) -> dict[str, object]:
        assert hidden_states_cpu is not None
        assert mm_cpu is not None
        payload: dict[str, object] = {"hidden": hidden_states_cpu[start:end]}
        for name, value in mm_cpu.items():
            payload[name] = value[0] if isinstance(value, list) else value[start:end]  # type: ignore[index]
        return payload


class TestHooks(HandOn):
    runner_class = StandIn


def test_a_runner_with_other_methods_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Other(StandIn):
        def _prefix_cache_save_step(self, hidden_states: torch.Tensor) -> None:  # type: ignore[override]
            pass

    class Older:
        pass

    for runner_class in (Other, Older):
        before = dict(vars(runner_class))
        with caplog.at_level(logging.ERROR):
            assert install(runner_class, None) is None  # type: ignore[arg-type]
        assert dict(vars(runner_class)) == before
        assert len(caplog.records) == 1
        assert "_prefix_cache_save_step has other parameters" in caplog.text
        caplog.clear()


# ---- stages -------------------------------------------------------------------------------------


def stage(role: str = "kv_both", **model: Any) -> Any:
    fields = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "custom_process_next_stage_input_func": "module.function",
        "hf_config": SimpleNamespace(talker_config=SimpleNamespace(accept_hidden_layer=24)),
        "omni_kv_config": None,
        **model,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        kv_transfer_config=SimpleNamespace(kv_role=role, is_kv_consumer=role != "kv_producer"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )


def kept(*layers: int, enabled: bool = True, decode: bool = False) -> Any:
    return SimpleNamespace(
        enable_hidden_state_cache=enabled,
        hidden_state_layers=layers or None,
        save_decode_cache=decode,
    )


def test_a_stage_that_hands_rows_on_must_keep_them() -> None:
    problems = omni_stage.stage_problems
    assert problems(stage(), kept(-1, 0, 24)) == []
    (text,) = problems(stage(), kept(0, 3))
    assert "hidden_state_layers [-1, 0, 3, 24]" in text
    (text,) = problems(stage(), kept(-1, 0, 24, enabled=False))
    assert "set enable_hidden_state_cache" in text
    only_final = SimpleNamespace(talker_config=SimpleNamespace())
    assert problems(stage(hf_config=only_final), kept(-1)) == []
    assert problems(stage("kv_producer"), kept()) == []
    (text,) = problems(stage(architectures=["MiMoAudioModel"]), kept(-1, 0, 24))
    assert "what MiMoAudioModel hands on" in text
    (text,) = problems(stage(use_v2_model_runner=True), kept(-1, 0, 24))
    assert "set model_runner v1" in text
    # The last stage, and what is no stage at all.
    assert problems(stage(custom_process_next_stage_input_func=None), kept()) == []
    assert problems(SimpleNamespace(model_config=SimpleNamespace()), kept()) == []
    # A configuration that is refused is reported by others.
    assert problems(stage(), None) == []


def test_a_stage_of_placeholders_needs_salts() -> None:
    talker = stage(requires_full_payload_input=True)
    assert omni_stage.has_placeholders(talker)
    (text,) = omni_stage.stage_problems(talker, kept(-1, 0, 24))
    assert "placeholders" in text
    for given, count in ((True, 0), (False, 1), ("no", 1)):
        talker.model_config.omni_kv_config = {"conditioning_salt": given}
        assert len(omni_stage.stage_problems(talker, kept())) == count
    assert not omni_stage.has_placeholders(stage())
    assert not omni_stage.has_placeholders(SimpleNamespace())


def test_a_worker_has_hooks_where_omni_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = StandIn._prefix_cache_save_step
    config = stage()
    omni_stage.OmniWorker(config, kept(-1), None, 8).close()  # type: ignore[arg-type]
    module = SimpleNamespace(GPUARModelRunner=StandIn)
    monkeypatch.setitem(sys.modules, "vllm_omni.worker.gpu_ar_model_runner", module)
    omni_stage.OmniWorker(config, kept(), None, 8)  # type: ignore[arg-type]
    assert StandIn._prefix_cache_save_step is before
    worker = omni_stage.OmniWorker(config, kept(-1), None, 8)  # type: ignore[arg-type]
    assert StandIn._prefix_cache_save_step is not before
    worker.close()
    worker.close()
    assert StandIn._prefix_cache_save_step is before


def test_a_salt_names_a_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(GPUARModelRunner=StandIn)
    monkeypatch.setitem(sys.modules, "vllm_omni.worker.gpu_ar_model_runner", module)
    # Without hooks nobody asks for them.
    idle = omni_stage.OmniWorker(stage(), kept(), None, 8)  # type: ignore[arg-type]
    idle.expect({"a": "salt"})
    assert idle._salts == {}
    worker = omni_stage.OmniWorker(stage(), kept(-1), None, 8)  # type: ignore[arg-type]
    seen = []
    made = omni_stage.VllmRequest

    def record(request: Any, *how: Any) -> Any:
        seen.append(request.cache_salt)
        return made(request, *how)

    monkeypatch.setattr(omni_stage, "VllmRequest", record)
    state = SimpleNamespace(
        prompt_token_ids=[1],
        prompt_embeds=None,
        prompt_is_token_ids=None,
        mm_features=[],
        lora_request=None,
    )
    worker.expect({"a": "salt", "c": "salt"})
    assert worker._extra_of("a", state) is not None
    assert worker._extra_of("b", state) is None
    assert seen == ["salt", None]
    state.prompt_embeds = torch.ones(1, 2)
    with pytest.raises(ValueError, match="embeddings"):
        worker._extra_of("c", state)
    assert worker._salts == {}
    worker.close()
