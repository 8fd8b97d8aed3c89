"""Exports of hidden states: settings, who gets a file and when, files and locks, bounds."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lmcache_connector.errors import ConfigError, ExtractionError
from lmcache_connector.groups import FULL, LayerSpec
from lmcache_connector.hidden_states import files
from lmcache_connector.hidden_states.extract import Extractor
from lmcache_connector.hidden_states.settings import ExtractSettings, parse_settings, path_for
from lmcache_connector.hidden_states.writer import Export, ExportWriter, screen
from lmcache_connector.metadata import ExportOp, ExtractStep
from lmcache_connector.scheduler.exports import ExportPlanner

TAPS = (0, 2, 4)
BLOCK, HIDDEN = 4, 8


def settings(directory: Path, **keys: Any) -> ExtractSettings:
    return parse_settings({"shared_storage_path": str(directory), **keys}, TAPS)


# ---- settings -----------------------------------------------------------------------------------


def test_settings_take_the_words_of_the_configuration(tmp_path: Path) -> None:
    plain = settings(tmp_path)
    assert (plain.layers, plain.max_size, plain.ttl, plain.opt_in) == (TAPS, None, None, False)
    assert plain.use_synchronization_lock
    given = settings(tmp_path, layers=[4, 0], max_size="2MiB", ttl=90, max_queued_size=0.5)
    assert (given.layers, given.max_size) == ((0, 4), 2 << 20)
    assert (given.ttl, given.max_queued_size) == (90.0, 1 << 29)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shared_storage": "/x"}, "unknown field `shared_storage`"),
        ({"shared_storage_path": None}, "shared_storage_path"),
        ({"shared_storage_path": "here"}, "shared_storage_path"),
        ({"layers": [1]}, r"\[1\] are not extracted: choose of \[0, 2, 4\]"),
        ({"layers": [-1]}, "layers"),
        ({"num_writer_threads": 0}, "num_writer_threads"),
        ({"max_size": "much"}, "512MiB"),
        ({"ttl": 0}, "ttl"),
        ({"opt_in": "perhaps"}, "opt_in"),
    ],
)
def test_illegal_settings_are_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        settings(tmp_path, **keys)
    assert "its keys: shared_storage_path, " in str(refused.value)


def test_an_engine_that_extracts_nothing_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
        parse_settings({"shared_storage_path": str(tmp_path)}, ())


@pytest.mark.parametrize("request_id", ["../../etc/x", "a/b", "..", ".", "x" * 900, "é\0"])
def test_no_request_id_leaves_the_directory(tmp_path: Path, request_id: str) -> None:
    path = path_for(str(tmp_path), request_id)
    assert os.path.dirname(path) == str(tmp_path)
    Path(path + files.LOCK).touch()
    assert path_for(str(tmp_path), request_id + "1") != path


# ---- the planner --------------------------------------------------------------------------------


class Request:
    def __init__(self, request_id: str = "r", prompt: int = 10) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self.num_computed_tokens = 0
        self.all_tokens = list(range(100, 100 + prompt))
        self.skip_reading, self.uncacheable = False, None

    @property
    def num_tokens(self) -> int:
        return len(self.all_tokens)

    def tokens(self, start: int, end: int) -> list[int]:
        return self.all_tokens[start:end]

    def extra(self) -> None:
        return None


class Group:
    def __init__(self, tag: str, tokens_per_block: dict[int, int]) -> None:
        self.tag, self.tokens_per_block = tag, tokens_per_block


class Layout:
    groups = (Group("full", {0: 16}), Group("hidden-full-s1", {1: BLOCK}))


LAYOUT: Any = Layout()
TABLE = [[1], [7, 8, 9, 10]]


def ended(planner: ExportPlanner, request: Request, **how: Any) -> str | None:
    return planner.finish(request, TABLE, LAYOUT, **{"normally": True, **how})


def run(planner: ExportPlanner, request: Request, output: int = 1, **params: Any) -> str | None:
    planner.arrive(request, params)
    planner.step({request.request_id: request.num_prompt_tokens})
    request.num_computed_tokens = request.num_prompt_tokens + output - 1
    request.all_tokens += range(500, 500 + output)
    return ended(planner, request)


def test_a_finished_request_is_exported_from_its_rows_blocks(tmp_path: Path) -> None:
    planner, request = ExportPlanner(settings(tmp_path), TAPS), Request()
    planner.arrive(request, {})
    assert planner.step({"other": 3}) is None
    assert planner.step({"r": 6}) is None
    request.num_computed_tokens = 6
    path = path_for(str(tmp_path), "r")
    assert planner.step({"r": 4}) == ExtractStep(begun={"r": path})
    request.num_computed_tokens = 10
    request.all_tokens.append(7)
    assert ended(planner, request) == path
    ids = array("q", range(100, 110)).tobytes()
    assert planner.step({}) == ExtractStep(finished=[ExportOp("r", path, ids, [7, 8, 9], TAPS)])
    assert planner.step({}) is None
    assert ended(planner, request) is None


def test_generated_tokens_are_exported_but_for_the_last(tmp_path: Path) -> None:
    planner, request = ExportPlanner(settings(tmp_path), TAPS), Request()
    assert run(planner, request, output=4, include_output_tokens=True)
    step = planner.step({})
    assert step is not None
    assert list(array("q", step.finished[0].token_ids)) == request.all_tokens[:13]
    assert step.finished[0].block_ids == [7, 8, 9, 10]


@pytest.mark.parametrize("trouble", ["aborted", "preempted", "short table", "no geometry"])
def test_without_all_rows_there_is_no_file(tmp_path: Path, trouble: str) -> None:
    planner, request = ExportPlanner(settings(tmp_path), TAPS), Request()
    planner.arrive(request, {})
    planner.step({"r": 10})
    request.num_computed_tokens = 0 if trouble == "preempted" else 10
    how = {"normally": trouble != "aborted"}
    table = [[1], [7]] if trouble == "short table" else TABLE
    layout = None if trouble == "no geometry" else LAYOUT
    assert planner.finish(request, table, layout, **how) is None
    assert planner.step({}) == ExtractStep(dropped=["r"])


def test_an_abort_before_the_last_prompt_token_leaves_nothing_to_do(tmp_path: Path) -> None:
    planner, request = ExportPlanner(settings(tmp_path), TAPS), Request()
    planner.arrive(request, {})
    assert planner.step({"r": 6}) is None
    assert ended(planner, request, normally=False) is None
    assert planner.step({}) is None


@pytest.mark.parametrize(
    ("opt_in", "wish", "expected"),
    [(False, None, True), (False, False, False), (True, None, False), (True, "true", True)],
)
def test_requests_opt_in_and_out(tmp_path: Path, opt_in: bool, wish: Any, expected: bool) -> None:
    planner = ExportPlanner(settings(tmp_path, opt_in=opt_in), TAPS)
    params = {} if wish is None else {"extract_hidden_states": wish}
    assert (run(planner, Request(), **params) is not None) is expected


def test_a_request_chooses_layers_and_path(tmp_path: Path) -> None:
    open_ = ExportPlanner(settings(tmp_path, allow_custom_save_path=True), TAPS)
    assert run(open_, Request(), hidden_states_path="/a/b", hidden_states_layers=[4, 2]) == "/a/b"
    step = open_.step({})
    assert step is not None
    assert step.finished[0].layers == (2, 4)
    closed = ExportPlanner(settings(tmp_path), TAPS)
    assert run(closed, Request(), hidden_states_path="/a/b") == path_for(str(tmp_path), "r")
    # A wish that cannot be met gets nothing rather than something else.
    for wish in ({"hidden_states_layers": [3]}, {"include_output_tokens": "perhaps"}):
        assert run(closed, Request(), **wish) is None


@pytest.mark.parametrize("text", ["\udc80", "a\ud800b"])
def test_what_no_path_can_hold_costs_one_export(tmp_path: Path, text: str) -> None:
    planner = ExportPlanner(settings(tmp_path, allow_custom_save_path=True), TAPS)
    assert run(planner, Request(text)) is None
    assert run(planner, Request("r")) == str(tmp_path / "r.safetensors")
    # What the file system refuses is told where it can be.
    path = str(tmp_path / text)
    write(ExportWriter(settings(tmp_path)), export(Path(path)))
    one = export(tmp_path / "a")
    one.end(f"{path} is odd")
    with pytest.raises(ExtractionError, match="is odd"):
        files.load(one.path)


# ---- files --------------------------------------------------------------------------------------


def rows_of(count: int = 10, layers: int = 3) -> torch.Tensor:
    return torch.arange(1, count * layers * HIDDEN + 1).reshape(count, layers, HIDDEN).bfloat16()


def export(path: Path | str, *, rows: torch.Tensor | None = None, locked: bool = False) -> Export:
    rows = rows_of() if rows is None else rows
    lock = files.hold_lock(str(path)) if locked else None
    return Export(str(path), TAPS[: rows.shape[1]], lock, torch.arange(len(rows)), rows)


def write(writer: ExportWriter, *exports: Export) -> None:
    for one in exports:
        assert writer.admit(one.rows.nbytes)
        writer.submit(one)
    writer.close()


def test_a_file_holds_rows_ids_and_layers(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "a.safetensors")
    write(ExportWriter(settings(tmp_path)), export(path))
    assert torch.equal(load_file(path)["hidden_states"], rows_of())
    assert torch.equal(files.load(path)["token_ids"], torch.arange(10))
    with safe_open(path, "pt") as file:
        assert file.metadata()["layers"] == "0,2,4"
    assert os.listdir(tmp_path / "deep") == ["a.safetensors"]
    assert os.stat(path).st_mode & 0o777 == 0o644


def test_a_reader_waits_for_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    waiting = export(path, locked=True)
    with pytest.raises(TimeoutError):
        files.load(path, timeout=0.02)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(files.load(path, timeout=20)))
    reader.start()
    time.sleep(0.05)
    assert not found
    write(ExportWriter(settings(tmp_path)), waiting)
    reader.join(20)
    assert torch.equal(found[0]["hidden_states"], rows_of())
    # vLLM's own reader opens the lock file: it stays until the reader removes it.
    with open(path + files.LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    files.remove(path, keep_hidden_states=True)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    files.remove(path)
    files.remove(path)
    assert os.listdir(tmp_path) == []


def test_two_exports_to_one_path_do_not_wait_for_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    lock = files.hold_lock(path)
    with pytest.raises(BlockingIOError):
        files.hold_lock(path)
    os.close(lock)
    os.close(files.hold_lock(path))


def test_a_lock_survives_those_who_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ls` holds it for the moment in which it asks."""
    path, real, busy = str(tmp_path / "a.safetensors"), fcntl.flock, [True] * 6

    def flock(descriptor: int, kind: int) -> None:
        if busy:
            busy.pop()
            raise BlockingIOError
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    os.close(files.hold_lock(path))
    assert not busy


