"""The trainers that training_speed.py compares, each making whole optimiser steps on the same rows as it would by itself.

`slipstream` is this repository's learner. `specforge` and `speculators` are other trainers, used if they can be imported: their
own drafter, loss, attention and precision, as their training loops put them together; `specforge-compact` is the first with its
option that streams the target's vocabulary. Rows lie on the device, as captured states in the target's precision.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates
from training.config import TrainerConfig
from training.data.batches import TrainingRow
from training.learning.learner import Learner
from training.learning.target_weights import TargetWeights

DECAY = 0.8
RATE = 1e-4
AUX_LAYERS = (1, 14, 26)


@dataclass(frozen=True)
class Shape:
    """A target, and the drafter for it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    depths: int

    def config(self) -> dict[str, Any]:
        """As a config.json of Llama's kind."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
        }


SHAPES = {
    "smollm2": Shape(576, 9, 3, 64, 1536, 49152, 8192, 5),
    "llama-8b": Shape(4096, 32, 8, 128, 14336, 128256, 32000, 7),
    "tiny": Shape(32, 4, 2, 8, 48, 512, 128, 3),
}

Step = Callable[[Sequence[TrainingRow]], None]


def half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def make_rows(shape: Shape, lengths: Sequence[tuple[int, int]], device: torch.device, seed: int) -> list[TrainingRow]:
    """Rows of (prompt, answer) tokens. The states are noise: what a step costs does not depend on what it learns."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, (prompt, answer) in enumerate(lengths):
        n = prompt + answer - 1
        noise = torch.randn(n, 4 * shape.hidden, generator=generator).to(device, half(device))
        hidden = HiddenStates(noise[:, : 3 * shape.hidden].contiguous(), noise[:, 3 * shape.hidden :].contiguous())
        ids = torch.randint(shape.vocab, (n + 1,), generator=generator)
        rows.append(TrainingRow(f"{seed}-{number}", FeatureRow(ids, torch.arange(n + 1) >= prompt, hidden)))
    return rows


@dataclass(frozen=True)
class Target:
    """The frozen parts, and the draft vocabulary: every so many tokens one."""

    shape: Shape
    embedding: torch.Tensor  # [V, H]
    draft_ids: torch.Tensor  # int64 [Vd]

    @staticmethod
    def make(shape: Shape, device: torch.device) -> Target:
        weight = torch.randn(shape.vocab, shape.hidden, generator=torch.Generator().manual_seed(1)) * shape.hidden**-0.5
        step = shape.vocab // shape.draft_vocab
        return Target(shape, weight.to(device, half(device)), torch.arange(shape.draft_vocab) * step)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def d2t(self) -> torch.Tensor:
        return self.draft_ids - torch.arange(len(self.draft_ids))

    @property
    def t2d(self) -> torch.Tensor:
        return torch.zeros(self.shape.vocab, dtype=torch.bool).index_fill_(0, self.draft_ids, True)


def slipstream(target: Target) -> Step:
    shape = target.shape
    norm = torch.ones(shape.hidden, device=target.device)
    of_target = shape.config() | {"num_hidden_layers": 30}
    weights = TargetWeights("benchmark", "0" * 16, of_target, target.embedding, target.embedding, norm)
    drafter = Eagle3Config.for_target(of_target, shape.draft_vocab, aux_layer_ids=AUX_LAYERS)
    model = Eagle3Model(drafter, DraftVocabulary(target.draft_ids, shape.vocab), target.embedding)
    model.init_from_target(target.embedding.cpu().float(), None, torch.Generator().manual_seed(0))
    config = TrainerConfig(ttt_steps=shape.depths, depth_decay=DECAY)
    learner = Learner(model.to(target.device), torch.ones(3 * shape.hidden), weights, config, RATE)

    def step(rows: Sequence[TrainingRow]) -> None:
        learner.step(rows)

    return step


