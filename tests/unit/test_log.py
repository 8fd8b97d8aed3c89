"""Log lines reach vLLM's handler, and a flood of warnings does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lmcache_connector import log


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    monkeypatch.setattr(log, "_last", {})
    return clock


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What a handler on the logger "vllm" gets: the only one that vLLM configures."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    parent = logging.getLogger("vllm")
    parent.addHandler(handler)
    yield records
    parent.removeHandler(handler)


def messages(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


def test_lines_reach_the_handler_of_vllm(lines):
    log.init_logger("lmcache_connector.some.module").warning("hello %s", "there")
    (record,) = lines
    assert record.getMessage() == "hello there"
    assert record.name == "vllm.lmcache_connector.some.module"


def test_repeats_within_the_interval_are_held_back_and_counted(clock, lines):
    logger = log.init_logger("lmcache_connector.a")
    for _ in range(3):
        log.warn_every(logger, "full", 60, "pool is full: %d%%", 99)
    clock.now += 59.9
    log.warn_every(logger, "full", 60, "pool is full: %d%%", 98)
    assert messages(lines) == ["pool is full: 99%"]
    clock.now += 0.1
    log.warn_every(logger, "full", 60, "pool is full: %d%%", 97)
    assert messages(lines)[1:] == ["pool is full: 97% (3 more like this since the last line)"]
    clock.now += 60
    log.warn_every(logger, "full", 60, "pool is full: %d%%", 96)
    assert messages(lines)[2:] == ["pool is full: 96%"]


def test_keys_and_loggers_are_limited_apart(clock, lines):
    first, second = log.init_logger("lmcache_connector.a"), log.init_logger("lmcache_connector.b")
    for logger in (first, second):
        for key in ("x", "y"):
            log.warn_every(logger, key, 60, "w")
    assert len(lines) == 4


def test_a_percent_sign_in_a_line_without_values_is_text(clock, lines):
    logger = log.init_logger("lmcache_connector.a")
    for _ in range(3):
        log.warn_every(logger, "k", 60, "50% of a user's %s")
        clock.now += 30
    assert messages(lines) == [
        "50% of a user's %s",
        "50% of a user's %s (1 more like this since the last line)",
    ]


def test_the_line_names_the_caller(clock, lines):
    log.warn_every(log.init_logger("lmcache_connector.a"), "k", 60, "w")
    assert lines[0].filename == "test_log.py"
