"""mode=offline over token rows, as a user runs it: from conversations and from shards, resumed bit by bit, judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.errors import ConfigError
from runtime.features.ledger import Ledger
from training.app import run
from training.capture.config import AnswersConfig, Output
from training.config import Mode, TrainingConfig
from training.learning import checkpoint

NUM_CHATS = 24


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    said = "one two three four five six seven"
    lines = []
    for n in range(NUM_CHATS):
        messages = [{"role": "user", "content": f"Count {n}."}, {"role": "assistant", "content": f"{n} {said}"}] * (1 + n % 2)
        lines.append({"id": f"c{n}", "category": "chat", "conversations": messages})
    path.write_text("\n".join(map(json.dumps, [*lines, {"id": "x", "conversations": lines[0]["conversations"][:1]}])))
    return path


def settings(state, corpus: Path, run_id: str = "default", **changes: object) -> TrainingConfig:
    given = {
        "mode": Mode.OFFLINE,
        "trainer__run_id": run_id,
        "trainer__vocabulary_tokens": 1,  # of which nothing is to be seen here: all rows are counted
        "trainer__gate__min_heldout_rows": 2,
        "data__corpus": str(corpus),
        "data__max_batch_tokens": 200,
        "data__heldout_fraction": 0.25,
        "data__passes": 3,
    }
    return state.config(**(given | changes))


def weights(state, run_id: str) -> dict[str, torch.Tensor]:
    ledger = Ledger(state.root / "training" / run_id / "ledger.sqlite")
    latest = ledger.latest_checkpoint(run_id)
    ledger.close()
    return checkpoint.load(Path(latest.path))[0]


def test_epochs_over_conversations_learn_are_judged_and_say_what_was_left_out(state, chats: Path) -> None:
    assert run(settings(state, chats)) == 0
    [corpus] = state.events("corpus")
    assert (corpus["rows"], corpus["left_out"], corpus["truncated"]) == (NUM_CHATS, {"nothing_to_learn": 1}, {})
    steps = state.events("step")
    heldout = NUM_CHATS - steps[0]["rows"]
    assert 0 < heldout < NUM_CHATS
    assert steps[-1]["rows_trained"] == 3 * steps[0]["rows"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(step["num_tokens"] <= 200 for step in steps)
    assert state.events("judged")[-1]["heldout_rows"] == heldout
    [began] = state.events("began")
    assert f"{corpus['generated_tokens']} generated tokens of all rows" in began["how"]
    assert not any((state.root / "features").glob("rows/*"))  # nothing of it is stored
    assert len(list((state.root / "cache" / "tokens").glob("*.safetensors"))) == 1


def test_a_run_that_stops_goes_on_bit_by_bit(state, chats: Path) -> None:
    assert run(settings(state, chats, "whole", trainer__max_steps=9)) == 0
    assert run(settings(state, chats, "parts", trainer__max_steps=4)) == 0
    assert run(settings(state, chats, "parts", trainer__max_steps=9)) == 0
    whole, parts = weights(state, "whole"), weights(state, "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    chats.write_text(chats.read_text().replace("Count 3.", "Count three."))
    with pytest.raises(ConfigError, match="its place in the rows is lost"):
        run(settings(state, chats, "parts", trainer__max_steps=10))


def test_without_a_share_given_as_much_is_held_out_as_the_gate_needs(state, chats: Path) -> None:
    for run_id in ("one", "two"):
        config = settings(state, chats, run_id, data__heldout_fraction=None, trainer__max_steps=2, trainer__seed=len(run_id))
        assert run(config) == 0
        assert state.events("judged", run_id)[-1]["heldout_rows"] == 2
        assert state.events("step", run_id)[0]["rows"] == NUM_CHATS - 2
    shares = [
        json.loads((state.root / "training" / run_id / "provenance.json").read_text())["data"]["heldout_fraction"]
        for run_id in ("one", "two")
    ]
    assert 0.01 < shares[0] == shares[1] <= 0.2


@pytest.mark.parametrize("mode", [Mode.ONLINE, Mode.OFFLINE])
def test_another_kind_of_run_takes_no_place_that_is_taken(state, chats: Path, mode: Mode) -> None:
    """Rows from elsewhere have another ledger, which knows nothing of this run's checkpoints and would have them pruned."""
    state.add(range(8))
    assert run(settings(state, chats, trainer__max_steps=9)) == 0
    before = weights(state, "default")
    other = state.config(mode=mode, trainer__max_steps=2, trainer__idle_timeout_s=2.0)
    with pytest.raises(ConfigError, match=r"run 'default' began with .*; keep that, or begin another"):
        run(other)
    assert state.ledger.status()["leased"] == 0
    after = weights(state, "default")
    assert all(torch.equal(before[name], after[name]) for name in before)
    other.trainer.run_id = "other"
    assert run(other) == 0


