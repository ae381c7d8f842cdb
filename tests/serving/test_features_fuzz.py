"""Any request to the FeatureService from a stranger: only documented statuses come back, a refusal changes nothing, and whatever
is answered, rows in the hands of another run's holder stay there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from runtime.features.refs import SampleRef
from runtime.rpc import features_codec as codec
from runtime.rpc.features_client import FeatureClient
from runtime.rpc.v1 import features_pb2

from .conftest import at_home, make_config, start
from .test_features_service import Plane
from .test_fuzz import SPOILT, check_documented, fuzz, messages

METHODS = list(features_pb2.DESCRIPTOR.services_by_name["FeatureService"].methods)
RUN = "run"


class Besieged:
    """A server whose rows a trainer has in hand, in part, and a stranger's connection to it."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.refs = [plane.put(f"row{n}") for n in range(6)] + [plane.put("held", "heldout")]
        self.trainer: FeatureClient = plane.client()
        self.trainer.recover(RUN)
        self.trainer.lease(RUN, 3, 3600.0)
        self.trainer.record_checkpoint(RUN, "one", 1, ["row0"])
        self.channel = grpc.insecure_channel(plane.running.ready.grpc)

    def close(self) -> None:
        self.channel.close()
        self.plane.close()

    def all(self) -> Any:
        ledger = self.plane.ledger
        return ledger.status(), ledger.needed(), ledger.failures(), ledger.backlog()

    def trainers(self) -> Any:
        ledger = self.plane.ledger
        return ledger.leased(RUN), ledger.durable(RUN, 9), ledger.consumption(RUN), ledger.latest_checkpoint(RUN)

    def aimed(self, draws: st.DataObject, message: Message) -> Message:
        """The same, about rows and the run that are really here, more often than not."""
        for name in message.DESCRIPTOR.fields_by_name:
            is_aimed = draws.draw(st.sampled_from(range(4))) < 3
            ref: SampleRef = draws.draw(st.sampled_from(self.refs))
            if name == "holder" and is_aimed:
                setattr(message, name, "stranger")
            elif name == "run_id" and is_aimed:
                setattr(message, name, draws.draw(st.sampled_from([RUN, f"{RUN}/1", "other"])))
            elif name == "sample_id" and is_aimed:
                setattr(message, name, ref.sample_id)
            elif name == "sample_ids" and is_aimed:
                getattr(message, name).append(ref.sample_id)
            elif name == "sample" and is_aimed:
                getattr(message, name).CopyFrom(codec.sample_message(ref))
            elif name == "timeout_s" and is_aimed:
                setattr(message, name, 60.0)
        return message

    def send(self, method: MethodDescriptor, data: bytes) -> grpc.RpcError | None:
        name = f"/{method.containing_service.full_name}/{method.name}"
        kind = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        reply = kind(name, response_deserializer=GetMessageClass(method.output_type).FromString)
        try:
            answer = reply(data, timeout=60)
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as error:
            return error
        return None


@pytest.fixture(scope="module")
def besieged(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    with at_home(home):
        running = start(make_config(tmp_path_factory.mktemp("besieged") / "state"))
    besieged = Besieged(Plane(running))
    yield besieged
    besieged.close()
    running.stop()
    running.ended.result(timeout=30)


@fuzz(METHODS, 40)
def test_a_stranger_gets_documented_answers_and_no_row_of_another_run(
    besieged: Besieged, method: MethodDescriptor, draws: st.DataObject
) -> None:
    message = besieged.aimed(draws, draws.draw(messages(method.input_type)))
    if method.name == "Recover" and getattr(message, "run_id", "") == RUN:
        return  # who may call it at all takes the run over
    data = message.SerializeToString()
    if draws.draw(st.sampled_from(range(6))) == 0:
        data = draws.draw(SPOILT)(data)
    everything, trainers = besieged.all(), besieged.trainers()
    error = besieged.send(method, data)
    if error is not None:
        check_documented(error, "F")
        assert besieged.all() == everything
    assert besieged.trainers() == trainers
    assert besieged.plane.running.parts.engine.is_running
