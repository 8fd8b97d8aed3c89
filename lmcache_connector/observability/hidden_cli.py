"""``lmcache-connector hidden-states``: shows what engines exported, cuts it and removes it.

Anybody may have written what lies there: it is checked, and told without control characters.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import msgspec
import typer

from lmcache_connector.errors import ConnectorError
from lmcache_connector.hidden_states.settings import ERROR, LOCK, SUFFIX, URL
from lmcache_connector.observability.tables import console, printable, table

_FACTS = "request", "tokens", "layers", "hidden", "dtype", "size_bytes", "age_seconds", "state"
Seconds = Annotated[float | None, typer.Option(min=0)]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]

app = typer.Typer(no_args_is_help=True, help="Show, cut and remove exported hidden states.")


@app.command("ls")
def list_exports(directory: str, as_json: Json = False) -> None:
    """List the exports in a directory."""
    if "://" in directory:
        raise ConnectorError("a tier cannot list what it holds: show a URL that an engine gave")
    names = {name.removesuffix(LOCK).removesuffix(ERROR) for name in os.listdir(directory)}
    found = [_facts(f"{directory}/{name}") for name in sorted(names) if name.endswith(SUFFIX)]
    _tell(as_json, exports=found)


@app.command()
def show(place: str, as_json: Json = False) -> None:
    """Tell what an export holds, layer by layer. PLACE: its path or URL."""
    rows, token_ids, names = _load(place)
    layers, first_ids = [], token_ids[:8].tolist()
    for name, layer in zip(names, rows.unbind(1), strict=True):
        norm = layer.double().norm(dim=-1)
        norms = {f"{kind}_norm": getattr(norm, kind)().item() for kind in ("min", "mean", "max")}
        zero, bad = int((norm == 0).sum()), int((~norm.isfinite()).sum())
        layers.append({"layer": name, "zero_rows": zero, "not_finite_rows": bad, **norms})
    whole = {"shape": [*rows.shape], "dtype": str(rows.dtype)[6:], "first_ids": first_ids}
    _tell(as_json, rows=[whole], layers=layers)


@app.command()
def export(place: str, out: str, layers: str = "", first: int = 0, end: int | None = None) -> None:
    """Copy an export, or some --layers 0,2 and tokens from --first to --end, to a new file."""
    rows, token_ids, names = _load(place)
    chosen, span = layers.split(",") if layers else names, slice(first, end)
    if not set(chosen) <= set(names) or not len(token_ids[span]):
        raise typer.BadParameter(f"it has {len(rows)} tokens and layers {','.join(names)}")
    if os.path.lexists(out):
        raise ConnectorError(f"{out} is there already")
    some = rows[span, [names.index(name) for name in chosen]]
    _files().write(os.path.abspath(out), some, token_ids[span].clone(), ",".join(chosen))


@app.command("rm")
def remove(places: list[str], older_than: Seconds = None) -> None:
    """Remove exports, or from directories what was written --older-than so many seconds ago."""
    for place in places:
        if older_than is not None:
            _files().tidy(place, older_than)
        elif not URL.fullmatch(place) and not place.endswith(SUFFIX):
            raise ConnectorError(f"{place} is no export")
        elif _files().is_being_written(place):
            raise ConnectorError(f"{place} is being written")
        else:
            _files().remove(place)


def _tell(as_json: bool, **tables: list[dict[str, Any]]) -> None:
    if as_json:
        return typer.echo(msgspec.json.encode(tables))
    console.print(*(table(*each, max_columns=len(_FACTS)) for each in tables.items()), sep="\n")


def _facts(path: str) -> dict[str, object]:
    facts: dict[str, object] = dict.fromkeys(_FACTS)
    facts["request"] = printable(os.path.basename(path).removesuffix(SUFFIX))
    try:
        there = [name for name in (path, path + ERROR, path + LOCK) if os.path.exists(name)]
        facts["age_seconds"] = time.time() - os.stat(there[0] if there else path).st_mtime
        if _files().is_being_written(path):
            return facts | {"state": "being written"}
        with _files().open_rows(path) as file:
            rows, said = file.get_slice("hidden_states"), file.metadata() or {}
            facts |= {"dtype": rows.get_dtype(), "size_bytes": os.stat(path).st_size}
            facts["tokens"], _, facts["hidden"] = rows.get_shape()
            facts |= {"layers": printable(said.get("layers", "")), "state": "ready"}
    except (ConnectorError, OSError, ValueError) as error:
        facts["state"] = f"failed: {printable(error)}"
    return facts


def _load(place: str) -> tuple[Any, Any, list[str]]:
    """Rows, token ids and names of layers."""
    tensors, said = _files().load_with_layers(place, timeout=0)
    rows, token_ids = tensors["hidden_states"], tensors["token_ids"]
    if rows.ndim != 3 or not rows.numel() or token_ids.shape != rows.shape[:1]:
        raise ConnectorError(f"{place} holds no hidden states")
    names, count = printable(said).split(","), rows.shape[1]
    return rows, token_ids, names if len(names) == count else [*map(str, range(count))]


def _files() -> Any:
    from lmcache_connector.hidden_states import files  # torch takes seconds

    return files
