"""The configuration: one frozen result, whose fields are the table of options, and its parser.

Both sides of a connector parse the same input. Precedence: ``kv_connector_extra_config``, then
environment ``LMCACHE_`` + the key in upper case, then the YAML file named by
``LMCACHE_CONFIG_FILE``, then the default.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import yaml

from lmcache_connector.errors import ConfigError

ENV_PREFIX = "LMCACHE_"
CONFIG_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_OF_TIERS = [f"LMCACHE_REDIS_{name}" for name in ("USERNAME", "PASSWORD", "PASSWORD_FILE")]

_T = TypeVar("_T")
_GIB = 1 << 30
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_SIZE_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
# user:password@ of a URL, or of one that it names. People forget to escape "/", "?" and "#".
_CREDENTIALS = re.compile(r"(?<=://)(?!/).*(?:@|%40)|(?<=%2F%2F).*(?:@|%40)", re.I | re.S)
_LayerIndex = Annotated[int, msgspec.Meta(ge=-(1 << 15), lt=1 << 15)]
_Layers = Annotated[list[_LayerIndex], msgspec.Meta(min_length=1)]
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


class LoadedConfig(NamedTuple):
    config: Config
    # Key -> "extra_config", "env", "yaml" or "default".
    origins: dict[str, str]
    # One sentence each; nothing that keeps the connector from working as configured.
    warnings: list[str]


class RequestParams(msgspec.Struct, frozen=True):
    """What one request may choose through ``kv_transfer_params``; same meaning as in Config."""

    min_hit_tokens: int
    max_offload_tokens: int | None


def _show(value: object, none: str = "none") -> str:
    if value is None or value == ():
        return none
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


class Option(NamedTuple):
    """One key, and its field of Config. ``parse`` takes JSON, YAML or environment values and raises
    ValueError with what it expected; ``show`` is its inverse for logs."""

    field: str
    default: object
    parse: Callable[[object], object]
    help: str
    show: Callable[[object], str]

    @property
    def name(self) -> str:
        return self.field.replace("cpu_bytes", "cpu_size")


def _option(
    default: object,
    parse: Callable[[object], object],
    help: str,
    show: Callable[[object], str] = _show,
) -> Any:
    """A field of Config that is read as such an Option."""
    return field(metadata={"default": default, "parse": parse, "help": help, "show": show})


def parse_tokens(value: object) -> int:
    """A whole number of tokens, zero included."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("expected a whole number of tokens, 0 or more")
    return value


def parse_size(value: object) -> int:
    """Bytes from a number of GiB or from text such as "512MiB" or "1.5GB"."""
    number: float | None = None
    unit = _GIB
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number = float(match[1])
        unit = _SIZE_UNITS[match[2].lower()] if match[2] else _GIB
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if number is None or not 1 <= number * unit < 1 << 63:
        raise ValueError(
            'expected a size above 0: a number of GiB such as 4, or text such as "512MiB", "1.5GB"'
        )
    return int(number * unit)


def _parse_layers(value: object) -> tuple[int, ...]:
    layers = list(map(str.strip, value.split(","))) if isinstance(value, str) else value
    try:
        return tuple(dict.fromkeys(msgspec.convert(layers, _Layers, strict=False)))
    except msgspec.ValidationError:
        raise ValueError("expected a list of layer indices such as [0, 24, -1]") from None


def _parse_hidden_dtype(value: object) -> str:
    if value not in ("native", "float32"):
        raise ValueError("expected native or float32")
    return str(value)


def _parse_chunk_size(value: object) -> int:
    with suppress(ValueError):
        if tokens := parse_tokens(value):
            return tokens
    raise ValueError('expected a whole number of tokens above 0, or "auto"')


def _parse_seconds(value: object) -> float:
    seconds = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            seconds = float(value.removesuffix("s") if isinstance(value, str) else value)
    if not 0 < seconds < math.inf:
        raise ValueError("expected a number of seconds above 0, such as 2.5")
    return seconds


def _parse_bool(value: object) -> bool:
    text = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if text not in _TRUE + _FALSE:
        raise ValueError("expected true or false")
    return text in _TRUE


def parse_endpoint(value: object) -> str:
    """``ipc:///absolute/path`` of a cache server's socket."""
    if not isinstance(value, str) or not re.fullmatch(r"ipc:///[^\0]*[^\0/]", value):
        raise ValueError(
            "expected ipc:///path of the server's socket: engines and a server share memory, so "
            "they share a host (other hosts are reached through tiers that they share)"
        )
    return value


def parse_url(value: object) -> str:
    """One tier; it is read further where it is opened."""
    if not isinstance(value, str) or "://" not in value:
        raise ValueError("expected a URL such as file:///var/cache/kv or redis://host:6379")
    if _CREDENTIALS.search(value):
        raise ValueError("credentials are given in the environment, never in a URL")
    return value.strip()


