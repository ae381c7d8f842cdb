"""Metrics: read back through Prometheus' own parser, they say what really happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.engine.base import EngineStats
from runtime.types import Done, SpeculationStats, Tokens, Usage
from serving.admission import Admission
from serving.config import AdmissionConfig
from serving.metrics import ServerMetrics, Sources

from .conftest import Running, StartServer, wait_for

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name.removeprefix("slipstream:"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, frozenset(labels.items()))]


def scrape(running: Running) -> Samples:
    return samples_of(httpx.get(f"{running.ready.http}/metrics", timeout=10).text)


def test_a_request_leaves_its_traces(start_server: StartServer) -> None:
    running = start_server()
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "aaaa " * 20}], "ignore_eos": True}
    body |= {"temperature": 0, "max_tokens": 30}
    answer = httpx.post(f"{running.ready.http}/v1/chat/completions", json=body, timeout=30).json()
    own, usage = answer["speculation"], answer["usage"]
    wait_for(lambda: value(scrape(running), "capture_samples_total", outcome="captured") == 1)
    samples = scrape(running)
    assert value(samples, "prompt_tokens_total") == usage["prompt_tokens"]
    assert value(samples, "generation_tokens_total") == 30
    assert value(samples, "time_to_first_token_seconds_count") == 1
    assert value(samples, "inter_token_latency_seconds_count") == 29
    assert value(samples, "e2e_request_latency_seconds_count") == 1
    assert value(samples, "spec_decode_num_draft_tokens_total") == own["drafted"]
    assert value(samples, "spec_decode_num_accepted_tokens_total") == own["accepted"]
    for k, count in enumerate(own["histogram"]):
        assert value(samples, "spec_decode_num_accepted_tokens_per_pos_total", position=str(k)) == count
    assert value(samples, "mean_acceptance_length", drafter_version="ngram") == pytest.approx(own["mean_acceptance_length"])
    assert value(samples, "drafter_version_info", drafter_version="ngram") == 1
    assert value(samples, "session_active") == 1
    assert value(samples, "num_requests_running") == 0
    assert value(samples, "feature_queue_depth") == 0
    assert value(samples, "feature_store_bytes") > 0


NAMES = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_hits_total",
    "session_active",
    "feature_store_bytes",
    "feature_queue_depth",
    "capture_samples_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "drafter_swap_seconds_bucket",
    "drafter_version_info",
    "drafter_rollbacks_total",
]


def test_the_names_are_those_that_dashboards_know(running: Running) -> None:
    text = httpx.get(f"{running.ready.http}/metrics", timeout=10).text
    found = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {f"slipstream:{name}" for name in NAMES} <= found


class Counted:
    """An engine that has counted this much."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def stats(self) -> EngineStats:
        return self._stats


def test_versions_are_told_apart_and_counts_are_added_before_dividing() -> None:
    by_version = {
        "old": SpeculationStats(10, 30, 5, [4, 1], [10, 10, 10]),
        "new": SpeculationStats(5, 15, 10, [5, 3, 2], [5, 5, 5]),
    }
    stats = EngineStats(
        speculation=by_version,
        drafter_version="new",
        num_evicted={"EVICTED_LRU": 3},
        num_preempted=7,
        kv_bytes=5,
        kv_budget_bytes=20,
    )
    metrics = ServerMetrics()
    admission = Admission(AdmissionConfig())
    admission.num_waiting = 2
    metrics.read_from(Sources(Counted(stats), admission, lambda: {"activated": 4, "rolled_back": 2}, None))  # type: ignore[arg-type]
    samples = samples_of(metrics.render().decode())
    assert value(samples, "mean_acceptance_length", drafter_version="old") == 1.5
    assert value(samples, "mean_acceptance_length", drafter_version="new") == 3.0
    assert value(samples, "draft_acceptance_rate", drafter_version="new") == pytest.approx(2 / 3)
    assert value(samples, "spec_decode_num_drafts_total") == 15
    assert value(samples, "spec_decode_num_accepted_tokens_per_pos_total", position="0") == 9
    assert value(samples, "spec_decode_num_accepted_tokens_per_pos_total", position="2") == 2
    assert value(samples, "num_requests_waiting") == 2
    assert value(samples, "kv_cache_usage_perc") == 0.25
    assert value(samples, "num_preemptions_total") == 7
    assert value(samples, "session_evicted_total", reason="EVICTED_LRU") == 3
    assert value(samples, "drafter_events_total", event="activated") == 4
    assert value(samples, "drafter_rollbacks_total", reason="operator") == 2


def test_several_tokens_of_one_step_share_its_time() -> None:
    metrics = ServerMetrics()
    latencies = metrics.new_request()
    latencies.see(Tokens((1,), "a", (), (False,)), at=latencies._arrived_at + 1.0)
    latencies.see(Tokens((2, 3, 4), "bcd", (), (True, True, False)), at=latencies._arrived_at + 1.3)
    latencies.see(Done("stop", None, Usage(), SpeculationStats(), (), 4), at=latencies._arrived_at + 2.0)
    samples = samples_of(metrics.render().decode())
    assert value(samples, "time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert value(samples, "inter_token_latency_seconds_count") == 3
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert value(samples, "e2e_request_latency_seconds_sum") == pytest.approx(2.0)


def test_the_dashboard_asks_for_what_there_is(running: Running) -> None:
    """Every metric in docs/grafana.json is one that a server exports."""
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    text = httpx.get(f"{running.ready.http}/metrics").text
    exported = set(re.findall(r"^# TYPE (slipstream:\S+)", text, re.MULTILINE))
    exported |= {f"{name}_bucket" for name in exported}
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"slipstream:\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= exported
