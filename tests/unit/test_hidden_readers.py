"""Programs that read exported hidden states: the example, and what speculators is run through."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from lmcache_connector.hidden_states import files

ROOT = Path(__file__).resolve().parents[2]
IDS = [5, 6, 7, 8]


class Server(HTTPServer):
    """Answers as vLLM does."""

    answers: dict[str, tuple[int, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = self.server.answers.get(self.path, (404, {"detail": "Not Found"}))
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Not to stderr."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Its answer names ``tmp_path``/r.safetensors."""
    with Server(("127.0.0.1", 0), _Handler) as server:
        params = {"hidden_states_path": str(tmp_path / "r.safetensors")}
        choice = {"prompt_token_ids": IDS}
        server.answers = {
            "/v1/models": (200, {"data": [{"id": "m"}]}),
            "/v1/completions": (200, {"choices": [choice], "kv_transfer_params": params}),
        }
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Ended(NamedTuple):
    code: object
    lines: list[str]


Read = Callable[..., Ended]


@pytest.fixture
def read(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Read:
    """The example's exit status or last words, and the lines that it prints."""

    def call(slash: str = "") -> Ended:
        url = f"http://127.0.0.1:{server.server_port}{slash}"
        monkeypatch.setattr("sys.argv", ["read_hidden_states.py", "--url", url])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples/read_hidden_states.py"), run_name="__main__")
        return Ended(ended.value.code, capsys.readouterr().out.splitlines())

    return call


def rows_of() -> torch.Tensor:
    return torch.arange(1, 4 * 3 * 2 + 1).reshape(4, 3, 2).bfloat16()


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_example_names_layers(read: Read, tmp_path: Path, slash: str) -> None:
    path = tmp_path / "r.safetensors"
    files.write(str(path), rows_of(), torch.tensor(IDS), "1,12,24")
    code, lines = read(slash)
    assert code == 0
    norms = rows_of().float().norm(dim=-1).mean(dim=0).tolist()
    named = zip((1, 12, 24), norms, strict=True)
    assert lines[2:5] == [f"layer {layer}: mean norm {norm:.3f}" for layer, norm in named]
    assert lines[-1] == "tokens are the prompt's: yes"
    assert not path.exists()


def test_the_example_numbers_layers_that_have_no_names(read: Read, tmp_path: Path) -> None:
    tensors = {"hidden_states": rows_of(), "token_ids": torch.tensor(IDS)}
    save_file(tensors, tmp_path / "r.safetensors")
    assert [line.split(":")[0] for line in read().lines[2:5]] == ["layer 0", "layer 1", "layer 2"]


def test_the_example_tells_the_servers_error(server: Server, read: Read) -> None:
    error = {"message": "the prompt is longer than max_model_len", "code": 400}
    server.answers["/v1/completions"] = (400, {"error": error})
    words = str(read().code)
    assert words.startswith("read: ")
    assert "/v1/completions answers HTTP Error 400" in words
    assert "the prompt is longer than max_model_len" in words
    server.answers["/v1/models"] = (200, "<html>")
    assert str(read().code).startswith("read: ")


PROGRAM = "import sys; print('ran', *sys.argv[1:], __name__); sys.exit(3)"


@pytest.fixture
def launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[object, str, str]]:
    """What the module does with a command line: exit status, and what it prints."""
    pytest.importorskip("hs_connectors", reason="the extra of that name is not installed")
    from lmcache_connector.hidden_states import speculators

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hs_program.py").write_text(PROGRAM)
    (tmp_path / "hs_broken.py").write_text("import hs_no_such_module")
    (tmp_path / "hs_package").mkdir()
    (tmp_path / "hs_package" / "__init__.py").write_text("import hs_no_such_module")

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["speculators.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            speculators.main()
        return (ended.value.code, *capsys.readouterr())

    return call


Launch = Callable[..., tuple[object, str, str]]
USAGE = "usage: python -m lmcache_connector.hidden_states.speculators (SCRIPT | -m MODULE) ...\n"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_the_launcher(launch: Launch, option: str) -> None:
    code, out, err = launch(option)
    assert (code, err) == (0, "")
    assert out.startswith(USAGE)


@pytest.mark.parametrize("how", [["hs_program.py"], ["-m", "hs_program"]])
def test_the_launcher_passes_all_arguments_on(launch: Launch, how: list[str]) -> None:
    assert launch(*how, "-h", "--help", "-m") == (3, "ran -h --help -m __main__\n", "")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "cannot run '': no such script"),
        ("no.py", "cannot run 'no.py': no such script"),
        ("-x", "cannot run '-x': no such script"),
        (".", "cannot run '.': no such script"),
        ("-m", "cannot run '': no such module"),
        ("-m hs_no", "cannot run 'hs_no': no such module"),
        ("-m hs_no.sub", "cannot run 'hs_no.sub': No module named 'hs_no'"),
        ("-m json.hs_no", "cannot run 'json.hs_no': no such module"),
        ("-m .json", "cannot run '.json': "),
        ("-m hs_package.sub", "cannot run 'hs_package.sub': No module named 'hs_no_such_module'"),
    ],
)
def test_what_the_launcher_cannot_run_is_told(launch: Launch, arguments: str, why: str) -> None:
    code, out, err = launch(*arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith(why)
    assert err.endswith(f"; {USAGE}")
    assert err.count("\n") == 1


def test_errors_of_the_program_stay_its_own(launch: Launch) -> None:
    for how in (["hs_broken.py"], ["-m", "hs_broken"]):
        with pytest.raises(ModuleNotFoundError, match="hs_no_such_module"):
            launch(*how)
