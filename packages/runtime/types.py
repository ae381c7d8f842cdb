"""The nouns of the runtime: what every room imports and none of them owns.

Plain frozen dataclasses. Nothing here knows a model, a transport or a file. Symbols used in shape comments all over the
repository: B batch, S sequence, H draft hidden size, Ht target hidden size, V target vocabulary, Vd draft vocabulary,
n target decoder layers, p position, k drafting depth from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal

from runtime.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled"]
SessionState = Literal["idle", "reserved", "generating"]  # reserved: for the caller of open_session, until it generates

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
REPETITION_PENALTY_RANGE = (0.01, 10.0)  # it divides logits, which must stay finite
SEED_RANGE = (-(2**63), 2**63 - 1)


class Switch(Enum):
    """A three-way setting of a session: follow the server's default, or say it for this session."""

    INHERIT = "inherit"
    OFF = "off"
    ON = "on"


@dataclass(frozen=True)
class Grammar:
    """What a generated text must be: `json_schema` (the schema as JSON) or `lark` (a grammar in llguidance's dialect of Lark)."""

    kind: Literal["json_schema", "lark"]
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """How one generation picks its tokens and when it ends. Ranges are checked by `check`, against a vocabulary."""

    max_tokens: int | None = None  # None: as many as the context holds
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn at random
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None  # every token continues it, and the turn ends when it is complete
    speculate: bool = True
    max_draft_tokens: int | None = None  # None: the server's setting
    detokenize: bool = True  # False: token ids only, without their text

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, at the first value out of its range."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}.")
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.top_k < 0:
            raise InvalidRequest("top_k", f"top_k must be 0 (off) or more, got {self.top_k}.")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTY_RANGE)
        if self.seed is not None and not SEED_RANGE[0] <= self.seed <= SEED_RANGE[1]:
            raise InvalidRequest("seed", f"seed must fit a signed 64-bit integer, got {self.seed}.")
        for token_id, bias in self.logit_bias.items():
            check_token_ids([token_id], vocab_size, param="logit_bias")
            _check_range("logit_bias", bias, -100.0, 100.0)
        check_token_ids(self.stop_token_ids, vocab_size, param="stop_token_ids")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"At most {MAX_STOP_STRINGS} stop strings are taken, got {len(self.stop)}.")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop", "A stop string must not be empty.")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", "A stop string is looked for in the text: leave detokenize on, or use stop_token_ids.")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest("top_logprobs", f"top_logprobs must lie in 0..{MAX_TOP_LOGPROBS}, got {self.top_logprobs}.")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs to be true.")
        if self.max_draft_tokens is not None and not 0 <= self.max_draft_tokens <= 64:
            raise InvalidRequest("max_draft_tokens", f"max_draft_tokens must lie in 0..64, got {self.max_draft_tokens}.")


def _check_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(name, f"{name} must lie in {bracket}{low:g}, {high:g}], got {value}.")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str = "token_ids") -> None:
    """Raise InvalidRequest at the first id outside 0 <= id < vocab_size."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(param, f"{param}[{index}] is {token_id}; this model's ids run from 0 to {vocab_size - 1}.")


@dataclass(frozen=True)
class TokenLogprob:
    """The target's own log-probability of one emitted token, with the most likely alternatives (raw logits, no processing)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens, never chunks."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: their K/V was there already


@dataclass
class SpeculationStats:
    """Counts of one generation (or sums over many). Add the counts first and divide last."""

    num_steps: int = 0  # verification forwards that produced tokens, speculative or not, the prefill's own token aside
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # [k]: steps whose draft k was accepted
    drafted_per_position: list[int] = field(default_factory=list)  # [k]: steps whose draft, chain or tree, was deeper than k

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens / verification steps; the bonus token counts. 1.0 before the first step."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    def copy(self) -> SpeculationStats:
        lists = list(self.accepted_per_position), list(self.drafted_per_position)
        return SpeculationStats(self.num_steps, self.num_drafted, self.num_accepted, *lists)

    @staticmethod
    def total(many: Iterable[SpeculationStats]) -> SpeculationStats:
        """The sum of counts."""
        result = SpeculationStats()
        for stats in many:
            result.add(stats)
        return result

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of another generation."""
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.drafted_per_position = _sums(self.drafted_per_position, other.drafted_per_position)
        self.accepted_per_position = _sums(self.accepted_per_position, other.accepted_per_position)

    def record(self, num_drafted: int, num_accepted: int, depth: int | None = None, num_steps: int = 1) -> None:
        """Count verification steps, so many alike. depth: of a drafted tree; None: a chain's, which is num_drafted."""
        self.num_steps += num_steps
        self.num_drafted += num_drafted * num_steps
        self.num_accepted += num_accepted * num_steps
        depth = num_drafted if depth is None else depth
        for counts, upto in ((self.drafted_per_position, depth), (self.accepted_per_position, num_accepted)):
            counts.extend([0] * (upto - len(counts)))
            for k in range(upto):
                counts[k] += num_steps