def test_a_file_system_without_locks_costs_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="no locks"):
            files.hold_lock(str(tmp_path / "a.safetensors"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_removed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write(ExportWriter(settings(tmp_path)), export(path))
    os.utime(path, (1, 1))

    def unlink(path: str) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        assert files.tidy(str(tmp_path), 60) == path.stat().st_size
    assert files.tidy(str(tmp_path), 60) == 0


def test_a_lock_that_was_removed_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = str(tmp_path / "a.safetensors"), fcntl.flock
    left = [path + files.LOCK] * 2

    def flock(descriptor: int, kind: int) -> None:
        if left:
            os.unlink(left.pop())
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = files.hold_lock(path)
    assert os.path.samestat(os.fstat(lock), os.stat(path + files.LOCK))
    os.close(lock)


def test_what_lies_where_the_lock_goes_neither_blocks_nor_leads_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    os.mkfifo(path + files.LOCK)
    with pytest.raises(OSError, match="No such device"):
        files.hold_lock(path)
    os.unlink(path + files.LOCK)
    os.symlink(tmp_path / "elsewhere", path + files.LOCK)
    with pytest.raises(OSError, match="symbolic links"):
        files.hold_lock(path)
    assert not (tmp_path / "elsewhere").exists()


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(ExportWriter(settings(tmp_path)), export(path))
    found = files.load(str(path))
    os.truncate(path, 0)
    assert torch.equal(found["hidden_states"], rows_of())


def test_odd_things_in_the_directory_do_not_stop_exports(tmp_path: Path) -> None:
    ours = tmp_path / "old.safetensors"
    write(ExportWriter(settings(tmp_path)), export(ours))
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    for name in ("a.safetensors", "b.safetensors.lock", "c.safetensors.error"):
        (tmp_path / name).mkdir()
    (tmp_path / "d.safetensors.lock").symlink_to(tmp_path)
    with open(tmp_path / "e.safetensors", "wb") as sparse:
        sparse.truncate(1 << 40)
    in_work = tmp_path / ".f.safetensors.x.tmp"
    in_work.touch()
    for name in os.listdir(tmp_path):
        os.utime(tmp_path / name, (1, 1), follow_symlinks=False)
    os.utime(in_work, (time.time() - 600,) * 2)
    before = set(os.listdir(tmp_path))
    new = tmp_path / "new.safetensors"
    write(ExportWriter(settings(tmp_path, ttl=60)), export(new))
    assert torch.equal(files.load(str(new))["hidden_states"], rows_of())
    assert before - set(os.listdir(tmp_path)) == {ours.name}


def test_a_reader_hears_why_there_is_no_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError):
        files.load(path)
    bad = rows_of()
    bad[3, 1, 2] = float("nan")
    write(ExportWriter(settings(tmp_path)), export(path, rows=bad, locked=True))
    with pytest.raises(ExtractionError, match="row of token 3 is zero or not finite"):
        files.load(path, timeout=1)
    assert not os.path.exists(path)
    # Another attempt at the same place replaces the marker.
    write(ExportWriter(settings(tmp_path)), export(path, locked=True))
    assert torch.equal(files.load(path)["hidden_states"], rows_of())


def test_a_failed_write_leaves_a_marker_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(tensors: Any, name: str, metadata: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "save_file", full_disk)
    path = tmp_path / "a.safetensors"
    write(ExportWriter(settings(tmp_path, max_size="1MiB")), export(path, locked=True))
    with pytest.raises(ExtractionError, match="no space left"):
        files.load(str(path), timeout=1)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors.error", "a.safetensors.lock"]


def test_a_reader_is_released_even_if_nothing_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "a.safetensors"
    one = export(path, locked=True)
    files.remove(str(path))
    path.parent.rmdir()
    path.parent.touch()
    write(ExportWriter(settings(tmp_path)), one)
    assert one.lock is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one.lock)


