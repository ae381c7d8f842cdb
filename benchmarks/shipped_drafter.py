"""How the drafter that ships for SmolLM2-135M was made, step by step; a CUDA device wanted.

    python benchmarks/shipped_drafter.py PROMPTS --work made                          # everything
    python benchmarks/shipped_drafter.py PROMPTS --work made --steps answers --only train_chat
    python benchmarks/shipped_drafter.py PROMPTS --work made --steps evaluate --evaluate spec_bench.jsonl

PROMPTS is a directory of JSONL files of prompts. The steps:

    prompts    long ones are put together from passages that short ones hold: texts to summarise or to answer from
    answers    the target answers all of them, once for each temperature
    train      a new drafter, or that of --init, learns from the answers, for --minutes
    evaluate   its acceptance on the files of --evaluate, which are no training prompts
    export     its files, with a model card

It took two rounds, the second with answers of its own, fewer of them to long prompts:

    python benchmarks/shipped_drafter.py PROMPTS --work one --run one --steps prompts answers train export
    python benchmarks/shipped_drafter.py PROMPTS --work two --seed 1 --num-long 4000 --init one/exported/one --evaluate FILES

Each step is a `python -m training` that can be stopped and started again; what it is told is printed. With several devices, give
steps that do not depend on each other to several processes, by CUDA_VISIBLE_DEVICES and --only.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from command_line import parser_of

STEPS = ("prompts", "answers", "train", "evaluate", "export")
TEMPERATURES = {"long": [0, 0.7, 0.9]}  # of the answers to a file's prompts
OTHERWISE = [0, 0.7, 0.7, 0.9]
PASSAGE_CHARS = 350  # what is shorter is no passage
LONG_CHARS = (1600, 5600)  # of all passages of a prompt together
SUMMARISE = (
    "Summarize: {}",
    "Summarize the following article:\n\n{}",
    "{}\n\nWrite a short summary of the text above.",
    "Please give a summary of this text in a few sentences.\n\n{}",
    "{}\n\nTL;DR:",
    "What are the main points of the following text?\n\n{}",
)
ANSWER = (
    "{}\n\n{}",
    "{}\nQuestion: {}\nAnswer:",
    "Use the following text to answer the question.\n\n{}\n\nQuestion: {}",
    "Context:\n{}\n\nAnswer the question from the context: {}",
)


def lines_of(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def question_of(record: dict[str, object]) -> str:
    """The first thing asked."""
    turns, messages = record.get("turns"), record.get("conversations")
    if isinstance(turns, list):
        return str(turns[0])
    return (
        next(str(message["content"]) for message in messages if message["role"] == "user") if isinstance(messages, list) else ""
    )


def passages_of(texts: Sequence[str]) -> list[str]:
    """Paragraphs that read like running text, each once."""
    found = dict.fromkeys(paragraph.strip() for text in texts for paragraph in re.split(r"\n\s*\n", text))
    return [each for each in found if len(each) >= PASSAGE_CHARS and each.count(". ") >= 2 and each.count("\n") <= 12]


def long_prompts(folder: Path, count: int, seed: int) -> Iterator[dict[str, object]]:
    """Passages put one behind the other up to a length, and something asked about them."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.glob("*.jsonl"))
    questions = [question_of(record) for path in files for record in lines_of(path)]
    passages = passages_of(questions)
    short = [each for each in questions if each.endswith("?") and 20 <= len(each) <= 120 and "\n" not in each]
    if len(passages) < 100 or len(short) < 100:
        sys.exit(f"{folder} holds {len(passages)} passages and {len(short)} questions; at least 100 of each are needed.")
    print(f"{len(passages)} passages, {len(short)} questions", flush=True)
    for number in range(count):
        wanted = draw.randint(*LONG_CHARS)
        parts: list[str] = []
        while sum(map(len, parts)) < wanted:
            parts.append(draw.choice(passages))
        text = draw.choice((" ", "\n", "\n\n")).join(dict.fromkeys(parts))
        asked = draw.random() < 0.6
        content = draw.choice(SUMMARISE).format(text) if asked else draw.choice(ANSWER).format(text, draw.choice(short))
        category = "summary" if asked else "answer_from_text"
        yield {"id": f"long-{number}", "category": category, "conversations": [{"role": "user", "content": content}]}


