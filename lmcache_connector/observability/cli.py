"""``lmcache-connector``: runs a cache server, and manages it or an engine's embedded cache.

Exit codes: 0, 1 for a problem found, 2 for wrong usage. Never loads vLLM, nor torch without need.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from lmcache_connector.config import load_config, parse_endpoint, parse_size, parse_url
from lmcache_connector.errors import ConnectorError
from lmcache_connector.groups import ReuseKind, ReuseRule
from lmcache_connector.keys import ChunkChain, Extra, TokenDatabase
from lmcache_connector.observability import hidden_cli
from lmcache_connector.observability.doctor import run_checks
from lmcache_connector.observability.tables import console, printable, table
from lmcache_connector.scheduler.hit import servable_boundary
from lmcache_connector.server import messages
from lmcache_connector.server.management import TIMEOUT_SECONDS, Ask, managing
from lmcache_connector.server.run import run_server
from lmcache_connector.server.sockets import our_endpoints

# Large tiers take their time.
_CLEAR_SECONDS = 60.0
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(hidden_cli.app, name="hidden-states")

Socket = Annotated[
    str | None, typer.Option(parser=parse_endpoint, help="ipc:///path; default: LMCACHE_SERVER.")
]
Size = Annotated[int | None, typer.Option(parser=parse_size, help="GiB, or text such as 512MiB.")]
Tiers = Annotated[list[str] | None, typer.Option(parser=parse_url, help="URL; nearest first.")]
Uids = Annotated[list[int] | None, typer.Option(help="Of other users who may connect.")]
Namespace = Annotated[str | None, typer.Option(help="Which model's, as `status` names it.")]
Tokens = Annotated[typer.FileText | None, typer.Option(help="Token ids: a JSON list, or spaced.")]
Text = Annotated[typer.FileText | None, typer.Option(help="As the model gets it, of a chat too.")]
_folder = typer.Option(exists=True, file_okay=False, help="Directory of the tokenizer, for --text.")
Tokenizer = Annotated[Path | None, _folder]
All = Annotated[bool, typer.Option("--all", help="Of all attached, or in the pool.")]
Salt = Annotated[str | None, typer.Option(help="The requests' cache_salt.")]


@app.command()
def server(
    socket: Socket = None,
    max_local_cpu_size: Size = None,
    max_hidden_state_cpu_size: Size = None,
    tier: Tiers = None,
    floor: Size = None,
    allow_uid: Uids = None,
) -> None:
    """Run a cache server for this host's engines.

    --floor: so much of each model stays in the pool, whatever others store.
    What is not given comes from LMCACHE_* and the file LMCACHE_CONFIG_FILE.
    """
    config, _, warnings = load_config({}, os.environ)
    for warning in warnings:
        typer.echo(warning, err=True)
    endpoint = socket or config.server
    if endpoint is None:
        raise typer.BadParameter("give --socket ipc:///path, or set LMCACHE_SERVER")
    size = max_local_cpu_size or config.max_local_cpu_bytes
    if (floor or 0) > size:
        raise typer.BadParameter("a --floor above the pool's size keeps nothing: make it smaller")
    hidden = max_hidden_state_cpu_size or config.hidden_bytes
    run_server(endpoint, size, tier or config.tier_urls, floor or 0, allow_uid or [], hidden)


@app.command()
def status(
    socket: Socket = None,
    watch: Annotated[bool, typer.Option(help="Again each second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show engines, groups, pool, tiers and hit rates."""
    endpoint = _endpoint(socket)
    while True:
        with managing(endpoint) as ask:
            reply: messages.StatusReply = ask(messages.Status())
        if as_json:
            typer.echo(msgspec.json.encode(reply))
        else:
            if watch:
                console.clear()
            console.print(*_tables(reply), sep="\n")
        if not watch:
            return
        time.sleep(1.0)