@pytest.mark.parametrize(
    ("place", "value", "layers", "accepted"),
    [
        ((9, 2), 0.0, 3, True),
        ((9,), 0.0, 3, False),
        ((0,), 0.0, 1, True),  # embeddings
        ((5, 0, 1), float("inf"), 3, False),
        ((5, 0, 1), float("nan"), 1, False),
    ],
)
def test_the_screen(place: tuple[int, ...], value: float, layers: int, accepted: bool) -> None:
    rows = rows_of(layers=layers)
    assert screen(rows, may_be_zero=layers == 1) is None
    rows[place] = value
    assert (screen(rows, may_be_zero=layers == 1) is None) is accepted


# ---- bounds -------------------------------------------------------------------------------------


def test_memory_is_bounded_but_one_file_always_fits(tmp_path: Path) -> None:
    writer = ExportWriter(settings(tmp_path, max_queued_size="1000B"))
    assert writer.admit(5000)
    assert not writer.admit(1)
    one = export(tmp_path / "a.safetensors", rows=torch.ones(5000 // 96 + 1, 3, 8).float())
    small = ExportWriter(settings(tmp_path, max_queued_size="1000B"))
    write(small, one)
    assert small.admit(900)
    assert small.admit(100)
    assert not small.admit(1)


def test_the_quota_counts_what_is_there(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(300)}, tmp_path / "someone's.safetensors")
    rows = rows_of(20)
    names = [tmp_path / f"{index}.safetensors" for index in range(4)]
    # With its ids and header, the third would go beyond.
    max_size = 3 * rows.nbytes + 3000
    limited = settings(tmp_path, max_size=f"{max_size}B", num_writer_threads=1)
    writer = ExportWriter(limited)
    write(writer, *(export(name, rows=rows) for name in names))
    written = [name for name in names if name.exists()]
    counts = {"written": len(written), "refused": 4 - len(written)}
    assert writer.take_counts() == (counts, len(written) * rows.nbytes)
    assert writer.take_counts() == ({}, 0)
    assert written == names[: len(written)]
    assert len(written) == 2
    assert sum(entry.stat().st_size for entry in tmp_path.glob("*.safetensors")) <= max_size
    with pytest.raises(ExtractionError, match="max_size"):
        files.load(str(names[3]))
    # Room is made by readers, also those of an engine that is no more.
    for name in written:
        files.remove(str(name))
    write(ExportWriter(limited), export(names[3], rows=rows))
    assert torch.equal(files.load(str(names[3]))["hidden_states"], rows)


def test_old_files_of_ours_go_when_another_is_written(tmp_path: Path) -> None:
    old = [tmp_path / f"old{index}.safetensors" for index in range(3)]
    write(ExportWriter(settings(tmp_path)), *(export(path, locked=True) for path in old[:2]))
    files.write_error(str(old[2]), "reason")
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"half")
    for name in (".x.safetensors.k3.tmp", "notes.txt", "model.safetensors.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors.error").touch()
    for entry in list(tmp_path.iterdir()):
        os.utime(entry, (1, time.time() - (5000 if entry.suffix == ".tmp" else 100)))
    young = [tmp_path / "young.safetensors", tmp_path / "new.safetensors"]
    write(ExportWriter(settings(tmp_path)), export(young[0], locked=True))
    write(ExportWriter(settings(tmp_path, ttl=50)), export(young[1]))
    left = {"broken.safetensors", "model.safetensors", "notes.txt"}
    left |= {"model.safetensors.tmp", "model.safetensors.error"}
    left |= {"new.safetensors", "young.safetensors", "young.safetensors.lock"}
    assert set(os.listdir(tmp_path)) == left


