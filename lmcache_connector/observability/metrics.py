"""Counters as vLLM's connector stats (its log line) and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_connector.counters import GAUGES, Counters, merge_counts

# "vllm:": what starts so is unregistered when an engine is built again in one process.
METRIC_PREFIX = "vllm:lmcache_"

# A row is one chunk of one object group, all its shards together.
METRICS = {
    "lookups": "Requests looked up in the cache.",
    "asked_tokens": "Tokens that lookups asked for, past vLLM's own prefix hit.",
    "hit_tokens": "Tokens that lookups found restorable, past vLLM's own prefix hit.",
    "loaded_tokens": "Tokens restored from the cache.",
    "loaded_group_tokens": "Tokens whose KV was copied, by object group.",
    "failed_tokens": "Tokens of loads that failed; they are recomputed.",
    "expired_lookups": "Lookups that became misses because a tier answered too late.",
    "stored_rows": "Chunks stored, by object group.",
    "dropped_rows": "Chunks not kept for lack of room or of certainty, by object group.",
    "evicted_rows": "Chunks evicted from the pool, by object group.",
    "corrupt_objects": "Chunks dropped because their bytes had changed, by object group.",
    "tier_hit_rows": "Chunks read from a tier.",
    "tier_read_bytes": "Bytes read from a tier.",
    "tier_written_bytes": "Bytes written to a tier.",
    "tier_dropped_rows": "Chunks not written to a tier: it was too slow, or failed.",
    "tier_corrupt_rows": "Chunks of a tier that failed their check and were removed.",
    "tier_errors": "Calls that a tier failed.",
    "hidden_chunks": "Chunks of hidden states, counted by layer, by what became of them.",
    "exports": "Requests whose hidden states were to be exported, by what became of it.",
    "export_bytes": "Bytes of hidden states exported.",
    "pool_used_bytes": "Bytes of the KV pool in use.",
    "pool_capacity_bytes": "Bytes of the KV pool.",
    "store_bytes": "Bytes copied from the engine to the pool, over all ranks.",
    "load_bytes": "Bytes copied from the pool to the engine, over all ranks.",
    "store_seconds": "Seconds from start to end of copies to the pool, over all ranks.",
    "load_seconds": "Seconds from start to end of copies from the pool, over all ranks.",
}
# The label of metrics that are kept by something.
_LABELS = {
    name: "tier" if name.startswith("tier_") else "group"
    for name in METRICS
    if isinstance(getattr(Counters(), name), dict)
} | {"hidden_chunks": "outcome", "exports": "outcome"}


class ConnectorStats(KVConnectorStats):
    """What ``Counters.take`` returned, merged over ranks and steps.

    ``data`` holds numbers, and dicts of numbers by object group tag or tier, and survives any
    serialisation. It is copied on entry: vLLM hands one dict to several loggers that add to it.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.reset()
        merge_counts(self.data, data or {})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        merge_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sums over groups; the seconds of copies become MiB/s, as a mean over ranks."""
        totals = {
            name: sum(value.values()) if isinstance(value, dict) else value
            for name, value in self.data.items()
        }
        for verb in ("store", "load"):
            if seconds := totals.pop(f"{verb}_seconds", 0):
                speed = totals.get(f"{verb}_bytes", 0) / seconds / (1 << 20)
                totals[f"{verb}_mib_per_s"] = round(speed, 1)
        return totals

    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Takes the arguments of the connector's ``build_prom_metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {}
        for name, documentation in METRICS.items():
            kwargs: dict[str, Any] = {
                "name": METRIC_PREFIX + name,
                "documentation": documentation,
                "labelnames": [*labelnames, _LABELS[name]] if name in _LABELS else labelnames,
            }
            if name in GAUGES:
                self._metrics[name] = metric_types[Gauge](multiprocess_mode="mostrecent", **kwargs)
            else:
                self._metrics[name] = metric_types[Counter](**kwargs)
            if name not in _LABELS and name not in GAUGES:
                # Sampled from the start: an alert on a counter needs its zero.
                for labels in per_engine_labelvalues.values():
                    self._metrics[name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's stats; names that this version does not know are skipped."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name)
            if metric is None:
                continue
            if name in GAUGES:
                metric.labels(*labels).set(value)
            elif name in _LABELS:
                for kept_by, amount in value.items():
                    metric.labels(*labels, kept_by).inc(amount)
            else:
                metric.labels(*labels).inc(value)
