"""What an action may ask for: notes inside a training_step and conversions of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.site import LiveSite
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.lower_precision import read_product_dtype
from fastloop.records.facts import Facts


class Steps(torch.nn.Module):
    """A module whose training_step says whether it ran under autocast."""

    def training_step(self, value: int) -> tuple[int, bool]:
        return value + 1, torch.is_autocast_enabled("cpu")


def site_of(module: Any) -> LiveSite:
    strategy = SimpleNamespace(lightning_module=module, root_device=torch.device("cpu"), optimizers=[])
    trainer = SimpleNamespace(state=SimpleNamespace(stage="train"))
    return LiveSite(trainer, strategy, Facts(), None, warn=pytest.fail, say=pytest.fail, one_time=OneTime())


def test_notes_are_taken_inside_the_first_training_step_only() -> None:
    module, dtypes = Steps(), list[str]()
    site = site_of(module)

    def step(value: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module.training_step(value)

    assert site.take_notes(step) is step
    site.note_in_step(lambda: dtypes.append(read_product_dtype(site.device)))
    noting = site.take_notes(step)
    assert dtypes == [] and noting(1) == (2, True) and noting(2) == (3, True)
    assert dtypes == ["torch.bfloat16"] and "training_step" not in vars(module)
    assert site.take_notes(step) is step


def test_conversions_are_made_in_order_once_a_batch_is_on_the_device_and_undone_alone() -> None:
    site = site_of(Steps())
    double, add = (lambda batch: batch * 2), (lambda batch: batch + 1)
    undo_double, undo_add = site.convert_inputs(double), site.convert_inputs(add)
    assert site.staging.finish(1, lambda: 3, 0) == 7
    for _ in range(2):
        undo_double()
        assert site.staging.finish(1, lambda: 3, 0) == 4
    undo_add()
    assert site.staging.finish(1, lambda: 3, 0) == 3
