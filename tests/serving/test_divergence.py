"""Live acceptance against what the gate promised: by depth, in windows, and said aloud where it falls short."""

from __future__ import annotations

import logging

import pytest

from runtime.config import RegistryConfig, SpeculationConfig, SpeculationMode, TreeShape
from runtime.errors import ConfigError
from runtime.registry import Origin
from runtime.rpc.drafters_client import DrafterClient
from runtime.types import SamplingParams, SpeculationStats
from serving.divergence import AcceptanceWatch

from .conftest import MakeDrafter, StartServer, wait_for

PROMISED = {"acceptance_length": 2.0, "acceptance_at_0": 0.6, "acceptance_at_1": 0.4}


def stats(num_steps: int, accepted: list[int], drafted: list[int]) -> SpeculationStats:
    return SpeculationStats(num_steps, sum(drafted), sum(accepted), accepted, drafted)


def watch(steps: int = 100, limit: float | None = 0.25, has_chains_only: bool = True) -> AcceptanceWatch:
    config = RegistryConfig(divergence_steps=steps, max_divergence=limit)
    return AcceptanceWatch(config, has_chains_only=has_chains_only)


def test_what_is_expected_depends_on_how_deep_was_drafted(caplog: pytest.LogCaptureFixture) -> None:
    one = watch()
    one.look("v", PROMISED, stats(0, [], []))
    one.look("v", PROMISED, stats(99, [60, 8], [99, 20]))
    assert one.divergences() == {}, "no whole window yet"
    one.look("v", PROMISED, stats(100, [60, 8], [100, 20]))  # expected: 60 + 8
    assert one.divergences() == {"v": pytest.approx(0.0)}
    one.look("v", PROMISED, stats(300, [120, 8, 5], [200, 20, 50]))  # half of the steps drafted nothing; depth 2 was not promised
    assert one.divergences() == {"v": pytest.approx(0.0)}
    assert not caplog.records


def test_windows_stand_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    one = watch()
    one.look("v", PROMISED, stats(0, [], []))
    one.look("v", PROMISED, stats(10_000, [6000], [10_000]))
    assert not caplog.records
    one.look("v", PROMISED, stats(10_100, [6030], [10_100]))
    assert one.divergences() == {"v": pytest.approx(-0.5)}
    [told] = caplog.records
    assert "30 drafts were accepted in the last 100 steps, where its held-out rows let expect 60 (-50 %" in told.getMessage()


def test_another_version_begins_anew() -> None:
    one = watch()
    one.look("v", PROMISED, stats(0, [], []))
    one.look("v", PROMISED, stats(100, [30], [100]))
    one.look("w", {"acceptance_at_0": 0.5}, stats(5000, [10], [5000]))
    assert one.divergences() == {}
    one.look("w", {"acceptance_at_0": 0.5}, stats(5100, [60], [5100]))
    assert one.divergences() == {"w": pytest.approx(0.0)}
    one.look("ngram", {}, stats(10_000, [1], [10_000]))
    assert one.divergences() == {}, "nobody promised anything of it"


@pytest.mark.parametrize(("has_chains_only", "is_told"), [(True, True), (False, False)])
def test_more_than_expected_is_told_of_chains_alone(
    has_chains_only: bool, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = watch(has_chains_only=has_chains_only)
    one.look("v", PROMISED, stats(0, [], []))
    one.look("v", PROMISED, stats(100, [90], [100]))
    assert one.divergences() == {"v": pytest.approx(0.5)}
    assert bool(caplog.records) == is_told


def test_without_a_limit_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    one = watch(limit=None)
    one.look("v", PROMISED, stats(0, [], []))
    one.look("v", PROMISED, stats(100, [0], [100]))
    assert one.divergences() == {"v": -1.0}
    assert not caplog.records


def test_a_server_warns_of_a_version_that_does_less_than_was_promised(
    start_server: StartServer, make_drafter: MakeDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    speculation = SpeculationConfig(SpeculationMode.FIXED, TreeShape.CHAIN, max_draft_tokens=2)
    running = start_server(registry=RegistryConfig(poll_s=0.02, divergence_steps=20), speculation=speculation)
    with DrafterClient(running.ready.grpc) as drafters:
        version = drafters.upload(make_drafter(1), Origin(metrics={"acceptance_at_0": 0.9, "acceptance_at_1": 0.8})).version
        wait_for(lambda: drafters.active_version() == version)
    with caplog.at_level(logging.WARNING), running.client() as client:
        session = client.create_session()
        client.append(session.session_id, text="Name three rivers.")
        for _ in range(3):  # the first look at a version begins its window
            list(client.generate(session.session_id, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
        wait_for(lambda: any("let expect" in record.getMessage() for record in caplog.records))
    assert running.parts.lifecycle.acceptance.divergences()[version] < -0.25


@pytest.mark.parametrize(
    ("change", "said"),
    [({"max_divergence": 0.0}, "registry.max_divergence is 0.0"), ({"divergence_steps": 0}, "registry.divergence_steps is 0")],
)
def test_settings_out_of_range_are_refused_by_name(change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match="must be") as refused:
        RegistryConfig(**change)
    assert str(refused.value).startswith(said)
