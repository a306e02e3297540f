"""An optimizer's recorded update, on the CPU, where a replay runs it again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.step_graph.static_update import StaticUpdate
from tests.feeds.step_graph.fake import FakeRecorder

CPU = torch.device("cpu")
KINDS: dict[str, Callable[..., Any]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "momentum": lambda *args, **more: torch.optim.SGD(*args, momentum=0.9, nesterov=True, **more),
}


class Net:
    """Two groups of parameters and one that never has a gradient; each step's gradients are drawn from its number."""

    def __init__(self, make: Callable[..., Any], **more: Any) -> None:
        random = torch.Generator().manual_seed(0)
        self.owners = [torch.nn.Parameter(torch.randn(4, 3, generator=random)) for _ in range(3)]
        self.idle = torch.nn.Parameter(torch.ones(2))
        groups = [{"params": self.owners[:2]}, {"params": [self.owners[2], self.idle], "weight_decay": 0.1}]
        self.optimizer = make(groups, **{"lr": 1e-2, "fused": True, **more})
        self.slots = [torch.zeros_like(each) for each in self.owners]
        self.update: StaticUpdate | None = None

    def fill(self, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        for slot, owner in zip(self.slots, self.owners, strict=True):
            slot.copy_(torch.randn(4, 3, generator=random))
            owner.grad = slot
        for place, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 1e-2 * (place + 1) / number

    def record(self) -> StaticUpdate:
        self.update = StaticUpdate(self.optimizer, list(zip(self.owners, self.slots, strict=True)))
        written = [*self.update.parameters, *self.update.state]
        before = [each.clone() for each in written]
        recorder: Any = FakeRecorder(CPU)
        with self.update.handed_over():
            self.update.record(recorder)
        for each, old in zip(written, before, strict=True):  # the fake runs what it records
            each.copy_(old)
        return self.update


def train(net: Net, steps: int, *, replays: bool) -> list[torch.Tensor]:
    for number in range(1, steps + 1):
        net.fill(number)
        if replays and number == 3:
            net.record()
        if net.update is not None:
            assert net.update.has_settings() and net.update.has_addresses()
            with torch.no_grad():
                net.update.replay()
        else:
            net.optimizer.step()
    states = [each for owner in net.owners for each in net.optimizer.state[owner].values() if each is not None]
    return [*(owner.detach() for owner in net.owners), *states]


@pytest.mark.parametrize("kind", KINDS)
def test_replays_update_as_torch_does_at_each_learning_rate(kind: str) -> None:
    expected, found = (train(Net(KINDS[kind]), 8, replays=replays) for replays in (False, True))
    assert len(found) == len(expected) > 3 - (kind == "SGD")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    wrong = train(Net(KINDS[kind], lr=1e-3), 7, replays=False)
    assert not all(torch.allclose(ours, theirs) for ours, theirs in zip(found, wrong, strict=True)), "the control"


def test_recording_leaves_the_optimizer_as_it_was() -> None:
    net = Net(torch.optim.AdamW)
    train(net, 2, replays=False)
    before = copy.deepcopy(net.optimizer.state_dict())
    net.fill(3)
    given = [owner.grad for owner in net.owners]
    rates = [group["lr"] for group in net.optimizer.param_groups]
    update = net.record()
    with update.handed_over(), torch.no_grad():
        update.run_eagerly()
    assert [owner.grad for owner in net.owners] == given and net.idle.grad is None
    assert [group["lr"] for group in net.optimizer.param_groups] == rates
    now = net.optimizer.state_dict()
    assert [group["capturable"] for group in now["param_groups"]] == [False, False]
    steps = [float(state["step"]) for state in now["state"].values()]
    assert steps == [float(state["step"]) + 1 for state in before["state"].values()], "that was an update"


SETTINGS: dict[str, Callable[[Net], object]] = {
    "a setting": lambda net: net.optimizer.param_groups[1].update(weight_decay=0.0),
    "a rate that is a tensor": lambda net: net.optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
    "a group more": lambda net: net.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
    "a parameter less": lambda net: net.optimizer.param_groups[1]["params"].pop(),
    "a copied group": lambda net: net.optimizer.param_groups.append({**net.optimizer.param_groups.pop()}),
}
ADDRESSES: dict[str, Callable[[Net], object]] = {
    "another gradient": lambda net: setattr(net.owners[1], "grad", net.slots[1].clone()),
    "another gradient's memory": lambda net: setattr(net.owners[1].grad, "data", 2 * net.slots[1]),
    "no gradient": lambda net: setattr(net.owners[0], "grad", None),
    "a gradient more": lambda net: setattr(net.idle, "grad", torch.ones(2)),
    "another parameter's memory": lambda net: setattr(net.owners[1], "data", net.owners[1].data.clone()),
    "a loaded state": lambda net: net.optimizer.load_state_dict(copy.deepcopy(net.optimizer.state_dict())),
    "a state begun anew": lambda net: net.optimizer.state.pop(net.owners[0]),
    "a state that is replaced": lambda net: net.optimizer.state[net.owners[1]].update(exp_avg=torch.zeros(4, 3)),
    "a state that is moved": lambda net: [
        setattr(each, "data", each.data.clone()) for each in net.optimizer.state[net.owners[1]].values()
    ],
}


@pytest.mark.parametrize("change", [*SETTINGS, *ADDRESSES])
def test_it_holds_only_as_long_as_nothing_changes(change: str) -> None:
    net = Net(torch.optim.AdamW)
    train(net, 4, replays=True)
    assert net.update is not None and net.update.has_settings() and net.update.has_addresses()
    {**SETTINGS, **ADDRESSES}[change](net)
    assert (net.update.has_settings(), net.update.has_addresses())[change in ADDRESSES] is False


class Own(torch.optim.AdamW):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("make", "more", "steps", "why"),
    [
        (Own, {}, 2, "Own is not one of Adam, AdamW, SGD"),
        (torch.optim.Adagrad, {"fused": None}, 2, "Adagrad is not one of"),
        (torch.optim.AdamW, {"fused": None}, 2, "AdamW is not fused"),
        (torch.optim.AdamW, {}, 0, "a parameter has not been updated yet"),
        (KINDS["momentum"], {}, 0, "a parameter has not been updated yet"),
    ],
)
def test_what_cannot_be_recorded(make: Any, more: dict[str, Any], steps: int, why: str) -> None:
    net = Net(make, **more)
    train(net, steps, replays=False)
    with pytest.raises(NotApplicable, match=why):
        StaticUpdate(net.optimizer, list(zip(net.owners, net.slots, strict=True)))


def test_a_rate_that_is_a_tensor_is_left_alone() -> None:
    net = Net(torch.optim.AdamW)
    train(net, 2, replays=False)
    net.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(NotApplicable, match="a learning rate is not a float"):
        StaticUpdate(net.optimizer, list(zip(net.owners, net.slots, strict=True)))
