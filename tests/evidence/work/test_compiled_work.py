"""The work of compiled modules: what their own code counts eager, and nobody can tell afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from fastloop.bridge.apply.state.untouched import preserve_state
from fastloop.evidence.work.compiled_work import SOURCE, CompiledWork, find_compiled
from fastloop.evidence.work.flops import FlopCount
from tests.bridge.watch.made_up import forget_compiles

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


class Square(torch.autograd.Function):
    """A product of its own, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        return {"loss": Square.apply(x, self.weight).square().mean(), "others": [x]}


class Images(nn.Module):
    """With statistics, dropout, and a count of its calls that it keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.head, self.kept = nn.Linear(8, 4), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0] = self.kept[0] + 1
        self.last = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.drop(self.last))


class Text(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.ids = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head, self.again = nn.Linear(16, 50), again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x)


Made = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
MODELS: dict[str, Made] = {
    "images": (Images, lambda: torch.randn(4, 3, 8, 8)),
    "text": (Text, lambda: torch.randint(0, 50, (4, 12))),
    "checkpointed": (lambda: Text(again=True), lambda: torch.randint(0, 50, (4, 12))),
    "function": (Own, lambda: torch.randn(4, 8, requires_grad=True)),
}


def hold(module: nn.Module, kind: str) -> nn.Module:
    """A module as its user has compiled it, inside another."""
    root = nn.Module()
    if kind == "call":
        module.compile(backend="eager")
    root.add_module("net", torch.compile(module, backend="eager") if kind == "wrapper" else module)
    return root


def learn(module: nn.Module, x: Any) -> None:
    out = module(x)
    (out["loss"] if isinstance(out, dict) else out.square().mean()).backward()


def note(root: nn.Module, x: Any, net: Any = None) -> CompiledWork:
    work = CompiledWork(root, preserve_state)
    work.open()
    learn(net or root.get_submodule("net"), x)
    work.close()
    return work


def frames() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {**counters["frames"], **counters["stats"]}


@pytest.mark.parametrize("kind", ["wrapper", "call"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_an_eager_step_counts(name: str, kind: str) -> None:
    make, data = MODELS[name]
    module, x = make(), data()
    with FlopCount() as eager:
        learn(copy.deepcopy(module), x)
    found, expected = note(hold(module, kind), x).count(4), eager.per(4)
    assert expected["per_sample"] > 0
    for figure in ("per_sample", "matmul", "convolution", "attention", "recomputed", "at_least"):
        assert found[figure] == pytest.approx(expected[figure], rel=0.01), figure
    assert (name == "checkpointed") == (found["recomputed"] > 0)


@pytest.mark.parametrize("kind", ["wrapper", "call"])
def test_nobody_can_tell_afterwards(kind: str) -> None:
    module, x = Images(), torch.randn(4, 3, 8, 8)
    root, called = hold(module, kind), []
    module.head.weight.register_hook(lambda grad: called.append(type(grad)))
    net = root.get_submodule("net")
    learn(net, x)
    slots = {id(each): dict(vars(each)) for each in root.modules()}
    work = note(root, x)
    assert all(
        vars(each).get(name) is slots[id(each)].get(name)
        for each in root.modules()
        for name in ("forward", "_compiled_call_impl")
    )
    before = copy.deepcopy((module.state_dict(), module.kept, module.last.detach(), torch.get_rng_state()))
    gradients = [each.grad.clone() for each in module.parameters() if each.grad is not None]
    compiled, parameters, called[:] = frames(), [id(each) for each in root.parameters()], []
    assert work.count(4)["per_sample"]
    after = (module.state_dict(), module.kept, module.last.detach(), torch.get_rng_state())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert parameters == [id(each) for each in root.parameters()] and called == []
    assert all(
        torch.equal(each.grad, grad)
        for each, grad in zip(module.parameters(), gradients, strict=True)
        if each.grad is not None
    )
    assert _get_current_dispatch_mode_stack() == []
    learn(net, x)
    assert frames() == compiled, "what was compiled is still there, and serves"


def test_losses_are_those_of_a_run_without_it() -> None:
    losses = []
    for counted in (False, True):
        forget_compiles()
        torch.manual_seed(3)
        module, x = Images(), torch.randn(4, 3, 8, 8)
        root, step = hold(module, "wrapper"), torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(4):
            step.zero_grad()
            if counted and number == 1:
                assert note(root, x).count(4)["per_sample"]
            else:
                learn(root.get_submodule("net"), x)
            step.step()
        losses.append(root.get_submodule("net")(x).detach())
    assert torch.equal(*losses)


def test_what_needs_data_says_so_and_the_step_goes_on() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if float(x.sum()) > 0 else 3)

    module = Asks()
    found = note(hold(module, "call"), torch.ones(2, 4)).count(2)
    assert found["per_sample"] is None and "Asks is compiled, and cannot run without data" in found["why"]
    assert module.layer.weight.grad is not None and _get_current_dispatch_mode_stack() == []


def test_several_calls_and_those_without_a_gradient() -> None:
    layer, x = nn.Linear(4, 8), torch.randn(2, 4)
    root = hold(nn.Sequential(layer), "wrapper")
    net, work = root.get_submodule("net"), CompiledWork(root, preserve_state)
    work.open()
    learn(net, x)
    with torch.no_grad():
        net(x)
    work.close()
    net(x)  # too late
    # Forward and the weight's gradient, and a forward alone.
    assert work.count(2)["per_sample"] == 3 * 2 * 4 * 8


class Output(dict[str, Any]):
    """As Hugging Face's outputs, but unknown to PyTorch."""


