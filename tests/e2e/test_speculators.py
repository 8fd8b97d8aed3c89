"""speculators 0.9 trains on our files: its own client, checks, generator, data loader and model,
beside ``vllm serve`` with the arguments that our backend gives."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load

from lmcache_connector.errors import ExtractionError
from lmcache_connector.hidden_states import files

pytestmark = [
    pytest.mark.engine,
    # What speculators and its dependencies warn of is not ours.
    pytest.mark.filterwarnings("ignore"),
]

BACKEND = "lmcache_connector.hidden_states.speculators"
TAPS = [1, 2, 3, 4]  # the last is the verifier's own, as launch_vllm.py adds it
WIDTH = 128
LENGTHS = [300, 280, 40, 60]
TOO_LONG = 1500  # its rows exceed MAX_SIZE
MAX_SIZE = "2MiB"
SEQUENCE = 512


@pytest.fixture(scope="module")
def backend() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import speculators  # noqa: F401

        from lmcache_connector.hidden_states import speculators as ours

        yield ours


class Served:
    """A server that extracts, a data set in speculators' form, and what was configured how."""

    def __init__(self, server: Any, directory: Path, data: Path, samples: list[list[int]]) -> None:
        self.server, self.directory, self.data, self.samples = server, directory, data, samples
        self.model = str(server.model)
        self.url = f"http://127.0.0.1:{server.port}/v1"

    def arguments(self) -> argparse.Namespace:
        """What ``speculators train`` makes of its command line."""
        from speculators.train.config import TrainConfig

        config = TrainConfig.resolve(
            [
                *("--verifier-name-or-path", self.model, "--data-path", str(self.data)),
                *("--hidden-states-backend", "lmcache", "--vllm-endpoint", self.url),
                *("--speculator-type", "eagle3", "--target-layer-ids", *map(str, TAPS[:-1])),
                *("--total-seq-len", str(SEQUENCE), "--ttt-steps", "2"),
                *("--draft-attn-impl", "eager", "--loss-implementation", "eager"),
                *("--hidden-states-dtype", "float32", "--train-data-ratio", "0.8"),
            ]
        )
        return argparse.Namespace(**config.flatten())

    def loaders(self, transfer: Any) -> tuple[Any, Any]:
        """Its data loaders, of samples that fit and of one that does not."""
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.dataloader import create_train_val_loaders

        loaders: tuple[Any, Any] = create_train_val_loaders(
            data_path=str(self.data),
            total_seq_len=SEQUENCE,
            hidden_states_dtype=torch.float32,
            transfer=transfer,
            vllm_endpoint=self.url,
            on_missing="generate",
            verifier_name_or_path=self.model,
            request_timeout=60,
            max_retries=0,
            generation_validation_retries=0,
            max_consecutive_generation_failures=3,
            hidden_size=WIDTH,
            num_target_layers=len(TAPS) - 1,
            num_workers=0,
            prefetch_factor=1,
            preprocess=shift_batch,
            train_data_ratio=0.8,
        )
        return loaders

    def restored_tokens(self) -> float:
        return sum(self.server.metric("vllm:lmcache_loaded_tokens_total", "engine").values())


