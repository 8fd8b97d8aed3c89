"""Hidden states that a stage of vLLM-Omni hands to the next one: kept after every forward, and put
before those of a step whose prefix was restored.

The next stage gets every row of a request once and in order, or none of them: what is short would
condition it on the rows of other tokens, without an error anywhere.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lmcache_connector.hidden_states.rows import Rows
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import Extra
from lmcache_connector.log import init_logger, warn_every

logger = init_logger(__name__)

FINAL = -1  # The layer index of the last output, after the norm.
# What torch and the store raise over rows that are odd or too many: it costs one request's rows.
_TROUBLE = (ValueError, RuntimeError, MemoryError)
_LAYER = re.compile(r"hidden_states\.layer_(\d+)")
# Steps in which the chunks of a request may fail to be stored.
_MAX_FAILURES = 2
# Methods of Omni's runner that are wrapped, with the parameters that they are known by.
_PARAMETERS = {
    "_prefix_cache_save_step": "self hidden_states multimodal_outputs num_tokens_unpadded "
    "num_tokens_padded",
    "_build_omni_pooler_payload": "self rid idx start end hidden_states_cpu req_hidden_states_cpu "
    "combined_hidden_states combined_multimodal_outputs mm_cpu audio_sparse_output "
    "sparse_mm_index hidden_seq_len scheduled_seq_len",
}

# What else identifies a request's tokens, from its id and the runner's state of it.
ExtraOf = Callable[[str, Any], Extra | None]


@dataclass(slots=True)
class _Request:
    # The runner's state of it: another request under the same id has another.
    owner: object
    extra: Extra | None
    # Its tokens can be named; if not, nothing is stored and nothing found.
    is_keyed: bool
    # Rows that the next stage has.
    delivered: int
    # The step that runs: its first token, and the one behind its last.
    computed: int
    end: int
    # A boundary up to which rows are stored, or were there; rows from it on, by layer.
    saved: int
    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    failures: int = 0
    # By layer: rows from ``delivered`` to ``computed``.
    restored: dict[int | None, torch.Tensor] = field(default_factory=dict)


class OmniRows:
    """The rows of one worker's requests. Not for ``async_chunk``, which Omni does not combine with
    a connector.

    Args:
        layers: the rows to keep: ``FINAL``, and inputs of layers.
        prompt_only: rows of generated tokens are not kept.
    """

    def __init__(
        self,
        store: HiddenStateStore,
        chunk_tokens: int,
        layers: Sequence[int],
        extra_of: ExtraOf,
        prompt_only: bool,
    ) -> None:
        self._store, self._chunk, self._layers = store, chunk_tokens, tuple(layers)
        self._extra_of, self._prompt_only = extra_of, prompt_only
        self._requests: dict[str, _Request] = {}

    def after_forward(self, runner: Any, hidden: object, outputs: Any, num_tokens: int) -> None:
        """A step ran: ``hidden``, [tokens, hidden], and the model's other ``outputs``."""
        for rid in self._requests.keys() - runner.requests.keys():
            del self._requests[rid]
        if not isinstance(hidden, torch.Tensor):
            return  # of a pipeline rank that is not the last
        copies: dict[int, torch.Tensor] | None = None
        batch, starts = runner.input_batch, runner.query_start_loc.np
        for index, rid in enumerate(batch.req_ids):
            first, last = int(starts[index]), int(starts[index + 1])
            computed = int(batch.num_computed_tokens_cpu[index])
            end, num_prompt = computed + last - first, int(batch.num_prompt_tokens[index])
            owner, ids = runner.requests[rid], batch.token_ids_cpu[index, : max(num_prompt, end)]
            request = self._requests.get(rid)
            if request is None or request.owner is not owner or request.end != computed:
                request = self._requests[rid] = self._begin(rid, owner, computed, ids)
            else:
                request.restored = {}  # Nobody asked for the step that these go before.
            request.computed, request.end = computed, end
            limit = min(end, num_prompt) if self._prompt_only else end
            if computed < limit and request.is_keyed and request.failures < _MAX_FAILURES:
                try:
                    if copies is None:
                        copies = self._copies(hidden, outputs, num_tokens)
                    rows = {layer: copy[first:last] for layer, copy in copies.items()}
                    self._keep(request, rows, ids, limit)
                except _TROUBLE as error:
                    warn_every(logger, "rows", 60.0, "hidden states are not kept: %s", error)
                    # Later rows would close up to those before the gap.
                    request.held, request.failures = {}, _MAX_FAILURES

    def _begin(self, rid: str, owner: Any, computed: int, ids: Any) -> _Request:
        """A request is new, or computed again from ``computed`` on: what was held is of steps that
        run once more, what was delivered is not taken back."""
        # A chunk that begins before the step was there already: it was restored.
        saved = -(-computed // self._chunk) * self._chunk
        old = self._requests.get(rid)
        if old is not None and old.owner is owner:
            known = old.extra, old.is_keyed, old.delivered
        else:
            try:
                known = self._extra_of(rid, owner), True, 0
            except (*_TROUBLE, OSError) as error:
                warn_every(logger, "unkeyed", 60.0, "hidden states are not kept: %s", error)
                known = None, False, 0
        request = _Request(owner, *known, computed, computed, saved)
        if computed > request.delivered:
            found, why = None, "they are not in the store"
            try:
                found = request.is_keyed and self._store.retrieve_layers(
                    ids[:saved].tolist(), self._layers, min_rows=computed, extra=request.extra
                )
            except _TROUBLE as error:  # also of tokens that are no ids
                why = str(error)
            if not found:
                text = "request %s hands on no hidden states: of %d restored tokens, %s"
                logger.error(text, rid, computed, why)
                return request
            request.restored = {
                layer: rows[request.delivered : computed] for layer, rows in found.items()
            }
        return request

    def _copies(self, hidden: torch.Tensor, outputs: Any, size: int) -> dict[int, torch.Tensor]:
        """Rows of the step by layer, on the CPU.

        Raises:
            ValueError: those of a layer are missing.
        """
        states = outputs.get("hidden_states") if isinstance(outputs, dict) else None
        layers = states.get("layers") if isinstance(states, dict) else None
        by_layer = layers if isinstance(layers, dict) else {}
        copies = {}
        for layer in self._layers:
            rows = hidden if layer == FINAL else by_layer.get(layer, by_layer.get(str(layer)))
            if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or len(rows) < size:
                raise ValueError(f"this model gives none of layer {layer}")
            copies[layer] = rows[:size].detach().cpu()
        return copies

    def _keep(self, request: _Request, rows: dict[int, torch.Tensor], ids: Any, end: int) -> None:
        """Hold the step's rows, and store those of the chunks that end by ``end``."""
        skipped = max(0, request.saved - request.computed)
        for layer, new in rows.items():
            request.held.setdefault(layer, []).append(new[skipped:])
        num_tokens = end // self._chunk * self._chunk - request.saved
        if num_tokens > 0:
            held = {layer: torch.cat(pieces) for layer, pieces in request.held.items()}
            token_ids = ids[: request.saved + num_tokens].tolist()
            items = [
                Rows(token_ids, rows[:num_tokens], layer, request.saved, request.extra)
                for layer, rows in held.items()
            ]
            counts = self._store.store_batch(items)
            if set(counts) == {wanted := num_tokens // self._chunk}:
                request.saved += num_tokens
                request.failures = 0
            else:
                text = "of %d chunks of hidden states %s are stored, by layer"
                warn_every(logger, "short", 60.0, text, wanted, counts)
                # Nothing advances: chunks behind one that is missing would not be found.
                num_tokens, request.failures = 0, request.failures + 1
            request.held = {layer: [rows[num_tokens:]] for layer, rows in held.items()}
        if request.failures == _MAX_FAILURES:
            request.held = {}
        for pieces in request.held.values():
            pieces[-1] = pieces[-1].clone()  # A view would keep all rows of its step.

    def complete(self, rid: str, payload: dict[str, Any]) -> dict[str, Any]:
        """What a request's step hands on: its ``payload`` with all rows that the next stage does
        not have yet, or without any."""
        request = self._requests.get(rid)
        if request is None:
            return payload
        num_rows = request.end - request.computed
        by_token = {
            name: rows
            for name, rows in payload.items()
            if isinstance(rows, torch.Tensor)
            and rows.ndim > 1
            # Of a single row nobody can tell.
            and (_layer_of(name) is not None or 1 < len(rows) == num_rows)
        }
        result = {name: payload[name] for name in payload.keys() - by_token.keys()}
        whole = {name: _not_delivered(request, name, rows) for name, rows in by_token.items()}
        if all(rows is not None for rows in whole.values()):
            result |= whole
            request.delivered = max(request.delivered, request.end)
        return result


def _not_delivered(request: _Request, name: str, rows: torch.Tensor) -> torch.Tensor | None:
    """Those of a step's ``rows`` and of the restored ones before them that the next stage does not
    have; None when some are missing."""
    if len(rows) == request.end:
        # From the first token on: Omni's own cache had the prefix.
        return rows[request.delivered :]
    if len(rows) != request.end - request.computed:
        return None
    if request.computed <= request.delivered:
        return rows[request.delivered - request.computed :]
    try:
        restored = request.restored.get(_layer_of(name))
        return None if restored is None else torch.cat([restored.to(rows), rows])
    except _TROUBLE as error:
        logger.error("rows of a request cannot be handed on: %s", error)
        return None


def _layer_of(name: str) -> int | None:
    """The layer whose rows Omni's payloads have under a name."""
    if name == "hidden":
        return FINAL
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def install(runner_class: Any, rows: OmniRows) -> Callable[[], None] | None:
    """Have every runner of the class keep and complete rows; ends with a call of what comes back.
    None, and one line in the log: its methods are not those that are known."""
    for name, parameters in _PARAMETERS.items():
        method = getattr(runner_class, name, None)
        found = " ".join(inspect.signature(method).parameters) if method is not None else "nothing"
        if found != parameters:
            text = "hidden states are not kept: this vLLM-Omni's %s has other parameters (%s)"
            logger.error(text, name, found)
            return None
    save, build = originals = [getattr(runner_class, name) for name in _PARAMETERS]

    def save_step(
        runner: Any, hidden_states: Any, multimodal_outputs: Any, **counts: int
    ) -> int | None:
        step_id: int | None = save(runner, hidden_states, multimodal_outputs, **counts)
        num_tokens = counts["num_tokens_unpadded"]
        rows.after_forward(runner, hidden_states, multimodal_outputs, num_tokens)
        return step_id

    def build_payload(runner: Any, *, rid: str, **how: Any) -> dict[str, Any]:
        return rows.complete(rid, build(runner, rid=rid, **how))

    def put(methods: Sequence[Callable[..., Any]]) -> None:
        for name, method in zip(_PARAMETERS, methods, strict=True):
            setattr(runner_class, name, method)

    put([save_step, build_payload])
    return lambda: put(originals)
