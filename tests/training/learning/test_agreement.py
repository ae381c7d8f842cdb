"""Our chain and loss against an independent trainer's: speculators 0.9, which is run whole, on the same weights and rows.

It asks for an older transformers than ours, so nothing installs it; give it by the path, without its dependencies' versions
(docs/training.md says how), and this test runs.

It masks in another way, which the switch below sets: a pair (p, k) is supervised when x[p+1+k] was generated, so the last
prompt position, where serving drafts first, is not, and the end of a turn is; and greedy tokens outside the draft vocabulary
are no exception.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runtime.eagle3.model import Eagle3Model
from runtime.features.row import FeatureRow
from training.config import Objective
from training.data.batches import TrainingRow, pack
from training.learning.loss import Lesson, carrying, chain_loss
from training.learning.objective import Aim
from training.learning.ttt import unroll

L, DECAY = 4, 0.8
OBJECTIVES = {  # their name -> ours
    "kl_div": Aim(Objective.LK_BLEND, eta=0.0),  # all its weight on KL
    "nla": Aim(Objective.LK_ALPHA),
    "lk_hybrid": Aim(Objective.LK_BLEND, eta=3.0),
}


@pytest.fixture(scope="module")
def speculators() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("speculators", reason="needs speculators 0.9 on the path", exc_type=ImportError)


def theirs_like(speculators: Any, model: Eagle3Model, teacher_head: torch.Tensor) -> nn.Module:
    """Their drafter with the weights of ours. Their teacher normalises; ones as its gain leave that to what it is given."""
    from transformers import LlamaConfig

    config, ours = speculators.Eagle3SpeculatorConfig, model.config
    layer = LlamaConfig(
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim,
        num_hidden_layers=1,
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.rms_norm_eps,
        max_position_embeddings=ours.max_position_embeddings,
        rope_parameters=dict(ours.rope_parameters),
        pad_token_id=None,
    )
    layer._attn_implementation = "eager"
    settings = {name: getattr(ours, name) for name in ("fc_norm", "norm_output", "norm_before_residual", "draft_vocab_size")}
    theirs = speculators.Eagle3DraftModel(config(transformer_layer_config=layer, **settings)).float()
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in model.state_dict().items()}
    given = {
        "embed_tokens.weight": model.embedding,
        "verifier_lm_head.weight": teacher_head,
        "verifier_norm.weight": torch.ones(ours.hidden_size),
        "d2t": model.vocabulary.d2t,
        "t2d": model.vocabulary.t2d,
    }
    theirs.load_state_dict(weights | given)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(name in weights)
    return theirs


def their_batch(rows: list[TrainingRow]) -> dict[str, torch.Tensor]:
    """Rows side by side, each aligned to (x1, g0, y1, l1) as their data pipeline does."""
    parts = [
        (row.features.hidden.aux[:-1], row.features.token_ids[1:-1], row.features.hidden.last[1:], row.features.generated[1:-1])
        for row in rows
    ]
    aux, ids, last, mask = (torch.cat(column)[None] for column in zip(*parts, strict=True))
    documents = torch.cat([torch.full((len(part[0]),), number) for number, part in enumerate(parts)])[None]
    positions = torch.cat([torch.arange(1, len(part[0]) + 1) for part in parts])[None]
    return {
        "hidden_states": aux.float(),
        "input_ids": ids,
        "document_ids": documents,
        "loss_mask": mask,
        "position_ids": positions,
        "verifier_last_hidden_states": last.float(),
    }


def our_loss(
    model: Eagle3Model, rows: list[TrainingRow], teacher_head: torch.Tensor, aim: Aim, *, masks_as_theirs: bool
) -> torch.Tensor:
    """Our loss on these rows, with our masks or theirs; alpha within the draft vocabulary, as theirs is."""
    masks = [row.features.generated for row in rows]
    if masks_as_theirs:  # every pair is unrolled, and the mask of its own last known token says whether it counts
        rows = [TrainingRow(row.sample_id, whole(row.features)) for row in rows]
    batch = pack(rows, L)
    width = batch.last.shape[1]
    last = nn.functional.rms_norm(batch.last, (width,), eps=model.config.rms_norm_eps)
    covered = torch.ones(batch.num_supervised, dtype=torch.bool)
    carries = carrying(batch.depths, covered, L)
    if masks_as_theirs:
        counts = torch.cat([mask[1:-1] for mask in masks])  # of x[p+1]
        at = torch.arange(len(counts))[:, None] + torch.arange(L)
        carries &= counts[at.clamp(max=len(counts) - 1)]
    log_z = (last @ teacher_head.T).logsumexp(-1)
    lesson = Lesson(teacher_head, last, log_z, covered, torch.full_like(batch.chain_ids, -1), batch.pairs)
    weights = DECAY ** torch.arange(L) / carries.sum(0)
    return chain_loss(unroll(model, batch), model.lm_head.weight, lesson, carries, weights, aim).loss


def whole(features: FeatureRow) -> FeatureRow:
    """The row as if all of it had been generated."""
    return FeatureRow(features.token_ids, torch.ones_like(features.generated), features.hidden)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what they call of transformers is deprecated in ours
@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("settings", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_loss_and_gradients_are_theirs(
    speculators: Any, make_model: Callable, make_row: Callable, name: str, settings: dict
) -> None:
    from speculators.losses import resolve_loss_config

    model = make_model(dtype=torch.float32, **settings)
    teacher_head = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
    rows = [make_row("pppp" + "g" * 9 + "ppp" + "g" * 8, 0), make_row("pppppp" + "g" * 20, 1)]
    theirs = theirs_like(speculators, model, teacher_head)
    options = {"ttt_steps": L, "ttt_step_loss_decay": DECAY, "loss_config": resolve_loss_config(name, "eager")}
    _, expected, _ = theirs(**their_batch(rows), **options)
    expected.backward()
    loss = our_loss(model, rows, teacher_head, OBJECTIVES[name], masks_as_theirs=True)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for parameter_name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            ours = model.get_parameter(parameter_name.replace("layers.0.", "midlayer.")).grad
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-4, msg=parameter_name)
    other = our_loss(model, rows, teacher_head, OBJECTIVES[name], masks_as_theirs=False)
    assert abs(float(other.detach()) - float(expected.detach())) > 1e-3  # the switch matters
