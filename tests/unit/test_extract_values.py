"""Exports to a tier: rows by URL, what is refused, and that no reader hangs or gets wrong rows."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lmcache_connector.errors import ConfigError, ExtractionError
from lmcache_connector.groups import FULL, LayerSpec
from lmcache_connector.hidden_states import files, values
from lmcache_connector.hidden_states.extract import Extractor
from lmcache_connector.hidden_states.settings import URL, ExtractSettings, parse_settings, path_for
from lmcache_connector.hidden_states.writer import Export, ExportWriter
from lmcache_connector.metadata import ExportOp, ExtractStep
from lmcache_connector.storage.tiers.base import TierError, header_bytes
from lmcache_connector.storage.tiers.memory import MemoryTier

TAPS = (0, 2, 4)
COUNT, HIDDEN = 10, 8
HEAD_BYTES = 4096
_numbers = itertools.count()


@pytest.fixture
def place() -> str:
    """A tier of the test's own."""
    return f"memory://{next(_numbers)}"


@pytest.fixture
def url(place: str) -> str:
    return path_for(place, "r")


def settings(place: str, **keys: Any) -> ExtractSettings:
    return parse_settings({"shared_storage_path": place, **keys}, TAPS)


def rows_of(dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> torch.Tensor:
    return (torch.rand(COUNT, layers, HIDDEN) + 0.1).to(dtype)


def export(url: str, rows: torch.Tensor | None = None) -> Export:
    rows = rows_of() if rows is None else rows
    return Export(url, TAPS[: rows.shape[1]], None, torch.arange(COUNT), rows)


def write(place: str, *exports: Export, **keys: Any) -> None:
    writer = ExportWriter(settings(place, **keys))
    for one in exports:
        assert writer.admit(one.rows.nbytes)
        writer.submit(one)
    writer.close()


def outlet(place: str) -> Any:
    return values.open_outlet(place)


def names(url: str) -> tuple[str, str]:
    """Of the values that hold rows and head."""
    return values._place(url)[1:]


# ---- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shared_storage_path": "ftp://x"}, "none of memory://, file://, redis://"),
        ({"shared_storage_path": "redis://me:secret@host"}, "given in the environment"),
        ({"shared_storage_path": "redis://host#here"}, "shared_storage_path"),
        ({"max_size": 1}, "a tier has its own bounds"),
        ({"ttl": 1}, "a tier has its own bounds"),
    ],
)
def test_illegal_settings_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        settings(**{"place": "memory://", **keys})
    assert "secret" not in str(refused.value)


def test_a_tier_that_cannot_be_used_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no option 'colour'"):
        ExportWriter(settings("memory://?colour=red"))
    (tmp_path / "taken").touch()
    with pytest.raises(TierError, match="cannot be used"):
        ExportWriter(settings(f"file://{tmp_path}/taken"))


def test_every_request_has_a_url_of_its_own(place: str) -> None:
    urls = {path_for(place, "r") for _ in range(100)}
    assert len(urls) == 100
    for url in urls:
        match = URL.fullmatch(url)
        assert match is not None
        assert match[1] == place
    assert URL.fullmatch("/rows/a://b#c.safetensors") is None


# ---- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_by_url_are_rows_by_file(
    tmp_path: Path, place: str, kind: str, dtype: torch.dtype
) -> None:
    place = place if kind == "memory" else f"file://{tmp_path}/tier"
    url, path, rows = path_for(place, "r"), path_for(str(tmp_path), "r"), rows_of(dtype, 2)
    write(place, export(url, rows), export(path, rows))
    (by_url, layers), (by_file, same) = map(files.load_with_layers, (url, path))
    assert layers == same == "0,2"
    assert list(by_url) == list(by_file) == ["hidden_states", "token_ids"]
    for name, tensor in by_file.items():
        assert by_url[name].dtype == tensor.dtype
        assert torch.equal(by_url[name], tensor)
    assert torch.equal(by_url["hidden_states"], rows)
    files.remove(url, keep_hidden_states=True)
    assert files.load(url, timeout=0)
    files.remove(url)
    files.remove(url)
    assert outlet(place).tier.contains(names(url)) == [False, False]
    with pytest.raises(TimeoutError):
        files.load(url, timeout=0)


