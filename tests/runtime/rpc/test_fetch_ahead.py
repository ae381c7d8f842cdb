"""Rows fetched ahead: in order, a few at a time, within their bytes, and nothing is lost where it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from runtime.features.refs import SampleRef
from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates
from runtime.rpc.fetch_ahead import FetchAhead

SOON_S = 20.0


def ref(name: str, num_bytes: int = 100) -> SampleRef:
    return SampleRef(
        sample_id=name,
        run_id="server",
        source="s",
        target_fingerprint="fp",
        aux_layer_ids=(1, 2, 3),
        uri=f"rows/{name}",
        generation=1,
        features={},
        num_tokens=2,
        num_bytes=num_bytes,
    )


ROW = FeatureRow(torch.arange(2), torch.ones(2, dtype=torch.bool), HiddenStates(torch.zeros(1, 6), torch.zeros(1, 2)))


class Far:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = threading.Semaphore(0)
        self.heard = threading.Condition()

    def fetch(self, wanted: SampleRef) -> FeatureRow | None:
        with self.heard:
            self.asked.append(wanted.sample_id)
            self.heard.notify_all()
        assert self.answers.acquire(timeout=SOON_S)
        return None if wanted.sample_id == "bad" else ROW

    def wait_for(self, names: str) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: "".join(sorted(self.asked)) == names, SOON_S), self.asked


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far()
    yield far
    far.answers.release(1000)


def test_a_few_are_fetched_at_once_and_the_next_when_one_came(far: Far) -> None:
    ahead = FetchAhead(far.fetch, num_at_once=2)
    ahead.begin([ref(name) for name in "abc"])
    far.wait_for("ab")
    far.answers.release()
    far.wait_for("abc")
    far.answers.release(2)
    assert [ahead.take(ref(name)) for name in "abc"] == [ROW] * 3
    ahead.close()


def test_what_nobody_took_fits_into_its_bytes_but_one_row_always_goes(far: Far) -> None:
    ahead = FetchAhead(far.fetch, num_at_once=4, max_bytes=250)
    far.answers.release(9)
    ahead.begin([ref("a", 900), ref("b"), ref("c"), ref("d")])
    far.wait_for("a")
    assert ahead.take(ref("a", 900)) is ROW
    far.wait_for("abc")
    ahead.drop(["b"])
    far.wait_for("abcd")
    ahead.close()


def test_what_was_not_begun_or_did_not_come_is_the_takers_to_fetch(far: Far) -> None:
    ahead = FetchAhead(far.fetch, num_at_once=1, max_bytes=100)
    ahead.begin([ref("bad"), ref("late"), ref("last")])
    assert ahead.take(ref("late")) is None
    assert ahead.take(ref("never")) is None
    far.answers.release(2)
    assert ahead.take(ref("bad")) is None
    assert ahead.take(ref("last")) is ROW
    assert far.asked == ["bad", "last"], "what was fetched by its taker is not fetched again"
    ahead.close()
