"""Store and ledger together against a model of a few lines: any order of calls, with time passing, crashes and restarts.

Held after every step: no committed row is lost, none counts twice, every row that may yet be read can be read, and the bytes
are exactly those of the rows that are there, never more than the budget.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import FeatureBudgetExceeded, LeaseLost
from runtime.features import (
    FeatureRow,
    FeatureStore,
    Ledger,
    LocalDirectoryStore,
    MemoryStore,
    SampleMeta,
    SampleRef,
    collect_garbage,
    make_room,
)
from runtime.hidden_states import HiddenStates

MAX_ATTEMPTS = 3
LEASE_S = 10.0
HOLD_S = 15.0
HELDOUT_ROWS = 2
RUNS = st.sampled_from(["r", "q"])
STATES = ("pending", "leased", "durable", "failed", "heldout")


def _row(num_tokens: int, seed: int) -> FeatureRow:
    hidden = HiddenStates(torch.full((num_tokens - 1, 24), float(seed)), torch.full((num_tokens - 1, 8), float(seed)))
    return FeatureRow(torch.arange(num_tokens), torch.ones(num_tokens, dtype=torch.bool), hidden)


class PlaneMachine(RuleBasedStateMachine):
    """`there`: the current reference of each sample in the store. `states`: each row that the ledger has, in order."""

    survives = True  # whether rows outlive the process

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        self.now = 1000.0
        self.num_puts = 0
        self.there: dict[str, SampleRef] = {}
        self.seeds: dict[int, int] = {}  # generation -> what was put
        self.held_at: dict[str, float] = {}
        self.dead: list[SampleRef] = []  # references of generations that are gone
        self.states: dict[str, str] = {}
        self.owners: dict[str, tuple[str, float]] = {}
        self.attempts: dict[str, int] = {}
        self.trained: dict[str, list[str]] = {"r": [], "q": []}
        self.struck: set[str] = set()  # out of the reservoir, for good
        self.budget = 3500
        self.store = self._open_store()
        self.ledger = self._open_ledger()

    def _open_store(self) -> FeatureStore:
        return LocalDirectoryStore(self.root, self.budget, clock=lambda: self.now)

    def _open_ledger(self) -> Ledger:
        exists = self.store.exists
        return Ledger(self.root / "l.sqlite", exists=exists, max_attempts=MAX_ATTEMPTS, clock=lambda: self.now)

    def _names(self, *states: str) -> list[str]:
        return [name for name, state in self.states.items() if state in states]

    def _vanish(self, name: str) -> None:
        self.dead.append(self.there.pop(name))
        del self.held_at[name]

    def _leave(self, name: str, state: str) -> None:
        self.owners.pop(name, None)
        self.states[name] = state

    # --- the producer ---

    def _put(self, name: str, num_tokens: int) -> SampleRef | None:
        self.num_puts += 1
        meta = SampleMeta(
            sample_id=name, run_id="server", source="s", target_fingerprint="f", aux_layer_ids=(1, 2, 3), created_at=self.now
        )
        used = sum(ref.num_bytes for ref in self.there.values())
        refused = 0
        try:
            ref = self.store.put(meta, _row(num_tokens, self.num_puts))
        except FeatureBudgetExceeded as error:
            refused = error.num_bytes
        if refused:
            assert used + refused > self.budget
            return None
        assert used + ref.num_bytes <= self.budget
        assert all(ref.generation > old.generation for old in [*self.dead, *self.there.values()] if old.sample_id == name)
        if name in self.there:
            self._vanish(name)
        self.there[name] = ref
        self.held_at[name] = self.now
        self.seeds[ref.generation] = self.num_puts
        return ref

    @rule(num_tokens=st.sampled_from([3, 10, 20]), is_heldout=st.booleans(), crashes=st.booleans())
    def produce(self, num_tokens: int, is_heldout: bool, crashes: bool) -> None:
        """A new row; a crash between store and ledger leaves its features to gc."""
        name = f"s{self.num_puts}"
        ref = self._put(name, num_tokens)
        if ref is None or crashes:
            return
        is_new, pushed_out = self.ledger.hold_out(ref, HELDOUT_ROWS) if is_heldout else (self.ledger.commit(ref, "train"), [])
        assert is_new
        self.attempts[name] = 0
        self.states[name] = "heldout" if is_heldout else "pending"
        for out in pushed_out:
            assert self.states.pop(out.sample_id) == "heldout"
            self.struck.add(out.sample_id)
            assert self.store.release(out) == (out.sample_id in self.there)
            if out.sample_id in self.there:
                self._vanish(out.sample_id)
        if is_heldout and name not in {each.sample_id for each in self.ledger.heldout()}:
            self.states[name] = "pending"
        assert len(self._names("heldout")) <= HELDOUT_ROWS

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def produce_again(self, data: st.DataObject) -> None:
        """A producer that does not know what it made: a new generation of a row that is there."""
        name = data.draw(st.sampled_from(self._names(*STATES)))
        ref = self._put(name, 3)
        if ref is not None:
            assert not self.ledger.commit(ref, "train")
            if self.states[name] == "failed":
                self.store.release(ref)
                self._vanish(name)

    @precondition(lambda self: self.struck)
    @rule(is_heldout=st.booleans(), data=st.data())
    def produce_what_was_struck_off(self, is_heldout: bool, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.struck)))
        ref = self._put(name, 3)
        if ref is not None:
            assert self.ledger.known([name]) == {name}
            if is_heldout:
                assert self.ledger.hold_out(ref, HELDOUT_ROWS) == (False, [])
            else:
                assert not self.ledger.commit(ref, "train")

    @precondition(lambda self: set(self.there) - set(self.states))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.there) - set(self.states))))
        self.store.abort(name)
        self._vanish(name)

    # --- the trainer ---

    @rule(run=RUNS, limit=st.integers(1, 4))
    def lease(self, run: str, limit: int) -> None:
        for name, (_, expires_at) in list(self.owners.items()):
            if expires_at <= self.now:
                self._leave(name, "failed" if self.attempts[name] >= MAX_ATTEMPTS else "pending")
        expected = self._names("pending")[:limit]
        leased = self.ledger.lease(run, limit, LEASE_S)
        assert leased == [self.there[name] for name in expected]
        for name in expected:
            self.states[name] = "leased"
            self.owners[name] = (run, self.now + LEASE_S)
            self.attempts[name] += 1

    def _leased(self, run: str) -> list[str]:
        return [name for name, (owner, _) in self.owners.items() if owner == run]

    @rule(run=RUNS)
    def heartbeat(self, run: str) -> None:
        assert self.ledger.heartbeat(run, LEASE_S) == len(self._leased(run))
        self.owners.update(dict.fromkeys(self._leased(run), (run, self.now + LEASE_S)))

    @rule(run=RUNS, data=st.data())
    def checkpoint(self, run: str, data: st.DataObject) -> None:
        mine = self._leased(run)
        names = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.ledger.record_checkpoint(run, "path", len(self.trained[run]), names)
        for name in names:
            self._leave(name, "durable")
        self.trained[run] += names

    @rule(run=RUNS, data=st.data())
    def checkpoint_of_lost_leases(self, run: str, data: st.DataObject) -> None:
        others = sorted(set(self.states) - set(self._leased(run)))
        if others:
            with pytest.raises(LeaseLost):
                self.ledger.record_checkpoint(run, "never", 99, [*self._leased(run), data.draw(st.sampled_from(others))])

    @precondition(lambda self: self.owners)
    @rule(retryable=st.booleans(), data=st.data())
    def fail(self, retryable: bool, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.owners)))
        owner, _ = self.owners[name]
        strangers = [run for run in ("r", "q") if run != owner]
        assert not any(self.ledger.fail(run, name, "reason", retryable) for run in strangers)
        assert self.ledger.fail(owner, name, "reason", retryable)
        self._leave(name, "pending" if retryable and self.attempts[name] < MAX_ATTEMPTS else "failed")

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Anybody may look at any row that is there; it is held anew then."""
        name = data.draw(st.sampled_from(sorted(self.there)))
        row, _ = self.store.get(self.there[name])
        assert row.hidden.aux[0, 0] == self.seeds[self.there[name].generation]
        self.held_at[name] = self.now

    @precondition(lambda self: self._names("durable"))
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        """Trained and durable: its features go, once."""
        name = data.draw(st.sampled_from(self._names("durable")))
        ref = self.there.get(name)
        if ref is not None:
            _, lease = self.store.get(ref)
            assert self.store.release(lease)
            assert not self.store.release(lease)
            self._vanish(name)

    # --- keeping house, time, restarts ---

    @rule(num_bytes=st.sampled_from([500, 2000, 5000]))
    def make_room(self, num_bytes: int) -> None:
        freed = make_room(self.store, self.ledger, num_bytes)
        gone = [name for name, ref in self.there.items() if not self.store.exists(ref)]
        assert all(self.states.get(name) == "durable" for name in gone)
        assert freed == sum(self.there[name].num_bytes for name in gone)
        for name in gone:
            self._vanish(name)

    @rule()
    def collect_garbage(self) -> None:
        collect_garbage(self.store, self.ledger, HOLD_S)
        needed = {ref.sample_id for ref in self.ledger.trainable()} | {ref.sample_id for ref in self.ledger.heldout()}
        for name in set(self.there) - needed:
            if self.held_at[name] < self.now - HOLD_S:
                assert not self.store.exists(self.there[name])
                self._vanish(name)

    @rule(age=st.sampled_from([5.0, 30.0]))
    def retention(self, age: float) -> None:
        before = self.now - age
        old = [name for name in self.there if self.there[name].created_at < before]
        expired = {ref.sample_id for ref in self.ledger.expire(before)}
        assert expired >= {name for name in old if self.states.get(name) in ("pending", "durable", "heldout")}
        assert all(self.states[name] in ("pending", "durable", "heldout") for name in expired)
        for name in expired:
            if name in self.there:  # what was consumed stays on the books until now
                assert self.store.release(self.there[name])
                self._vanish(name)
            if self.states[name] == "heldout":
                del self.states[name]
                self.struck.add(name)
            elif self.states[name] == "pending":
                self.states[name] = "failed"

    @rule(seconds=st.sampled_from([4.0, 11.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(run=RUNS)
    def trainer_restarts(self, run: str) -> None:
        mine = self._leased(run)
        assert self.ledger.recover(run) == len(mine)
        for name in mine:
            self._leave(name, "pending")
            self.attempts[name] -= 1

    @rule()
    def server_restarts(self) -> None:
        self.store.close()
        self.ledger.close()
        self.store = self._open_store()
        self.ledger = self._open_ledger()
        if not self.survives:
            self._make_again()

    def _make_again(self) -> None:
        """Rows in memory are gone; a producer that asks the ledger makes again just those that are needed."""
        for name in list(self.there):
            self._vanish(name)
        lost = set(self._names("pending", "heldout"))
        assert self.ledger.known(list(self.states)) == set(self.states) - lost
        for name in [*lost, *self.owners]:
            ref = self._put(name, 3)
            assert ref is not None
            assert not self.ledger.commit(ref, "train")

    # --- what always holds ---

    @invariant()
    def bytes_are_exact(self) -> None:
        health = self.store.health()
        used = sum(ref.num_bytes for ref in self.there.values())
        assert (health.used_bytes, health.num_rows) == (used, len(self.there))
        assert used <= self.budget

    @invariant()
    def no_row_is_lost(self) -> None:
        assert self.ledger.status() == {state: len(self._names(state)) for state in STATES}
        for name in self._names("pending", "leased", "heldout"):
            ref = self.there[name]
            assert self.store.exists(ref)

    @invariant()
    def every_row_is_what_was_put(self) -> None:
        for name in self._names("pending", "leased", "heldout")[:3]:
            ref = self.there[name]
            row, _ = self.store.get(ref)
            self.held_at[name] = self.now
            assert row.hidden.last[0, 0] == self.seeds[ref.generation]

    @invariant()
    def dead_references_stay_dead(self) -> None:
        for ref in self.dead[-3:]:
            with pytest.raises(KeyError):
                self.store.get(ref)
            assert not self.store.exists(ref)
            assert not self.store.release(ref)

    @invariant()
    def each_row_counts_once(self) -> None:
        both = self.trained["r"] + self.trained["q"]
        assert len(set(both)) == len(both)
        for run, names in self.trained.items():
            assert self.ledger.consumption(run) == dict.fromkeys(names, 1)

    @invariant()
    def what_was_held_out_is_never_trained_on(self) -> None:
        assert not self.struck & set(self.states)

    def teardown(self) -> None:
        self.store.close()
        self.ledger.close()
        self.directory.cleanup()


class MemoryPlaneMachine(PlaneMachine):
    survives = False

    def _open_store(self) -> FeatureStore:
        return MemoryStore(self.budget, clock=lambda: self.now)


RELAXED = settings(max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestDirectoryPlane = PlaneMachine.TestCase
TestDirectoryPlane.settings = RELAXED
TestMemoryPlane = MemoryPlaneMachine.TestCase
TestMemoryPlane.settings = RELAXED
