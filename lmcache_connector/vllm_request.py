"""vLLM's requests and steps in neutral words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from lmcache_connector.keys import AdapterStamp, adapter_digest, adapter_stamp
from lmcache_connector.scheduler.request import StepView

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_ANSWERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


class Adapters:
    """LoRA adapters as the engine has loaded them."""

    def __init__(self) -> None:
        # By id and path: its digest, and what its files looked like then.
        self._digests: dict[tuple[int, str], tuple[str, AdapterStamp]] = {}
        self._in_place: set[int] = set()

    def replaces(self, lora: LoRARequest) -> bool:
        """Whether it is loaded in place of another that requests may run with. From then on
        nothing is kept of its id."""
        is_new = getattr(lora, "load_inplace", False) and lora.lora_int_id not in self._in_place
        if is_new:
            self._in_place.add(lora.lora_int_id)
        return is_new

    def digest(self, lora: LoRARequest, *, check: bool) -> str:
        """Of its files, read once per load: vLLM gives every load an id of its own. ``check``:
        that they are still the same, as vLLM may load them again when it has put them aside.

        Raises:
            OSError: they cannot be read, have changed, or are loaded in place.
        """
        if lora.lora_int_id in self._in_place:
            raise OSError(
                f"LoRA adapter {lora.lora_name} is loaded in place: its KV changes under one name"
            )
        key = lora.lora_int_id, lora.lora_path
        stamp = adapter_stamp(lora.lora_path) if check or key not in self._digests else ()
        if key not in self._digests:
            self._digests[key] = adapter_digest(lora.lora_path), stamp
        elif check and self._digests[key][1] != stamp:
            raise OSError(
                f"the files of LoRA adapter {lora.lora_name} have changed since it was loaded, so "
                "that nobody can tell which of them are in use: load it again, under a new name"
            )
        return self._digests[key][0]


class VllmRequest:
    """A live window on one vLLM request; implements RequestView."""

    __slots__ = ("_adapters", "_mm_cursor", "_request", "uncacheable")

    def __init__(
        self,
        request: Request,
        mm_identifiers_are_counters: bool,
        adapters: Adapters,
        needs_salt: bool = False,
    ) -> None:
        """``adapters`` is shared by all requests. ``needs_salt``: the tokens alone say nothing."""
        self._request = request
        self._adapters = adapters
        # (token position, index of the first image that may reach it): ranges come in order.
        self._mm_cursor = (0, 0)
        self.uncacheable: str | None = None
        if mm_identifiers_are_counters and request.mm_features:
            self.uncacheable = (
                "multimodal requests, whose identifiers are per-process counters while "
                "--mm-processor-cache-gb is 0 and prefix caching is off; set one of them"
            )
        if needs_salt and not request.cache_salt:
            self.uncacheable = "requests whose prompt is placeholders and that have no cache_salt"

    request_id = property(attrgetter("_request.request_id"))
    num_tokens = property(attrgetter("_request.num_tokens"))
    num_prompt_tokens = property(attrgetter("_request.num_prompt_tokens"))
    num_computed_tokens = property(attrgetter("_request.num_computed_tokens"))

    @property
    def skip_reading(self) -> bool:
        return bool(getattr(self._request, "skip_reading_prefix_cache", False))

    @property
    def kv_transfer_params(self) -> Mapping[str, object]:
        return self._request.kv_transfer_params or {}

    def tokens(self, start: int, end: int) -> Sequence[int]:
        tokens: Sequence[int] = self._request.all_token_ids[start:end]
        return tokens

    def extra(self) -> Callable[[int, int], object | None] | None:
        request = self._request
        has_more = request.mm_features or request.lora_request or request.cache_salt
        if not has_more and request.prompt_embeds is None:
            return None
        if request.lora_request:
            # Raises here, not in the middle of a chain.
            self._adapters.digest(request.lora_request, check=True)
        return self._extra_keys

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
        lora = request.lora_request
        adapter = self._adapters.digest(lora, check=False) if lora else None
        if keys is None and adapter is None and kind_bits is None:
            return None  # leading text of a request with images: the same as plain text
        return (keys, adapter, kind_bits)


def has_token_ids(request: Request) -> bool:
    """Whether all of a prompt is given as token ids, none as embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def ended_normally(request: Request) -> bool:
    """Whether a finished request was answered, not aborted or failed."""
    return request.status.name in _ANSWERED


def mm_identifiers_are_counters(vllm_config: VllmConfig) -> bool:
    """Whether vLLM numbers images per process instead of hashing their content."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return multimodal is not None and not (
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
        drafts=scheduler_output.scheduled_spec_decode_tokens,
    )
