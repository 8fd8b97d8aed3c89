"""vLLM-Omni 0.30: its own runner, scheduler and payload builder, with this connector's rows.

`make test-omni` makes the environment that this needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed: make test-omni")

os.environ.update(
    HF_HUB_OFFLINE="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

from scenarios import HandOn
from thinker import CHUNK, IMAGE_TOKENS, Thinker
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

from lmcache_connector import omni_stage
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.vllm_request import Adapters, VllmRequest

# vLLM's own imports and start warn.
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = {"qwen2.5": [-1], "qwen3": [-1, 0, 2]}
PROMPT = [(37 * i + 11) % 499 for i in range(3 * CHUNK + 8)]


class TestRunnerOnTensors(HandOn):
    """All of it with the methods of Omni's class."""

    runner_class = GPUARModelRunner


# ---- a stage in an engine -----------------------------------------------------------------------


def extra(family: str) -> dict[str, Any]:
    return {
        "enable_hidden_state_cache": True,
        "max_hidden_state_cpu_size": "64MiB",
        "hidden_state_layers": LAYERS[family],
        "max_local_cpu_size": "64MiB",
        "chunk_size": CHUNK,
        "save_decode_cache": True,
    }


def rows(payload: Any) -> dict[str, torch.Tensor]:
    """What the talker is conditioned on: rows of the tokens from the first one on."""
    embed, hidden = payload["embed"]["prefill"], payload["hidden_states"]["output"]
    if "prompt" in payload["ids"] and "all" not in payload["ids"]:
        return {"final": torch.cat([embed, hidden])}  # Qwen2.5: of the prompt, then the rest
    return {"embeddings": embed, "accepted": hidden}


def same(one: Any, other: Any) -> bool:
    assert one["ids"] == other["ids"]
    ours, theirs = rows(one), rows(other)
    assert ours.keys() == theirs.keys()
    # Rows that all look alike would prove nothing.
    assert all(len(tensor.unique(dim=0)) > 100 for tensor in ours.values())
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_preempted_requests(tmp_path: Any) -> None:
    """Before the others: a process has one connector at a time."""
    stage = Thinker(
        "qwen3", tmp_path, extra("qwen3"), num_gpu_blocks_override=20, max_model_len=512
    )
    stage.run([5] * 10)
    prompts = [[(n * i + 3) % 499 for i in range(4 * CHUNK - 20)] for n in (5, 7)]
    alone = [stage.run(prompt, max_tokens=150)[0][0] for prompt in prompts]
    # Rows of one are there, the other's are not.
    other = [(11 * i + 3) % 499 for i in range(4 * CHUNK - 20)]
    both = stage.run(prompts[0], other, max_tokens=150)
    assert stage.num_preempted > 0
    assert alone[0]["ids"] == both[0][0]["ids"]
    for one, theirs in (
        (alone[0], both[0][0]),
        (stage.run(other, max_tokens=150)[0][0], both[1][0]),
    ):
        assert one["ids"] == theirs["ids"]
        for key, tensor in rows(one).items():
            torch.testing.assert_close(tensor, rows(theirs)[key], rtol=1e-4, atol=1e-4)
    stage.close()


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3"])
def thinker(request: Any, tmp_path_factory: Any) -> Iterator[Thinker]:
    before = GPUARModelRunner._build_omni_pooler_payload
    directory = tmp_path_factory.mktemp("model")
    stage = Thinker(request.param, directory, extra(request.param), num_images=1)
    # Rows are kept from the second step of an engine on.
    stage.run([5] * 10)
    assert GPUARModelRunner._build_omni_pooler_payload is not before
    yield stage
    stage.close()
    assert GPUARModelRunner._build_omni_pooler_payload is before


def test_a_restored_prefix_conditions_the_talker_as_a_computed_one(thinker: Thinker) -> None:
    ((cold, none),) = thinker.run(PROMPT)
    ((warm, restored),) = thinker.run(PROMPT)
    assert (none, restored) == (0, 3 * CHUNK)
    assert all(len(tensor) >= len(PROMPT) + 2 for tensor in rows(cold).values())
    assert same(cold, warm)


def test_rows_of_generated_tokens_are_kept(thinker: Thinker) -> None:
    prompt = [(13 * i + 1) % 499 for i in range(CHUNK + 8)]
    ((cold, _),) = thinker.run(prompt, max_tokens=2 * CHUNK)
    ids = cold["ids"].get("all") or cold["ids"]["prompt"] + cold["ids"]["output"]
    assert len(ids) == 3 * CHUNK + 8
    ((warm, restored),) = thinker.run([*ids, 7, 8, 9])
    assert restored == 3 * CHUNK
    first, second = rows(cold), rows(warm)
    for key in first:
        assert torch.equal(first[key][: 3 * CHUNK], second[key][: 3 * CHUNK])


