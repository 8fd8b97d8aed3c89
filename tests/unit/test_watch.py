"""Stored but never served: a warning of its own."""

from __future__ import annotations

from lmcache_connector.scheduler.watch import MIN_LOOKUPS, MIN_STORED_BYTES, ServedWatch


def warnings_of(watch: ServedWatch, num_requests: int) -> list[str]:
    return [text for _ in range(num_requests) if (text := watch.observe_request())]


def test_warns_once_and_names_what_was_stored():
    watch = ServedWatch()
    watch.observe_stored(MIN_STORED_BYTES // 2, "full")
    watch.observe_stored(MIN_STORED_BYTES // 2, "state")
    assert warnings_of(watch, MIN_LOOKUPS - 1) == []
    (warning,) = warnings_of(watch, 1)
    assert "1.0 GiB were stored (full: 512 MiB, state: 512 MiB)" in warning
    assert "0 tokens served in 200 lookups" in warning
    assert warnings_of(watch, 2 * MIN_LOOKUPS) == []


def test_little_stored_is_no_reason():
    watch = ServedWatch()
    watch.observe_stored(MIN_STORED_BYTES - 1, "full")
    assert warnings_of(watch, 2 * MIN_LOOKUPS) == []
    watch.observe_stored(1, "full")
    assert len(warnings_of(watch, 1)) == 1


def test_one_served_token_ends_the_watch():
    watch = ServedWatch()
    watch.observe_stored(MIN_STORED_BYTES, "full")
    watch.observe_served(1)
    watch.observe_served(0)
    assert warnings_of(watch, 2 * MIN_LOOKUPS) == []


def test_a_load_of_nothing_serves_nothing():
    watch = ServedWatch()
    watch.observe_stored(MIN_STORED_BYTES, "full")
    watch.observe_served(0)
    assert len(warnings_of(watch, MIN_LOOKUPS)) == 1
