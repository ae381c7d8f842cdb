"""Rows of tokens into a feature plane: the target reads them, and what it saw is stored as mode=offline reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.backends.transformers.packed import PackedForward
from runtime.features.ledger import Ledger, Split
from runtime.features.plane import make_room
from runtime.features.refs import SampleMeta
from runtime.features.row import FeatureRow
from runtime.features.store import FeatureStore
from training.data.prefill import Prefill
from training.data.tokens import Corpus, TokenRow, sample_id_of
from training.learning.target_weights import TargetWeights


class FeatureSink:
    def __init__(
        self,
        forward: PackedForward,
        store: FeatureStore,
        ledger: Ledger,
        target: TargetWeights,
        *,
        run_id: str,
        is_heldout: Callable[[str], bool],  # whether rows of this source are for the gate
        max_batch_tokens: int,
    ) -> None:
        self._forward = forward
        self._store = store
        self._ledger = ledger
        self._target = target
        self._run_id = run_id
        self._is_heldout = is_heldout
        self._max_batch_tokens = max_batch_tokens
        self._rows: list[TokenRow] = []  # not read yet
        self._num_tokens = 0

    def is_known(self, name: str) -> bool:
        return bool(self._ledger.known([sample_id_of(name)]))

    def add(self, rows: Sequence[TokenRow]) -> None:
        """Take these rows; they are stored once enough for a forward are there. FeatureBudgetExceeded when there is no room."""
        self._rows += rows
        self._num_tokens += sum(len(row.token_ids) for row in rows)
        if self._num_tokens >= self._max_batch_tokens:
            self.flush()

    def flush(self) -> None:
        """Everything is stored when this returns. The last row first: whoever goes on looks for the first one of a dialogue, and
        finds it only if the others are there too."""
        if not self._rows:
            return
        corpus = Corpus.of(self._rows, self._target.vocab_size)
        read = Prefill(self._forward, corpus, self._max_batch_tokens).rows(range(len(corpus)))
        while self._rows:
            self._store_row(self._rows[-1], read.pop().features)
            self._rows.pop()
        self._num_tokens = 0

    def _store_row(self, row: TokenRow, features: FeatureRow) -> None:
        meta = SampleMeta(
            sample_id=sample_id_of(row.name),
            run_id=self._run_id,
            source=f"prompt/{row.source}",
            target_fingerprint=self._target.fingerprint,
            aux_layer_ids=self._target.aux_layer_ids,
        )
        make_room(self._store, self._ledger, sum(each.nbytes for each in features.tensors(self._store.dtype).values()))
        split: Split = "heldout" if self._is_heldout(row.source) else "train"
        self._ledger.commit(self._store.put(meta, features), split)
