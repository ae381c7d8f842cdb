"""Packed rows: the states of each are those of a plain forward of the row alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from runtime.backends.transformers.packed import PackedForward, PackedRows, attend_row, load_packed
from runtime.models import make_tiny, resolve

ARCHITECTURES = [
    ("llama", {}),
    ("llama", {"mlp_bias": True}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
    ("qwen3", {}),
    ("gemma", {}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("packed") / "tiny", num_layers=8)


def test_each_row_is_computed_as_if_it_were_alone(model: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    forward = load_packed(resolve(str(model)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (length,), generator=generator) for length in (7, 1, 33)]
    hidden = forward(torch.cat(rows), [len(row) for row in rows])
    start = 0
    for row in rows:
        own = hidden[start : start + len(row)]
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            out = network.model(row[None], output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer + 1][0] for layer in forward.layer_ids], dim=-1)
        torch.testing.assert_close(own.aux, aux, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(own.last, out.last_hidden_state[0], atol=2e-5, rtol=1e-5)
        start += len(row)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0), (100, 2.0)])
def test_windows_and_soft_caps_are_those_of_the_formula(window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    for i in range(9):
        for j in range(9):
            if j > i or (window is not None and i - j >= window):
                scores[:, i, j] = float("-inf")
    expected = F.softmax(scores, -1) @ v.repeat_interleave(2, 0)
    torch.testing.assert_close(attend_row(q, k, v, 0.3, window, softcap), expected)


@pytest.mark.parametrize(("architecture", "fields"), ARCHITECTURES)
def test_a_model_of_any_kind_says_what_its_own_modules_say(architecture: str, fields: dict, random_model: Callable) -> None:
    """Llama's kind from its fused weights, others by their modules."""
    plain = random_model(architecture, **fields).plain
    forward = PackedForward(copy.deepcopy(plain))
    rows = [torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in (20, 1, 33)]
    hidden = forward(torch.cat(rows), [len(row) for row in rows])
    with torch.no_grad():
        outs = [plain.model(row[None], output_hidden_states=True) for row in rows]
    last = torch.cat([out.last_hidden_state[0] for out in outs])
    aux = torch.cat([torch.cat([out.hidden_states[i + 1][0] for i in forward.layer_ids], dim=-1) for out in outs])
    torch.testing.assert_close(hidden.last, last, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.aux, aux, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 4])
def test_the_fused_call_is_one_that_its_operator_takes(window: int | None) -> None:
    """Shapes and arguments, where there is no device to compute on; queries, keys and values as views of one matrix."""
    rows = PackedRows([0, 7, 8, 41], torch.empty(4, dtype=torch.int32, device="meta"))
    qkv = torch.empty(41, 15, 64, dtype=torch.bfloat16, device="meta")
    assert rows.fused(qkv[:, :9], qkv[:, 9:12], qkv[:, 12:], None, window).shape == (41, 9, 64)


def error_in_half(model: Path, device: str) -> tuple[float, float]:
    """How far bfloat16 states lie from float32 ones: (packed, one row at a time by the model's own modules)."""
    rows = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in (70, 1, 300)]
    exact, half = (
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device) for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        true, plain = (
            torch.cat([each.model(row[None].to(device)).last_hidden_state[0].float() for row in rows]) for each in (exact, half)
        )
    packed = PackedForward(half)(torch.cat(rows), [len(row) for row in rows]).last.float()
    return float((packed - true).norm()), float((plain - true).norm())


def test_half_precision_costs_no_more_than_in_the_model_itself(model: Path) -> None:
    packed, plain = error_in_half(model, "cpu")
    assert 0.0 < packed < 1.5 * plain


@pytest.mark.cuda
def test_half_precision_costs_no_more_than_in_the_model_itself_on_a_device(model: Path) -> None:
    """By the fused call."""
    packed, plain = error_in_half(model, "cuda")
    assert 0.0 < packed < 1.5 * plain


@pytest.mark.cuda
def test_the_fused_call_agrees_with_rows_one_by_one(model: Path) -> None:
    forward = PackedForward(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda())
    rows = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in (70, 1, 300)]
    together = forward(torch.cat(rows), [len(row) for row in rows])
    alone = torch.cat([forward(row, [len(row)]).last for row in rows]).float()
    assert float((together.last.float() - alone).norm()) < 0.02 * float(alone.norm())