class Hidden:
    """Shows none of its tensors."""

    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("wrap", [lambda x: Output(loss=x), lambda x: SimpleNamespace(out=Output(loss=x)), Hidden])
def test_a_loss_inside_an_output_of_an_unknown_class(wrap: Callable[[Tensor], Any]) -> None:
    class Wraps(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x).mean())

    def train(module: Any) -> None:
        out = module(torch.ones(2, 8))
        out = getattr(out, "out", out)
        (out["loss"] if isinstance(out, Output) else out.loss).backward()

    module = Wraps(8, 4)
    with FlopCount() as eager:
        train(copy.deepcopy(module))
    root = hold(module, "call")
    work = CompiledWork(root, preserve_state)
    work.open()
    train(root.get_submodule("net"))
    work.close()
    found, expected = work.count(2), eager.per(2)["per_sample"]
    assert found["at_least"] == (wrap is Hidden), "a forward alone is not called all the work"
    assert found["per_sample"] == pytest.approx(expected / 2 if wrap is Hidden else expected)


def test_work_outside_of_what_is_compiled_makes_it_at_least() -> None:
    root = hold(nn.Linear(4, 4), "call")
    assert note(root, torch.ones(2, 4)).count(2)["at_least"] is False
    root.add_module("eager", nn.Linear(4, 4))
    assert note(root, torch.ones(2, 4)).count(2)["at_least"] is True
    for parameter in root.get_submodule("eager").parameters():
        parameter.requires_grad_(False)
    assert note(root, torch.ones(2, 4)).count(2)["at_least"] is False


def compile_blocks(module: Text) -> nn.Module:
    for layer in module.layers:
        layer.compile(backend="eager")
    root = nn.Module()
    root.add_module("net", module)
    return root


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_a_model_whose_blocks_are_compiled_one_by_one_counts_as_a_whole(again: bool) -> None:
    module, x = Text(again), torch.randint(0, 50, (4, 12))
    with FlopCount() as eager:
        learn(copy.deepcopy(module), x)
    root = compile_blocks(module)
    learn(module, x)
    before, slots = frames(), {id(each): dict(vars(each)) for each in root.modules()}
    work = CompiledWork(root, preserve_state)
    work.open()
    twin = copy.deepcopy(module)
    learn(module, x)
    work.close()
    assert frames() == before and {id(each): dict(vars(each)) for each in root.modules()} == slots
    assert work.count(4) == {**eager.per(4), "source": SOURCE}
    learn(twin, x)
    assert work.count(4)["why"] == "the compiled modules were not called in the counted step", "a copy notes nothing"


