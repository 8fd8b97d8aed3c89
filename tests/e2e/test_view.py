"""vLLM's own objects in neutral words: specs, requests, configurations. No engine is started."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

with warnings.catch_warnings():
    # vLLM's own imports warn.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import vllm.v1.request
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

from transformers import PretrainedConfig
from vllm.v1 import kv_cache_interface as vi
from vllm.v1.engine.core import EngineCore

from lmcache_connector import vllm_engine, vllm_request, vllm_view
from lmcache_connector.config import RequestParams
from lmcache_connector.errors import ConfigError, StartupError, UnsupportedVllmError
from lmcache_connector.groups import ReuseKind, ReuseRule
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.observability.cli import salted_extra
from lmcache_connector.sides import SchedulerSide, WorkerSide

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BF16 = torch.bfloat16


def parallel(tp: int = 1, dcp: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=1,
        decode_context_parallel_size=dcp,
        **{"nnodes": 1, "enable_elastic_ep": False, "prefill_context_parallel_size": 1, **more},
    )


def vllm_config(tp: int = 1, dcp: int = 1, **more: Any) -> SimpleNamespace:
    transfer = SimpleNamespace(
        kv_role="kv_both",
        kv_connector_extra_config={},
        engine_id="engine",
        kv_load_failure_policy="fail",
        is_kv_consumer=True,
        is_kv_producer=True,
    )
    fields = {
        "parallel_config": parallel(tp, dcp),
        "speculative_config": None,
        "instance_id": "1",
        "kv_transfer_config": transfer,
        "cache_config": SimpleNamespace(block_size=128, enable_prefix_caching=True),
        **more,
    }
    return SimpleNamespace(**fields)


def group(spec: Any, *names: str, **more: Any) -> Any:
    return vi.KVCacheGroupSpec(list(names or ["layer"]), spec, **more)


def kv_config(*groups: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=8)


def full(block: int = 16, **more: Any) -> Any:
    return vi.FullAttentionSpec(
        **{"block_size": block, "num_kv_heads": 2, "head_size": 64, "dtype": BF16, **more}
    )


def mamba(mode: str = "align", **more: Any) -> Any:
    return vi.MambaSpec(
        **{
            "block_size": 64,
            "shapes": ((3, 512), (2, 128, 128)),
            "dtypes": (BF16, torch.float32),
            "page_size_padded": 163840,
            "mamba_cache_mode": mode,
            **more,
        }
    )


def specs_of(*groups: Any, **config: Any) -> Any:
    found, problems = vllm_view.group_specs(vllm_config(**config), kv_config(*groups))
    assert problems == []
    return found


def test_attention_in_all_its_kinds() -> None:
    window = vi.SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=BF16, sliding_window=1024
    )
    chunked = vi.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=BF16, attention_chunk_size=8192
    )
    found = specs_of(group(full()), group(window), group(chunked), group(mamba()))
    rules = [one.layers[0].rule for one in found]
    assert rules == [
        ReuseRule(ReuseKind.FULL),
        ReuseRule(ReuseKind.WINDOW, 1023),
        ReuseRule(ReuseKind.CHUNKED, 8192),
        ReuseRule(ReuseKind.STATE),
    ]
    assert [one.layers[0].page_bytes for one in found] == [
        16 * 2 * 128 * 2,
        16 * 2 * 128 * 2,
        16 * 2 * 128 * 2,
        3 * 512 * 2 + 2 * 128 * 128 * 4,
    ]
    assert found[3].recurrent_state


def test_retained_tokens_widen_a_window() -> None:
    if "extra_retained_tokens" not in vi.SlidingWindowSpec.__dataclass_fields__:
        pytest.skip("this vLLM has no extra_retained_tokens")
    window = vi.SlidingWindowSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=BF16,
        sliding_window=1024,
        extra_retained_tokens=2,
    )
    assert specs_of(group(window))[0].layers[0].rule.tokens == 1025


def test_a_window_in_a_full_attention_spec_is_full_attention() -> None:
    assert specs_of(group(full(sliding_window=1024)))[0].layers[0].rule.kind is ReuseKind.FULL


def test_compressed_slots_keep_their_ratio() -> None:
    latent = vi.MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=512, dtype=BF16, tokens_per_state=4
    )
    layer = specs_of(group(latent))[0].layers[0]
    assert (layer.tokens_per_block, layer.slots_per_block) == (256, 64)
    assert layer.page_bytes == 64 * 512 * 2


def test_several_specs_in_one_group() -> None:
    latent = vi.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16)
    indexer = vi.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    wrapper = vi.UniformTypeKVCacheSpecs(
        block_size=64, kv_cache_specs={"attn": latent, "indexer": indexer}
    )
    (found,) = specs_of(group(wrapper, "attn", "indexer"))
    assert [layer.page_bytes for layer in found.layers] == [64 * 576 * 2, 64 * 132]
    assert [layer.dtype for layer in found.layers] == ["bfloat16", "uint8"]


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_context_parallelism_widens_attention_blocks_and_not_states(dcp: int) -> None:
    found = specs_of(group(full()), group(mamba()), tp=4, dcp=dcp)
    assert [one.layers[0].tokens_per_block for one in found] == [16 * dcp, 64]
    assert found[0].layers[0].num_shards == 4


def test_shards() -> None:
    latent = vi.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16)
    found = specs_of(group(latent), group(full()), group(mamba()), tp=8)
    assert [one.layers[0].num_shards for one in found] == [1, 8, 8]
    if "max_tp_shards" in vi.FullAttentionSpec.__dataclass_fields__:
        found = specs_of(group(full(max_tp_shards=2)), tp=8)
        assert found[0].layers[0].num_shards == 2


def test_scratch_groups_are_left_out() -> None:
    ring = getattr(vi, "CircularBufferSpec", None) or getattr(vi, "KpoolTailSpec", None)
    assert ring is not None
    scratch = ring(block_size=4, num_kv_heads=1, head_size=64, dtype=BF16)
    found = specs_of(group(full(), "a"), group(scratch, "b"))
    assert [one.cacheable for one in found] == [True, False]


def test_an_empty_group_of_a_pipeline_stage_keeps_its_block_size() -> None:
    empty = vi.KVCacheGroupSpec([], mamba())
    (found,) = specs_of(empty)
    assert (found.tokens_per_block, found.recurrent_state, found.layers) == (64, True, ())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (mamba("none"), "--mamba-cache-mode align"),
        (
            vi.CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16),
            "encoder",
        ),
        (
            vi.EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16),
            "encoder",
        ),
    ],
)
def test_what_is_refused_names_cause_and_fix(spec: Any, words: str) -> None:
    _, problems = vllm_view.group_specs(vllm_config(), kv_config(group(full()), group(spec)))
    assert len(problems) == 1
    assert "group 1" in problems[0]
    assert words in problems[0]


def test_an_unknown_spec_is_refused() -> None:
    class Strange(vi.AttentionSpec):
        pass

    strange = Strange(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16)
    _, problems = vllm_view.group_specs(vllm_config(), kv_config(group(strange)))
    assert len(problems) == 1
    assert "Strange" in problems[0]


def test_an_out_of_tree_subclass_is_refused() -> None:
    class Mine(vi.FullAttentionSpec):
        pass

    mine = Mine(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16)
    _, problems = vllm_view.group_specs(vllm_config(), kv_config(group(mine)))
    assert len(problems) == 1
    assert "Mine" in problems[0]


def test_layers_that_see_later_tokens_are_refused() -> None:
    if "non_causal" not in vi.FullAttentionSpec.__dataclass_fields__:
        pytest.skip("this vLLM has no prefix-LM layers")
    _, problems = vllm_view.group_specs(vllm_config(), kv_config(group(full(non_causal=True))))
    assert len(problems) == 1
    assert "prefix LM" in problems[0]


def test_generated_tokens_of_a_reference_window_are_not_stored() -> None:
    if not hasattr(vi, "RSWASpec"):
        pytest.skip("this vLLM has no R-SWA")
    rswa = vi.RSWASpec(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16, rswa_window=64)
    config = vllm_config()
    WorkerSide(config, kv_config(group(rswa)))
    config.kv_transfer_config.kv_connector_extra_config = {"save_decode_cache": True}
    with pytest.raises(StartupError, match="save_decode_cache"):
        WorkerSide(config, kv_config(group(rswa)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallel_config": parallel(nnodes=2)}, "--nnodes 1"),
        ({"parallel_config": parallel(enable_elastic_ep=True)}, "elastic"),
        ({"parallel_config": parallel(prefill_context_parallel_size=2)}, "prefill-context"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "--speculative-config"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "--speculative-config"),
    ],
)
def test_refused_deployments(change: dict[str, Any], words: str) -> None:
    problems = vllm_view.config_problems(vllm_config(**change))
    assert len(problems) == 1
    assert words in problems[0]


def test_extracting_hidden_states_is_allowed() -> None:
    draft = SimpleNamespace(max_model_len=4096)
    speculative = SimpleNamespace(method="extract_hidden_states", draft_model_config=draft)
    config = vllm_config(speculative_config=speculative)
    config.model_config = SimpleNamespace(max_model_len=4096)
    assert vllm_view.config_problems(config) == []
    # vLLM leaves whole steps out then.
    draft.max_model_len = 2048
    (problem,) = vllm_view.config_problems(config)
    assert "max_model_len 2048" in problem
    draft.max_model_len = 4096
    for size in ("pipeline_parallel_size", "decode_context_parallel_size"):
        config.parallel_config = parallel()
        setattr(config.parallel_config, size, 2)
        (problem,) = vllm_view.config_problems(config)
        assert f"--{size.replace('_', '-')} 1" in problem


@pytest.mark.parametrize("side", [SchedulerSide, WorkerSide])
def test_all_problems_are_reported_at_once(side: Any) -> None:
    config = vllm_config(
        parallel_config=parallel(nnodes=2),
        speculative_config=SimpleNamespace(method="mtp"),
    )
    config.kv_transfer_config.kv_role = "kv_neither"
    config.kv_transfer_config.kv_connector_extra_config = {
        "chunk_sizes": 256,
        "max_local_cpu_size": "-1",
    }
    with pytest.raises(StartupError) as refused:
        side(config, kv_config(group(mamba("none"))))
    text = str(refused.value)
    for words in ("nnodes", "mtp", "kv_neither", "chunk_size", "max_local_cpu_size", "align"):
        assert words in text
    assert len(refused.value.problems) == 6


def test_an_illegal_chunk_size_names_the_legal_one() -> None:
    config = vllm_config()
    config.kv_transfer_config.kv_connector_extra_config = {"chunk_size": 100}
    with pytest.raises(StartupError, match="64 or 128"):
        WorkerSide(config, kv_config(group(mamba()), group(full())))


def test_a_vllm_without_a_needed_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_view.require_vllm()
    needed = ("vllm.v1.kv_cache_interface", "MambaSpec", "no_such_field")
    monkeypatch.setattr(vllm_view, "_REQUIRED", (*vllm_view._REQUIRED, needed))
    with pytest.raises(UnsupportedVllmError, match=r"no_such_field.*>=0\.30,<0\.34"):
        vllm_view.require_vllm()


def test_fractions_of_a_token_per_state_are_refused_or_whole() -> None:
    pooled = full(block=16, tokens_per_state=Fraction(1, 2))
    layer = specs_of(group(pooled))[0].layers[0]
    assert layer.slots_per_block == 32


# ---- requests -----------------------------------------------------------------------------------


def make_request(prompt: list[int], **more: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        **more,
    )


def hashes(request: Any, adapters: Any = None, counters: bool = False) -> Any:
    view = vllm_request.VllmRequest(request, counters, adapters or vllm_request.Adapters())
    chain = ChunkChain(TokenDatabase(b"namespace", 16))
    chain.extend(view.tokens, view.num_tokens, view.extra())
    return list(chain.hashes)


PROMPT = list(range(3, 83))


def adapter(path: Path, content: bytes, name: str = "x", number: int = 1, **more: Any) -> Any:
    from vllm.lora.request import LoRARequest

    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(content)
    (path / "adapter_config.json").write_text("{}")
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


def image(identifier: str, offset: int, length: int = 8) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def test_a_prompt_alone() -> None:
    assert hashes(make_request(PROMPT)) == hashes(make_request(PROMPT))
    assert len(hashes(make_request(PROMPT))) == 5


def test_salts() -> None:
    plain, salted = hashes(make_request(PROMPT)), hashes(make_request(PROMPT, cache_salt="a"))
    other = hashes(make_request(PROMPT, cache_salt="b"))
    assert not set(plain) & set(salted)
    assert not set(other) & set(salted)


def test_the_command_line_salts_prompts_as_vllm_does() -> None:
    forms = []
    for tagged in (False, True):
        chain = ChunkChain(TokenDatabase(b"namespace", 16))
        extra = salted_extra("a", tagged=tagged)
        chain.extend(lambda start, end: PROMPT[start:end], len(PROMPT), extra)
        forms.append(chain.hashes)
    assert hashes(make_request(PROMPT, cache_salt="a")) in forms


def test_adapters(tmp_path: Path) -> None:
    plain = hashes(make_request(PROMPT))
    first = hashes(make_request(PROMPT, lora_request=adapter(tmp_path / "x", b"1")))
    renamed = hashes(make_request(PROMPT, lora_request=adapter(tmp_path / "x", b"1", "y", 2)))
    changed = hashes(make_request(PROMPT, lora_request=adapter(tmp_path / "x", b"2", "x", 3)))
    everything = [plain, first, renamed, changed]
    assert len({hash_ for one in everything for hash_ in one}) == 20


def test_an_adapter_is_read_once_per_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = vllm_request.Adapters()
    lora = adapter(tmp_path / "x", b"1")
    first = hashes(make_request(PROMPT, lora_request=lora), adapters)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_request, "adapter_digest", lambda _: pytest.fail("read again"))
        assert hashes(make_request(PROMPT, lora_request=lora), adapters) == first
    # The files change; the engine may keep what it loaded, or load it anew at any time.
    same_load = make_request(PROMPT, lora_request=adapter(tmp_path / "x", b"2"))
    with pytest.raises(OSError, match="have changed since it was loaded"):
        hashes(same_load, adapters)


def test_an_adapter_that_is_loaded_in_place_is_not_cached(tmp_path: Path) -> None:
    """Requests that run go on with other weights, and vLLM keeps the blocks of before."""
    adapters = vllm_request.Adapters()
    before = adapter(tmp_path / "x", b"1")
    running = vllm_request.VllmRequest(make_request(PROMPT, lora_request=before), False, adapters)
    extra = running.extra()
    assert extra is not None
    assert not adapters.replaces(before)
    in_place = adapter(tmp_path / "y", b"2", load_inplace=True)
    assert adapters.replaces(in_place)
    assert not adapters.replaces(in_place)
    later = msgspec.structs.replace(in_place, load_inplace=False)
    for lora in (in_place, later, before):
        with pytest.raises(OSError, match="loaded in place"):
            hashes(make_request(PROMPT, lora_request=lora), adapters)
    with pytest.raises(OSError, match="loaded in place"):
        extra(0, 16)
    hashes(make_request(PROMPT, lora_request=adapter(tmp_path / "z", b"3", "z", 2)), adapters)


class Watcher:
    def __init__(self) -> None:
        self.resets: list[bool] = []
        self.adapters = vllm_request.Adapters()

    def on_weights(self, *, local_hits_are_new: bool) -> None:
        self.resets.append(local_hits_are_new)

    def on_adapter(self, lora: Any) -> None:
        self.adapters.digest(lora, check=True)


def core_of(answer: Callable[..., Any], *, is_idle: bool = True) -> Any:
    """As much of an engine core as the calls need."""
    core = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=answer, add_lora=answer)
    core.scheduler = SimpleNamespace(reset_prefix_cache=lambda *_: is_idle)
    return core


def test_an_adapter_is_read_when_it_is_loaded(tmp_path: Path) -> None:
    watcher, lora = Watcher(), adapter(tmp_path / "x", b"1")
    vllm_engine.watch(watcher)
    assert core_of(lambda lora: True).add_lora(lora) is True
    # Other files by the time of the first request with it.
    with pytest.raises(OSError, match="have changed since it was loaded"):
        hashes(make_request(PROMPT, lora_request=adapter(tmp_path / "x", b"2")), watcher.adapters)


@pytest.mark.parametrize(
    ("method", "resets"),
    [
        ("reload_weights", 1),
        ("update_weights", 1),
        ("finish_weight_update", 1),
        ("load_model", 1),
        ("my_update_weights_from_ipc", 1),
        ("execute_model", 0),
        ("compute_weight_checksums", 0),
        ("init_weight_transfer_engine", 0),
        ("shutdown_weight_transfer_engine", 0),
        (lambda worker: None, 0),
    ],
)
def test_new_weights_are_noticed(method: Any, resets: int) -> None:
    watcher = Watcher()
    vllm_engine.watch(watcher)
    vllm_engine.watch(watcher)
    core = core_of(lambda *args: [args])
    assert core.collective_rpc(method, 1.0) == [(method, 1.0, (), None)]
    assert watcher.resets == [True] * resets

    def fail(*args: Any) -> None:
        raise RuntimeError("half of them are loaded")

    with pytest.raises(RuntimeError):
        core_of(fail, is_idle=False).collective_rpc(method)
    assert watcher.resets == [True] * resets + [False] * resets
    other = Watcher()  # another engine's, in the same process: the core is not known to be its own
    vllm_engine.watch(other)
    core.collective_rpc(method)
    assert other.resets == [False] * resets


def test_an_adapter_that_cannot_be_read_is_not_cached(tmp_path: Path) -> None:
    request = make_request(PROMPT, lora_request=adapter(tmp_path / "x", b"1"))
    for file in (tmp_path / "x").iterdir():
        file.unlink()
    os.rmdir(tmp_path / "x")
    with pytest.raises(OSError, match="x"):
        hashes(request)


def test_images() -> None:
    plain = hashes(make_request(PROMPT))
    first = hashes(make_request(PROMPT, mm_features=[image("cat", 20)]))
    other = hashes(make_request(PROMPT, mm_features=[image("dog", 20)]))
    moved = hashes(make_request(PROMPT, mm_features=[image("cat", 24)]))
    # The text before the image is the same text.
    assert first[0] == plain[0] == other[0] == moved[0]
    assert len({one[1] for one in (plain, first, other, moved)}) == 4
    two = hashes(make_request(PROMPT, mm_features=[image("cat", 20), image("dog", 50)]))
    assert two[:3] == first[:3]
    assert two[3] != first[3]


def test_images_that_are_counters_are_not_cached() -> None:
    request = make_request(PROMPT, mm_features=[image("1", 20)])
    view = vllm_request.VllmRequest(request, True, vllm_request.Adapters())
    assert view.uncacheable is not None
    assert "--mm-processor-cache-gb" in view.uncacheable
    assert (
        vllm_request.VllmRequest(make_request(PROMPT), True, vllm_request.Adapters()).uncacheable
        is None
    )


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "counters"),
    [(4, True, False), (4, False, False), (0, True, False), (0, False, True)],
)
def test_when_identifiers_are_counters(cache_gb: int, prefix_caching: bool, counters: bool) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert vllm_request.mm_identifiers_are_counters(config) is counters


def test_embeddings() -> None:
    torch.manual_seed(0)
    one, two = torch.randn(80, 8), torch.randn(80, 8)
    first = hashes(make_request(None, prompt_embeds=one))
    assert first == hashes(make_request(None, prompt_embeds=one.clone()))
    assert not set(first) & set(hashes(make_request(None, prompt_embeds=two)))
    half = torch.cat([one[:40], two[40:]])
    mixed = hashes(make_request(None, prompt_embeds=half))
    assert mixed[:2] == first[:2]
    assert mixed[2] != first[2]


def test_request_parameters_reach_the_view() -> None:
    request = make_request(PROMPT)
    request.kv_transfer_params = {"min_hit_tokens": 3}
    view = vllm_request.VllmRequest(request, False, vllm_request.Adapters())
    assert view.kv_transfer_params == {"min_hit_tokens": 3}
    assert RequestParams(3, None).min_hit_tokens == 3


# ---- namespaces ---------------------------------------------------------------------------------


def test_two_engines_of_one_configured_id_have_names_of_their_own() -> None:
    first, second = vllm_config(instance_id="1"), vllm_config(instance_id="2")
    assert vllm_view.engine_name(first) == vllm_view.engine_name(vllm_config(instance_id="1"))
    assert vllm_view.engine_name(first) != vllm_view.engine_name(second)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}weights")
    return path


def facts(model_dir: Path, **change: Any) -> dict[str, object]:
    text, vision = change.pop("text", "default"), change.pop("vision", 1)
    model = SimpleNamespace(
        model=str(model_dir),
        revision=None,
        hf_config=SimpleNamespace(
            _commit_hash=None,
            to_dict=lambda: {"vision": vision, "_name_or_path": str(model_dir)},
        ),
        hf_text_config=SimpleNamespace(to_dict=lambda: {"rope": text, "_name_or_path": "x"}),
        max_model_len=change.pop("max_model_len", 4096),
        dtype=change.pop("dtype", BF16),
        quantization=change.pop("quantization", None),
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype=change.pop("cache_dtype", "auto"),
            calculate_kv_scales=change.pop("scales", False),
        ),
        parallel_config=parallel(change.pop("tp", 1), change.pop("dcp", 1)),
        speculative_config=None,
        quant_config=None,
        load_config=SimpleNamespace(load_format=change.pop("load_format", "auto")),
    )
    assert not change
    return vllm_view.namespace_facts(config)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "other"},
        {"vision": 2},
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"tp": 2},
        {"dcp": 2},
        {"scales": True},
        {"load_format": "dummy"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_bytes_changes_the_namespace(
    model_dir: Path, change: dict[str, Any]
) -> None:
    assert facts(model_dir) == facts(model_dir)
    assert facts(model_dir, **change) != facts(model_dir)


def test_the_same_weights_at_another_path(model_dir: Path) -> None:
    elsewhere = model_dir.with_name("elsewhere")
    shutil.copytree(model_dir, elsewhere)
    assert facts(elsewhere) == facts(model_dir)


def test_the_served_length_decides_long_rope_only(model_dir: Path) -> None:
    assert facts(model_dir, max_model_len=9999) == facts(model_dir)
    assert facts(model_dir, text="longrope", max_model_len=9999) != facts(
        model_dir, text="longrope"
    )


def test_weights_at_the_same_path(model_dir: Path) -> None:
    before = facts(model_dir)
    (model_dir / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}weightz")
    assert facts(model_dir) != before


def test_scales_found_at_run_time_are_this_process_only(model_dir: Path) -> None:
    assert facts(model_dir, scales=True) != facts(model_dir, scales=True)


def test_backends_and_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    layers = {"layer": SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)}
    hf_config = PretrainedConfig(attn_temperature_tuning=False)
    model = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config)
    compiled = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(compilation_config=compiled, model_config=model)
    names = vllm_view.backend_names(config, kv_config(group(full())))
    assert "CPUAttentionBackend" in names[0]
    assert names[-2].startswith("cpu/")
    # A model may change its configuration while it is built.
    hf_config.attn_temperature_tuning = True
    tuned = vllm_view.backend_names(config, kv_config(group(full())))
    assert tuned != names
    hf_config.attn_temperature_tuning = False
    assert vllm_view.backend_names(config, kv_config(group(full()))) == names
    change: Callable[..., None] = monkeypatch.setattr
    change(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert vllm_view.backend_names(config, kv_config(group(full()))) != names


def test_a_mistake_is_told_before_the_model_is_loaded() -> None:
    """Where vLLM asks what CUDA graphs it may use."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from lmcache_connector.connector import LMCacheHybridConnector

    ask = LMCacheHybridConnector.requires_piecewise_for_cudagraph
    assert ask({"chunk_size": 256}) is KVConnectorBase_V1.requires_piecewise_for_cudagraph({})
    with pytest.raises(ConfigError, match="did you mean chunk_size"):
        ask({"chunk_sise": 256})


def test_what_states_are_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are registered as bytes."""
    hf_config = PretrainedConfig()
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config),
    )
    half = torch.float16
    kinds = [
        mamba(),
        mamba(dtypes=(half, torch.float32)),
        mamba(dtypes=(BF16, half), shapes=((3, 512), (4, 128, 128))),
        mamba(shapes=((512, 3), (2, 128, 128))),
    ]
    told = [vllm_view.backend_names(config, kv_config(group(kind))) for kind in kinds]
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    told.append(vllm_view.backend_names(config, kv_config(group(mamba()))))
    assert len(set(told)) == 5
