"""What a lower precision leaves alone, and the dtype of arithmetic, as autocast makes it."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from typing import Any

import pytest
import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.lower_precision import WideOutputs, keep_in_float32, read_product_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inside_and_outside_autocast(dtype: torch.dtype) -> None:
    assert read_product_dtype(CPU) == "torch.float32"
    with torch.autocast("cpu", dtype=dtype):
        assert read_product_dtype(CPU) == str(dtype)
        assert read_product_dtype(CPU, torch.nn.Linear(1, 1).double()) == "torch.float64"
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


class Keeps(torch.nn.Module):
    def __init__(self, **kept: Any) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)
        self.__dict__.update(kept)


HALF = torch.ones(3, dtype=torch.bfloat16)


def test_what_a_step_hands_out_and_appends_is_float32() -> None:
    module = Keeps(outs=[HALF], rows=deque(), by_name={"a": []}, number=3)
    outputs = WideOutputs(module)
    for step in range(3):
        before = outputs.note()
        module.outs.append(kept := {"pred": HALF, "more": (HALF, 1)})
        module.rows.append(HALF)
        module.by_name["a"].append(HALF)
        found = outputs.widen({"loss": HALF, "pred": [HALF], "step": step}, before)
        assert found["loss"] is HALF and found["pred"][0].dtype == torch.float32 and found["step"] == step
        assert module.outs[-1] is kept
    kept = [*module.rows, *module.by_name["a"]]
    kept += [each for out in module.outs[1:] for each in (out["pred"], out["more"][0])]
    assert {each.dtype for each in kept} == {torch.float32} and len(kept) == 12 and module.number == 3
    assert module.outs[0] is HALF, "what was there before is the user's own"
    assert outputs.widen(HALF, []).dtype == torch.float32 and outputs.widen(None, []) is None


class Output(dict):  # type: ignore[type-arg]
    """As Hugging Face's: a dictionary with attributes, and a class of its own."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Locked(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("locked")


def test_containers_stay_the_objects_they_are() -> None:
    losses: list[float] = []
    bank = torch.zeros(3, dtype=torch.bfloat16)
    prompt = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    me: dict[str, Any] = {}
    me["me"] = me
    kept = {"losses": losses, "stats": {"train": {"losses": losses}}, "bank": bank, "prompt": prompt, "me": me}
    module = Keeps(**kept, locked=Locked(size=(1, 2)), vocabulary=dict.fromkeys(range(100_000)))
    outputs, found = WideOutputs(module), Output(logits=HALF)
    for step in range(3):
        before = outputs.note()
        module.losses.append(0.1)
        assert outputs.widen(found, before) is found and found.logits.dtype == torch.float32
        assert len(module.stats["train"]["losses"]) == step + 1 and module.stats["train"]["losses"] is losses
    assert module.bank is bank and module.prompt is prompt and module.me["me"] is me
    assert outputs.widen(locked := Locked(out=HALF), []) is locked


def test_a_loss_keeps_its_graph_and_a_leaf_is_not_replaced() -> None:
    module = Keeps(outs=[])
    outputs, leaf = WideOutputs(module), HALF.clone().requires_grad_()
    before = outputs.note()
    module.outs.append(leaf)
    assert outputs.widen(loss := leaf.sum(), before) is loss and module.outs[0] is leaf


def test_a_module_of_16_bits_keeps_what_it_has() -> None:
    module = Keeps(outs=[]).to(torch.bfloat16)
    outputs = WideOutputs(module)
    before = outputs.note()
    module.outs.append(HALF)
    assert outputs.widen(HALF, before) is HALF and module.outs[0] is HALF
