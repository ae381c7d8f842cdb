from __future__ import annotations

import pytest
import torch

from runtime.devices import choose_device
from runtime.errors import ConfigError


def test_device_by_default() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"model.device is '{device}'; it must be auto, cpu, cuda or cuda:<index>"):
        choose_device(device)


def test_a_device_that_is_absent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.device is 'cuda:99', but torch sees"):
        choose_device("cuda:99")
