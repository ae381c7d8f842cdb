"""Masks from offsets, on real chat-template text: which tokens the assistant spoke, and what is left out or cut."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates
from runtime.models import Tokenizer, resolve
from training.data.batches import TrainingRow, pack, supervised
from training.data.conversations import Conversation, Preformatted
from training.data.encoding import Encoder
from training.data.tokens import Corpus, TokenRow

STRIPS_THOUGHTS = (  # as templates of reasoning models do: only behind the last question thoughts are kept
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer.load(tiny.path)


def conversation(*contents: str, name: str = "a", **last: object) -> Conversation:
    """User and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    messages[-1] |= last
    return Conversation(name, tuple(messages))


def encode(tokenizer: Tokenizer, record: Conversation | Preformatted, max_tokens: int = 4096) -> tuple[list[TokenRow], Encoder]:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, max_tokens)
    return list(encoder.rows(record)), encoder


def spoken(tokenizer: Tokenizer, row: TokenRow) -> list[str]:
    return [tokenizer._backend.decode(list(row.token_ids[a:b]), skip_special_tokens=False) for a, b in row.spans]


@pytest.mark.parametrize(
    "answers",
    [
        ("Because.", "No."),
        (" \n spaces before and after \n", "日本語, é"),
        ("<|im_end|> is how it ends", "<|im_start|>assistant\n"),
    ],
)
def test_what_the_assistant_spoke_is_marked_to_the_end_of_the_turn_and_nothing_else(tokenizer: Tokenizer, answers) -> None:
    record = conversation("Why?", answers[0], "And <|im_end|> why not?", answers[1])
    [row], encoder = encode(tokenizer, record)
    assert spoken(tokenizer, row) == [answer + "<|im_end|>" for answer in answers]
    assert not encoder.left_out
    prompts = [tokenizer.encode_chat(record.messages[:i]) for i in (1, 3)]
    for (first, _), prompt in zip(row.spans, prompts, strict=True):
        assert list(row.token_ids[:first]) == prompt  # where serving would begin to generate
    assert row.token_ids[row.spans[-1][1] - 1] in tokenizer.eos_token_ids
    assert len(row.token_ids) == row.spans[-1][1]  # what follows teaches nothing


def test_a_turns_first_supervised_position_is_the_last_prompt_position_and_none_passes_its_end(tokenizer: Tokenizer) -> None:
    """From text to a batch, on rows of two turns, one of them long."""
    record = conversation("Why?", "Because it is so. " * 40, "And why not?", "Nobody knows that.")
    [row], _ = encode(tokenizer, record)
    corpus = Corpus.of([row], tokenizer.vocab_size)
    ids, generated = corpus.token_ids_of(0), corpus.generated_of(0)
    positions, depths = supervised(generated)
    by_turn = [positions[(positions >= first - 1) & (positions < stop)].tolist() for first, stop in row.spans]
    for (first, stop), at in zip(row.spans, by_turn, strict=True):
        assert at == list(range(first - 1, stop - 2))  # p drafts x[p+2], which lies in the turn
    assert sum(map(len, by_turn)) == len(positions)
    states = HiddenStates(torch.zeros(len(ids) - 1, 12), torch.zeros(len(ids) - 1, 4))
    batch = pack([TrainingRow("a", FeatureRow(ids, generated, states))], num_depths=4)
    ends = torch.tensor([stop for _, stop in row.spans])[torch.bucketize(positions, torch.tensor([row.spans[0][1] - 1]))]
    for k in range(4):
        inside = positions + 2 + k < ends
        assert torch.equal(batch.chain_ids[:, k], torch.where(inside, ids[(positions + 2 + k).clamp(max=len(ids) - 1)], -1))
    assert torch.equal(depths, ends - positions - 2)