def _sums(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


# --- sessions ---


@dataclass(frozen=True)
class CachePolicy:
    """What of a history stays in sight, and so in K/V. By default all of it.

    With a window, the token at position p sees the positions below `sink` and the last `window` ones up to its own,
    p - window + 1 .. p. Positions are absolute: dropping tokens from the K/V renumbers nothing.
    """

    sink: int = 0
    window: int | None = None  # None: everything is seen

    def num_unseen(self, num_tokens: int) -> int:
        """How many of the first num_tokens tokens of a history the last of them does not see."""
        return 0 if self.window is None else max(num_tokens - self.sink - self.window, 0)

    def check(self) -> None:
        """Raise InvalidRequest, naming the field, at the first value out of its range."""
        if self.window is None:
            if self.sink:
                raise InvalidRequest("cache_policy", f"A sink of {self.sink} tokens needs a window; give both, or neither.")
        elif self.window < 1 or self.sink < 0:
            raise InvalidRequest(
                "cache_policy", f"sink must be 0 or more and window at least 1, got sink {self.sink} and window {self.window}."
            )


@dataclass(frozen=True)
class DrafterPolicy:
    """Which drafter speculates for a session. It changes speed, never output."""

    kind: Literal["follow_active", "pinned", "off"] = "follow_active"
    version: str = ""  # of the pinned one

    def check(self) -> None:
        """Raise InvalidRequest if a version is missing where one is pinned, or given where none is."""
        if (self.kind == "pinned") != bool(self.version):
            raise InvalidRequest(
                "drafter_policy",
                f"drafter_policy {self.kind!r} with version {self.version!r}: pinned needs a version, others none.",
            )


@dataclass(frozen=True)
class SessionOptions:
    """What a client may fix when it creates a session."""

    client_label: str = ""
    ttl_s: float | None = None  # None: the server's default
    eos_token_ids: tuple[int, ...] | None = None  # None: the model's
    stop_token_ids: tuple[int, ...] = ()
    capture: Switch = Switch.INHERIT
    cache_policy: CachePolicy = CachePolicy()
    drafter_policy: DrafterPolicy = DrafterPolicy()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # slice labels for the feature plane


@dataclass(frozen=True)
class SessionInfo:
    session_id: str
    state: SessionState
    history_length: int
    cached_tokens: int
    options: SessionOptions
    target_fingerprint: str
    drafter_version: str
    max_context_tokens: int
    created_at: float  # Unix seconds
    last_used_at: float
    dropped_tokens: int = 0  # of the history: out of sight under the session's cache policy


# --- the events of one generation, in the order in which they may come: Started, Tokens*, then Done or Failed; ---
# --- HistoryTruncated at most once, anywhere between the first and the last of them ---


@dataclass(frozen=True)
class Started:
    request_id: str
    session_id: str
    drafter_version: str
    target_fingerprint: str
    history_length: int


@dataclass(frozen=True)
class HistoryTruncated:
    """The first time that the session's cache policy dropped tokens from its K/V. Its history keeps their ids."""

    dropped: int  # tokens no longer in sight


@dataclass(frozen=True)
class Tokens:
    token_ids: tuple[int, ...]
    text: str  # what became safe to show: lags the ids while a character or a possible stop string is incomplete
    logprobs: tuple[TokenLogprob, ...]  # empty unless asked for
    drafted: tuple[bool, ...]  # per token: came from an accepted draft
    is_prefills: bool = False  # the token came with what read the prompt: of no verification step. Told within the process only


@dataclass(frozen=True)
class Done:
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    speculation: SpeculationStats
    drafter_versions: tuple[str, ...]  # every version that drafted for it, in order of use
    history_length: int


@dataclass(frozen=True)
class Failed:
    error: Exception


Event = Started | Tokens | HistoryTruncated | Done | Failed
