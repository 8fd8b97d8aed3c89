"""vLLM-Omni's stages: what their configuration must say, and the hooks of their workers.

vLLM-Omni itself is never imported: its worker has done that before there is a connector.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache_connector.config import Config
from lmcache_connector.hidden_states import omni
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import Extra
from lmcache_connector.vllm_request import Adapters, VllmRequest, mm_identifiers_are_counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RUNNER = ("vllm_omni.worker.gpu_ar_model_runner", "GPUARModelRunner")
# Models whose payloads are known.
_THINKERS = ("Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")


def has_placeholders(vllm_config: VllmConfig) -> bool:
    """Whether prompts are alike for different requests: what they stand for comes from the stage
    before."""
    model = getattr(vllm_config, "model_config", None)
    return bool(getattr(model, "requires_full_payload_input", False))


def stage_problems(vllm_config: VllmConfig, config: Config | None) -> list[str]:
    """Why a stage is refused, one sentence each; nothing for what is no stage of vLLM-Omni.
    ``config``: None where it is refused itself."""
    model: Any = getattr(vllm_config, "model_config", None)
    if has_placeholders(vllm_config):
        if (getattr(model, "omni_kv_config", None) or {}).get("conditioning_salt") is True:
            return []
        return [
            "the prompts of this vLLM-Omni stage are placeholders, alike for different requests: "
            "remove its kv_transfer_config, or give each request a cache_salt that names what it "
            "is conditioned on and say so with omni_kv_config {'conditioning_salt': true}"
        ]
    hands_on = getattr(model, "custom_process_next_stage_input_func", None)
    if config is None or not hands_on or not vllm_config.kv_transfer_config.is_kv_consumer:
        return []
    architectures = list(getattr(model, "architectures", None) or ())
    if not set(architectures) & set(_THINKERS):
        return [
            f"what {', '.join(architectures)} hands on to the next stage of vLLM-Omni is not known "
            f"(known are {', '.join(_THINKERS)}): remove kv_transfer_config from this stage"
        ]
    if getattr(model, "use_v2_model_runner", False):
        return ["vLLM-Omni's model runner v2 gives no hidden states to keep: set model_runner v1"]
    needed = {omni.FINAL}
    talker = getattr(model.hf_config, "talker_config", None)
    if (accepted := getattr(talker, "accept_hidden_layer", None)) is not None:
        needed |= {0, int(accepted)}
    kept = set(config.hidden_state_layers or ()) if config.enable_hidden_state_cache else set()
    if needed <= kept:
        return []
    return [
        "this vLLM-Omni stage hands hidden states on, and those of a restored prefix would be "
        "missing: set enable_hidden_state_cache, max_hidden_state_cpu_size and hidden_state_layers "
        f"{sorted(needed | kept)}, or kv_role kv_producer"
    ]


class OmniWorker:
    """Hooks for one worker's rows."""

    def __init__(
        self, vllm_config: VllmConfig, config: Config, store: HiddenStateStore, chunk_tokens: int
    ) -> None:
        self._salts: dict[str, str] = {}
        self._undo: Callable[[], None] | None = None
        runner_class = getattr(sys.modules.get(_RUNNER[0]), _RUNNER[1], None)
        if runner_class is None or not config.hidden_state_layers:
            return
        self._mm_counters = mm_identifiers_are_counters(vllm_config)
        self._adapters = Adapters()
        rows = omni.OmniRows(
            store,
            chunk_tokens,
            config.hidden_state_layers,
            self._extra_of,
            # Where steps are scheduled ahead, generated tokens are not on the CPU with their rows.
            prompt_only=bool(
                vllm_config.scheduler_config.async_scheduling or not config.save_decode_cache
            ),
        )
        self._undo = omni.install(runner_class, rows)

    def expect(self, salts: Mapping[str, str]) -> None:
        """Cache salts of requests whose first step comes, by request id."""
        if self._undo is not None:
            self._salts.update(salts)

    def _extra_of(self, request_id: str, state: Any) -> Extra | None:
        """As the scheduler's side names the same request, from the worker's state of it."""
        salt = self._salts.pop(request_id, None)
        if state.prompt_token_ids is None or state.prompt_embeds is not None:
            raise ValueError("a prompt of embeddings")
        if state.lora_request is not None:
            self._adapters.replaces(state.lora_request)
        request = SimpleNamespace(
            mm_features=state.mm_features,
            lora_request=state.lora_request,
            cache_salt=salt,
            prompt_embeds=None,
            prompt_is_token_ids=state.prompt_is_token_ids,
        )
        view = VllmRequest(request, self._mm_counters, self._adapters)
        if view.uncacheable is not None:
            raise ValueError(view.uncacheable)
        return view.extra()

    def close(self) -> None:
        """No hooks any more."""
        if self._undo is not None:
            self._undo()
            self._undo = None
