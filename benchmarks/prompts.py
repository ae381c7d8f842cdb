"""First user turns out of JSONL files with `turns` or `conversations`, as Spec-Bench has them; `category` is the domain."""

from __future__ import annotations

import argparse
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


def load(path: Path) -> list[Prompt]:
    """All of a file. ValueError names the file and the line that is none; OSError."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["turns"][0] if record.get("turns") else record["conversations"][0]["content"]
            prompts.append(Prompt(str(record.get("category", ALL)), text))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            wanted = '{"turns": ["..."]} or {"conversations": [{"role": "user", "content": "..."}]}'
            raise ValueError(f"line {number} of {path} is {line[:60]!r}; it must be {wanted}") from error
    if not prompts:
        raise ValueError(f"{path} is empty; give a file with a prompt in each line")
    return prompts


def prompt_file(name: str) -> Path:
    """The type of an option that names such a file, which has been looked through then."""
    try:
        load(Path(name))
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{name} is no text in UTF-8; give a JSONL file of prompts") from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be read ({error.strerror}); give a JSONL file of prompts") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(name)


def read(path: Path, per_category: int | None, seed: int) -> list[Prompt]:
    """At most per_category of each category, chosen by the seed."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in load(path):
        groups[prompt.category].append(prompt)
    rng = random.Random(seed)
    return [
        prompt
        for group in groups.values()
        for prompt in (group if per_category is None else rng.sample(group, min(per_category, len(group))))
    ]