def specforge(target: Target, *, compact: bool = False) -> Step:
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer
    from transformers import LlamaConfig

    shape, device = target.shape, target.device
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    config = LlamaConfig(**shape.config(), num_hidden_layers=1, pad_token_id=0)
    config.draft_vocab_size, config.norm_output = shape.draft_vocab, False
    drafter = LlamaForCausalLMEagle3(config, attention_backend=backend).to(device, half(device))
    drafter.t2d.copy_(target.t2d)
    drafter.d2t.copy_(target.d2t)
    drafter.embed_tokens.weight.data.copy_(target.embedding)
    drafter.embed_tokens.weight.requires_grad_(False)
    model = OnlineEagle3Model(drafter, length=shape.depths, attention_backend=backend)
    optimizer = BF16Optimizer(drafter, lr=RATE)

    def step(rows: Sequence[TrainingRow]) -> None:
        ids, mask, attention, aux, last = padded(rows, device)
        shifted = nn.functional.pad(last[:, 1:], (0, 0, 0, 1))
        teacher: dict[str, Any] = {"target": None, "target_hidden_for_compact": shifted, "target_head_weight": target.embedding}
        losses, *_ = model(
            input_ids=nn.functional.pad(ids[:, 1:], (0, 1)),
            attention_mask=attention,
            loss_mask=mask[..., None],
            hidden_states=aux,
            **(teacher if compact else {"target": shifted @ target.embedding.T}),
        )
        sum(DECAY**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()

    return step


def padded(rows: Sequence[TrainingRow], device: torch.device) -> tuple[torch.Tensor, ...]:
    """(ids [B, S], generated [B, S], attention mask [B, S], aux [B, S, 3*H], last [B, S, H]), zeros behind the end of a row."""
    features = [row.features for row in rows]
    pad = nn.utils.rnn.pad_sequence
    ids = pad([each.token_ids[:-1] for each in features], batch_first=True).to(device)
    mask = pad([each.generated[:-1] for each in features], batch_first=True).to(device)
    attention = pad([torch.ones(len(each.hidden), dtype=torch.bool) for each in features], batch_first=True).to(device)
    aux, last = (pad([getattr(each.hidden, name) for each in features], batch_first=True) for name in ("aux", "last"))
    return ids, mask, attention, aux, last


def speculators(target: Target) -> Step:
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.losses import resolve_loss_config
    from transformers import LlamaConfig

    shape, device = target.shape, target.device
    is_cuda = device.type == "cuda"
    layer = LlamaConfig(**shape.config(), num_hidden_layers=1, pad_token_id=None)
    layer._attn_implementation = "simple_flex_attention" if is_cuda else "eager"
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab)
    model = Eagle3DraftModel(config).to(device, torch.float32)
    head = target.embedding[target.draft_ids.to(device)].float()
    given = {"embed_tokens.weight": target.embedding.float(), "lm_head.weight": head, "verifier_lm_head.weight": head}
    given |= {"verifier_norm.weight": torch.ones(shape.hidden), "t2d": target.t2d, "d2t": target.d2t}
    model.load_state_dict(given, strict=False)
    model.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE, weight_decay=0.0)
    loss_config = resolve_loss_config("kl_div", "fused" if is_cuda else "eager")
    options = {"ttt_steps": shape.depths, "ttt_step_loss_decay": DECAY, "loss_config": loss_config}

    def step(rows: Sequence[TrainingRow]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            _, loss, _ = model(**side_by_side(rows, device), **options)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def side_by_side(rows: Sequence[TrainingRow], device: torch.device) -> dict[str, torch.Tensor]:
    """Rows along one axis, aligned to (x1, g0, y1, l1), with their documents and positions."""
    features = [row.features for row in rows]
    lengths = [len(each.hidden) - 1 for each in features]
    aux, last = torch.cat([each.hidden.aux[:-1] for each in features]), torch.cat([each.hidden.last[1:] for each in features])
    ids, mask = (torch.cat([getattr(each, name)[1:-1] for each in features]) for name in ("token_ids", "generated"))
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(1, length + 1) for length in lengths])
    unused = -len(ids) % (2048 if len(ids) > 2048 else 128)  # they train on packs of one length, filled up
    batch = {
        "hidden_states": nn.functional.pad(aux, (0, 0, 0, unused)),
        "verifier_last_hidden_states": nn.functional.pad(last, (0, 0, 0, unused)),
        "input_ids": nn.functional.pad(ids, (0, unused)),
        "loss_mask": nn.functional.pad(mask, (0, unused)),
        "document_ids": nn.functional.pad(documents, (0, unused), value=-1),
        "position_ids": nn.functional.pad(positions, (0, unused)),
    }
    return {name: part[None].to(device) for name, part in batch.items()}


ARMS: dict[str, Callable[[Target], Step]] = {
    "slipstream": slipstream,
    "specforge": specforge,
    "specforge-compact": lambda target: specforge(target, compact=True),
    "speculators": speculators,
}


def missing(arm: str) -> str | None:
    """Why an arm cannot run here."""
    package = arm.partition("-")[0]
    if package != "slipstream" and importlib.util.find_spec(package) is None:
        return f"{package} is not on the path"
    return None
