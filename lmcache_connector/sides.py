"""The two sides of the connector, built from vLLM's objects and speaking neutral words inside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import vllm

from lmcache_connector import (
    __version__,
    omni_stage,
    vllm_engine,
    vllm_faults,
    vllm_request,
    vllm_view,
)
from lmcache_connector.config import describe, parse_request_params
from lmcache_connector.counters import Counters
from lmcache_connector.groups import WorkerGeometry
from lmcache_connector.hidden_states.extract import Extractor
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import UNRESOLVED_PREFIX, TokenDatabase, namespace_digest
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import HiddenRef, PoolRef, StepMeta, WorkerMeta
from lmcache_connector.scheduler.exports import ExportPlanner
from lmcache_connector.scheduler.scheduler import CacheScheduler
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.embedded import EmbeddedStore
from lmcache_connector.server.messages import RegisterHiddenStates, RegisterKVCache
from lmcache_connector.server.sockets import hidden_endpoint, memory_path
from lmcache_connector.server.store_client import StoreClient
from lmcache_connector.setup import Setup
from lmcache_connector.storage.session import StoreSession
from lmcache_connector.worker.register import RankFacts, register_kv_caches
from lmcache_connector.worker.transfer import make_copier
from lmcache_connector.worker.worker import CacheWorker, device_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Workers attach within milliseconds on CPU; pinning the first extent takes longer. Start-up goes
# on without them after this long, and stores begin when they are there.
_ATTACH_SECONDS = 10.0


class SchedulerSide:
    """Lives in the engine core."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._setup = setup = Setup(vllm_config, kv_cache_config, owns_pool=True)
        config = setup.config
        transfer = vllm_config.kv_transfer_config
        if not config.fail_on_load_error:
            # vLLM's default would fail users' requests over a lost cache entry. It reads the
            # policy after it has built the connector.
            transfer.kv_load_failure_policy = "recompute"
        self._facts = vllm_view.namespace_facts(vllm_config)
        self._adapters = vllm_request.Adapters()
        vllm_engine.watch(self)
        self._view = functools.partial(
            vllm_request.VllmRequest,
            mm_identifiers_are_counters=vllm_request.mm_identifiers_are_counters(vllm_config),
            adapters=self._adapters,
            needs_salt=omni_stage.has_placeholders(vllm_config),
        )
        self._salts: dict[str, str] = {}  # of requests that have not run yet
        self.scheduler = CacheScheduler(
            config,
            self._namespace,
            can_load=transfer.is_kv_consumer,
            can_store=transfer.is_kv_producer,
            counters=Counters(),
            checkpoint_groups=vllm_view.checkpoint_groups(kv_cache_config),
        )
        self._layout: CacheLayout | None = None
        self._hidden_endpoint: str | None = None
        self._exports = ExportPlanner(setup.extract, setup.taps) if setup.extract else None
        parallel = vllm_config.parallel_config
        self._num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._early_geometries: dict[int, WorkerGeometry] = {}
        self._block_size_checked = False
        hints = [setup.chunk_warning, vllm_faults.mla_rope_hint(vllm_config, setup.groups)]
        is_alone = not config.server and not config.tier_urls
        if is_alone and transfer.kv_role != "kv_both":
            hints.append(
                f"kv_role {transfer.kv_role} with a pool of this engine's own: what is stored is "
                "never loaded and nothing is ever found; use kv_both"
            )
        if config.server and config.tier_urls:
            hints.append(
                "tiers are not used with server: the server has its own (lmcache-connector server "
                "--tier URL)"
            )
        if not is_alone and str(self._facts["model"]).startswith(UNRESOLVED_PREFIX):
            hints.append(
                "which weights this engine loads cannot be told (a name without a resolved commit, "
                "or dummy weights): what it keeps is found by itself only; give --revision COMMIT "
                "or a local directory"
            )
        for warning in filter(None, [*setup.loaded.warnings, *hints]):
            logger.warning(warning)

    def _namespace(self, fingerprints: Sequence[str], nonce: str) -> bytes:
        return namespace_digest({**self._facts, "geometry": ",".join(fingerprints), "reset": nonce})

    def on_handshake(self, metadata: Sequence[Any]) -> None:
        """All ranks' registrations, before the first request. Under a MultiConnector these may be
        another child's: then the workers' first reports bring ours."""
        geometries = [
            value
            for value in metadata
            if isinstance(value, WorkerGeometry) and value.chunk_tokens == self._setup.chunk_tokens
        ]
        if len(geometries) == self._num_ranks:
            self._attach(geometries, wait_seconds=_ATTACH_SECONDS)

    def _attach(self, geometries: Sequence[WorkerGeometry], wait_seconds: float) -> None:
        setup, model = self._setup, str(self._vllm_config.model_config.model)
        layout = self._layout = CacheLayout(geometries)
        namespace = self.scheduler.namespace(layout)
        store: EmbeddedStore | StoreClient
        hidden: StoreSession | StoreClient | None = None
        if setup.config.server is not None:
            store = StoreClient(
                setup.config.server,
                RegisterKVCache(setup.instance, model, namespace, list(geometries)),
            )
            if setup.config.enable_hidden_state_cache:
                self._hidden_endpoint = f"ipc://{hidden_endpoint(setup.endpoint)}"
            if setup.hidden_groups and self._hidden_endpoint:
                who = (f"{setup.instance}/lookups", model, namespace, layout.chunk_tokens, 0)
                hidden = StoreClient(
                    self._hidden_endpoint, RegisterHiddenStates(*who, setup.hidden_groups)
                )
        else:
            store = EmbeddedStore(setup.endpoint, model, namespace, layout, setup.config)
            if store.hidden is not None:
                self._hidden_endpoint = store.hidden.endpoint
                if setup.hidden_groups:
                    hidden = store.hidden.engine.open_session(
                        namespace, setup.hidden_groups, PoolRef("", "")
                    )
        tags = [group.tag for group in setup.hidden_groups]
        self.scheduler.attach(layout, store, hidden, tags)
        self._log_start(layout, geometries[0], store.wait_ready(wait_seconds))

    def _log_start(self, layout: CacheLayout, geometry: WorkerGeometry, ready: bool) -> None:
        groups = " ".join(
            f"{group.tag}[engine groups {','.join(map(str, group.tokens_per_block))}; blocks of "
            f"{','.join(map(str, sorted(set(group.tokens_per_block.values()))))} tokens; "
            f"{sum(group.shard_bytes(layout.chunk_tokens))} B in {group.num_shards} object(s)]"
            for group in layout.groups
        )
        logger.info(
            "LMCacheHybridConnector %s on vLLM %s: %s; chunk %d tokens; %s; %d rank(s); %s %s; "
            "backends %s; %s",
            __version__,
            vllm.__version__,
            self._vllm_config.kv_transfer_config.kv_role,
            layout.chunk_tokens,
            groups,
            layout.num_ranks,
            self._setup.config.server
            or f"pool {self._setup.config.max_local_cpu_bytes / 2**20:.1f} MiB",
            "attached" if ready else "NOT attached yet, nothing is stored until it is",
            ",".join(dict.fromkeys(geometry.backends)),
            describe(self._setup.config, self._setup.loaded.origins),
        )
        if any(group.recurrent_state for group in geometry.kernel_groups):
            logger.info(
                "recurrent states exist only where a prefill step ends: the largest prompt part "
                "that one hit can serve ends at such a boundary; --max-num-batched-tokens %d makes "
                "every chunk one",
                layout.chunk_tokens,
            )

    def _check_block_size(self) -> None:
        # Not before the first request: vLLM resets the value after the connector is built.
        self._block_size_checked = True
        block = vllm_faults.lost_block_size(self._vllm_config, self._setup.groups)
        if block is None:
            return
        cache = self._vllm_config.cache_config
        logger.warning(
            "vLLM reset its block size to %d after it built state blocks of %d tokens; prefill "
            "steps would end inside them, and the states cached there would be wrong. It is set "
            "back; start with --block-size %d to be independent of this",
            cache.block_size,
            block,
            block,
        )
        # The scheduler reads it at every step.
        cache.block_size = block

    def on_new_request(self, request: Request) -> None:
        if not self._block_size_checked:
            self._check_block_size()
        if request.lora_request and self._adapters.replaces(request.lora_request):
            self.scheduler.reset()
        view = self._view(request)
        params, warnings = parse_request_params(view.kv_transfer_params, self._setup.config)
        for warning in warnings:
            warn_every(logger, "request parameters", 60.0, "%s", warning)
        self.scheduler.on_new_request(view, params)
        if request.cache_salt and self._setup.hidden_shape is not None:
            self._salts[view.request_id] = request.cache_salt
        if self._exports is not None and vllm_request.has_token_ids(request):
            self._exports.arrive(view, view.kv_transfer_params)

    def match(self, request: Request, local_tokens: int) -> int | None:
        if not self.scheduler.knows(request.request_id):
            self.on_new_request(request)
        return self.scheduler.match(request.request_id, local_tokens)

    def build_step(self, scheduler_output: SchedulerOutput) -> StepMeta:
        view = vllm_request.step_view(scheduler_output)
        meta = self.scheduler.build_step(view)
        meta.salts = {name: self._salts.pop(name) for name in self._salts.keys() & view.scheduled}
        if self._hidden_endpoint is not None:
            meta.hidden = HiddenRef(self._hidden_endpoint, self.scheduler.chunk_namespace)
        if self._exports is not None:
            meta.extract = self._exports.step(view.scheduled)
        return meta

    def on_worker_meta(self, meta: Any) -> None:
        if not isinstance(meta, WorkerMeta):
            return
        if self._layout is None:
            self._early_geometries |= {geometry.rank: geometry for geometry in meta.geometries}
            if len(self._early_geometries) == self._num_ranks:
                self._attach(list(self._early_geometries.values()), wait_seconds=0.0)
        self.scheduler.on_worker_meta(meta)

    def on_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks are still needed, what its answer tells)."""
        self.scheduler.on_finished(request.request_id)
        self._salts.pop(request.request_id, None)
        if self._exports is None:
            return False, None
        normally = vllm_request.ended_normally(request)
        view = self._view(request)
        path = self._exports.finish(view, block_ids, self._layout, normally=normally)
        return path is not None, {"hidden_states_path": path} if path is not None else None

    def on_weights(self, *, local_hits_are_new: bool) -> None:
        self.scheduler.reset(local_hits_are_new=local_hits_are_new)

    def on_adapter(self, lora: LoRARequest) -> None:
        if self._adapters.replaces(lora):
            # Requests that run with it go on with other weights.
            self.scheduler.reset()
        # What cannot be read is told when a request comes with it.
        with contextlib.suppress(OSError):
            self._adapters.digest(lora, check=True)

    def take_counters(self) -> dict[str, Any]:
        return self.scheduler.take_counters()

    def shutdown(self) -> None:
        self.scheduler.shutdown()


class WorkerSide:
    """Lives in each worker."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._setup = Setup(vllm_config, kv_cache_config, owns_pool=False)
        self._worker: CacheWorker | None = None
        self._extractor: Extractor | None = None
        self._geometry_known = False
        # None where hidden states are not kept, or this is not the rank that has them.
        self.hidden_state_store: HiddenStateStore | None = None
        config = self._setup.config
        if config.enable_hidden_state_cache and vllm_view.has_hidden_states():
            self.hidden_state_store = HiddenStateStore(
                layers=config.hidden_state_layers,
                kept_as=config.hidden_state_dtype,
                default=self._setup.hidden_shape,
                timeout=config.lookup_timeout,
            )
            self._omni = omni_stage.OmniWorker(
                vllm_config, config, self.hidden_state_store, self._setup.chunk_tokens
            )
        self._hidden: tuple[HiddenRef, StoreClient, PoolClient] | None = None

    @property
    def engine(self) -> SimpleNamespace:
        """What integrations look for: ``hidden_state_store`` and ``config.chunk_size``."""
        config = SimpleNamespace(chunk_size=self._setup.chunk_tokens)
        return SimpleNamespace(hidden_state_store=self.hidden_state_store, config=config)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        backends = vllm_view.backend_names(self._vllm_config, self._kv_cache_config)
        registration = register_kv_caches(
            self._setup.groups,
            kv_caches,
            num_blocks=self._kv_cache_config.num_blocks,
            chunk_tokens=self._setup.chunk_tokens,
            ranks=RankFacts(*vllm_view.rank_facts(), backends),
        )
        copier = make_copier(device_of(kv_caches))
        self._worker = CacheWorker(registration, copier, Counters())
        for spec in (layer for group in self._setup.groups for layer in group.layers):
            if spec.family == "hidden" and self._setup.extract is not None:
                is_first = registration.geometry.tp_rank == 0
                self._extractor = Extractor(
                    self._setup.extract, self._setup.taps, spec, kv_caches[spec.name], is_first
                )

    def handshake(self) -> WorkerGeometry | None:
        """What this rank registered. The scheduler side opens the pool when it has all of them,
        so this is the time to begin looking for it."""
        if self._worker is None:
            return None
        self._worker.attach(str(memory_path(self._setup.endpoint)), self._setup.instance)
        return self._worker.geometry

    def start_loads(self, meta: Any) -> None:
        if isinstance(meta, StepMeta) and self._worker is not None:
            self._geometry_known |= meta.pool is not None
            self._worker.start_loads(meta)
            if self.hidden_state_store is not None:
                self._omni.expect(meta.salts)
                if meta.hidden is not None:
                    self._keep_hidden(meta.hidden, self.hidden_state_store, self._worker)
            if self._extractor is not None and meta.extract is not None:
                self._extractor.start(meta.extract)

    def _keep_hidden(
        self, ref: HiddenRef, hidden_states: HiddenStateStore, worker: CacheWorker
    ) -> None:
        """Go on where the scheduler's side says."""
        if self._hidden is None:
            name, chunk_tokens = f"{self._setup.instance}/rows", self._setup.chunk_tokens
            model = str(self._vllm_config.model_config.model)
            who = RegisterHiddenStates(name, model, ref.namespace, chunk_tokens, 1)
            path = memory_path(Path(ref.endpoint.removeprefix("ipc://")))
            memory = worker.open_memory(path, 0, name)
            store = StoreClient(ref.endpoint, who)
        elif self._hidden[0] != ref:
            _, store, memory = self._hidden
        else:
            return
        database = TokenDatabase(ref.namespace, self._setup.chunk_tokens)
        hidden_states.attach(store, memory, database)
        self._hidden = ref, store, memory

    def save(self, meta: Any) -> None:
        if isinstance(meta, StepMeta) and self._worker is not None:
            self._worker.save(meta)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests sent; received; and those of the latter whose load failed."""
        if self._worker is None:
            return set(), set(), set()
        sent = self._extractor.take_sent() if self._extractor is not None else set()
        return sent, *self._worker.take_results()

    def take_meta(self) -> WorkerMeta | None:
        if self._worker is None:
            return None
        meta = self._worker.take_meta()
        if not self._geometry_known:
            meta = meta or WorkerMeta()
            meta.geometries = [self._worker.geometry]
        return meta

    def take_counters(self) -> dict[str, Any]:
        if self._worker is None:
            return {}
        counters = self._worker.counters
        if self.hidden_state_store is not None:
            counters.hidden_chunks = self.hidden_state_store.take_counts()
        if self._extractor is not None and self._extractor.writer is not None:
            counters.exports, counters.export_bytes = self._extractor.writer.take_counts()
        return counters.take()

    def shutdown(self) -> None:
        if self.hidden_state_store is not None:
            self._omni.close()
            self.hidden_state_store.close()
        if self._hidden is not None:
            _, store, memory = self._hidden
            store.close()
            memory.close()
            self._hidden = None
        if self._extractor is not None:
            self._extractor.close()
            self._extractor = None
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
