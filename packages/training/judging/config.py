"""Settings of the gate and of mode=evaluate. Imports no torch: the door reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from runtime.config import SpeculationConfig, SpeculationMode, TreeShape, require, require_directory

SHAPE = re.compile(r"chain-(?P<chain>\d{1,2})|tree-(?P<depth>\d{1,2})-(?P<nodes>\d{1,2})-(?P<width>\d{1,2})")
WORDS = "auto, active, embedded, none, ngram, a version, a run or a directory"
SHAPES = "chain-DEPTH or tree-DEPTH-NODES-WIDTH, such as chain-5 or tree-5-16-4"


@dataclass
class GateConfig:
    """When a candidate may be published. It must beat what is served now on the same held-out rows, beyond chance."""

    enabled: bool = True  # off: train and checkpoint, never publish
    confidence: float = 0.95  # of the one-sided lower bound of the difference, which must be above 0
    min_heldout_rows: int = 8  # fewer decide nothing
    max_heldout_rows: int = 64  # the newest so many are evaluated
    draft_tokens: int = 5  # chain length of the simulation
    resamples: int = 2000
    max_slice_loss: float = 0.03  # share of acceptance length that no slice of min_heldout_rows rows may lose; 1: any

    def __post_init__(self) -> None:
        require(0.5 <= self.confidence < 1.0, "trainer.gate.confidence", self.confidence, "at least 0.5 and below 1")
        require(self.min_heldout_rows >= 2, "trainer.gate.min_heldout_rows", self.min_heldout_rows, "at least 2")
        ok = self.max_heldout_rows >= self.min_heldout_rows
        require(ok, "trainer.gate.max_heldout_rows", self.max_heldout_rows, "at least trainer.gate.min_heldout_rows")
        require(1 <= self.draft_tokens <= 64, "trainer.gate.draft_tokens", self.draft_tokens, "between 1 and 64")
        require(100 <= self.resamples <= 100_000, "trainer.gate.resamples", self.resamples, "between 100 and 100000")
        ok = 0.0 <= self.max_slice_loss <= 1.0
        require(ok, "trainer.gate.max_slice_loss", self.max_slice_loss, "between 0 and 1")


@dataclass
class EvaluateConfig:
    """What mode=evaluate asks, and how its figures are made."""

    prompts: list[str] = field(default_factory=list)  # JSONL files; of each line the last question is asked, with its `category`
    drafter: str = "auto"  # active, embedded, none, ngram, a version, a run, a directory; auto: active, else embedded, else ngram
    against: str | None = None  # another one, for the difference between the two
    shapes: list[str] = field(default_factory=lambda: ["chain-5"])  # each: chain-DEPTH or tree-DEPTH-NODES-WIDTH
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    lengths: list[int] = field(default_factory=lambda: [64, 256])  # figures are of the first so many tokens of each answer
    per_category: int | None = None  # so many prompts of each category, chosen by the seed; null: all
    concurrency: int = 8  # answers at a time
    seed: int = 0  # which prompts, and what is drawn at temperature > 0
    lossless_prompts: int = 8  # of each file, also answered without a drafter, greedily, and compared; 0: none
    confidence: float = 0.95  # of the intervals, by a bootstrap over prompts
    resamples: int = 2000
    out: str | None = None  # a directory; null: evaluations/<hash of the settings> in the state directory

    def __post_init__(self) -> None:
        ok = all(file.strip() for file in self.prompts)
        require(ok, "evaluate.prompts", self.prompts, "a list of files")
        for name in ("drafter", "against"):
            value = getattr(self, name)
            ok = (value is None and name == "against") or bool(value and value.strip())
            require(ok, f"evaluate.{name}", value, WORDS)
        require(bool(self.shapes), "evaluate.shapes", self.shapes, f"a list of at least one, each {SHAPES}")
        for shape in self.shapes:
            speculation_of(shape)
        ok = bool(self.temperatures) and all(0.0 <= each <= 2.0 for each in self.temperatures)
        require(ok, "evaluate.temperatures", self.temperatures, "a list of at least one, each between 0 and 2")
        for name in ("shapes", "temperatures"):
            values: list[Any] = getattr(self, name)
            require(len(set(values)) == len(values), f"evaluate.{name}", values, "a list of different ones")
        ok = bool(self.lengths) and all(each >= 2 for each in self.lengths)
        require(ok, "evaluate.lengths", self.lengths, "a list of at least one, each at least 2 tokens")
        ok = self.per_category is None or self.per_category >= 1
        require(ok, "evaluate.per_category", self.per_category, "at least 1, or null")
        require(1 <= self.concurrency <= 16384, "evaluate.concurrency", self.concurrency, "between 1 and 16384")
        require(0 <= self.seed < 2**31, "evaluate.seed", self.seed, "a whole number from 0 to 2147483647")
        require(self.lossless_prompts >= 0, "evaluate.lossless_prompts", self.lossless_prompts, "0 or more")
        require(0.5 <= self.confidence < 1.0, "evaluate.confidence", self.confidence, "at least 0.5 and below 1")
        require(100 <= self.resamples <= 100_000, "evaluate.resamples", self.resamples, "between 100 and 100000")
        require_directory("evaluate.out", self.out)


def speculation_of(shape: str) -> SpeculationConfig:
    """What an engine is told so that all its drafts have this shape. ConfigError if it is none."""
    match = SHAPE.fullmatch(shape)
    require(match is not None, "evaluate.shapes", shape, SHAPES)
    assert match is not None
    if match["chain"] is not None:
        depth = int(match["chain"])
        require(1 <= depth <= 64, "evaluate.shapes", shape, "a chain of 1 to 64 tokens")
        return SpeculationConfig(SpeculationMode.FIXED, TreeShape.CHAIN, max_draft_tokens=depth)
    depth, nodes, width = int(match["depth"]), int(match["nodes"]), int(match["width"])
    ok = 1 <= depth <= 64 and depth <= nodes <= 63 and 2 <= width <= 16
    require(ok, "evaluate.shapes", shape, "a tree of DEPTH to 63 nodes, 2 to 16 wide")
    return SpeculationConfig(SpeculationMode.FIXED, TreeShape.TREE, depth, tree_nodes=nodes, tree_width=width)
