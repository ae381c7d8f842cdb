"""Text to token ids and back. `StreamDecoder` gives out text as tokens arrive, and never a character that may still change.

Only chat goes through a template; `encode` takes text as it is. Control tokens written as text (`<|im_end|>`) mean what
they say in `encode`, whose caller could send the ids just as well, but are plain characters inside a chat message: a user
cannot end his own turn and speak as the system.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError

from runtime.errors import InvalidRequest, ModelError
from runtime.models.fingerprint import read_json

DECODED_FEW = 2**16  # decodings of a few tokens that are kept, some megabytes
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Guarded:
    """A conversation on its way through a chat template: markers stand for control tokens that somebody wrote as text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    literals: list[str]  # by number
    marker: str


class Tokenizer:
    """A model's tokenizer and chat template. Safe for several threads."""

    def __init__(self, pretrained: Any, plain: tokenizers.Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._pretrained = pretrained
        self._backend: tokenizers.Tokenizer = pretrained.backend_tokenizer
        self._plain = plain  # takes control tokens as plain characters
        self._plain.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        contents = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, contents))) if contents else None
        self.eos_token_ids = eos_token_ids
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        # Streams decode one or two tokens at a time, and the same ones again and again.
        self._decode_few = lru_cache(maxsize=DECODED_FEW)(lambda ids: self.decode(ids))
        self._is_written = lru_cache(maxsize=DECODED_FEW)(self._say_is_written)
        self._max_token_chars = max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @staticmethod
    def load(path: Path) -> Tokenizer:
        from transformers import AutoTokenizer

        if not (path / "tokenizer.json").is_file():
            raise ModelError(
                f"{path} has no tokenizer.json; save the model's tokenizer there with transformers' save_pretrained."
            )
        try:
            plain = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library's own errors are bare Exceptions
            raise ModelError(f"{path / 'tokenizer.json'} is damaged ({error}); fetch the model again.") from error
        try:
            pretrained = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"The tokenizer in {path} cannot be read ({type(error).__name__}: {error}).") from error
        return Tokenizer(pretrained, plain, _eos_token_ids(path, pretrained.eos_token_id))

    def encode(self, text: str) -> list[int]:
        """The ids of the text: no template, nothing added."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)  # unlike encode, lets other threads run
        return list(encoding.ids)

    def to_json(self) -> str:
        """The whole tokenizer, as tokenizer.json writes it."""
        return self._backend.to_str()

    @cached_property
    def hash(self) -> str:
        """Of the whole tokenizer: equal hashes, equal ids for equal texts."""
        return sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def vocabulary_hash(self) -> str:
        """Of which token each id stands for, whatever text is split how."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return sha256(json.dumps(sorted((token_id, token) for token, token_id in vocabulary.items())).encode()).hexdigest()

    def min_tokens(self, num_chars: int) -> int:
        """A text of so many characters cannot have fewer ids. (One whose tokenizer removes characters may; by a little.)"""
        return -(-num_chars // self._max_token_chars)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template has a place for tools, and writes the calls of earlier turns."""
        return self.knows("tools")

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of a conversation through the model's chat template, ending where the assistant is to speak.

        tools: declarations as transformers' templates take them; a template that does not know tools leaves them out.
        """
        if not messages:
            raise InvalidRequest("messages", "messages is empty; send at least one message.")
        for index, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise InvalidRequest("messages", f"messages[{index}] needs a role and a content, both text.")
        guarded = self.guard(messages, tools)
        text = self.render(guarded, len(messages))
        return self.encode_rendered(text, guarded)[0] if guarded.literals else self.encode(text)

    def guard(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Guarded:
        """A conversation in which each control token written as text is replaced by a numbered marker."""
        marker = uuid.uuid4().hex
        (marked, marked_tools), literals = self._mark([list(messages), list(tools)], marker)
        return Guarded(marked, marked_tools, literals, marker)

    def render(self, guarded: Guarded, num_messages: int, *, is_open: bool = True) -> str:
        """The text of the first num_messages messages through the chat template, markers in it; with is_open it ends where
        the assistant is to speak. InvalidRequest if there is no template, or if it refuses."""
        if self._pretrained.chat_template is None:
            raise InvalidRequest("messages", "This model has no chat template; send a prompt instead of messages.")
        try:
            text = self._pretrained.apply_chat_template(
                guarded.messages[:num_messages], tools=guarded.tools or None, tokenize=False, add_generation_prompt=is_open
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest("messages", f"The model's chat template refuses these messages: {error}.") from error
        return str(text)

    def encode_rendered(self, text: str, guarded: Guarded | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, where each begins and ends in the text) of a text as it stands, or of one that `render` gave: a marker stands
        for the plain characters that it took the place of, and each of their ids has the marker's place."""
        if guarded is None or not guarded.literals:
            [encoding] = self._backend.encode_batch([text], add_special_tokens=False)  # unlike encode, lets other threads run
            return list(encoding.ids), list(encoding.offsets)
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = 0
        for match in re.finditer(f"{guarded.marker}:([0-9]+);", text):
            self._encode_piece(text, start, match.start(), ids, places)
            literal = self._plain.encode(guarded.literals[int(match[1])], add_special_tokens=False).ids
            ids += literal
            places += [match.span()] * len(literal)
            start = match.end()
        self._encode_piece(text, start, len(text), ids, places)
        return ids, places

    def _encode_piece(self, text: str, start: int, stop: int, ids: list[int], places: list[tuple[int, int]]) -> None:
        if stop > start:
            [encoding] = self._backend.encode_batch([text[start:stop]], add_special_tokens=False)
            ids += encoding.ids
            places += [(start + first, start + last) for first, last in encoding.offsets]

    def _mark(self, given: Any, marker: str) -> tuple[Any, list[str]]:
        """The same with each control token written in its texts replaced by a numbered marker, and what the numbers mean."""
        literals: list[str] = []

        def mark(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{marker}:{len(literals) - 1};"

        def guard(value: Any) -> Any:
            if isinstance(value, str):
                return self._special_pattern.sub(mark, value) if self._special_pattern else value
            if isinstance(value, Mapping):
                return {guard(key): guard(item) for key, item in value.items()}
            return [guard(item) for item in value] if isinstance(value, list) else value

        return guard(given), literals

    def knows(self, word: str) -> bool:
        """Whether the chat template has this word in it: a field of messages that it writes out."""
        templates = self._pretrained.chat_template or ""
        return any(word in template for template in (templates.values() if isinstance(templates, dict) else [templates]))

    @cached_property
    def template_hash(self) -> str:
        """Of the chat template: equal hashes, equal texts for equal conversations."""
        return sha256(json.dumps(self._pretrained.chat_template, sort_keys=True).encode()).hexdigest()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; control tokens and ids without a token are skipped, broken UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self._is_written, self._decode_few, self.decode)

    def _say_is_written(self, token_id: int) -> bool | None:
        """Whether decoding writes this token out by itself; None: it skips it. Byte tokens are written together only."""
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        return None if token is None else not _BYTE_TOKEN.fullmatch(token)


class StreamDecoder:
    """Decodes token by token; all that it returned, joined, is `Tokenizer.decode` of all the ids.

    A token is decoded behind those that gave the last text, since a tokenizer may write it differently at the start of a
    text. Text that ends in U+FFFD is held back: the next token may complete the character.
    """

    def __init__(
        self,
        is_written: Callable[[int], bool | None],  # None: decoding skips the token
        decode: Callable[[tuple[int, ...]], str],  # of few ids, which come again: their texts may be remembered
        decode_many: Callable[[Sequence[int]], str],
    ) -> None:
        self._is_written, self._decode, self._decode_many = is_written, decode, decode_many
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, *token_ids: int) -> str:
        """Take tokens; return the text that became certain with them, often none."""
        if len(token_ids) > 1 and not self._pending and all(map(self._is_written, token_ids)):
            text = self._decode_many([*self._context, *token_ids])
            new = text[len(self._context_text) :]
            if new and _REPLACEMENT not in text:  # all is whole: the last token says how the next is written, or all of them
                last = token_ids[-1:]
                self._context = list(token_ids if _REPLACEMENT in self._decode(last) else last)
                self._context_text = self._decode(tuple(self._context))
                return new
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        is_written = self._is_written(token_id)
        if is_written is None:
            return ""
        self._pending.append(token_id)
        if not is_written:
            return ""  # a run of byte tokens is decoded as a whole: one bad byte at its end changes all of it
        text = self._decode((*self._context, *self._pending))
        return "" if text.endswith(_REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """The rest, incomplete as it may be."""
        return self._emit(self._decode((*self._context, *self._pending))) if self._pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(tuple(self._context))
        return new


def _eos_token_ids(path: Path, fallback: int | None) -> tuple[int, ...]:
    """The ids that end a turn: of generation_config.json, else of config.json, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = read_json(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return () if fallback is None else (fallback,)
