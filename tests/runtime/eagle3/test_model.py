"""The network against a second, plain implementation of it, written down here head by head and number by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.eagle3.model import rotate
from runtime.errors import DrafterRejected

Make = Callable[..., Eagle3Model]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[S, heads, D] and [S, kv_heads, D] -> [S, heads, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def reference_step(
    model: Eagle3Model, token_ids: torch.Tensor, h: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step over a sequence with causal attention, in double precision: the next state and the draft logits."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.stack([row / torch.sqrt((row * row).mean() + config.rms_norm_eps) for row in x]) * weights[f"{name}.weight"]

    def rope(vector: torch.Tensor, position: int) -> torch.Tensor:
        half = config.head_dim // 2
        angles = [position * config.rope_parameters["rope_theta"] ** (-2 * i / config.head_dim) for i in range(half)]
        turned = [complex(vector[i], vector[i + half]) * complex(math.cos(a), math.sin(a)) for i, a in enumerate(angles)]
        return torch.tensor([z.real for z in turned] + [z.imag for z in turned], dtype=torch.float64)

    embedded = norm(model.embedding.double()[token_ids], "midlayer.input_layernorm")
    normed = norm(h, "midlayer.hidden_norm")
    residual = normed if config.norm_before_residual else h
    x = torch.cat([embedded, normed], dim=1)
    q, k, v = (x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    outputs = torch.zeros_like(q)
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_attention_heads):
        mine, shared = slice(head * size, (head + 1) * size), slice(head // group * size, (head // group + 1) * size)
        for row in range(len(h)):
            query = rope(q[row, mine], int(positions[row]))
            scores = torch.stack([query @ rope(k[j, shared], int(positions[j])) / size**0.5 for j in range(row + 1)])
            outputs[row, mine] = scores.softmax(0) @ v[: row + 1, shared]
    h = residual + outputs @ weights["midlayer.self_attn.o_proj.weight"].T
    y = norm(h, "midlayer.post_attention_layernorm")
    gate, up = (y @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    h = h + (gate / (1 + torch.exp(-gate)) * up) @ weights["midlayer.mlp.down_proj.weight"].T
    last = norm(h, "norm")
    return (last if config.norm_output else h), last @ weights["lm_head.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"fc_norm": True},
        {"num_key_value_heads": 6, "rms_norm_eps": 0.1},
    ],
)
@torch.no_grad()
def test_two_steps_agree_with_a_plain_implementation(make_model: Make, changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    generator = torch.Generator().manual_seed(1)
    aux = 3.0 * torch.randn(5, 72, generator=generator)  # [S, 3*Ht]
    token_ids = torch.randint(0, 50, (2, 5), generator=generator)
    positions = torch.arange(7, 12)

    low, mid, high = aux.double().split(24, dim=1)
    if model.config.fc_norm:
        weights = [model.state_dict()[f"fc_norm.{third}.weight"].double() for third in range(3)]
        low, mid, high = (
            x / (x.square().mean(1, True) + 1e-5).sqrt() * w for x, w in zip((low, mid, high), weights, strict=True)
        )
    expected = torch.cat([low, mid, high], dim=1) @ model.fc.weight.double().T
    h = model.project(aux)
    torch.testing.assert_close(h.double(), expected, atol=1e-5, rtol=1e-5)

    for k in range(2):  # the second step runs on the first one's recycled state
        h = model.layer(token_ids[k], h, positions + k, causal)
        expected, expected_logits = reference_step(model, token_ids[k], expected, positions + k)
        torch.testing.assert_close(h.double(), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(model.draft_logits(h).double(), expected_logits, atol=2e-5, rtol=1e-5)


def test_leading_dimensions_are_free(make_model: Make) -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(2)
    aux, token_ids = torch.randn(2, 3, 72, generator=generator), torch.randint(0, 50, (2, 3), generator=generator)
    positions = torch.arange(6).reshape(2, 3)

    def own_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert (q.shape, k.shape, v.shape) == ((*lead, 6, 8), (*lead, 2, 8), (*lead, 2, 8))
        return v.repeat_interleave(3, dim=-2)

    lead: tuple[int, ...] = (2, 3)
    batched = model.draft_logits(model.layer(token_ids, model.project(aux), positions, own_value))
    assert batched.shape == (2, 3, 20)
    lead = ()
    for row, column in ((0, 0), (1, 2)):
        one = model.layer(token_ids[row, column], model.project(aux[row, column]), positions[row, column], own_value)
        torch.testing.assert_close(batched[row, column], model.draft_logits(one), atol=1e-5, rtol=1e-5)


def test_keys_and_values_alone_are_those_that_attention_gets(make_model: Make) -> None:
    model = make_model()
    h, token_ids, positions = model.project(torch.ones(4, 72)), torch.tensor([1, 2, 3, 4]), torch.arange(4)
    seen: list[torch.Tensor] = []

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend([k, v])
        return causal(q, k, v)

    model.layer(token_ids, h, positions, watch)
    for alone, handed in zip(model.keys_values(token_ids, h, positions), seen, strict=True):
        assert torch.equal(alone, handed)


def test_parameters_are_the_checkpoints_and_the_embedding_is_not_among_them(make_model: Make) -> None:
    attention = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = [f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    names = {*attention, *mlp, *norms, "norm.weight", "fc.weight", "lm_head.weight"}
    assert set(make_model().state_dict()) == names
    assert set(make_model(fc_norm=True).state_dict()) == names | {f"fc_norm.{third}.weight" for third in range(3)}
    assert set(dict(make_model().named_parameters())) == names


def test_the_embedding_is_shared_and_frozen(make_model: Make) -> None:
    config = make_model().config
    shared = torch.nn.Parameter(torch.randn(50, 24))
    model = Eagle3Model(config, DraftVocabulary(torch.arange(20), 50), shared)
    assert model.embedding.data_ptr() == shared.data_ptr()
    model.draft_logits(
        model.layer(torch.tensor([1]), model.project(torch.ones(1, 72)), torch.tensor([0]), causal)
    ).sum().backward()
    assert shared.grad is None
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.to(torch.bfloat16)
    assert model.embedding.dtype == torch.float32
    assert model.embedding.data_ptr() == shared.data_ptr()


def test_another_precision_keeps_exact_positions(make_model: Make) -> None:
    model = make_model(max_position_embeddings=100_000).to(torch.bfloat16)
    assert model.rotary.frequencies.dtype == torch.float32
    cos, _ = model.rotary(torch.tensor([99_999]), torch.float32)
    assert cos[0, 0, 0].item() == pytest.approx(math.cos(99_999), abs=1e-2)
    out = model.layer(torch.tensor([1]), model.project(torch.ones(1, 72)), torch.tensor([99_999]), causal)
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


def test_gradients_are_those_of_the_function(make_model: Make) -> None:
    model = make_model().double()
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(3, 72, generator=generator, dtype=torch.float64, requires_grad=True)

    def two_steps(aux: torch.Tensor) -> torch.Tensor:
        h = model.project(aux)
        for k in range(2):
            h = model.layer(torch.tensor([1, 2, 3]) + k, h, torch.arange(3) + k, causal)
        return model.draft_logits(h)[:, :4]

    assert torch.autograd.gradcheck(two_steps, (aux,), fast_mode=True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_rope_is_the_targets(make_model: Make, rope: dict[str, Any]) -> None:
    model = make_model(rope_parameters=rope)
    llama = LlamaConfig(
        hidden_size=24, num_attention_heads=6, head_dim=8, max_position_embeddings=128, rope_parameters=dict(rope)
    )
    positions = torch.tensor([[0, 1, 31, 127]])
    x = torch.randn(1, 6, 4, 8, generator=torch.Generator().manual_seed(0))  # [B, heads, S, D]
    cos, sin = LlamaRotaryEmbedding(llama)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = rotate(x.transpose(1, 2), *model.rotary(positions, torch.float32)).transpose(1, 2)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3"},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "many"},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": [1]},
    ],
)
def test_a_rope_that_lacks_its_numbers_is_refused(make_model: Make, rope: dict[str, Any]) -> None:
    with pytest.raises(DrafterRejected, match="cannot be computed") as caught:
        make_model(rope_parameters={**rope, "rope_theta": 10000.0})
    assert caught.value.reason == "ROPE"


def test_training_starts_from_the_target(make_model: Make) -> None:
    model, generator = make_model(fc_norm=True), torch.Generator().manual_seed(4)
    lm_head, final_norm, aux_rms = torch.randn(50, 24), torch.rand(24), torch.rand(72) + 0.5
    model.init_from_target(lm_head, final_norm, generator)
    assert torch.equal(model.lm_head.weight, lm_head[model.vocabulary.target_ids])
    assert torch.equal(model.norm.weight, final_norm)
    assert torch.equal(model.midlayer.hidden_norm.weight, torch.ones(24))
    gate = model.midlayer.mlp.gate_proj.weight
    assert float(gate.detach().std() * 24**0.5) == pytest.approx(1.0, abs=0.1)
    plain = model.fc.weight.clone()
    model.init_from_target(lm_head, None, torch.Generator().manual_seed(4), aux_rms)
    torch.testing.assert_close(model.fc.weight, plain / aux_rms)
    assert torch.equal(model.norm.weight, torch.ones(24))
    assert torch.equal(model.midlayer.mlp.gate_proj.weight, gate)  # the same generator gives the same start


def test_parts_that_do_not_fit_are_refused(make_model: Make) -> None:
    config: Eagle3Config = make_model().config
    vocabulary = DraftVocabulary(torch.arange(20), 50)
    with pytest.raises(ValueError, match=r"shape \[50, 23\]"):
        Eagle3Model(config, vocabulary, torch.zeros(50, 23))
    with pytest.raises(ValueError, match="maps 19 of 50"):
        Eagle3Model(config, DraftVocabulary(torch.arange(19), 50), torch.zeros(50, 24))
