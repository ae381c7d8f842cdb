"""Rows of tokens without hidden states, and many of them in a few flat tensors: 25 million tokens are some 50 megabytes.

A `Corpus` is immutable and knows no model: its states are computed when they are needed (`prefill`). Row r owns the tokens
row_offsets[r] .. row_offsets[r+1] - 1, and those spans whose first column is r. Shapes: R rows, N tokens, S spans.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from runtime.errors import FeatureError
from runtime.features.refs import unit_hash
from training.data.conversations import Span

TENSORS = {"token_ids": (torch.uint16, torch.int32), "row_offsets": (torch.int64,), "spans": (torch.int32,)}
TENSORS |= {"temperatures": (torch.float32,), "labels": (torch.uint8,)}
NARROW = 2**16  # ids below it take two bytes
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.2  # shares of the sources, where none is given


@dataclass(frozen=True)
class TokenRow:
    """Tokens of a dialogue, and which of them a model spoke."""

    source: str  # the conversation or prompt that it comes from: rows of one source are held out together, or trained on
    part: str  # which answer and turn of it; empty: there is one
    token_ids: Sequence[int]
    spans: tuple[Span, ...]  # ascending, not empty, apart
    temperature: float | None = None  # that they were sampled at; None: not known
    slice: str = ""

    @property
    def name(self) -> str:
        return name_of(self.source, self.part)

    @property
    def num_generated(self) -> int:
        return sum(stop - first for first, stop in self.spans)


def name_of(source: str, part: str) -> str:
    return f"{source}#{part}" if part else source


def sample_id_of(name: str) -> str:
    """A name that every ledger takes."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def teaches(spans: Iterable[Span]) -> bool:
    """Whether a drafter can learn from a row with these spans: two generated tokens behind one that was not, or three."""
    return any(stop - first >= (2 if first else 3) for first, stop in spans)


