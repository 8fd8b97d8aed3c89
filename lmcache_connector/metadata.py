"""Everything that crosses between the scheduler side and the workers.

Plain msgspec structs: vLLM pickles them between processes, and inheriting its abstract
metadata classes would clash with msgspec's metaclass. Times are seconds of
``time.monotonic()``, which all processes of one host share.
"""

from __future__ import annotations

import msgspec

from lmcache_connector.groups import WorkerGeometry


class SlotRef(msgspec.Struct, frozen=True, array_like=True):
    """A place in the memory pool: ``nbytes`` bytes at ``offset`` of extent ``extent``."""

    extent: int
    offset: int
    nbytes: int


class PoolRef(msgspec.Struct, frozen=True):
    """Where a worker attaches to the pool's memory, and which life of the pool it is."""

    socket_path: str
    # A new pool (restart, new server) has a new incarnation; slots of another one are refused.
    # Empty: there is no pool now.
    incarnation: str
    # Which of a server's engines the worker belongs to.
    instance: str = ""


class ObjectOp(msgspec.Struct, frozen=True, array_like=True):
    """One (chunk, object group) to copy, on every shard at once."""

    # ObjectGroup.tag
    group: str
    # Exclusive end of the chunk, in tokens from the start of the prompt.
    end_tokens: int
    # Engine group id -> block ids of the last blocks of the chunk, in token order. A store
    # names every block the object keeps, a load may name fewer (the others are already there).
    block_ids: dict[int, list[int]]
    # By shard. A shard is a set of ranks that hold the same bytes.
    slots: list[SlotRef]
    # By shard: xxh3_64 of the slot, for loads; empty for stores.
    digests: list[int]


class StoreOp(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks into reserved slots in the step that carries this."""

    store_id: int
    incarnation: str
    objects: list[ObjectOp]


class LoadOp(msgspec.Struct, frozen=True, array_like=True):
    """Copy slots into a waiting request's blocks. ``objects == []`` is a load that failed
    before it started: the worker only reports it, so that vLLM releases the request."""

    load_id: int
    request_id: str
    incarnation: str
    # A copy not started by then is refused, which fails the load.
    deadline: float
    objects: list[ObjectOp]


class ExportOp(msgspec.Struct, frozen=True, array_like=True):
    """Rows of hidden states of a finished request, to be written to a file."""

    request_id: str
    path: str
    # int64, native byte order; as many rows are exported, from the first token on.
    token_ids: bytes
    # Of the engine group that holds the rows, from the first token on.
    block_ids: list[int]
    # Tap ids, ascending.
    layers: tuple[int, ...]


class ExtractStep(msgspec.Struct, array_like=True):
    """What a step does for exports."""

    # Request id -> path: it may finish in this step, and readers are to wait for the file.
    begun: dict[str, str] = {}
    finished: list[ExportOp] = []
    # Requests that were begun and will have no file.
    dropped: list[str] = []


class HiddenRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the worker keeps hidden states: ``ipc:///path``, and the 32 bytes that their chunk
    hashes are chained from now."""

    endpoint: str
    namespace: bytes


class StepMeta(msgspec.Struct, array_like=True):
    """Scheduler side to workers, once per step."""

    pool: PoolRef | None = None
    stores: list[StoreOp] = []
    loads: list[LoadOp] = []
    extract: ExtractStep | None = None
    hidden: HiddenRef | None = None
    # Request id -> cache salt, of requests whose first step this is.
    salts: dict[str, str] = {}


class StoreReport(msgspec.Struct, frozen=True, array_like=True):
    """One rank is done with a store. Its slots are not written to any more."""

    store_id: int
    rank: int
    # By object: xxh3_64 of the slot written by this rank; None where it wrote nothing
    # (another rank of its shard does, it has no layer of the group, or the copy was refused).
    digests: list[int | None]


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """One rank is done with a load: nothing it started can touch the blocks any more."""

    load_id: int
    rank: int
    ok: bool
    # Objects whose bytes did not match their digest, by index in the op.
    corrupt: list[int] = []


class WorkerMeta(msgspec.Struct, array_like=True):
    """Workers to scheduler side, once per step; ranks are merged by ``aggregate``."""

    stores: list[StoreReport] = []
    loads: list[LoadReport] = []
    geometries: list[WorkerGeometry] = []

    def aggregate(self, other: WorkerMeta) -> WorkerMeta:
        """Merge with another rank's report of the same step."""
        return WorkerMeta(
            stores=self.stores + other.stores,
            loads=self.loads + other.loads,
            geometries=self.geometries + other.geometries,
        )
