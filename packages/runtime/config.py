"""Settings of the runtime's rooms, as plain dataclasses. Hydra builds them at the door; behind it nobody knows hydra.

Ranges are checked when an object is made, so a dataclass that exists is valid. Not frozen: omegaconf would make nested
ones read-only. Paths that are None are derived from `state_dir` by `runtime.models.home`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, EnumMeta
from typing import Any, cast

from runtime.errors import ConfigError

LONGEST_LEASE_S = 86_400.0  # of a training row


class _ByValue(EnumMeta):
    def __getitem__(cls, name: str) -> Any:
        by_value = {member.value: member for member in cast("type[Enum]", cls)}
        return by_value[name] if name in by_value else super().__getitem__(name)


class Choice(Enum, metaclass=_ByValue):
    """An enum of a setting. Its members are found by value as well as by name, so that overrides are written in lower case."""


class Dtype(Choice):
    AUTO = "auto"  # float32 on CPU, bfloat16 on CUDA
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class StoreKind(Choice):
    MEMORY = "memory"  # of this process: rows die with it
    DIRECTORY = "directory"  # files of features.root, shared by processes of one machine
    MOONCAKE = "mooncake"  # a Mooncake pool, shared by machines


class PoolProtocol(Choice):
    TCP = "tcp"
    RDMA = "rdma"


class Numerics(Choice):
    DEFAULT = "default"  # forwards of different shapes may differ in a token's last bits
    INVARIANT = "invariant"  # a token's logits are the same whatever is computed beside it; float32 on a CPU


class DrafterKind(Choice):
    AUTO = "auto"  # the registry's active version, else the embedded drafter of the model, else ngram
    EAGLE3 = "eagle3"  # the checkpoint directory named by drafter.path
    NGRAM = "ngram"
    NONE = "none"


def require(condition: bool, setting: str, value: object, expected: str) -> None:
    """Refuse a setting with one sentence that names it, its value and what it may be."""
    if not condition:
        raise ConfigError(f"{setting} is {value!r}; it must be {expected}.")


def require_directory(setting: str, path: str | None) -> None:
    require(path is None or bool(path.strip()), setting, path, "a directory, or null")


def require_period(setting: str, seconds: float) -> None:
    """A wait between two looks at something."""
    require(0 < seconds <= 3600, setting, seconds, "more than 0 seconds and at most 3600")


def require_threads(setting: str, num_threads: int | None) -> None:
    require(num_threads is None or 1 <= num_threads <= 1024, setting, num_threads, "between 1 and 1024, or null")


@dataclass
class ModelConfig:
    name: str = "smollm2-135m"  # a name of ours, a local Hugging Face directory, or a hub id
    dtype: Dtype = Dtype.AUTO
    device: str = "auto"  # auto, cpu, cuda, cuda:1

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "model.name", self.name, "a model name, a directory or a hub id")


@dataclass
class BackendConfig:
    name: str = "transformers"
    num_threads: int | None = None  # CPU threads of the forward; None: torch's own choice
    numerics: Numerics = Numerics.DEFAULT
    kv_pool_mib: int | None = None  # device memory set aside for K/V on CUDA; None: three tenths of what is free

    def __post_init__(self) -> None:
        require_threads("backend.num_threads", self.num_threads)
        ok = self.kv_pool_mib is None or self.kv_pool_mib >= 16
        require(ok, "backend.kv_pool_mib", self.kv_pool_mib, "at least 16, or null")


@dataclass
class DrafterConfig:
    kind: DrafterKind = DrafterKind.AUTO
    path: str | None = None

    def __post_init__(self) -> None:
        needs_path = self.kind is DrafterKind.EAGLE3
        require(
            not needs_path or bool(self.path), "drafter.path", self.path, "an EAGLE3 checkpoint directory with drafter=eagle3"
        )
        require(needs_path or self.path is None, "drafter.path", self.path, "unset unless drafter=eagle3")


class SpeculationMode(Choice):
    ADAPTIVE = "adaptive"  # as much as makes the most tokens per second right now, nothing included
    FIXED = "fixed"  # always drafts of the greatest size that is set


class TreeShape(Choice):
    CHAIN = "chain"
    TREE = "tree"
    AUTO = "auto"  # whichever is faster; chains when fixed


@dataclass
class SpeculationConfig:
    mode: SpeculationMode = SpeculationMode.ADAPTIVE
    shape: TreeShape = TreeShape.AUTO
    max_draft_tokens: int = 7  # depth: of a chain or of a tree, at most where it is adaptive; 0 decodes plainly
    tree_nodes: int = 12  # of a tree in all
    tree_width: int = 4  # nodes that a level goes on from, and children of each

    def __post_init__(self) -> None:
        ok = 0 <= self.max_draft_tokens <= 64
        require(ok, "speculation.max_draft_tokens", self.max_draft_tokens, "between 0 and 64")
        require(1 <= self.tree_nodes <= 63, "speculation.tree_nodes", self.tree_nodes, "between 1 and 63")
        require(2 <= self.tree_width <= 16, "speculation.tree_width", self.tree_width, "between 2 and 16")

    @property
    def has_whole_chains_only(self) -> bool:
        """Every draft is a chain of the greatest length."""
        return self.mode is SpeculationMode.FIXED and self.shape is not TreeShape.TREE

    @property
    def max_draft_nodes(self) -> int:
        """Of one draft, whatever its shape."""
        if self.max_draft_tokens == 0 or self.shape is TreeShape.CHAIN:
            return self.max_draft_tokens
        return max(self.max_draft_tokens, self.tree_nodes)


@dataclass
class SessionsConfig:
    max_sessions: int = 256
    ttl_s: float = 3600.0
    max_batch_sessions: int = 16  # sessions in one forward
    prefill_chunk_tokens: int | None = None  # prompt tokens in one forward, so that running sessions keep their pace; prompts
    # take turns. None: 2048 on CUDA, else 256
    kv_budget_mib: int = 4096  # beyond it, idle sessions lose their K/V (never their ids), oldest first
    patient: bool = False  # nobody waits for single tokens: a device makes many steps in a row, whoever else waits
    prefix_reuse: bool = True  # a session takes over K/V of any other that begins alike; its speed then tells that there is one

    def __post_init__(self) -> None:
        require(self.max_sessions >= 1, "sessions.max_sessions", self.max_sessions, "at least 1")
        require(self.ttl_s > 0, "sessions.ttl_s", self.ttl_s, "more than 0 seconds")
        require(self.max_batch_sessions >= 1, "sessions.max_batch_sessions", self.max_batch_sessions, "at least 1")
        ok = self.prefill_chunk_tokens is None or self.prefill_chunk_tokens >= 16
        require(ok, "sessions.prefill_chunk_tokens", self.prefill_chunk_tokens, "at least 16")
        require(self.kv_budget_mib >= 16, "sessions.kv_budget_mib", self.kv_budget_mib, "at least 16")


@dataclass
class CaptureConfig:
    enabled: bool = True
    by_default: bool = True  # false: only sessions that ask for it are captured
    sampling_rate: float = 1.0  # fraction of turns kept
    min_generated_tokens: int = 8  # shorter turns teach nothing
    max_row_tokens: int = 2048
    heldout_fraction: float = 0.125  # of rows, set aside for the gate
    heldout_max_rows: int = 256  # of all slices together, and at most a quarter of features.budget_mib
    queue_max_rows: int = 64  # turns waiting for the writer; from there the tap sheds until half of them are written
    high_rows: int = 16384  # rows that are in no checkpoint of a trainer yet: from there the tap sheds,
    low_rows: int = 8192  # until they are down to here
    high_mib: int | None = None  # the same for their features; null: three quarters of features.budget_mib, the rest held out
    low_mib: int | None = None  # null: half of the high one
    redact: str | None = None  # package.module.function that says what must not be kept of a row
    classify: str | None = None  # package.module.function that names the slice of a turn whose client did not
    max_age_s: float | None = None  # older rows lose their features, trained on or not
    max_trained_rows: int | None = None  # trained rows beyond it lose theirs, oldest first; null: as the budget needs room

    def __post_init__(self) -> None:
        require(0.0 <= self.sampling_rate <= 1.0, "capture.sampling_rate", self.sampling_rate, "between 0 and 1")
        ok = self.min_generated_tokens >= 1
        require(ok, "capture.min_generated_tokens", self.min_generated_tokens, "at least 1")
        require(self.max_row_tokens >= 16, "capture.max_row_tokens", self.max_row_tokens, "at least 16")
        ok = 0.0 <= self.heldout_fraction <= 0.5
        require(ok, "capture.heldout_fraction", self.heldout_fraction, "between 0 and 0.5")
        require(self.heldout_max_rows >= 0, "capture.heldout_max_rows", self.heldout_max_rows, "0 or more")
        require(self.queue_max_rows >= 1, "capture.queue_max_rows", self.queue_max_rows, "at least 1")
        require(self.low_rows >= 1, "capture.low_rows", self.low_rows, "at least 1")
        ok = self.high_rows >= self.low_rows
        require(ok, "capture.high_rows", self.high_rows, f"at least capture.low_rows, {self.low_rows}")
        require(self.low_mib is None or self.low_mib >= 1, "capture.low_mib", self.low_mib, "at least 1, or null")
        ok = self.high_mib is None or self.high_mib >= (self.low_mib or 1)
        require(ok, "capture.high_mib", self.high_mib, f"at least capture.low_mib, {self.low_mib or 1}, or null")
        for setting, hook in (("capture.redact", self.redact), ("capture.classify", self.classify)):
            require(hook is None or "." in hook.strip("."), setting, hook, "package.module.function, or null")
        ok = self.max_age_s is None or self.max_age_s >= 60
        require(ok, "capture.max_age_s", self.max_age_s, "at least 60 seconds, or null")
        ok = self.max_trained_rows is None or self.max_trained_rows >= 0
        require(ok, "capture.max_trained_rows", self.max_trained_rows, "0 or more, or null")


@dataclass
class MooncakeConfig:
    """How this process joins a Mooncake pool."""

    master: str = "127.0.0.1:50061"
    metadata: str = "http://127.0.0.1:8080/metadata"
    host: str = "127.0.0.1"  # this machine, as the pool's other members reach it
    protocol: PoolProtocol = PoolProtocol.TCP
    rdma_devices: str = ""
    segment_mib: int = 0  # memory lent to the pool for as long as this process lives; 0: others lend theirs

    def __post_init__(self) -> None:
        has_port = self.master.rpartition(":")[2].isdigit()
        require(has_port, "features.mooncake.master", self.master, "an address such as 10.0.0.1:50061")
        require(
            "://" in self.metadata,
            "features.mooncake.metadata",
            self.metadata,
            "an address such as http://10.0.0.1:8080/metadata",
        )
        require(bool(self.host.strip()), "features.mooncake.host", self.host, "an address of this machine")
        require(self.segment_mib >= 0, "features.mooncake.segment_mib", self.segment_mib, "0 or more")


@dataclass
class FeaturesConfig:
    store: StoreKind = StoreKind.DIRECTORY
    root: str | None = None  # directory of ledger, index and rows; None: <state_dir>/features
    budget_mib: int = 4096  # rows beyond it are shed
    mooncake: MooncakeConfig = field(default_factory=MooncakeConfig)

    def __post_init__(self) -> None:
        require_directory("features.root", self.root)
        require(self.budget_mib >= 1, "features.budget_mib", self.budget_mib, "at least 1")


@dataclass
class RegistryConfig:
    root: str | None = None  # directory of drafter versions; None: <state_dir>/registry
    poll_s: float = 0.5  # how often the server looks for new versions
    auto_activate: bool = True  # a validated version goes live by itself
    max_divergence: float | None = 0.25  # of live acceptance from the gate's estimate before the server warns; null: never
    divergence_steps: int = 2000  # verification steps that are looked at together

    def __post_init__(self) -> None:
        require_directory("registry.root", self.root)
        require_period("registry.poll_s", self.poll_s)
        ok = self.max_divergence is None or self.max_divergence > 0
        require(ok, "registry.max_divergence", self.max_divergence, "more than 0, or null")
        require(self.divergence_steps >= 1, "registry.divergence_steps", self.divergence_steps, "at least 1")
