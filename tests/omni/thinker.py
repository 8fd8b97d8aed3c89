"""A tiny thinker of vLLM-Omni on the CPU: Omni's own runner on top of vLLM's for the CPU, one
engine core in this process. vLLM-Omni 0.30 itself has a worker for accelerators only."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.multimodal import MultiModalRegistry, encoder_budget
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.engine import OmniEngineCoreRequest
from vllm_omni.engine.arg_utils import OmniEngineArgs
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

CHUNK = 64
VOCABULARY = 512
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
}
SPECIAL = {
    "vision_start_token_id": 501,
    "vision_end_token_id": 502,
    "audio_start_token_id": 503,
    "audio_end_token_id": 504,
    "image_token_index": 505,
    "video_token_index": 506,
    "audio_token_index": 507,
    "image_token_id": 505,
    "video_token_id": 506,
    "audio_token_id": 507,
}
CONFIGS = {
    "qwen2.5": {
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "model_type": "qwen2_5_omni",
        "thinker_config": {
            "text_config": TEXT,
            "vision_config": {
                "depth": 1,
                "hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 128,
                "patch_size": 16,
                "fullatt_block_indexes": [0],
            },
            **SPECIAL,
        },
        "talker_config": {"hidden_size": 64},
    },
    "qwen3": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": {
            "text_config": {
                **TEXT,
                "head_dim": 32,
                "moe_intermediate_size": 64,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "decoder_sparse_step": 1,
            },
            "vision_config": {
                "image_size": 64,
                "apply_vit_abs_pos_embed": True,
                "depth": 1,
                "hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 128,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [],
            },
            "audio_config": {
                "encoder_layers": 1,
                "num_hidden_layers": 1,
                "d_model": 64,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "downsample_hidden_size": 16,
                "output_dim": 128,
            },
            **SPECIAL,
        },
        "talker_config": {"accept_hidden_layer": 2},
    },
}


class Runner(GPUARModelRunner, CPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        with _torch_cuda_wrapper():
            super().__init__(vllm_config, device)
        self._postprocess_tensors()


class Worker(OmniWorkerMixin, CPUWorker):
    model_runner_cls = Runner

    def init_device(self) -> None:
        import vllm.v1.worker.cpu_worker as module

        own, module.CPUModelRunner = module.CPUModelRunner, Runner
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = own


def write_model(family: str, directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIGS[family]))
    return directory


IMAGE_TOKENS = 64


def picture(content: str, offset: int) -> MultiModalFeatureSpec:
    """An image of 16 x 16 patches, as a processor would give it."""
    generator = torch.Generator().manual_seed(sum(content.encode()))
    pixels = torch.randn(4 * IMAGE_TOKENS, 3 * 2 * 16 * 16, generator=generator)
    grid = torch.tensor([[1, 16, 16]])
    sizes = torch.tensor([len(pixels)])
    by_patch = MultiModalFieldConfig.flat_from_sizes("image", sizes)
    (pixel_elem,) = by_patch.build_elems("pixel_values", pixels)
    (grid_elem,) = MultiModalFieldConfig.batched("image", keep_on_cpu=True).build_elems(
        "image_grid_thw", grid
    )
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixel_values": pixel_elem, "image_grid_thw": grid_elem}),
        modality="image",
        identifier=content,
        mm_position=PlaceholderRange(offset=offset, length=IMAGE_TOKENS),
    )


@contextmanager
def _no_processor() -> Iterator[None]:
    """vLLM asks the processor of images for its limits."""
    info = SimpleNamespace(supported_mm_limits={"image": None}, allowed_mm_limits={"image": 1})
    sizes = {"image": IMAGE_TOKENS}
    with (
        patch.object(
            MultiModalRegistry, "create_processor", lambda *args, **how: SimpleNamespace(info=info)
        ),
        patch.object(encoder_budget, "get_mm_max_toks_per_item", lambda *args, **how: sizes),
    ):
        yield


class Thinker:
    """An engine core with a stage of a family. ``sent``: what the next stage was handed, by
    request; ``payloads``: rows of the final layer in each step of a request."""

    @staticmethod
    def config(
        family: str,
        directory: Path,
        connector: dict[str, Any] | None,
        num_images: int = 0,
        **engine_args: Any,
    ) -> Any:
        processor = {"qwen2.5": "qwen2_5_omni", "qwen3": "qwen3_omni"}[family]
        processor = f"vllm_omni.model_executor.stage_input_processors.{processor}"
        transfer = connector and KVTransferConfig(
            kv_connector="LMCacheHybridConnector",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        )
        args = OmniEngineArgs(
            **{
                "model": str(write_model(family, directory)),
                "model_stage": "thinker",
                "model_arch": CONFIGS[family]["architectures"][0],
                "hf_config_name": "thinker_config",
                "engine_output_type": "latent",
                "custom_process_next_stage_input_func": f"{processor}.thinker2talker_full_payload",
                "worker_type": "ar",
                "worker_cls": f"{__name__}.Worker",
                "scheduler_cls": "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "max_model_len": 1024,
                "block_size": 32,
                # Steps end where chunks do: rows of the same step are the same, bit for bit.
                "max_num_batched_tokens": CHUNK,
                "max_num_seqs": 4,
                "enable_prefix_caching": False,
                "async_scheduling": False,
                # Of images; their processor would need files of a real model.
                "limit_mm_per_prompt": {"audio": 0, "image": num_images, "video": 0},
                "skip_mm_profiling": True,
                "mm_processor_cache_gb": 4,
                "kv_transfer_config": transfer,
                **engine_args,
            }
        )
        with _no_processor():
            config = args.create_engine_config()
        # vLLM lets a KV consumer take embeddings of images, which needs a processor.
        config.model_config.multimodal_config.enable_mm_embeds = False
        # Not set on a CPU.
        config.compilation_config.max_cudagraph_capture_size = 0
        return config

    def __init__(
        self, family: str, directory: Path, connector: dict[str, Any] | None, **engine_args: Any
    ) -> None:
        config = self.config(family, directory, connector, **engine_args)
        with _no_processor():
            self.core = EngineCore(config, UniProcExecutor, log_stats=False)
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.num_preempted = 0
        torch.manual_seed(1)
        for name, weight in self.runner.model.named_parameters():
            if "norm" not in name:
                weight.data.normal_(0.0, 0.1)
            elif name.endswith("weight"):
                weight.data.fill_(1.0)
        self.sent: dict[str, Any] = {}
        build = self.runner._build_custom_process_payload

        def record(request_id: str, **how: Any) -> Any:
            self.sent[request_id] = build(request_id=request_id, **how)
            return self.sent[request_id]

        self.runner._build_custom_process_payload = record
        # By request: tokens that the connector restored.
        self.restored: dict[str, int] = {}
        if connector:
            ours = self.core.scheduler.connector
            after_alloc = ours.update_state_after_alloc

            def watch(request: Any, blocks: Any, num_external_tokens: int) -> None:
                name, before = request.request_id, self.restored.get(request.request_id, 0)
                self.restored[name] = before + num_external_tokens
                after_alloc(request, blocks, num_external_tokens)

            ours.update_state_after_alloc = watch
        self._ids = itertools.count()

    def start(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        salt: str | None = None,
        image: tuple[str, int] | None = None,
    ) -> str:
        """``image``: its content's name, and where its tokens are."""
        request_id = f"request-{next(self._ids)}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = OmniEngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=[picture(*image)] if image else None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))
        return request_id

    def run(self, *prompts: list[int], **how: Any) -> list[tuple[Any, int]]:
        """What the next stage gets of each prompt, and how many of its tokens were restored."""
        ids = [self.start(prompt, **how) for prompt in prompts]
        deadline = time.monotonic() + 60
        while not set(ids) <= self.sent.keys() and time.monotonic() < deadline:
            self.core.step_fn()
            counts = [r.num_preemptions for r in self.core.scheduler.requests.values()]
            self.num_preempted = max([self.num_preempted, *counts])
            if not self.core.scheduler.has_requests():
                break
        # What copies are left, ends.
        for _ in range(20):
            self.core.step_fn()
            time.sleep(0.005)
        return [(self.sent.get(name), self.restored.get(name, 0)) for name in ids]

    def close(self) -> None:
        self.core.shutdown()