@pytest.fixture(scope="module")
def served(
    backend: ModuleType,
    tiny_models: ModuleType,
    vllm_server: ModuleType,
    make_prompt: Callable[..., list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    from datasets import Dataset

    directory = tmp_path_factory.mktemp("rows")
    parser = argparse.ArgumentParser()
    backend.LMCacheBackend.add_launch_args(parser)
    own = {"max_local_cpu_size": "64MiB", "extract_hidden_states": {"max_size": MAX_SIZE}}
    transfer = backend.LMCacheBackend.build_kv_transfer_config(
        parser.parse_args(
            ["--hidden-states-path", str(directory), "--lmcache-config", json.dumps(own)]
        )
    )
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": TAPS}},
    }
    samples = [make_prompt(60 + index, length) for index, length in enumerate(LENGTHS)]
    samples.append(make_prompt(70, TOO_LONG))
    data = tmp_path_factory.mktemp("data")
    dataset = Dataset.from_dict(
        {
            "input_ids": samples,
            "loss_mask": [[place > 9 for place in range(len(ids))] for ids in samples],
            "seq_len": [len(ids) for ids in samples],
        }
    )
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(data))
    model = tiny_models.build("qwen2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        patch.setenv("OMP_WAIT_POLICY", "passive")
        patch.setenv("KMP_BLOCKTIME", "0")
        with vllm_server.VllmServer(
            model.path,
            [
                *("--dtype", model.dtype, "--enforce-eager", "--max-model-len", "2048"),
                *("--speculative-config", json.dumps(speculative)),
                *("--kv-transfer-config", json.dumps(transfer)),
            ],
            tmp_path_factory.mktemp("log") / "log",
        ) as server:
            yield Served(server, directory, data, samples)


# ---- without an engine --------------------------------------------------------------------------

LAUNCHER = """
import argparse, json, sys
from hs_connectors import HiddenStatesBackend
registry = dict(HiddenStatesBackend.registry)
parser = argparse.ArgumentParser()
parser.add_argument("--hidden-states-backend", choices=list(registry))
for each in registry.values():
    each.add_launch_args(parser)
args = parser.parse_args()
print(json.dumps(registry[args.hidden_states_backend].build_kv_transfer_config(args)))
"""


@pytest.mark.parametrize(("how", "place"), [("script", "rows"), ("module", "redis://host:1/0")])
def test_its_programs_know_the_backend(tmp_path: Path, how: str, place: str) -> None:
    """Here one that looks as its launch_vllm.py does: that is not in the wheel."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    program = ["launcher.py"] if how == "script" else ["-m", "launcher"]
    arguments = ["--hidden-states-backend", "lmcache", "--hidden-states-path", place]
    arguments += ["--lmcache-config", '{"server": "ipc:///run/kv"}']
    output = subprocess.run(
        [sys.executable, "-m", BACKEND, *program, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(output) == {
        "kv_connector": "LMCacheHybridConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": "ipc:///run/kv",
            "extract_hidden_states": {
                "shared_storage_path": str(tmp_path / place) if how == "script" else place
            },
        },
    }


def test_its_registry_has_the_backend(backend: ModuleType, tmp_path: Path) -> None:
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
    from speculators.train.config.resolution import build_parser

    known = HiddenStatesBackend.registry["lmcache"]
    assert known is backend.LMCacheBackend
    arguments = ["--hidden-states-backend", "lmcache", "--hidden-states-path", str(tmp_path)]
    transfer = known.from_train_args(build_parser().parse_args(arguments), "/data")
    assert isinstance(transfer, HiddenStatesTransfer)
    # A data loader's processes get a copy.
    assert pickle.loads(pickle.dumps(transfer)).hidden_states_path == tmp_path


@pytest.mark.parametrize("name", ["file", "lmcache"])
def test_its_readers_wait_for_the_lock_and_delete_it(
    backend: ModuleType, tmp_path: Path, name: str
) -> None:
    from hs_connectors import FileTransfer

    transfer = (FileTransfer if name == "file" else backend.LMCacheTransfer)(tmp_path)
    path = str(tmp_path / "request.safetensors")
    rows, ids = torch.ones(5, 4, 8), torch.arange(5)
    lock = files.hold_lock(path)
    started = time.monotonic()

    def write() -> None:
        time.sleep(0.3)
        files.write(path, rows, ids, "1,2,3,4")
        files.os.close(lock)

    writer = threading.Thread(target=write)
    writer.start()
    found = transfer.get_generated({"hidden_states_path": path})
    assert time.monotonic() - started > 0.3
    writer.join()
    assert torch.equal(found["hidden_states"], rows)
    assert {each.name for each in tmp_path.iterdir()} == {"request.safetensors"}
    transfer.delete(path)
    assert not list(tmp_path.iterdir())


def test_an_error_marker_is_no_hang(backend: ModuleType, tmp_path: Path) -> None:
    from hs_connectors import FileTransfer

    path = str(tmp_path / "request.safetensors")
    answer = {"hidden_states_path": path}
    transfer = backend.LMCacheTransfer(tmp_path)
    files.os.close(files.hold_lock(path))
    files.write_error(path, "the disk is full")
    with pytest.raises(ExtractionError, match="the disk is full"):
        transfer.get_generated(answer)
    # Its own backend sees that there is no file.
    assert FileTransfer(tmp_path).get_generated(answer) is None
    transfer.delete(path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        transfer.get_generated(answer)


# ---- with a real engine -------------------------------------------------------------------------


def test_its_model_trains_a_step(served: Served) -> None:
    """Online: rows are generated for the batch and their files are gone afterwards. In the second
    epoch they are restored."""
    from hs_connectors import HiddenStatesBackend
    from speculators.model import SpeculatorModel
    from speculators.train import cli
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    arguments = served.arguments()
    kind = SpeculatorModel.registry["eagle3"]
    target_map, draft_map, num_words = cli.parse_vocab_mappings(arguments)
    torch.manual_seed(0)
    model = cli.build_draft_model(arguments, kind, draft_map, target_map, num_words)
    assert model.target_layer_ids == TAPS[:-1]
    known = HiddenStatesBackend.registry[arguments.hidden_states_backend]
    loader, _ = served.loaders(known.from_train_args(arguments, arguments.data_path))
    batches = list(loader)
    assert not list(served.directory.iterdir())
    assert [batch.pop("error_records") for batch in batches] == [0] * len(batches)
    assert not any("__recovery__" in batch for batch in batches)
    seen = torch.cat([batch["input_ids"][batch["document_ids"] >= 0] for batch in batches])
    assert sorted(seen.tolist()) == sorted(t for ids in served.samples[:-1] for t in ids[1:])

    settings = TrainerConfig(lr=1e-3, num_epochs=1, save_path="")
    optimizers = build_optimizers(model, settings)
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    options, _ = kind.get_trainer_kwargs(**vars(arguments))
    _, loss, _ = model(**batches[0], **options)
    assert loss.isfinite()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    learned = {name for name, values in model.named_parameters() if values.requires_grad}
    changed = {n for n, values in model.named_parameters() if not torch.equal(values, before[n])}
    assert changed == learned != set()
    _, after, _ = model(**batches[0], **options)
    assert after < loss

    # vLLM forgets its own blocks: what is found again is ours.
    served.server.reset_prefix_cache()
    restored = served.restored_tokens()
    for first, second in zip(batches, loader, strict=True):
        for name in ("hidden_states", "verifier_last_hidden_states"):
            torch.testing.assert_close(second[name], first[name], rtol=1e-3, atol=1e-3)
    assert served.restored_tokens() - restored == 2 * 256
    assert not list(served.directory.iterdir())


def test_its_client_compares_the_prompt(served: Served) -> None:
    import openai
    from speculators.data_generation import vllm_client

    with openai.OpenAI(base_url=served.url, api_key="none") as client:
        ids = served.samples[2]
        path, params = vllm_client.generate_hidden_states(client, served.model, {"input_ids": ids})
        answer = client.completions.create(
            model=served.model, prompt=ids, max_tokens=1, extra_body={"return_token_ids": True}
        )
    assert params["hidden_states_path"] == path
    other, _ = vllm_client.extract_output(answer, ids)
    assert Path(other).parent == served.directory
    assert other != path
    with pytest.raises(vllm_client.InvalidResponseError, match="mismatch"):
        vllm_client.extract_output(answer, [*ids[:-1], ids[-1] + 1])
    for each in (path, other):
        assert files.load(each)["token_ids"].tolist() == ids
        files.remove(each)


def test_what_the_engine_gives_up_is_a_failed_sample(backend: ModuleType, served: Served) -> None:
    from speculators.train.recovery import SampleUnavailable

    _, loader = served.loaders(backend.LMCacheTransfer(served.data / "none"))
    sample = loader.dataset[0]
    assert isinstance(sample, SampleUnavailable)
    assert "max_size" in sample.reason
    assert not list(served.directory.iterdir())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda rows: rows["hidden_states"][7].fill_(float("nan")), "non-finite"),
        (lambda rows: rows["token_ids"][7].add_(1), "Token ids don't match"),
        (lambda rows: rows.update(hidden_states=rows["hidden_states"][:-1]), "Sequence length"),
    ],
    ids=["not finite", "other ids", "short"],
)
def test_it_refuses_damaged_rows(
    backend: ModuleType,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[dict[str, torch.Tensor]], Any],
    words: str,
) -> None:
    from speculators.train.recovery import SampleUnavailable

    loader, _ = served.loaders(backend.LMCacheTransfer(served.data / "none"))
    whole = files.load

    def damaged(path: str) -> dict[str, torch.Tensor]:
        rows = whole(path)
        damage(rows)
        return rows

    monkeypatch.setattr(files, "load", damaged)
    sample = loader.dataset[2]
    assert isinstance(sample, SampleUnavailable)
    assert words in sample.reason
    monkeypatch.undo()
    assert len(loader.dataset[2]["input_ids"]) == LENGTHS[2]
    assert not list(served.directory.iterdir())


def test_its_offline_generator_keeps_the_files(
    backend: ModuleType, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves them under their sample's number, and makes truncated ones anew."""
    from speculators.cli import generate_offline_data as module

    generate = module if callable(module) else module.generate_offline_data
    out = tmp_path / "kept"
    monkeypatch.setattr(sys.modules[generate.__module__], "setup_root_logger", lambda: None)

    def run() -> dict[str, int]:
        generate(
            endpoint=served.url,
            preprocessed_data=str(served.data),
            output=str(out),
            concurrency=1,
            validate_outputs=True,
            max_retries=0,
            max_consecutive_errors=3,
        )
        return {each.name: each.stat().st_ino for each in out.iterdir()}

    first = run()
    # The last one's error marker: it was no file and no hang.
    assert sorted(first) == [f"hs_{index}.safetensors" for index in range(len(LENGTHS))]
    (marker,) = served.directory.iterdir()
    assert marker.name.endswith(files.ERROR)
    marker.unlink()
    kept = [load((out / name).read_bytes()) for name in sorted(first)]
    for ids, rows in zip(served.samples, kept, strict=False):
        assert rows["token_ids"].tolist() == ids
        assert rows["hidden_states"].shape == (len(ids), len(TAPS), WIDTH)
    broken = out / "hs_1.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    second = run()
    assert {name for name in first if first[name] != second[name]} == {"hs_1.safetensors"}
    again = load(broken.read_bytes())
    torch.testing.assert_close(again["hidden_states"], kept[1]["hidden_states"])
    # What is kept is read by the data loader without asking the engine.
    loader, _ = served.loaders(backend.LMCacheTransfer(out))
    monkeypatch.setattr(loader.dataset, "_setup_client", None)
    sample = loader.dataset[1]
    assert torch.equal(sample["verifier_last_hidden_states"], again["hidden_states"][:, -1])
    for each in served.directory.iterdir():
        each.unlink()