def _parse_urls(value: object) -> tuple[str, ...]:
    if value is None or value == "none":
        return ()
    urls = [url for url in value.split(",") if url] if isinstance(value, str) else value
    if not isinstance(urls, list | tuple):
        raise ValueError("expected a list of URLs, nearest first (or text with commas between)")
    return tuple(parse_url(url) for url in urls)


def _parse_mapping(value: object) -> dict[str, object]:
    decoded = json.loads(value) if isinstance(value, str) else value
    return msgspec.convert(decoded, dict[str, object])


def _or_none(word: str, parse: Callable[[object], _T]) -> Callable[[object], _T | None]:
    """Accept null, and ``word`` for the environment, which has no null."""

    def parse_optional(value: object) -> _T | None:
        if value is None or (isinstance(value, str) and value.strip().lower() == word):
            return None
        return parse(value)

    return parse_optional


def _show_size(value: object) -> str:
    if not isinstance(value, int):
        return "none"
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB")):
        if value % unit == 0:
            return f"{value // unit}{name}"
    return f"{value}B"


@dataclass(frozen=True)
class Config:
    """Final values. Sizes are in bytes, and their keys end with ``_size``."""

    chunk_size: int | None = _option(
        None,
        _or_none("auto", _parse_chunk_size),
        "Tokens per cached chunk. `auto`: 256 rounded up to the smallest multiple that the "
        "model's block sizes allow. An illegal value is refused and the legal one named.",
        show=partial(_show, none="auto"),
    )
    max_local_cpu_bytes: int = _option(
        4,
        parse_size,
        "CPU memory of the KV pool: a number of GiB, or text such as `512MiB`. Per engine core "
        "(data-parallel rank), all its tensor- and pipeline-parallel ranks together.",
        show=_show_size,
    )
    save_decode_cache: bool = _option(
        False,
        _parse_bool,
        "`true`: also store the KV of generated tokens, not only of prompts.",
    )
    server: str | None = _option(
        None,
        _or_none("none", parse_endpoint),
        "Socket of a shared cache server on this host, such as `ipc:///run/lmcache/kv`; `none`: "
        "the engine has a pool of its own.",
    )
    tiers: tuple[str, ...] = _option(
        (),
        _parse_urls,
        "Storage behind the pool, nearest first: a list of URLs (`file:`, `redis:`, `s3:`, `gs:`, "
        "`az:`, `mooncake:`). With `server` they are given to the server.",
    )
    local_disk: str | None = _option(
        None,
        _or_none("none", parse_url),
        "One more tier, before the others; LMCache's name for it.",
    )
    remote_url: str | None = _option(
        None,
        _or_none("none", parse_url),
        "One more tier, behind the others; LMCache's name for it.",
    )
    load_timeout: float = _option(
        10,
        _parse_seconds,
        "Seconds until a load that has not started is given up and its tokens are recomputed.",
        show="{:g}s".format,
    )
    lookup_timeout: float = _option(
        2,
        _parse_seconds,
        "Seconds that a request may wait for the answer of a slow storage tier; then it is a miss.",
        show="{:g}s".format,
    )
    fail_on_load_error: bool = _option(
        False,
        _parse_bool,
        "`true`: leave vLLM's own `kv_load_failure_policy` in force, which may fail the request. "
        "`false`: a failed load is recomputed.",
    )
    min_hit_tokens: int = _option(
        0,
        parse_tokens,
        "Hits of fewer tokens are not loaded. A request may set it in `kv_transfer_params`.",
    )
    max_offload_tokens: int | None = _option(
        None,
        _or_none("none", parse_tokens),
        "Only the first so many tokens of a request are stored; `none`: all. A request may set "
        "it in `kv_transfer_params`.",
    )
    enable_hidden_state_cache: bool = _option(
        False,
        _parse_bool,
        "`true`: hidden states are kept too, by `hidden_state_store`; else that is `None`.",
    )
    max_hidden_state_cpu_bytes: int | None = _option(
        None,
        _or_none("none", parse_size),
        "CPU memory of their pool, beside that of the KV. With `server` it is given to the server.",
        show=_show_size,
    )
    hidden_state_layers: tuple[int, ...] | None = _option(
        None,
        _or_none("all", _parse_layers),
        "Layers to store the rows of. A prefix is a hit only as far as it has those of all of "
        "them. `all`: whatever is given, and KV alone is a hit.",
        show=partial(_show, none="all"),
    )
    hidden_state_dtype: str = _option(
        "native",
        _parse_hidden_dtype,
        "`native`: hidden states are kept in the dtype they are given in; `float32`: converted.",
    )
    extract_hidden_states: dict[str, object] = _option(
        {},
        _parse_mapping,
        "Exports the rows that vLLM's `extract_hidden_states` keeps: a mapping with "
        "`shared_storage_path` (required; a directory or a tier's URL), `include_output_tokens`, "
        "`layers`, `opt_in`, `max_size`, `ttl`, `max_queued_size`, `num_writer_threads`, "
        "`use_synchronization_lock`, `allow_custom_save_path`; `{}`: no files.",
        show=json.dumps,
    )

    @property
    def hidden_bytes(self) -> int:
        """Of the pool of hidden states; 0 where there is none."""
        return (self.max_hidden_state_cpu_bytes or 0) if self.enable_hidden_state_cache else 0

    @property
    def tier_urls(self) -> tuple[str, ...]:
        """All tiers, nearest first."""
        urls = (self.local_disk, *self.tiers, self.remote_url)
        return tuple(url for url in urls if url is not None)


