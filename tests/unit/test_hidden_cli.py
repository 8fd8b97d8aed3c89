"""``lmcache-connector hidden-states`` on directories that anybody may have written to."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from lmcache_connector.errors import ExtractionError
from lmcache_connector.hidden_states import files
from lmcache_connector.hidden_states.settings import path_for
from lmcache_connector.observability import cli

ESCAPE = "\x1b[31m"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ended:
        argv = ["lmcache-connector", "hidden-states", *map(str, arguments)]
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert all(letter.isprintable() or letter == "\n" for letter in out + err)
        return Ended(int(ended.value.code or 0), out, err)

    return call


def rows_of(count: int = 10, layers: int = 3, width: int = 8) -> torch.Tensor:
    return torch.arange(1, count * layers * width + 1).reshape(count, layers, width).bfloat16()


def write(path: Path | str, rows: torch.Tensor | None = None, layers: str = "0,2,4") -> str:
    rows = rows_of() if rows is None else rows
    files.write(str(path), rows, torch.arange(100, 100 + len(rows)), layers)
    return str(path)


def listed(run: Run, directory: Path) -> dict[str, dict[str, Any]]:
    ended = run("ls", directory, "--json")
    assert ended.code == 0
    return {facts["request"]: facts for facts in json.loads(ended.out)["exports"]}


HOSTILE = {
    "empty": b"",
    "cut": b"\x10\0\0",
    "huge header": struct.pack("<Q", 1 << 60),
    "long header": struct.pack("<Q", 90 << 20) + b"{",
    "no json": struct.pack("<Q", 8) + b"\xff" * 8,
    "outside": struct.pack("<Q", 77)
    + b'{"hidden_states":{"dtype":"BF16","shape":[9,9,9],"data_offsets":[0,1458]}}   ',
    f"name {ESCAPE}\n": b"x",
}


def test_ls_tells_the_state_of_each(run: Run, tmp_path: Path) -> None:
    assert run("ls", tmp_path).out == "exports: none\n"
    write(tmp_path / "ready.safetensors")
    os.utime(tmp_path / "ready.safetensors", (1, time.time() - 3600))
    locks = [files.hold_lock(str(tmp_path / f"{name}.safetensors")) for name in ("busy", "left")]
    os.close(locks[1])
    files.write_error(str(tmp_path / "failed.safetensors"), f"no room {ESCAPE}\n")
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    save_file(
        {"hidden_states": torch.ones(3), "token_ids": torch.ones(3)}, tmp_path / "f.safetensors"
    )
    (tmp_path / "notes.txt").touch()
    os.mkfifo(tmp_path / "fifo.safetensors")
    os.mkfifo(tmp_path / "pipes.safetensors.error")
    os.mkfifo(tmp_path / "pipes.safetensors.lock")
    (tmp_path / "folder.safetensors").mkdir()
    found = listed(run, tmp_path)
    ready = found["ready"]
    assert 3600 <= ready.pop("age_seconds") < 3700
    assert ready.pop("size_bytes") == (tmp_path / "ready.safetensors").stat().st_size
    what = {"tokens": 10, "layers": "0,2,4", "hidden": 8, "dtype": "BF16", "state": "ready"}
    assert ready == {"request": "ready", **what}
    assert found["busy"]["state"] == "being written"
    assert found["failed"]["state"].endswith("no room ?[31m?")
    for name in ("left", "model", "f", "fifo", "pipes", "folder"):
        assert found[name]["state"].startswith("failed: "), name
    assert len(found) == 9
    table = run("ls", tmp_path).out
    assert "│ ready" in table
    assert "│ being written" in table
    os.close(locks[0])


def test_hostile_files_are_told_in_one_line(run: Run, tmp_path: Path) -> None:
    for name, content in HOSTILE.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    (tmp_path / os.fsdecode(b"\xff\xfe.safetensors")).write_bytes(b"x")
    (tmp_path / f"reason{ESCAPE}.safetensors.error").write_bytes(b"\xff\x1b" * 10_000)
    write(tmp_path / "layers.safetensors", layers=ESCAPE * 200)
    found = listed(run, tmp_path)
    assert len(found) == len(HOSTILE) + 3
    assert found.pop("layers")["state"] == "ready"
    assert all(facts["state"].startswith("failed: ") for facts in found.values())
    assert run("ls", tmp_path).code == 0
    for name in os.listdir(tmp_path):
        path = (tmp_path / name.removesuffix(".error")).as_posix()
        for command in (["show", path], ["export", path, tmp_path / "out.safetensors"]):
            ended = run(*command)
            if name == "layers.safetensors":
                assert ended.code == 0
            else:
                assert (ended.code, ended.err[:7], ended.err.count("\n")) == (1, "error: ", 1)


def test_ls_of_a_tier_or_of_nothing_says_so(run: Run, tmp_path: Path) -> None:
    ended = run("ls", "redis://host:1/0")
    assert ended.code == 1
    assert ended.err.endswith("a tier cannot list what it holds\n")
    for place in ("none", "file"):
        (tmp_path / "file").touch()
        for command in (["ls", place], ["rm", place, "--older-than", 5]):
            ended = run(*command)  # relative: it is told where that is
            assert ended.code == 1
            why = "give that of shared_storage_path; a tier cannot list what it holds"
            assert ended.err.endswith(f"there is no directory {tmp_path}/{place}: {why}\n")


def test_relative_paths_are_those_of_the_working_directory(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "rows" / "r.safetensors")
    assert json.loads(run("ls", "rows", "--json").out)["exports"][0]["state"] == "ready"
    assert run("show", "rows/r.safetensors").code == 0
    assert run("export", "rows/r.safetensors", "rows/out.safetensors").code == 0
    assert run("rm", "rows/r.safetensors").out == "exports removed: 1\n"
    assert os.listdir(tmp_path / "rows") == ["out.safetensors"]
    assert run("rm", "rows", "--older-than", 0).out == "exports removed: 1\n"
    missing = f"there is no {tmp_path}/rows/r.safetensors, and nobody is writing it"
    for command in ("show", "export"):
        ended = run(command, "rows/r.safetensors", *["new"] * (command == "export"))
        assert (ended.code, ended.err) == (
            1,
            f"error: {missing}: it was removed, or is elsewhere\n",
        )


@pytest.mark.parametrize("by", ["path", "url"])
def test_show_tells_what_is_in_it(run: Run, tmp_path: Path, by: str) -> None:
    rows = rows_of(4)
    rows[1, 0] = 0
    rows[2, 1, 3] = float("inf")
    place = str(tmp_path / "r.safetensors") if by == "path" else path_for("memory://show", "r")
    write(place, rows)
    shown = json.loads(run("show", place, "--json").out)
    ids = [100, 101, 102, 103]
    assert shown["rows"] == [{"shape": [4, 3, 8], "dtype": "bfloat16", "first_ids": ids}]
    layers = {layer.pop("layer"): layer for layer in shown["layers"]}
    assert [(x["zero_rows"], x["not_finite_rows"]) for x in layers.values()] == [
        (1, 0),
        (0, 1),
        (0, 0),
    ]
    norms = rows[:, 2].double().norm(dim=-1)
    expected = {"min_norm": norms[0], "mean_norm": norms.mean(), "max_norm": norms[3]}
    for name, norm in expected.items():
        assert layers["4"][name] == pytest.approx(float(norm))
    table = run("show", place).out
    assert "bfloat16" in table
    assert f"{float(norms[0]):.4g}" in table


@pytest.mark.parametrize("by", ["path", "url"])
def test_export_cuts_what_is_asked_for(run: Run, tmp_path: Path, by: str) -> None:
    place = str(tmp_path / "r.safetensors") if by == "path" else path_for("memory://export", "r")
    out, rows = tmp_path / "out.safetensors", rows_of()
    write(place, rows)
    assert run("export", place, out).code == 0
    assert torch.equal(files.load(str(out))["hidden_states"], rows)
    ended = run("export", place, out)
    assert (ended.code, ended.err) == (1, f"error: {out} is there already, or is no path\n")
    assert "or is no path" in run("export", place, "").err
    assert run("export", place, "redis://host:1/0").code == 1
    some = tmp_path / "deep" / "some.safetensors"
    assert run("export", place, some, "--layers", "4,0", "--first", 2, "--end", 5).code == 0
    tensors, layers = files.load_with_layers(str(some))
    assert layers == "4,0"
    assert torch.equal(tensors["hidden_states"], rows[2:5][:, [2, 0]])
    assert tensors["token_ids"].tolist() == [102, 103, 104]
    assert os.listdir(some.parent) == ["some.safetensors"]
    assert run("export", place, tmp_path / "last.safetensors", "--first", 9, "--end", 10).code == 0
    assert files.load(str(tmp_path / "last.safetensors"))["token_ids"].tolist() == [109]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("--layers 1", "--layers 1: it has 0,2,4, name each once"),
        ("--layers 0,x", "--layers 0,x: it has 0,2,4, name each once"),
        ("--layers 2,2", "--layers 2,2: it has 0,2,4, name each once"),
        ("--layers 2,", "--layers 2,: it has 0,2,4, name each once"),
        ("--first 10", "--first 10 --end 10 is no range of 10 tokens"),
        ("--first -1", "--first -1 --end 10 is no range of 10 tokens"),
        ("--end 11", "--first 0 --end 11 is no range of 10 tokens"),
        ("--end 0", "--first 0 --end 0 is no range of 10 tokens"),
        ("--end -2", "--first 0 --end -2 is no range of 10 tokens"),
        ("--first 5 --end 5", "--first 5 --end 5 is no range of 10 tokens"),
        ("--first 5 --end 3", "--first 5 --end 3 is no range of 10 tokens"),
    ],
)
def test_what_export_cannot_cut_is_named(run: Run, tmp_path: Path, wish: str, words: str) -> None:
    place, out = write(tmp_path / "r.safetensors"), tmp_path / "no.safetensors"
    ended = run("export", place, out, *wish.split())
    assert ended.code == 2
    assert words in " ".join(ended.err.replace("│", " ").split())
    assert not out.exists()


def test_a_copy_that_does_not_fit_the_disk_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    place = write(tmp_path / "r.safetensors")
    monkeypatch.setattr(files, "save_file", full_disk)
    ended = run("export", place, "out.safetensors")
    path = f"{tmp_path}/out.safetensors"
    assert ended.err == f"error: {path} cannot be written: No space left on device\n"
    assert os.listdir(tmp_path) == ["r.safetensors"]


def test_a_file_of_another_writer_has_layers_by_number(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file({"hidden_states": rows_of(), "token_ids": torch.arange(10)}, path)
    layers = json.loads(run("show", path, "--json").out)["layers"]
    assert [layer["layer"] for layer in layers] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("said", "count", "names"),
    [
        (",".join(map(str, range(50, 250))), 200, [*map(str, range(50, 250))]),
        ("7,7", 2, ["0", "1"]),
        ("7,7,8", 2, ["0", "1"]),
        ("", 1, ["0"]),
        ("7,", 2, ["0", "1"]),
    ],
)
def test_names_of_layers_that_are_not_one_each_are_numbers(
    run: Run, tmp_path: Path, said: str, count: int, names: list[str]
) -> None:
    place = write(tmp_path / "r.safetensors", rows_of(2, count, 1), said)
    layers = json.loads(run("show", place, "--json").out)["layers"]
    assert [layer["layer"] for layer in layers] == names


OURS = {"BF16", "F16", "F32", "F64"}
THEIRS = ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64", "F99", "F4"]
THEIRS += ["F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]


def told_in_one_line(run: Run, directory: Path, name: str) -> bool:
    """Whether it is an export; all commands agree on that, and none fails otherwise."""
    path, out = str(directory / f"{name}.safetensors"), directory / "copy"
    state = listed(run, directory)[name]["state"]
    assert run("ls", directory).code == 0
    for command in (["show", path], ["show", path, "--json"], ["export", path, out]):
        ended = run(*command)
        assert ended.code == int(state != "ready"), (command, ended, state)
        if ended.code:
            assert (ended.err[:7], ended.err.count("\n")) == ("error: ", 1)
    out.unlink(missing_ok=True)
    return bool(state == "ready")


def packed(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors_of(
    dtype: str, ids: str = "I64", shape: Sequence[int] = (4, 2, 8), ids_shape: Sequence[int] = (4,)
) -> bytes:
    def size(kind: str, dims: Sequence[int]) -> int:
        bits = {"BOOL": 8, "BF16": 16}.get(kind) or int(re.findall(r"\d+", kind)[0])
        return math.prod(dims) * bits // 8

    end = size(dtype, shape)
    whole = end + size(ids, ids_shape)
    rows = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    token_ids = {"dtype": ids, "shape": ids_shape, "data_offsets": [end, whole]}
    return packed({"hidden_states": rows, "token_ids": token_ids}, b"\x40" * whole)


@pytest.mark.parametrize("dtype", [*sorted(OURS), *THEIRS])
def test_only_dtypes_of_models_are_hidden_states(run: Run, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(tensors_of(dtype))
    assert told_in_one_line(run, tmp_path, "r") == (dtype in OURS)
    path.write_bytes(tensors_of("F32", ids=dtype))
    assert told_in_one_line(run, tmp_path, "r") == (dtype == "I64")
    path.write_bytes(tensors_of(dtype))
    if dtype in OURS:
        assert files.load(str(path))["hidden_states"].shape == (4, 2, 8)
    else:
        with pytest.raises(ExtractionError, match="holds no hidden states"):
            files.load(str(path))


@pytest.mark.parametrize(
    ("shape", "ids_shape"),
    [
        ((), ()),
        ((4,), (4,)),
        ((4, 2), (4,)),
        ((4, 2, 8, 1), (4,)),
        ((4, 2, 8), (3,)),
        ((4, 2, 8), ()),
        ((4, 2, 8), (4, 1)),
        ((4, 2, 8), (1, 4)),
        ((0, 2, 8), (0,)),
        ((4, 0, 8), (4,)),
        ((4, 2, 0), (4,)),
    ],
)
def test_only_rows_by_token_and_layer_are_hidden_states(
    run: Run, tmp_path: Path, shape: tuple[int, ...], ids_shape: tuple[int, ...]
) -> None:
    content = tensors_of("F32", shape=shape, ids_shape=ids_shape)
    (tmp_path / "r.safetensors").write_bytes(content)
    assert not told_in_one_line(run, tmp_path, "r")


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_damage_is_a_traceback(run: Run, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "r.safetensors"
    content = bytearray(write(path) and path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        # Most of what can go wrong is in the header.
        limit = data.draw(st.sampled_from([8, 300, len(content)]))
        place = data.draw(st.integers(0, min(limit, len(content))))
        new = data.draw(st.binary(max_size=4) | st.sampled_from([b"-1", b"9" * 30, b"{[", b"\0"]))
        content[place : place + data.draw(st.integers(0, 4))] = new
    path.write_bytes(content[: data.draw(st.none() | st.integers(0, len(content)))])
    told_in_one_line(run, tmp_path, "r")


def test_a_sparse_file_is_told_in_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert not told_in_one_line(run, tmp_path, "r")
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this kernel gives memory that it does not have")
    # 2 TiB of rows: more than there is memory.
    rows = {"dtype": "F32", "shape": [1 << 19, 1 << 10, 1 << 10], "data_offsets": [0, 1 << 41]}
    end = (1 << 41) + (8 << 19)
    ids = {"dtype": "I64", "shape": [1 << 19], "data_offsets": [1 << 41, end]}
    header = packed({"hidden_states": rows, "token_ids": ids}, b"")
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + end)
    assert not told_in_one_line(run, tmp_path, "r")


def test_rm_removes_all_of_an_export(run: Run, tmp_path: Path) -> None:
    path, url = write(tmp_path / "r.safetensors"), write(path_for("memory://rm", "r"))
    os.close(files.hold_lock(path))
    files.write_error(path, "old")
    assert run("rm", path, url) == (0, "exports removed: 2\n", "")
    assert os.listdir(tmp_path) == []
    with pytest.raises(TimeoutError):
        files.load(url, timeout=0)
    ended = run("rm", path)
    assert (ended.code, ended.out) == (1, "exports removed: 0\n")
    assert ended.err == f"error: cannot remove {path}: it is not there\n"
    # All that is left of an engine that ended.
    os.close(files.hold_lock(path))
    assert run("rm", path) == (0, "exports removed: 1\n", "")
    files.write_error(path, "no room")
    assert run("rm", path) == (0, "exports removed: 1\n", "")
    assert os.listdir(tmp_path) == []


def test_rm_leaves_what_is_not_ours(run: Run, tmp_path: Path) -> None:
    """And tells of each, and removes the others."""
    save_file({"lmcache_connector": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "marked.safetensors").write_bytes(b"x")
    files.write_error(str(tmp_path / "marked.safetensors"), "no room")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "notes.error").touch()
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    before = sorted(os.listdir(tmp_path))
    foreign = [tmp_path / name for name in before if not name.endswith("safetensors.error")]
    ours = [write(tmp_path / f"{name}.safetensors") for name in ("a", "z")]
    ended = run("rm", ours[0], *foreign, ours[1])
    assert (ended.code, ended.out) == (1, "exports removed: 2\n")
    why = "it is not an export of this package: remove it yourself (from a directory: --older-than)"
    assert ended.err.splitlines() == [f"error: cannot remove {path}: {why}" for path in foreign]
    assert sorted(os.listdir(tmp_path)) == before


def test_rm_leaves_what_is_being_written_or_young(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "busy.safetensors")
    lock = files.hold_lock(path)
    ended = run("rm", path)
    assert ended.err == f"error: cannot remove {path}: it is being written\n"
    assert (ended.code, ended.out) == (1, "exports removed: 0\n")
    (tmp_path / "notes.txt").touch()
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    old = write(tmp_path / "old.safetensors")
    os.close(files.hold_lock(old))
    files.write_error(str(tmp_path / "failed.safetensors"), "no room")
    os.mkfifo(tmp_path / "fifo.safetensors")
    for entry in list(tmp_path.iterdir()):
        os.utime(entry, (1, time.time() - 100))
    write(tmp_path / "new.safetensors")
    assert run("rm", tmp_path, "--older-than", 50) == (0, "exports removed: 2\n", "")
    left = {"busy.safetensors.lock", "model.safetensors", "notes.txt", "fifo.safetensors"}
    assert set(os.listdir(tmp_path)) == left | {"new.safetensors"}
    os.close(lock)
    assert run("rm", tmp_path, "--older-than", 0) == (0, "exports removed: 2\n", "")
    assert set(os.listdir(tmp_path)) == left - {"busy.safetensors.lock"}


def test_what_cannot_be_removed_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a directory that one may not write to; but not what a reader removed meanwhile."""
    places = [write(tmp_path / f"{name}.safetensors") for name in ("kept", "gone", "r")]
    unlink = os.unlink

    def refusing(path: str | Path) -> None:
        if "kept" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path)
        if "gone" in str(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(os, "unlink", refusing)
    why = f"error: cannot remove {places[0]}: [Errno 13] Permission denied: '{places[0]}'\n"
    assert run("rm", tmp_path, "--older-than", 0) == (1, "exports removed: 2\n", why)
    write(places[2])
    ended = run("rm", places[0], places[2])
    assert (ended.code, ended.out) == (1, "exports removed: 1\n")
    assert ended.err.startswith(f"error: cannot remove {places[0]}: [Errno 13]")
    assert os.listdir(tmp_path) == ["kept.safetensors"]