# ---- the extractor ------------------------------------------------------------------------------


@pytest.fixture
def cache() -> torch.Tensor:
    """[blocks, taps, tokens, hidden] as vLLM registers it: a view with a padded block."""
    whole = torch.arange(12 * 4 * BLOCK * HIDDEN).float() + 1
    return whole.reshape(12, 4, BLOCK, HIDDEN)[:, :3]


@pytest.fixture
def make(tmp_path: Path, cache: torch.Tensor) -> Iterator[Callable[..., Extractor]]:
    made: list[Extractor] = []

    def make(writes: bool = True, **keys: Any) -> Extractor:
        layer = LayerSpec("cache_only_layers.4", BLOCK, BLOCK, 0, "float32", FULL, 1)
        made.append(Extractor(settings(tmp_path, **keys), TAPS, layer, cache, writes))
        return made[-1]

    yield make
    for extractor in made:
        extractor.close()


def op(path: Path, layers: tuple[int, ...] = TAPS, count: int = 10) -> ExportOp:
    return ExportOp("r", str(path), array("q", range(count)).tobytes(), [7, 2, 9], layers)


@pytest.mark.parametrize("layers", [TAPS, (2,), (0, 4)])
def test_rows_come_from_the_named_blocks_in_order(
    make: Callable[..., Extractor], cache: torch.Tensor, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    extractor, path = make(), tmp_path / "a.safetensors"
    extractor.start(ExtractStep(begun={"r": str(path)}))
    assert extractor.take_sent() == set()
    extractor.start(ExtractStep(finished=[op(path, layers)]))
    assert extractor.take_sent() == {"r"}
    assert extractor.take_sent() == set()
    expected = cache[[7, 2, 9]].transpose(1, 2).reshape(-1, 3, HIDDEN)[:10].clone()
    cache.zero_()  # the blocks are given to another request
    file = files.load(str(path), timeout=20)
    taps = [TAPS.index(layer) for layer in layers]
    assert torch.equal(file["hidden_states"], expected[:, taps])
    assert file["token_ids"].tolist() == list(range(10))


def test_other_ranks_let_go_and_write_nothing(
    make: Callable[..., Extractor], tmp_path: Path
) -> None:
    extractor, path = make(writes=False), tmp_path / "a.safetensors"
    extractor.start(ExtractStep(begun={"r": str(path)}, finished=[op(path)]))
    assert extractor.take_sent() == {"r"}
    extractor.start(ExtractStep(dropped=["r"]))
    extractor.close()
    assert os.listdir(tmp_path) == []


def test_a_lock_ends_though_its_file_cannot_be_removed(
    make: Callable[..., Extractor], tmp_path: Path
) -> None:
    extractor, path = make(), str(tmp_path / "a.safetensors")
    extractor.start(ExtractStep(begun={"r": path}))
    (tmp_path / "a.safetensors.error").mkdir()
    assert files.is_being_written(path)
    extractor.start(ExtractStep(dropped=["r"]))
    assert not files.is_being_written(path)


def test_an_id_that_is_used_again_has_a_lock_of_its_own(
    make: Callable[..., Extractor], tmp_path: Path
) -> None:
    extractor, path = make(), tmp_path / "a.safetensors"
    extractor.start(ExtractStep(begun={"r": str(path)}))
    extractor.start(ExtractStep(begun={"r": str(path)}, dropped=["r"]))
    assert files.is_being_written(str(path))
    extractor.start(ExtractStep(finished=[op(path)]))
    assert len(files.load(str(path), timeout=20)["token_ids"]) == 10


def test_what_another_request_left_at_a_path_is_not_this_ones(
    make: Callable[..., Extractor], tmp_path: Path
) -> None:
    extractor, path = make(), tmp_path / "a.safetensors"
    write(ExportWriter(settings(tmp_path)), export(path, locked=True))
    with open(f"{path}{files.LOCK}") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        extractor.start(ExtractStep(begun={"r": str(path)}))
        with pytest.raises(TimeoutError):
            files.load(str(path), timeout=0.02)
    extractor.start(ExtractStep(dropped=["r"]))
    with pytest.raises(FileNotFoundError):
        files.load(str(path))


def test_without_memory_for_rows_the_reader_hears_of_it(
    make: Callable[..., Extractor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, pin_memory: bool | None = None, **__: Any) -> torch.Tensor:
        if pin_memory is None:
            return torch.zeros(0)
        raise RuntimeError("cannot pin")

    extractor, path = make(max_queued_size="1000B"), tmp_path / "a.safetensors"
    for _ in range(3):  # what was admitted is given back
        extractor.start(ExtractStep(begun={"r": str(path)}))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", no_memory)
            extractor.start(ExtractStep(finished=[op(path)]))
        assert extractor.take_sent() == {"r"}
        with pytest.raises(ExtractionError, match="no memory for its rows: cannot pin"):
            files.load(str(path), timeout=20)
    extractor.start(ExtractStep(begun={"r": str(path)}))
    extractor.start(ExtractStep(finished=[op(path)]))
    assert len(files.load(str(path), timeout=20)["token_ids"]) == 10


def test_no_lock_outlives_a_request_without_a_file(
    make: Callable[..., Extractor], tmp_path: Path
) -> None:
    extractor = make()
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in ("aborted", "running")}
    extractor.start(ExtractStep(begun=paths))
    assert len(os.listdir(tmp_path)) == 2
    extractor.start(ExtractStep(dropped=["aborted", "never begun"]))
    assert os.listdir(tmp_path) == ["running.safetensors.lock"]
    extractor.close()
    assert os.listdir(tmp_path) == []


def test_locks_may_be_left_out(make: Callable[..., Extractor], tmp_path: Path) -> None:
    extractor, path = make(use_synchronization_lock=False), tmp_path / "a.safetensors"
    extractor.start(ExtractStep(begun={"r": str(path)}, finished=[op(path)]))
    extractor.close()
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_full_queue_is_an_error_marker_at_once(
    make: Callable[..., Extractor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    save = files.save_file
    monkeypatch.setattr(files, "save_file", lambda *a, **k: (gate.wait(20), save(*a, **k)))
    extractor = make(max_queued_size="1000B")
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for path in paths:
        extractor.start(ExtractStep(begun={"r": str(path)}))
        extractor.start(ExtractStep(finished=[op(path)]))
        assert extractor.take_sent() == {"r"}
    with pytest.raises(ExtractionError, match="max_queued_size"):
        files.load(str(paths[1]), timeout=1)
    gate.set()
    assert len(files.load(str(paths[0]), timeout=20)["token_ids"]) == 10
