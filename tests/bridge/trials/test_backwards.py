"""How many backwards reached the parameters; in trainings see test_sample_ledger.py."""

from __future__ import annotations

import torch

from fastloop.bridge.trials.sample_ledger import Backwards


def test_few_parameters_are_asked_after_the_first_step() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(200)))
    counted = Backwards(module)
    for expected in (1, 2):
        for _ in range(expected):
            module(torch.ones(1, 2)).sum().backward()
        assert counted.take() == expected
    hooked = [each for each in module.parameters() if getattr(each, "_post_accumulate_grad_hooks", None)]
    assert len(hooked) == 3 and counted.seen
    counted.remove()
    assert counted.take() == 0 and Backwards(torch.nn.Tanh()).take() == 0
