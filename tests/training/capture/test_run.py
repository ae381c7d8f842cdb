"""mode=capture as a user runs it: answers to shards, to features, conversations as they stand; killed, and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ConfigError, FeatureBudgetExceeded, ModelError
from runtime.models import Tokenizer
from training.app import run
from training.capture.config import AnswersConfig, Output
from training.config import Mode, TrainingConfig
from training.data.shards import read_manifest, read_shards
from training.data.tokens import Corpus, sample_id_of

NUM_PROMPTS = 6
NAMES = {f"p{n}#{a}{turn}" for n in range(NUM_PROMPTS) for a in range(2) for turn in (("", ".1") if n % 2 else ("",))}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [
        {"id": f"p{n}", "category": "chat", "turns": [f"What is {n}?", "And then?"] if n % 2 else [f"What is {n}?"]}
        for n in range(NUM_PROMPTS)
    ]
    path.write_text("\n".join(map(json.dumps, [*records, {"id": "p0", "turns": ["Again?"]}])))
    return path


def settings(state, prompts: Path, **answers: object) -> TrainingConfig:
    values = {"max_tokens": 12, "concurrency": 4, "output": Output.TOKENS, "temperatures": [0.0, 0.9]}
    return state.config(mode=Mode.CAPTURE, data__prompts=str(prompts), answers=AnswersConfig(**(values | answers)))


def made(state) -> Corpus:
    return Corpus.concat(list(read_shards(state.root / "tokens" / "default")))


def by_name(corpus: Corpus) -> dict[str, tuple[list[int], tuple]]:
    return {corpus.name(r): (corpus.token_ids_of(r).tolist(), corpus.spans_of(r)) for r in range(len(corpus))}


def test_answers_become_shards_that_say_what_they_are(state, prompts: Path) -> None:
    assert run(settings(state, prompts)) == 0
    corpus, tokenizer = made(state), Tokenizer.load(state.model.path)
    rows = by_name(corpus)
    assert set(rows) == NAMES
    for name, (ids, [(first, stop)]) in rows.items():
        asked = [{"role": "user", "content": f"What is {name[1]}?"}]
        if name.endswith(".1"):  # a second turn, whose text this random model's template and tokens do not continue
            [(start, end)] = rows[name[:-2]][1]
            said = tokenizer.decode(rows[name[:-2]][0][start:end])
            asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        assert ids[:first] == tokenizer.encode_chat(asked)
        assert stop - first <= 12
        assert stop - first == 12 or ids[stop - 1] in tokenizer.eos_token_ids
    assert sorted(corpus.temperatures.tolist()) == [0.0] * 9 + [pytest.approx(0.9)] * 9
    assert {label for _, _, label in corpus.labels} == {"chat"}
    manifest = read_manifest(state.root / "tokens" / "default")
    assert manifest["totals"] == {"rows": 18, "tokens": corpus.num_tokens, "generated_tokens": corpus.num_generated}
    assert manifest["counts"]["left_out"] == {"duplicate_id": 1}
    assert manifest["origin"]["target_fingerprint"] == state.model.fingerprint
    assert manifest["origin"]["answers"] == {"temperatures": [0.0, 0.9], "max_tokens": 12, "seed": 0}


def test_what_is_answered_depends_on_nothing_that_runs_beside_it(state, prompts: Path, tmp_path: Path) -> None:
    assert run(settings(state, prompts)) == 0
    first = by_name(made(state))
    alone = settings(state, prompts, concurrency=1, directory=str(tmp_path / "alone"), shard_tokens=40)
    assert run(alone) == 0
    assert by_name(Corpus.concat(list(read_shards(tmp_path / "alone")))) == first
    assert len(list((tmp_path / "alone").glob("shard-*"))) > 3


def test_without_speculation_no_drafter_is_loaded_and_the_answers_are_the_same(
    state, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stood by would have the device's rows of steps cut short."""
    assert run(settings(state, prompts)) == 0
    first = by_name(made(state))

    def refuse(*_: object) -> None:
        raise AssertionError("nobody drafts")

    monkeypatch.setattr("training.capture.run.load_drafter", refuse)
    plain = settings(state, prompts, directory=str(tmp_path / "plain"))
    plain.speculation.max_draft_tokens = 0
    assert run(plain) == 0
    assert by_name(Corpus.concat(list(read_shards(tmp_path / "plain")))) == first


def test_killed_at_any_instant_it_goes_on_without_a_lost_or_repeated_answer(
    state, prompts: Path, tmp_path: Path, nursery
) -> None:
    directory = state.root / "tokens" / "default"
    config = settings(state, prompts, concurrency=2, shard_tokens=1)
    for num_shards in (2, 5):
        pid = nursery.start(config)
        while len(list(directory.glob("shard-*"))) < num_shards:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        assert nursery.result() == -signal.SIGKILL
    num_before = len(list(directory.glob("shard-*")))
    assert 5 <= num_before < 12  # of a shard for each dialogue
    (directory / "manifest.json").write_text(  # as if killed between the last shard and the manifest
        json.dumps({**(manifest := read_manifest(directory)), "shards": manifest["shards"][:-1]})
    )
    nursery.start(config)
    assert nursery.result() == 0
    assert f"{num_before} were there already" in nursery.said.read_text()
    killed = by_name(made(state))
    assert run(settings(state, prompts, directory=str(tmp_path / "whole"), concurrency=2)) == 0
    assert killed == by_name(Corpus.concat(list(read_shards(tmp_path / "whole"))))


