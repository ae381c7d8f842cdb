"""FeatureRow: one training row, as the trainer reads it and as it lies in a file.

Tokens x[0..n], which of them the target generated, and the target's states at positions 0..n-1: position p of the states
was computed from x[p] and is paired with x[p+1]. Knows no store and no ledger. Shapes: the legend of runtime/types.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from runtime.errors import FeatureError
from runtime.features.refs import FeatureSpec
from runtime.hidden_states import HiddenStates

TENSOR_NAMES = ("token_ids", "generated", "aux", "last")


@dataclass(frozen=True)
class FeatureRow:
    """A row exists only if its parts fit each other."""

    token_ids: torch.Tensor  # int64 [n+1]
    generated: torch.Tensor  # bool [n+1], true where the target generated the token in the turn that this row teaches
    hidden: HiddenStates  # positions 0 .. n-1: aux [n, 3*Ht], last [n, Ht]
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        tokens, generated, aux, last = self.token_ids, self.generated, self.hidden.aux, self.hidden.last
        if tokens.dtype != torch.int64 or generated.dtype != torch.bool:
            raise FeatureError(f"A row needs int64 tokens and a bool mask, got {tokens.dtype} and {generated.dtype}.")
        n = tokens.numel() - 1
        fits = tokens.shape == generated.shape == (n + 1,) and n >= 1 and aux.ndim == last.ndim == 2
        if not fits or aux.shape != (n, 3 * last.shape[1]) or last.shape[0] != n:
            raise FeatureError(
                "A row needs tokens [n+1], mask [n+1], aux [n, 3*Ht] and last [n, Ht] with n >= 1, "
                f"got {list(tokens.shape)}, {list(generated.shape)}, {list(aux.shape)} and {list(last.shape)}."
            )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The row's tensors by their stored names, contiguous and on the CPU, states as dtype."""
        aux, last = (states.detach().to(device="cpu", dtype=dtype).contiguous() for states in (self.hidden.aux, self.hidden.last))
        return {
            "token_ids": self.token_ids.cpu().contiguous(),
            "generated": self.generated.cpu().contiguous(),
            "aux": aux,
            "last": last,
        }

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], labels: Mapping[str, str]) -> FeatureRow:
        """The inverse of `tensors`. FeatureError on other names, shapes or dtypes."""
        if tensors.keys() != set(TENSOR_NAMES):
            raise FeatureError(f"A row's file holds {sorted(TENSOR_NAMES)}, but this one holds {sorted(tensors)}.")
        hidden = HiddenStates(tensors["aux"], tensors["last"])
        return FeatureRow(tensors["token_ids"], tensors["generated"], hidden, labels)


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, FeatureSpec]:
    """Shape and dtype of each tensor, as a SampleRef carries them."""
    return {name: FeatureSpec(tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in tensors.items()}
