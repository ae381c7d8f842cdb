"""Settings of mode=capture. Imports no torch: the door reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.config import Choice, require, require_directory


class Output(Choice):
    FEATURES = "features"  # rows with hidden states into features.root, as mode=offline reads them
    TOKENS = "tokens"  # shards of token ids alone, from which mode=offline computes the states as it goes


@dataclass
class AnswersConfig:
    """What mode=capture makes of data.prompts."""

    generate: bool = True  # false: the assistant's turns are taken as they stand in the conversations
    temperatures: list[float] = field(default_factory=lambda: [0.0])  # one answer to each prompt for each of them
    max_tokens: int = 256  # of an answer
    concurrency: int = 64  # answers at a time
    kv_budget_mib: int = 4096  # for the K/V of all of them
    output: Output = Output.FEATURES
    directory: str | None = None  # of the shards; null: tokens/<trainer.run_id> in the state directory
    shard_tokens: int = 1_000_000  # a shard is written when it has so many,
    flush_every_s: float = 60.0  # and after so long

    def __post_init__(self) -> None:
        ok = bool(self.temperatures) and all(0.0 <= each <= 2.0 for each in self.temperatures)
        require(ok, "answers.temperatures", self.temperatures, "a list of at least one, each between 0 and 2")
        require(self.max_tokens >= 2, "answers.max_tokens", self.max_tokens, "at least 2: a shorter answer teaches nothing")
        require(1 <= self.concurrency <= 16384, "answers.concurrency", self.concurrency, "between 1 and 16384")
        require(self.kv_budget_mib >= 16, "answers.kv_budget_mib", self.kv_budget_mib, "at least 16")
        require_directory("answers.directory", self.directory)
        require(self.shard_tokens >= 1, "answers.shard_tokens", self.shard_tokens, "at least 1")
        require(0 <= self.flush_every_s <= 86400, "answers.flush_every_s", self.flush_every_s, "between 0 and 86400 seconds")
