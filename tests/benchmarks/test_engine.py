"""The engine's benchmark on the tiny model: all sections run, add up and are told; a wrong token makes it fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine
import engine_sections
import engine_tables
import pytest
import torch
from engine_arms import Answer, HfGenerate, HfStatic, Ours, Served, read_plain
from engine_sections import Encoded

from runtime.config import BackendConfig, DrafterConfig, ModelConfig, SpeculationConfig
from runtime.models import resolve
from training.judging.oracle import Oracle

DOMAINS = ("chat", "math", "code")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three domains, one of whose prompts does not fit the tiny model's context."""
    records: list[dict[str, Any]] = [
        {"category": domain, "turns": [f"Say the number {number} in {domain}."]} for domain in DOMAINS for number in range(2)
    ]
    records.append({"category": "chat", "conversations": [{"role": "user", "content": "long " * 500}]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_all_sections_run_and_add_up(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    options = ["--model", "tiny", "--quick", "--per-domain", "3", "--max-tokens", "12", "--flat-requests", "40", "--threads", "1"]
    assert engine.main([str(prompts), *options, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    sections = result["sections"]
    assert list(sections) == list(engine.SECTIONS)
    assert result["prompts"] == {"files": ["prompts.jsonl"], "used": 6, "too_long": 1}
    assert "CPU" in result["machine"]

    arms, correctness = sections["single"]["arms"], sections["single"]["correctness"]
    assert list(arms) == ["HF generate", "ours, plain", "ours, chain of 5", "ours, adaptive"]
    assert list(arms["HF generate"]["domains"]) == sorted(DOMAINS)
    for name, arm in arms.items():
        assert arm["decode_tokens_per_s"] > 0
        assert arm["ratio"][name] == 1
    assert arms["ours, plain"]["acceptance_length"] == 1
    assert correctness["ok"]
    assert len({arm["tokens"] for arm in correctness["arms"].values()}) == 1 or correctness["partings"]

    assert sections["forward"]["1"]["v"] == 1
    assert sections["single"]["repeats"] == {"arm": "ours, plain", "asked_again": 5, "equal": 5, "ok": True}
    assert set(sections["batch"]) == {"ours, plain", "ours, chain of 5"}
    assert all(set(sizes) == {"1", "8"} and sizes["1"]["times"] == 1 for sizes in sections["batch"].values())
    cells = sections["never"]["cells"]
    assert [(cell["domain"], cell["concurrency"]) for cell in cells] == [("chat", 1), ("chat", 4), ("code", 1), ("code", 4)]
    assert set(cells[0]["tokens_per_s"]) == {"adaptive", *map(str, engine.DEPTHS)}
    assert all(share == 1 for cell in cells for share in cell["same"].values()), "in float32 all arms say the same"
    assert sections["never"]["smallest_ratio"] == min(cell["ratio"] for cell in cells)
    assert sections["equality"]["ok"]
    assert sections["equality"]["equal"].keys() == {"chains of every depth", "adaptive"}
    assert sections["flat"]["requests"] == 40
    assert sections["flat"]["kv_bytes_before"] == sections["flat"]["kv_bytes_after"] == 0

    page = capsys.readouterr().out
    assert all(name in page for name in (*arms, *DOMAINS, "adaptive / best", "40 short requests"))


def test_a_model_that_is_not_there_is_one_sentence(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main([str(prompts), "--model", "./nowhere", "--quick"]) == 1
    assert capsys.readouterr().err.startswith("engine: There is no directory")


class Recited:
    """An arm that answers what it was told, a token in 10 ms."""

    def __init__(self, name: str, token_ids: Sequence[int]) -> None:
        self.name, self._token_ids = name, list(token_ids)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        times = [0.01 * place for place in range(1, max_tokens + 1)]
        return Answer(0.0, self._token_ids[:max_tokens], times, times[-1])


def test_a_wrong_token_is_found() -> None:
    resolved = resolve("tiny")
    model = read_plain(resolved, torch.float32, "cpu")
    prompt = Encoded("chat", list(range(30, 50)))
    right = HfGenerate(model, [257]).answer(prompt.token_ids, 10).token_ids
    wrong = [*right[:6], (right[6] + 1) % 256, *right[7:]]
    arms = [Recited("ours, plain", right), Recited("off at 6", wrong)]
    rates, answers = engine_sections.single(arms, [prompt], 10, say=lambda text: None)
    assert rates["off at 6"]["decode_tokens_per_s"] == pytest.approx(100)
    found = engine_sections.correctness(answers, [prompt], Oracle(model), limit=1e-3, reference="ours, plain")
    assert not found["ok"]
    assert found["arms"]["ours, plain"]["largest_gap"] == 0
    assert found["arms"]["off at 6"]["largest_gap"] > 1e-3
    [parting] = found["partings"]
    assert (parting["arm"], parting["token"], parting["gap_of_reference"]) == ("off at 6", 6, 0)
    assert parting["gap"] > 1e-3
    assert "NOT all within it" in engine_tables.correctness(found)


class Recites:
    """An engine whose answers depend on how many it gives at once."""

    def __init__(self, alone: Sequence[int], among_others: Sequence[int]) -> None:
        self._alone, self._among_others = list(alone), list(among_others)

    def run(self, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int, **fields: Any) -> list[Answer]:
        is_alone = fields == {"speculate": False}
        token_ids = self._alone if is_alone else self._among_others
        assert concurrency == len(prompts)
        assert is_alone or 1 <= fields["max_draft_tokens"] <= 7
        return [Answer(0.0, token_ids[:max_tokens], [0.0] * max_tokens, 1.0) for _ in prompts]


@pytest.mark.parametrize("limit", [1e-3, 0.0])
def test_an_answer_that_a_batch_changes_is_found(limit: float) -> None:
    model = read_plain(resolve("tiny"), torch.float32, "cpu")
    prompts = [Encoded("chat", list(range(30, 50)))] * 3
    right = HfGenerate(model, [257]).answer(prompts[0].token_ids, 8).token_ids
    wrong = [*right[:6], (right[6] + 1) % 256, right[7]]
    for batched, is_right in ((right, True), (wrong, False)):
        engines: dict[str, Any] = {"chains": Recites(right, batched)}
        found = engine_sections.equality(engines, prompts, 8, 0, Oracle(model), limit, say=lambda text: None)
        assert found["ok"] == is_right
        assert found["equal"] == {"chains": 3 if is_right else 0}
        assert ("NOT kept" in engine_tables.equality(found, {})) != is_right


def test_an_answer_counts_what_it_decoded_behind_the_first_step() -> None:
    answer = Answer(1.0, [1, 2, 3, 4, 5, 6], [2.0, 2.0, 3.0, 3.0, 3.0, 4.0], 4.5)
    assert answer.seconds == 3.5
    assert answer.decode_rate == 4 / 2
    assert answer.step_seconds == 1.0
    assert answer.num_between(2.0, 3.0) == 3


def test_the_arms_say_the_same() -> None:
    resolved = resolve("tiny")
    model = read_plain(resolved, torch.float32, "cpu")
    served = Served(resolved, ModelConfig("tiny", device="cpu"), BackendConfig(), DrafterConfig(), SpeculationConfig(), 4)
    try:
        arms = [
            HfGenerate(model, [257]),
            HfStatic(model, [257]),
            Ours("ours", served),
            Ours("plain", served, speculate=False),
        ]
        prompt = list(range(40, 60))
        answers = [arm.answer(prompt, 24) for arm in arms for _ in range(2)]
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        assert all(answer.began_at < answer.times[0] <= answer.times[-1] <= answer.ended_at for answer in answers)
        crowd = served.run([prompt] * 7, 3, 24)
        assert [answer.token_ids for answer in crowd] == [answers[0].token_ids] * 7
        assert served.settled_kv_bytes() == 0
    finally:
        served.stop()


def test_an_arm_that_says_something_else_when_asked_again_is_found() -> None:
    prompt, first = Encoded("chat", [1]), Recited("x", [5, 6, 7])
    answers = [first.answer([1], 3)]
    assert engine_sections.repeats(first, [prompt], answers, 3)["ok"]
    assert not engine_sections.repeats(Recited("x", [5, 6, 8]), [prompt], answers, 3)["ok"]


def test_of_an_answer_as_much_counts_as_all_give() -> None:
    assert engine_sections._common_start([[1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 4]]) == [1, 2]
    assert engine_sections._common_start([[1], [2]]) == []


def test_arms_take_turns() -> None:
    names = ["a", "b", "c"]
    assert [engine_sections.turns(names, number) for number in range(3)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_depths_far_behind_sit_out_later_rounds_and_the_others_are_compared_round_by_round() -> None:
    cell = engine_sections._Cell("chat", 1, ["adaptive", "0", "3", "5"])
    rates = {"adaptive": [9.0, 12.0, 10.0], "0": [5.0, 5.1], "3": [10.0, 11.0, 12.5], "5": [8.0, 10.7, 9.0]}
    for number in range(3):
        for arm in cell.arms():
            times = [1.0] * int(10 * rates[arm][number])
            cell.note(arm, [Answer(0.0, [], [*times, 20.0]), Answer(10.0, [7], [11.0])], [[], [7, 8]])
    assert cell.arms() == ["adaptive", "3", "5"]
    assert cell.row()["rounds"] == rates
    assert set(cell.row()["same"].values()) == {0.5}, "one of two answers was as asked for"
    assert cell.ratio == pytest.approx(0.9), "the median of 9 / 10, 12 / 11 and 10 / 12.5, the depth of 3 being the best"


def test_a_cell_goes_on_until_its_ratio_is_steady() -> None:
    def cell(rates: list[float]) -> engine_sections._Cell:
        made = engine_sections._Cell("chat", 1, ["adaptive", "0", "5"])
        for rate in rates:
            for name, tokens in (("adaptive", rate), ("0", 50.0), ("5", 100.0)):
                times = [index / tokens for index in range(1, 91)]
                made.note(name, [Answer(0.0, [7] * 90, times), Answer(0.5, [7] * 90)], [[7] * 90] * 2)
        return made

    steady, unsteady = cell([96.0, 98.0, 97.0, 98.0, 96.0]), cell([70.0, 98.0, 120.0, 110.0, 80.0])
    assert steady.arms() == ["adaptive", "5"], "half of the best depth's rate is hopeless"
    assert steady.ratio == pytest.approx(0.97, abs=0.02)
    assert steady.error < engine_sections.STEADY
    assert unsteady.error > engine_sections.STEADY
    assert cell([96.0]).error == 0, "of one round nothing is known"
