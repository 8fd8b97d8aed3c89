"""What becomes of a request's extracted hidden states when it ends: the scheduler side's part."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from lmcache_connector.groups import HIDDEN_PREFIX
from lmcache_connector.hidden_states.settings import (
    ExtractChoice,
    ExtractSettings,
    path_for,
    some_of,
)
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import ExportOp, ExtractStep
from lmcache_connector.scheduler.request import RequestView

logger = init_logger(__name__)


class ExportPlanner:
    """Decides what is exported. ``taps``: the layers that vLLM extracts, ascending."""

    def __init__(self, settings: ExtractSettings, taps: Sequence[int]) -> None:
        self._settings = settings
        self._taps = taps
        # By request: what will be exported, and whether with generated tokens.
        self._wishes: dict[str, tuple[ExportOp, bool]] = {}
        # Those of them whose prompt is not computed yet.
        self._waiting: dict[str, RequestView] = {}
        self._step = ExtractStep()

    def arrive(self, request: RequestView, params: Mapping[str, object]) -> None:
        """A request that has token ids arrived, with its ``kv_transfer_params``."""
        settings, request_id = self._settings, request.request_id
        configured = {
            "extract_hidden_states": not settings.opt_in,
            "include_output_tokens": settings.include_output_tokens,
        }
        given = {key: value for key, value in params.items() if value is not None}
        try:
            choice = msgspec.convert({**configured, **given}, ExtractChoice, strict=False)
            layers = some_of(choice.hidden_states_layers or settings.layers, self._taps)
            path = path_for(settings.shared_storage_path, request_id)
        except ValueError as error:
            warn_every(logger, "choice", 60.0, "no export of %r: %s", request_id, error)
            return
        if not choice.extract_hidden_states:
            return
        if choice.hidden_states_path and settings.allow_custom_save_path:
            path = choice.hidden_states_path
        elif choice.hidden_states_path:
            warn_every(logger, "path", 60.0, "hidden_states_path needs allow_custom_save_path")
        op = ExportOp(request_id, path, b"", [], layers)
        self._wishes[request_id] = (op, choice.include_output_tokens)
        self._waiting[request_id] = request

    def step(self, scheduled: Mapping[str, int]) -> ExtractStep | None:
        """What this step does, or None."""
        for request_id in self._waiting.keys() & scheduled.keys():
            request = self._waiting[request_id]
            if request.num_computed_tokens + scheduled[request_id] >= request.num_prompt_tokens:
                del self._waiting[request_id]
                self._step.begun[request_id] = self._wishes[request_id][0].path
        step, self._step = self._step, ExtractStep()
        return step if step.begun or step.finished or step.dropped else None

    def finish(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        layout: CacheLayout | None,
        *,
        normally: bool,
    ) -> str | None:
        """The path of the file that will be: the blocks stay until the workers report the request
        as sent. None: there will be no file."""
        request_id = request.request_id
        op, with_output = self._wishes.pop(request_id, (None, False))
        if op is None or self._waiting.pop(request_id, None) is not None:
            return None
        count = request.num_tokens - 1 if with_output else request.num_prompt_tokens
        blocks = _blocks_of_rows(layout, block_ids, count)
        if not normally or not blocks or request.num_computed_tokens < count:
            self._step.dropped.append(request_id)
            return None
        ids = array("q", request.tokens(0, count)).tobytes()
        self._step.finished.append(msgspec.structs.replace(op, token_ids=ids, block_ids=blocks))
        return op.path


def _blocks_of_rows(
    layout: CacheLayout | None, block_ids: Sequence[Sequence[int]], count: int
) -> list[int]:
    """Blocks with the rows of the first ``count`` tokens; none where they are not all there."""
    for group in layout.groups if layout is not None else ():
        if group.tag.startswith(HIDDEN_PREFIX):
            ((engine_group, block_tokens),) = group.tokens_per_block.items()
            num_blocks = -(-count // block_tokens)
            blocks = list(block_ids[engine_group][:num_blocks])
            return blocks if len(blocks) == num_blocks else []
    return []
