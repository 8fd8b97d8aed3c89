"""What both sides derive from vLLM's configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_connector import omni_stage, vllm_view
from lmcache_connector.chunk_size import choose_chunk_size
from lmcache_connector.config import Config, LoadedConfig, load_config
from lmcache_connector.errors import ConfigError, StartupError
from lmcache_connector.hidden_states.rows import Layer
from lmcache_connector.hidden_states.settings import ExtractSettings, parse_settings
from lmcache_connector.server.sockets import socket_path_for
from lmcache_connector.storage.base import GroupShards
from lmcache_connector.storage.pool import check_memory_budget

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Setup:
    """All problems of it are found at once.

    Raises:
        StartupError: holds them.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, owns_pool: bool
    ) -> None:
        problems = vllm_view.config_problems(vllm_config)
        loaded: LoadedConfig | None = None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        try:
            loaded = load_config(extra, os.environ)
        except ConfigError as error:
            problems.extend(error.problems)
        problems.extend(omni_stage.stage_problems(vllm_config, loaded and loaded.config))
        self.groups, group_problems = vllm_view.group_specs(vllm_config, kv_cache_config)
        problems.extend(group_problems)
        self.taps = vllm_view.hidden_state_taps(vllm_config)
        self.extract: ExtractSettings | None = None
        if loaded is not None:
            config = loaded.config
            if config.save_decode_cache:
                problems.extend(vllm_view.decode_problems(kv_cache_config))
            if owns_pool and config.server is None:
                problem = check_memory_budget(config.max_local_cpu_bytes, config.hidden_bytes)
                problems.extend([problem] if problem else [])
            try:
                if config.extract_hidden_states:
                    self.extract = parse_settings(config.extract_hidden_states, self.taps)
            except ConfigError as error:
                problems.extend(error.problems)
        if not group_problems:
            try:
                configured = loaded.config.chunk_size if loaded else None
                self.chunk_tokens, self.chunk_warning = choose_chunk_size(self.groups, configured)
            except StartupError as error:
                problems.extend(error.problems)
        if problems or loaded is None:
            raise StartupError(*problems)
        self.loaded = loaded
        self.config: Config = loaded.config
        # Hidden states as the model has them, and their rows that a hit needs with its KV.
        self.hidden_shape: tuple[torch.dtype, int] | None = None
        self.hidden_groups: list[GroupShards] = []
        if self.config.enable_hidden_state_cache:
            dtype, width = vllm_view.hidden_shape(vllm_config, self.config.hidden_state_dtype)
            self.hidden_shape = dtype, width
            layers = [Layer(index, dtype, width) for index in self.config.hidden_state_layers or ()]
            self.hidden_groups = [layer.group(self.chunk_tokens) for layer in layers]
        engine_id = vllm_view.engine_name(vllm_config)
        # Where the pool's memory is, and the name under which this engine's workers ask for it.
        if self.config.server is None:
            self.endpoint, self.instance = socket_path_for(engine_id), ""
        else:
            self.endpoint = Path(self.config.server.removeprefix("ipc://"))
            self.instance = engine_id
