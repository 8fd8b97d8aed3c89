"""vLLM's extracted hidden states through the connector: rows restored with their KV, and files.

The oracle is the same rows computed cold, and transformers' own forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import servers
import torch

from lmcache_connector.errors import ExtractionError
from lmcache_connector.hidden_states import files, values
from lmcache_connector.hidden_states.settings import SUFFIX

pytestmark = pytest.mark.engine

FAMILIES = ["qwen2", "gptoss", "gemma4", "deepseek_v3"]
# vLLM's DeepSeek has no tap before its first layer.
LAYERS = {family: [1, 2, 4] if family == "deepseek_v3" else [0, 2, 4] for family in FAMILIES}
MODEL_LEN = 1024
HIDDEN = "hidden-full"


def arguments(directory: Path, family: str) -> dict[str, Any]:
    """Steps of 512 tokens, except for MLA: vLLM cannot cut a prompt on a CPU then, and in bf16 its
    answers depend on batch shapes."""
    is_mla = family == "deepseek_v3"
    hf_config = {"eagle_aux_hidden_state_layer_ids": LAYERS[family]}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        "extra": {
            "extract_hidden_states": {
                "shared_storage_path": str(directory),
                "allow_custom_save_path": True,
            }
        },
        "max_model_len": MODEL_LEN,
        "max_num_batched_tokens": MODEL_LEN if is_mla else 512,
        **({"dtype": "float32"} if is_mla else {}),
    }


class Rows:
    """One engine, and the files that it writes."""

    def __init__(self, engine: Any, family: str, spec: Any, directory: Path) -> None:
        self.engine, self.family, self.directory = engine, family, directory
        self.chunk: int = spec.chunk_tokens
        self.model = ""

    def export(
        self, prompts: list[list[int]], max_tokens: int = 1, **transfer: Any
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """Answers and what is in their files."""
        answers = self.engine.run(
            "result = host.generate(args['prompts'], args['tokens'], transfer=args['transfer'])\n"
            "host.drain()\n"
            "host.settle()",
            prompts=prompts,
            tokens=max_tokens,
            transfer=transfer,
        )
        paths = [answer["transfer"]["hidden_states_path"] for answer in answers]
        assert len(set(paths)) == len(paths)
        return [(answer, files.load(path)) for answer, path in zip(answers, paths, strict=True)]

    def one(self, prompt: list[int], **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
        ((answer, file),) = self.export([prompt], **options)
        ids = prompt + answer["tokens"][:-1] if options.get("include_output_tokens") else prompt
        assert file["token_ids"].tolist() == ids
        assert len(file["hidden_states"]) == len(ids)
        return answer, file["hidden_states"]

    def forget(self) -> None:
        self.engine.reset_local()
        self.engine.run("host.forget()")

    def left_behind(self) -> set[str]:
        return set(os.listdir(self.directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All engines write to the same one, as those of one server's data-parallel ranks do."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module", params=FAMILIES)
def rows(
    request: Any, directory: Path, start_engine: Callable[..., Any], tiny_models: Any
) -> Iterator[Rows]:
    family = request.param
    engine = start_engine(family, **arguments(directory, family))
    rows = Rows(engine, family, tiny_models.FAMILIES[family], directory)
    rows.model = str(tiny_models.build(family).path)
    yield rows
    engine.close()


def only_for(rows: Rows, *families: str) -> None:
    if rows.family not in families:
        pytest.skip("said by the other families")


def errors(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[tokens, layers], relative to the rows' length."""
    return (left.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether rows agree as well as computing them in other batch shapes does."""
    error = errors(left, right)
    # In bf16 another order of sums may choose another expert for a token.
    return bool(error.max() < 1e-4 if left.dtype == torch.float32 else error.median() < 0.1)


def test_restored_rows_are_the_cold_ones(rows: Rows, make_prompt: Callable[..., list[int]]) -> None:
    prompt = make_prompt(1, 3 * rows.chunk + 40)
    cold, cold_rows = rows.one(prompt)
    assert cold["cached"] == 0
    rows.engine.reset_local()
    restored, restored_rows = rows.one(prompt)
    assert restored["cached"] == 3 * rows.chunk
    assert torch.equal(restored_rows[: 3 * rows.chunk], cold_rows[: 3 * rows.chunk])
    assert same(restored_rows, cold_rows)
    # A prompt that ends with a chunk: its last token is computed, whatever is kept of it.
    rows.engine.reset_local()
    aligned, aligned_rows = rows.one(prompt[: 3 * rows.chunk])
    assert 2 * rows.chunk <= aligned["cached"] < 3 * rows.chunk
    assert torch.equal(aligned_rows[: aligned["cached"]], cold_rows[: aligned["cached"]])
    assert same(aligned_rows, cold_rows[: 3 * rows.chunk])
    # The twin: other bytes in the pool are other rows in the file.
    rows.engine.reset_local()
    rows.engine.run(f"host.on_workers(poison, {HIDDEN!r}, None, 1)")  # still finite
    try:
        _, poisoned = rows.one(prompt)
    finally:
        (touched,) = rows.engine.run("result = host.on_workers(unpoison)")
    assert touched == 3
    assert not (poisoned[: 3 * rows.chunk] == cold_rows[: 3 * rows.chunk]).all(-1).any()


def test_a_local_prefix_has_its_rows(rows: Rows, make_prompt: Callable[..., list[int]]) -> None:
    only_for(rows, "qwen2", "gptoss", "gemma4")
    prompt = make_prompt(1, 3 * rows.chunk + 40)
    rows.forget()
    _, cold_rows = rows.one(prompt)
    local, local_rows = rows.one(prompt)
    assert local["cached"] > 2 * rows.chunk
    assert torch.equal(local_rows, cold_rows)


REFERENCE = """
import torch, transformers
from safetensors.torch import save_file
def reference(dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(args["model"], dtype=dtype)
    layers, kept = model.model.layers, {}
    for layer in args["layers"]:
        def keep(module, inputs, keywords, layer=layer):
            kept[layer] = (inputs[0] if inputs else keywords["hidden_states"])[0].clone()
        module = layers[layer] if layer < len(layers) else model.model.norm
        module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        model.eval()(input_ids=torch.tensor([args["prompt"]]))
    return torch.stack([kept[layer].float() for layer in args["layers"]], dim=1)
rows = {name: reference(getattr(torch, name)) for name in {"float32", args["dtype"]}}
save_file(rows, args["out"])
"""


def test_rows_are_those_of_transformers(
    rows: Rows, make_prompt: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Within what transformers itself loses by computing in the model's dtype."""
    from safetensors.torch import load_file

    prompt = make_prompt(2, 2 * rows.chunk + 10)
    _, ours = rows.one(prompt)
    dtype = str(ours.dtype).removeprefix("torch.")
    out = str(tmp_path / "reference.safetensors")
    rows.engine.run(
        REFERENCE,
        model=rows.model,
        prompt=prompt,
        layers=LAYERS[rows.family],
        dtype=dtype,
        out=out,
    )
    reference = load_file(out)
    exact = reference["float32"]
    assert ours.shape == exact.shape
    allowed = 1.5 * errors(reference[dtype], exact).quantile(0.5, dim=0) + 1e-4
    assert (errors(ours, exact).quantile(0.5, dim=0) < allowed).all()
    assert (errors(ours.roll(1, 0), exact).quantile(0.5, dim=0) > allowed).all()
    if dtype == "float32":
        assert errors(ours, exact).max() < 1e-3


def test_generated_tokens_have_rows(rows: Rows, make_prompt: Callable[..., list[int]]) -> None:
    only_for(rows, "qwen2", "gptoss")
    prompt = make_prompt(3, rows.chunk + 17)
    answer, with_output = rows.one(prompt, max_tokens=40, include_output_tokens=True)
    rows.forget()
    _, at_once = rows.one(prompt + answer["tokens"][:-1])
    assert same(with_output, at_once)


NO_ROWS = """
inner = host.worker._add_object
def add(jobs, client, obj, *, storing):
    skipped = storing and obj.group == args["group"]
    return None if skipped else inner(jobs, client, obj, storing=storing)
host.worker._add_object = add
"""


def test_kv_without_its_rows_is_no_hit(rows: Rows, make_prompt: Callable[..., list[int]]) -> None:
    prompt = make_prompt(4, 2 * rows.chunk + 9)
    rows.forget()
    rows.engine.run(NO_ROWS, group=HIDDEN)
    rows.export([prompt])
    rows.engine.run("del host.worker._add_object")
    rows.engine.reset_local()
    answer, cold_rows = rows.one(prompt)
    assert answer["cached"] == 0
    rows.engine.reset_local()
    answer, restored_rows = rows.one(prompt)
    assert answer["cached"] == 2 * rows.chunk
    assert torch.equal(restored_rows[: 2 * rows.chunk], cold_rows[: 2 * rows.chunk])


def test_eight_requests_at_once(rows: Rows, make_prompt: Callable[..., list[int]]) -> None:
    only_for(rows, "qwen2", "gptoss")
    shared = make_prompt(5, 2 * rows.chunk)
    prompts = [shared + make_prompt(50 + index, 30 + 7 * index) for index in range(8)]
    rows.forget()
    alone = [rows.one(prompt)[1] for prompt in prompts]
    for forget in (rows.forget, rows.engine.reset_local):
        forget()
        together = rows.export(prompts, max_tokens=5)
        for prompt, expected, (_, file) in zip(prompts, alone, together, strict=True):
            assert file["token_ids"].tolist() == prompt
            assert same(file["hidden_states"], expected)


def test_what_a_request_may_choose(
    rows: Rows, make_prompt: Callable[..., list[int]], tmp_path: Path
) -> None:
    only_for(rows, "qwen2")
    prompt = make_prompt(6, 300)
    _, everything = rows.one(prompt)
    _, some = rows.one(prompt, hidden_states_layers=[4, 2])
    assert torch.equal(some, everything[:, 1:])
    path = tmp_path / "deep" / "mine.safetensors"
    answer, mine = rows.one(prompt, hidden_states_path=str(path))
    assert answer["transfer"]["hidden_states_path"] == str(path)
    assert torch.equal(mine, everything)
    before = rows.left_behind()
    for wish in ({"extract_hidden_states": False}, {"hidden_states_layers": [3]}):
        answer = rows.engine.run(
            "result = host.generate([args['prompt']], 1, transfer=args['wish']); host.drain()",
            prompt=prompt,
            wish=wish,
        )[0]
        assert answer["transfer"] is None
    assert rows.left_behind() == before


def test_vllms_own_reader_reads_the_files(
    rows: Rows, make_prompt: Callable[..., list[int]]
) -> None:
    only_for(rows, "qwen2")
    before = rows.left_behind()
    answer, expected = rows.one(make_prompt(11, 300))
    shape = rows.engine.run(
        """
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example
data = example.load_hidden_states(args["path"])
result = [list(data["hidden_states"].shape), list(data["token_ids"].shape)]
example.cleanup_hidden_states(args["path"])
""",
        path=answer["transfer"]["hidden_states_path"],
    )
    assert shape == [list(expected.shape), [300]]
    assert rows.left_behind() == before


TO = """
import msgspec, os
os.environ.update(args["env"])
planner = host.connector.scheduler_side._exports
planner._settings = msgspec.structs.replace(planner._settings, shared_storage_path=args["place"])
"""


@contextmanager
def sending_to(rows: Rows, place: str) -> Iterator[None]:
    """Rows go to a tier."""
    rows.engine.run(TO, place=place, env=servers.AWS)
    try:
        yield
    finally:
        rows.engine.run(TO, place=str(rows.directory), env={})


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_rows_by_url_are_the_rows_by_file(
    rows: Rows, make_prompt: Callable[..., list[int]], kind: str
) -> None:
    only_for(rows, "qwen2")
    prompt = make_prompt(12, 3 * rows.chunk + 40)
    before = rows.left_behind()

    def cold_and_restored() -> list[torch.Tensor]:
        rows.forget()
        _, cold = rows.one(prompt)
        rows.engine.reset_local()
        answer, restored = rows.one(prompt)
        assert answer["cached"] == 3 * rows.chunk
        assert torch.equal(restored[: 3 * rows.chunk], cold[: 3 * rows.chunk])
        return [cold, restored]

    by_file = cold_and_restored()
    files_left = rows.left_behind()
    with getattr(servers, f"{kind}_url")() as place, sending_to(rows, place):
        by_url = cold_and_restored()
        assert all(map(torch.equal, by_url, by_file))
        # The twin: other bytes in the pool are other rows at the URL.
        rows.engine.reset_local()
        rows.engine.run(f"host.on_workers(poison, {HIDDEN!r}, None, 1)")
        try:
            answer, poisoned = rows.one(prompt)
        finally:
            rows.engine.run("host.on_workers(unpoison)")
        assert not (poisoned[: 3 * rows.chunk] == by_file[0][: 3 * rows.chunk]).all(-1).any()
        url = answer["transfer"]["hidden_states_path"]
        assert url.startswith(f"{place}#")
        outlet, name, _ = values._place(url)
        value = bytearray(values.base.header_bytes(2) + poisoned.nbytes + 8 * len(prompt))
        assert outlet.tier.get(name, [memoryview(value)])
        value[len(value) // 2] ^= 1
        outlet.tier.put(name, [memoryview(value)])
        with pytest.raises(ExtractionError, match="damaged"):
            files.load(url)
        files.remove(url)
        assert outlet.tier.contains([name]) == [False]
    assert len(files_left - before) == 4
    assert rows.left_behind() == files_left


def test_what_a_tier_does_not_take_is_told_to_the_reader(
    rows: Rows, make_prompt: Callable[..., list[int]]
) -> None:
    """Here the server's bound on values; and the next request is served."""
    only_for(rows, "qwen2")
    with (
        servers.redis_server("--proto-max-bulk-len", "1mb") as (_, port),
        sending_to(rows, f"redis://127.0.0.1:{port}/0?timeout=2"),
    ):
        with pytest.raises(ExtractionError, match="not written"):
            rows.export([make_prompt(13, 3 * rows.chunk + 40)])
        rows.one(make_prompt(13, rows.chunk))


STEPS = """
from vllm import SamplingParams
engine = llm.llm_engine
def add(name, prompt, tokens):
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return engine.add_request(name, {"prompt_token_ids": prompt}, params) or name
def running(name):
    return next(r for r in host.core.scheduler.requests.values() if r.request_id.startswith(name))
def finish():
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output.kv_transfer_params
    host.drain()
    host.settle()
    return outputs
"""


@pytest.mark.parametrize("when", ["before schedule", "mid-prefill", "while decoding"])
def test_an_aborted_request_leaves_nothing(
    rows: Rows, make_prompt: Callable[..., list[int]], when: str
) -> None:
    only_for(rows, "qwen2", "gptoss")
    before = rows.left_behind()
    rows.forget()
    steps = {"before schedule": 0, "mid-prefill": 1, "while decoding": 4}[when]
    computed = rows.engine.run(
        STEPS
        + """
add("aborted", args["prompt"], 20)
for _ in range(args["steps"]):
    engine.step()
request = running("aborted")
result = [request.num_computed_tokens, request.num_prompt_tokens]
engine.abort_request(["aborted"])
assert finish() == {}
""",
        prompt=make_prompt(7, 3 * rows.chunk + 40),
        steps=steps,
    )
    expected = {"before schedule": computed[0] == 0, "mid-prefill": 0 < computed[0] < computed[1]}
    assert expected.get(when, computed[0] > computed[1])
    assert rows.left_behind() == before


@pytest.mark.parametrize("when", ["mid-prefill", "while decoding"])
def test_an_aborted_request_leaves_nothing_in_a_tier(
    rows: Rows, make_prompt: Callable[..., list[int]], when: str
) -> None:
    """Nobody was told its URL."""
    only_for(rows, "qwen2")
    rows.forget()
    prompt = make_prompt(7, 3 * rows.chunk + 40)
    with servers.redis_url() as place, sending_to(rows, place):
        rows.engine.run(
            STEPS
            + """
add("aborted", args["prompt"], 20)
for _ in range(args["steps"]):
    engine.step()
engine.abort_request(["aborted"])
assert finish() == {}
""",
            prompt=prompt,
            steps={"mid-prefill": 1, "while decoding": 4}[when],
        )
        rows.one(prompt)
        # Rows and head of the one that came after.
        assert servers.redis_cli(urlsplit(place).port or 0, "dbsize") == "2"


def test_a_preempted_request_is_exported_whole(
    rows: Rows, make_prompt: Callable[..., list[int]]
) -> None:
    only_for(rows, "qwen2", "gptoss")
    prompt = make_prompt(8, 2 * rows.chunk + 30)
    _, expected = rows.one(prompt)
    rows.forget()
    outputs = rows.engine.run(
        STEPS
        + """
add("preempted", args["prompt"], 12)
for _ in range(5):
    engine.step()
assert running("preempted").num_computed_tokens > len(args["prompt"])
assert host.core.scheduler.reset_prefix_cache(reset_running_requests=True)
assert running("preempted").num_computed_tokens == 0
result = finish()
""",
        prompt=prompt,
    )
    (params,) = outputs.values()
    file = files.load(params["hidden_states_path"])
    assert file["token_ids"].tolist() == prompt
    assert same(file["hidden_states"], expected)


def test_two_ranks_write_one_file_and_two_engines_two(
    rows: Rows,
    directory: Path,
    start_engine: Callable[..., Any],
    make_prompt: Callable[..., list[int]],
) -> None:
    """Two engines that share a directory, as data-parallel ones do, get the same prompts at the
    same time. The second is the default one, whose core and workers are other processes that step
    themselves."""
    only_for(rows, "qwen2")
    second = start_engine(
        "qwen2",
        multiprocess=True,
        tensor_parallel_size=2,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        **arguments(directory, "qwen2"),
    )
    before = rows.left_behind()
    prompts = [make_prompt(20 + index, 3 * 256 + 40 + index) for index in range(3)]
    rows.forget()
    with ThreadPoolExecutor(1) as thread:
        alone = thread.submit(rows.export, prompts, max_tokens=3)
        cold = second.generate(prompts, max_tokens=3)
    cold_rows = [files.load(answer["transfer"]["hidden_states_path"]) for answer in cold]
    for prompt, (_, file), expected in zip(prompts, alone.result(), cold_rows, strict=True):
        assert file["token_ids"].tolist() == expected["token_ids"].tolist() == prompt
        assert same(file["hidden_states"], expected["hidden_states"])
    second.reset_local()
    restored = second.generate(prompts, max_tokens=3)
    for prompt, answer, expected in zip(prompts, restored, cold_rows, strict=True):
        assert answer["cached"] == 3 * 256
        file = files.load(answer["transfer"]["hidden_states_path"])
        assert file["token_ids"].tolist() == prompt
        assert torch.equal(file["hidden_states"][:768], expected["hidden_states"][:768])
    new = {name for name in rows.left_behind() - before if not name.endswith(files.LOCK)}
    assert len(new) == 9
    assert all(name.endswith(SUFFIX) for name in new)
    second.close()