def test_a_turn_that_the_template_writes_differently_later_has_a_row_of_its_own(tokenizer: Tokenizer) -> None:
    tokenizer._pretrained.chat_template = STRIPS_THOUGHTS
    messages = [dict(each) for each in conversation("One?", "First.", "Two?", "Second.").messages]
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "hm", "aha"
    rows, encoder = encode(tokenizer, Conversation("a", tuple(messages)))
    assert [spoken(tokenizer, row) for row in rows] == [
        ["<think>hm</think>First.<|im_end|>"],
        ["<think>aha</think>Second.<|im_end|>"],
    ]
    assert [row.name for row in rows] == ["a", "a#1"]
    assert "hm" not in tokenizer.decode(list(rows[1].token_ids))
    assert not encoder.left_out


def test_what_a_template_cannot_show_is_left_out(tokenizer: Tokenizer) -> None:
    call = {"tool_calls": [{"function": {"name": "f"}}]}
    records = [
        (conversation("Why?", "", **call), "no_place_for_tools"),
        (Conversation("a", conversation("Why?", "So.").messages, ({"name": "f"},)), "no_place_for_tools"),
        (conversation("Why?", "So.", reasoning_content="hm"), "no_place_for_reasoning"),
        (
            Conversation("a", ({"role": "developer", "content": "!"}, *conversation("Why?", "So.").messages)),
            "refused_by_template",
        ),
        (conversation("Why?"), "nothing_to_learn"),
        (Preformatted("a", ((0, 1),), token_ids=(1, 2, 3)), "nothing_to_learn"),
        (Preformatted("a", ((1, 3),), token_ids=(1, 2, 10**6)), "unknown_token"),
    ]
    for record, reason in records:
        rows, encoder = encode(tokenizer, record)
        assert (rows, encoder.left_out) == ([], Counter({reason: 1})), reason


def test_a_turn_that_cannot_be_found_is_left_out(tokenizer: Tokenizer) -> None:
    tokenizer._pretrained.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    )
    rows, encoder = encode(tokenizer, conversation("Why?", "So."))
    assert (rows, encoder.left_out) == ([], {"turn_rewritten_by_template": 1, "nothing_to_learn": 1})


def test_a_row_that_is_too_long_is_cut_and_its_mask_with_it(tokenizer: Tokenizer) -> None:
    record = conversation("Why?", "So it is. " * 10, "And?", "Well.")
    [whole], _ = encode(tokenizer, record)
    first, stop = whole.spans[0]
    [cut], encoder = encode(tokenizer, record, max_tokens=stop - 3)
    assert (cut.spans, list(cut.token_ids)) == (((first, stop - 3),), list(whole.token_ids[: stop - 3]))
    assert encoder.truncated == {"truncated": 1}
    rows, encoder = encode(tokenizer, record, max_tokens=first + 1)
    assert (rows, encoder.left_out) == ([], {"too_long": 1})


def test_text_as_it_stands_is_marked_by_its_characters(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause it is.<|im_end|>\n"
    start, stop = text.index("Because"), text.rindex("\n")
    [row], _ = encode(tokenizer, Preformatted("a", ((start, stop),), text=text))
    assert spoken(tokenizer, row) == ["Because it is.<|im_end|>"]
    [chat], _ = encode(tokenizer, conversation("Why?", "Because it is."))
    assert (list(row.token_ids), row.spans) == (list(chat.token_ids), chat.spans)


@pytest.mark.real_model
def test_smollm2s_template() -> None:
    tokenizer = Tokenizer.load(resolve("smollm2-135m").path)
    record = conversation("Hi!", "Hello.", "Bye!", "Goodbye <|endoftext|> now.")
    [row], _ = encode(tokenizer, record)
    assert spoken(tokenizer, row) == ["Hello.<|im_end|>", "Goodbye <|endoftext|> now.<|im_end|>"]
    assert list(row.token_ids[: row.spans[1][0]]) == tokenizer.encode_chat(record.messages[:3])


def test_a_line_of_json_comes_through_whole(tokenizer: Tokenizer) -> None:
    """Generated ids are taken as they are, control tokens and all."""
    prompt = tokenizer.encode("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    ids = [*prompt, 5, 6, 7, *tokenizer.eos_token_ids]
    span = (len(ids) - 4, len(ids))
    [row], _ = encode(tokenizer, Preformatted("a", (span,), token_ids=tuple(json.loads(json.dumps(ids)))))
    assert (list(row.token_ids), row.spans) == (ids, (span,))
