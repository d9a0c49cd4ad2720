"""What the server counts, in the form of Prometheus; one registry per server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.engine.http.load import Load
from core.engine.serve.stats import EngineStats

_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """Counters and histograms of requests, and what the engine says of itself when it is asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = self.registry
        self.answers = Counter("core_http_answers", "HTTP answers", ("path", "status"), registry=of)
        self.sequences = Counter(
            "core_sequences",
            "Generated sequences by how they ended: stop, length, abort, error",
            ("outcome",),
            registry=of,
        )
        self.prompt_tokens = Counter("core_prompt_tokens", "Tokens of prompts", registry=of)
        self.generated_tokens = Counter("core_generated_tokens", "Tokens generated", registry=of)
        self.first_token = Histogram(
            "core_time_to_first_token_seconds", "From the request to its first token", buckets=_FIRST_S, registry=of
        )
        self.between_tokens = Histogram(
            "core_time_between_tokens_seconds", "Between two tokens of a sequence", buckets=_BETWEEN_S, registry=of
        )
        self.whole = Histogram(
            "core_sequence_seconds", "From the request to the end of a sequence", buckets=_WHOLE_S, registry=of
        )
        self._load = Load(running=0, waiting=0, used_blocks=0, num_blocks=0, pending_graphs=0)
        self._stats = EngineStats()
        self._alive = True
        of.register(self)

    def render(self, load: Load | None, stats: EngineStats | None) -> bytes:
        """Return everything in Prometheus' text format; without load and stats: the last ones, and that it is dead."""
        self._alive = load is not None
        self._load = load or self._load
        self._stats = stats or self._stats
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's own numbers."""
        load = self._load
        yield GaugeMetricFamily("core_engine_up", "1 while the engine serves", float(self._alive))
        yield GaugeMetricFamily("core_sequences_running", "Sequences that hold cache", load.running)
        yield GaugeMetricFamily("core_sequences_waiting", "Sequences that wait for a place", load.waiting)
        yield GaugeMetricFamily("core_graphs_pending", "Graphs that are being compiled", load.pending_graphs)
        yield GaugeMetricFamily("core_cache_blocks", "Blocks of the cache", load.num_blocks)
        yield GaugeMetricFamily("core_cache_blocks_used", "Blocks that sequences hold", load.used_blocks)
        for each in fields(EngineStats):
            value = getattr(self._stats, each.name)
            labelled = isinstance(value, Mapping)
            family = CounterMetricFamily(
                f"core_engine_{each.name}", f"EngineStats.{each.name}", labels=("kind",) if labelled else None
            )
            for kind, count in value.items() if labelled else ():
                family.add_metric((kind,), count)
            if not labelled:
                family.add_metric((), value)
            yield family
