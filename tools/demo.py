#!/usr/bin/env python3
"""A long document asked three ways: cold, restored by lmcache_connector, from vLLM's own cache.

usage: tools/demo.py [gemma3 | gemma-3-270m | another family of tools/tiny_models.py]

Starts ``vllm serve`` on the CPU with the connector, on a free port of 127.0.0.1 and from another
working directory. Writes demo-out/server.log and demo-out/ttft.png. The last line printed is
``identical: yes``, and the exit status 0, when something was restored in every object group for
every document and each restored answer is the cold one, token for token.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gemma_270m
import tiny_models
from vllm_server import Completion, ServerError, VllmServer

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo-out"
CONNECTOR = {"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both"}
LOADED_METRIC = "vllm:lmcache_loaded_group_tokens_total"
REPEATS = 3
MAX_TOKENS = 32
COLD, RESTORED, LOCAL = "cold", "restored", "vLLM's local hit"
SITUATIONS = (COLD, RESTORED, LOCAL)
QUESTION = "\n\nQuestion: Which conditions apply to redistribution?\nAnswer:"


@dataclass(frozen=True)
class Subject:
    """A model and what the demo must see of it."""

    path: Path
    dtype: str
    groups: tuple[str, ...]
    extra_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measure:
    """One answer and the tokens that the connector restored for it, by object group."""

    completion: Completion
    loaded: dict[str, int]


# Situation -> one measure per document.
Measures = dict[str, list[Measure]]


def say(step: int, text: str) -> None:
    print(f"==> [{step}/4] {text}", flush=True)


def prepare(name: str) -> Subject:
    if name == gemma_270m.NAME:
        path = gemma_270m.fetch(tiny_models.DEFAULT_OUT)
        return Subject(path, gemma_270m.DTYPE, gemma_270m.GROUPS)
    model = tiny_models.build(name)
    extra = () if model.block_size is None else ("--block-size", str(model.block_size))
    return Subject(model.path, model.dtype, model.groups, extra)


def start_server(subject: Subject) -> VllmServer:
    arguments = ["--dtype", subject.dtype, "--max-model-len", "12288", "--max-num-seqs", "4"]
    arguments += ["--enforce-eager", "--enable-prompt-tokens-details"]
    arguments += ["--kv-transfer-config", json.dumps(CONNECTOR), *subject.extra_arguments]
    return VllmServer(subject.path, arguments, OUT / "server.log")


def make_prompts(server: VllmServer, model: Path) -> list[list[int]]:
    """One prompt to warm the server up, then one per repeat; no two share a prefix."""
    bos = json.loads((model / "config.json").read_text())["bos_token_id"]
    document = (ROOT / "LICENSE").read_text()
    heads = [f"Copy {number} of a licence.\n\n" for number in range(REPEATS + 1)]
    return [[bos, *server.tokenize(head + document + QUESTION)] for head in heads]


def ask(server: VllmServer, prompt: Sequence[int]) -> Measure:
    before = server.metric(LOADED_METRIC, "group")
    completion = server.complete(prompt, MAX_TOKENS)
    after = server.metric(LOADED_METRIC, "group")
    loaded = {group: int(after[group] - before.get(group, 0)) for group in after}
    return Measure(completion, {group: tokens for group, tokens in loaded.items() if tokens})


def measure(server: VllmServer, prompts: Sequence[Sequence[int]]) -> Measures:
    warm_up, *documents = prompts
    for _ in SITUATIONS:
        ask(server, warm_up)
        server.reset_prefix_cache()
    measures: Measures = {situation: [] for situation in SITUATIONS}
    for document in documents:
        measures[COLD].append(ask(server, document))
        server.reset_prefix_cache()
        measures[RESTORED].append(ask(server, document))
        measures[LOCAL].append(ask(server, document))
    return measures


def median_ttft(measures: Sequence[Measure]) -> float:
    return statistics.median(measure.completion.ttft for measure in measures)


def count_identical(measures: Measures, situation: str) -> int:
    pairs = zip(measures[COLD], measures[situation], strict=True)
    return sum(
        (cold.completion.token_ids, cold.completion.text)
        == (other.completion.token_ids, other.completion.text)
        for cold, other in pairs
    )


def print_table(measures: Measures, groups: Sequence[str]) -> None:
    header = ["", "TTFT", "tokens reused", *(f"restored: {group}" for group in groups), "same text"]
    rows = [header]
    for situation in SITUATIONS:
        first = measures[situation][0]
        identical = count_identical(measures, situation)
        rows.append(
            [
                situation,
                f"{median_ttft(measures[situation]) * 1000:.0f} ms",
                f"{first.completion.cached_tokens:,}",
                *(f"{first.loaded.get(group, 0):,}" for group in groups),
                "" if situation == COLD else f"{identical} of {REPEATS}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        print("  ".join(cells).rstrip())


def draw(measures: Measures, title: str, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    medians = [median_ttft(measures[situation]) * 1000 for situation in SITUATIONS]
    figure, axes = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
    bars = axes.barh(SITUATIONS, medians, color=["#9aa5b1", "#2b6cb0", "#63b3ed"], height=0.6)
    axes.bar_label(bars, [f"{value:.0f} ms" for value in medians], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"time to first token, median of {REPEATS} [ms]")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def report(measures: Measures, subject: Subject) -> None:
    prompt_tokens = measures[COLD][0].completion.prompt_tokens
    say(4, f"a document of {prompt_tokens:,} tokens, {MAX_TOKENS} greedy tokens after it\n")
    print_table(measures, subject.groups)
    title = f"{subject.path.name}, {prompt_tokens:,} prompt tokens, CPU"
    draw(measures, title, OUT / "ttft.png")
    answer = measures[RESTORED][0].completion.text
    print(f"\nrestored answer: {answer!r}\nbars: {(OUT / 'ttft.png').relative_to(ROOT)}")


def faults(measures: Measures, groups: Sequence[str]) -> list[str]:
    """What went wrong, or keeps the run from proving anything, one sentence each."""
    messages = []
    if different := REPEATS - count_identical(measures, RESTORED):
        messages.append(f"{different} of {REPEATS} restored answers differ from the cold ones")
    if any(measure.loaded or measure.completion.cached_tokens for measure in measures[COLD]):
        messages.append("a cold request was not cold")
    for group in groups:
        if not all(measure.loaded.get(group) for measure in measures[RESTORED]):
            messages.append(f"nothing was restored in group {group}")
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    models = [*tiny_models.FAMILIES, gemma_270m.NAME]
    parser.add_argument("model", nargs="?", default="gemma3", choices=models)
    name = parser.parse_args().model
    # So that the server is stopped too when this process is asked to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    OUT.mkdir(exist_ok=True)

    say(1, f"model {name}")
    try:
        subject = prepare(name)
    except gemma_270m.FetchError as error:
        sys.exit(f"demo: {error}")
    server = start_server(subject)
    say(
        2,
        f"starting vllm serve on 127.0.0.1:{server.port} (half a minute; log: demo-out/server.log)",
    )
    start = time.monotonic()
    try:
        with server:
            seconds = time.monotonic() - start
            ways = ", ".join(SITUATIONS)
            say(3, f"ready after {seconds:.0f} s; asking {REPEATS} documents: {ways}")
            measures = measure(server, make_prompts(server, subject.path))
    except (ServerError, OSError) as error:
        print(f"{server.tail()}\n\ndemo: {error}\n(log: {server.log})", file=sys.stderr)
        return 1
    report(measures, subject)
    problems = faults(measures, subject.groups)
    for problem in problems:
        print(f"fault: {problem}")
    print(f"identical: {'no' if problems else 'yes'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
