"""What a rehearsal remembers holds for this model, on this device, with these versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.bridge.apply.rehearse import remembered


@pytest.mark.parametrize(
    ("place", "name", "other"),
    [
        (remembered.machine, "read_versions", lambda names: dict.fromkeys(names, "0.0.7")),
        (remembered, "read_driver", lambda: "999.1"),
        (torch, "__version__", "9.9"),
        (torch.cuda, "get_device_name", lambda _device: "another GPU"),
    ],
    ids=["fastloop", "driver", "torch", "device"],
)
def test_what_decides_whether_a_rung_works_is_in_the_key(
    place: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    modules, device = [torch.nn.Linear(2, 2)], torch.device("cuda")
    before = remembered.fingerprint(modules, device)
    assert remembered.fingerprint(modules, device) == before
    monkeypatch.setattr(place, name, other)
    assert remembered.fingerprint(modules, device) != before
