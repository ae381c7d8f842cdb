"""Token rows with their hidden states: the frozen target reads them in this process, right before they are trained.

Nothing is stored, and on a CUDA device the states never leave it. For the gate, `HeldoutRows` is a store whose rows are
computed when they are asked for, and `CorpusLedger` the ledger that names them. Knows no order of rows and no optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch

from runtime.backends.transformers.packed import PackedForward
from runtime.errors import FeatureNotFound
from runtime.features.ledger import Ledger
from runtime.features.refs import SLICE_LABEL, FeatureSpec, SampleRef, unit_hash
from runtime.features.row import FeatureRow
from runtime.features.sampling import labelled
from runtime.features.store import Lease
from runtime.types import SamplingParams
from training.data.batches import TrainingRow, cut_by_tokens
from training.data.tokens import Corpus, sample_id_of
from training.learning.target_weights import TargetWeights


class Prefill:
    def __init__(self, forward: PackedForward, corpus: Corpus, max_tokens: int) -> None:
        """max_tokens: of one forward; a single longer row is one by itself."""
        self._forward = forward
        self.corpus = corpus
        self._max_tokens = max_tokens

    @property
    def device(self) -> torch.device:
        return self._forward.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the states."""
        return self._forward.dtype

    def rows(self, indices: Sequence[int]) -> list[TrainingRow]:
        """These rows of the corpus, in order; ids and masks on the CPU, states on the target's device."""
        rows: list[TrainingRow] = []
        for group in cut_by_tokens(indices, self.corpus.lengths_of(indices), self._max_tokens):
            rows += self._read(group)
        return rows

    def _read(self, indices: Sequence[int]) -> list[TrainingRow]:
        ids = [self.corpus.token_ids_of(row) for row in indices]
        lengths = [len(each) - 1 for each in ids]  # no state is needed of the last token
        hidden = self._forward(torch.cat([each[:-1] for each in ids]), lengths)
        rows: list[TrainingRow] = []
        start = 0
        for row, token_ids, length in zip(indices, ids, lengths, strict=True):
            states = hidden[start : start + length]
            features = FeatureRow(token_ids, self.corpus.generated_of(row), states, self.labels_of(row))
            rows.append(TrainingRow(sample_id_of(self.corpus.name(row)), features))
            start += length
        return rows

    def labels_of(self, row: int) -> Mapping[str, str]:
        """As rows of served traffic have them."""
        temperature = float(self.corpus.temperatures[row])
        return _labels_of(self.corpus.labels[row][2], round(temperature, 4) if temperature > 0 else 0.0)  # NaN is not


@lru_cache(maxsize=4096)
def _labels_of(slice_name: str, temperature: float) -> Mapping[str, str]:
    labels = {SLICE_LABEL: slice_name} if slice_name else {}
    return MappingProxyType(dict(labelled(labels, SamplingParams(temperature=temperature)) if temperature > 0 else labels))


class HeldoutRows:
    """Implements `Rows`."""

    def __init__(self, prefill: Prefill, rows: Sequence[int]) -> None:
        self._prefill = prefill
        self._rows = {sample_id_of(prefill.corpus.name(row)): row for row in rows}

    def get(self, ref: SampleRef) -> tuple[FeatureRow, Lease]:
        if ref.sample_id not in self._rows:
            raise FeatureNotFound(f"Row {ref.sample_id} is none of the held-out rows of this corpus.")
        [row] = self._prefill.rows([self._rows[ref.sample_id]])
        return row.features, Lease(ref.sample_id, ref.generation, ref.uri)

    def refs(self, run_id: str, target: TargetWeights) -> list[SampleRef]:
        """Of all of them, in an order of chance, so that the first few are of every kind."""
        names = sorted(self._rows, key=lambda name: unit_hash("heldout order", name))
        return [self._ref(name, run_id, target) for name in names]

    def _ref(self, name: str, run_id: str, target: TargetWeights) -> SampleRef:
        row, corpus = self._rows[name], self._prefill.corpus
        length, width, dtype = int(corpus.lengths[row]), target.hidden_size, str(self._prefill.dtype).removeprefix("torch.")
        return SampleRef(
            sample_id=name,
            run_id=run_id,
            source=f"corpus/{corpus.labels[row][0]}",
            target_fingerprint=target.fingerprint,
            aux_layer_ids=target.aux_layer_ids,
            created_at=0.0,
            uri=f"corpus:{row}",
            generation=1,
            features={
                "token_ids": FeatureSpec((length,), "int64"),
                "generated": FeatureSpec((length,), "bool"),
                "aux": FeatureSpec((length - 1, 3 * width), dtype),
                "last": FeatureSpec((length - 1, width), dtype),
            },
            num_tokens=length,
            num_bytes=0,
            labels=self._prefill.labels_of(row),
        )


class CorpusLedger(Ledger):
    """The checkpoints of a run over a corpus; its held-out rows are the corpus's, and nothing is leased."""

    def __init__(self, path: Path, heldout: Sequence[SampleRef]) -> None:
        super().__init__(path, exists=lambda ref: False)
        self._heldout = list(heldout)

    def heldout(self, limit: int = -1) -> list[SampleRef]:
        return self._heldout if limit < 0 else self._heldout[:limit]
