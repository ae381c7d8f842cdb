"""Bytes of tokens: joined, they are the text's own bytes, for each way in which tokenizers write bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from runtime.models import Tokenizer as ModelTokenizer
from runtime.models import resolve
from serving.http.token_bytes import TokenBytes

from ..conftest import at_home


@pytest.fixture(scope="module")
def tiny(home: Path) -> tuple[ModelTokenizer, TokenBytes]:
    with at_home(home):
        path = resolve("tiny").path
    return ModelTokenizer.load(path), TokenBytes(path / "tokenizer.json")


@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_byte_level_tokens_join_to_the_text(tiny: tuple[ModelTokenizer, TokenBytes], text: str) -> None:
    tokenizer, token_bytes = tiny
    assert b"".join(token_bytes.of(token_id) for token_id in tokenizer.encode(text)) == text.encode()


def test_control_tokens_are_their_names_and_others_are_nothing(tiny: tuple[ModelTokenizer, TokenBytes]) -> None:
    tokenizer, token_bytes = tiny
    [end] = tokenizer.encode("<|im_end|>")
    assert token_bytes.of(end) == b"<|im_end|>"
    assert token_bytes.of(10_000) == b""


def test_half_a_character_shows_its_bytes(tiny: tuple[ModelTokenizer, TokenBytes]) -> None:
    _, token_bytes = tiny
    entry = token_bytes.entry(0xE4, float("-inf"))
    assert entry == {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xE4]}


def test_byte_fallback_and_spaces(tmp_path: Path) -> None:
    """As Llama-2's and Gemma's tokenizers write them."""
    vocabulary = {"<unk>": 0, "\u2581Hi": 1, "<0xE4>": 2, "you\u2581": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    token_bytes = TokenBytes(tmp_path / "tokenizer.json")
    assert [token_bytes.of(token_id) for token_id in (1, 2, 3)] == [b" Hi", b"\xe4", b"you "]
