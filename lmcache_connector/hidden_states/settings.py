"""What is exported, where to, and what one request may choose. The words are those of vLLM's
ExampleHiddenStatesConnector where they mean the same thing."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import Meta

from lmcache_connector.config import parse_size
from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers.base import parse_tier_url

SUFFIX, LOCK, ERROR = ".safetensors", ".lock", ".error"
# What readers are given where rows go to a tier: its own URL, and a name there.
URL = re.compile(r"([a-z0-9]+://[^#]*)#([0-9a-f]{64})")
_MAX_NAME = 200  # of the 255 bytes that file systems allow

_Layers = tuple[Annotated[int, Meta(ge=0)], ...]
_Path = Annotated[str, Meta(pattern="^/[^\0]+$")]
_Place = Annotated[str, Meta(pattern="^(/[^\0]+|[a-z0-9]+://[^\0#]*)$")]


class ExtractSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration key ``extract_hidden_states``, by the names of its keys."""

    # Absolute directory of the files, or a tier's URL: then readers need no shared file system.
    shared_storage_path: _Place
    # Rows of generated tokens too; a request's last token never has one.
    include_output_tokens: bool = False
    # Tap ids, ascending: that of layer k is its input, of layer 0 the embeddings.
    layers: _Layers = ()
    # Only requests that ask for it are exported.
    opt_in: bool = False
    # Bytes of all files in the directory; None: no limit. Tiers have bounds of their own.
    max_size: int | None = None
    # Seconds until a file is removed; None: never. Not for tiers either.
    ttl: Annotated[float, Meta(gt=0)] | None = None
    # Bytes of rows in memory that wait to be written.
    max_queued_size: int = 1 << 30
    num_writer_threads: Annotated[int, Meta(ge=1)] = 8
    # A reader waits for a file by its lock.
    use_synchronization_lock: bool = True
    # A request may name any path on this host.
    allow_custom_save_path: bool = False


class ExtractChoice(msgspec.Struct, frozen=True):
    """What holds for one request, by the names in its ``kv_transfer_params``."""

    extract_hidden_states: bool
    include_output_tokens: bool
    hidden_states_layers: _Layers | None = None
    hidden_states_path: _Path | None = None


def parse_settings(given: Mapping[str, object], taps: Sequence[int]) -> ExtractSettings:
    """``taps``: the layers that vLLM extracts, ascending; none when it extracts nothing.

    Raises:
        ConfigError: names the cause and the fix.
    """
    try:
        sizes = {
            name: parse_size(given[name])
            for name in ("max_size", "max_queued_size")
            if given.get(name) is not None
        }
        settings = msgspec.convert({**given, **sizes}, ExtractSettings, strict=False)
        if not taps:
            raise ValueError(
                "vLLM extracts nothing: start it with --speculative-config "
                '\'{"method":"extract_hidden_states","num_speculative_tokens":1,'
                '"draft_model_config":{"hf_config":{"eagle_aux_hidden_state_layer_ids":[...]}}}\''
            )
        if not settings.shared_storage_path.startswith("/"):
            parse_tier_url(settings.shared_storage_path)
            if settings.max_size is not None or settings.ttl is not None:
                raise ValueError("max_size and ttl are a directory's: a tier has its own bounds")
        return msgspec.structs.replace(settings, layers=some_of(settings.layers or taps, taps))
    except ValueError as error:
        keys = ", ".join(ExtractSettings.__struct_fields__)
        raise ConfigError(f"extract_hidden_states: {error} (its keys: {keys})") from None


def some_of(layers: Sequence[int], taps: Sequence[int]) -> tuple[int, ...]:
    """The layers, ascending.

    Raises:
        ValueError: one is not extracted.
    """
    if unknown := set(layers) - set(taps):
        raise ValueError(f"layers {sorted(unknown)} are not extracted: choose of {list(taps)}")
    return tuple(sorted(set(layers)))


def path_for(directory: str, request_id: str) -> str:
    """The file of a request, whose id may come from a client: it stays in ``directory``. vLLM
    makes ids unique at their end. In a tier, a URL that nobody has and nobody guesses."""
    if not directory.startswith("/"):
        return f"{directory}#{secrets.token_hex(32)}"
    return os.path.join(directory, quote(request_id, safe="")[-_MAX_NAME:] + SUFFIX)
