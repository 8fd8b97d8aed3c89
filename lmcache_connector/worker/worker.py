"""The worker side: a data mover. Copies what a step's metadata names and reports back.

It decides nothing about the cache. What it cannot do as told (unknown incarnation, deadline
passed, a digest that does not match, an op that does not fit its geometry) it reports as failed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from lmcache_connector.counters import Counters, count_group
from lmcache_connector.errors import ConnectorError, GeometryError
from lmcache_connector.groups import ObjectGroup, WorkerGeometry
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import (
    LoadOp,
    LoadReport,
    ObjectOp,
    StepMeta,
    StoreOp,
    StoreReport,
    WorkerMeta,
)
from lmcache_connector.server.client import PoolClient
from lmcache_connector.worker.register import Registration
from lmcache_connector.worker.staging import Int64Array, PageJob
from lmcache_connector.worker.transfer import Copier, SlotCheck

logger = init_logger(__name__)

_Op = TypeVar("_Op", LoadOp, StoreOp)
# By kernel group, so that each is one launch for all objects of an op: block ids, and where each
# block begins in its slot.
_Blocks = dict[int, list[tuple[Int64Array, Int64Array]]]


@dataclass(slots=True)
class _Running:
    """A copy that was started. Slots and blocks belong to it until ``ticket`` is done."""

    ticket: int
    started: float
    # This rank's slots, by index of the op's object; none where it has nothing to copy.
    checks: dict[int, SlotCheck]
    # Holds the memory for it.
    client: PoolClient

    def end(self) -> None:
        """Let go of the memory: nothing touches it any more."""
        for check in self.checks.values():
            check.view.release()
        self.client.drop()


class CacheWorker:
    """One rank. All methods but the attachment's helper thread run on the model's thread."""

    def __init__(self, registration: Registration, copier: Copier, counters: Counters) -> None:
        self.geometry: WorkerGeometry = registration.geometry
        self.counters = counters
        self._runs = registration.runs
        self._copier = copier
        self._groups: dict[str, ObjectGroup] = {
            group.tag: group for group in self.geometry.object_groups()
        }
        self._clients: list[PoolClient] = []
        self._stores: dict[int, tuple[StoreOp, _Running]] = {}
        self._loads: dict[int, tuple[LoadOp, _Running]] = {}
        self._store_reports: list[StoreReport] = []
        self._load_reports: list[LoadReport] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    # ---- attachment ---------------------------------------------------------------------------

    def attach(self, socket_path: str, instance: str) -> None:
        """Map the pool behind ``socket_path`` on a helper thread, and its successors there;
        returns at once. It need not be there yet."""
        path = Path(socket_path)
        if any((client.path, client.instance) == (path, instance) for client in self._clients):
            return
        self._clients.append(self.open_memory(path, self.geometry.rank, instance))

    def open_memory(self, path: Path, rank: int, instance: str) -> PoolClient:
        """A pool's memory that this worker's device reaches; the caller closes it."""
        return PoolClient(
            path,
            rank,
            instance,
            register_extent=self._copier.register_extent,
            unregister_extent=self._copier.unregister_extent,
            touch_ahead=self._copier.touch_ahead,
        )

    # ---- one step -----------------------------------------------------------------------------

    def start_loads(self, meta: StepMeta) -> None:
        """Begin the step's loads. Blocks are not read by any forward before they are reported."""
        if meta.pool is not None:
            self.attach(meta.pool.socket_path, meta.pool.instance)
        for op in meta.loads:
            if op.objects and time.monotonic() <= op.deadline and (running := self._start(op)):
                self._loads[op.load_id] = (op, running)
            else:
                self._report_load(op, ok=False)
        self._poll_loads()

    def save(self, meta: StepMeta) -> None:
        """Begin the step's stores; on return no later forward can change what they read."""
        for op in meta.stores:
            if running := self._start(op):
                self._stores[op.store_id] = (op, running)
            else:
                nothing: list[int | None] = [None] * len(op.objects)
                self._store_reports.append(StoreReport(op.store_id, self.geometry.rank, nothing))
        self._poll_stores()

    def _start(self, op: LoadOp | StoreOp) -> _Running | None:
        """Begin an op's copies; None when it is of another life of the pool, has no room, or does
        not fit what is registered."""
        client = next((c for c in self._clients if c.hold(op.incarnation)), None)
        if client is None:
            return None
        storing = isinstance(op, StoreOp)
        running = _Running(-1, time.monotonic(), {}, client)
        ticket = None
        try:
            blocks: _Blocks = defaultdict(list)
            for index, obj in enumerate(op.objects):
                if check := self._add_object(blocks, client, obj, storing=storing):
                    running.checks[index] = check
            jobs = [
                PageJob(
                    **self._runs[index]._asdict(),
                    block_ids=np.concatenate([ids for ids, _ in parts]),
                    slot_addresses=np.concatenate([addresses for _, addresses in parts]),
                )
                for index, parts in blocks.items()
            ]
            copy = self._copier.store if storing else self._copier.load
            ticket = copy(jobs, list(running.checks.values()))
        except ConnectorError as error:
            what = "store" if storing else "load"
            warn_every(logger, what, 60.0, f"{what} refused: {error}")
        finally:
            if ticket is None:
                running.end()
        if ticket is None:
            return None
        running.ticket = ticket
        return running

    def _add_object(
        self, blocks: _Blocks, client: PoolClient, obj: ObjectOp, *, storing: bool
    ) -> SlotCheck | None:
        """Add one object's pages of this rank; its slot to check, None when it has no part.

        Raises:
            GeometryError: the op does not fit what this rank registered.
        """
        group = self._groups.get(obj.group)
        if group is None or (storing and not self.geometry.owns_shard_of(group)):
            return None
        shard = self.geometry.shard_of(group)
        if shard >= len(obj.slots):
            raise GeometryError(f"a row of {len(obj.slots)} shards has no shard {shard}")
        slot = obj.slots[shard]
        layout = self.geometry.object_layout(group, obj.end_tokens)
        if slot.nbytes < layout.nbytes:
            raise GeometryError(
                f"slot of {slot.nbytes} bytes for an object of {layout.nbytes} ({obj.group})"
            )
        base = client.address(slot)
        for region in layout.regions:
            kernel_group = self.geometry.kernel_groups[region.kernel_group]
            ids = obj.block_ids.get(kernel_group.engine_group_idx, [])
            if len(ids) > region.num_blocks or (storing and len(ids) != region.num_blocks):
                raise GeometryError(
                    f"{len(ids)} block ids for the {region.num_blocks} blocks that {obj.group} "
                    f"keeps of a chunk"
                )
            if not ids:
                continue
            if not 0 <= min(ids) <= max(ids) < kernel_group.nb:
                raise GeometryError(f"block ids outside 0..{kernel_group.nb - 1}")
            # The ids are the chunk's last blocks: they lie at the region's end.
            first = base + region.offset + (region.num_blocks - len(ids)) * region.block_bytes
            addresses = first + region.block_bytes * np.arange(len(ids), dtype=np.int64)
            blocks[region.kernel_group].append((np.array(ids, np.int64), addresses))
        digest = None if storing else obj.digests[shard]
        return SlotCheck(client.view(slot)[: layout.nbytes], layout.nbytes, digest)

    def _ended(
        self, copies: dict[int, tuple[_Op, _Running]]
    ) -> Iterator[tuple[_Op, _Running, dict[int, int]]]:
        """Copies that have ended since the last call, with their digests by index of the object."""
        for op_id, (op, running) in list(copies.items()):
            result = self._copier.result(running.ticket)
            if result is None:
                continue
            del copies[op_id]
            running.end()
            yield op, running, dict(zip(running.checks, result, strict=True))

    def _poll_loads(self) -> None:
        for op, running, digests in self._ended(self._loads):
            checks = running.checks.items()
            corrupt = [index for index, check in checks if check.expected != digests[index]]
            self.counters.load_seconds += time.monotonic() - running.started
            _count_bytes(self.counters.load_bytes, op.objects, running)
            self._report_load(op, ok=not corrupt, corrupt=corrupt)

    def _poll_stores(self) -> None:
        for op, running, digests in self._ended(self._stores):
            self.counters.store_seconds += time.monotonic() - running.started
            _count_bytes(self.counters.store_bytes, op.objects, running)
            written = [digests.get(index) for index in range(len(op.objects))]
            self._store_reports.append(StoreReport(op.store_id, self.geometry.rank, written))

    def _report_load(self, op: LoadOp, *, ok: bool, corrupt: Sequence[int] = ()) -> None:
        self._load_reports.append(LoadReport(op.load_id, self.geometry.rank, ok, list(corrupt)))
        self._finished.add(op.request_id)
        if not ok:
            self._failed.add(op.request_id)

    def take_results(self) -> tuple[set[str], set[str]]:
        """(requests whose load ended, those of them whose load failed) since the last call."""
        self._poll_loads()
        self._poll_stores()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_meta(self) -> WorkerMeta | None:
        """Reports since the last call, or None."""
        meta = WorkerMeta(self._store_reports, self._load_reports)
        self._store_reports, self._load_reports = [], []
        return meta if meta.stores or meta.loads else None

    def shutdown(self) -> None:
        """End running copies, then unmap the pool."""
        self._copier.close()
        for copies in (self._loads, self._stores):
            while copies:
                copies.popitem()[1][1].end()
        for client in self._clients:
            client.close()
        self._clients.clear()


def _count_bytes(counter: dict[str, int], objects: Sequence[ObjectOp], running: _Running) -> None:
    for index, check in running.checks.items():
        count_group(counter, objects[index].group, check.nbytes)


def device_of(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> torch.device:
    """The device that holds the KV cache; CPU when this rank has no layer."""
    for tensor in kv_caches.values():
        first = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
        return first.device
    return torch.device("cpu")
