"""The default model, as it comes out of its package: the same under every version of the libraries."""

from __future__ import annotations

import pytest

from runtime.models import Tokenizer, resolve

pytestmark = pytest.mark.real_model


def test_it_is_one_model_wherever_it_is_made() -> None:
    assert resolve("smollm2-135m").fingerprint == "f9428f45fce6a9b6"


def test_the_tokenizer_is_the_models_own() -> None:
    tokenizer = Tokenizer.load(resolve("smollm2-135m").path)
    assert tokenizer.eos_token_ids == (2,)
    ids = tokenizer.encode_chat([{"role": "user", "content": "In  2013, naïve 🦊."}])
    assert [ids[0], ids[-3:]] == [1, tokenizer.encode("<|im_start|>assistant\n")]
    text = "a   2013 naïve 東京 🦊"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("a   2013")]
    assert pieces == ["a", "   ", "2", "0", "1", "3"]  # each digit by itself, and the spaces before it together
