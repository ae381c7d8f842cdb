"""The ledger against a model of a few lines: any order of calls by two runs, with time passing and restarts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import LeaseLost
from runtime.features import FeatureSpec, Ledger, SampleRef

MAX_ATTEMPTS = 3
LEASE_S = 10.0
RUNS = st.sampled_from(["r", "q"])


def _ref(sample_id: str) -> SampleRef:
    return SampleRef(
        sample_id=sample_id,
        run_id="server",
        source="s",
        target_fingerprint="f",
        aux_layer_ids=(1, 2, 3),
        uri="u",
        generation=1,
        features={"aux": FeatureSpec((1,), "int64")},
        num_tokens=2,
        num_bytes=100,
    )


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.states: dict[str, str] = {}  # in order of commit
        self.owners: dict[str, tuple[str, float]] = {}  # leased rows: run, expiry
        self.attempts: dict[str, int] = {}
        self.trained: dict[str, list[str]] = {"r": [], "q": []}  # what each run's surviving weights have seen
        self.steps = {"r": 0, "q": 0}
        self.ledger = self._open()

    def _open(self) -> Ledger:
        return Ledger(Path(self.directory.name) / "l.sqlite", max_attempts=MAX_ATTEMPTS, clock=lambda: self.now)

    def _leased(self, run: str) -> list[str]:
        return [name for name, (owner, _) in self.owners.items() if owner == run]

    def _leave(self, name: str, state: str) -> None:
        self.owners.pop(name, None)
        self.states[name] = state

    @rule(heldout=st.booleans())
    def commit(self, heldout: bool) -> None:
        name = f"s{len(self.states)}"
        assert self.ledger.commit(_ref(name), "heldout" if heldout else "train")
        self.states[name] = "heldout" if heldout else "pending"
        self.attempts[name] = 0

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        assert not self.ledger.commit(_ref(data.draw(st.sampled_from(list(self.states)))), "train")

    @rule(run=RUNS, limit=st.integers(1, 4))
    def lease(self, run: str, limit: int) -> None:
        for name, (_, expires_at) in list(self.owners.items()):
            if expires_at <= self.now:
                self._leave(name, "failed" if self.attempts[name] >= MAX_ATTEMPTS else "pending")
        expected = [name for name, state in self.states.items() if state == "pending"][:limit]
        assert [ref.sample_id for ref in self.ledger.lease(run, limit, LEASE_S)] == expected
        for name in expected:
            self.states[name] = "leased"
            self.owners[name] = (run, self.now + LEASE_S)
            self.attempts[name] += 1

    @rule(seconds=st.sampled_from([4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(run=RUNS)
    def heartbeat(self, run: str) -> None:
        assert self.ledger.heartbeat(run, LEASE_S) == len(self._leased(run))
        self.owners.update(dict.fromkeys(self._leased(run), (run, self.now + LEASE_S)))

    @rule(run=RUNS, data=st.data())
    def checkpoint(self, run: str, data: st.DataObject) -> None:
        mine = self._leased(run)
        names = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.steps[run] += 1
        self.ledger.record_checkpoint(run, f"{run}{self.steps[run]}", self.steps[run], names)
        for name in names:
            self._leave(name, "durable")
        self.trained[run] += names

    @precondition(lambda self: self.states)
    @rule(run=RUNS, data=st.data())
    def checkpoint_of_rows_that_are_not_its_own(self, run: str, data: st.DataObject) -> None:
        mine = self._leased(run)
        others = [name for name in self.states if name not in mine]
        if not others:
            return
        stray = data.draw(st.sampled_from(others))
        with pytest.raises(LeaseLost) as raised:
            self.ledger.record_checkpoint(run, "never", 99, [*mine, stray])
        assert raised.value.sample_ids == [stray]

    @rule(run=RUNS)
    def restart(self, run: str) -> None:
        mine = self._leased(run)
        assert self.ledger.recover(run) == len(mine)
        for name in mine:
            self._leave(name, "pending")
            self.attempts[name] -= 1

    @precondition(lambda self: self.owners)
    @rule(retryable=st.booleans(), data=st.data())
    def fail(self, retryable: bool, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.owners)))
        owner, _ = self.owners[name]
        strangers = [run for run in ("r", "q") if run != owner]
        assert not any(self.ledger.fail(run, name, "reason", retryable) for run in strangers)
        assert self.ledger.fail(owner, name, "reason", retryable)
        self._leave(name, "pending" if retryable and self.attempts[name] < MAX_ATTEMPTS else "failed")

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = self._open()

    @invariant()
    def states_agree(self) -> None:
        states = list(self.states.values())
        assert self.ledger.status() == {
            state: states.count(state) for state in ("pending", "leased", "durable", "failed", "heldout")
        }

    @invariant()
    def each_row_counts_once(self) -> None:
        assert len(set(self.trained["r"] + self.trained["q"])) == len(self.trained["r"] + self.trained["q"])
        for run, names in self.trained.items():
            assert self.ledger.consumption(run) == dict.fromkeys(names, 1)
            assert {ref.sample_id for ref in self.ledger.durable(run, 999)} == set(names)
            latest = self.ledger.latest_checkpoint(run)
            assert (latest.step if latest else 0) == self.steps[run]

    @invariant()
    def held_out_rows_stay(self) -> None:
        newest_first = [name for name, state in self.states.items() if state == "heldout"][::-1]
        assert [ref.sample_id for ref in self.ledger.heldout(999)] == newest_first

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
