"""The bytes that one token stands for, which OpenAI's logprobs show: a token may hold half a character.

Read from tokenizer.json alone. Three ways of writing bytes are in use: byte-level BPE (each byte a printable character),
byte fallback (`<0xE4>`), and plain text with U+2581 for a space. Control tokens are their own names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    def __init__(self, tokenizer_json: Path) -> None:
        text = tokenizer_json.read_text(encoding="utf-8")
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._added = {token_id: token.content for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._byte_of = _byte_level_alphabet() if '"ByteLevel"' in json.dumps(json.loads(text).get("decoder")) else None

    def of(self, token_id: int) -> bytes:
        """The bytes of the token; empty for an id that has none."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[char] for char in token if char in self._byte_of)
        if found := _BYTE_FALLBACK.fullmatch(token):
            return bytes.fromhex(found.group(1))
        return token.replace(_SPACE, " ").encode()

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """One token as OpenAI's logprobs write it."""
        data = self.of(token_id)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes are themselves, the others follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