def test_a_checkpoint_whose_ledger_is_lost_is_told(state, chats: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(settings(state, chats, trainer__max_steps=2)) == 0
    for file in (state.root / "training" / "default").glob("ledger.sqlite*"):
        file.unlink()
    assert run(settings(state, chats, trainer__max_steps=1)) == 0
    assert "step-00000002 is left aside: no ledger knows of it, so the run begins anew" in caplog.text


def test_the_target_answers_and_a_drafter_learns_from_the_shards(state, chats: Path) -> None:
    answers = AnswersConfig(max_tokens=16, temperatures=[0.0, 1.0], output=Output.TOKENS, concurrency=8)
    assert run(state.config(mode=Mode.CAPTURE, data__prompts=str(chats), answers=answers)) == 0
    shards = state.root / "tokens" / "default"
    assert run(settings(state, shards)) == 0
    [corpus] = state.events("corpus")
    assert corpus["rows"] == 2 * (NUM_CHATS + 1)
    assert state.events("step")
    assert run(settings(state, shards, "short", data__max_tokens=40, trainer__max_steps=1)) == 0
    [corpus] = state.events("corpus", "short")
    assert corpus["truncated"]["truncated"] + corpus["left_out"].get("too_long", 0) > 0


def test_what_cannot_be_learned_from_is_refused(state, chats: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus is .*leaves nothing to learn from \(0 rows of 0 tokens.*too long"):
        run(settings(state, chats, data__max_tokens=8))
    answers = AnswersConfig(max_tokens=4, output=Output.TOKENS)
    assert run(state.config(mode=Mode.CAPTURE, data__prompts=str(chats), answers=answers)) == 0
    shards = state.root / "tokens" / "default"
    manifest = json.loads((shards / "manifest.json").read_text())
    changed = json.loads(json.dumps(manifest))
    changed["origin"]["vocabulary_hash"] = "another"
    (shards / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="ids of another vocabulary"):
        run(settings(state, shards))
    (shards / "manifest.json").write_text(json.dumps(manifest))
    [file] = shards.glob("shard-*")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors is not what its manifest says"):
        run(settings(state, shards))


def test_a_damaged_cache_is_made_again(state, chats: Path) -> None:
    assert run(settings(state, chats, trainer__max_steps=1)) == 0
    [kept] = (state.root / "cache" / "tokens").glob("*.safetensors")
    size = kept.stat().st_size
    kept.write_bytes(kept.read_bytes()[: size // 2])
    assert run(settings(state, chats, "again", trainer__max_steps=1)) == 0
    assert kept.stat().st_size == size
    assert state.events("corpus")[0]["rows"] == state.events("corpus", "again")[0]["rows"]


def test_a_drafter_from_scratch_begins_though_the_budget_is_full_before_its_vocabulary_is(state) -> None:
    """Rows that wait to be trained fill the store, and none of them can make room before the run has begun."""
    config = state.config(trainer__vocabulary_tokens=10**6, trainer__max_steps=2, trainer__max_time_s=60.0)
    config.features.budget_mib = 1
    state.add(range(80), num_generated=60)  # which are more than the 1 MiB of this run's store
    assert state.store.used_bytes() > 1 << 20
    assert run(config) == 0
    assert state.events("step")[-1]["step"] == 2
