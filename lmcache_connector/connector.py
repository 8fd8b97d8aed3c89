"""vLLM's connector class: picks a side by role and forwards. Decides nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache_connector import vllm_view
from lmcache_connector.config import load_config

vllm_view.require_vllm()

from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: E402

from lmcache_connector.observability import metrics  # noqa: E402
from lmcache_connector.sides import SchedulerSide, WorkerSide  # noqa: E402

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LMCacheHybridConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Keeps the KV cache of hybrid models outside the engine's blocks and brings it back.

    One instance lives in the engine core (scheduler role), one in each worker. They meet only in
    the step's metadata and the workers' reports.
    """

    # What vLLM's metrics make of our counters.
    build_kv_connector_stats = metrics.ConnectorStats
    build_prom_metrics = metrics.ConnectorPromMetrics
    # Where vLLM's metrics count what we restore (0.30 does not ask).
    _cache_hit_source = vllm_view.host_cache_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        side = SchedulerSide if role is base.KVConnectorRole.SCHEDULER else WorkerSide
        self._side = side(vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """It does not. With CUDA graphs vLLM asks before it loads the model: raises ConfigError for
        a mistake that would be told minutes later."""
        load_config(extra_config, os.environ)
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert isinstance(self._side, SchedulerSide), "a scheduler's hook was called on a worker"
        return self._side

    @property
    def worker_side(self) -> WorkerSide:
        assert isinstance(self._side, WorkerSide), "a worker's hook was called on the scheduler"
        return self._side

    @property
    def _lmcache_engine(self) -> SimpleNamespace:
        """Integrations written for LMCache walk to ``lmcache_engine.hidden_state_store``."""
        return SimpleNamespace(lmcache_engine=self.worker_side.engine)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a dropped save is a later miss."""
        return False

    # ---- scheduler side, in call order ----------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.scheduler_side.on_handshake(list(metadata.values()))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_side.scheduler.null_block_id = gpu_block_pool.null_block.block_id

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched = self.scheduler_side.match(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        scheduler = self.scheduler_side.scheduler
        scheduler.after_alloc(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return self.scheduler_side.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.on_worker_meta(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.on_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.scheduler.has_pending_work()

    def reset_cache(self) -> bool:
        self.scheduler_side.scheduler.reset()
        return True

    # ---- worker side, in call order -------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        return self.worker_side.handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous and whole-step: no forward waits for a layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores are whole-step: per-layer hooks never fire for state layers."""

    def wait_for_save(self) -> None:
        self.worker_side.save(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        sent, received, failed = self.worker_side.take_results()
        return base.KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> Any:
        return self.worker_side.take_meta()

    # ---- both sides -----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> metrics.ConnectorStats | None:
        data = self._side.take_counters()
        return metrics.ConnectorStats(data=data) if data else None

    def shutdown(self) -> None:
        self._side.shutdown()
