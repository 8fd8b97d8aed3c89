"""Registration end to end: models of random groups and layouts, checked byte by byte.

A layer's pages are known twice: from the code under test, and from ``maps``, where every byte of
the engine's buffer is found by plain index arithmetic on a tensor that holds its own addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.buffers import align_up
from lmcache_connector.groups import (
    FULL,
    STATE,
    EngineGroupInfo,
    EngineGroupSpec,
    LayerSpec,
    ReuseKind,
    ReuseRule,
    validate_geometry,
)
from lmcache_connector.triton_kernels.reference import gather_pages, scatter_pages
from lmcache_connector.worker.page_runs import PageRuns
from lmcache_connector.worker.register import (
    RankFacts,
    RegisteredCache,
    Registration,
    register_kv_caches,
)

# (axes of a layer's tensor, order in memory from the outermost with layers L):
# B blocks, K planes, H heads, N slots, C content.
LAYOUTS = {
    "LBHNC": ("BHNC", "LBHNC"),
    "LBNHC": ("BHNC", "LBNHC"),
    "LHBNC": ("BHNC", "LHBNC"),
    "BLHNC": ("BHNC", "BLHNC"),
    "BLNHC": ("BHNC", "BLNHC"),
    "BHLNC": ("BHNC", "BHLNC"),
    "[2,NB,BS,NH,HS]": ("KBNHC", "LKBNHC"),
    "[NB,2,BS,NH,HS]": ("BKNHC", "LBKNHC"),
    "[2,NB,NH,BS,HS]": ("KBHNC", "LKBHNC"),
    "[NB,2,NH,BS,HS]": ("BKHNC", "LBKHNC"),
    "[NB,2,BS,NH,HS] in HND memory": ("BKNHC", "LBKHNC"),
    "[NB,BS,NH,2HS]": ("BNHC", "LBNHC"),
    "[NB,BS,C]": ("BNC", "LBNC"),
    "[NB,BS,C] packed": ("BNC", "BLNC"),
}
DTYPES = {"bfloat16": torch.bfloat16, "uint8": torch.uint8, "float32": torch.float32}


@dataclass(frozen=True)
class Family:
    """Layers of one spec inside an engine group."""

    layout: str
    num_layers: int
    heads: int
    slots: int
    content: int
    dtype: str = "bfloat16"
    # Kernel blocks per logical block.
    ratio: int = 1
    # Elements of padding behind each block, and between layers.
    pad: int = 0
    gap: int = 0
    tokens_per_block: int = 16
    rule: ReuseRule = FULL
    # Registered as [conv, ssm] of this many bytes each; empty: as one tensor.
    states: tuple[int, ...] = ()

    @property
    def item(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def page_bytes(self) -> int:
        return self.heads * self.slots * self.content * self.item

    def spec(self, name: str) -> LayerSpec:
        return LayerSpec(
            name=name,
            tokens_per_block=self.tokens_per_block,
            slots_per_block=self.slots,
            page_bytes=self.page_bytes,
            dtype="int8" if self.rule == STATE else self.dtype,
            rule=self.rule,
            num_shards=1,
            num_heads=self.heads,
        )


@dataclass
class Model:
    """One buffer that all engine groups overlay from offset 0, as an engine lays them out."""

    num_blocks: int
    buffer: torch.Tensor
    groups: list[EngineGroupSpec] = field(default_factory=list)
    caches: dict[str, RegisteredCache] = field(default_factory=dict)
    # [num_blocks, page bytes] of positions in the buffer.
    maps: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)

    def add_group(self, families: list[Family], *, cacheable: bool = True) -> None:
        group_id, base = len(self.groups), 0
        specs = []
        for number, family in enumerate(families):
            names = [f"group.{group_id}.{number}.{i}" for i in range(family.num_layers)]
            specs += [family.spec(name) for name in names]
            base = self._place(family, names, base)
        self.groups.append(EngineGroupSpec(group_id, cacheable, tuple(specs)))

    def _place(self, family: Family, names: list[str], base: int) -> int:
        axes, order = LAYOUTS[family.layout]
        planes = 2 if "K" in axes else 1
        sizes = {
            "L": len(names),
            "B": self.num_blocks * family.ratio,
            "K": planes,
            "H": family.heads,
            "N": family.slots // family.ratio,
            "C": family.content // planes,
        }
        strides, span = {}, 1
        for axis in reversed(order):
            span += {"B": family.pad, "L": family.gap}.get(axis, 0)
            strides[axis] = span
            span *= sizes[axis]
        shape = [sizes[axis] for axis in axes]
        steps = [strides[axis] for axis in axes]
        addresses = torch.arange(len(self.buffer))
        typed = self.buffer.view(DTYPES[family.dtype])
        for index, name in enumerate(names):
            offset = base + index * strides["L"] * family.item
            cells = addresses.as_strided(
                (*shape, family.item), (*[step * family.item for step in steps], 1), offset
            )
            pages = cells.movedim(axes.index("B"), 0).reshape(self.num_blocks, -1)
            self.maps[name] = pages.numpy().copy()
            view = typed.as_strided(shape, steps, offset // family.item)
            self.caches[name] = (
                self._states(family, view, offset)
                if family.states
                else (view.view(torch.int8) if family.rule == STATE else view)
            )
        end = base + span * family.item
        assert end <= len(self.buffer)
        return -(-end // 16) * 16

    def _states(self, family: Family, view: torch.Tensor, offset: int) -> list[torch.Tensor]:
        parts = []
        for number, nbytes in enumerate(family.states):
            dtype = (torch.bfloat16, torch.float32)[number % 2]
            shape = (self.num_blocks, nbytes // dtype.itemsize)
            steps = (view.stride(0) // dtype.itemsize, 1)
            typed = self.buffer.view(dtype)
            parts.append(typed.as_strided(shape, steps, offset // dtype.itemsize))
            offset += nbytes
        return parts

    def register(self, ranks: RankFacts | None = None) -> Registration:
        layers = [layer for group in self.groups if group.cacheable for layer in group.layers]
        chunk = math.lcm(*(layer.tokens_per_block for layer in layers))
        return register_kv_caches(
            self.groups, self.caches, self.num_blocks, chunk, ranks or RankFacts()
        )


def build(
    plan: list[list[Family]], num_blocks: int, order: list[int] | None = None, fill: int = 0
) -> Model:
    """A model of these engine groups; ``order`` permutes the registration of its layers."""
    layers = [family for families in plan for family in families for _ in range(family.num_layers)]
    # More than enough: padding may come once in each plane and head.
    room = sum(f.page_bytes + 2 * f.heads * (f.pad + f.gap) * f.item + 16 for f in layers)
    nbytes = align_up(room, 16) * (num_blocks + 1)
    random = np.random.default_rng(fill).integers(0, 256, nbytes, dtype=np.uint8)
    model = Model(num_blocks, torch.from_numpy(random))
    for families in plan:
        model.add_group(families)
    if order is not None:
        items = list(model.caches.items())
        model.caches = dict(items[index] for index in order)
    return model


@st.composite
def attention_families(draw: st.DrawFn) -> Family:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    heads = 1 if layout.startswith("[NB,BS,C]") else draw(st.sampled_from([1, 2, 4, 8]))
    slots = draw(st.sampled_from([2, 4, 8]))
    _, order = LAYOUTS[layout]
    # Kernel blocks lie a constant stride apart only in blocks without padding or other layers.
    splittable = order.startswith("L") and (order != "LHBNC" or heads == 1)
    ratio = draw(st.sampled_from([1, 1, 2])) if splittable else 1
    # Compression and context-parallel ranks reach us in tokens_per_block only.
    compression, ranks = draw(st.sampled_from([1, 4, 128])), draw(st.sampled_from([1, 2, 4]))
    return Family(
        layout=layout,
        num_layers=draw(st.integers(1, 3)),
        heads=heads,
        slots=slots,
        content=draw(st.sampled_from([2, 6, 8])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        ratio=ratio,
        pad=0 if ratio > 1 else draw(st.sampled_from([0, 0, 2])),
        gap=draw(st.sampled_from([0, 0, 4])),
        tokens_per_block=slots * compression * ranks,
        rule=draw(st.sampled_from([FULL, ReuseRule(ReuseKind.WINDOW, 20)])),
    )


@st.composite
def state_families(draw: st.DrawFn) -> Family:
    states = draw(st.sampled_from([(), (8, 24), (4, 4, 4)]))
    content = sum(states) or draw(st.sampled_from([10, 33]))
    return Family(
        layout=draw(st.sampled_from(["LBHNC", "BLHNC"])),
        num_layers=draw(st.integers(1, 3)),
        heads=1,
        slots=1,
        content=content,
        dtype="uint8",
        pad=-content % 16 or 16,
        gap=-content % 16,
        tokens_per_block=draw(st.sampled_from([16, 640])),
        rule=STATE,
        states=states,
    )


@st.composite
def engine_groups(draw: st.DrawFn) -> list[Family]:
    """One family, two in regions of their own (MLA and indexer), or state."""
    kind = draw(st.sampled_from(["attention", "attention", "mla+indexer", "state"]))
    if kind == "state":
        return [draw(state_families())]
    if kind == "mla+indexer":
        latent = Family("[NB,BS,C]", draw(st.integers(1, 2)), 1, 4, 576, "bfloat16")
        index = Family("[NB,BS,C]", draw(st.integers(1, 2)), 1, 4, 132, "uint8")
        return draw(st.permutations([latent, index]))
    return [draw(attention_families())]


# ---- the property: what is copied, and what must not change -------------------------------------


def layers_of(model: Model, registration: Registration, index: int) -> list[str]:
    names = list(model.caches)
    return [names[layer] for layer in registration.geometry.kernel_groups[index].layer_indices]


def check_runs(model: Model, registration: Registration) -> None:
    """Every block's runs are exactly the bytes of its layers' pages."""
    origin = model.buffer.data_ptr()
    for index, runs in enumerate(registration.runs):
        layers = layers_of(model, registration, index)
        for block in range(model.num_blocks):
            starts = runs.run_addresses - origin + block * runs.block_stride
            covered = (starts[:, None] + np.arange(runs.run_bytes)).ravel()
            pages = np.concatenate([model.maps[name][block] for name in layers])
            assert np.array_equal(np.sort(covered), np.sort(pages))


def copy(
    copier: Callable[..., None],
    runs: PageRuns,
    block_ids: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
) -> None:
    place = (runs.run_addresses, runs.block_stride, runs.run_bytes)
    copier(*place, block_ids, slots, runs.run_pitch)


def copy_group(
    source: Model,
    target: Model,
    index: int,
    registrations: tuple[Registration, Registration],
    block_ids: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> None:
    """Source pages -> slots -> target pages, with canaries around everything."""
    out, back = (registration.runs[index] for registration in registrations)
    group = registrations[0].geometry.kernel_groups[index]
    count = len(block_ids[0])
    distance = group.block_bytes + 32
    slots = np.full(count * distance + 32, 0xA5, dtype=np.uint8)
    shift = -slots.ctypes.data % 16
    addresses = slots.ctypes.data + shift + np.arange(count, dtype=np.int64) * distance
    copy(gather_pages, out, block_ids[0], addresses)
    written = np.zeros(len(slots), dtype=bool)
    for block in range(count):
        for run in range(group.num_runs):
            begin = shift + block * distance + run * group.run_pitch
            written[begin : begin + group.run_bytes] = True
    assert (slots[~written] == 0xA5).all()

    original, expected = source.buffer.numpy(), target.buffer.numpy().copy()
    for name in layers_of(source, registrations[0], index):
        expected[target.maps[name][block_ids[1]]] = original[source.maps[name][block_ids[0]]]
    copy(scatter_pages, back, block_ids[1], addresses)
    assert np.array_equal(target.buffer.numpy(), expected)


@settings(deadline=None)
@given(
    plan=st.lists(engine_groups(), min_size=1, max_size=3),
    num_blocks=st.integers(3, 6),
    more_blocks=st.integers(0, 2),
    data=st.data(),
)
def test_every_layout_round_trips_between_two_engines_and_touches_nothing_else(
    plan: list[list[Family]], num_blocks: int, more_blocks: int, data: st.DataObject
) -> None:
    total = sum(family.num_layers for families in plan for family in families)
    order = data.draw(st.permutations(range(total)))
    source = build(plan, num_blocks, order, fill=1)
    target = build(plan, num_blocks + more_blocks, order, fill=2)
    registrations = (source.register(), target.register())
    check_runs(source, registrations[0])
    check_runs(target, registrations[1])
    geometry = registrations[0].geometry
    # The pool's size is no part of what an object means.
    assert geometry.fingerprint() == registrations[1].geometry.fingerprint()
    count = data.draw(st.integers(1, num_blocks))
    ids = [
        np.array(data.draw(st.permutations(range(model.num_blocks)))[:count], dtype=np.int64)
        for model in (source, target)
    ]
    for index in range(len(geometry.kernel_groups)):
        copy_group(source, target, index, registrations, (ids[0], ids[1]))


@settings(max_examples=50, deadline=None)
@given(plan=st.lists(engine_groups(), min_size=1, max_size=3), data=st.data())
def test_the_geometry_says_what_was_registered(
    plan: list[list[Family]], data: st.DataObject
) -> None:
    total = sum(family.num_layers for families in plan for family in families)
    model = build(plan, 4, data.draw(st.permutations(range(total))))
    geometry = model.register().geometry
    validate_geometry(geometry)
    positions = {name: index for index, name in enumerate(model.caches)}
    layers = [layer for group in geometry.kernel_groups for layer in group.layer_indices]
    assert sorted(layers) == sorted(positions.values())
    assert [g.layer_indices[0] for g in geometry.kernel_groups] == sorted(
        g.layer_indices[0] for g in geometry.kernel_groups
    )
    for engine_group, families in zip(model.groups, plan, strict=True):
        for number, family in enumerate(families):
            first = positions[f"group.{engine_group.engine_group_id}.{number}.0"]
            group = next(g for g in geometry.kernel_groups if first in g.layer_indices)
            assert group.engine_group_idx == engine_group.engine_group_id
            planes = 2 if "K" in LAYOUTS[family.layout][0] else 1
            assert (group.kv_size, group.nl, group.nb) == (planes, family.num_layers, 4)
            assert (group.bs, group.nh) == (family.slots, family.heads)
            assert group.kv_size * group.hs == family.content
            assert group.page_bytes == family.page_bytes
            assert group.slots_per_block == family.slots
            assert group.tokens_per_block == family.tokens_per_block
            assert group.recurrent_state == (family.rule == STATE)
            assert group.sw_size_tokens == (21 if family.rule.tokens else -1)


# ---- single facts -------------------------------------------------------------------------------

FULL_FAMILY = Family("LBHNC", 2, 2, 16, 8)


def test_block_outermost_layers_are_copied_a_whole_block_at_a_time() -> None:
    for layout in ("BLHNC", "BLNHC", "BHLNC"):
        model = build([[Family(layout, 4, 2, 16, 8)]], 4)
        (group,) = model.register().geometry.kernel_groups
        assert (group.num_runs, group.run_bytes) == (1, 4 * 512)


def test_heads_outermost_layers_are_one_run_per_head() -> None:
    (group,) = build([[Family("LHBNC", 3, 8, 16, 8)]], 4).register().geometry.kernel_groups
    assert (group.num_runs, group.run_bytes) == (3 * 8, 16 * 8 * 2)


def test_mla_and_its_indexer_are_two_kernel_groups_of_one_engine_group() -> None:
    latent = Family("LBNHC", 2, 1, 64, 576, "bfloat16", tokens_per_block=64)
    index = Family("LBNHC", 2, 1, 64, 132, "uint8", tokens_per_block=64)
    geometry = build([[latent, index]], 4, [0, 2, 1, 3]).register().geometry
    assert geometry.engine_groups == (
        EngineGroupInfo(0, (0, 2), tokens_per_block=64),
        EngineGroupInfo(0, (1, 3), tokens_per_block=64),
    )
    assert [(g.dtype, g.hs, g.element_size) for g in geometry.kernel_groups] == [
        ("bfloat16", 576, 2),
        ("uint8", 132, 1),
    ]


def test_mla_and_its_indexer_packed_in_one_block_do_not_touch_each_other() -> None:
    # [B][latent latent | index index]: one block stride, two page sizes.
    model = Model(4, torch.zeros(5 * 1024, dtype=torch.uint8))
    latent = Family("[NB,BS,C] packed", 2, 1, 8, 16, "bfloat16", pad=512 - 2 * 128)
    index = Family("[NB,BS,C] packed", 2, 1, 8, 12, "uint8", pad=1024 - 2 * 96)
    model._place(latent, ["latent.0", "latent.1"], 0)
    model._place(index, ["index.0", "index.1"], 512)
    specs = [latent.spec("latent.0"), latent.spec("latent.1")]
    specs += [index.spec("index.0"), index.spec("index.1")]
    model.groups = [EngineGroupSpec(0, True, tuple(specs))]
    registration = model.register()
    check_runs(model, registration)
    assert [g.run_bytes for g in registration.geometry.kernel_groups] == [512, 192]


def test_seed_layers_make_the_seed_infos() -> None:
    odd = Family("LBHNC", 1, 4, 16, 4)
    # Engine group 0: layers 0, 2, 4 (the last of another shape); group 1: layers 1, 3.
    model = build([[FULL_FAMILY, odd], [FULL_FAMILY]], 4, [0, 3, 1, 4, 2])
    assert [
        (info.engine_group_id, info.layer_indices)
        for info in model.register().geometry.engine_groups
    ] == [(0, (0, 2)), (1, (1, 3)), (0, (4,))]


def test_permuted_engine_groups_give_the_same_geometry() -> None:
    window = Family("LBHNC", 2, 2, 16, 8, rule=ReuseRule(ReuseKind.WINDOW, 31))
    model = build([[FULL_FAMILY], [window]], 4)
    geometry = model.register().geometry
    model.groups.reverse()
    assert model.register().geometry == geometry


def test_aliases_and_scratch_groups_are_neither_copied_nor_an_error() -> None:
    model = build([[FULL_FAMILY]], 4)
    before = model.register()
    model.add_group([Family("LBHNC", 1, 1, 4, 8)], cacheable=False)
    model.caches["group.1.0.0"] = torch.zeros(3, 3)  # scratch of any form
    model.caches["alias"] = model.caches["group.0.0.1"]
    after = model.register()
    assert after.geometry == before.geometry
    assert [runs.run_addresses.tolist() for runs in after.runs] == [
        runs.run_addresses.tolist() for runs in before.runs
    ]


def test_layer_indices_count_aliases_and_scratch_layers() -> None:
    model = build([[FULL_FAMILY]], 4)
    first, second = model.caches.items()
    model.caches = dict([("alias", first[1]), first, ("scratch", torch.zeros(1)), second])
    assert model.register().geometry.kernel_groups[0].layer_indices == (1, 3)


def test_a_stage_without_a_groups_layers_registers_the_others() -> None:
    model = build([[FULL_FAMILY]], 4)
    model.groups.append(EngineGroupSpec(1, True, (), tokens_per_block=640, recurrent_state=True))
    assert model.register().geometry.engine_groups == (EngineGroupInfo(0, (0, 1), 16),)
    empty = register_kv_caches([], {}, 4, 256, RankFacts())
    assert (empty.geometry.kernel_groups, empty.runs) == ((), ())


def test_layers_that_differ_in_what_must_be_kept_are_not_one_launch() -> None:
    families = [
        FULL_FAMILY,
        Family("LBHNC", 2, 2, 16, 8, rule=ReuseRule(ReuseKind.WINDOW, 31)),
        Family("LBHNC", 2, 2, 16, 8, "uint8"),
        Family("LBNHC", 2, 2, 16, 8),
        Family("LBHNC", 2, 2, 16, 8, pad=8),
    ]
    assert len(build([families], 4).register().geometry.kernel_groups) == len(families)


def test_the_rank_and_backends_reach_the_geometry() -> None:
    ranks = RankFacts(rank=3, pp_rank=1, pp_size=2, tp_rank=1, tp_size=2, backends=("flash",))
    geometry = build([[FULL_FAMILY]], 4).register(ranks).geometry
    assert (geometry.rank, geometry.pp_rank, geometry.pp_size) == (3, 1, 2)
    assert (geometry.tp_rank, geometry.tp_size, geometry.backends) == (1, 2, ("flash",))


def test_groups_that_share_storage_are_normal() -> None:
    registration = build([[FULL_FAMILY], [FULL_FAMILY]], 4).register()
    first, second = (runs.run_addresses.tolist() for runs in registration.runs)
    assert first == second
