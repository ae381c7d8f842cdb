"""The tap: what it keeps is exact, what it does not keep is counted, and it never makes the engine wait or fall."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.backends.base import TargetInfo
from runtime.config import CaptureConfig
from runtime.features import (
    FeatureTap,
    Tap,
)
from runtime.hidden_states import HiddenStates
from runtime.types import Switch

from .tapping import CONFIG, Gate, MakeTurn, Plane, nonzero, rows_of, tapping, wait_until

# --- what is kept ---


def test_a_turn_becomes_a_row(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn(num_tokens=40, num_generated=20)
    with tapping(plane, target_info, tokenizer_hash="t", vocabulary_hash="u") as tap:
        protocol: Tap = tap
        assert protocol.offer(turn) is True
    store, ledger = plane
    [ref] = ledger.lease("reader", 9, 60)
    row, hidden = store.get(ref)[0], HiddenStates.concat(turn.hidden)
    assert row.token_ids.tolist() == list(turn.token_ids)
    assert row.generated.tolist() == list(turn.generated)
    assert torch.equal(row.hidden.aux, hidden.aux.bfloat16())
    assert torch.equal(row.hidden.last, hidden.last.bfloat16())
    assert (ref.run_id, ref.source, ref.target_fingerprint) == ("server", "session/s", "fp")
    assert (ref.aux_layer_ids, ref.drafter_version, ref.labels) == ((1, 2, 3), "v0", {"kind": "test"})
    assert (ref.tokenizer_hash, ref.vocabulary_hash) == ("t", "u")
    assert nonzero(tap) == {"offered": 1, "captured": 1}


def test_a_state_of_the_last_token_is_left_out(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    """The engine may have run the last token already: one more position than the row takes."""
    turn = make_turn(num_tokens=40)
    extra = HiddenStates(torch.full((1, 24), 7.0), torch.full((1, 8), 7.0))
    with tapping(plane, target_info) as tap:
        tap.offer(replace(turn, hidden=(*turn.hidden, extra)))
    [row] = rows_of(plane)
    assert torch.equal(row.hidden.aux, HiddenStates.concat(turn.hidden).aux.bfloat16())


def test_a_long_history_keeps_its_end(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn(num_tokens=100, num_generated=20)
    with tapping(plane, target_info, replace(CONFIG, max_row_tokens=32)) as tap:
        tap.offer(turn)
    [row] = rows_of(plane)
    assert row.token_ids.tolist() == list(turn.token_ids[-32:])
    assert row.generated.sum() == 20
    assert torch.equal(row.hidden.last, HiddenStates.concat(turn.hidden).last[-31:].bfloat16())
    assert nonzero(tap) == {"offered": 1, "captured": 1, "truncated": 1}


def test_a_long_answer_is_cut_into_aligned_rows(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn(num_tokens=100, num_generated=90)
    hidden = HiddenStates.concat(turn.hidden)
    with tapping(plane, target_info, replace(CONFIG, max_row_tokens=32)) as tap:
        tap.offer(turn)
    rows = rows_of(plane)
    taught: list[int] = []
    for row in rows:
        start = turn.token_ids.index(int(row.token_ids[0]))
        assert row.token_ids.tolist() == list(turn.token_ids[start : start + 32])
        assert torch.equal(row.hidden.aux, hidden.aux[start : start + 31].bfloat16())
        taught += row.token_ids[2:][row.generated[1:-1] & row.generated[2:]].tolist()
    assert taught == list(turn.token_ids[11:])
    assert len(rows) == 4
    assert nonzero(tap) == {"offered": 1, "cut": 3, "captured": 4, "truncated": 1}


def test_rows_are_copies_not_views(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    """A part may be a slice of a large buffer; what is stored has the row's size."""
    turn = make_turn(num_tokens=40)
    buffer = HiddenStates(torch.randn(4000, 24), torch.randn(4000, 8))
    with tapping(plane, target_info) as tap:
        tap.offer(replace(turn, hidden=(buffer[100:139],)))
    [row] = rows_of(plane)
    assert torch.equal(row.hidden.aux, buffer.aux[100:139].bfloat16())
    assert plane[0].used_bytes() < 40 * (32 * 2 + 9) + 600


