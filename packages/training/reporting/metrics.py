"""The trainer's figures for Prometheus, named to go with the server's: `trainer.metrics_port`, on this machine alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from runtime.errors import ConfigError

PREFIX = "slipstream:"
HOST = "127.0.0.1"


class TrainMetrics:
    """Counts whether or not anybody asks; with a port, answers at http://127.0.0.1:PORT/metrics while it is open."""

    def __init__(self, port: int | None = None) -> None:
        self.registry = CollectorRegistry()
        self._loss = self._gauge("train_loss", "Loss of the last step.")
        self._acceptance = self._gauge("train_acceptance_length", "Of the weights judged last, on held-out rows.")
        self._lag = self._gauge("train_lag_samples", "Rows that wait to be trained on.")
        self._age = self._gauge("train_lag_seconds", "Age of the newest row that was trained on.")
        self._rate = self._gauge("train_learning_rate", "Of the last step.")
        self._step = self._gauge("train_step", "Optimizer steps of this run.")
        self._tokens = Counter(PREFIX + "train_tokens", "Tokens that steps have read.", registry=self.registry)
        self._port = port
        self._server: tuple[threading.Thread, object] | None = None
        self.port = 0  # where it answers

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def __enter__(self) -> TrainMetrics:
        if self._port is None:
            return self
        try:
            server, thread = start_http_server(self._port, addr=HOST, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"trainer.metrics_port is {self._port}, which cannot be had ({error.strerror}); give another one, or null."
            ) from error
        self._server, self.port = (thread, server), server.server_port
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            thread, server = self._server
            server.shutdown()  # type: ignore[attr-defined]
            server.server_close()  # type: ignore[attr-defined]
            thread.join()

    def stepped(self, step: int, loss: float, num_tokens: int, learning_rate: float) -> None:
        self._step.set(step)
        self._rate.set(learning_rate)
        self._loss.set(loss)
        self._tokens.inc(num_tokens)

    def waiting(self, figures: Mapping[str, int]) -> None:
        self._lag.set(figures.get("rows_waiting", 0))
        self._age.set(figures.get("lag_s", 0))

    def judged(self, acceptance_length: float) -> None:
        self._acceptance.set(acceptance_length)
