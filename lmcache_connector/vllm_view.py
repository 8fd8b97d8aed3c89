"""The only reader of vLLM's objects: configuration, cache specs, requests, scheduler output.

Everything behind this module sees neutral types. What vLLM must offer is named in one table and
checked by feature, never by version.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1 import kv_cache_interface as specs

from lmcache_connector.errors import UnsupportedVllmError
from lmcache_connector.groups import (
    FULL,
    STATE,
    EngineGroupSpec,
    LayerSpec,
    ReuseKind,
    ReuseRule,
)
from lmcache_connector.keys import adapter_digest, model_digest
from lmcache_connector.scheduler.request import StepView

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

SUPPORTED_VLLM = ">=0.30,<0.34"

# Names without which the connector cannot be correct: (module, object, attribute or None).
_REQUIRED: tuple[tuple[str, str, str | None], ...] = (
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1", None),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA", None),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorTransferResults",
        "failed_recving",
    ),
    ("vllm.v1.core.sched.output", "SchedulerOutput", "kv_connector_block_state"),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState", "boundary_state_offloads"),
    ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", None),
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", None),
    ("vllm.v1.kv_cache_interface", "MambaSpec", "mamba_cache_mode"),
    ("vllm.v1.kv_cache_interface", "AttentionSpec", "tokens_per_state"),
)


def require_vllm() -> None:
    """Refuse a vLLM that lacks a name relied on.

    Raises:
        UnsupportedVllmError: names what is missing and the supported range.
    """
    problems = []
    for module_name, object_name, attribute in _REQUIRED:
        try:
            found = getattr(importlib.import_module(module_name), object_name)
        except (ImportError, AttributeError):
            problems.append(f"{module_name}.{object_name}")
            continue
        if attribute is not None and not (
            attribute in getattr(found, "__dataclass_fields__", {}) or hasattr(found, attribute)
        ):
            problems.append(f"{module_name}.{object_name}.{attribute}")
    if problems:
        raise UnsupportedVllmError(
            [
                f"vLLM {vllm.__version__} has no {name}: install vllm{SUPPORTED_VLLM}"
                for name in problems
            ]
        )


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
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "extract_hidden_states":
        problems.append(
            f"--speculative-config method {speculative.method!r} is not supported with this "
            "connector: a drafter's own cache would not be restored; remove it"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_role not in ("kv_both", "kv_producer", "kv_consumer"):
        role = None if transfer is None else transfer.kv_role
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
        layers = []
        for name in group.layer_names:
            spec = per_layer[name] if per_layer is not None else wrapper
            layer = _layer_spec(vllm_config, group_id, name, spec, problems)
            if layer is not None:
                layers.append(layer)
        # A pipeline stage may hold no layer of the group; its blocks count all the same.
        some_spec = next(iter(per_layer.values()), None) if per_layer is not None else wrapper
        sample = (
            _layer_spec(vllm_config, group_id, "", some_spec, problems)
            if some_spec is not None
            else None
        )
        groups.append(
            EngineGroupSpec(
                group_id,
                cacheable,
                tuple(layers),
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
    vllm_config: VllmConfig,
    group_id: int,
    name: str,
    spec: KVCacheSpec,
    problems: list[str],
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
        replicated = getattr(spec, "tp_replicated", False)
        return LayerSpec(
            name=name,
            tokens_per_block=spec.block_size,
            slots_per_block=1,
            page_bytes=spec.state_content_size_bytes,
            dtype="int8",
            rule=STATE,
            num_shards=1 if replicated else tp_size,
            head_size=spec.state_content_size_bytes,
            family="state",
        )
    rule = _attention_rule(spec)
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
    element_size = spec.dtype.itemsize
    num_slots = int(spec.num_states)
    page_bytes = int(getattr(spec, "unpadded_page_size_bytes", spec.real_page_size_bytes))
    return LayerSpec(
        name=name,
        tokens_per_block=spec.block_size * (dcp_size if sharded else 1),
        slots_per_block=num_slots,
        page_bytes=page_bytes,
        dtype=str(spec.dtype).removeprefix("torch."),
        rule=rule,
        num_shards=_attention_shards(spec, tp_size, sharded),
        num_heads=spec.num_heads,
        head_size=page_bytes // (spec.num_heads * num_slots * element_size),
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


def block_size_reset_hint(vllm_config: VllmConfig, groups: Sequence[EngineGroupSpec]) -> int | None:
    """The state groups' block size when vLLM's own configuration has lost it, else None.

    The multi-process engine re-runs the configuration's checks after the caches exist; on CPU
    that resets cache_config.block_size to 128, and prefill steps end where no state is kept.
    """
    blocks = {
        layer.tokens_per_block
        for group in groups
        for layer in group.layers
        if layer.rule.kind is ReuseKind.STATE
    }
    if len(blocks) != 1 or vllm_config.cache_config.block_size in blocks:
        return None
    return blocks.pop()


def mla_rope_hint(vllm_config: VllmConfig, groups: Sequence[EngineGroupSpec]) -> str | None:
    """A warning when this build's CPU rotary kernel is wrong on MLA's 3-D queries, else None.

    Seen in 0.32: only the first rows of a batch are rotated, so that the engine's own answers
    depend on how a prompt is cut into steps. Restored bytes are exact all the same.
    """
    from vllm.platforms import current_platform

    is_mla = any(layer.family == "mla" for group in groups for layer in group.layers)
    custom_ops = vllm_config.compilation_config.custom_ops
    if not is_mla or current_platform.device_type != "cpu" or "-rotary_embedding" in custom_ops:
        return None
    from vllm import _custom_ops as ops

    positions = torch.arange(1, 9)
    cos_sin = torch.rand(9, 64)
    query, key = torch.rand(8, 4, 64), torch.rand(8, 1, 64)
    batch, alone = query.clone(), query.clone()
    ops.rotary_embedding(positions, batch, key.clone(), 64, cos_sin, False)
    for row in range(8):
        one = slice(row, row + 1)
        ops.rotary_embedding(positions[one], alone[one], key[one].clone(), 64, cos_sin, False)
    if torch.allclose(batch, alone):
        return None
    return (
        "this vLLM's CPU rotary kernel is wrong for MLA: its answers depend on how a prompt is cut "
        "into steps, with or without a cache; start with --compilation-config "
        '\'{"custom_ops":["-rotary_embedding"]}\''
    )


def backend_names(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[str, ...]:
    """Attention backend of each group and, on CPU, the instruction set: at equal strides the
    order of a page's content differs between them."""
    layers = vllm_config.compilation_config.static_forward_context
    names = []
    for group in kv_cache_config.kv_cache_groups:
        backends = set()
        for layer_name in group.layer_names:
            layer = layers.get(layer_name)
            get_backend = getattr(layer, "get_attn_backend", None)
            owner = get_backend() if get_backend is not None else type(layer)
            backends.add(f"{owner.__module__}.{owner.__qualname__}")
        names.append("+".join(sorted(backends)))
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device == "cpu":
        amx = torch.cpu._is_amx_tile_supported()
        device = f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{amx}"
    return (*names, device)


