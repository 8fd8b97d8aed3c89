"""``lmcache-connector hidden-states`` on directories that anybody may have written to."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

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
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
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
    assert (ended.code, ended.err) == (
        1,
        "error: a tier cannot list what it holds: show a URL that an engine gave\n",
    )
    assert "No such file" in run("ls", tmp_path / "none").err


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
    assert (ended.code, ended.err) == (1, f"error: {out} is there already\n")
    some = tmp_path / "deep" / "some.safetensors"
    assert run("export", place, some, "--layers", "4,0", "--first", 2, "--end", 5).code == 0
    tensors, layers = files.load_with_layers(str(some))
    assert layers == "4,0"
    assert torch.equal(tensors["hidden_states"], rows[2:5][:, [2, 0]])
    assert tensors["token_ids"].tolist() == [102, 103, 104]
    assert os.listdir(some.parent) == ["some.safetensors"]
    for wish in (["--layers", "1"], ["--first", 10], ["--end", 0]):
        ended = run("export", place, tmp_path / "no.safetensors", *wish)
        assert ended.code == 2
        assert "10 tokens and layers 0,2,4" in ended.err
    assert not (tmp_path / "no.safetensors").exists()


def test_a_file_of_another_writer_has_layers_by_number(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file({"hidden_states": rows_of(), "token_ids": torch.arange(10)}, path)
    layers = json.loads(run("show", path, "--json").out)["layers"]
    assert [layer["layer"] for layer in layers] == ["0", "1", "2"]


def test_rm_removes_all_of_an_export(run: Run, tmp_path: Path) -> None:
    path, url = write(tmp_path / "r.safetensors"), write(path_for("memory://rm", "r"))
    os.close(files.hold_lock(path))
    files.write_error(path, "old")
    assert run("rm", path, url).code == 0
    assert os.listdir(tmp_path) == []
    with pytest.raises(TimeoutError):
        files.load(url, timeout=0)


def test_rm_leaves_what_is_being_written_and_what_is_not_ours(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "busy.safetensors")
    lock = files.hold_lock(path)
    ended = run("rm", path)
    assert (ended.code, ended.err) == (1, f"error: {path} is being written\n")
    (tmp_path / "notes.txt").touch()
    assert run("rm", tmp_path / "notes.txt").err.endswith("notes.txt is no export\n")
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    write(tmp_path / "old.safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors")
    for entry in list(tmp_path.iterdir()):
        os.utime(entry, (1, time.time() - 100))
    write(tmp_path / "new.safetensors")
    assert run("rm", tmp_path, "--older-than", 50).code == 0
    left = {"busy.safetensors.lock", "model.safetensors", "notes.txt", "fifo.safetensors"}
    assert set(os.listdir(tmp_path)) == left | {"new.safetensors"}
    os.close(lock)
    assert run("rm", tmp_path, "--older-than", 0).code == 0
    assert set(os.listdir(tmp_path)) == left - {"busy.safetensors.lock"}
