"""The only reader of vLLM's objects: configuration, cache specs, requests, scheduler output.

Everything behind this module sees neutral types. What vLLM must offer is named in one table and
checked by feature, never by version.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1 import kv_cache_interface as specs

from lmcache_connector.errors import UnsupportedVllmError
from lmcache_connector.groups import FULL, STATE, EngineGroupSpec, LayerSpec, ReuseKind, ReuseRule
from lmcache_connector.keys import UNRESOLVED_PREFIX, model_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

SUPPORTED_VLLM = ">=0.30,<0.34"

_CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
# Names without which the connector cannot be correct: (module, object, attribute or None).
_REQUIRED: tuple[tuple[str, str, str | None], ...] = (
    *(
        (_CONNECTOR_BASE, "KVConnectorBase_V1", hook)
        # Hooks that this connector overrides: one that vLLM does not call never fires.
        for hook in (
            "bind_gpu_block_pool",
            "build_connector_worker_meta",
            "get_transfer_results",
            "has_pending_push_work",
            "on_new_request",
            "set_xfer_handshake_metadata_pp_aware",
            "update_connector_output",
        )
    ),
    (_CONNECTOR_BASE, "SupportsHMA", None),
    (_CONNECTOR_BASE, "KVConnectorTransferResults", "failed_recving"),
    ("vllm.v1.core.sched.output", "SchedulerOutput", "kv_connector_block_state"),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState", "boundary_state_offloads"),
    ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", None),
    ("vllm.config", "VllmConfig", "instance_id"),
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", None),
    ("vllm.v1.kv_cache_interface", "MambaSpec", "mamba_cache_mode"),
    ("vllm.v1.kv_cache_interface", "MambaSpec", "state_content_size_bytes"),
    ("vllm.v1.kv_cache_interface", "AttentionSpec", "tokens_per_state"),
)


def require_vllm() -> None:
    """Refuse a vLLM that lacks a name relied on.

    Raises:
        UnsupportedVllmError: names what is missing and the supported range.
    """
    missing = [".".join(filter(None, names)) for names in _REQUIRED if not _is_there(*names)]
    if missing:
        text = f"vLLM {vllm.__version__} has no %s: install vllm{SUPPORTED_VLLM}"
        raise UnsupportedVllmError(*(text % name for name in missing))


def _is_there(module_name: str, object_name: str, attribute: str | None) -> bool:
    try:
        found = getattr(importlib.import_module(module_name), object_name)
    except (ImportError, AttributeError):
        return False
    fields = getattr(found, "__dataclass_fields__", {})
    return attribute is None or attribute in fields or hasattr(found, attribute)


def host_cache_hit_source() -> Any:
    """vLLM's name for host memory as a source of cached tokens; None where it has none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


# ---- configuration --------------------------------------------------------------------------