def test_salts_part_requests(thinker: Thinker) -> None:
    prompt = [(7 * i + 5) % 499 for i in range(2 * CHUNK + 8)]
    ((cold, _),) = thinker.run(prompt, salt="one")
    assert thinker.run(prompt, salt="two")[0][1] == 0
    assert thinker.run(prompt)[0][1] == 0
    ((warm, restored),) = thinker.run(prompt, salt="one")
    assert restored == 2 * CHUNK
    assert same(cold, warm)


def test_images_under_the_same_tokens_part_requests(thinker: Thinker) -> None:
    # The image reaches over the end of a chunk.
    text = [(19 * i + 4) % 499 for i in range(110)]
    prompt = [*text[:40], 501, *[505] * IMAGE_TOKENS, 502, *text[40:]]
    cat, none = thinker.run(prompt, image=("cat", 41))[0]
    dog, restored = thinker.run(prompt, image=("dog", 41))[0]
    assert (none, restored) == (0, 0)
    for content, cold, other in (("cat", cat, dog), ("dog", dog, cat)):
        warm, restored = thinker.run(prompt, image=(content, 41))[0]
        assert restored == 2 * CHUNK
        assert same(cold, warm)
        for key, tensor in rows(other).items():
            # Text before the image is the same, no row of the image is.
            parts = [(r[:41], r[41 : 41 + IMAGE_TOKENS]) for r in (tensor, rows(warm)[key])]
            assert torch.equal(parts[0][0], parts[1][0])
            assert not (parts[0][1] == parts[1][1]).all(dim=1).any()


