"""Configuration: sources, origins, units, and messages that name the cause and the fix."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from lmcache_connector import errors
from lmcache_connector.config import (
    OPTIONS,
    Config,
    LoadedConfig,
    describe,
    load_config,
    parse_request_params,
)
from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.tiers.base import parse_tier_url

GIB = 1 << 30
DEFAULTS = Config(
    chunk_size=None,
    max_local_cpu_bytes=4 * GIB,
    save_decode_cache=False,
    server=None,
    tiers=(),
    local_disk=None,
    remote_url=None,
    load_timeout=10.0,
    lookup_timeout=2.0,
    fail_on_load_error=False,
    min_hit_tokens=0,
    max_offload_tokens=None,
    extract_hidden_states={},
    enable_hidden_state_cache=False,
    max_hidden_state_cpu_bytes=None,
    hidden_state_layers=None,
    hidden_state_dtype="native",
)


def load(**extra_config: object) -> Config:
    return load_config(extra_config, {}).config


def problems_of(extra_config: dict[object, object], environ: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(extra_config, environ)  # type: ignore[arg-type]
    return caught.value.problems


def yaml_file(path: Path, text: str) -> dict[str, str]:
    file = path / "config.yaml"
    file.write_text(text)
    return {"LMCACHE_CONFIG_FILE": str(file)}


def test_nothing_given_is_the_defaults():
    assert load_config({}, {}) == LoadedConfig(
        DEFAULTS, dict.fromkeys((option.name for option in OPTIONS), "default"), []
    )


def test_every_field_has_a_value_of_its_type():
    chosen = {option.name: option.default for option in OPTIONS} | {
        "chunk_size": "640",
        "server": "ipc:///run/kv",
        "tiers": "memory://,file:///cache",
        "local_disk": "file:///local",
        "remote_url": "redis://host:6379",
        "load_timeout": "3",
        "max_offload_tokens": "100",
        "max_hidden_state_cpu_size": "1GiB",
        "hidden_state_layers": "0,-1",
        "extract_hidden_states": '{"shared_storage_path": "/rows"}',
    }
    for config in (load(), load(**chosen)):
        assert msgspec.convert(dataclasses.asdict(config), Config) == config


@pytest.mark.parametrize(
    ("extra", "env", "in_file", "expected", "origin"),
    [
        (64, "32", "16", 64, "extra_config"),
        (None, "32", "16", 32, "env"),
        (None, None, "16", 16, "yaml"),
        (None, None, None, 0, "default"),
    ],
)
def test_precedence_and_origin(tmp_path, extra, env, in_file, expected, origin):
    environ = yaml_file(tmp_path, "" if in_file is None else f"min_hit_tokens: {in_file}\n")
    if env is not None:
        environ["LMCACHE_MIN_HIT_TOKENS"] = env
    loaded = load_config({} if extra is None else {"min_hit_tokens": extra}, environ)
    assert loaded.config.min_hit_tokens == expected
    assert loaded.origins["min_hit_tokens"] == origin
    assert loaded.origins["load_timeout"] == "default"


def test_null_resets_what_a_weaker_source_set(tmp_path):
    environ = yaml_file(tmp_path, "chunk_size: 512\nmax_offload_tokens: 1000\n")
    assert load_config({}, environ).config.chunk_size == 512
    loaded = load_config({"chunk_size": None}, {**environ, "LMCACHE_MAX_OFFLOAD_TOKENS": "none"})
    assert (loaded.config.chunk_size, loaded.config.max_offload_tokens) == (None, None)
    assert loaded.origins["chunk_size"] == "extra_config"
    assert load_config({}, {**environ, "LMCACHE_CHUNK_SIZE": "auto"}).config.chunk_size is None


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (4, 4 * GIB),
        (0.5, GIB // 2),
        ("4", 4 * GIB),
        ("1.5", 3 * GIB // 2),
        ("512MiB", 512 << 20),
        ("4GiB", 4 * GIB),
        ("4 gib", 4 * GIB),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("64KB", 64_000),
        ("4096B", 4096),
    ],
)
def test_sizes(value, num_bytes):
    assert load(max_local_cpu_size=value).max_local_cpu_bytes == num_bytes


@pytest.mark.parametrize(
    "value",
    [0, -1, 0.0, "0GiB", "-4", "4G", "4 parsecs", "", "GiB", True, None, [4], float("nan"), 1e300],
)
def test_illegal_sizes(value):
    (problem,) = problems_of({"max_local_cpu_size": value}, {})
    assert problem.startswith("max_local_cpu_size in kv_connector_extra_config is ")
    assert "512MiB" in problem


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, True) for value in (True, 1, "true", "True", "1", "yes", "YES")),
        *((value, False) for value in (False, 0, "false", "0", "no")),
    ],
)
def test_booleans(value, expected):
    assert load(save_decode_cache=value).save_decode_cache is expected


@pytest.mark.parametrize("value", ["on", "", "2", 2, 1.0, None, []])
def test_illegal_booleans(value):
    (problem,) = problems_of({"save_decode_cache": value}, {})
    assert "expected true or false" in problem


@pytest.mark.parametrize("value", [0, -1, "soon", "", True, None, "nan", float("inf"), 10**400])
def test_illegal_seconds(value):
    (problem,) = problems_of({"load_timeout": value}, {})
    assert "seconds" in problem


def test_seconds_from_text_and_whole_numbers():
    config = load_config({"load_timeout": 3}, {"LMCACHE_LOOKUP_TIMEOUT": "0.25"}).config
    assert (config.load_timeout, config.lookup_timeout) == (3.0, 0.25)
    assert isinstance(config.load_timeout, float)


@pytest.mark.parametrize("key", ["chunk_size", "min_hit_tokens", "max_offload_tokens"])
@pytest.mark.parametrize("value", [-1, 1.0, "2.5", "-3", "", "1_000", True, "9" * 5000])
def test_illegal_token_counts(key, value):
    (problem,) = problems_of({key: value}, {})
    assert "whole number of tokens" in problem


def test_zero_tokens_are_legal_counts_and_no_chunk():
    assert load(min_hit_tokens=0, max_offload_tokens="0").max_offload_tokens == 0
    (problem,) = problems_of({"chunk_size": 0}, {})
    assert "above 0" in problem


def test_a_typo_names_the_nearest_key_in_every_source_that_is_ours(tmp_path):
    environ = yaml_file(tmp_path, "chunksize: 256\n")
    yaml_problem, extra_problem = problems_of({"max_cpu_size": 4}, environ)
    assert yaml_problem.startswith("chunksize in ")
    assert "config.yaml" in yaml_problem
    assert yaml_problem.endswith("did you mean chunk_size?")
    assert extra_problem == (
        "max_cpu_size in kv_connector_extra_config is an unknown key: "
        "did you mean max_local_cpu_size?"
    )


def test_keys_that_are_no_text_are_unknown(tmp_path):
    assert len(problems_of({1: 2}, yaml_file(tmp_path, "2: 3\n"))) == 2


def test_all_problems_are_told_at_once_and_overridden_values_are_checked(tmp_path):
    environ = yaml_file(tmp_path, "load_timeout: never\nnonsense: 1\n")
    environ["LMCACHE_SAVE_DECODE_CACHE"] = "maybe"
    problems = problems_of({"load_timeout": 5, "chunk_size": -1}, environ)
    assert len(problems) == 4
    assert any(text.startswith("LMCACHE_SAVE_DECODE_CACHE is 'maybe'") for text in problems)
    assert any(text.startswith("load_timeout in ") for text in problems)


def test_unknown_variables_of_other_software_only_warn():
    loaded = load_config(
        {}, {"LMCACHE_LOG_LEVEL": "INFO", "LMCACHE_CHUNKSIZE": "256", "HOME": "/", "LMCACHE": "x"}
    )
    assert loaded.config == DEFAULTS
    assert loaded.warnings == [
        "Environment variable LMCACHE_CHUNKSIZE is not read: did you mean LMCACHE_CHUNK_SIZE?",
        "Environment variable LMCACHE_LOG_LEVEL is not read.",
    ]


def test_no_variable_that_is_read_anywhere_is_said_not_to_be():
    package = Path(errors.__file__).parent
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    read = {*re.findall(r"\bLMCACHE_[A-Z_]*[A-Z]\b", sources)} - {"LMCACHE_CONFIG_FILE"}
    assert {"LMCACHE_SERVER", "LMCACHE_REDIS_PASSWORD", "LMCACHE_REDIS_PASSWORD_FILE"} <= read
    keys = {option.name for option in OPTIONS}
    of_others = {name: "" for name in read if name.removeprefix("LMCACHE_").lower() not in keys}
    assert load_config({}, of_others).warnings == []
    assert load_config({}, {"LMCACHE_REDIS_PASSWORT": "x"}).warnings == [
        "Environment variable LMCACHE_REDIS_PASSWORT is not read: "
        "did you mean LMCACHE_REDIS_PASSWORD?"
    ]


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "just text", "a: 2001-99-99", "\x00"])
def test_a_broken_file_is_a_problem_and_hides_no_other(tmp_path, text):
    problems = problems_of({"chunk_size": -1}, yaml_file(tmp_path, text))
    assert len(problems) == 2
    assert "config.yaml" in problems[0]


def test_a_missing_file_is_a_problem():
    (problem,) = problems_of({}, {"LMCACHE_CONFIG_FILE": "/no/such/{}.yaml"})
    assert "LMCACHE_CONFIG_FILE names '/no/such/{}.yaml'" in problem
    assert "unset it" in problem


def test_both_roles_get_equal_results():
    given = {"max_local_cpu_size": "1GiB"}, {"LMCACHE_CHUNK_SIZE": "640"}
    assert load_config(*given) == load_config(*given)


def test_the_result_cannot_be_changed():
    with pytest.raises(AttributeError):
        load().chunk_size = 1  # type: ignore[misc]


def test_describe_shows_every_value_with_unit_and_origin():
    loaded = load_config(
        {"max_local_cpu_size": "1.5GB", "save_decode_cache": True}, {"LMCACHE_LOAD_TIMEOUT": "2.5"}
    )
    assert describe(loaded.config, loaded.origins) == (
        "chunk_size=auto (default) max_local_cpu_size=1500000000B (extra_config) "
        "save_decode_cache=true (extra_config) server=none (default) tiers=none (default) "
        "local_disk=none (default) remote_url=none (default) load_timeout=2.5s (env) "
        "lookup_timeout=2s (default) fail_on_load_error=false (default) "
        "min_hit_tokens=0 (default) max_offload_tokens=none (default) "
        "enable_hidden_state_cache=false (default) max_hidden_state_cpu_size=none (default) "
        "hidden_state_layers=all (default) hidden_state_dtype=native (default) "
        "extract_hidden_states={} (default)"
    )
    chosen = dataclasses.replace(loaded.config, chunk_size=640, max_local_cpu_bytes=512 << 20)
    text = describe(chosen, loaded.origins)
    assert text.startswith("chunk_size=640 (default) max_local_cpu_size=512MiB ")


def test_request_params_override_the_configured_ones():
    config = load(min_hit_tokens=100)
    params, warnings = parse_request_params(
        {"max_offload_tokens": 5, "remote_host": "other's"}, config
    )
    assert (params.min_hit_tokens, params.max_offload_tokens) == (100, 5)
    assert warnings == []
    params, warnings = parse_request_params({"min_hit_tokens": 0}, config)
    assert (params.min_hit_tokens, params.max_offload_tokens, warnings) == (0, None, [])


@pytest.mark.parametrize("params", [None, {}, {"min_hit_tokens": None}])
def test_request_without_params_has_the_configured_ones(params):
    chosen, warnings = parse_request_params(params, load(min_hit_tokens=7, max_offload_tokens=9))
    assert (chosen.min_hit_tokens, chosen.max_offload_tokens, warnings) == (7, 9, [])


@pytest.mark.parametrize("value", [-1, 1.5, "many", True, [1], {}, float("nan")])
def test_illegal_request_params_are_ignored_with_a_warning(value):
    config = load(min_hit_tokens=7)
    chosen, warnings = parse_request_params(
        {"min_hit_tokens": value, "max_offload_tokens": 8}, config
    )
    assert (chosen.min_hit_tokens, chosen.max_offload_tokens) == (7, 8)
    (warning,) = warnings
    assert warning.startswith("min_hit_tokens in kv_transfer_params is ignored")


def test_seconds_may_be_written_as_they_are_shown():
    config = load(load_timeout="10s", lookup_timeout="0.5")
    assert (config.load_timeout, config.lookup_timeout) == (10.0, 0.5)


def test_a_server_is_a_socket_of_this_host():
    assert load(server="ipc:///run/lmcache/kv").server == "ipc:///run/lmcache/kv"
    assert load(server="none").server is None
    assert load(server=None).server is None
    (problem,) = problems_of({"server": "tcp://10.0.0.1:5555"}, {})
    assert "share a host" in problem


@pytest.mark.parametrize(
    "value", ["ipc://run/kv", "ipc:///", "ipc:///run/", "/run/kv", "kv", "", "ipc:///a\0b", 1, True]
)
def test_illegal_servers(value):
    (problem,) = problems_of({"server": value}, {})
    assert "expected ipc:///path" in problem


def test_tiers_are_listed_nearest_first(tmp_path):
    near, far = "file:///var/cache/kv?max_size=9GB", "redis://host:6379"
    assert load(tiers=[near, far]).tier_urls == (near, far)
    assert load_config({}, {"LMCACHE_TIERS": f"{near}, {far}"}).config.tiers == (near, far)
    environ = yaml_file(tmp_path, f"tiers:\n- {near}\n- {far}\n")
    assert load_config({}, environ).config.tiers == (near, far)
    # A stronger source replaces the list, and may empty it.
    assert load_config({"tiers": []}, environ).config.tier_urls == ()
    assert load_config({}, {**environ, "LMCACHE_TIERS": ""}).config.tiers == ()


def test_names_of_single_tiers_stand_around_the_list():
    config = load(remote_url="redis://r:1", tiers=["memory://"], local_disk="file:///d")
    assert config.tier_urls == ("file:///d", "memory://", "redis://r:1")
    assert load(local_disk="file:///d").tier_urls == ("file:///d",)
    assert load(local_disk="none", remote_url=None).tier_urls == ()
    loaded = load_config({"tiers": ["memory://", "file:///d"]}, {})
    assert "tiers=memory://,file:///d (extra_config)" in describe(loaded.config, loaded.origins)


@pytest.mark.parametrize("key", ["tiers", "local_disk", "remote_url"])
@pytest.mark.parametrize("value", ["/var/cache", 1, True, ["/var/cache"], {"a": 1}, [1]])
def test_illegal_tiers(key, value):
    (problem,) = problems_of({key: value}, {})
    assert problem.startswith(f"{key} in kv_connector_extra_config is ")
    assert "URL" in problem


@pytest.mark.parametrize("key", ["tiers", "local_disk", "remote_url"])
def test_credentials_in_a_url_are_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({key: "redis://me:secret@host:6379/0"}, {})
    assert "environment" in str(error.value)
    assert "secret" not in str(error.value)
    assert load_config({key: "file:///a@b"}, {}).config.tier_urls == ("file:///a@b",)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:se/cret@host:6379",
        "redis://:se#cret@host:6379",
        "redis://:se?cret@host:6379",
        "redis://:se[cret@host:6379",
        "redis://:secret%40host:6379",
        "s3://bucket?endpoint=http://me:secret@host",
        "s3://bucket?endpoint=http%3A%2F%2Fme%3Asecret%40host",
    ],
)
def test_credentials_are_found_where_they_are_not_escaped(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials are given in") as first:
        load_config({"tiers": ["file:///a", url]}, {})
    with pytest.raises(ConfigError, match="credentials are given in") as second:
        parse_tier_url(url)
    assert "cret" not in str(first.value) + str(second.value)


def test_the_seeds_file_of_hidden_states_is_read_as_written(tmp_path):
    environ = yaml_file(
        tmp_path,
        "chunk_size: 256\n\nenable_hidden_state_cache: true\n"
        "max_hidden_state_cpu_size: 4          # GiB, pinned CPU pool size\n"
        "# hidden_state_layers: [0, 1]         # optional allowlist (see below)\n",
    )
    config = load_config({}, environ).config
    assert (config.enable_hidden_state_cache, config.hidden_bytes) == (True, 4 * GIB)
    assert (config.hidden_state_layers, config.hidden_state_dtype) == (None, "native")
    environ = yaml_file(
        tmp_path, Path(environ["LMCACHE_CONFIG_FILE"]).read_text().replace("# hidden", "hidden")
    )
    assert load_config({}, environ).config.hidden_state_layers == (0, 1)


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ([0, 24, -1], (0, 24, -1)),
        ([3, 3], (3,)),
        ("0, 24,-1", (0, 24, -1)),
        ("-1", (-1,)),
        (None, None),
        ("all", None),
    ],
)
def test_layers_of_hidden_states(value, layers):
    config = load(hidden_state_layers=value)
    assert config.hidden_state_layers == layers
    assert load(hidden_state_layers=config.hidden_state_layers) == config


@pytest.mark.parametrize(
    "value", [[], "", "x", [True], [0.5], ["a"], 3, {"0": 1}, [1 << 20], [[0]]]
)
def test_illegal_layers_of_hidden_states(value):
    (problem,) = problems_of({"hidden_state_layers": value}, {})
    assert "expected a list of layer indices such as [0, 24, -1]" in problem


@pytest.mark.parametrize("size", [None, "none", "512KiB"])
def test_hidden_states_need_a_pool(size):
    given = {"enable_hidden_state_cache": True}
    given |= {} if size is None else {"max_hidden_state_cpu_size": size}
    (problem,) = problems_of(given, {})
    assert "set max_hidden_state_cpu_size to some GiB, such as 4" in problem
    # No pool, or that of a server.
    assert load(**{**given, "enable_hidden_state_cache": False}).hidden_bytes == 0
    assert load(**given, server="ipc:///run/kv").enable_hidden_state_cache


def test_illegal_options_of_hidden_states():
    for key, value, text in (
        ("max_hidden_state_cpu_size", 0, "a size above 0: a number of GiB such as 4"),
        ("max_hidden_state_cpu_size", -1, "above 0"),
        ("max_hidden_state_cpu_size", True, "above 0"),
        ("hidden_state_dtype", "fp8", "native or float32"),
        ("hidden_states_dtype", "native", "did you mean hidden_state_dtype?"),
        ("enable_hidden_state_cache", "on", "true or false"),
    ):
        (problem,) = problems_of({key: value}, {})
        assert text in problem
        assert key in problem