def clipped(spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    """What is left of the spans in the first `length` tokens."""
    return tuple((first, min(stop, length)) for first, stop in spans if first < length)


def is_heldout(source: str, fraction: float) -> bool:
    """Whether rows of this source are for the gate alone: by chance, but always the same."""
    return unit_hash("heldout", source) < fraction


def heldout_fraction(given: float | None, sources: Iterable[str], enough: int) -> float:
    """The share of these sources that is for the gate: the given one; else 0.01, or what holds out `enough` of them, up to 0.2.
    It depends on nothing but which sources there are."""
    if given is not None:
        return given
    chances = sorted(unit_hash("heldout", source) for source in set(sources))
    needed = math.nextafter(chances[enough - 1], 1.0) if len(chances) >= enough else 0.0  # never; so nothing is given away
    return min(max(needed, LEAST_HELD_OUT), MOST_HELD_OUT)


@dataclass(frozen=True)
class Corpus:
    token_ids: torch.Tensor  # uint16 or int32 [N]
    row_offsets: torch.Tensor  # int64 [R+1]
    spans: torch.Tensor  # int32 [S, 3] row, first, behind the last (counted from the row's first token); by row, ascending
    temperatures: torch.Tensor  # float32 [R], NaN: not known
    labels: tuple[tuple[str, str, str], ...]  # [R] source, part, slice

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def num_generated(self) -> int:
        return int((self.spans[:, 2] - self.spans[:, 1]).sum())

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [R] tokens of each row up to its last generated one: what follows teaches nothing."""
        ends = np.zeros(len(self), dtype=np.int64)
        spans = self.spans.numpy()
        np.maximum.at(ends, spans[:, 0], spans[:, 2])
        return ends

    def lengths_of(self, rows: Sequence[int]) -> list[int]:
        return cast(list[int], self.lengths[np.asarray(rows, dtype=np.int64)].tolist())

    @cached_property
    def _span_offsets(self) -> np.ndarray:
        return np.searchsorted(self.spans[:, 0].numpy(), np.arange(len(self) + 1))

    def name(self, row: int) -> str:
        source, part, _ = self.labels[row]
        return name_of(source, part)

    def row(self, row: int) -> TokenRow:
        """As it was before it came here, up to its last generated token."""
        source, part, label = self.labels[row]
        temperature = float(self.temperatures[row])
        ids, spans = self.token_ids_of(row).tolist(), self.spans_of(row)
        return TokenRow(source, part, ids, spans, None if math.isnan(temperature) else temperature, label)

    def token_ids_of(self, row: int) -> torch.Tensor:
        """int64, up to the row's last generated token."""
        start = int(self.row_offsets[row])
        return self.token_ids[start : start + int(self.lengths[row])].long()

    @cached_property
    def teaches(self) -> np.ndarray:
        """bool [R]: what the function of that name says of each row."""
        rows, firsts, stops = self.spans.numpy().astype(np.int64).T
        does = stops - firsts >= np.where(firsts > 0, 2, 3)
        return np.bincount(rows[does], minlength=len(self)) > 0

    def spans_of(self, row: int) -> tuple[Span, ...]:
        own = self.spans[int(self._span_offsets[row]) : int(self._span_offsets[row + 1]), 1:]
        return tuple((first, stop) for first, stop in own.tolist())

    def generated_of(self, row: int) -> torch.Tensor:
        """bool, as long as token_ids_of."""
        start = int(self.row_offsets[row])
        return self._generated[start : start + int(self.lengths[row])]

    @cached_property
    def _generated(self) -> torch.Tensor:
        """bool [N]"""
        spans, offsets = self.spans.numpy().astype(np.int64), self.row_offsets.numpy()
        edges = np.zeros(self.num_tokens + 1, dtype=np.int8)
        np.add.at(edges, offsets[spans[:, 0]] + spans[:, 1], 1)  # spans may touch: one ends where the next begins
        np.add.at(edges, offsets[spans[:, 0]] + spans[:, 2], -1)
        return torch.from_numpy(np.cumsum(edges[:-1], dtype=np.int8).astype(bool))

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """int64 [V]: how often each token was generated, over all rows."""
        ids = self.token_ids.numpy()[self._generated.numpy()].astype(np.int64)
        return torch.from_numpy(np.bincount(ids, minlength=vocab_size))

    def is_heldout(self, fraction: float) -> np.ndarray:
        """bool [R]"""
        return np.array([is_heldout(source, fraction) for source, _, _ in self.labels], dtype=bool)

    @cached_property
    def digest(self) -> str:
        """Of everything in it."""
        found = hashlib.sha256()
        for name, tensor in self.tensors().items():
            found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """As they lie in a file."""
        labels = json.dumps(self.labels, ensure_ascii=False, separators=(",", ":")).encode()
        return {
            "token_ids": self.token_ids,
            "row_offsets": self.row_offsets,
            "spans": self.spans,
            "temperatures": self.temperatures,
            "labels": torch.frombuffer(bytearray(labels), dtype=torch.uint8),
        }

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor]) -> Corpus:
        """The inverse of `tensors`. FeatureError, saying what, for anything else."""
        if tensors.keys() != TENSORS.keys():
            raise FeatureError(f"it holds {sorted(tensors)}, not {sorted(TENSORS)}")
        for name, dtypes in TENSORS.items():
            if tensors[name].dtype not in dtypes:
                raise FeatureError(f"its {name} are {tensors[name].dtype}")
        try:
            labels = tuple(
                (str(source), str(part), str(label)) for source, part, label in json.loads(tensors["labels"].numpy().tobytes())
            )
        except (ValueError, TypeError) as error:
            raise FeatureError(f"its labels are damaged ({error})") from error
        corpus = Corpus(tensors["token_ids"], tensors["row_offsets"], tensors["spans"], tensors["temperatures"], labels)
        corpus._check()
        return corpus

    def _check(self) -> None:
        offsets, spans, rows = self.row_offsets.numpy(), self.spans.numpy(), len(self)
        fits = self.token_ids.ndim == 1 and offsets.shape == (rows + 1,) and self.temperatures.shape == (rows,)
        if not fits or spans.ndim != 2 or spans.shape[1] != 3:
            raise FeatureError("its tensors do not fit each other")
        if (self.token_ids.numpy() < 0).any():
            raise FeatureError("an id of its tokens is below 0")
        sizes = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != self.num_tokens or (sizes < 1).any():
            raise FeatureError("its row offsets are not those of its tokens")
        if (np.diff(spans[:, 0]) < 0).any() or not ((spans[:, 0] >= 0) & (spans[:, 0] < rows)).all():
            raise FeatureError("its spans are not ordered by row")
        follows = np.diff(spans[:, 0]) == 0
        is_in_order = (spans[1:, 1] >= spans[:-1, 2]) | ~follows
        if (
            not ((spans[:, 1] >= 0) & (spans[:, 1] < spans[:, 2]) & (spans[:, 2] <= sizes[spans[:, 0]])).all()
            or not is_in_order.all()
        ):
            raise FeatureError("its spans do not lie in their rows, one behind the other")

    @staticmethod
    def of(rows: Sequence[TokenRow], vocab_size: int) -> Corpus:
        """These rows, in order."""
        dtype = torch.uint16 if vocab_size <= NARROW else torch.int32
        sizes = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
        ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int32) for row in rows]) if rows else np.empty(0, np.int32)
        spans = [(r, *span) for r, row in enumerate(rows) for span in row.spans]
        temperatures = [float("nan") if row.temperature is None else row.temperature for row in rows]
        return Corpus(
            torch.from_numpy(ids).to(dtype),
            torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)),
            torch.tensor(spans, dtype=torch.int32).view(-1, 3),
            torch.tensor(temperatures, dtype=torch.float32),
            tuple((row.source, row.part, row.slice) for row in rows),
        )

    @staticmethod
    def concat(parts: Sequence[Corpus]) -> Corpus:
        """All rows of all parts, in order. At least one part, of one width of ids."""
        starts = np.cumsum([0] + [part.num_tokens for part in parts])
        first_rows = np.cumsum([0] + [len(part) for part in parts])
        offsets = [part.row_offsets[:-1] + int(start) for part, start in zip(parts, starts[:-1], strict=True)]
        spans = []
        for part, first in zip(parts, first_rows[:-1], strict=True):
            spans.append(part.spans + torch.tensor([int(first), 0, 0], dtype=torch.int32))
        return Corpus(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([*offsets, torch.tensor([int(starts[-1])])]),
            torch.cat(spans),
            torch.cat([part.temperatures for part in parts]),
            tuple(label for part in parts for label in part.labels),
        )
