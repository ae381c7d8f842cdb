"""Settings of the producer of mode=interleaved. Imports no torch: the door reads it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config import require


@dataclass
class ProducerConfig:
    """How the target answers prompts in mode=interleaved, and how far it may run ahead of the trainer."""

    max_rounds: int | None = 1  # times through the prompts; null: until the trainer ends
    max_tokens: int = 256  # of an answer
    temperature: float = 1.0
    concurrency: int = 8  # answers at a time
    swap_every_s: float = 30.0  # how old the drafter that speculates may become before the trainer's newest takes its place
    heldout_fraction: float = 0.125  # of the prompts, for the gate
    high_rows: int = 64  # not yet trained: the producer pauses there,
    low_rows: int = 32  # and goes on here
    high_mib: int = 1024
    low_mib: int = 512
    join_timeout_s: float = 30.0  # how long its thread may take to end

    def __post_init__(self) -> None:
        ok = self.max_rounds is None or self.max_rounds >= 1
        require(ok, "producer.max_rounds", self.max_rounds, "at least 1, or null")
        require(self.max_tokens >= 2, "producer.max_tokens", self.max_tokens, "at least 2: a shorter answer teaches nothing")
        require(0.0 <= self.temperature <= 2.0, "producer.temperature", self.temperature, "between 0 and 2")
        require(1 <= self.concurrency <= 1024, "producer.concurrency", self.concurrency, "between 1 and 1024")
        require(self.swap_every_s >= 0, "producer.swap_every_s", self.swap_every_s, "0 or more seconds")
        ok = 0.0 <= self.heldout_fraction <= 0.5
        require(ok, "producer.heldout_fraction", self.heldout_fraction, "between 0 and 0.5")
        for unit in ("rows", "mib"):
            high, low = getattr(self, f"high_{unit}"), getattr(self, f"low_{unit}")
            require(low >= 1, f"producer.low_{unit}", low, "at least 1")
            require(high >= low, f"producer.high_{unit}", high, f"at least producer.low_{unit}")
        ok = 0 < self.join_timeout_s <= 3600
        require(ok, "producer.join_timeout_s", self.join_timeout_s, "more than 0 seconds and at most 3600")
