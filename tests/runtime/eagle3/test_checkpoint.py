"""Checkpoints on disk: bit-identical round trips, the three spellings, and a reason for every file that is not whole."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.drafters.embedded import path_for
from runtime.eagle3 import Eagle3Model, load, save, version_id
from runtime.eagle3.checkpoint import read_config, read_vocabulary
from runtime.errors import DrafterRejected

Make = Callable[..., Eagle3Model]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def saved(make_model: Make, tmp_path: Path) -> tuple[Eagle3Model, Path]:
    """A drafter and its checkpoint in float32."""
    model = make_model()
    save(model, tmp_path / "drafter", dtype=torch.float32)
    return model, tmp_path / "drafter"


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(tensors: Tensors, spell: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[spell(name)] = tensors.pop(name)


def assert_same(one: Eagle3Model, other: Eagle3Model) -> None:
    assert one.config == other.config
    assert one.vocabulary.hash == other.vocabulary.hash
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}])
def test_out_and_in_again_is_bit_identical(make_model: Make, tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    save(model, tmp_path / "first", dtype=dtype)
    read = load(tmp_path / "first", model.embedding, dtype=dtype)
    assert read.config.dtype == str(dtype).removeprefix("torch.")
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.to(dtype))
    save(read, tmp_path / "second", dtype=dtype)
    assert_same(load(tmp_path / "second", model.embedding, dtype=dtype), read)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert version_id(tmp_path / "first") == version_id(tmp_path / "second")
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["config.json", "model.safetensors"]


def test_the_file_holds_what_the_format_says(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    tensors = load_file(path / "model.safetensors")
    shapes = {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert shapes["midlayer.self_attn.q_proj.weight"] == ([48, 48], torch.float32)
    assert shapes["midlayer.self_attn.k_proj.weight"] == ([16, 48], torch.float32)
    assert shapes["midlayer.self_attn.o_proj.weight"] == ([24, 48], torch.float32)
    assert shapes["fc.weight"] == ([24, 72], torch.float32)
    assert shapes["lm_head.weight"] == ([20, 24], torch.float32)
    assert shapes["d2t"] == ([20], torch.int64)
    assert shapes["t2d"] == ([50], torch.bool)
    assert len(shapes) == 15
    assert torch.equal(tensors["d2t"] + torch.arange(20), model.vocabulary.target_ids)


def test_saving_over_an_older_one_replaces_it(make_model: Make, tmp_path: Path) -> None:
    save(make_model(seed=0), tmp_path, dtype=torch.float32)
    newer = make_model(seed=1)
    save(newer, tmp_path, dtype=torch.float32)
    assert torch.equal(load(tmp_path, newer.embedding).fc.weight, newer.fc.weight)


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: f"model.{name}" if name not in ("d2t", "t2d", "lm_head.weight") else name,  # SGLang's parameters
        lambda name: name.replace("midlayer.", "layers.0."),  # vLLM, speculators
        lambda name: "model." + name.replace("midlayer.", "layers.0."),
    ],
)
def test_other_spellings_of_the_names(saved: tuple[Eagle3Model, Path], spell: Callable[[str], str]) -> None:
    model, path = saved
    expected = load(path, model.embedding)
    edit_tensors(path, lambda tensors: rename(tensors, spell))
    assert_same(load(path, model.embedding), expected)


def test_a_speculators_directory(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    expected = load(path, model.embedding)
    flat = json.loads((path / "config.json").read_text())
    top = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "torch_dtype")
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        **{name: flat.pop(name) for name in top},
        "transformer_layer_config": {key: value for key, value in flat.items() if key != "eagle_config"},
    }
    (path / "config.json").write_text(json.dumps(nested))
    edit_tensors(path, lambda tensors: rename(tensors, lambda name: name.replace("midlayer.", "layers.0.")))
    edit_tensors(path, lambda tensors: tensors.update({"embed_tokens.weight": model.embedding.clone()}))
    assert_same(load(path, model.embedding), expected)


def test_an_embedding_of_its_own_must_be_the_targets(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    edit_tensors(path, lambda tensors: tensors.update({"embed_tokens.weight": model.embedding.bfloat16()}))
    assert "embed_tokens.weight" not in load(path, model.embedding).state_dict()
    other = model.embedding.clone()
    other[7, 3] += 1.0
    with pytest.raises(DrafterRejected, match="trained for another model") as caught:
        load(path, other)
    assert caught.value.reason == "TARGET_FINGERPRINT"


def test_t2d_may_be_absent_and_d2t_may_not(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    edit_tensors(path, lambda tensors: tensors.pop("t2d"))
    assert load(path, model.embedding).vocabulary.hash == model.vocabulary.hash
    assert read_vocabulary(path).hash == model.vocabulary.hash
    edit_tensors(path, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(DrafterRejected, match="lacks d2t") as caught:
        load(path, model.embedding)
    assert caught.value.reason == "MISSING_TENSOR"


def test_a_full_vocabulary_needs_no_d2t(make_model: Make, tmp_path: Path) -> None:
    model = make_model(draft_vocab_size=50)
    save(model, tmp_path)
    edit_tensors(tmp_path, lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    assert load(tmp_path, model.embedding).vocabulary.target_ids.tolist() == list(range(50))


def test_loading_draws_nothing_from_the_global_generator(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read = load(path, model.embedding, dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in read.parameters())
    assert read.embedding.data_ptr() == model.embedding.data_ptr()
    assert not read.rotary.frequencies.is_meta


BAD_TENSORS: list[tuple[Callable[[Tensors], object], str, str]] = [
    (lambda t: t.pop("lm_head.weight"), "MISSING_TENSOR", "lacks lm_head.weight"),
    (lambda t: (t.pop("norm.weight"), t.pop("fc.weight")), "MISSING_TENSOR", "lacks fc.weight, norm.weight"),
    (lambda t: t.update({"input_norm.weight": torch.ones(72)}), "UNKNOWN_TENSOR", "input_norm.weight"),
    (lambda t: t.update({"fc.bias": torch.ones(24)}), "UNKNOWN_TENSOR", "fc.bias"),
    (lambda t: t.update({"fc_norm.0.weight": torch.ones(24)}), "UNKNOWN_TENSOR", "fc_norm.0.weight"),
    (lambda t: t.update({"model.fc.weight": torch.ones(24, 72)}), "UNKNOWN_TENSOR", "two spellings"),
    (lambda t: t.update({"fc.weight": torch.ones(24, 71)}), "SHAPE", r"fc.weight has shape \[24, 71\]"),
    (lambda t: t.update({"lm_head.weight": torch.ones(50, 24)}), "SHAPE", r"lm_head.weight has shape \[50, 24\]"),
    (lambda t: t.update({"d2t": torch.zeros(19, dtype=torch.int64)}), "SHAPE", "d2t has shape"),
    (lambda t: t.update({"t2d": torch.zeros(49, dtype=torch.bool)}), "SHAPE", "t2d has shape"),
    (lambda t: t.update({"norm.weight": torch.ones(24, dtype=torch.float64)}), "DTYPE", "norm.weight is F64"),
    (lambda t: t.update({"norm.weight": torch.ones(24, dtype=torch.int8)}), "DTYPE", "norm.weight is I8"),
    (lambda t: t.update({"d2t": t["d2t"].float()}), "DTYPE", "d2t is F32"),
    (lambda t: t.update({"t2d": t["t2d"].long()}), "DTYPE", "t2d is I64"),
    (lambda t: t["fc.weight"][3].fill_(float("nan")), "NON_FINITE", "fc.weight holds 72 values"),
    (lambda t: t["norm.weight"][:1].fill_(float("inf")), "NON_FINITE", "norm.weight holds 1 values"),
    (lambda t: t["d2t"].zero_(), "VOCABULARY", "not the same ones"),
    (lambda t: t["d2t"].copy_(torch.arange(20)), "VOCABULARY", "draft vocabulary is not usable"),
    (lambda t: t["t2d"].fill_(False), "VOCABULARY", "t2d marks 0"),
]


@pytest.mark.parametrize(("change", "reason", "what"), BAD_TENSORS)
def test_a_file_that_is_not_whole_is_refused(
    saved: tuple[Eagle3Model, Path], change: Callable[[Tensors], object], reason: str, what: str
) -> None:
    model, path = saved
    edit_tensors(path, change)
    with pytest.raises(DrafterRejected, match=what) as caught:
        load(path, model.embedding)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


def test_a_config_that_is_not_the_weights_is_refused(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    edit_config(path, intermediate_size=48)
    with pytest.raises(DrafterRejected, match=r"shape \[24, 40\]; the config makes it \[24, 48\]"):
        load(path, model.embedding)


@pytest.mark.parametrize(("shape", "reason"), [((51, 24), "VOCABULARY"), ((50, 32), "SHAPE")])
def test_another_targets_embedding_is_refused(saved: tuple[Eagle3Model, Path], shape: tuple[int, int], reason: str) -> None:
    with pytest.raises(DrafterRejected, match="was made for a") as caught:
        load(saved[1], torch.zeros(shape))
    assert caught.value.reason == reason


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"[" * 100_000, struct.pack("<Q", 2) + b"{]"])
def test_an_unreadable_file_is_one_sentence(saved: tuple[Eagle3Model, Path], file: str, content: bytes | None) -> None:
    model, path = saved
    (path / file).unlink()
    if content is not None:
        (path / file).write_bytes(content)
    with pytest.raises(DrafterRejected, match=file) as caught:
        load(path, model.embedding)
    assert caught.value.reason == "UNREADABLE"


def test_a_file_cut_short_is_refused(saved: tuple[Eagle3Model, Path]) -> None:
    model, path = saved
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(DrafterRejected) as caught:
        load(path, model.embedding)
    assert caught.value.reason == "UNREADABLE"


def test_the_version_is_the_content(saved: tuple[Eagle3Model, Path], make_model: Make, tmp_path: Path) -> None:
    _, path = saved
    version = version_id(path)
    assert len(version) == 16
    assert int(version, 16) >= 0
    edit_config(path, pad_token_id=9)
    assert version_id(path) != version
    save(make_model(seed=1), tmp_path / "other", dtype=torch.float32)
    assert version_id(tmp_path / "other") != version
    with pytest.raises(DrafterRejected, match="cannot be read"):
        version_id(tmp_path / "nowhere")


def test_the_embedded_drafter_loads_and_survives_the_round_trip(tmp_path: Path) -> None:
    path = path_for("smollm2-135m")
    assert path is not None
    embedding = torch.zeros(49152, 576)
    model = load(path, embedding, dtype=torch.bfloat16)
    assert len(model.vocabulary) == 16384
    save(model, tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype for name, tensor in ours.items())
    assert read_config(tmp_path) == read_config(path)