def config_problems(vllm_config: VllmConfig) -> list[str]:
    """Deployments that are refused, one sentence each."""
    problems = []
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        problems.append(
            f"nnodes={parallel.nnodes}: workers on another host cannot map this host's memory "
            "pool; run tensor and pipeline parallel ranks on one host (--nnodes 1)"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        problems.append(
            "--enable-elastic-ep changes ranks at run time, which the pool's shards do not "
            "follow; start without it"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        problems.append(
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size} is not "
            "supported; use 1"
        )
    from vllm.platforms import current_platform

    if current_platform.device_type not in ("cpu", "cuda"):
        problems.append(
            f"device type {current_platform.device_type!r}: copies are written for CUDA, ROCm and "
            "CPUs; start without a connector"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "extract_hidden_states":
        problems.append(
            f"--speculative-config method {speculative.method!r} is not supported with this "
            "connector: a drafter's own cache would not be restored; remove it"
        )
    length = getattr(getattr(speculative, "draft_model_config", None), "max_model_len", None)
    if length is not None and length < vllm_config.model_config.max_model_len:
        problems.append(
            f"max_model_len {length} in --speculative-config: vLLM keeps no hidden states of any "
            "request in a step that has a longer one; remove it"
        )
    if speculative is not None:
        for size in ("pipeline_parallel_size", "decode_context_parallel_size"):
            if (count := getattr(parallel, size)) > 1:
                flag = f"--{size.replace('_', '-')}"
                problems.append(f"{flag} {count}: no rank has whole hidden states; use {flag} 1")
    role = vllm_config.kv_transfer_config.kv_role
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        problems.append(
            f"kv_role={role!r} is not one of kv_both, kv_producer (stores only), kv_consumer "
            "(loads only)"
        )
    return problems


def group_specs(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[tuple[EngineGroupSpec, ...], list[str]]:
    """vLLM's KV cache groups in neutral words, and what is refused, one sentence each.

    On the scheduler side a group of several specs shows only its first layer's: page sizes and
    dtypes of it are not to be trusted there, block sizes and rules are.
    """
    groups = []
    problems: list[str] = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        wrapper = group.kv_cache_spec
        cacheable = wrapper.prefix_cacheable and getattr(group, "enable_kv_transfer", True)
        if getattr(group, "host_resident", False) or type(wrapper).__name__.startswith("HiSparse"):
            problems.append(
                f"KV cache group {group_id} is host resident (HiSparse), which has a cache of its "
                "own; disable HiSparse or this connector"
            )
            continue
        per_layer = getattr(wrapper, "kv_cache_specs", None)
        by_name = dict.fromkeys(group.layer_names, wrapper) if per_layer is None else per_layer
        layers = [
            _layer_spec(vllm_config, group_id, name, by_name[name], problems)
            for name in group.layer_names
        ]
        # A pipeline stage may hold no layer of the group; its blocks count all the same.
        spec = wrapper if per_layer is None else next(iter(per_layer.values()), None)
        sample = None if spec is None else _layer_spec(vllm_config, group_id, "", spec, problems)
        groups.append(
            EngineGroupSpec(
                group_id,
                cacheable,
                tuple(layer for layer in layers if layer is not None),
                tokens_per_block=sample.tokens_per_block if sample else 0,
                recurrent_state=sample is not None and sample.rule.kind is ReuseKind.STATE,
            )
        )
    return tuple(groups), list(dict.fromkeys(problems))


def _is(spec: KVCacheSpec, *class_names: str) -> bool:
    """isinstance by name, for classes that some supported versions lack."""
    classes = tuple(c for n in class_names if (c := getattr(specs, n, None)) is not None)
    return isinstance(spec, classes)


def _layer_spec(
    vllm_config: VllmConfig, group_id: int, name: str, spec: KVCacheSpec, problems: list[str]
) -> LayerSpec | None:
    parallel = vllm_config.parallel_config
    tp_size = parallel.tensor_parallel_size
    dcp_size = parallel.decode_context_parallel_size
    if not spec.prefix_cacheable:
        # Scratch: excluded later, whatever it holds.
        return LayerSpec(name, 0, 1, 0, "int8", FULL, tp_size, family="scratch")
    where = f"KV cache group {group_id} ({type(spec).__name__})"
    if _is(spec, "CrossAttentionSpec", "EncoderOnlyAttentionSpec"):
        problems.append(f"{where}: encoder caches are not keyed by a prefix; not supported")
        return None
    if _is(spec, "MambaSpec"):
        if spec.mamba_cache_mode != "align":
            problems.append(
                f"{where}: mamba_cache_mode is {spec.mamba_cache_mode!r}, which leaves no state "
                "at block boundaries; pass --enable-prefix-caching --mamba-cache-mode align"
            )
            return None
        return LayerSpec(
            name=name,
            tokens_per_block=spec.block_size,
            slots_per_block=1,
            page_bytes=spec.state_content_size_bytes,
            dtype="int8",
            rule=STATE,
            num_shards=1 if getattr(spec, "tp_replicated", False) else tp_size,
            family="state",
        )
    if getattr(spec, "non_causal", False):
        problems.append(
            f"{where}: its layers attend to later tokens of the prompt (prefix LM), so that a "
            "prefix does not decide its KV; start without a connector"
        )
        return None
    # An out-of-tree class may have reuse rules of its own, whatever it inherits.
    rule = _attention_rule(spec) if type(spec).__module__.startswith("vllm.") else None
    if rule is None:
        problems.append(
            f"{where} is unknown to this connector, so that nothing can be said about when its "
            f"blocks may be reused; supported: vllm{SUPPORTED_VLLM} without out-of-tree specs"
        )
        return None
    sharded = getattr(spec, "dcp_sharded", True) and dcp_size > 1
    if sharded and rule.kind is not ReuseKind.FULL:
        problems.append(f"{where}: context-parallel sliding windows are not supported")
        return None
    return LayerSpec(
        name=name,
        tokens_per_block=spec.block_size * (dcp_size if sharded else 1),
        slots_per_block=int(spec.num_states),
        page_bytes=int(getattr(spec, "unpadded_page_size_bytes", spec.real_page_size_bytes)),
        dtype=str(spec.dtype).removeprefix("torch."),
        rule=rule,
        num_shards=_attention_shards(spec, tp_size, sharded),
        num_heads=spec.num_heads,
        family=_family(spec),
    )


def _family(spec: KVCacheSpec) -> str:
    if _is(spec, "HiddenStateCacheSpec"):
        return "hidden"
    return "mla" if _is(spec, "MLAAttentionSpec", "SlidingWindowMLASpec") else "attention"


def _attention_rule(spec: KVCacheSpec) -> ReuseRule | None:
    if _is(spec, "SlidingWindowSpec"):
        extra = getattr(spec, "extra_retained_tokens", 0)
        return ReuseRule(ReuseKind.WINDOW, spec.sliding_window - 1 + extra)
    if _is(spec, "ChunkedLocalAttentionSpec"):
        return ReuseRule(ReuseKind.CHUNKED, spec.attention_chunk_size)
    # A window kept in a full-attention spec (hybrid manager off) is cached as full attention.
    return FULL if _is(spec, "FullAttentionSpec") else None


def _attention_shards(spec: KVCacheSpec, tp_size: int, dcp_sharded: bool) -> int:
    """Different pages over the tensor-parallel ranks; consecutive ranks are replicas."""
    if dcp_sharded:
        return tp_size
    max_shards = getattr(spec, "max_tp_shards", None)
    if max_shards is None and _family(spec) in ("mla", "hidden"):
        max_shards = 1  # one latent head (or full-width rows), the same on every rank
    if max_shards is None or tp_size % max_shards or max_shards > tp_size:
        return tp_size
    return int(max_shards)


def decode_problems(kv_cache_config: KVCacheConfig) -> list[str]:
    """What forbids storing generated tokens, one sentence each."""
    return [
        f"KV cache group {group_id} keeps only a window of generated tokens (R-SWA): their KV is "
        "not that of a prompt; set save_decode_cache to false"
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if _is(group.kv_cache_spec, "RSWASpec")
    ]


def checkpoint_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """KV cache groups whose kernels leave states at boundaries inside a prefill step."""
    return frozenset(
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group.kv_cache_spec, "num_prefill_checkpoint_blocks", 0) > 0
    )


def backend_names(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[str, ...]:
    """Of a worker: attention backend of each group, and what its states are; the instruction set
    on CPU (at equal strides the order of a page's content differs between them); and a digest of
    the configuration as the model has changed it while it was built, which only its own process
    sees."""
    layers = vllm_config.compilation_config.static_forward_context
    names = []
    for group in kv_cache_config.kv_cache_groups:
        backends = set()
        for layer_name in group.layer_names:
            layer = layers.get(layer_name)
            get_backend = getattr(layer, "get_attn_backend", None)
            owner = get_backend() if get_backend is not None else type(layer)
            backends.add(f"{owner.__module__}.{owner.__qualname__}")
        some = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
        states = {(spec.shapes, spec.dtypes) for spec in some.values() if _is(spec, "MambaSpec")}
        # Their pages are bytes: nothing else tells what of.
        backends.update(f"{shapes} {dtypes}" for shapes, dtypes in states)
        names.append("+".join(sorted(backends)))
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device == "cpu":
        amx = torch.cpu._is_amx_tile_supported()
        isa = torch.backends.cpu.get_cpu_capability()
        device = f"cpu/{platform.machine()}/{isa}/amx={amx}"
    device += f"/{os.environ.get('VLLM_SSM_CONV_STATE_LAYOUT', '')}"
    model = vllm_config.model_config
    texts = f"{_config_text(model.hf_config)}{_config_text(model.hf_text_config)}"
    return (*names, device, f"config/{hashlib.sha256(texts.encode()).hexdigest()[:16]}")


def engine_name(vllm_config: VllmConfig) -> str:
    """The same in all processes of one engine core, and in no other engine: a configured engine_id
    may stand in several (workers of one would hold the leases of the other)."""
    return f"{vllm_config.kv_transfer_config.engine_id}-{vllm_config.instance_id}"


def rank_facts() -> tuple[int, int, int, int, int]:
    """(rank in the engine core, pp rank, pp size, tp rank, tp size) of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pp, tp = get_pp_group(), get_tp_group()
    rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
    return rank, pp.rank_in_group, pp.world_size, tp.rank_in_group, tp.world_size


def has_hidden_states() -> bool:
    """Whether this worker keeps the model's last hidden states: one does."""
    _, pp_rank, pp_size, tp_rank, _ = rank_facts()
    return (pp_rank, tp_rank) == (pp_size - 1, 0)


def namespace_facts(vllm_config: VllmConfig) -> dict[str, object]:
    """What, besides the workers' geometry, makes cached bytes mean the same thing."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    quantization = vllm_config.quant_config
    multimodal = getattr(model, "multimodal_config", None)
    facts: dict[str, object] = {
        "model": model_digest(model.model, _commit(model)),
        "config": _config_text(model.hf_config),
        "text_config": _config_text(model.hf_text_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "quantization_config": type(quantization).__name__ if quantization is not None else "",
        "quantization_args": str(getattr(model, "quantization_config", None)),
        "mm_processor": str(getattr(multimodal, "mm_processor_kwargs", None)),
        "mm_media": str(getattr(multimodal, "media_io_kwargs", None)),
        "kv_cache_dtype": str(cache.cache_dtype),
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": parallel.decode_context_parallel_size,
        "interleave": str(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
        "hidden_state_taps": ",".join(map(str, hidden_state_taps(vllm_config))),
    }
    if "longrope" in str(facts["text_config"]):
        # LongRoPE chooses its factors by the model length that the engine serves.
        facts["max_model_len"] = model.max_model_len
    if str(vllm_config.load_config.load_format) == "dummy":
        # The files that are named are not what is loaded.
        facts["model"] = UNRESOLVED_PREFIX + os.urandom(16).hex()
    if getattr(cache, "calculate_kv_scales", False):
        # Scales found from this process's first batch: no other process can read the bytes.
        facts["kv_scales"] = os.urandom(16).hex()
    return facts


def hidden_shape(vllm_config: VllmConfig, kept_as: str) -> tuple[torch.dtype, int]:
    """Dtype and width of the model's hidden states, kept as configured."""
    model = vllm_config.model_config
    return torch.float32 if kept_as == "float32" else model.dtype, model.get_hidden_size()


def hidden_state_taps(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Layers whose inputs vLLM extracts, in the order of its rows, which is ascending."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    taps = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", None)
    return tuple(sorted(taps or ()))


def _config_text(config: Any) -> str:
    """The effective configuration after overrides, without where it was read from and by what."""
    fields = dict(config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        fields.pop(name, None)
    return json.dumps(fields, sort_keys=True, default=_text_of)


def _text_of(value: object) -> str | list[str]:
    """The same in every process."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _commit(model_config: Any) -> str | None:
    """Resolved commit of a hub model, or the revision asked for (which the digest trusts only if
    it is a commit)."""
    commit: str | None = getattr(model_config.hf_config, "_commit_hash", None)
    revision: str | None = model_config.revision
    # With hf_config_path the configuration's commit is that of another repository.
    return revision if getattr(model_config, "hf_config_path", None) else commit or revision