def test_other_settings_need_another_directory(state, prompts: Path) -> None:
    assert run(settings(state, prompts)) == 0
    with pytest.raises(ConfigError, match=r"holds rows made with answers .*'max_tokens': 12.*now it is .*'max_tokens': 13"):
        run(settings(state, prompts, max_tokens=13))


def test_files_of_one_name_in_different_directories_are_told_apart(state, tmp_path: Path) -> None:
    files = [tmp_path / "asked" / folder / "prompts.jsonl" for folder in ("a", "b")]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"id": f"p{number}", "turns": ["Why?"]}))
    asked = settings(state, tmp_path / "asked" / "*" / "prompts.jsonl")
    assert run(asked) == 0
    assert set(read_manifest(state.root / "tokens" / "default")["origin"]["files"]) == {"a/prompts.jsonl", "b/prompts.jsonl"}
    files[0].write_text(json.dumps({"id": "p2", "turns": ["How?"]}))
    with pytest.raises(ConfigError, match="holds rows made with files"):
        run(asked)


def test_answers_become_rows_with_features(state, prompts: Path) -> None:
    config = settings(state, prompts, output=Output.FEATURES)
    config.trainer.gate.min_heldout_rows = 2
    assert run(config) == 0
    assert run(config) == 0  # nothing is made again
    refs = [*state.ledger.trainable(), *state.ledger.heldout()]
    assert {ref.sample_id for ref in refs} == set(map(sample_id_of, NAMES))
    sources = {ref.source for ref in state.ledger.heldout()}
    assert sources  # though no share of the prompts is given
    assert not sources & {ref.source for ref in state.ledger.trainable()}  # all answers to a prompt lie on one side
    greedy = [ref for ref in refs if "sampling" not in ref.labels]
    assert len(greedy) == 9
    row, _ = state.store.get(greedy[0])
    logits = row.hidden.last.float() @ state.target.lm_head.float().T
    at = row.generated[1:].nonzero().flatten()
    assert (logits[at].argmax(-1) == row.token_ids[at + 1]).float().mean() > 0.9  # states are stored in bfloat16


def test_a_full_feature_plane_ends_it_and_a_larger_one_goes_on(state, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three " * 100}]
    path.write_text("\n".join(json.dumps({"id": f"c{n}", "conversations": messages}) for n in range(12)))
    config = settings(state, path, generate=False, output=Output.FEATURES)
    config.data.max_batch_tokens = 1000
    config.features.budget_mib = 1
    with pytest.raises(FeatureBudgetExceeded, match=r"raise features\.budget_mib"):
        run(config)
    before = {ref.sample_id for ref in state.ledger.trainable()}
    assert 0 < len(before) < 12
    config.features.budget_mib = 64
    assert run(config) == 0
    after = [ref.sample_id for ref in [*state.ledger.trainable(), *state.ledger.heldout()]]
    assert sorted(after) == sorted(sample_id_of(f"c{n}") for n in range(12))
    assert before <= set(after)


def test_conversations_are_read_as_they_stand(state, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]
    lines = [{"id": f"c{n}", "conversations": messages} for n in range(3)] + [{"id": "d", "conversations": messages[:1]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    config = settings(state, path, generate=False)
    assert run(config) == 0
    corpus = made(state)
    assert [label[0] for label in corpus.labels] == ["c0", "c1", "c2"]
    assert torch.isnan(corpus.temperatures).all()
    assert read_manifest(state.root / "tokens" / "default")["counts"]["left_out"] == {"nothing_to_learn": 1}
    path.write_text(json.dumps(lines[-1]))
    with pytest.raises(ConfigError, match="leaves nothing to learn from"):
        run(settings(state, path, generate=False, directory=str(tmp_path / "none")))


def test_conversations_are_read_for_a_model_whose_weights_nobody_here_knows(state, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(state.model.path, model)
    [file] = model.glob("*.safetensors")
    save_file({f"transformer.{name}": tensor for name, tensor in load_file(file).items()}, file)
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]
    path.write_text(json.dumps({"id": "c", "conversations": messages}))
    config = settings(state, path, generate=False)
    config.model.name = str(model)
    assert run(config) == 0
    assert len(made(state)) == 1
    sizes = json.loads((model / "config.json").read_text())
    del sizes["vocab_size"]
    (model / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ModelError, match=r"config\.json has vocab_size None"):
        run(config)


@pytest.mark.real_model
def test_a_dialogue_that_the_template_continues_is_one_row(tmp_path: Path, state) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["Say hello.", "Say goodbye."]}))
    config = settings(state, path, max_tokens=6, temperatures=[0.0])
    config.model.name = "smollm2-135m"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLIPSTREAM_HOME")
        assert run(config) == 0
    corpus = made(state)
    assert corpus.labels == (("a", "0", ""),)
    assert len(corpus.spans_of(0)) == 2
