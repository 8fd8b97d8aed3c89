"""Hooks for vLLM-Omni's runner, on a stand-in with its methods' parameters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from scenarios import HandOn

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