def test_several_requests_at_once(thinker: Thinker) -> None:
    prompts = [[(n * i + 3) % 499 for i in range(CHUNK * n // 2 + 9)] for n in (3, 5, 7)]
    cold = [thinker.run(prompt)[0][0] for prompt in prompts]
    warm = thinker.run(*prompts)
    assert [restored for _, restored in warm] == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    for one, (other, restored) in zip(cold, warm, strict=True):
        assert one["ids"] == other["ids"]
        for key, tensor in rows(one).items():
            # The rest runs in steps of other shapes.
            assert torch.equal(tensor[:restored], rows(other)[key][:restored])
            torch.testing.assert_close(tensor, rows(other)[key], rtol=1e-4, atol=1e-4)


def test_rows_that_did_not_get_stored_make_no_hit(
    thinker: Thinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(3 * i + 2) % 499 for i in range(2 * CHUNK + 8)]
    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    store = engine.hidden_state_store
    with monkeypatch.context() as patch:
        patch.setattr(store, "store_batch", lambda items: [0] * len(items))
        ((cold, _),) = thinker.run(prompt)
    ((again, restored),) = thinker.run(prompt)
    assert restored == 0
    assert same(cold, again)
    assert thinker.run(prompt)[0][1] == 2 * CHUNK


def test_lost_rows_are_not_sent_short(thinker: Thinker, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(29 * i + 2) % 499 for i in range(2 * CHUNK + 8)]
    ((cold, _),) = thinker.run(prompt)
    store = get_kv_transfer_group()._lmcache_engine.lmcache_engine.hidden_state_store
    with monkeypatch.context() as patch:
        patch.setattr(store, "retrieve_layers", lambda *args, **how: None)
        ((nothing, restored),) = thinker.run(prompt)
    assert (nothing, restored) == (None, 2 * CHUNK)
    assert same(cold, thinker.run(prompt)[0][0])


def test_the_chain_that_the_open_integration_walks(thinker: Thinker) -> None:
    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    assert engine.config.chunk_size == CHUNK
    ids = [(41 * i + 2) % 499 for i in range(2 * CHUNK + 1)]
    ((payload, _),) = thinker.run(ids)
    found = engine.hidden_state_store.retrieve_hidden_states(ids, layer_idx=-1)
    assert found.dtype == torch.float32
    assert len(found) == 2 * CHUNK
    if "final" in rows(payload):
        assert torch.equal(found, rows(payload)["final"][: 2 * CHUNK])
    else:
        other = engine.hidden_state_store.retrieve_hidden_states(ids, layer_idx=0)
        assert torch.equal(other, rows(payload)["embeddings"][: 2 * CHUNK])


def test_without_hooks_rows_are_short(thinker: Thinker) -> None:
    """The last test of an engine: what all this is for."""
    prompt = [(31 * i + 2) % 499 for i in range(2 * CHUNK + 8)]
    ((cold, _),) = thinker.run(prompt)
    get_kv_transfer_group().worker_side._omni.close()
    ((warm, restored),) = thinker.run(prompt)
    assert restored == 2 * CHUNK
    if warm is not None:  # Qwen2.5's builder withholds it
        assert len(rows(warm)["accepted"]) == len(rows(cold)["accepted"]) - restored


# ---- names and refusals -------------------------------------------------------------------------


def feature(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def request(**how: Any) -> Request:
    fields = {"request_id": "r", "prompt_token_ids": PROMPT, "pooling_params": None, **how}
    return Request(sampling_params=SamplingParams(max_tokens=4), **fields)


def names(extra_of: Any) -> list[bytes]:
    chain = ChunkChain(TokenDatabase(b"n" * 32, 16))
    chain.extend(lambda first, end: PROMPT[first:end], len(PROMPT), extra_of)
    return chain.hashes


def worker_extra(worker: Any, one: Request) -> Any:
    """As the worker names a request, from what vLLM sends it."""
    sent = NewRequestData.from_request(one, ([],))
    if one.cache_salt:
        worker._salts[sent.req_id] = one.cache_salt
    return worker._extra_of(sent.req_id, sent)


@pytest.fixture
def worker() -> Any:
    made = omni_stage.OmniWorker.__new__(omni_stage.OmniWorker)
    made._salts, made._mm_counters, made._adapters = {}, False, Adapters()
    return made


def test_worker_and_scheduler_name_requests_alike(worker: Any, tmp_path: Any) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = LoRARequest("adapter", 1, str(tmp_path))
    cat = [feature("cat", 20, 40), feature("cat 2", 90, 10)]
    dog = [feature("dog", 20, 40), feature("cat 2", 90, 10)]
    found = []
    for how in (
        {},
        {"cache_salt": "salt"},
        {"cache_salt": "other"},
        {"mm_features": cat},
        {"mm_features": dog},
        {"mm_features": cat, "cache_salt": "salt"},
        {"lora_request": lora},
    ):
        one = request(**how)
        wanted = names(VllmRequest(one, False, Adapters()).extra())
        # Late chunks, too, as after a hit.
        assert names(worker_extra(worker, one)) == wanted
        found.append(wanted)
    assert len({tuple(hashes) for hashes in found}) == len(found)
    assert found[3][0] == found[0][0], "text before an image is text"
    assert found[3][1] != found[4][1]


def test_what_has_no_name_is_refused(worker: Any) -> None:
    with pytest.raises(ValueError, match="embeddings"):
        worker_extra(worker, request(prompt_token_ids=None, prompt_embeds=torch.ones(3, 4)))
    worker._mm_counters = True
    with pytest.raises(ValueError, match="counters"):
        worker_extra(worker, request(mm_features=[feature("1", 0, 4)]))


def test_a_talker_needs_salts(tmp_path: Any) -> None:
    talker = {
        "model_stage": "talker",
        "hf_config_name": "talker_config",
        "requires_full_payload_input": True,
    }
    config = Thinker.config("qwen3", tmp_path, extra("qwen3"), **talker)
    ours = SimpleNamespace(enable_hidden_state_cache=True, hidden_state_layers=(-1, 0, 2))
    (problem,) = omni_stage.stage_problems(config, ours)
    assert "placeholders" in problem
    assert "cache_salt" in problem
    config.model_config.omni_kv_config = {"conditioning_salt": True}
    assert omni_stage.stage_problems(config, ours) == []
    assert omni_stage.has_placeholders(config)
    assert "placeholders" in str(VllmRequest(request(), False, Adapters(), True).uncacheable)
    assert VllmRequest(request(cache_salt="x"), False, Adapters(), True).uncacheable is None


def test_a_thinker_needs_its_layers(tmp_path: Any) -> None:
    config = Thinker.config("qwen3", tmp_path, extra("qwen3"))
    ours = SimpleNamespace(enable_hidden_state_cache=True, hidden_state_layers=(-1, 0, 2, 5))
    assert omni_stage.stage_problems(config, ours) == []
    ours.hidden_state_layers = (-1, 1)
    (problem,) = omni_stage.stage_problems(config, ours)
    assert "hidden_state_layers [-1, 0, 1, 2]" in problem
    ours.enable_hidden_state_cache = False
    (problem,) = omni_stage.stage_problems(config, ours)
    assert "hidden_state_layers [-1, 0, 2]" in problem
    config.model_config.model_arch = "MiMoAudioModel"
    (problem,) = omni_stage.stage_problems(config, ours)
    assert "what MiMoAudioModel hands on" in problem
    config.model_config.custom_process_next_stage_input_func = None
    assert omni_stage.stage_problems(config, ours) == []
