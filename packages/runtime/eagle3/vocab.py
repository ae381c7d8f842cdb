"""`DraftVocabulary`: which of the target's tokens a drafter can propose, and the way from one numbering to the other.

Draft ids 0..Vd-1 stand for ascending target ids. The checkpoint form is d2t, an OFFSET table (d2t[i] = target_id - i), and
t2d, a mask over the target's ids. Checked on construction, so a vocabulary that exists is a proper one.
"""

from __future__ import annotations

import hashlib

import torch

from runtime.eagle3.reasons import RejectReason, rejected


class DraftVocabulary:
    """Immutable. Tensors live on the CPU; move what you need beside the model that uses it."""

    def __init__(self, target_ids: torch.Tensor, vocab_size: int) -> None:
        """target_ids: int64 [Vd], strictly ascending, within 0..vocab_size-1."""
        if target_ids.ndim != 1 or target_ids.dtype != torch.int64 or not len(target_ids):
            raise _bad(
                f"its target ids have shape {list(target_ids.shape)} and type {target_ids.dtype}; a list of int64 is needed"
            )
        target_ids = target_ids.detach().cpu()
        if bool((target_ids[1:] <= target_ids[:-1]).any()):
            raise _bad("its target ids (d2t[i] + i) do not ascend")
        if int(target_ids[0]) < 0 or int(target_ids[-1]) >= vocab_size:
            raise _bad(f"its target ids run from {int(target_ids[0])} to {int(target_ids[-1])}, outside 0..{vocab_size - 1}")
        self.vocab_size = vocab_size  # V
        self.target_ids = target_ids  # [Vd]
        self.d2t = target_ids - torch.arange(len(target_ids))  # [Vd]
        self.t2d = torch.zeros(vocab_size, dtype=torch.bool)  # [V]
        self.t2d[target_ids] = True
        self.to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)  # [V], -1: cannot be proposed
        self.to_draft[target_ids] = torch.arange(len(target_ids))
        digest = hashlib.sha256(f"{vocab_size}:".encode())
        digest.update(target_ids.numpy().astype("<i8").tobytes())
        self.hash = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.target_ids)

    @staticmethod
    def from_token_counts(counts: torch.Tensor, size: int) -> DraftVocabulary:
        """The `size` most frequent tokens of counts [V]; of equally frequent ones, those with the lower ids."""
        if not 0 < size <= len(counts):
            raise ValueError(f"A draft vocabulary of {size} tokens cannot be taken from a vocabulary of {len(counts)}.")
        order = torch.argsort(counts.detach().cpu(), descending=True, stable=True)
        return DraftVocabulary(order[:size].sort().values, len(counts))

    @staticmethod
    def full(vocab_size: int) -> DraftVocabulary:
        """Every token of the target."""
        return DraftVocabulary(torch.arange(vocab_size), vocab_size)

    @staticmethod
    def from_tensors(d2t: torch.Tensor, t2d: torch.Tensor) -> DraftVocabulary:
        """The checkpoint's two tables, held against each other."""
        if t2d.ndim != 1 or t2d.dtype != torch.bool:
            raise _bad(f"t2d has shape {list(t2d.shape)} and type {t2d.dtype}; a list of bool is needed")
        vocabulary = _from_offsets(d2t, len(t2d))
        if not torch.equal(vocabulary.t2d, t2d.cpu()):
            raise _bad(f"d2t names {len(vocabulary)} tokens and t2d marks {int(t2d.sum())}, and they are not the same ones")
        return vocabulary

    @staticmethod
    def from_d2t(d2t: torch.Tensor, vocab_size: int) -> DraftVocabulary:
        """The offsets alone, where a checkpoint has no t2d to hold them against."""
        if len(d2t) < vocab_size and not bool(d2t.any()):
            raise _bad("d2t is all zeros and there is no t2d beside it: it was never filled in")
        return _from_offsets(d2t, vocab_size)


def _from_offsets(d2t: torch.Tensor, vocab_size: int) -> DraftVocabulary:
    if d2t.ndim != 1 or d2t.dtype not in (torch.int64, torch.int32):
        raise _bad(f"d2t has shape {list(d2t.shape)} and type {d2t.dtype}; a list of int64 offsets is needed")
    return DraftVocabulary(d2t.cpu().long() + torch.arange(len(d2t)), vocab_size)


def _bad(what: str) -> Exception:
    return rejected(RejectReason.VOCABULARY, f"The draft vocabulary is not usable: {what}.")