class Reads(Text):
    def forward(self, ids: Tensor) -> Tensor:
        assert int(ids.max()) >= 0  # there are no numbers without data
        return super().forward(ids)


def test_blocks_are_counted_by_themselves_where_the_whole_cannot_run_without_data() -> None:
    module, x = Reads(), torch.randint(0, 50, (4, 12))
    with FlopCount() as eager:
        learn(copy.deepcopy(module), x)
    found = note(compile_blocks(module), x).count(4)
    head = 3 * 2 * 12 * 16 * 50
    assert found["at_least"] is True and found["per_sample"] == pytest.approx(eager.per(4)["per_sample"] - head)


def test_the_outermost_compiled_modules_are_found() -> None:
    inner = nn.Linear(2, 2)
    inner.compile(backend="eager")
    assert find_compiled(nn.Sequential(nn.Linear(2, 2))) == []
    assert find_compiled(nn.Sequential(nn.Linear(2, 2), inner)) == [inner]
    outer = torch.compile(nn.Sequential(inner), backend="eager")
    assert find_compiled(nn.ModuleList([outer])) == [outer]


def test_no_call_and_too_many_are_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    root = hold(nn.Linear(4, 4), "call")
    assert "not called" in note(root, torch.ones(2, 4), net=nn.Linear(4, 4)).count(2)["why"]
    monkeypatch.setattr("fastloop.evidence.work.compiled_work.MOST_CALLS", 0)
    assert "more than 0 times" in note(root, torch.ones(2, 4)).count(2)["why"]


def test_what_cannot_be_noted_does_not_stop_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no shapes")

    monkeypatch.setattr("fastloop.evidence.work.compiled_work._make_fake", fail)
    root = hold(nn.Linear(4, 4), "call")
    assert "cannot be kept: RuntimeError" in note(root, torch.ones(2, 4)).count(2)["why"]
    assert all(each.grad is not None for each in root.parameters())


def test_copies_made_while_calls_are_noted_hold_none_of_ours() -> None:
    root = hold(nn.Linear(4, 4), "call")
    work = CompiledWork(root, preserve_state)
    with contextlib.ExitStack() as stack:
        work.open()
        stack.callback(work.close)
        noting: Any = vars(root.get_submodule("net"))["_compiled_call_impl"]
        assert copy.copy(noting) is noting.call


class Masked(nn.Module):
    """Leaves a mask out that leaves nothing out, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.sum() if mask.all() else (y * mask).sum()


def test_a_mask_that_is_tested_needs_no_data() -> None:
    module, batch = Masked(), (torch.randn(4, 8), torch.ones(4, 8, dtype=torch.bool))
    with FlopCount() as eager:
        copy.deepcopy(module)(*batch).backward()
    root = hold(module, "call")
    work = CompiledWork(root, preserve_state)
    work.open()
    root.get_submodule("net")(*batch).backward()
    work.close()
    assert work.count(4)["per_sample"] == pytest.approx(eager.per(4)["per_sample"], rel=0.01)


def test_a_number_that_is_read_does() -> None:
    """The control: a length may decide about the work."""

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[: int(x.argmax())])

    found = note(hold(Reads(4, 4), "call"), torch.ones(3, 4)).count(3)
    assert found["per_sample"] is None and "cannot run without data" in found["why"]


def test_a_language_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    module = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=100, **sizes))
    batch = {"input_ids": torch.randint(1, 90, (4, 16)), "labels": torch.zeros(4, dtype=torch.long)}
    with FlopCount() as eager:
        copy.deepcopy(module)(**batch).loss.backward()
    root = hold(module, "call")
    work = CompiledWork(root, preserve_state)
    work.open()
    root.get_submodule("net")(**batch).loss.backward()
    work.close()
    assert work.count(4)["per_sample"] == pytest.approx(eager.per(4)["per_sample"], rel=0.01)
