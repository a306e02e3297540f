"""A twin of an optimizer steps, and nothing of the optimizer changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.rehearse import optimizer_twins
from fastloop.bridge.apply.rehearse.optimizer_twins import make_twin, step_twins
from fastloop.feeds.fused_layouts import fit_layouts

CPU = torch.device("cpu")


def make(kind: Any, **settings: Any) -> tuple[Any, torch.nn.Module]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    groups = [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1].parameters()}]
    optimizer = kind(groups, lr=0.01, **settings)
    for _ in range(2):
        module(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return optimizer, module


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_nothing_of_the_optimizer_changes(kind: Any) -> None:
    optimizer, module = make(kind)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy((optimizer.state_dict(), module.state_dict(), [each.grad for each in module.parameters()]))
    stream = torch.get_rng_state()
    played = step_twins([optimizer], CPU)
    after = (optimizer.state_dict(), module.state_dict(), [each.grad for each in module.parameters()])
    assert str(after) == str(before) and not called and torch.equal(stream, torch.get_rng_state())
    assert len(played.outputs) == 4 and all(bool(moved.abs().sum() > 0) for moved in played.outputs)
    assert scheduler.optimizer is optimizer


def test_a_twin_does_what_the_optimizer_would() -> None:
    optimizer, module = make(torch.optim.Adam, weight_decay=0.1)
    twin, pairs = make_twin(optimizer)
    for parameter, own in pairs:
        match = next(each for each in module.parameters() if each.data_ptr() == parameter.data_ptr())
        match.grad = own.grad.clone()  # type: ignore[union-attr]
    twin.step()
    optimizer.step()
    assert all(torch.equal(parameter, own) for parameter, own in pairs)
    assert len({id(group) for group in twin.param_groups} & {id(group) for group in optimizer.param_groups}) == 0


def test_a_twin_fits_layouts_as_the_optimizer_does() -> None:
    """State of another memory order made the twin of a fused optimizer deviate, which kept `fused` off."""
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.randn(5, 3).T
    optimizer.step()
    usual = step_twins([optimizer], CPU)
    optimizer.param_groups[0]["fused"] = True
    fit_layouts(optimizer, [].append)
    assert torch.allclose(usual.outputs[0], step_twins([optimizer], CPU).outputs[0])


def test_of_a_large_model_only_a_part_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = make(torch.optim.SGD)
    monkeypatch.setattr(optimizer_twins, "MOST_BYTES", 4 * 40)
    assert [own.numel() for _, own in make_twin(optimizer)[1]] == [32, 8]
    monkeypatch.setattr(optimizer_twins, "MOST_BYTES", 1)
    assert [own.numel() for _, own in make_twin(optimizer)[1]] == [32], "always one"
