"""The trainer's figures, read back over HTTP by Prometheus' own parser."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from runtime.errors import ConfigError
from training.learning.learner import StepResult
from training.reporting.metrics import TrainMetrics
from training.reporting.progress import Progress


def scraped(port: int) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_what_a_run_tells_can_be_scraped(tmp_path: Path) -> None:
    with TrainMetrics(0) as metrics, Progress(tmp_path, Console(file=io.StringIO()), metrics) as progress:
        for step in (1, 2):
            progress.stepped(
                StepResult(step, 2.0 / step, [1.0], 10, [10], [6], 100, 0.4, 5e-4, 0.5), 4, {"rows_waiting": 7, "lag_s": 3}
            )
        figures = scraped(metrics.port)
        port = metrics.port
    assert figures["slipstream:train_loss"] == 1.0
    assert figures["slipstream:train_tokens_total"] == 200
    assert figures["slipstream:train_lag_samples"] == 7
    assert figures["slipstream:train_step"] == 2
    assert figures["slipstream:train_lag_seconds"] == 3
    assert figures["slipstream:train_learning_rate"] == 0.0005
    with pytest.raises(httpx.ConnectError):
        scraped(port)


def test_held_out_acceptance_is_that_of_the_weights_judged_last() -> None:
    metrics = TrainMetrics()
    metrics.judged(2.5)
    assert metrics.registry.get_sample_value("slipstream:train_acceptance_length") == 2.5


def test_a_port_that_is_taken_is_refused_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"trainer\.metrics_port is {port}"), TrainMetrics(port):
            pass
