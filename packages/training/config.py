"""Settings of the trainer, as plain dataclasses; ranges are checked when an object is made. Hydra builds them at the door.

What belongs to rooms that both programs share (model, features, registry) is configured by their own dataclasses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from runtime.config import (
    LONGEST_LEASE_S,
    BackendConfig,
    Choice,
    Dtype,
    FeaturesConfig,
    ModelConfig,
    RegistryConfig,
    SpeculationConfig,
    require,
    require_directory,
    require_period,
    require_threads,
)
from training.capture.config import AnswersConfig
from training.interchange.config import ExportConfig, InterchangeConfig
from training.interleaved.config import ProducerConfig
from training.judging.config import EvaluateConfig, GateConfig
from training.learning.schedule import ScheduleConfig
from training.reporting.config import TrackerConfig

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
WORKER = re.compile(r"[A-Za-z0-9._-]{0,32}")


class Mode(Choice):
    ONLINE = "online"  # rows of a live server, each admitted once, then replayed a bounded number of times
    OFFLINE = "offline"  # epochs over the rows that a feature directory holds; nothing there changes
    INTERLEAVED = "interleaved"  # the target answers data.prompts in this process, and its rows are trained on as they come
    CAPTURE = "capture"  # no training: the target answers data.prompts, or reads them, and rows for later are made
    EVALUATE = "evaluate"  # no training: how much of what a drafter proposes is accepted
    EXPORT = "export"  # no training: a drafter as other engines spell it
    IMPORT = "import"  # no training: a drafter of other engines

    @property
    def is_training(self) -> bool:
        """A run with steps and checkpoints; the others are commands that end by themselves."""
        return self in (Mode.ONLINE, Mode.OFFLINE, Mode.INTERLEAVED)


class Parallel(Choice):
    """How the processes that torchrun starts share one run."""

    AUTO = "auto"  # ddp
    DDP = "ddp"  # each holds the whole drafter
    FSDP = "fsdp"  # each holds a shard of its parameters, gradients and moments


class Objective(Choice):
    CROSS_ENTROPY = "cross_entropy"  # soft, against the target's distribution
    LK_ALPHA = "lk_alpha"  # -log of the expected acceptance
    LK_BLEND = "lk_blend"  # KL where drafter and target hardly overlap, expected acceptance where they do


class FirstHead(Choice):
    TARGET = "target"  # the target's own rows of the draft vocabulary
    RANDOM = "random"


class FirstNorm(Choice):
    TARGET = "target"  # the gain of the target's final norm
    ONES = "ones"


@dataclass
class ScratchConfig:
    """How a new drafter is built and where its weights begin; of no interest to a drafter that is continued."""

    fc_norm: bool = False  # EAGLE-3.1: each of the three layers' states is normalised before fc, and nothing else conditions them
    norm_output: bool = False  # EAGLE-3.1: the normalised state is what the next depth reads
    head: FirstHead = FirstHead.TARGET
    norm: FirstNorm = FirstNorm.TARGET
    conditioning: bool = True  # fc reads each channel multiplied by a power of two near 1/rms; folded in on export


@dataclass
class TrainerConfig:
    run_id: str = "default"  # a run with this name in the state directory is resumed
    worker: str = ""  # one of several trainers that share a run's rows: each leases its own, and has checkpoints of its own
    init: str = "auto"  # scratch, active, embedded, a version, a run, a directory; auto: active, else embedded, else scratch
    seed: int = 0
    num_threads: int | None = None  # CPU threads; None: half of the cores online (a server needs the others), all offline
    niceness: int = 5  # lowers the priority beside a server on the same machine; 0: leave it
    ttt_steps: int = 3  # L, depths unrolled in training
    objective: Objective = Objective.CROSS_ENTROPY
    lk_eta: float = 3.0  # objective=lk_blend: the weight of KL is exp(-lk_eta * acceptance)
    depth_decay: float = 0.8  # weight of depth k is depth_decay ** k
    depth_weights: list[float] | None = None  # the weights of depths 0, 1, ... one by one instead
    learning_rate: float | None = None  # None: 5e-4 when continuing, 2e-3 from scratch
    warmup_steps: int = 20
    clip_norm: float = 0.5
    accumulation: int = 1  # batches of data.batch_rows that each process adds up in one step
    parallel: Parallel = Parallel.AUTO  # only where torchrun starts several processes
    rank_timeout_s: float = 1800.0  # how long the others wait for a process that says nothing: more than one judgement takes
    ema_decay: float | None = None  # of a moving average of the weights, which is judged and published instead; null: off
    hedge: list[float] | None = None  # factors of the learning rate, 2 to 4: a drafter for each, the best is published
    draft_vocab_size: int | None = None  # only from scratch; None: 8192, or all of a smaller vocabulary
    vocabulary_tokens: int = 4096  # only from scratch: generated tokens to see before the draft vocabulary is fixed
    checkpoint_every_s: float = 60.0
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 2
    evaluate_every_s: float = 60.0
    evaluate_every_steps: int | None = None
    max_steps: int | None = None  # None: no such end
    max_time_s: float | None = None
    idle_timeout_s: float | None = None  # online: end after so long without a step to take
    settle_s: float = 10.0  # how long the end of a run waits for the server's word on the version published last
    metrics_port: int | None = None  # Prometheus reads figures there, on this machine alone; 0: a free port; null: none
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        ok = RUN_ID.fullmatch(self.run_id) is not None
        require(ok, "trainer.run_id", self.run_id, "letters, digits, '.', '_' or '-', at most 64 of them")
        ok = WORKER.fullmatch(self.worker) is not None
        require(ok, "trainer.worker", self.worker, "letters, digits, '.', '_' or '-', at most 32 of them")
        require(
            bool(self.init.strip()), "trainer.init", self.init, "auto, scratch, active, embedded, a version, a run or a directory"
        )
        require(0 <= self.seed < 2**63, "trainer.seed", self.seed, "a whole number from 0")
        require_threads("trainer.num_threads", self.num_threads)
        require(0 <= self.niceness <= 19, "trainer.niceness", self.niceness, "between 0 and 19")
        require(1 <= self.ttt_steps <= 16, "trainer.ttt_steps", self.ttt_steps, "between 1 and 16")
        require(self.lk_eta >= 0.0, "trainer.lk_eta", self.lk_eta, "0 or more")
        require(0.0 < self.depth_decay <= 1.0, "trainer.depth_decay", self.depth_decay, "above 0 and at most 1")
        ok = self.depth_weights is None or (len(self.depth_weights) == self.ttt_steps and all(w >= 0 for w in self.depth_weights))
        require(ok, "trainer.depth_weights", self.depth_weights, "trainer.ttt_steps numbers from 0, or null")
        ok = self.learning_rate is None or 0.0 < self.learning_rate < 1.0
        require(ok, "trainer.learning_rate", self.learning_rate, "between 0 and 1, or null")
        require(self.warmup_steps >= 0, "trainer.warmup_steps", self.warmup_steps, "0 or more")
        require(self.clip_norm > 0, "trainer.clip_norm", self.clip_norm, "more than 0")
        require(1 <= self.accumulation <= 4096, "trainer.accumulation", self.accumulation, "between 1 and 4096")
        require(0 < self.rank_timeout_s <= 86_400, "trainer.rank_timeout_s", self.rank_timeout_s, "above 0 and at most 86400")
        ok = self.ema_decay is None or 0.0 < self.ema_decay < 1.0
        require(ok, "trainer.ema_decay", self.ema_decay, "between 0 and 1, or null")
        ok = self.hedge is None or (2 <= len(set(self.hedge)) == len(self.hedge) <= 4 and all(0 < f <= 10 for f in self.hedge))
        require(ok, "trainer.hedge", self.hedge, "2 to 4 different factors above 0 and at most 10, or null")
        ok = self.draft_vocab_size is None or self.draft_vocab_size >= 2
        require(ok, "trainer.draft_vocab_size", self.draft_vocab_size, "at least 2, or null")
        require(self.vocabulary_tokens >= 1, "trainer.vocabulary_tokens", self.vocabulary_tokens, "at least 1")
        ok = self.metrics_port is None or 0 <= self.metrics_port <= 65535
        require(ok, "trainer.metrics_port", self.metrics_port, "between 0 and 65535, or null")
        self._check_intervals()

    @property
    def weights_of_depths(self) -> list[float]:
        """[L]"""
        return self.depth_weights or [self.depth_decay**k for k in range(self.ttt_steps)]

    @property
    def name(self) -> str:
        """Who leases, for a ledger and on disk."""
        return f"{self.run_id}@{self.worker}" if self.worker else self.run_id

    def _check_intervals(self) -> None:
        for name in ("checkpoint_every_s", "evaluate_every_s", "settle_s"):
            require(getattr(self, name) >= 0, f"trainer.{name}", getattr(self, name), "0 or more seconds")
        for name in ("checkpoint_every_steps", "evaluate_every_steps", "max_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"trainer.{name}", value, "at least 1, or null")
        for name in ("max_time_s", "idle_timeout_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"trainer.{name}", value, "more than 0 seconds, or null")
        require(self.keep_checkpoints >= 1, "trainer.keep_checkpoints", self.keep_checkpoints, "at least 1")


@dataclass
class DataConfig:
    batch_rows: int = 8
    max_batch_tokens: int = 16384  # a batch stops growing there; a single longer row is a batch of its own
    passes: int = 6  # how often a row is trained on; offline: epochs
    fill_wait_s: float = 10.0  # a batch that is not full waits until no row has come for so long
    replay_rows: int = 1024  # so many trained rows may be replayed, the newest
    replay_share: float = 0.0  # of a batch with fresh rows: trained ones, whether or not their passes are used up
    recency: float = 0.0  # the newest of them is drawn 2 ** recency times as often as the oldest
    slice_balance: float = 0.0  # 0: rows alike; 1: slices of the traffic alike, also in who leaves the full buffer
    lease_timeout_s: float = 120.0  # rows of a trainer that died return to the queue after it
    poll_s: float = 0.25
    prompts: str | None = None  # interleaved, capture: conversations, one JSON object a line: a file, directory or pattern
    corpus: str | None = None  # offline: conversations, or one or more directories of token rows; null: those of features.root
    max_tokens: int = 2048  # of a row of a corpus; a longer one is cut there
    heldout_fraction: float | None = None  # of conversations, for the gate; null: 0.01, or what it needs, at most 0.2

    def __post_init__(self) -> None:
        require(self.batch_rows >= 1, "data.batch_rows", self.batch_rows, "at least 1")
        require(self.max_batch_tokens >= 16, "data.max_batch_tokens", self.max_batch_tokens, "at least 16")
        require(self.passes >= 1, "data.passes", self.passes, "at least 1")
        require(self.fill_wait_s >= 0, "data.fill_wait_s", self.fill_wait_s, "0 or more seconds")
        ok = self.replay_rows >= self.batch_rows
        require(ok, "data.replay_rows", self.replay_rows, "at least data.batch_rows")
        require(0.0 <= self.replay_share <= 0.9, "data.replay_share", self.replay_share, "between 0 and 0.9")
        require(0.0 <= self.recency <= 16.0, "data.recency", self.recency, "between 0 and 16")
        require(0.0 <= self.slice_balance <= 1.0, "data.slice_balance", self.slice_balance, "between 0 and 1")
        ok = 1 <= self.lease_timeout_s <= LONGEST_LEASE_S
        require(ok, "data.lease_timeout_s", self.lease_timeout_s, f"between 1 and {LONGEST_LEASE_S:.0f} seconds")
        require_period("data.poll_s", self.poll_s)
        ok = self.prompts is None or bool(self.prompts.strip())
        require(ok, "data.prompts", self.prompts, "a file of conversations, or null")
        ok = self.corpus is None or bool(self.corpus.strip())
        require(ok, "data.corpus", self.corpus, "conversations, directories of token rows, or null")
        require(self.max_tokens >= 8, "data.max_tokens", self.max_tokens, "at least 8")
        ok = self.heldout_fraction is None or 0.0 <= self.heldout_fraction <= 0.5
        require(ok, "data.heldout_fraction", self.heldout_fraction, "between 0 and 0.5, or null")


@dataclass
class RemoteConfig:
    """How to reach the server that `source` names."""

    api_key_file: str | None = None  # holds a key that the server marks admin; null for a server without keys
    ca: str | None = None  # PEM, for grpcs://: who signed the server's certificate; null: the system's authorities
    certificate: str | None = None  # PEM, with private_key: this client's, where the server asks for one
    private_key: str | None = None
    patience_s: float = 60.0  # how long to wait for a server that does not answer, say while it is started again

    def __post_init__(self) -> None:
        for name in ("api_key_file", "ca", "certificate", "private_key"):
            value = getattr(self, name)
            require(value is None or bool(value.strip()), f"remote.{name}", value, "a file, or null")
        ok = (self.certificate is None) == (self.private_key is None)
        require(ok, "remote.private_key", self.private_key, "given together with remote.certificate")
        require(0 < self.patience_s <= 3600, "remote.patience_s", self.patience_s, "more than 0 seconds and at most 3600")


@dataclass
class TrainingConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)  # this and the next two: interleaved
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    producer: ProducerConfig = field(default_factory=ProducerConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)  # capture
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)  # mode=evaluate
    export: ExportConfig = field(default_factory=ExportConfig)  # mode=export
    interchange: InterchangeConfig = field(default_factory=InterchangeConfig)  # mode=import
    mode: Mode = Mode.ONLINE
    source: str | None = None  # grpc://HOST:PORT or grpcs://HOST:PORT: a server's rows; null: those of features.root
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    state_dir: str | None = None  # None: `state` in the home directory of the models

    def __post_init__(self) -> None:
        require_directory("state_dir", self.state_dir)
        ok = self.mode is not Mode.EXPORT or self.export.out is not None
        require(ok, "export.out", self.export.out, "a directory to write to, with mode=export")
        ok = self.mode is not Mode.IMPORT or self.interchange.path is not None
        require(ok, "interchange.path", self.interchange.path, "the directory of a drafter, with mode=import")
        ok = (self.mode in (Mode.INTERLEAVED, Mode.CAPTURE)) == (self.data.prompts is not None)
        expected = "a file of conversations with mode=interleaved or mode=capture, and null in other modes"
        require(ok, "data.prompts", self.data.prompts, expected)
        ok = (self.mode is Mode.EVALUATE) == bool(self.evaluate.prompts)
        require(ok, "evaluate.prompts", self.evaluate.prompts, "a list of files with mode=evaluate, and empty in other modes")
        ok = self.data.corpus is None or self.mode is Mode.OFFLINE
        require(ok, "data.corpus", self.data.corpus, "null unless mode=offline")
        ok = self.source is None or self.mode is Mode.ONLINE
        require(ok, "source", self.source, "null unless mode=online: a server gives rows to be consumed")
        in_step = self.data.batch_rows * self.trainer.accumulation
        ok = self.data.replay_rows >= in_step
        require(ok, "data.replay_rows", self.data.replay_rows, f"at least data.batch_rows * trainer.accumulation, {in_step}")
        ok = self.model.dtype is not Dtype.BFLOAT16
        expected = "auto or float32: a drafter is trained in float32"
        require(ok or not self.mode.is_training, "model.dtype", self.model.dtype.value, expected)
