"""Prometheus metrics under vLLM's names, with the prefix `slipstream:`, and names of our own. One registry per server.

Latencies are observed as events pass; everything else is read, at each scrape, from where it is counted anyway: engine,
admission, lifecycle, tap, store. Counts are exported as counts; the two ratios are there for the eye and say how they are
made: mean_acceptance_length = 1 + accepted / steps, draft_acceptance_rate = accepted / drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.engine.base import Engine, EngineStats
from runtime.types import Done, Event, SpeculationStats, Tokens
from serving.admission import Admission

PREFIX = "slipstream:"

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SWAP_BUCKETS_S = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class Latencies:
    """The clock of one request. Made when it arrives, so that waiting for a permit counts."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrived_at = time.perf_counter()
        self._last_token_at: float | None = None

    def see(self, event: Event, at: float) -> None:
        """`at`: time.perf_counter() when the engine sent the event."""
        if isinstance(event, Tokens) and event.token_ids:
            if self._last_token_at is None:
                self._metrics.time_to_first_token.observe(at - self._arrived_at)
            else:  # one step gives several tokens at once: each gets its share of the gap
                gap_s = (at - self._last_token_at) / len(event.token_ids)
                for _ in event.token_ids:
                    self._metrics.inter_token_latency.observe(gap_s)
            self._last_token_at = at
        elif isinstance(event, Done):
            self._metrics.e2e_latency.observe(at - self._arrived_at)


class ServerMetrics:
    """The registry, and the histograms that somebody has to observe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS_S
        )
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens.", _ITL_BUCKETS_S)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _E2E_BUCKETS_S)
        self.drafter_swap = self._histogram(
            "drafter_swap_seconds", "How long a switch of drafters held the engine's loop.", _SWAP_BUCKETS_S
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def new_request(self) -> Latencies:
        return Latencies(self)

    def read_from(self, sources: Sources) -> None:
        self.registry.register(_Reader(sources))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class FeatureSource(Protocol):
    """What the metrics want to know of the feature plane."""

    def counters(self) -> Mapping[str, int]: ...

    def queue_depth(self) -> int: ...

    def used_bytes(self) -> int: ...


@dataclass(frozen=True)
class Sources:
    engine: Engine
    admission: Admission
    drafter_events: Callable[[], Mapping[str, int]]  # by kind of event
    features: FeatureSource | None
    divergences: Callable[[], Mapping[str, float]] = dict  # of acceptance from the gate's estimate, by version


class _Reader(Collector):
    """Reads the sources at each scrape."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        return ()  # the registry need not scrape to learn the names

    def collect(self) -> Iterator[Metric]:
        stats = self._sources.engine.stats()
        yield from _speculation(stats.speculation)
        yield from _load(stats, self._sources.admission.num_waiting)
        yield from _drafters(stats, self._sources.drafter_events())
        yield _gauge(
            "acceptance_divergence",
            "Accepted drafts over what held-out rows let expect, minus 1, over the last window of steps.",
            self._sources.divergences(),
            "drafter_version",
        )
        if self._sources.features is not None:
            yield from _features(self._sources.features)


def _counter(name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
    """A counter by one label; without a label, `values` has one entry."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family


def _gauge(name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family


def _speculation(by_version: Mapping[str, SpeculationStats]) -> Iterator[Metric]:
    per_position: dict[str, float] = {}
    for stats in by_version.values():
        for k, count in enumerate(stats.accepted_per_position):
            per_position[str(k)] = per_position.get(str(k), 0) + count
    drafts = sum(stats.drafted_per_position[0] for stats in by_version.values() if stats.drafted_per_position)
    drafted = sum(stats.num_drafted for stats in by_version.values())
    accepted = sum(stats.num_accepted for stats in by_version.values())
    yield _counter("spec_decode_num_drafts", "Steps that verified a draft.", {"": drafts})
    yield _counter("spec_decode_num_draft_tokens", "Draft tokens proposed.", {"": drafted})
    yield _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", {"": accepted})
    yield _counter(
        "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position from 0.", per_position, "position"
    )
    steps = {version: float(stats.num_steps) for version, stats in by_version.items()}
    yield _counter("spec_decode_num_steps", "Verification steps under a drafter.", steps, "drafter_version")
    yield _gauge(
        "mean_acceptance_length",
        "1 + accepted / steps.",
        {version: stats.mean_acceptance_length for version, stats in by_version.items()},
        "drafter_version",
    )
    yield _gauge(
        "draft_acceptance_rate",
        "accepted / drafted.",
        {version: stats.num_accepted / stats.num_drafted for version, stats in by_version.items() if stats.num_drafted},
        "drafter_version",
    )


def _load(stats: EngineStats, num_queued: int) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Generations in the running batch.", {"": stats.num_running})
    yield _gauge("num_requests_waiting", "Generations waiting for admission or the batch.", {"": stats.num_waiting + num_queued})
    yield _counter("num_preemptions", "Times that a generation had to wait again for K/V.", {"": stats.num_preempted})
    usage = stats.kv_bytes / stats.kv_budget_bytes if stats.kv_budget_bytes else 0.0
    yield _gauge("kv_cache_usage_perc", "K/V bytes over their budget, 1 is full.", {"": usage})
    yield _counter("prompt_tokens", "Prompt tokens taken.", {"": stats.prompt_tokens})
    yield _counter("generation_tokens", "Tokens generated.", {"": stats.generation_tokens})
    yield _counter("prefix_cache_hits", "Prompt tokens whose K/V was there already.", {"": stats.cached_prompt_tokens})
    yield _counter("target_forwards", "Forwards of the target.", {"": stats.num_target_forwards})
    yield _gauge("session_active", "Sessions that are open.", {"": stats.num_sessions})
    yield _counter("session_evicted", "Sessions evicted.", stats.num_evicted, "reason")


def _drafters(stats: EngineStats, events: Mapping[str, int]) -> Iterator[Metric]:
    yield _gauge("drafter_version_info", "The active drafter.", {stats.drafter_version: 1}, "drafter_version")
    yield _counter("drafter_swaps", "Switches of drafters.", {"": stats.num_swaps})
    yield _counter("drafter_failures", "Steps without drafts because the drafter raised.", {"": stats.num_drafter_failures})
    rolled_back = {"operator": events.get("rolled_back", 0)}  # nobody else goes back
    yield _counter("drafter_rollbacks", "Times that the version before was made active again.", rolled_back, "reason")
    yield _counter("drafter_events", "Events in the life of drafter versions.", events, "event")


def _features(features: FeatureSource) -> Iterator[Metric]:
    yield _counter("capture_samples", "What became of turns offered to the tap.", features.counters(), "outcome")
    yield _gauge("feature_store_bytes", "Bytes of rows in the store.", {"": features.used_bytes()})
    yield _gauge("feature_queue_depth", "Turns waiting for the tap's writer.", {"": features.queue_depth()})
