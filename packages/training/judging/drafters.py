"""Which drafter an evaluation means by a word, and the drafter itself once there is a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from runtime.backends.base import Target
from runtime.drafters import embedded
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.eagle3 import version_id
from runtime.eagle3.checkpoint import read_vocabulary
from runtime.registry import Registry, validate
from training.drafters import ACTIVE, EMBEDDED, Found

KINDS: dict[str, Callable[[], Drafter]] = {NgramDrafter.version: NgramDrafter, NoDrafter.version: NoDrafter}


@dataclass(frozen=True)
class Candidate:
    word: str  # as it was asked for
    version: str
    vocabulary: torch.Tensor | None  # bool [V]: what it can propose; None: anything
    load: Callable[[Target], Drafter]  # DrafterRejected if it does not fit


def as_served(registry: Registry, model_name: str) -> str:
    """The word for what a server drafts with when nobody tells it."""
    if registry.active() is not None:
        return ACTIVE
    return EMBEDDED if embedded.path_for(model_name) is not None else NgramDrafter.version


@contextmanager
def find(word: str, on_disk: Callable[[str], AbstractContextManager[Found]]) -> Iterator[Candidate]:
    """It can be loaded while this is open. ConfigError or DrafterRejected in one sentence if there is none."""
    if word in KINDS:
        yield Candidate(word, word, None, lambda target: KINDS[word]())
        return
    with on_disk(word) as found:
        version = version_id(found.path)

        def load(target: Target) -> Drafter:
            dtype: torch.dtype = getattr(torch, target.info.dtype)
            model = validate(found.version, target.info, target.embedding, dtype=dtype, device=target.info.device)
            return Eagle3Drafter(model, version)

        yield Candidate(word, version, read_vocabulary(found.path).t2d, load)
