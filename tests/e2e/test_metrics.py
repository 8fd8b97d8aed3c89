"""Stats and Prometheus metrics against vLLM's own classes; no engine is started."""

from __future__ import annotations

import json
import pickle
import warnings
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_connector.counters import Counters

pytest.importorskip("vllm", exc_type=ImportError)

LABELS = ["model_name", "engine"]
ENGINES = {0: ["m", "0"], 3: ["m", "3"]}
DATA = {
    "asked_tokens": 100,
    "loaded_tokens": 64,
    "stored_rows": {"full": 3, "state": 1},
    "load_bytes": {"full": 2 << 20, "state": 1 << 20},
    "load_seconds": 0.5,
    "pool_used_bytes": 7,
}


@pytest.fixture(scope="module")
def metrics() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lmcache_connector.observability import metrics
    return metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prom(metrics: ModuleType, registry: CollectorRegistry) -> Any:
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return metrics.ConnectorPromMetrics(config, types, LABELS, ENGINES)


def value(registry: CollectorRegistry, name: str, engine: str = "0", **labels: str) -> Any:
    return registry.get_sample_value(
        f"vllm:lmcache_{name}", {"model_name": "m", "engine": engine, **labels}
    )


def test_every_counter_is_documented(metrics):
    assert list(metrics.METRICS) == list(Counters.__struct_fields__)


def test_ranks_then_scheduler_then_log_interval(metrics):
    """The way of vLLM: pickled by each rank, merged with the scheduler's, sent as a dict."""
    ranks = [
        pickle.loads(pickle.dumps(metrics.ConnectorStats({"load_bytes": {"full": 10}})))
        for _ in range(2)
    ]
    step = ranks[0].aggregate(ranks[1])
    step = step.aggregate(metrics.ConnectorStats({"lookups": 1, "pool_used_bytes": 5}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(step.to_dict()))
    assert sent == json.loads(json.dumps(step.to_dict()))
    interval = metrics.ConnectorStats(data=sent).aggregate(metrics.ConnectorStats(data=sent))
    assert interval.data == {"load_bytes": {"full": 40}, "lookups": 2, "pool_used_bytes": 5}


def test_one_dict_given_to_two_loggers_is_not_counted_twice(metrics):
    sent = {"lookups": 1, "stored_rows": {"full": 1}}
    first, second = metrics.ConnectorStats(data=sent), metrics.ConnectorStats(data=sent)
    for logger in (first, second):
        logger.aggregate(metrics.ConnectorStats(data={"lookups": 2, "stored_rows": {"full": 4}}))
    assert first.data == second.data == {"lookups": 3, "stored_rows": {"full": 5}}
    assert sent == {"lookups": 1, "stored_rows": {"full": 1}}


def test_empty_and_reset(metrics):
    stats = metrics.ConnectorStats()
    assert stats.is_empty()
    stats.aggregate(metrics.ConnectorStats(DATA))
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert metrics.ConnectorStats().is_empty()


def test_the_log_line_has_sums_over_groups_and_speeds(metrics):
    assert metrics.ConnectorStats(DATA).reduce() == {
        "asked_tokens": 100,
        "loaded_tokens": 64,
        "stored_rows": 4,
        "load_bytes": 3 << 20,
        "load_mib_per_s": 6.0,
        "pool_used_bytes": 7,
    }


def test_prometheus_counts_by_engine_and_group(prom, registry):
    prom.observe(DATA)
    prom.observe(DATA, engine_idx=0)
    prom.observe({"asked_tokens": 1, "pool_used_bytes": 1}, engine_idx=3)
    assert value(registry, "asked_tokens_total") == 200
    assert value(registry, "asked_tokens_total", "3") == 1
    assert value(registry, "stored_rows_total", group="full") == 6
    assert value(registry, "stored_rows_total", group="state") == 2
    assert value(registry, "load_seconds_total") == 1.0
    assert value(registry, "pool_used_bytes") == 7
    assert value(registry, "pool_used_bytes", "3") == 1


def test_prometheus_skips_names_of_another_version(prom, registry):
    prom.observe({"future": 1, "future_rows": {"full": 1}, "lookups": 2})
    assert value(registry, "lookups_total") == 2


def test_everything_that_counters_take_can_be_observed(prom, registry):
    counters = Counters()
    for name in Counters.__struct_fields__:
        field = getattr(counters, name)
        setattr(counters, name, {"full": 1} if isinstance(field, dict) else 1)
    taken = counters.take()
    assert list(taken) == list(Counters.__struct_fields__)
    prom.observe(taken)
    samples = [sample for family in registry.collect() for sample in family.samples]
    measured = [s for s in samples if s.value == 1 and not s.name.endswith("_created")]
    assert len(measured) == len(taken)


def test_vllms_exporter_finds_and_feeds_the_connectors_metrics(metrics, monkeypatch, registry):
    """Through vLLM's own KVConnectorProm, as its server builds it."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as vllm_metrics

    connector = SimpleNamespace(
        build_prom_metrics=metrics.ConnectorPromMetrics,
        build_kv_connector_stats=metrics.ConnectorStats,
    )
    monkeypatch.setattr(
        vllm_metrics.KVConnectorFactory, "get_connector_class", lambda config: connector
    )
    for name, kind in (("_gauge_cls", Gauge), ("_counter_cls", Counter)):
        monkeypatch.setattr(vllm_metrics.KVConnectorProm, name, partial(kind, registry=registry))
    transfer = SimpleNamespace(kv_connector="x")
    prom = vllm_metrics.KVConnectorProm(
        SimpleNamespace(kv_transfer_config=transfer), LABELS, ENGINES
    )
    prom.observe(DATA, 3)
    assert value(registry, "loaded_tokens_total", "3") == 64

    lines: list[str] = []
    logging = vllm_metrics.KVConnectorLogging(transfer)
    logging.observe(DATA)
    logging.observe(DATA)
    logging.log(lambda template, *args: lines.append(template % args))
    assert len(lines) == 1
    assert "loaded_tokens=128" in lines[0]


def test_counters_have_a_sample_before_their_first_event(metrics: ModuleType) -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics.ConnectorPromMetrics(SimpleNamespace(kv_transfer_config=None), types, LABELS, ENGINES)
    for engine in ENGINES.values():
        labels = dict(zip(LABELS, engine, strict=True))
        assert registry.get_sample_value("vllm:lmcache_failed_tokens_total", labels) == 0