def rank_facts() -> tuple[int, int, int, int, int]:
    """(rank in the engine core, pp rank, pp size, tp rank, tp size) of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pp, tp = get_pp_group(), get_tp_group()
    rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
    return rank, pp.rank_in_group, pp.world_size, tp.rank_in_group, tp.world_size


def namespace_facts(vllm_config: VllmConfig) -> dict[str, object]:
    """What, besides the workers' geometry, makes cached bytes mean the same thing."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    quantization = vllm_config.quant_config
    draft = getattr(speculative, "draft_model_config", None)
    taps = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", ())
    facts: dict[str, object] = {
        "model": model_digest(model.model, _commit(model)),
        "text_config": model.hf_text_config.to_json_string(use_diff=False),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "quantization_config": type(quantization).__name__ if quantization is not None else "",
        "kv_cache_dtype": str(cache.cache_dtype),
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": parallel.decode_context_parallel_size,
        "interleave": str(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
        "hidden_state_taps": ",".join(str(tap) for tap in taps or ()),
    }
    if getattr(cache, "calculate_kv_scales", False):
        # Scales found from this process's first batch: no other process can read the bytes.
        facts["kv_scales"] = os.urandom(16).hex()
    return facts


def _commit(model_config: Any) -> str | None:
    """Resolved commit of a hub model, or the revision asked for (which the digest trusts only if
    it is a commit)."""
    commit: str | None = getattr(model_config.hf_config, "_commit_hash", None)
    revision: str | None = model_config.revision
    return commit or revision


# ---- requests and steps ---------------------------------------------------------------------


class VllmRequest:
    """A live window on one vLLM request; implements RequestView."""

    __slots__ = (
        "_adapter_digests",
        "_adapter_reloaded",
        "_mm_cursor",
        "_request",
        "_uncacheable",
    )

    def __init__(
        self,
        request: Request,
        mm_identifiers_are_counters: bool,
        adapter_digests: dict[tuple[int, str], str],
    ) -> None:
        """``adapter_digests`` is shared by all requests: files are read once per adapter load,
        and vLLM gives every load an id of its own."""
        self._request = request
        self._adapter_digests = adapter_digests
        self._adapter_reloaded = False
        # (token position, index of the first image that may reach it): ranges come in order.
        self._mm_cursor = (0, 0)
        self._uncacheable: str | None = None
        if mm_identifiers_are_counters and request.mm_features:
            self._uncacheable = (
                "multimodal requests, whose identifiers are per-process counters while "
                "--mm-processor-cache-gb is 0 and prefix caching is off; set one of them"
            )

    @property
    def request_id(self) -> str:
        return str(self._request.request_id)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def skip_reading(self) -> bool:
        return bool(getattr(self._request, "skip_reading_prefix_cache", False))

    @property
    def uncacheable(self) -> str | None:
        return self._uncacheable

    @property
    def kv_transfer_params(self) -> Mapping[str, object]:
        return self._request.kv_transfer_params or {}

    def tokens(self, start: int, end: int) -> Sequence[int]:
        tokens: Sequence[int] = self._request.all_token_ids[start:end]
        return tokens

    def extra(self) -> Callable[[int, int], object | None] | None:
        request = self._request
        if not (
            request.mm_features
            or request.lora_request
            or request.cache_salt
            or request.prompt_embeds is not None
        ):
            return None
        if request.lora_request:
            self._adapter_digest()  # raises here, not in the middle of a chain
        return self._extra_keys

    def _adapter_digest(self) -> str | None:
        lora = self._request.lora_request
        if lora is None:
            return None
        key = (lora.lora_int_id, lora.lora_path)
        # A request that reloads its adapter in place brings new weights under an old id.
        reload = getattr(lora, "load_inplace", False) and not self._adapter_reloaded
        if key not in self._adapter_digests or reload:
            self._adapter_digests[key] = adapter_digest(lora.lora_path)
            self._adapter_reloaded = True
        return self._adapter_digests[key]

    def _extra_keys(self, start: int, end: int) -> object | None:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        request = self._request
        position, mm_index = self._mm_cursor
        if start < position:
            mm_index = 0
        keys, mm_index = generate_block_hash_extra_keys(request, start, end, mm_index)
        self._mm_cursor = (end, mm_index)
        kinds = getattr(request, "prompt_is_token_ids", None)
        kind_bits = bytes(bool(bit) for bit in kinds[start:end]) if kinds is not None else None
        adapter = self._adapter_digest()
        if keys is None and adapter is None and kind_bits is None:
            return None  # leading text of a request with images: the same as plain text
        return (keys, adapter, kind_bits)


def mm_identifiers_are_counters(vllm_config: VllmConfig) -> bool:
    """Whether vLLM numbers images per process instead of hashing their content."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None:
        return False
    return not (
        multimodal.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching
    )


def step_view(scheduler_output: SchedulerOutput) -> StepView:
    """One scheduled step; valid only inside build_connector_meta."""
    state = scheduler_output.kv_connector_block_state
    if state is None:
        return StepView({}, lambda request_id: None, {})
    return StepView(
        scheduled=scheduler_output.num_scheduled_tokens,
        block_ids=state.get_block_ids,
        boundary_states=state.boundary_state_offloads,
    )
