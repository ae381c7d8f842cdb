"""References and rows through their messages: nothing is lost, and what no row has is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from runtime.errors import FeatureError, InvalidRequest
from runtime.features.ledger import Checkpoint
from runtime.features.refs import FeatureSpec, SampleRef
from runtime.features.row import FeatureRow, specs_of
from runtime.hidden_states import HiddenStates
from runtime.rpc import features_codec as codec
from runtime.rpc.v1 import features_pb2 as pb


def make_ref(**changes: object) -> SampleRef:
    """Every field differs from its default."""
    values = {
        "sample_id": "a-1",
        "run_id": "server",
        "source": "session/s",
        "target_fingerprint": "fp",
        "aux_layer_ids": (1, 14, 26),
        "drafter_version": "v7",
        "tokenizer_hash": "t",
        "vocabulary_hash": "v",
        "created_at": 1234.5678,
        "uri": "rows/a",
        "generation": 3,
        "features": {"aux": FeatureSpec((3, 24), "bfloat16"), "generated": FeatureSpec((4,), "bool")},
        "num_tokens": 4,
        "num_bytes": 100,
        "labels": {"kind": "news"},
    }
    return SampleRef(**(values | changes))


def test_a_reference_comes_through_as_it_is() -> None:
    ref = make_ref()
    assert {item.name for item in dataclasses.fields(ref)} == {field.name for field in pb.Sample.DESCRIPTOR.fields}
    message = pb.Sample.FromString(codec.sample_message(ref).SerializeToString())
    assert codec.sample_ref(message) == ref


def test_a_message_that_is_no_reference_is_refused_by_name() -> None:
    message = codec.sample_message(make_ref())
    del message.aux_layer_ids[:]
    with pytest.raises(InvalidRequest) as refused:
        codec.sample_ref(message)
    assert refused.value.param == "sample.aux_layer_ids"
    message = codec.sample_message(make_ref())
    message.sample_id = "../escape"
    with pytest.raises(InvalidRequest, match="sample_id is"):
        codec.sample_ref(message)


def test_a_checkpoint_comes_through() -> None:
    checkpoint = Checkpoint("run", "step-7", 7, {"acceptance_length": 2.5}, 1_750_000_000.25)
    message = pb.Checkpoint.FromString(codec.checkpoint_message(checkpoint).SerializeToString())
    assert codec.checkpoint(message) == checkpoint


def make_row() -> FeatureRow:
    aux, last = torch.randn(3, 24).bfloat16(), torch.randn(3, 8).bfloat16()
    return FeatureRow(torch.arange(4), torch.tensor([False, False, True, True]), HiddenStates(aux, last))


def test_a_row_comes_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CHUNK_BYTES", 100)
    row = make_row()
    ref = make_ref(features=specs_of(row.tensors(torch.bfloat16)))
    pieces = list(codec.chunks(row))
    assert len(pieces) > 3
    assert max(map(len, pieces)) == 100
    back = codec.row(ref, pieces)
    assert torch.equal(back.hidden.aux, row.hidden.aux)
    assert torch.equal(back.hidden.last, row.hidden.last)
    assert torch.equal(back.token_ids, row.token_ids)
    assert torch.equal(back.generated, row.generated)
    assert back.labels == {"kind": "news"}


def test_other_bytes_than_the_reference_says_are_refused() -> None:
    row = make_row()
    ref = make_ref(features=specs_of(row.tensors(torch.bfloat16)))
    with pytest.raises(FeatureError, match="no safetensors file"):
        codec.row(ref, [*list(codec.chunks(row))[:-1], b""])
    with pytest.raises(FeatureError, match="other tensors"):
        codec.row(make_ref(), codec.chunks(row))
