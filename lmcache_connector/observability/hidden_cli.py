"""``lmcache-connector hidden-states``: shows what engines exported, cuts it and removes it.

Anybody may have written what lies there: it is checked, and told without control characters.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import msgspec
import typer

from lmcache_connector.errors import ConnectorError, StartupError
from lmcache_connector.hidden_states.settings import ERROR, LOCK, SUFFIX, URL
from lmcache_connector.observability.tables import console, printable, table

_FACTS = "request", "tokens", "layers", "hidden", "dtype", "size_bytes", "age_seconds", "state"
Seconds = Annotated[float | None, typer.Option(min=0)]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]

app = typer.Typer(no_args_is_help=True, help="Show, cut and remove exported hidden states.")


@app.command("ls")
def list_exports(directory: str, as_json: Json = False) -> None:
    """List the exports in a directory."""
    _tell(as_json, exports=[_facts(f"{directory}/{name}") for name in sorted(_exports(directory))])


@app.command()
def show(place: str, as_json: Json = False) -> None:
    """Tell what an export holds, layer by layer. PLACE: its path or URL."""
    rows, token_ids, names = _load(place)
    layers, first_ids = [], token_ids[:8].tolist()
    for name, layer in zip(names, rows.unbind(1), strict=True):
        norm = layer.norm(dim=-1, dtype=_files().torch.float64)
        norms = {f"{kind}_norm": getattr(norm, kind)().item() for kind in ("min", "mean", "max")}
        zero, bad = int((norm == 0).sum()), int((~norm.isfinite()).sum())
        layers.append({"layer": name, "zero_rows": zero, "not_finite_rows": bad, **norms})
    whole = {"shape": [*rows.shape], "dtype": str(rows.dtype)[6:], "first_ids": first_ids}
    _tell(as_json, rows=[whole], layers=layers)


@app.command()
def export(place: str, out: str, layers: str = "", first: int = 0, end: int | None = None) -> None:
    """Copy an export, or some --layers 0,2 and tokens from --first to --end, to a new file."""
    rows, token_ids, names = _load(place)
    chosen, end = layers.split(",") if layers else names, len(rows) if end is None else end
    if not set(chosen) <= set(names) or len(set(chosen)) < len(chosen):
        raise typer.BadParameter(f"--layers {layers}: it has {','.join(names)}, name each once")
    if not 0 <= first < end <= len(rows):
        raise typer.BadParameter(f"--first {first} --end {end} is no range of {len(rows)} tokens")
    if os.path.lexists(out or ".") or "://" in out:
        raise ConnectorError(f"{out} is there already, or is no path")
    some = rows[first:end, [names.index(name) for name in chosen]]
    _files().write(os.path.abspath(out), some, token_ids[first:end].clone(), ",".join(chosen))


@app.command("rm")
def remove(places: list[str], older_than: Seconds = None) -> None:
    """Remove exports, or from directories what was written --older-than so many seconds ago."""
    count, failed = 0, dict[str, object]()
    for place in places:
        try:
            count += _remove(place, older_than, failed)
        except (ConnectorError, OSError) as error:
            failed[place] = error
    typer.echo(f"exports removed: {count}")
    if failed:
        raise StartupError(*(f"cannot remove {path}: {why}" for path, why in failed.items()))


def _remove(place: str, older_than: float | None, failed: dict[str, object]) -> int:
    """How many are gone."""
    if older_than is not None:
        names = _exports(place)
        _files().tidy(place, older_than, failed.__setitem__)
        return len(names - _exports(place))
    there = next(filter(os.path.lexists, (place, place + LOCK, place + ERROR)), "")
    if there and _files().is_being_written(place):
        raise ConnectorError("it is being written")
    if not URL.fullmatch(place) and not (place.endswith(SUFFIX) and _files().may_go(there)):
        hint = "not an export of this package: remove it yourself (from a directory: --older-than)"
        raise ConnectorError(f"it is {hint if there else 'not there'}")
    _files().remove(place)
    return 1


def _exports(directory: str) -> set[str]:
    """Names of those that are, were or will be there."""
    if not os.path.isdir(directory):
        hint = "give that of shared_storage_path; a tier cannot list what it holds"
        raise ConnectorError(f"there is no directory {os.path.abspath(directory)}: {hint}")
    names = {name.removesuffix(LOCK).removesuffix(ERROR) for name in os.listdir(directory)}
    return {name for name in names if name.endswith(SUFFIX)}


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
    rows, names = tensors["hidden_states"], [printable(name) for name in said.split(",")]
    if not all(names) or not len(names) == len(set(names)) == rows.shape[1]:
        names = [*map(str, range(rows.shape[1]))]
    return rows, tensors["token_ids"], names


def _files() -> Any:
    from lmcache_connector.hidden_states import files  # torch takes seconds

    return files
