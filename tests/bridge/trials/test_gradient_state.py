"""Where the rounds of a step begin."""

from __future__ import annotations

import torch

from fastloop.bridge.trials import gradient_state
from fastloop.bridge.trials.gradient_state import RAISED, ROUNDING, STARTS, TWICE, Start
from fastloop.judge.parity import TAU


def test_back_to_the_weights_buffers_and_random_numbers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    before = gradient_state.copy_state(module)
    drawn = []
    for _ in range(2):
        TWICE[0].set(module, before)
        drawn.append(torch.rand(3))
        module(torch.rand(8, 4)).sum().backward()
        module[0].weight.data.add_(1)
        assert module[1].num_batches_tracked == 1
    TWICE[1].set(module, before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gradient_state.copy_state(module).items())
    assert torch.equal(drawn[0], drawn[1])


def test_an_error_of_the_weights_and_of_nothing_else() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100))
    before = gradient_state.copy_state(module)
    Start("rounded", error=1e-3).set(module, before)
    after = gradient_state.copy_state(module)
    off = (after["0.weight"] / before["0.weight"] - 1).std()
    assert 0.9e-3 < off < 1.1e-3 and torch.equal(after["1.running_var"], before["1.running_var"])
    first = torch.rand(1)
    TWICE[0].set(module, before)
    assert torch.equal(torch.rand(1), first), "the same random numbers as without the error"


def test_raised_biases_leave_a_relu_on() -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Linear(6, 6)
    )
    module[1].weight.data.mul_(0.2)
    raised = gradient_state.raise_biases(module)
    assert list(raised) == ["1.bias"] and torch.allclose(raised["1.bias"], torch.tensor(0.6))
    before = gradient_state.copy_state(module)
    x = torch.randn(16, 3, 8, 8)
    assert 0.4 < (module[:3](x) == 0).float().mean() < 0.6
    RAISED[0].set(module, {**before, **raised})
    assert (module[:3](x) == 0).float().mean() < 0.01
    names = gradient_state.raise_biases(
        torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False), torch.nn.GroupNorm(1, 2))
    )
    assert list(names) == ["1.bias"], "one without a bias has none to raise"


def test_names_that_are_not_known_stay() -> None:
    module = torch.nn.Linear(2, 2)
    own = module.bias.detach().clone()
    TWICE[0].set(module, {"weight": torch.zeros(2, 2)})
    assert module.weight.sum() == 0 and torch.equal(module.bias, own)


def test_the_base_looks_at_every_precision_that_has_a_limit() -> None:
    assert [start.name for start in STARTS] == ["first", "again", "random", *ROUNDING]
    assert [start.error for start in RAISED] == [0.0, *ROUNDING.values()] and all(start.raised for start in RAISED)
    assert set(ROUNDING) == set(TAU) - {"fp64", "fp16"}, "float16 rounds as TF32 does"
    assert STARTS[0].seed == STARTS[1].seed != STARTS[2].seed and not any(start.error for start in STARTS[:3])