OPTIONS = tuple(Option(one.name, **one.metadata) for one in fields(Config))
_BY_NAME = {option.name: option for option in OPTIONS}
_VARIABLES = {ENV_PREFIX + name.upper(): name for name in _BY_NAME}


def load_config(extra_config: Mapping[str, object], environ: Mapping[str, str]) -> LoadedConfig:
    """Merge and check all sources.

    Values that a stronger source overrides are checked too.

    Raises:
        ConfigError: holds every problem found, each with its source and fix.
    """
    problems: list[str] = []
    values: dict[str, object] = {option.name: option.default for option in OPTIONS}
    origins = dict.fromkeys(values, "default")
    variables = {
        name: environ[variable] for variable, name in _VARIABLES.items() if variable in environ
    }
    path = environ.get(CONFIG_FILE_VARIABLE)
    from_file = {} if path is None else _read_yaml(path, problems)
    for origin, source in (("yaml", from_file), ("env", variables), ("extra_config", extra_config)):
        for name, value in source.items():
            place = {
                "yaml": f"{name} in {path}",
                "env": ENV_PREFIX + str(name).upper(),
                "extra_config": f"{name} in kv_connector_extra_config",
            }[origin]
            if name not in _BY_NAME:
                nearest = difflib.get_close_matches(str(name), _BY_NAME, n=1, cutoff=0)[0]
                problems.append(f"{place} is an unknown key: did you mean {nearest}?")
                continue
            try:
                _BY_NAME[name].parse(value)
            except ValueError as error:
                shown = _CREDENTIALS.sub("***@", repr(value))
                problems.append(f"{place} is {shown}: {error}.")
                continue
            values[name], origins[name] = value, origin
    if problems:
        raise ConfigError(*problems)
    parsed: dict[str, Any] = {one.field: one.parse(values[one.name]) for one in OPTIONS}
    config = Config(**parsed)
    if config.enable_hidden_state_cache and not (config.server or config.hidden_bytes >> 20):
        raise ConfigError("hidden states: set max_hidden_state_cpu_size to some GiB, such as 4.")
    return LoadedConfig(config, origins, _unread_variables(environ))


def parse_request_params(
    params: Mapping[str, object] | None, config: Config
) -> tuple[RequestParams, list[str]]:
    """Read a request's ``kv_transfer_params`` over the configured defaults.

    Keys of other connectors are ignored. An illegal value is ignored too, with one sentence in
    the returned list: it is no reason to fail the request.
    """
    chosen = {}
    warnings = []
    for name in RequestParams.__struct_fields__:
        chosen[name] = getattr(config, name)
        value = (params or {}).get(name)
        if value is None:
            continue
        try:
            chosen[name] = parse_tokens(value)
        except ValueError as error:
            warnings.append(f"{name} in kv_transfer_params is ignored: {error}.")
    return RequestParams(**chosen), warnings


def describe(config: Config, origins: Mapping[str, str]) -> str:
    """One line for the log: every key with its value and origin."""
    return " ".join(
        f"{option.name}={option.show(getattr(config, option.field))} ({origins[option.name]})"
        for option in OPTIONS
    )


def _read_yaml(path: str, problems: list[str]) -> dict[str, object]:
    try:
        content = yaml.safe_load(Path(path).read_bytes())
    except (OSError, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        problems.append(
            f"{CONFIG_FILE_VARIABLE} names {path!r}, which cannot be read ({reason}): correct the "
            "file or the variable, or unset it."
        )
        return {}
    if isinstance(content, dict):
        return content
    if content is not None:
        problems.append(f"{path} holds no mapping: write one `key: value` per line.")
    return {}


def _unread_variables(environ: Mapping[str, str]) -> list[str]:
    """Other software sets LMCACHE_ variables too, so that unknown ones are no errors."""
    known = [*_VARIABLES, CONFIG_FILE_VARIABLE, *_OF_TIERS]
    warnings = []
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            hint = f": did you mean {nearest[0]}?" if nearest else "."
            warnings.append(f"Environment variable {variable} is not read{hint}")
    return warnings
