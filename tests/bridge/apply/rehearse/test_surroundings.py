"""What is around a play of the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.bridge.apply.rehearse.surroundings import check_device
from fastloop.errors import FastLoopError


def test_a_lost_device_ends_the_training_and_names_the_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """B7: every later call would fail without saying why."""
    lost = RuntimeError("CUDA error: device-side assert triggered")

    def synchronize(_device: Any) -> None:
        raise lost

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(FastLoopError, match="stopped responding after the rehearsal of amp") as raised:
        check_device(torch.device("cuda"), "amp")
    assert "device-side assert triggered" in str(raised.value) and "rungs.amp.enabled: false" in str(raised.value)
    assert raised.value.__cause__ is lost
    check_device(torch.device("cpu"), "amp")  # the control: it has nothing to lose
