"""What fields of a request body mean to the engine."""

from __future__ import annotations

import pytest

from runtime.types import Switch
from serving.http.schemas import ChatRequest

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(("given", "capture"), [({}, "INHERIT"), ({"store": False}, "OFF"), ({"store": True}, "ON")])
def test_store_says_whether_the_turn_may_become_training_data(given: dict[str, bool], capture: str) -> None:
    assert ChatRequest.model_validate(BODY | given).session_options().capture is Switch[capture]
