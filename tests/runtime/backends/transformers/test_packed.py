"""Packed rows: the states of each are those of a plain forward of the row alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from runtime.backends.transformers.packed import PackedForward, PackedRows, attend_row, load_packed
from runtime.models import make_tiny, resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("packed") / "tiny", hidden_size=32, num_layers=8)


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


@pytest.mark.parametrize("window", [None, 4])
def test_the_fused_call_is_one_that_its_operator_takes(window: int | None) -> None:
    """Shapes and arguments, where there is no device to compute on."""
    rows = PackedRows([0, 7, 8, 41], torch.device("meta"))
    q, k, v = (torch.empty(heads, 41, 64, dtype=torch.bfloat16, device="meta") for heads in (9, 3, 3))
    assert rows.fused(q, k, v, None, window).shape == (1, 41, 9, 64)


@pytest.mark.cuda
def test_the_fused_call_agrees_with_rows_one_by_one(model: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    forward = PackedForward(network)
    rows = [torch.randint(0, 256, (length,)) for length in (70, 1, 300)]
    together = forward(torch.cat(rows), [len(row) for row in rows])
    alone = [forward(row, [len(row)]) for row in rows]
    torch.testing.assert_close(together.last.float(), torch.cat([each.last for each in alone]).float(), atol=0.05, rtol=0.05)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    with torch.no_grad():
        plain = torch.cat([whole.model(row[None].cuda()).last_hidden_state[0] for row in rows])
    torch.testing.assert_close(together.last.float(), plain, atol=0.1, rtol=0.1)
