"""First user turns out of JSONL files with `turns` or `conversations`, as Spec-Bench has them; `category` is the domain."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ALL = "all"  # of prompts without a category


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


def read(path: Path, per_category: int | None, seed: int) -> list[Prompt]:
    """At most per_category of each category, chosen by the seed."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        text = record["turns"][0] if record.get("turns") else record["conversations"][0]["content"]
        category = record.get("category", ALL)
        groups[category].append(Prompt(category, text))
    rng = random.Random(seed)
    return [
        prompt
        for group in groups.values()
        for prompt in (group if per_category is None else rng.sample(group, min(per_category, len(group))))
    ]
