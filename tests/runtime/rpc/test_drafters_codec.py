"""Messages and nouns of drafter versions: each survives the way there and back, with all its fields and with none."""

from __future__ import annotations

import pytest

from runtime.errors import InvalidRequest
from runtime.registry import DrafterEntry, LifecycleEvent, Origin, VersionState
from runtime.rpc import drafters_codec as codec
from runtime.rpc.v1 import drafters_pb2 as pb


@pytest.mark.parametrize("state", VersionState)
def test_entries(state: VersionState) -> None:
    full = DrafterEntry("v", state, "CODE: why", True, True, "p", 0, {"acceptance_length": 2.5}, 1_700_000_000.25)
    bare = DrafterEntry("v", state, "", False, False)
    for entry in (full, bare):
        assert codec.drafter_entry(pb.Drafter.FromString(codec.drafter_message(entry).SerializeToString())) == entry


@pytest.mark.parametrize("kind", ["validated", "rejected", "activated", "failed", "rolled_back"])
def test_events(kind: str) -> None:
    full = LifecycleEvent(kind, "v", "p", "CODE", "Why.", 0.5, 1_700_000_000.25)  # type: ignore[arg-type]
    bare = LifecycleEvent(kind, "v", at=1_700_000_000.25)  # type: ignore[arg-type]
    for event in (full, bare):
        assert codec.event(pb.LifecycleEvent.FromString(codec.event_message(event).SerializeToString())) == event


@pytest.mark.parametrize("origin", [Origin("p", 7, "target", {"acceptance_length": 2.5}, "by hand"), Origin()])
def test_origins(origin: Origin) -> None:
    assert codec.origin(codec.manifest_message(origin), "upload.manifest") == origin


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_no_manifest_can_hold_is_refused(value: float) -> None:
    message = pb.StageRequest.Manifest(metrics={"acceptance_length": 2.5, "loss": value})
    with pytest.raises(InvalidRequest, match="'loss'") as refused:
        codec.origin(message, "upload.manifest")
    assert refused.value.param == "upload.manifest.metrics"


@pytest.mark.parametrize("message", [pb.StageRequest(), pb.StageRequest(chunk=b""), pb.StageRequest(version="v")])
def test_what_is_no_chunk_is_refused(message: pb.StageRequest) -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.chunk_of(message)
    assert refused.value.param == "chunk"
