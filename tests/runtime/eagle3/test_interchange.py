"""Other engines' spellings: every pair of dialects there and back, what each engine reads, and a reason for each damage."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runtime.eagle3 import Eagle3Model, save, version_id
from runtime.eagle3.interchange import Dialect, Offered, Verifier, dialect_of, read_offered, same, write_as
from runtime.errors import DrafterRejected

Make = Callable[..., Eagle3Model]
Tensors = dict[str, torch.Tensor]

VERIFIER = Verifier("a-target", "0123456789abcdef", ("LlamaForCausalLM",), num_layers=12)  # default layers: 1, 5, 8
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"aux_layer_ids": (1, 5, 8)},
    {"fc_norm": True, "norm_output": True},
    {"draft_vocab_size": 50, "rope_parameters": LLAMA3, "eos_token_id": [4, 7], "pad_token_id": None},
]


@pytest.fixture
def offered(make_model: Make, tmp_path: Path) -> Callable[..., tuple[Offered, Eagle3Model]]:
    """A drafter of ours as it is read from its checkpoint; keyword arguments change its config."""

    def make(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[Offered, Eagle3Model]:
        model = make_model(**changes)
        save(model, tmp_path / "ours", dtype=dtype)
        return read_offered(tmp_path / "ours", model.embedding, VERIFIER), model

    return make


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize(("first", "second"), list(itertools.product(Dialect, repeat=2)))
def test_through_every_pair_of_dialects_nothing_changes(
    offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path, first: Dialect, second: Dialect, changes: dict[str, Any]
) -> None:
    ours, model = offered(**changes)
    write_as(tmp_path / "first", ours, first, VERIFIER)
    once = read_offered(tmp_path / "first", model.embedding, VERIFIER)
    write_as(tmp_path / "second", once, second, VERIFIER)
    twice = read_offered(tmp_path / "second", model.embedding, VERIFIER)
    assert (once.dialect, twice.dialect) == (first, second)
    assert same(once, ours)
    assert same(twice, ours)
    write_as(tmp_path / "back", twice, Dialect.SLIPSTREAM, VERIFIER)
    assert version_id(tmp_path / "back") == version_id(tmp_path / "ours"), "the same bytes, so the same version"


def test_what_an_engine_cannot_run_is_not_written_for_it(
    offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path
) -> None:
    ours, model = offered(norm_before_residual=True)
    with pytest.raises(DrafterRejected, match="norm_before_residual") as caught:
        write_as(tmp_path / "theirs", ours, Dialect.SGLANG, VERIFIER)
    assert caught.value.reason == "CONFIG"
    assert not (tmp_path / "theirs").exists()
    for dialect in (Dialect.VLLM, Dialect.SPECULATORS):
        write_as(tmp_path / dialect, ours, dialect, VERIFIER)
        assert same(read_offered(tmp_path / dialect, model.embedding, VERIFIER), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_never_cast(offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path, dtype: torch.dtype) -> None:
    ours, model = offered(dtype)
    write_as(tmp_path / "theirs", ours, Dialect.VLLM, VERIFIER)
    assert load_file(tmp_path / "theirs" / "model.safetensors")["fc.weight"].dtype == dtype
    assert torch.equal(load_file(tmp_path / "theirs" / "model.safetensors")["fc.weight"], model.fc.weight.to(dtype))


def written(directory: Path) -> tuple[dict[str, Any], set[str]]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return json.loads((directory / "config.json").read_text()), set(file.keys())


def test_layer_ids_are_spelt_as_each_engine_counts_them(
    offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path
) -> None:
    usual, _ = offered(aux_layer_ids=(1, 5, 8))
    other = dataclasses.replace(usual, config=dataclasses.replace(usual.config, aux_layer_ids=(0, 4, 9)))
    said = {}
    for dialect in Dialect:
        for name, drafter in (("usual", usual), ("other", other)):
            write_as(tmp_path / dialect / name, drafter, dialect, VERIFIER)
            config, _ = written(tmp_path / dialect / name)
            outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
            said[dialect.value, name] = (outputs, config.get("eagle_aux_hidden_state_layer_ids"))
    assert said == {
        ("slipstream", "usual"): ([1, 5, 8], [2, 6, 9]),
        ("slipstream", "other"): ([0, 4, 9], [1, 5, 10]),
        ("sglang", "usual"): (None, None),
        ("sglang", "other"): ([0, 4, 9], None),
        ("vllm", "usual"): (None, [2, 6, 9]),
        ("vllm", "other"): (None, [1, 5, 10]),
        ("speculators", "usual"): (None, [2, 6, 9]),
        ("speculators", "other"): (None, [1, 5, 10]),
    }


def test_names_are_the_ones_each_engine_loads(offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path) -> None:
    ours, _ = offered(fc_norm=True)
    layer = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    }
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"fc_norm.{third}.weight" for third in range(3))}
    for dialect, prefix in zip(Dialect, ("midlayer.", "midlayer.", "layers.0.", "layers.0."), strict=True):
        write_as(tmp_path / dialect, ours, dialect, VERIFIER)
        assert written(tmp_path / dialect)[1] == rest | {prefix + name for name in layer}


def test_speculators_gets_its_own_config(offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path) -> None:
    ours, _ = offered()
    write_as(tmp_path / "theirs", ours, Dialect.SPECULATORS, VERIFIER)
    config, _ = written(tmp_path / "theirs")
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False, "they take true for what is not said"
    assert config["transformer_layer_config"]["hidden_size"] == 24
    assert config["speculators_config"]["verifier"] == {"name_or_path": "a-target", "architectures": ["LlamaForCausalLM"]}
    offered_methods = [method["proposal_type"] for method in config["speculators_config"]["proposal_methods"]]
    assert config["speculators_config"]["default_proposal_method"] in offered_methods


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, Dialect.SGLANG),
        ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {}}, Dialect.SGLANG),
        ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, Dialect.VLLM),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, Dialect.VLLM),
        ({"architectures": ["Eagle3Speculator"], "transformer_layer_config": {}}, Dialect.SPECULATORS),
        ({"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, Dialect.SLIPSTREAM),
    ],
)
def test_a_dialect_is_known_by_its_config(config: dict[str, Any], dialect: Dialect) -> None:
    assert dialect_of(config) is dialect


def test_vllms_own_name_of_the_vocabulary_is_known(offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path) -> None:
    ours, model = offered()
    write_as(tmp_path / "theirs", ours, Dialect.VLLM, VERIFIER)
    edit_tensors(tmp_path / "theirs", lambda t: t.update({"draft_id_to_target_id": t.pop("d2t")}))
    assert same(read_offered(tmp_path / "theirs", model.embedding, VERIFIER), ours)


def test_sglangs_earlier_names_of_the_norms_are_known(
    offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path
) -> None:
    ours, model = offered(fc_norm=True)
    write_as(tmp_path / "theirs", ours, Dialect.SGLANG, VERIFIER)
    names = {f"fc_norm.{i}.weight": f"aux_norm_{third}.weight" for i, third in enumerate(("low", "mid", "high"))}
    edit_tensors(tmp_path / "theirs", lambda t: [t.update({theirs: t.pop(ours)}) for ours, theirs in names.items()])
    edit_config(tmp_path / "theirs", fc_norm=None, use_aux_norm=True)
    assert same(read_offered(tmp_path / "theirs", model.embedding, VERIFIER), ours)


# --- damage ---


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_weights(directory: Path, name: str, content: bytes) -> None:
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(content)


def zipped(directory: Path) -> None:
    with zipfile.ZipFile(directory / "model.safetensors", "w") as file:
        file.writestr("data.pkl", pickle.dumps({}))


def linked_out(directory: Path, name: str) -> None:
    (directory / name).rename(directory.parent / name)
    (directory / name).symlink_to(directory.parent / name)


def truncated(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(9000)


def verifier_of(architecture: str) -> dict[str, Any]:
    return {"verifier": {"name_or_path": "x", "architectures": [architecture]}}


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lambda d: edit_tensors(d, lambda t: t.pop("lm_head.weight")), "MISSING_TENSOR", "lacks lm_head.weight"),
    "no vocabulary": (lambda d: edit_tensors(d, lambda t: t.pop("d2t")), "MISSING_TENSOR", "lacks d2t"),
    "unknown": (lambda d: edit_tensors(d, lambda t: t.update({"fc.bias": torch.ones(24)})), "UNKNOWN_TENSOR", "fc.bias"),
    "shape": (lambda d: edit_tensors(d, lambda t: t.update({"fc.weight": t["fc.weight"][:, 1:].clone()})), "SHAPE", "fc.weight"),
    "nan": (lambda d: edit_tensors(d, lambda t: t["fc.weight"][0].fill_(float("nan"))), "NON_FINITE", "72 values"),
    "integers": (lambda d: edit_tensors(d, lambda t: t.update({"norm.weight": t["norm.weight"].long()})), "DTYPE", "norm.weight"),
    "mixed": (lambda d: edit_tensors(d, lambda t: t.update({"norm.weight": t["norm.weight"].float()})), "DTYPE", "several types"),
    "stated": (lambda d: edit_config(d, torch_dtype="float16"), "DTYPE", "torch_dtype = 'float16', and its weights are bfloat16"),
    "zeroed d2t": (lambda d: edit_tensors(d, lambda t: t["d2t"].zero_()), "VOCABULARY", "not the same ones"),
    "d2t of targets": (
        lambda d: edit_tensors(d, lambda t: t["d2t"].add_(torch.arange(20))),
        "VOCABULARY",
        "draft vocabulary is not usable",
    ),
    "t2d": (lambda d: edit_tensors(d, lambda t: t["t2d"].logical_not_()), "VOCABULARY", "not the same ones"),
    "layers": (lambda d: edit_config(d, eagle_aux_hidden_state_layer_ids=[3, 2, 5]), "LAYER_IDS", "three ascending"),
    "vocabulary": (lambda d: edit_config(d, vocab_size=51), "VOCABULARY", "vocabulary of 51 tokens; the target's has 50"),
    "fingerprint": (
        lambda d: save_file(load_file(d / "model.safetensors"), d / "model.safetensors", {"target_fingerprint": "other"}),
        "TARGET_FINGERPRINT",
        "made for target other",
    ),
    "embedding": (
        lambda d: edit_tensors(d, lambda t: t.update({"embed_tokens.weight": torch.ones(50, 24)})),
        "TARGET_FINGERPRINT",
        "embed_tokens differs",
    ),
    "verifier": (
        lambda d: edit_config(d, speculators_config=verifier_of("Qwen3ForCausalLM")),
        "TARGET_FINGERPRINT",
        "Qwen3ForCausalLM",
    ),
    "truncated": (truncated, "UNREADABLE", "model.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "UNREADABLE", "config.json cannot be read"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "UNREADABLE", "no such file"),
    "shards": (lambda d: replace_weights(d, "model.safetensors.index.json", b"{}"), "UNREADABLE", "several files"),
    "pickle": (lambda d: replace_weights(d, "pytorch_model.bin", pickle.dumps({})), "PICKLE", "pytorch_model.bin is a pickle"),
    "disguised": (lambda d: replace_weights(d, "model.safetensors", pickle.dumps({})), "PICKLE", "is a pickle"),
    "zip": (zipped, "PICKLE", "model.safetensors is a pickle"),
    "weights elsewhere": (lambda d: linked_out(d, "model.safetensors"), "OUTSIDE", "a link out of its directory"),
    "config elsewhere": (lambda d: linked_out(d, "config.json"), "OUTSIDE", "a link out of its directory"),
    "other algorithm": (lambda d: edit_config(d, speculators_model_type="dflash"), "CONFIG", "speculators_model_type = 'dflash'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_has_its_reason(offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path, damage: str) -> None:
    ours, model = offered()
    write_as(tmp_path / "theirs", ours, Dialect.VLLM, VERIFIER)
    assert same(read_offered(tmp_path / "theirs", model.embedding, VERIFIER), ours)
    change, reason, what = DAMAGE[damage]
    change(tmp_path / "theirs")
    with pytest.raises(DrafterRejected, match=what) as caught:
        read_offered(tmp_path / "theirs", model.embedding, VERIFIER)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


def test_a_link_inside_the_directory_is_its_own_file(offered: Callable[..., tuple[Offered, Eagle3Model]], tmp_path: Path) -> None:
    ours, model = offered()
    write_as(tmp_path / "theirs", ours, Dialect.VLLM, VERIFIER)
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "weights")
    (tmp_path / "theirs" / "model.safetensors").symlink_to("weights")
    assert same(read_offered(tmp_path / "theirs", model.embedding, VERIFIER), ours)


def test_what_is_no_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(DrafterRejected, match="is no directory") as caught:
        read_offered(tmp_path / "nowhere", torch.zeros(50, 24), VERIFIER)
    assert caught.value.reason == "UNREADABLE"
