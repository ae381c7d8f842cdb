"""The invented passages: enough of them, all different, the same on every machine; and real ones from a file."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import traffic


def test_passages_are_many_distinct_and_of_the_promised_length() -> None:
    texts = list(islice(traffic.passages(), 1000))
    assert len(set(texts)) == 1000
    assert all(50 <= len(text.split()) <= 100 for text in texts)
    assert not any(re.search(r"[{}]|\.\.|  ", text) for text in texts), "a blank was left open"
    openings = {re.sub(r"[A-Z]\w+|\d\S*", "", text)[:60] for text in texts}
    assert len(openings) >= 20


def test_the_same_seed_gives_the_same_passages() -> None:
    assert list(islice(traffic.passages(3), 20)) == list(islice(traffic.passages(3), 20))
    assert not set(islice(traffic.passages(3), 20)) & set(islice(traffic.passages(4), 20))


def test_passages_from_a_file_are_cut_at_a_sentence(tmp_path: Path) -> None:
    long = "Summarize: " + "One two three four five six seven eight nine ten. " * 30
    rows = [{"turns": ["A first turn.", "A second."]}, {"conversations": [{"role": "user", "content": long}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = traffic.load_passages(path)
    assert first == "A first turn."
    assert second.startswith("One two")
    assert second.endswith("ten.")
    assert len(second.split()) == 110