class Maker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._given = arguments
        self._work: Path = arguments.work.resolve()
        self._long = self._work / "prompts" / "long.jsonl"
        self._work.mkdir(parents=True, exist_ok=True)

    def prompts(self) -> None:
        self._long.parent.mkdir(exist_ok=True)
        rows = long_prompts(self._given.prompts, self._given.num_long, self._given.seed)
        self._long.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")

    def answers(self) -> None:
        for path in [*sorted(self._given.prompts.glob("*.jsonl")), self._long]:
            if not self._given.only or path.stem in self._given.only:
                self._run(
                    "capture",
                    f"data.prompts={path}",
                    f"answers.directory={self._work / 'tokens' / path.stem}",
                    f"answers.temperatures={TEMPERATURES.get(path.stem, OTHERWISE)}",
                    "answers.output=tokens",
                    f"trainer.seed={self._given.seed}",
                    f"answers.concurrency={self._given.concurrency}",
                    f"answers.kv_budget_mib={self._given.kv_budget_mib}",
                    "speculation=off",
                    "tracker=none",
                )

    def train(self) -> None:
        seconds, given = 60 * self._given.minutes, self._given
        anew = [f"trainer.draft_vocab_size={given.draft_vocab_size}", "trainer.learning_rate=3e-3"]
        on = [f"trainer.init={given.init and given.init.resolve()}", "trainer.learning_rate=2e-3", "trainer.warmup_steps=100"]
        self._run(
            "offline",
            f"data.corpus={self._work / 'tokens'}",
            "data.passes=1000",
            "data.heldout_fraction=0.002",
            "trainer=full",
            f"trainer.run_id={self._given.run}",
            *(on if given.init else anew),
            "trainer.ttt_steps=6",
            f"trainer.schedule.time_s={seconds}",
            f"trainer.max_time_s={seconds}",
            f"trainer.evaluate_every_s={seconds}",
            "trainer.checkpoint_every_s=120",
            "registry=manual",
        )

    def evaluate(self) -> None:
        self._run(
            "evaluate",
            f"evaluate.prompts={[str(path.resolve()) for path in self._given.evaluate]}".replace("'", ""),
            f"evaluate.drafter={self._given.run}",
            "evaluate.lengths=[64,256,512]",
            f"evaluate.shapes={self._given.shapes}".replace("'", ""),
            f"evaluate.temperatures={self._given.temperatures}",
            f"evaluate.concurrency={self._given.at_once}",
            f"evaluate.out={self._work / 'evaluated' / self._given.run}",
        )

    def export(self) -> None:
        evaluation = self._work / "evaluated" / self._given.run / "acceptance.json"
        self._run(
            "export",
            f"export.drafter={self._given.run}",
            f"export.out={self._work / 'exported' / self._given.run}",
            f"export.evaluation={evaluation if evaluation.is_file() else 'null'}",
        )

    def _run(self, mode: str, *overrides: str) -> None:
        told = [f"mode={mode}", f"model={self._given.model}", f"state_dir={self._work}", *overrides, *self._given.overrides]
        print("python -m training " + shlex.join(told), flush=True)
        process = subprocess.Popen([sys.executable, "-m", "training", *told])
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:  # it was told so too, and puts away what it has
                continue
        if process.returncode:
            sys.exit(process.returncode)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a directory for everything that is made")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-long", type=int, default=8000, help="prompts: how many long ones")
    parser.add_argument("--only", nargs="+", default=[], help="answers: stems of files")
    parser.add_argument("--concurrency", type=int, default=1024)
    parser.add_argument("--kv-budget-mib", type=int, default=40_000)
    parser.add_argument("--run", default="shipped")
    parser.add_argument("--seed", type=int, default=0, help="of the long prompts and the answers")
    parser.add_argument("--init", type=Path, help="train: go on from this drafter's files instead of anew")
    parser.add_argument("--draft-vocab-size", type=int, default=16_384)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--evaluate", type=Path, nargs="+", default=[])
    parser.add_argument("--shapes", nargs="+", default=["chain-5"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--at-once", type=int, default=64, help="evaluate: answers at a time")
    parser.add_argument("--overrides", nargs="+", default=[], help="for the steps' commands, as `python -m training` takes them")
    arguments = parser.parse_args()
    if "evaluate" in arguments.steps and not arguments.evaluate:
        parser.error("--evaluate FILE.jsonl ... is needed for the step `evaluate`")
    maker = Maker(arguments)
    for step in arguments.steps:
        getattr(maker, step)()


if __name__ == "__main__":
    main()
