"""Steps of a thinker on CPU tensors: a runner class's own methods, one real store of rows, and what
the next stage has got of a request in the end."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lmcache_connector.hidden_states.omni import OmniRows, install
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import TokenDatabase
from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool

CHUNK, WIDTH = 8, 128
LAYERS = (-1, 0, 2)
NAMES = {"hidden": -1, "hidden_states.layer_0": 0, "hidden_states.layer_2": 2}


class _Memory:
    def __init__(self, pool: MemoryPool) -> None:
        self._maps = pool.map()

    def hold(self, incarnation: str) -> bool:
        return True

    def drop(self) -> None:
        pass

    def view(self, slot: SlotRef) -> memoryview:
        return self._maps[slot.extent][slot.offset : slot.offset + slot.nbytes]


@contextmanager
def open_store(num_chunks: int = 256) -> Iterator[HiddenStateStore]:
    """Rows of chunks, whose KV counts as there."""
    pool = MemoryPool(num_chunks * CHUNK * WIDTH * 4)
    engine = StorageEngine(pool)
    for extent in range(len(pool.extents)):
        engine.mark_ready(extent)
    session = engine.open_session(b"n" * 32, [], PoolRef("/nowhere", "1"))
    database = TokenDatabase(b"n" * 32, CHUNK)
    store = HiddenStateStore()
    store.attach(session, _Memory(pool), database)  # type: ignore[arg-type]
    yield store
    store.close()
    engine.check_integrity()
    engine.close()


def rows_of(ids: Sequence[int], layer: int, seed: int = 0) -> torch.Tensor:
    """What the model computes: every row depends on all tokens before it, and on ``seed``."""
    return _rows_of(tuple(ids), layer, seed)


@functools.cache
def _rows_of(ids: tuple[int, ...], layer: int, seed: int) -> torch.Tensor:
    sums = np.cumsum(ids) + 1000 * layer + 7 * seed
    return torch.from_numpy(np.sin(sums[:, None] * np.arange(1, WIDTH + 1)).astype(np.float32))


class Stage:
    """A runner of ``runner_class`` and its requests, each a list of token ids. ``seed``: other
    images than those of another stage."""

    def __init__(self, runner_class: Any, seed: int = 0, **options: Any) -> None:
        self.seed = seed
        self.runner = runner = runner_class.__new__(runner_class)
        runner.is_pooling_model = False
        runner.omni_prefix_cache = None
        runner.requests = {}
        for name, value in options.items():
            setattr(runner, name, value)
        # By request and name: the rows that went to the next stage, in order.
        self.sent: dict[str, dict[str, list[torch.Tensor]]] = {}

    def step(
        self,
        *parts: tuple[str, list[int], int, int, int],
        asked: bool = True,
        captured: Any = (0, 2),
    ) -> list[dict[str, Any]]:
        """One step of (request, its known tokens, of these in the prompt, first, end), in which
        the model captures the inputs of layers ``captured``."""
        runner, ids = self.runner, np.zeros((len(parts), 4096), dtype=np.int32)
        starts = [0]
        for index, (name, tokens, _, first, end) in enumerate(parts):
            ids[index, : len(tokens)] = tokens
            starts.append(starts[-1] + end - first)
            runner.requests.setdefault(name, SimpleNamespace(name=name))
        runner.input_batch = SimpleNamespace(
            req_ids=[part[0] for part in parts],
            token_ids_cpu=ids,
            num_prompt_tokens=np.array([part[2] for part in parts]),
            num_computed_tokens_cpu=np.array([part[3] for part in parts]),
        )
        # vLLM's buffer is longer than the batch.
        runner.query_start_loc = SimpleNamespace(np=np.array([*starts, 0, 0]))
        rows = {
            layer: torch.cat(
                [rows_of(tokens, layer, self.seed)[first:end] for _, tokens, _, first, end in parts]
            )
            for layer in LAYERS
        }
        num_tokens = starts[-1]
        # The engine pads steps, and uses its buffers again.
        padded = {layer: torch.cat([r, torch.full((3, WIDTH), 7.0)]) for layer, r in rows.items()}
        outputs = {
            "hidden_states": {"layers": captured and {layer: padded[layer] for layer in captured}},
            "embed": {"tts_bos": [torch.ones(1, 1, WIDTH)]},
        }
        runner._prefix_cache_save_step(
            padded[-1], outputs, num_tokens_unpadded=num_tokens, num_tokens_padded=num_tokens + 3
        )
        for tensor in padded.values():
            tensor.fill_(9.0)
        flat = {name: rows[layer] for name, layer in NAMES.items() if layer != -1}
        flat["embed.tts_bos"] = [torch.ones(1, 1, WIDTH)]
        return [
            self._hand_on(index, part, starts, rows[-1], flat)
            for index, part in enumerate(parts if asked else ())
        ]

    def _hand_on(
        self, index: int, part: Any, starts: list[int], hidden: torch.Tensor, flat: dict[str, Any]
    ) -> dict[str, Any]:
        payload: dict[str, Any] = self.runner._build_omni_pooler_payload(
            rid=part[0],
            idx=index,
            start=starts[index],
            end=starts[index + 1],
            hidden_states_cpu=hidden,
            req_hidden_states_cpu=None,
            combined_hidden_states=None,
            combined_multimodal_outputs=None,
            mm_cpu=flat,
            audio_sparse_output=False,
            sparse_mm_index={},
            hidden_seq_len=starts[-1] + 3,
            scheduled_seq_len=starts[-1],
        )
        for name in NAMES.keys() & payload.keys():
            self.sent.setdefault(part[0], {}).setdefault(name, []).append(payload[name])
        return payload

    def whole(self, name: str, tokens: list[int], num_rows: int) -> bool:
        """Whether the next stage has the rows of the first ``num_rows`` tokens, and no others."""
        sent = self.sent.get(name, {})
        return sent.keys() == NAMES.keys() and all(
            torch.equal(torch.cat(sent[key]), rows_of(tokens, layer, self.seed)[:num_rows])
            for key, layer in NAMES.items()
        )

    def finish(self, name: str) -> None:
        del self.runner.requests[name]


@contextmanager
def hooked(
    runner_class: Any, store: Any, extra_of: Any = lambda name, state: None, **options: Any
) -> Iterator[OmniRows]:
    """The class's methods are wrapped, for the length of a block."""
    rows = OmniRows(store, CHUNK, LAYERS, extra_of, **{"prompt_only": False, **options})
    undo = install(runner_class, rows)
    assert undo is not None
    yield rows
    undo()
