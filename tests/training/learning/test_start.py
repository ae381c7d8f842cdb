"""Where a run begins: which drafter, which vocabulary, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from runtime.drafters import embedded
from runtime.eagle3 import version_id
from runtime.errors import ConfigError, DrafterRejected
from runtime.registry import Registry
from training.app import run
from training.config import FirstHead, FirstNorm, Mode, ScratchConfig
from training.judging.gate import NGRAM, Baseline
from training.learning import checkpoint
from training.learning.learner import Learner
from training.learning.start import continue_from, from_scratch, row_check, starting_drafter
from training.learning.target_weights import TargetWeights
from training.reporting.config import TrackerKind


def started(state, init: str, target: TargetWeights | None = None, run_id: str = "new", is_first: bool = True) -> Baseline:
    registry, runs = Registry(state.root / "registry"), state.root / "training"
    return starting_drafter(init, registry, target or state.target, runs, runs / run_id, is_first=is_first)


def published(state, directory: Path, fingerprint: str = "") -> str:
    """A version of the registry, from a drafter written to the directory."""
    from_scratch(state.target, state.config().trainer, state.rows(range(4))).export(directory)
    registry, whose = Registry(state.root / "registry"), fingerprint or state.target.fingerprint
    return registry.publish(directory, parent=None, step=1, target_fingerprint=whose, metrics={})


def test_auto_takes_the_active_version_then_the_embedded_drafter_then_nothing(state, tmp_path: Path) -> None:
    registry = Registry(state.root / "registry")
    assert started(state, "auto").version == NGRAM
    known = dataclasses.replace(state.target, name="smollm2-135m")
    assert started(state, "auto", known).directory == embedded.path_for("smollm2-135m")
    version = published(state, tmp_path / "drafter")
    assert started(state, "auto").version == NGRAM  # staged is not active
    registry.activate(version)
    assert started(state, "auto", known).directory == registry.path(version)
    assert started(state, "scratch", known).directory is None


def test_a_start_is_named_as_an_evaluation_names_its_drafter(state, tmp_path: Path) -> None:
    registry = Registry(state.root / "registry")
    version = published(state, tmp_path / "drafter")
    known = dataclasses.replace(state.target, name="smollm2-135m")
    with pytest.raises(ConfigError, match=r"trainer\.init is 'active', and no version of .* is active"):
        started(state, "active")
    registry.activate(version)
    for word in (version, "active"):
        assert started(state, word, known) == Baseline(version, registry.path(version))
    assert started(state, "embedded", known).directory == embedded.path_for("smollm2-135m")
    assert started(state, str(tmp_path / "drafter")) == Baseline(version_id(tmp_path / "drafter"), tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"trainer\.init is 'embedded', and none ships for"):
        started(state, "embedded")
    with pytest.raises(DrafterRejected, match=r"There is no version 0123456789abcdef in .*; list the versions"):
        started(state, "0123456789abcdef")
    with pytest.raises(ConfigError, match=r"trainer\.init is 'nobody'; it must be auto, scratch, active, .* a run of .*training"):
        started(state, "nobody")


def test_what_another_run_has_learned_is_kept_for_as_long_as_this_one_goes_on(state) -> None:
    state.add(range(8))
    offline = {"mode": Mode.OFFLINE, "data__passes": 20, "tracker__kind": TrackerKind.NONE}
    assert run(state.config(**offline, trainer__run_id="first", trainer__max_steps=2)) == 0
    second = {**offline, "trainer__run_id": "second", "trainer__init": "first"}
    before = started(state, "first", run_id="second")
    assert run(state.config(**second, trainer__max_steps=1)) == 0
    assert run(state.config(**offline, trainer__run_id="first", trainer__max_steps=4)) == 0
    assert run(state.config(**second, trainer__max_steps=2)) == 0
    assert state.events("began", "second")[0]["how"].startswith(f"from drafter {before.version} (")
    kept = state.root / "training" / "second" / "start"
    assert started(state, "first", run_id="second") == before == Baseline(version_id(kept), kept)
    assert started(state, "first", run_id="third").version != before.version  # which begins with more
    assert started(state, "first", run_id="third", is_first=False).directory == state.root / "training" / "third" / "start"
    with pytest.raises(ConfigError, match=r"trainer\.init is 'scratch', but run 'second' began with 'first'"):
        run(state.config(**{**second, "trainer__init": "scratch"}, trainer__max_steps=3))


def test_a_beginning_that_came_to_nothing_leaves_no_start(state) -> None:
    state.add(range(8))
    offline = {"mode": Mode.OFFLINE, "data__passes": 20, "tracker__kind": TrackerKind.NONE}
    assert run(state.config(**offline, trainer__run_id="first", trainer__max_steps=2)) == 0
    before = started(state, "first")
    assert run(state.config(**offline, trainer__run_id="first", trainer__max_steps=4)) == 0
    assert started(state, "first").version != before.version
    assert started(state, "scratch").directory is None
    assert not (state.root / "training" / "new" / "start").exists()


def test_a_version_of_another_target_is_refused(state, tmp_path: Path) -> None:
    registry = Registry(state.root / "registry")
    version = published(state, tmp_path / "drafter", "0" * 16)
    registry.activate(version)
    for word in ("auto", "active", version):
        with pytest.raises(ConfigError, match=r"trained for target 0000000000000000.* trainer\.init=/.* all the same"):
            started(state, word)
    assert started(state, str(registry.path(version))).version == version
    (registry.path(version) / "manifest.json").write_text("{}")
    with pytest.raises(DrafterRejected):
        started(state, version)


def test_a_new_drafter_starts_at_the_targets_head(state) -> None:
    rows = state.rows(range(4))
    model = from_scratch(state.target, state.config().trainer, rows).served()
    assert torch.equal(model.lm_head.weight, state.target.lm_head[model.vocabulary.target_ids])
    assert torch.equal(model.norm.weight, state.target.final_norm)
    h = model.project(rows[0].features.hidden.aux)
    assert 0.5 < float(h.square().mean().sqrt()) < 2.0  # channels between 0.01 and 1000 come out at unit size


def test_rows_that_do_not_fit_are_told_apart(state) -> None:
    check = row_check(state.target)
    ref = state.store.put(state.meta("fits"), state.row(1))
    assert check(ref) is None
    assert "target 0" in check(dataclasses.replace(ref, target_fingerprint="0"))
    assert "layers [1, 2, 4]" in check(dataclasses.replace(ref, aux_layer_ids=(1, 2, 4)))
    wide = {**ref.features, "aux": dataclasses.replace(ref.features["aux"], shape=(5, 99))}
    assert "[5, 99]" in check(dataclasses.replace(ref, features=wide))


def test_drafter_of_other_layers_cannot_be_continued(state, tmp_path: Path) -> None:
    config = state.config().trainer
    from_scratch(state.target, config, state.rows(range(6))).export(tmp_path)
    assert continue_from(tmp_path, state.target, config, state.rows(range(2))).num_steps == 0
    moved = dataclasses.replace(state.target, config={**state.target.config, "num_hidden_layers": 12})
    with pytest.raises(ConfigError, match="reads layers"):
        continue_from(tmp_path, moved, config, state.rows(range(2)))


def test_a_starting_point_that_is_not_there_is_refused(state, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere'; it must be auto, scratch, active, embedded, a version of .*, or a checkpoint directory"
    ):
        run(state.config(trainer__init=str(tmp_path / "nowhere")))


def test_vocabulary_comes_from_the_traffic_and_stays(state) -> None:
    names = state.add(range(6))
    run(state.config(trainer__max_steps=3, trainer__draft_vocab_size=40, trainer__vocabulary_tokens=60))
    tensors = saved_tensors(state)
    ids = (tensors["d2t"] + torch.arange(40)).tolist()
    seen = [token for seed in range(len(names)) for token in state.row(seed).token_ids[6:].tolist()]
    counts = torch.bincount(torch.tensor(seen), minlength=state.target.vocab_size)
    most = torch.argsort(counts, descending=True, stable=True)[:40].sort().values.tolist()
    assert ids == most
    assert tensors["t2d"].nonzero().flatten().tolist() == ids
    state.add(range(100, 120))
    run(state.config(trainer__max_steps=8, trainer__draft_vocab_size=40, trainer__vocabulary_tokens=60))
    assert torch.equal(saved_tensors(state)["d2t"], tensors["d2t"])


def saved_tensors(state) -> dict[str, torch.Tensor]:
    return checkpoint.load(Path(state.ledger.latest_checkpoint("default").path))[0]


def test_an_eagle_3_1_drafter_is_trained_from_nothing_exported_and_continued(state, tmp_path: Path) -> None:
    """Its own norms stand before fc, so nothing else conditions what fc reads, and every weight of it learns."""
    scratch = ScratchConfig(fc_norm=True, norm_output=True)
    config = state.config(trainer__scratch=scratch, trainer__learning_rate=3e-3).trainer
    rows = state.rows(range(6))
    learner = from_scratch(state.target, config, rows)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    losses = [learner.step(rows).loss for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    after = learner.tensors()
    assert not [name for name in before if name.startswith("model.") and torch.equal(before[name], after[name])]
    assert bool((after["scale"] == 1.0).all())
    learner.export(tmp_path)
    again = continue_from(tmp_path, state.target, config, rows)
    assert again.served().config.fc_norm
    assert again.served().config.norm_output
    assert again.step(rows).loss == pytest.approx(learner.step(rows).loss, rel=0.05)  # bfloat16 in between


def test_what_a_new_drafter_begins_with_can_be_switched_off_piece_by_piece(state) -> None:
    rows = state.rows(range(4))

    def start(**settings: object) -> Learner:
        return from_scratch(state.target, state.config(trainer__scratch=ScratchConfig(**settings)).trainer, rows)

    usual = start()
    assert bool((start(norm=FirstNorm.ONES).served().norm.weight == 1.0).all())
    random = start(head=FirstHead.RANDOM).served()
    assert not torch.equal(random.lm_head.weight, usual.served().lm_head.weight)
    assert float(random.lm_head.weight.std()) == pytest.approx(state.target.hidden_size**-0.5, rel=0.1)
    plain = start(conditioning=False)
    assert bool((plain.tensors()["scale"] == 1.0).all())
    assert not bool((usual.tensors()["scale"] == 1.0).all())
