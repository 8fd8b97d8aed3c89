"""What the scheduler side knows about a request and a step, in neutral words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmcache_connector.config import RequestParams
from lmcache_connector.keys import ChunkChain
from lmcache_connector.storage.base import RowKey


class RequestView(Protocol):
    """A live window on vLLM's request; every attribute is read at the time of use."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Confirmed tokens: prompt and accepted output, no placeholders or drafts."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def skip_reading(self) -> bool:
        """The request asked not to be served from any prefix cache."""

    @property
    def uncacheable(self) -> str | None:
        """Why no key can be trusted for this request, or None."""

    def tokens(self, start: int, end: int) -> Sequence[int]: ...

    def extra(self) -> Callable[[int, int], object | None] | None:
        """Identity beyond tokens for a token range (LoRA, images, salt); None: there is none."""


@dataclass(slots=True)
class Lookup:
    """An answer given (or being found) for one scheduling attempt; holds pins in the store."""

    lookup_id: int
    local_tokens: int
    num_tokens: int
    # When vLLM first asked; None while it is only expected to.
    asked: float | None = None
    # ``LookupReply.present`` of the pool alone, as of when the tiers had not answered yet.
    in_pool: list[list[int]] = field(default_factory=list)
    # The boundary whose rows, ``keep``, are brought into the pool.
    best: int | None = None
    keep: list[RowKey] = field(default_factory=list)
    # The same of hidden states that are needed with the KV.
    keep_hidden: list[RowKey] = field(default_factory=list)
    # The boundary that these two are for.
    kept: int | None = None
    # Final: its rows are in the pool and pinned.
    boundary: int | None = None


@dataclass(slots=True)
class RequestState:
    """Lives from the request's arrival to its end. Stores and loads have lives of their own."""

    view: RequestView
    chain: ChunkChain
    params: RequestParams
    lookup: Lookup | None = None
    # An earlier one whose hidden states are still pinned: they are read when the request runs.
    reading: Lookup | None = None
    # Set while workers copy for this request.
    load_id: int | None = None
    # A load failed: the same request is not answered the same way again.
    bypass: bool = False
    # First chunk that no step has considered for storing yet.
    next_chunk: int = 0
    # Asked tokens are counted once per request.
    counted: bool = False
    # Counts admissions: what was scheduled under an earlier one may have fed other tokens.
    attempt: int = 0
    # As of the last step; a streaming session that goes on with new input changes it.
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class PendingStore:
    """Reserved slots that workers are asked to fill. Outlives its request."""

    generation: int
    request_id: str
    # Of the request when the step was built.
    attempt: int
    num_prompt_tokens: int
    waiting_ranks: set[int]
    parts: list[StorePart]
    # By part, by shard; 0 for a shard of no bytes.
    digests: list[list[int | None]] = field(default_factory=list)

    def bind(self, hashes: Sequence[bytes]) -> None:
        """Give the parts without a key theirs, as far as ``hashes`` goes."""
        for part in self.parts:
            if part.chunk_hash is None and part.chunk < len(hashes):
                part.late = True
                part.chunk_hash = hashes[part.chunk]
                part.parent = hashes[part.chunk - 1] if part.chunk else None


@dataclass(slots=True)
class StorePart:
    """One (chunk, object group) of a store. ``chunk_hash`` is None until its tokens are known."""

    index: int
    chunk: int
    group: str
    sizes: list[int]
    chunk_hash: bytes | None
    parent: bytes | None
    # The key was found after the step was built, and is not reserved against other stores.
    late: bool = False

    @property
    def key(self) -> RowKey | None:
        return None if self.chunk_hash is None else (self.chunk_hash, self.group)


@dataclass(slots=True)
class PendingLoad:
    """Slots that workers copy into a waiting request's blocks."""

    request_id: str
    waiting_ranks: set[int]
    # (chunk hash, group tag) by object of the op.
    rows: list[tuple[bytes, str]]
    num_tokens: int
    ok: bool = True
    corrupt: set[int] = field(default_factory=set)


@dataclass(slots=True)
class StepView:
    """One step as vLLM scheduled it. Valid only inside ``build_step``."""

    # Request id -> tokens scheduled in this step.
    scheduled: Mapping[str, int]
    # Current block tables by engine group, or None for a request vLLM offers none of.
    block_ids: Callable[[str], Sequence[Sequence[int]] | None]
    # Request id -> (engine group, block id, boundary in tokens).
    boundary_states: Mapping[str, Sequence[tuple[int, int, int]]]
    # Request id -> those of its scheduled tokens, the last ones, that the model may reject.
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
