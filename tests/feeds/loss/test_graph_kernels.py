"""Kernels put into captured graphs: equal loss and gradients, only where an output layer's logits go to the loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastloop.feeds.compiled.graph_passes import COMPILES, Frozen, choose_backend
from fastloop.feeds.loss import cross_entropy, graph_kernels
from fastloop.feeds.loss.graph_kernels import UseKernels
from tests.feeds.loss.test_padding import CLASSES, Model, Smoothed, Turned


class Sum(Model):
    settings = {"ignore_index": 5, "reduction": "sum"}


class Each(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = (self.embed(tokens) @ self.out.weight.T).view(-1, CLASSES)
        return F.cross_entropy(logits, answers.reshape(-1), reduction="none").square().mean()


class Cast(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens)).float()
        return nn.CrossEntropyLoss()(logits.view(-1, CLASSES), answers.view(-1))


class Shown(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens))
        return F.cross_entropy(logits.view(-1, CLASSES), answers.view(-1)) + 0 * logits.mean()


class Scaled(Model):
    """Inductor merges the division with its own kernels."""

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        return F.cross_entropy((self.out(self.embed(tokens)) / 2).flatten(0, 1), answers.flatten())


class Sliced(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens))[:, :-1].reshape(-1, CLASSES)
        return F.cross_entropy(logits, answers[:, 1:].reshape(-1))


@torch.compiler.allow_in_graph
def cross_entropy_of_half(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits / 2, target)


cross_entropy_of_half.__name__ = "cross_entropy"


class Owned(Model):
    """Another function has the name of PyTorch's."""

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        return cross_entropy_of_half(self.out(self.embed(tokens)).flatten(0, 1), answers.flatten())


class OfEach(Model):
    """The mean square of each sample's gradient."""

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        def compute(bias: torch.Tensor, tokens: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(F.linear(self.embed(tokens), self.out.weight, bias), answers)

        gradients = torch.func.vmap(torch.func.grad(compute), (None, 0, 0))(self.out.bias, tokens, answers)
        return gradients.square().mean()


class Barred(Model):
    """Changes a copy of the logits in place, before the loss."""

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens)).float().flatten(0, 1)
        logits[:, 3] = -5.0
        return F.cross_entropy(logits, answers.flatten())


class Reused(Model):
    """Changes the logits in place, after a copy for the loss."""

    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens))
        copied = logits.float().flatten(0, 1)
        logits.mul_(3)
        return F.cross_entropy(copied, answers.flatten())


class ChangedLater(Model):
    def forward(self, tokens: torch.Tensor, answers: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens)).flatten(0, 1)
        loss = F.cross_entropy(logits, answers.flatten())
        return loss + logits.mul_(2).mean()


def run(call: Any, module: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(12).view(3, 4) % 7
    loss = call(tokens, tokens.flip(1).where(tokens != 3, -100 if module.settings == {} else 5))
    return [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)]


def put_in(module: nn.Module, *, compiles: bool = True) -> tuple[Any, UseKernels]:
    torch._dynamo.reset()
    use = UseKernels()

    def run_changed(graph: Any, _inputs: Any) -> Any:
        graph.meta[COMPILES] = compiles
        return use(graph).forward

    return torch.compile(module.forward, backend=run_changed), use


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_kernels, "DEVICES", ("cpu",))


@pytest.mark.parametrize("kind", [Model, Sum, Each, Shown, Cast])
def test_loss_and_gradients_stay(kind: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = kind() if kind is Cast else kind().double()
    ours = copy.deepcopy(plain)
    call, use = put_in(ours)
    expected, (rtol, atol) = run(plain, plain), (1e-4, 1e-7) if kind is Cast else (1e-10, 1e-15)
    torch.testing.assert_close(run(call, ours), expected, rtol=rtol, atol=atol)
    assert use.used == 1

    really = cross_entropy.write_gradient
    monkeypatch.setattr(cross_entropy, "write_gradient", lambda *given: (really(*given), given[4].mul_(1.01)))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(run(call, ours), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", [Scaled, Sliced, Smoothed, Turned, Owned, OfEach])
def test_others_stay_as_they_are(kind: type[Model]) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    ours = copy.deepcopy(plain)
    call, use = put_in(ours)
    torch.testing.assert_close(run(call, ours), run(plain, plain))
    assert use.used == 0


@pytest.mark.parametrize("kind", [Barred, Reused, ChangedLater])
def test_logits_that_are_changed_in_place_stay(kind: type[Model]) -> None:
    """The kernels would read them as they are at the loss, and once more in the backward."""
    torch.manual_seed(0)
    plain = kind().bfloat16()
    ours = copy.deepcopy(plain)
    call, use = put_in(ours)
    torch.testing.assert_close(run(call, ours), run(plain, plain))
    assert use.used == 0


def test_an_index_to_ignore_that_varies_stays_an_input() -> None:
    torch.manual_seed(0)

    class Ignoring(Model):
        def forward(self, tokens: torch.Tensor, answers: torch.Tensor, ignored: int = -100) -> Any:
            return F.cross_entropy(self.out(self.embed(tokens)).flatten(0, 1), answers.flatten(), ignore_index=ignored)

    module, tokens = Ignoring().double(), torch.arange(12).view(3, 4)
    call, use = put_in(module)
    for ignored in (1, 2, 3, 4):
        torch.testing.assert_close(call(tokens, tokens, ignored), module(tokens, tokens, ignored))
    assert use.used == 1


def test_graphs_that_run_as_they_are_stay() -> None:
    """Without Inductor, PyTorch's loss runs, or its replacement."""
    module = Model()
    call, use = put_in(module, compiles=False)
    run(call, module)
    assert use.used == 0


def test_logits_are_read_in_the_type_in_which_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, really = list[torch.dtype](), cross_entropy.reduce_rows

    def reduce(*given: Any) -> Any:
        seen.append(given[0].dtype)
        return really(*given)

    monkeypatch.setattr(cross_entropy, "reduce_rows", reduce)
    module = Cast()
    call, use = put_in(module)
    with torch.autocast("cpu", torch.bfloat16):
        found, *_ = run(call, module)
        expected, *_ = run(module, module)
    assert use.used == 1 and seen == [torch.bfloat16] and found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_inductor_compiles_and_caches_such_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    module, use = Model(), UseKernels()
    expected = run(module, module)
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(module.forward, **choose_backend("default", (use,), Frozen(frozenset())))
        torch.testing.assert_close(run(compiled, module), expected)
    assert use.used == 2 and counters["aot_autograd"]["autograd_cache_hit"] == 1
