"""What a lower precision leaves alone, and the dtype of arithmetic, as autocast makes it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.lower_precision import keep_in_float32, read_product_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inside_and_outside_autocast(dtype: torch.dtype) -> None:
    assert read_product_dtype(CPU) == "torch.float32"
    with torch.autocast("cpu", dtype=dtype):
        assert read_product_dtype(CPU) == str(dtype)
        with torch.autocast("cpu", enabled=False):
            assert read_product_dtype(CPU) == "torch.float32"
    assert read_product_dtype(CPU) == "torch.float32"


def test_it_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    read_product_dtype(CPU)
    assert torch.equal(before, torch.get_rng_state())


class Spread(torch.nn.Module):
    """A loss that subtracts nearly equal numbers: the variance as mean of squares less square of mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.full((1, len(x)), 1 / len(x))
        return self.scale * (mean @ x**2 - (mean @ x) ** 2).sum()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = Spread()

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.criterion(x)


@pytest.mark.parametrize("name", ["criterion", "compute_loss", "criterion.forward"])
@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_kept_computes_in_float32(name: str, compiles: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, called, x = Model(), set[str](), 100 + torch.randn(64, 1)
    wanted = model.compute_loss(x)
    undo = keep_in_float32(model, name, "cpu", called.add)
    loss = torch.compile(model.compute_loss, backend="aot_eager", fullgraph=True) if compiles else model.compute_loss
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(x), wanted)
        assert loss(x.bfloat16()).dtype == torch.float32
    assert called == (set() if compiles else {name})
    undo()
    undo()
    assert "forward" not in vars(model.criterion) and "compute_loss" not in vars(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert abs(model.compute_loss(x) - wanted) > 10 * wanted, "the control: rounding leaves nothing of it"


class Losses(torch.nn.Module):
    @staticmethod
    def static(given: Any) -> torch.Tensor:
        return given["logits"][0].square()

    @classmethod
    def of_class(cls, given: Any) -> torch.Tensor:
        return cls.static(given)


@pytest.mark.parametrize("name", ["static", "of_class"])
def test_methods_without_an_object_and_arguments_in_containers(name: str) -> None:
    model = Losses()
    undo = keep_in_float32(model, name, "cpu", set().add)
    found = getattr(model, name)({"logits": [torch.full((2,), 1.0078125, dtype=torch.bfloat16)]})
    assert found.dtype == torch.float32 and float(found[0]) == 1.0078125**2
    undo()
    assert not {name} & vars(model).keys()


def test_copies_of_what_is_kept_call_themselves() -> None:
    model = Model()
    keep_in_float32(model, "criterion", "cpu", set().add)
    x: Any = torch.randn(64, 1)
    with torch.autocast("cpu", torch.bfloat16):
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                made.criterion.scale.fill_(0.0)
            assert made.compute_loss(x) == 0 != model.compute_loss(x)


@pytest.mark.parametrize("name", ["critrion", "head.loss", "criterion.scale", ""])
def test_what_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(NotApplicable, match=f"no module or method '{name}'"):
        keep_in_float32(Model(), name, "cpu", set().add)
