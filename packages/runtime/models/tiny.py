"""A tiny random Llama with a byte-level tokenizer: a whole Hugging Face directory in a few hundred kilobytes.

For tests and for trying things out; it speaks gibberish, but always the same: the weights depend on the arguments alone.
Ids 0..255 are the bytes, then come the control tokens, then two-letter tokens that encoding never yields (a model with
random weights emits them all the same, so decoding meets tokens of one and of two characters).
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
NUM_BYTES = 256
MAX_VOCAB_SIZE = NUM_BYTES + len(CONTROL_TOKENS) + len(string.ascii_letters) ** 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' ~ message['role']) }}{% endif %}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\n' ~ message['content'] ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 6,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 2048,
    tie: bool = True,
) -> Path:
    """Write the model into `path` (made if missing) and return it."""
    smallest = NUM_BYTES + len(CONTROL_TOKENS)
    if not smallest <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}; a tiny model's lies in {smallest}..{MAX_VOCAB_SIZE}.")
    if hidden_size % num_heads or num_heads % num_kv_heads or hidden_size // num_heads % 2:
        raise ValueError(f"{hidden_size} hidden units, {num_heads} heads and {num_kv_heads} K/V heads do not divide evenly.")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "max_position_embeddings": max_position_embeddings,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie,
        "dtype": "float32",
        "vocab_size": vocab_size,
    }
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    _write_tokenizer(path, vocab_size, max_position_embeddings)
    save_file(_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights, large enough that the model's states and its greedy choices vary from token to token."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = (int(config[name]) for name in ("hidden_size", "intermediate_size", "head_dim"))
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul(gain / columns**0.5)

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, gain=4.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(q_rows, hidden, gain=2.0),
            prefix + "self_attn.k_proj.weight": matrix(kv_rows, hidden, gain=2.0),
            prefix + "self_attn.v_proj.weight": matrix(kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, q_rows),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden, gain=2.0),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, gain=4.0)
    return tensors


def _write_tokenizer(path: Path, vocab_size: int, max_length: int) -> None:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    pairs = (first + second for first in string.ascii_letters for second in string.ascii_letters)
    first_pair = NUM_BYTES + len(CONTROL_TOKENS)
    vocabulary |= dict(zip(CONTROL_TOKENS, range(NUM_BYTES, first_pair), strict=True))
    vocabulary |= dict(zip(pairs, range(first_pair, vocab_size), strict=False))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    start, end, pad = CONTROL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": end,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    _write_json(path / "tokenizer_config.json", settings)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
