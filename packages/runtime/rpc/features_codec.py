"""Between the messages of features.proto and the feature plane's own nouns, in both directions, tensors included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from types import MappingProxyType

import safetensors
import safetensors.torch
from google.protobuf.timestamp_pb2 import Timestamp

from runtime.errors import FeatureError, InvalidRequest
from runtime.features.ledger import Checkpoint
from runtime.features.refs import FeatureSpec, SampleRef
from runtime.features.row import FeatureRow, specs_of
from runtime.rpc.v1 import features_pb2 as pb
from runtime.tensors import to_bytes

CHUNK_BYTES = 2**20
MAX_ROWS_PER_CALL = 4096  # of Lease
_PLAIN = (
    "sample_id",
    "generation",
    "run_id",
    "source",
    "uri",
    "target_fingerprint",
    "drafter_version",
    "tokenizer_hash",
    "vocabulary_hash",
    "created_at",
    "num_tokens",
    "num_bytes",
)


def sample_message(ref: SampleRef) -> pb.Sample:
    return pb.Sample(
        **{name: getattr(ref, name) for name in _PLAIN},
        aux_layer_ids=ref.aux_layer_ids,
        features={name: pb.Sample.Tensor(shape=spec.shape, dtype=spec.dtype) for name, spec in ref.features.items()},
        labels=dict(ref.labels),
    )


def sample_ref(message: pb.Sample) -> SampleRef:
    """InvalidRequest, naming the field, for what no row has."""
    if len(message.aux_layer_ids) != 3:
        raise InvalidRequest("sample.aux_layer_ids", f"aux_layer_ids must be three, got {list(message.aux_layer_ids)}.")
    low, mid, high = message.aux_layer_ids
    features = {name: FeatureSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in message.features.items()}
    try:
        return SampleRef(
            **{name: getattr(message, name) for name in _PLAIN},
            aux_layer_ids=(low, mid, high),
            features=MappingProxyType(features),
            labels=MappingProxyType(dict(message.labels)),
        )
    except FeatureError as error:
        raise InvalidRequest("sample", str(error)) from error


def checkpoint_message(checkpoint: Checkpoint) -> pb.Checkpoint:
    created_at = Timestamp()
    created_at.FromDatetime(datetime.fromtimestamp(checkpoint.created_at, UTC))
    return pb.Checkpoint(
        run_id=checkpoint.run_id,
        path=checkpoint.path,
        step=checkpoint.step,
        metrics=dict(checkpoint.metrics),
        created_at=created_at,
    )


def checkpoint(message: pb.Checkpoint) -> Checkpoint:
    created_at = message.created_at.ToDatetime(UTC).timestamp()
    return Checkpoint(message.run_id, message.path, message.step, dict(message.metrics), created_at)


def chunks(row: FeatureRow) -> Iterator[bytes]:
    """The row's tensors, as they are stored, in pieces that fit a message."""
    data = to_bytes(row.tensors(row.hidden.aux.dtype))
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


def row(ref: SampleRef, pieces: Iterable[bytes]) -> FeatureRow:
    """The inverse of `chunks`. FeatureError if something else came."""
    try:
        tensors = safetensors.torch.load(b"".join(pieces))
    except safetensors.SafetensorError as error:
        raise FeatureError(f"What came for row {ref.sample_id} is no safetensors file ({error}). Fail this row.") from error
    if specs_of(tensors) != dict(ref.features):
        raise FeatureError(f"Row {ref.sample_id} came with other tensors than its reference says: {specs_of(tensors)}.")
    return FeatureRow.from_tensors(tensors, ref.labels)