@app.command("unpin", help="Let what `pin` kept be evicted again.")
@app.command("pin", help="Keep what the pool holds of a prompt from being evicted.")
@app.command("lookup", help="Tell how much of a prompt would hit, and which group limits it.")
def _prompt_command(
    ctx: typer.Context,
    socket: Socket = None,
    tokens: Tokens = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    salt: Salt = None,
    namespace: Namespace = None,
) -> None:
    ids = _token_ids(tokens, text, tokenizer)
    is_lookup = ctx.info_name == "lookup"
    with managing(_endpoint(socket)) as ask:
        engine, hashes, found = _find(ask, ids, salt, namespace)
        rows = 0 if is_lookup else ask(messages.Pin(hashes, ctx.info_name == "pin"))
    if is_lookup:
        return _report(engine, len(ids), found)
    typer.echo(f"{rows} rows of {len(hashes)} chunks {ctx.info_name}ned")
    raise typer.Exit(int(rows == 0))


@app.command()
def clear(
    socket: Socket = None,
    namespace: Namespace = None,
    everything: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete what is cached of one model, or of all, in the pool and in the tiers."""
    if bool(namespace) == everything or (namespace and not re.fullmatch("[0-9a-f]{16}", namespace)):
        raise typer.BadParameter("give either --namespace, as `status` names it, or --all")
    endpoint = _endpoint(socket)
    with managing(endpoint) as ask:
        before: messages.StatusReply = ask(messages.Status())
    if not yes:
        told = [one.model for one in before.instances if namespace in (None, one.namespace)]
        where = ", ".join(["the pool", *(tier.url for tier in before.tiers)])
        typer.echo(f"{endpoint}, pid {before.pid}, engines of it: {', '.join(told) or 'none'}")
        typer.confirm(f"delete {namespace or 'all'} from {where}?", abort=True)
    failed = {tier.url: tier.failed_clears for tier in before.tiers}
    end = time.monotonic() + _CLEAR_SECONDS
    with managing(endpoint) as ask:
        ask(messages.ClearNamespace(namespace or ""))
        now: messages.StatusReply = ask(messages.Status())
        while now.open_clears + sum(t.open_clears for t in now.tiers) and time.monotonic() < end:
            time.sleep(0.05)
            now = ask(messages.Status())
    left = [one.url for one in now.tiers if one.open_clears or one.failed_clears > failed[one.url]]
    rows, tiers = now.cleared_rows - before.cleared_rows, len(now.tiers) - len(left)
    typer.echo(f"{rows} rows deleted from the pool, {tiers} tiers cleared")
    for name in [*(["the pool"] if now.open_clears else []), *left]:
        typer.echo(f"error: {name} was not cleared: once it answers, run this again", err=True)
    raise typer.Exit(int(bool(left or now.open_clears)))


@app.command()
def doctor(socket: Socket = None) -> None:
    """Check this host, the sockets, configuration, tiers and versions; say what to fix."""
    states = set()
    for check in run_checks(socket):
        states.add(check.state)
        typer.echo(f"{check.state:5} {check.what}{check.fix and ': '}{check.fix}")
    raise typer.Exit(int("FAIL" in states))


def main() -> None:
    """The command. What users and peers can cause is told in one line."""
    try:
        app()
    except (ConnectorError, OSError) as error:
        for problem in getattr(error, "problems", [error]):
            typer.echo(f"error: {printable(problem)}", err=True)
        sys.exit(1)


def salted_extra(salt: str, *, tagged: bool) -> Extra:
    """What beside tokens enters the chunk hashes of a text request with a ``cache_salt``, as vLLM
    gives it: ``tagged`` with the kind of key, or bare (0.30)."""
    keys = (("cache_salt", salt) if tagged else salt,)
    return lambda start, end: (keys, None, None) if start == 0 else None


def _find(
    ask: Ask, ids: list[int], salt: str | None, namespace: str | None
) -> tuple[messages.InstanceStatus, list[bytes], messages.ProbeReply]:
    """The engine whose prompt it is, the prompt's chunk hashes, and what is there of them."""
    status: messages.StatusReply = ask(messages.Status())
    engines = {e.namespace: e for e in status.instances if namespace in (None, e.namespace)}
    if not engines:
        there = ", ".join(f"{engine.namespace} ({engine.model})" for engine in status.instances)
        why = "no such engine is attached, so its chunk size and groups are not known"
        raise ConnectorError(f"{why}; these are: {there or 'none'}")
    if len(engines) > 1:
        names = ", ".join(f"{name} ({engine.model})" for name, engine in engines.items())
        raise typer.BadParameter(f"several models are attached, choose a --namespace: {names}")
    (engine,) = engines.values()
    for extra in [salted_extra(salt, tagged=kind) for kind in (False, True)] if salt else [None]:
        chain = ChunkChain(TokenDatabase(engine.namespace_digest, engine.chunk_tokens))
        chain.extend(lambda start, end: ids[start:end], len(ids), extra)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        probe = messages.Probe(engine.namespace, chain.hashes)
        found: messages.ProbeReply = ask(probe)
        while found.pending and time.monotonic() < deadline:
            time.sleep(0.02)
            found = ask(probe)
        if any(int(mask, 16) for mask in (*found.in_pool.values(), *found.in_tiers.values())):
            break
    return engine, chain.hashes, found


def _report(engine: messages.InstanceStatus, num_tokens: int, found: messages.ProbeReply) -> None:
    tags = [group.tag for group in engine.groups]
    rules = [ReuseRule(ReuseKind(group.kind), group.tokens) for group in engine.groups]
    size = engine.chunk_tokens

    def reach(masks: Mapping[str, int]) -> int:
        present = [[masks[tag]] for tag in tags]
        return servable_boundary(
            rules, present, chunk_tokens=size, local_tokens=0, num_tokens=num_tokens
        )

    pool = {tag: int(found.in_pool.get(tag, "0"), 16) for tag in tags}
    held = {tag: pool[tag] | int(found.in_tiers.get(tag, "0"), 16) for tag in tags}
    full = dict.fromkeys(tags, (1 << num_tokens // size) - 1)
    most, hit = reach(full), reach(held)
    healed = {tag: reach({**held, tag: full[tag]}) for tag in tags}
    told = f"{num_tokens} tokens, {num_tokens // size} chunks of {size}: {reach(pool)} tokens hit"
    typer.echo(f"{told} in the pool, {hit} with the tiers; {most} are possible")
    counts = ((tag, pool[tag].bit_count(), held[tag].bit_count(), healed[tag]) for tag in tags)
    names = ("group", "chunks in pool", "with tiers", "would hit if complete")
    console.print(table("groups", [dict(zip(names, row, strict=True)) for row in counts]))
    if found.pending:
        typer.echo(f"the tiers did not answer within {TIMEOUT_SECONDS:g} s: they may hold more")
    if hit < most:
        one = [tag for tag in tags if healed[tag] > hit]
        every = [tag for tag in tags if reach({**full, tag: held[tag]}) < most]
        typer.echo(f"limited by {' or '.join(one) or ' and '.join(every)}")


def _token_ids(tokens: Tokens, text: Text, tokenizer: Tokenizer) -> list[int]:
    try:
        if tokens is not None and text is None:
            content = tokens.read().strip("[] \n").replace(",", " ")
            return msgspec.convert(content.split(), _TokenIds, strict=False)
        if text is None or tokens is not None or not tokenizer:
            raise typer.BadParameter("give --tokens FILE, or --text FILE and --tokenizer DIRECTORY")
        from transformers import AutoTokenizer

        return list(AutoTokenizer.from_pretrained(tokenizer)(text.read())["input_ids"])
    except (ImportError, ValueError) as error:
        raise typer.BadParameter(f"the prompt cannot be read: {error}") from None


def _endpoint(socket: str | None) -> str:
    if chosen := socket or load_config({}, os.environ).config.server:
        return chosen
    found, _ = our_endpoints()
    if not found:
        raise typer.BadParameter("no server or engine of this user runs: start one, or --socket")
    if len(found) > 1:
        raise typer.BadParameter(f"choose a --socket: {', '.join(found)}")
    return found[0]


def _tables(reply: messages.StatusReply) -> list[RenderableType]:
    """All of a status, field by field."""
    data = msgspec.to_builtins(reply)
    for engine in data["instances"]:
        del engine["namespace_digest"]
        asked = engine["asked_rows"]
        engine["hit_rate"] = f"{engine['found_rows'] / asked:.1%}" if asked else None
        engine["groups_bytes"] = {g["tag"]: g["row_bytes"] for g in engine.pop("groups")}
    data["pool"] = [{k: value for k, value in data["pool"].items() if k != "tiers"}]
    data["namespaces"] = [{"namespace": k, **held} for k, held in data["namespaces"].items()]
    tables = {name: data.pop(name) for name in ("instances", "pool", "namespaces", "tiers")}
    return [table(title, rows) for title, rows in {"server": [data], **tables}.items()]
