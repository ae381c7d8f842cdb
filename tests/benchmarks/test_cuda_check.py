"""What is to be measured on a CUDA device, on a CPU with the tiny model: the parts that run there add up and are told."""

from __future__ import annotations

import json
from pathlib import Path

import cuda_check
import pytest


def test_the_parts_run_and_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "check.json"
    records = [
        {"turns": [f"Count from {number} to a hundred and back again, then say which numbers came twice."]} for number in range(5)
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"turns": ["Hi"]}]))
    options = ["--model", "tiny", "--device", "cpu", "--max-tokens", "6", "--rounds", "1", "--out", str(out)]
    assert cuda_check.main([str(prompts), *options]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(cuda_check.PARTS)
    assert all("skipped" in parts[name] for name in ("tests", "steps"))
    baselines = parts["baselines"]
    assert set(baselines["tokens_per_s"]) == set(baselines["gaps"])
    assert all(set(rates) == {"1", "4"} for rates in baselines["tokens_per_s"].values())
    assert {row["tokens"] for row in baselines["gaps"].values()} == {(1 + 4) * 6}
    assert all(row["largest"] <= 1e-3 for row in baselines["gaps"].values())
    assert len(parts["sampled"]["tokens_per_s"]) == 8
    assert set(parts["many"]["tokens_per_s"]["ids only"]) == {"8", "64"}
    told = capsys.readouterr().out
    assert all(f"## {name}" in told for name in cuda_check.PARTS)


def test_prompts_that_are_too_short_are_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["Hi"]}) + "\n")
    with pytest.raises(SystemExit, match="no prompt has 64 tokens"):
        cuda_check.main([str(prompts), "--model", "tiny", "--device", "cpu"])


def test_a_token_that_is_not_the_models_own_is_seen() -> None:
    class Blunt:
        def gaps(self, prompt: list[int], said: list[int]) -> list[float]:
            return [0.5 * (token == 9) for token in said]

    found = cuda_check._gaps(Blunt(), {"ours, plain": [([1], [3, 9])], "HF generate": [([1], [9, 9])]}, 0.4)  # type: ignore[arg-type]
    assert (found["ours, plain"]["ok"], found["ours, plain"]["not_the_best"]) == (False, 1)
    assert found["HF generate"]["ok"]