def test_a_reader_waits_for_its_rows(place: str, url: str) -> None:
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(files.load(url, timeout=20)))
    reader.start()
    time.sleep(0.05)
    assert not found
    one = export(url)
    write(place, one)
    reader.join(20)
    assert torch.equal(found[0]["hidden_states"], one.rows)


def test_a_reader_waits_no_longer_than_it_says(url: str) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"is not there after 0\.2 s"):
        files.load(url, timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 5


def test_a_reader_hears_why_there_are_no_rows(place: str, url: str) -> None:
    bad = rows_of()
    bad[3, 1, 2] = float("nan")
    write(place, export(url, bad))
    with pytest.raises(ExtractionError, match="row of token 3 is zero or not finite"):
        files.load(url)
    files.write_error(url, "\0" * 10_000)  # of the largest form
    with pytest.raises(ExtractionError):
        files.load(url)
    write(place, export(url))
    assert len(files.load(url)["token_ids"]) == COUNT


# ---- damage -------------------------------------------------------------------------------------


def test_no_flipped_bit_gives_wrong_rows(place: str, url: str) -> None:
    write(place, export(url))
    stored = outlet(place).tier._values
    for name in names(url):
        whole = stored[name]
        for at in {*range(0, len(whole), 97), *range(100), len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            stored[name] = bytes(damaged)
            with pytest.raises(ExtractionError, match="is damaged"):
                files.load(url)
        stored[name] = whole
    assert files.load(url)


@pytest.mark.parametrize("trouble", ["gone", "short", "of another request"])
def test_a_head_without_its_rows_is_an_error(place: str, url: str, trouble: str) -> None:
    other = path_for(place, "other")
    write(place, export(url), export(other))
    stored, (rows, _) = outlet(place).tier._values, names(url)
    whole = stored.pop(rows)
    if trouble != "gone":
        stored[rows] = whole[:-1] if trouble == "short" else stored[names(other)[0]]
    with pytest.raises(ExtractionError, match=r"any more|damaged"):
        files.load(url, timeout=0)


def test_rows_are_those_of_their_head(place: str, url: str) -> None:
    """Two engines, or two lives of one, wrote to one URL at once."""
    stored, (_, head) = outlet(place).tier._values, names(url)
    write(place, export(url))
    first = stored[head]
    write(place, export(url))
    assert files.load(url)
    stored[head] = first
    with pytest.raises(ExtractionError, match="not those that its head tells of"):
        files.load(url, timeout=0)


def test_a_tier_is_opened_once_by_however_many(
    place: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = values.base.open_tier
    monkeypatch.setattr(values.base, "open_tier", lambda where: (time.sleep(0.2), real(where))[1])
    with ThreadPoolExecutor(4) as threads:
        assert len({id(each) for each in threads.map(outlet, [place] * 4)}) == 1


HEADS: list[Any] = [
    b"",
    b"[]",
    b"\xff\xfe",
    ["", "bfloat16", [10, 3], "0", []],
    ["", "bfloat16", [10, 3, -8], "0", []],
    ["", "bfloat16", [10, 0, 8], "0", []],
    ["", "bfloat16", [1 << 40, 1 << 20, 1 << 20], "0", []],
    ["", "bfloat16", [1 << 62, 1, 1], "0", []],
    ["", "bfloat16", [1 << 70, 1, 1], "0", []],
    ["", "load", [10, 3, 8], "0", []],
    ["", "int64", [10, 3, 8], "0", []],
    ["", "_inductor", [10, 3, 8], "0", []],
    ["", "no such", [10, 3, 8], "0", []],
    ["", "bfloat16", [10, 3, 8], "0", [], "more"],
    ["", "bfloat16", [10, 3, 8], "0", ["1", 2]],
    ["", "bfloat16", [10, 3, 8], "0", -1],
    {"error": ""},
]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
def test_a_head_that_makes_no_sense_is_an_error(place: str, url: str, head: Any) -> None:
    """However it got its checksum."""
    write(place, export(url))
    content = head if isinstance(head, bytes) else msgspec.json.encode(head)
    outlet(place).put(names(url)[1], memoryview(content.ljust(HEAD_BYTES)))
    with pytest.raises(ExtractionError, match="makes no sense"):
        files.load(url)


# ---- tiers that fail ----------------------------------------------------------------------------


class Failing(MemoryTier):
    """Takes no value of more than ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.puts: list[str] = []

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self.puts.append(name)
        if (size := sum(map(len, buffers))) > self.max_bytes:
            raise TierError(f"{size} bytes are too many")
        super().put(name, buffers)


def test_what_the_tier_does_not_take_is_an_error_marker(place: str, url: str) -> None:
    outlet(place).tier = Failing(HEAD_BYTES + header_bytes(1))
    large = export(url, rows_of().repeat(1, 1, 40))
    write(place, large)
    with pytest.raises(ExtractionError, match="bytes are too many"):
        files.load(url, timeout=0)
    # The next one is tried all the same.
    small = path_for(place, "small")
    write(place, export(small))
    assert files.load(small, timeout=0)


def test_more_layers_than_a_head_can_name_are_an_error_marker(place: str, url: str) -> None:
    rows = torch.ones(COUNT, 1500, 1)
    write(place, Export(url, tuple(range(1500)), None, torch.arange(COUNT), rows))
    with pytest.raises(ExtractionError, match="too many layers"):
        files.load(url, timeout=0)


def test_nothing_piles_up_before_a_tier_that_takes_nothing(
    place: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = outlet(place).tier = Failing(0)
    write(
        place, *(export(path_for(place, str(index))) for index in range(20)), num_writer_threads=1
    )
    assert len(tier.puts) == 2  # the rows of the first, and why they do not come
    now = time.monotonic
    monkeypatch.setattr(values.time, "monotonic", lambda: now() + 6)
    tier.max_bytes = 1 << 20
    write(place, export(url))
    assert files.load(url, timeout=0)


def test_a_tier_that_does_not_answer_is_told(place: str, url: str) -> None:
    def get(name: str, buffers: Sequence[memoryview]) -> bool:
        raise TierError("no answer in time")

    outlet(place).tier.get = get
    with pytest.raises(TierError, match="no answer in time"):
        files.load(url)


# ---- the extractor ------------------------------------------------------------------------------


@pytest.fixture
def extractor(place: str) -> Iterator[Extractor]:
    layer = LayerSpec("cache_only_layers.4", 4, 4, 0, "float32", FULL, 1)
    cache = torch.arange(12 * 3 * 4 * HIDDEN).float().reshape(12, 3, 4, HIDDEN) + 1
    extractor = Extractor(settings(place, max_queued_size="1000B"), TAPS, layer, cache, True)
    yield extractor
    extractor.close()


def op(url: str) -> ExportOp:
    return ExportOp("r", url, array("q", range(COUNT)).tobytes(), [7, 2, 9], TAPS)


def test_the_extractor_sends_rows_without_a_lock(extractor: Extractor, url: str) -> None:
    extractor.start(ExtractStep(begun={"r": url}))
    extractor.start(ExtractStep(finished=[op(url)]))
    assert extractor.take_sent() == {"r"}
    file = files.load(url, timeout=20)
    assert file["hidden_states"].shape == (COUNT, 3, HIDDEN)
    assert file["hidden_states"][4, 0, 0] == 2 * 3 * 4 * HIDDEN + 1
    assert file["token_ids"].tolist() == list(range(COUNT))


def test_of_an_aborted_request_nothing_is_left(extractor: Extractor, place: str) -> None:
    """Nobody was told its URL."""
    urls = {name: path_for(place, name) for name in ("aborted", "running")}
    extractor.start(ExtractStep(begun=urls))
    extractor.start(ExtractStep(dropped=["aborted", "never begun"]))
    extractor.close()
    assert not outlet(place).tier._values


def test_a_full_queue_holds_up_no_step(
    extractor: Extractor, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, put = threading.Event(), values._Outlet.put
    monkeypatch.setattr(values._Outlet, "put", lambda *a: (gate.wait(20), put(*a))[1])
    urls = [path_for(place, str(index)) for index in range(2)]
    for url in urls:
        extractor.start(ExtractStep(begun={"r": url}))
        extractor.start(ExtractStep(finished=[op(url)]))
        assert extractor.take_sent() == {"r"}
    gate.set()
    assert files.load(urls[0], timeout=20)
    with pytest.raises(ExtractionError, match="max_queued_size"):
        files.load(urls[1], timeout=20)
