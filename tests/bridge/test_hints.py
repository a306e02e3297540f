"""One line where an exception's own text leaves people guessing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.bridge.fail_open import hint

DDP = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your module has parameters that were not used in producing loss. You can enable unused parameter detection…\n"
    "Parameter indices which did not receive grad for rank 0: {}\n In addition, you can set the environment variable"
    " TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
)


def module() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1))
    made[0].bias.requires_grad = False  # DDP counts the parameters that want gradients, and only those
    return made


@pytest.mark.parametrize(
    ("indices", "names"),
    [
        ("1", "1.weight"),
        ("0 2 3", "0.weight, 2.weight, 2.bias"),
        ("3 99", "2.bias"),
    ],
)
def test_unused_parameters_get_their_names(indices: str, names: str) -> None:  # R1
    assert hint(RuntimeError(DDP.format(indices)), module()) == f"parameters without a gradient: {names}"


def test_ignored_parameters_are_not_counted() -> None:
    made = module()
    made._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    assert hint(RuntimeError(DDP.format("0")), made) == "parameters without a gradient: 1.weight"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (DDP.format("0"), None),
        (DDP.format("99"), module()),
        (DDP.format("(none)"), module()),
        ("out of memory", module()),
    ],
)
def test_nothing_to_add(text: str, model: Any) -> None:
    assert hint(RuntimeError(text), model) is None


def test_detached_gradients_name_the_setting() -> None:  # R2
    gradients = torch.zeros(4)[:2].requires_grad_().chunk(2)
    with pytest.raises(RuntimeError) as error:
        gradients[0].detach_()  # torch's own words, in this version
    line = hint(error.value, module())
    assert line is not None and "rungs.overlap.gradient_as_bucket_view" in line and line.endswith("write false")
