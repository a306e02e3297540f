"""What is done around a training_step: channels-last inputs, the dtype noted, attributes set for a moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.bridge.step import ChannelsLast, DtypeSpy, attribute


def test_images_become_channels_last_and_are_counted() -> None:
    convert, images = ChannelsLast(), torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    masks = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    changed = convert({"images": images, "labels": torch.tensor([0, 1]), "masks": masks})
    assert changed["images"].is_contiguous(memory_format=torch.channels_last)
    assert not changed["images"].is_contiguous() and torch.equal(changed["images"], images)
    assert changed["masks"] is masks and convert.evidence() == {"converted_batches": 1}


@pytest.mark.parametrize("batch", [torch.ones(2, 3), [torch.ones(2), "text"], None, torch.ones(1, 1, 2, 2).int()])
def test_batches_without_images_are_handed_through(batch: Any) -> None:
    convert = ChannelsLast()
    assert convert(batch) is batch and convert.batches == 0


def test_the_dtype_is_noted_inside_the_first_training_step_only() -> None:
    calls: list[str] = []
    module = SimpleNamespace(training_step=lambda value: calls.append("user") or value + 1)
    user, spy = module.training_step, DtypeSpy(torch.device("cpu"))

    def step(value: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module.training_step(value)

    assert spy.evidence() == {"dtype": None}
    assert spy.around(module, step)(1) == 2
    assert spy.evidence() == {"dtype": "torch.bfloat16"} and module.training_step is user
    assert spy.around(module, step) is step and calls == ["user"]


def test_an_attribute_is_put_back_whatever_happens() -> None:
    class Owner:
        name = "of the class"

    owner = Owner()
    for before in (None, "of the object"):
        if before:
            owner.name = before
        with pytest.raises(ZeroDivisionError), attribute(owner, "name", "for a moment"):
            assert owner.name == "for a moment"
            raise ZeroDivisionError
        assert owner.name == (before or "of the class") and ("name" in vars(owner)) == (before is not None)
