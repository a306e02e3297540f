"""The work of compiled functions: what their code counts eager, without running it again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.output_graph import OutputGraph
from torch.utils.checkpoint import checkpoint

from fastloop.bridge.apply.state.untouched import preserve_state
from fastloop.evidence.work import captured_graphs
from fastloop.evidence.work.captured_graphs import count_kept, keep_graphs
from fastloop.evidence.work.compiled_work import GRAPHS, CompiledWork
from fastloop.evidence.work.flops import FlopCount
from tests.evidence.work.test_compiled_work import MODELS

Step = Callable[[Tensor], Any]


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def count_eager(step: Step, x: Tensor) -> Any:
    with FlopCount() as count:
        step(x).square().mean().backward()
    return count.per(4)


def count_graphs(root: nn.Module, step: Step, *batches: Tensor, note: int = -1, **how: Any) -> tuple[Any, int]:
    """The count of one of these steps, and how many graphs were captured."""
    before, compiled = count_kept(), torch.compile(step, backend="eager", **how)
    with keep_graphs():
        for x in batches[:note]:
            compiled(x).square().mean().backward()
        work = CompiledWork(root, preserve_state)
        work.open()
        compiled(batches[note]).square().mean().backward()
        work.close()
    return work.count(4), count_kept() - before


@pytest.mark.parametrize("name", ["images", "text"])
def test_a_compiled_function_counts_as_its_code_does_eager(name: str) -> None:
    make, draw = MODELS[name]
    model, x = make(), draw()
    expected = count_eager(copy.deepcopy(model), x)
    found, captured = count_graphs(model, lambda x: model(x), x, x)
    assert captured > 0 and found["source"] == GRAPHS and found["at_least"] is False
    kinds = ("per_sample", "matmul", "convolution", "attention")
    assert [found[kind] for kind in kinds] == [expected[kind] for kind in kinds]


class Broken(nn.Module):
    """Two layers, with a break of the graph between them, and numbers that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(8, 16), nn.Linear(16, 4), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.seen.append(float(x.detach().sum()))
        torch._dynamo.graph_break()
        return self.second(x)


def test_all_parts_of_a_broken_graph_count_and_run_once() -> None:
    model, x = Broken(), torch.randn(4, 8)
    expected = count_eager(copy.deepcopy(model), x)
    found, captured = count_graphs(model, lambda x: model(x), x, x)
    assert captured > 1 and found["per_sample"] == expected["per_sample"] and found["at_least"] is False
    assert len(model.seen) == 2, "nothing that a step keeps is kept once more"


class Towers(nn.Module):
    """Two layers, a number that scales their product, and a break of the graph before it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(8, 16), nn.Linear(8, 16), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        left, right, scale = self.left(x), self.right(x), self.scale.exp()
        torch._dynamo.graph_break()
        return scale * left @ right.t()


def test_a_number_beside_other_outputs_is_not_taken_for_the_loss() -> None:
    model, x = Towers(), torch.randn(4, 8)
    expected = count_eager(copy.deepcopy(model), x)
    found, captured = count_graphs(model, lambda x: model(x), x, x)
    assert captured > 1 and found["per_sample"] == expected["per_sample"] and found["at_least"] is False


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4)])
def test_the_shapes_are_those_of_the_noted_step(sizes: tuple[int, int]) -> None:
    model = nn.Linear(8, 16)
    found, captured = count_graphs(model, lambda x: model(x), *(torch.randn(n, 8) for n in sizes), dynamic=True)
    assert captured == 1 and found["per_sample"] == 2 * 2 * 8 * 16 * sizes[-1] / 4


def test_what_a_checkpoint_computes_again_is_no_work() -> None:
    model, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: model(x), backend="eager")
    ran: list[int] = []

    def count_runs(x: Tensor) -> Any:
        ran.append(1)
        return compiled(x)

    with keep_graphs():
        count_runs(x)
        work = CompiledWork(model, preserve_state)
        work.open()
        checkpoint(count_runs, x, use_reentrant=False).square().mean().backward()
        work.close()
    assert len(ran) == 3 and work.count(4)["per_sample"] == 3 * 2 * 8 * 16


def test_a_reentrant_checkpoint_computes_gradients_only_when_it_computes_again() -> None:
    layers, x = [nn.Linear(8, 8) for _ in range(3)], torch.randn(4, 8, requires_grad=True)
    block = torch.compile(lambda layer, x: layer(x).relu(), backend="eager")

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(block, layer, x, use_reentrant=True)
        return x.square().mean()

    with keep_graphs():
        step(x).backward()
        work = CompiledWork(nn.ModuleList(layers), preserve_state)
        work.open()
        step(x).backward()
        work.close()
    found = work.count(4)
    assert found["per_sample"] == 3 * 3 * 2 * 8 * 8 and found["at_least"] is False


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_eager_layer_beside_makes_it_at_least(is_frozen: bool) -> None:
    root = nn.ModuleDict({"compiled": nn.Linear(8, 16), "eager": nn.Linear(8, 16).requires_grad_(not is_frozen)})
    found, _ = count_graphs(root, lambda x: root["compiled"](x), torch.randn(4, 8), torch.randn(4, 8))
    assert found["at_least"] is True and found["per_sample"] == 2 * 2 * 8 * 16


def test_an_eager_model_beside_a_function_without_products_may_have_some() -> None:
    model, before = nn.Linear(8, 16), count_kept()
    compiled, x = torch.compile(lambda x: x.square().mean(), backend="eager"), torch.randn(4, 8)
    with keep_graphs():
        compiled(model(x)).backward()
        work = CompiledWork(model, preserve_state)
        work.open()
        compiled(model(x)).backward()
        work.close()
    found = work.count(4)
    assert count_kept() > before and found["per_sample"] is None and found["no_products"] is False
    assert found["why"] == "the counted part of the step had no product, convolution or attention"


def test_what_was_captured_before_is_not_counted() -> None:
    """The control: nothing is known of its graph."""
    model, x, before = nn.Linear(8, 16), torch.randn(4, 8), count_kept()
    compiled = torch.compile(lambda x: model(x), backend="eager")
    compiled(x)
    with keep_graphs():
        work = CompiledWork(model, preserve_state)
        work.open()
        compiled(x).sum().backward()
        work.close()
    found = work.count(4)
    assert count_kept() == before and found["per_sample"] is None
    assert found["why"] == "the compiled functions did not run in the counted step"


def test_a_graph_that_cannot_be_copied_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fired: list[int] = []

    def refuse(*_: Any) -> Any:
        fired.append(1)
        raise TypeError("no such node")

    model, x, before = nn.Linear(8, 16), torch.randn(4, 8), count_kept()
    with keep_graphs(), monkeypatch.context() as patch:
        patch.setattr(captured_graphs.torch.fx.Graph, "graph_copy", refuse)
        found = torch.compile(lambda x: model(x), backend="eager")(x)
    assert fired and torch.equal(found, model(x)) and count_kept() == before


def test_nothing_stays_in_dynamo() -> None:
    usual = OutputGraph.call_user_compiler
    with contextlib.suppress(LookupError), keep_graphs():
        assert OutputGraph.call_user_compiler is not usual
        raise LookupError
    assert OutputGraph.call_user_compiler is usual
