"""One narrow kind of chat traffic: "extract people, places and numbers as JSON" from short news passages.

The passages are invented: `stories.json` filled in with a fixed seed, so that the repository needs no data of anybody else's.
There, each story is told in order and each sentence in one of the ways given for it; any ways go together. `load_passages`
takes real texts from a JSONL file instead. Nothing here talks to a server.

    python benchmarks/traffic.py 3        # print three passages
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from prompts import load

Messages = list[dict[str, str]]

MAX_WORDS = 110
INSTRUCTION = (
    "Extract people, places and numbers from the text as JSON, in this form: "
    '{"people": [], "places": [], "numbers": []}\n\nText: '
)


def passages(seed: int = 0) -> Iterator[str]:
    """Endless distinct passages of 50 to 100 words, the same for the same seed."""
    words: dict[str, Any] = json.loads((Path(__file__).parent / "stories.json").read_text())
    stories = list(words["stories"].values())
    rng = random.Random(seed)
    seen: set[bytes] = set()  # digests: who measures memory counts these too
    while True:
        sentences = [rng.choice(ways) for ways in rng.choice(stories)]
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(words["asides"]))
        text = " ".join(sentences).format(**_cast(rng, words))
        digest = hashlib.sha256(text.encode()).digest()[:8]
        if digest not in seen:
            seen.add(digest)
            yield text


def _cast(rng: random.Random, words: dict[str, Any]) -> dict[str, str]:
    """A value for every blank; no two people and no two towns of a story are the same."""
    names = zip(rng.sample(words["first_names"], 5), rng.sample(words["last_names"], 5), strict=True)
    people = zip(["person", "person2", "person3", "person4", "witness"], (" ".join(name) for name in names), strict=True)
    towns = zip(["town", "town2", "town3", "town4"], rng.sample(words["towns"], 4), strict=True)
    days = rng.sample(words["days"], 2)
    year = rng.randint(1931, 2012)
    others = {
        "street": rng.choice(words["streets"]),
        "clock": f"{rng.randint(1, 12)}:{rng.randint(0, 59):02d} {rng.choice(['a.m.', 'p.m.'])}",
        "month": rng.choice(words["months"]),
        "day": days[0],
        "day2": days[1],
        "year": str(year),
        "year2": str(year + rng.randint(2, 9)),
        "money": _money(rng, words),
        "money2": _money(rng, words),
        "price": f"{rng.randint(6, 90)} {rng.choice(words['currencies'])}",
        "price2": f"{rng.randint(2, 60)},{rng.randint(0, 9)}00 {rng.choice(words['currencies'])}",
        "metres": f"{rng.randint(12, 69) / 10:.1f}",
        "thousands": f"{rng.randint(1, 48)},{rng.randint(10, 99)}0",
        "inhabitants": f"{rng.randint(2, 90)},{rng.randint(100, 999)}",
    }
    figures = {name: str(rng.randint(*ends)) for name, ends in words["figures"].items()}
    return dict(people) | dict(towns) | others | figures


def _money(rng: random.Random, words: dict[str, Any]) -> str:
    millions, thousands = f"{rng.randint(11, 98) / 10:.1f} million", f"{rng.randint(12, 940)},{rng.choice(['000', '500'])}"
    return f"{rng.choice([millions, thousands])} {rng.choice(words['currencies'])}"


def load_passages(path: Path) -> list[str]:
    """The texts of a JSONL file with `conversations` or `turns` (the first user turn of each), cut at a sentence's end."""
    return [_cut(prompt.text.removeprefix("Summarize:").strip()) for prompt in load(path)]


def _cut(text: str) -> str:
    """The first words of a text, up to the last end of a sentence among them if that is not too far back."""
    words = text.split()
    kept = " ".join(words[:MAX_WORDS])
    end = max(f"{kept} ".rfind(mark) for mark in (". ", "? ", "! "))
    return kept if len(words) <= MAX_WORDS or end < len(kept) // 2 else kept[: end + 1]


def messages(passage: str) -> Messages:
    """The request for one passage, without a system message: the chat template's own is used."""
    return [{"role": "user", "content": INSTRUCTION + passage}]


if __name__ == "__main__":
    print("\n\n".join(islice(passages(), int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
