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


def test_lazy_parameters_have_no_shape_yet() -> None:
    """Loaders are set up before the first step, in which a lazy module gets its weights."""
    model, device = torch.nn.Sequential(torch.nn.LazyLinear(2)), torch.device("cpu")
    before = remembered.fingerprint([model], device)
    model(torch.ones(1, 3))
    assert before != remembered.fingerprint([model], device)


def test_optimizers_of_other_classes_or_settings_are_others() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    made = [
        torch.optim.SGD(weights, lr=0.1),
        torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.Adam(weights, lr=torch.tensor(0.1)),
        torch.optim.Adam(weights),
        torch.optim.Adam([*weights, torch.nn.Parameter(torch.zeros(3, dtype=torch.double))]),
        type("Own", (torch.optim.Adam,), {})(weights),
    ]
    assert len({remembered.describe_optimizers([each]) for each in made}) == len(made)
    schedule = torch.optim.lr_scheduler.StepLR(made[0], 1)
    made[0].step()
    before = remembered.describe_optimizers(made[:1])
    schedule.step()
    assert remembered.describe_optimizers(made[:1]) == before, "an optimizer that trains on stays the same"
