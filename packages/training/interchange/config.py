"""Settings of mode=export and mode=import. Imports no torch: the door reads it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config import Choice, require, require_directory


class Format(Choice):
    SLIPSTREAM = "slipstream"  # SGLang and vLLM read it as it is
    SGLANG = "sglang"  # SpecForge's too
    VLLM = "vllm"
    SPECULATORS = "speculators"


@dataclass
class ExportConfig:
    drafter: str = "active"  # active, embedded, a version, a run, or a checkpoint directory
    format: Format = Format.SLIPSTREAM
    out: str | None = None  # a directory that is empty or not there yet
    evaluation: str | None = None  # the JSON of mode=evaluate, for the model card
    target: str | None = None  # by which name the engine finds the target, where the files say it; null: model.name
    draft_tokens: int = 5  # what the files advise an engine to draft, where there is a place for it

    def __post_init__(self) -> None:
        require(bool(self.drafter.strip()), "export.drafter", self.drafter, "active, embedded, a version, a run or a directory")
        require_directory("export.out", self.out)
        ok = self.evaluation is None or bool(self.evaluation.strip())
        require(ok, "export.evaluation", self.evaluation, "a file that mode=evaluate wrote, or null")
        ok = self.target is None or bool(self.target.strip())
        require(ok, "export.target", self.target, "a hub id or a directory, or null")
        require(1 <= self.draft_tokens <= 64, "export.draft_tokens", self.draft_tokens, "between 1 and 64")


@dataclass
class InterchangeConfig:
    """What mode=import reads: `import` itself is a word of Python."""

    path: str | None = None  # a checkpoint directory in any of the formats
    register: bool = True  # stage it as a version; false: only say whether it could be
    notes: str = ""  # for the version's manifest

    def __post_init__(self) -> None:
        require_directory("interchange.path", self.path)
