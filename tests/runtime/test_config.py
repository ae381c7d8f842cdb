"""Settings of the feature plane that cannot be right are refused with one sentence that names them."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.config import CaptureConfig, FeaturesConfig, MooncakeConfig, PoolProtocol, StoreKind
from runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("group", "values", "said"),
    [
        (CaptureConfig, {"sampling_rate": 1.5}, "capture.sampling_rate is 1.5; it must be between 0 and 1"),
        (CaptureConfig, {"heldout_fraction": 0.6}, "capture.heldout_fraction is 0.6"),
        (CaptureConfig, {"heldout_max_rows": -1}, "capture.heldout_max_rows is -1"),
        (CaptureConfig, {"queue_max_rows": 0}, "capture.queue_max_rows is 0"),
        (CaptureConfig, {"low_rows": 0}, "capture.low_rows is 0"),
        (CaptureConfig, {"high_rows": 3, "low_rows": 4}, "capture.high_rows is 3; it must be at least capture.low_rows, 4"),
        (CaptureConfig, {"low_mib": 0}, "capture.low_mib is 0"),
        (CaptureConfig, {"high_mib": 3, "low_mib": 4}, "capture.high_mib is 3; it must be at least capture.low_mib, 4"),
        (CaptureConfig, {"redact": "hook"}, "capture.redact is 'hook'; it must be package.module.function, or null"),
        (CaptureConfig, {"classify": ".x."}, "capture.classify is '.x.'"),
        (CaptureConfig, {"max_age_s": 1.0}, "capture.max_age_s is 1.0; it must be at least 60 seconds, or null"),
        (CaptureConfig, {"max_trained_rows": -1}, "capture.max_trained_rows is -1"),
        (FeaturesConfig, {"budget_mib": 0}, "features.budget_mib is 0"),
        (MooncakeConfig, {"master": "host"}, "features.mooncake.master is 'host'; it must be an address such as"),
        (MooncakeConfig, {"metadata": "host:8080"}, "features.mooncake.metadata is 'host:8080'"),
        (MooncakeConfig, {"host": " "}, "features.mooncake.host is ' '"),
        (MooncakeConfig, {"segment_mib": -1}, "features.mooncake.segment_mib is -1"),
    ],
)
def test_a_setting_that_cannot_be_right_is_refused(group: type, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        group(**values)
    assert said in str(raised.value)


def test_the_edges_are_taken() -> None:
    CaptureConfig(sampling_rate=0.0, heldout_fraction=0.5, heldout_max_rows=0, max_age_s=60.0, max_trained_rows=0)
    FeaturesConfig(store=StoreKind.MOONCAKE, mooncake=MooncakeConfig(master="[::1]:1", protocol=PoolProtocol.RDMA))