@pytest.mark.parametrize("kind", ["inference", "gradient"])
def test_tensors_of_any_mode_are_taken(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn, kind: str) -> None:
    with torch.inference_mode(kind == "inference"):
        aux, last = (torch.randn(39, width, requires_grad=kind == "gradient") * 2 for width in (24, 8))
    with tapping(plane, target_info) as tap:
        tap.offer(replace(make_turn(), hidden=(HiddenStates(aux, last),)))
    [row] = rows_of(plane)
    assert torch.equal(row.hidden.last, last.detach().bfloat16())
    assert not row.hidden.last.requires_grad


def test_the_same_turn_twice_is_one_row(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    with tapping(plane, target_info) as tap:
        tap.offer(make_turn("a"))
        tap.offer(make_turn("a"))
        tap.offer(make_turn("b"))
    assert nonzero(tap) == {"offered": 3, "captured": 2, "duplicate": 1}
    assert len(rows_of(plane)) == 2


def test_held_out_rows_are_set_aside(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    store, ledger = plane
    config = CaptureConfig(heldout_fraction=0.5, heldout_max_rows=5, queue_max_rows=200)
    with tapping(plane, target_info, config) as tap:
        for index in range(60):
            tap.offer(make_turn(f"s{index}"))
    held_out = ledger.heldout(99)
    assert len(held_out) == 5
    status = ledger.status()
    assert 30 < status["pending"] < 55
    num_deleted = 60 - status["pending"] - 5
    assert num_deleted > 0  # pushed out of the reservoir, features and all
    assert store.health().num_rows == status["pending"] + 5
    assert all(store.exists(ref) for ref in held_out)
    assert nonzero(tap) == {"offered": 60, "captured": 60}


def test_the_split_does_not_depend_on_the_run(
    tmp_path: Path, target_info: TargetInfo, make_turn: MakeTurn, make_plane: Callable[[Path, int], Plane]
) -> None:
    """The same traffic through the same server twice gives the same rows and the same split."""
    seen = []
    for name in ("one", "two"):
        plane = make_plane(tmp_path / name, 1 << 24)
        with tapping(plane, target_info, CaptureConfig(heldout_fraction=0.3)) as tap:
            for index in range(20):
                tap.offer(make_turn(f"s{index}"))
        seen.append({ref.sample_id for ref in plane[1].heldout(99)})
    assert seen[0] == seen[1]
    assert 0 < len(seen[0]) < 20


def test_rows_of_one_turn_stay_together(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    _, ledger = plane
    config = CaptureConfig(heldout_fraction=0.5, max_row_tokens=16)
    with tapping(plane, target_info, config) as tap:
        for index in range(12):
            tap.offer(make_turn(f"s{index}", num_generated=39))
    sides = [{ref.source for ref in refs} for refs in (ledger.heldout(999), ledger.lease("r", 999, 60))]
    assert all(sides)
    assert not sides[0] & sides[1]


# --- what is not kept ---


def test_short_turns_are_skipped(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    with tapping(plane, target_info, replace(CONFIG, min_generated_tokens=8)) as tap:
        assert tap.offer(make_turn("a", num_generated=7)) is False
        assert tap.offer(make_turn("b", num_generated=8)) is True
    assert nonzero(tap) == {"offered": 2, "captured": 1, "skipped_short": 1}


def test_turns_whose_first_states_were_dropped_are_shed(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn(num_tokens=40)
    kept = HiddenStates.concat(turn.hidden)[10:]
    with tapping(plane, target_info) as tap:
        assert tap.offer(replace(turn, hidden=(kept,), first_position=10)) is False
        assert tap.offer(replace(turn, num_unseen=1)) is False, "its states are there still, but they saw less than the history"
        assert tap.offer(turn) is True
    assert nonzero(tap) == {"offered": 3, "shed_dropped": 2, "captured": 1}


def test_sampling_is_deterministic_and_about_right(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    taken = []
    turns = [make_turn(f"s{index}") for index in range(100)]
    for _ in range(2):
        with tapping(plane, target_info, replace(CONFIG, sampling_rate=0.3, queue_max_rows=200)) as tap:
            taken.append([tap.offer(turn) for turn in turns])
            assert tap.counters()["skipped_sampled_out"] == 100 - sum(taken[-1])
    assert taken[0] == taken[1]
    assert 15 < sum(taken[0]) < 45


def test_redacted_rows_are_never_written(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    seen: list[tuple[tuple[int, ...], str]] = []

    def redact(token_ids: tuple[int, ...], text: str) -> bool:
        seen.append((token_ids, text))
        return len(token_ids) == 41

    with tapping(plane, target_info, redact=redact, decode=lambda token_ids: f"{len(token_ids)} tokens") as tap:
        tap.offer(make_turn("a", num_tokens=41))
        tap.offer(make_turn("b", num_tokens=40))
    assert nonzero(tap) == {"offered": 2, "captured": 1, "redacted": 1}
    assert seen[1] == (make_turn("b").token_ids, "40 tokens")
    assert [row.num_tokens for row in rows_of(plane)] == [40]


def test_a_hook_that_fails_keeps_nothing_and_the_tap_lives(
    plane: Plane, target_info: TargetInfo, make_turn: MakeTurn, caplog: pytest.LogCaptureFixture
) -> None:
    def redact(token_ids: tuple[int, ...], text: str) -> object:
        if len(token_ids) == 41:
            raise LookupError("no such list")
        return [True, False] if len(token_ids) == 42 else None

    with tapping(plane, target_info, redact=redact) as tap:
        for name in "abc":
            tap.offer(make_turn(name, num_tokens=41))
        tap.offer(make_turn("e", num_tokens=42))  # an answer of another form: who knows what was meant
        tap.offer(make_turn("d"))
    assert nonzero(tap) == {"offered": 5, "captured": 1, "failed_redaction": 4}
    assert plane[0].health().num_rows == 1
    assert len([record for record in caplog.records if "no such list" in record.getMessage()]) == 1  # said once


@pytest.mark.parametrize("which", ["redact", "classify"])
def test_a_hook_that_wants_to_end_the_program_does_not_end_the_tap(
    plane: Plane, target_info: TargetInfo, make_turn: MakeTurn, which: str
) -> None:
    def hook(token_ids: tuple[int, ...], text: str) -> object:
        if len(token_ids) == 41:
            sys.exit(1)
        return None if which == "redact" else "kind"

    with tapping(plane, target_info, **{which: hook}) as tap:
        tap.offer(make_turn("a", num_tokens=41))
        tap.offer(make_turn("b"))
    if which == "redact":
        assert nonzero(tap) == {"offered": 2, "captured": 1, "failed_redaction": 1}
    else:
        assert nonzero(tap) == {"offered": 2, "captured": 2, "unclassified": 1}


def test_masked_tokens_are_in_no_row(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn("a", num_tokens=40, num_generated=20)
    secret = {turn.token_ids[5], turn.token_ids[30]}

    def redact(token_ids: tuple[int, ...], text: str) -> list[bool]:
        return [token_id in secret for token_id in token_ids]

    with tapping(plane, target_info, redact=redact) as tap:
        tap.offer(turn)
    [row] = rows_of(plane)
    kept = [0 if token_id in secret else token_id for token_id in turn.token_ids]
    assert row.token_ids.tolist() == kept
    assert [index for index in range(20, 40) if not row.generated[index]] == [30, 31]
    for states in (row.hidden.aux, row.hidden.last):
        assert [index for index in range(39) if not states[index].any()] == [5, 30]
    assert nonzero(tap) == {"offered": 1, "captured": 1, "masked": 1}


def test_consent_is_the_servers_and_the_sessions(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turns = [replace(make_turn(switch.value), capture=switch) for switch in (Switch.ON, Switch.INHERIT, Switch.OFF)]
    with tapping(plane, target_info, replace(CONFIG, by_default=False)) as tap:
        assert [tap.offer(turn) for turn in turns] == [True, False, False]
    assert nonzero(tap) == {"offered": 3, "captured": 1, "skipped_no_consent": 2}
    with tapping(plane, target_info, CONFIG) as tap:
        assert [tap.offer(replace(turn, session_id="other")) for turn in turns] == [True, True, False]


def test_a_classifier_names_the_slice_unless_the_client_did(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    def classify(token_ids: tuple[int, ...], text: str) -> str:
        if text == "39 tokens":
            raise RuntimeError("cannot tell")
        return "" if text == "38 tokens" else f"of {text}"

    with tapping(plane, target_info, classify=classify, decode=lambda token_ids: f"{len(token_ids)} tokens") as tap:
        tap.offer(make_turn("a", num_tokens=40))
        tap.offer(replace(make_turn("b", num_tokens=40), labels={"slice": "mine", "kind": "x"}))
        tap.offer(make_turn("c", num_tokens=39))
        tap.offer(make_turn("d", num_tokens=38))
    refs = {ref.source.removeprefix("session/"): ref for ref in plane[1].lease("reader", 9, 60)}
    assert {name: ref.slice for name, ref in refs.items()} == {"a": "of 40 tokens", "b": "mine", "c": "", "d": ""}
    assert refs["a"].labels == {"kind": "test", "slice": "of 40 tokens"}
    assert nonzero(tap) == {"offered": 4, "captured": 4, "unclassified": 2}


def test_every_slice_has_its_held_out_rows(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    config = CaptureConfig(heldout_fraction=0.5, heldout_max_rows=6, queue_max_rows=200)
    with tapping(plane, target_info, config) as tap:
        for index in range(60):
            slice_name = "rare" if index % 10 == 0 else "common"
            tap.offer(replace(make_turn(f"s{index}"), labels={"slice": slice_name}))
    counts = Counter(ref.slice for ref in plane[1].heldout())
    assert set(counts) == {"rare", "common"}
    assert sum(counts.values()) == 6


def test_retention_takes_old_features_away_and_says_so(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    store, ledger = plane
    with tapping(plane, target_info) as tap:
        for name in "abc":
            tap.offer(make_turn(name))
    leased = ledger.lease("run", 2, 600)
    ledger.record_checkpoint("run", "c", 1, [ref.sample_id for ref in leased])
    with tapping(plane, target_info, replace(CONFIG, max_trained_rows=1)) as tap:
        wait_until(lambda: tap.counters()["expired"] == 1)
    assert [store.exists(ref) for ref in leased] == [False, True]
    old = [ref for ref in ledger.trainable() if ref.sample_id not in {each.sample_id for each in leased}]
    config = replace(CONFIG)
    config.max_age_s = 0.001  # as if a day had passed
    with tapping(plane, target_info, config) as tap:
        wait_until(lambda: tap.counters()["expired"] == 2)
    assert store.used_bytes() == 0
    assert not store.exists(old[0])
    assert ledger.status() == {"pending": 0, "leased": 0, "durable": 2, "failed": 1, "heldout": 0}


def test_states_that_are_not_finite_are_refused(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn("a", num_parts=1)
    turn.hidden[0].last[3, 2] = float("nan")
    with tapping(plane, target_info) as tap:
        tap.offer(turn)
    assert nonzero(tap) == {"offered": 1, "failed_non_finite": 1}


def test_a_failing_disk_is_counted_and_survived(
    plane: Plane, target_info: TargetInfo, make_turn: MakeTurn, caplog: pytest.LogCaptureFixture
) -> None:
    rows = plane[0].root / "rows"
    gate = Gate()
    with tapping(plane, target_info, redact=gate) as tap:
        tap.offer(make_turn("a"))
        assert gate.entered.wait(10)
        shutil.rmtree(rows)
        gate.opened.set()
        tap.offer(make_turn("b"))
        wait_until(lambda: tap.counters()["failed_io"] == 2)
        rows.mkdir()
        tap.offer(make_turn("c"))
    assert nonzero(tap) == {"offered": 3, "captured": 1, "failed_io": 2}
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1
    assert plane[0].health().num_rows == 1


def test_a_ledger_that_fails_leaves_no_orphan(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    store, ledger = plane
    with tapping(plane, target_info) as tap:
        ledger.close()
        tap.offer(make_turn("a"))
    assert nonzero(tap) == {"offered": 1, "failed_io": 1}
    assert store.used_bytes() == 0


# --- the end ---


def test_close_drains_and_later_offers_are_shed(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    with tapping(plane, target_info) as tap:
        for index in range(30):
            tap.offer(make_turn(f"s{index}"))
        tap.close()
        assert plane[1].status()["pending"] == 30
        assert tap.offer(make_turn("late")) is False
        tap.close()
    assert nonzero(tap) == {"offered": 31, "captured": 30, "shed_closed": 1}


def test_close_keeps_its_time_limit(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    gate = Gate()
    tap = FeatureTap(*plane, CONFIG, run_id="server", target_info=target_info, redact=gate)
    for index in range(5):
        tap.offer(make_turn(f"s{index}"))
    assert gate.entered.wait(10)
    start = time.monotonic()
    tap.close(timeout_s=0.2)
    assert time.monotonic() - start < 2.0
    assert tap.counters()["shed_closed"] == 4
    gate.opened.set()
    tap.close()
    assert nonzero(tap) == {"offered": 5, "captured": 1, "shed_closed": 4}


def test_a_turn_that_does_not_fit_itself_is_a_programming_error(make_turn: MakeTurn) -> None:
    turn = make_turn()
    with pytest.raises(AssertionError, match="positions"):
        replace(turn, hidden=turn.hidden[:-1])
    with pytest.raises(AssertionError, match="marks"):
        replace(turn, generated=(True,))
