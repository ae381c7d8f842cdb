"""What an operator plugs into the tap by a dotted name: a redaction hook and a classifier of traffic. Both see a row's tokens
and its text, and both may be wrong in any way: here it is checked what they answer. Knows no queue and no store.

    def redact(token_ids: tuple[int, ...], text: str) -> bool | Sequence[bool] | None
        True: the row must not be kept. A list of one bool a token: those tokens must not be kept. False, None: keep it.

    def classify(token_ids: tuple[int, ...], text: str) -> str
        The slice of traffic that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from runtime.errors import ConfigError, FeatureError
from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates

Hook = Callable[[tuple[int, ...], str], object]

MASKED_TOKEN = 0  # stands where a token was masked; nothing is taught from it or to it
MAX_SLICE_CHARS = 64


def load_hook(setting: str, name: str | None) -> Hook | None:
    """The function of a dotted name; None for none. ConfigError if there is no such function."""
    if name is None:
        return None
    module, _, function = name.rpartition(".")
    try:
        hook = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{setting} is {name!r}, which cannot be imported ({error}); give package.module.function of something installed."
        ) from error
    if not callable(hook):
        raise ConfigError(f"{setting} is {name!r}, a {type(hook).__name__}; it must be a function of token ids and text.")
    found: Hook = hook
    return found


def redacted(row: FeatureRow, answer: object) -> FeatureRow | None:
    """What may be kept of the row after a redaction hook's answer; None: nothing that teaches. FeatureError for an answer of
    another form, since it cannot be known then what was meant.

    A masked token loses its id and its state, and what would be taught from it, to it or right behind it is taught no more.
    The states of later tokens were computed with it in sight: where that is too much, the hook must drop the row.
    """
    if answer is None or answer is False:
        return row
    if answer is True:
        return None
    if not isinstance(answer, Sequence) or len(answer) != row.num_tokens or any(type(each) is not bool for each in answer):
        raise FeatureError(
            f"The redaction hook answered a {type(answer).__name__} for a row of {row.num_tokens} tokens; it must answer a "
            "bool, None, or a list of one bool a token. The row is not kept."
        )
    masked = torch.tensor(answer)  # [n+1]
    follows = masked.roll(1)
    follows[0] = False
    generated = row.generated & ~masked & ~follows
    if not (generated[1:] & generated[:-1]).any():  # a row teaches where two generated tokens stand side by side
        return None
    states = masked[:-1, None]  # [n, 1]
    hidden = HiddenStates(row.hidden.aux.masked_fill(states, 0.0), row.hidden.last.masked_fill(states, 0.0))
    return FeatureRow(row.token_ids.masked_fill(masked, MASKED_TOKEN), generated, hidden, row.labels)


def checked_slice(answer: object) -> str:
    """A classifier's answer, if it can name a slice. FeatureError if not."""
    if not isinstance(answer, str) or not 0 < len(answer) <= MAX_SLICE_CHARS:
        shown = repr(answer)[:80]
        raise FeatureError(f"The classifier answered {shown}; it must answer a name of 1 to {MAX_SLICE_CHARS} characters.")
    return answer
