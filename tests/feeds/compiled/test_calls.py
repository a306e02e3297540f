"""A module's compiled calls: graphs for any stream of sizes, and the way back to eager. Graphs are captured with their
gradients and run eagerly (aot_eager); Inductor is asked in one test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.feeds import call_shapes
from fastloop.feeds.compiled.calls import CompiledCall, put_in
from tests.torch_version import TORCH

really_compile = torch.compile
Call = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("aot_eager", monkeypatch)


def compile_by(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_anyhow(function: Any, *, backend: Any = backend, options: Any = None, dynamic: Any = None) -> Any:
        return really_compile(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_anyhow)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).mean(dim=1))


class Keywords(Net):
    """As Hugging Face calls its models, with what it leaves out as None."""

    def forward(self, *, ids: torch.Tensor, mask: Any = None, labels: Any = None, scale: int = 1) -> dict[str, Any]:  # type: ignore[override]
        hidden = torch.tanh(self.first(torch.nn.functional.one_hot(ids, 4).float()))
        if mask is not None:
            hidden = hidden * mask[..., None]
        return {"loss": self.last(hidden).mean() * scale, "labels": labels}


class OfGraphs(Net):
    def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        sums = torch.zeros(batch.x.shape[0], 6).index_add(0, batch.edges[1], self.first(batch.x)[batch.edges[0]])
        return self.last(torch.tanh(sums)).sum()


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        factor = 1.0 if hidden.sum().item() > 1e9 else 2.0
        return self.last(hidden.mean(dim=1)) * factor


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return super().forward(x) * self.step


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


def wrap(module: torch.nn.Module, dynamic: bool | None = None) -> CompiledCall:
    call = CompiledCall(module, "net", {}, mode="default", dynamic=dynamic)
    vars(module)["_compiled_call_impl"] = call
    return call


def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Result of a call, and gradients of parameters and inputs."""
    result = module(*args, **kwargs)
    loss = (result["loss"] if isinstance(result, dict) else result).sum()
    module.zero_grad()
    inputs = [each for each in args if isinstance(each, torch.Tensor) and each.requires_grad]
    for each in inputs:
        each.grad = None
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in (*module.parameters(), *inputs) if each.grad is not None)]


def agree(module: torch.nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> CompiledCall:
    """Make these calls compiled and eagerly, and compare results and gradients."""
    plain, call = copy.deepcopy(module), wrap(module)
    for args, kwargs in calls:
        torch.testing.assert_close(run(module, *args, **kwargs), run(plain, *args, **kwargs))
    return call


def batch(length: int, count: int = 3) -> torch.Tensor:
    torch.manual_seed(length)
    return torch.randn(count, length, 4)


LENGTHS = [int(length) for length in torch.randperm(100, generator=torch.Generator().manual_seed(0)) + 2]


def test_lengths_noted_before_the_first_compile_have_one_graph() -> None:
    module = Net()
    plain, call = copy.deepcopy(module), wrap(module)
    for length in LENGTHS[:2]:
        call.note_shapes((batch(length),), {})
    for length in LENGTHS:
        torch.testing.assert_close(run(module, batch(length)), run(plain, batch(length)))
    assert (call.graphs, call.budgets[True].eager) == (1, 0)


def test_a_hundred_lengths_that_nobody_noted_have_two_graphs() -> None:
    call = agree(Net(), [((batch(length),), {}) for length in LENGTHS])
    assert (call.graphs, call.budgets[True].eager, call.spent) == (2, call_shapes.LEARN, "")


def test_without_the_limit_there_are_more_graphs() -> None:
    """The control: what Dynamo makes of lengths and counts of which some are 1."""
    module, before = Net(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = torch.compile(module, dynamic=None)
    sizes = [(7, 3), (9, 3), (1, 3), (9, 1), (1, 1), (8, 5)]
    for length, count in sizes:
        compiled(batch(length, count))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before > call_shapes.GRAPHS
    torch._dynamo.reset()
    call = agree(Net(), [((batch(length, count),), {}) for length, count in sizes * 3])
    assert call.graphs <= call_shapes.GRAPHS and not call.failure


def test_two_dimensions_may_vary_and_meet() -> None:
    module = Net()
    call = wrap(module)
    for length, count in [(5, 4), (6, 7)]:
        call.note_shapes((batch(length, count),), {})
    for length, count in [(4, 4), (9, 2), (3, 8), (6, 6)]:  # the first one with both alike, which says nothing
        run(module, batch(length, count))
    assert (call.graphs, call.budgets[True].eager) == (1, 0)


def test_length_one_runs_eagerly_until_it_is_common() -> None:
    lengths = [7, 9, 8, 7, 1, 6] * 3
    module = Net()
    plain, call = copy.deepcopy(module), wrap(module)
    call.note_shapes((batch(5),), {})
    call.note_shapes((batch(6),), {})
    for length in lengths:
        torch.testing.assert_close(run(module, batch(length)), run(plain, batch(length)))
    assert (call.graphs, call.budgets[True].eager) == (2, call_shapes.LEARN)


def test_a_module_called_twice_a_step_with_two_sizes() -> None:
    call = agree(Net(), [((batch(length),), {}) for length in [16, 8] * 10])
    assert call.graphs == 2 and not call.spent


def test_keywords_and_none() -> None:
    def keywords(length: int, mask: bool, **others: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(4, (3, length))
        return (), {"ids": ids, "mask": torch.ones(3, length) if mask else None, **others}

    calls = [keywords(length, True, labels=None) for length in LENGTHS[:20]]
    call = agree(Keywords(), calls)
    assert (call.graphs, call.budgets[True].eager) == (2, call_shapes.LEARN)
    some = agree(Keywords(), [keywords(6, place % 2 == 0, scale=2) for place in range(12)])  # with a mask and without
    assert (some.graphs, some.budgets[True].eager) == (2, 0), "each kind has one of its own"


def test_objects_whose_tensors_vary() -> None:
    def graph(nodes: int, edges: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (SimpleNamespace(x=torch.randn(nodes, 4), edges=torch.randint(nodes, (2, edges)), names=["a"]),), {}

    call = agree(OfGraphs(), [graph(5 + place % 7, 11 + 3 * place) for place in range(20)])
    assert (call.graphs, call.budgets[True].eager) == (2, call_shapes.LEARN)


def test_inputs_with_gradients() -> None:
    call = agree(Net(), [((batch(length).requires_grad_(),), {}) for length in LENGTHS[:12]])
    assert (call.graphs, call.budgets[True].eager) == (2, call_shapes.LEARN)
    both = agree(Net(), [((batch(7).requires_grad_(place % 2 == 0),), {}) for place in range(12)])  # as GANs do
    assert (both.graphs, both.budgets[True].eager) == (2, 0)


def test_a_module_with_a_graph_break() -> None:
    call = agree(Breaking(), [((batch(length),), {}) for length in LENGTHS[:20]])
    assert call.budgets[True].graphs == 2 and call.graphs == 4  # two pieces each
    assert call.budgets[True].eager == call_shapes.LEARN


def test_evaluation_has_graphs_of_its_own() -> None:
    module = Net()
    plain, call = copy.deepcopy(module), wrap(module)
    for length in LENGTHS[:30]:
        torch.testing.assert_close(run(module, batch(length)), run(plain, batch(length)))
        module.eval()
        with torch.inference_mode():
            torch.testing.assert_close(module(batch(length, 5)), plain(batch(length, 5)))
        module.train()
    assert {key: budget.graphs for key, budget in call.budgets.items()} == {True: 2, False: 2}
    assert call.budgets[False].eager <= call_shapes.LEARN and not call.spent


def test_autocast_on_and_off() -> None:
    module = Net()
    plain, call = copy.deepcopy(module), wrap(module)
    call.note_shapes((batch(5),), {})
    call.note_shapes((batch(6),), {})
    for place, length in enumerate(LENGTHS[:20]):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=place % 2 == 0):
            torch.testing.assert_close(run(module, batch(length)), run(plain, batch(length)))
    assert (call.graphs, call.budgets[True].eager) == (2, 0)


@pytest.mark.parametrize(("dynamic", "graphs", "eager"), [(True, 1, 0), (False, 2, 18)])
def test_what_the_user_says_of_dimensions(dynamic: bool, graphs: int, eager: int) -> None:
    module = Net()
    call = wrap(module, dynamic)
    for length in LENGTHS[:20]:
        module(batch(length))
    assert (call.graphs, call.budgets[True].eager) == (graphs, eager)


def test_what_recompiles_for_ever_ends_in_eager() -> None:
    module = Counting()
    plain, call = copy.deepcopy(module), wrap(module)
    for _ in range(30):
        torch.testing.assert_close(module(batch(7)), plain(batch(7)))
    assert call.graphs == call_shapes.GRAPHS and module.step == 30
    assert call.spent == "net: 10 of the last 10 calls matched none of 2 graphs"
    assert (call.budgets[True].calls, call.budgets[True].eager) == (30, 30 - call_shapes.GRAPHS)


def test_a_compiled_module_inside_a_compiled_one_is_taken_in() -> None:
    inner, outer = Net(), torch.nn.Sequential()
    outer.append(inner)
    inside, call = wrap(inner), wrap(outer)
    outer(batch(7))
    assert (inside.graphs, call.graphs) == (0, 1)


def test_a_checkpoint_repeats_what_its_call_did() -> None:
    """Else torch misses saved tensors in the backward, and the training ends. The exception that ends the repetition is
    no failure."""
    module = Net()
    call = wrap(module)
    for length in [7] * 12 + LENGTHS[:12]:
        torch.utils.checkpoint.checkpoint(module, batch(length), use_reentrant=False).sum().backward()
    assert (call.graphs, call.budgets[True].eager, call.failure) == (2, 3, "")


class Fails:
    """A backend whose code fails in its calls from the given one on, or for these sizes."""

    def __init__(self, *, after: int = 0) -> None:
        self.after, self.ran, self.raised = after, 0, 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.ran += 1
            results = graph.forward(*args)
            if self.ran > self.after:
                self.raised += 1
                raise AssertionError("expected size 64==64, stride 1==4096 at dim=1\n\nand a hint")
            return results

        return run


@pytest.mark.parametrize("after", [0, 3])
def test_code_that_fails_is_repeated_eagerly(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Fails(after=after)
    compile_by(backend, monkeypatch)
    module = Net()
    call = agree(module, [((batch(7),), {}) for _ in range(after + 3)])
    assert backend.raised == 1, "it was tried again"
    assert call.failure == "net: AssertionError: expected size 64==64, stride 1==4096 at dim=1"
    assert "_compiled_call_impl" not in vars(module)


def test_buffers_are_put_back_where_a_compile_was_to_be_feared(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Fails()
    compile_by(backend, monkeypatch)
    module = Normed()
    plain, call = copy.deepcopy(module), wrap(module)
    torch.testing.assert_close(run(module, batch(7)), run(plain, batch(7)))
    assert backend.raised == 1 and call.failure
    assert module.norm.num_batches_tracked == 1
    torch.testing.assert_close(module.norm.running_mean, plain.norm.running_mean, rtol=0, atol=0)


def test_what_was_changed_in_place_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1.0)
            return super().forward(x)

    for module, after in ((Writes(), 0), (Normed(), 3)):  # an input; buffers, in a later call, that nobody kept
        torch._dynamo.reset()
        compile_by(backend := Fails(after=after), monkeypatch)
        wrap(module)
        for _ in range(after):
            module(batch(7))
        x = batch(7)
        with pytest.raises(AssertionError, match="stride"):
            module(x)
        assert backend.raised == 1
        if after == 0:
            torch.testing.assert_close(x, batch(7) + 1.0)  # once


def test_a_backward_that_cannot_be_compiled_is_found_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    tried = []

    def broken(graph: Any, _inputs: Any) -> Any:
        tried.append(graph)
        raise OSError("no space left")

    backend = aot_autograd(fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward), bw_compiler=broken)
    compile_by(backend, monkeypatch)
    call = agree(Net(), [((batch(7),), {}) for _ in range(3)])
    assert len(tried) == 1 and "no space left" in call.failure


def test_the_users_own_errors_arrive_and_cost_nothing() -> None:
    class Checks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] == 13:
                raise ValueError("unlucky")
            return super().forward(x)

    module = Checks()
    call = wrap(module)
    for length in (7, 8, 9, 13, 13, 10):
        if length == 13:
            with pytest.raises(ValueError, match=r"^unlucky$"):
                module(batch(length))
        else:
            module(batch(length))
    assert not call.failure and call.graphs == 2


@pytest.mark.slow
def test_inductor_serves_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("inductor", monkeypatch)
    call = agree(Net(), [((batch(length),), {}) for length in LENGTHS[:12]])
    assert (call.graphs, call.budgets[True].eager, call.failure) == (2, call_shapes.LEARN, "")


@pytest.mark.parametrize("which", ["first", "last"])
def test_what_is_unfrozen_gets_gradients(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As BackboneFinetuning does, or a GAN, which toggles. Dynamo does not look at parameters whose dictionary is the
    same: without ours, the graph of the frozen layer stays in use."""
    for touches in (True, False):
        torch._dynamo.reset()
        net = Net()
        if not touches:
            monkeypatch.setattr(CompiledCall, "_touch_parameters", lambda _self: None)
        wrap(net)
        layer, found = getattr(net, which), []
        for trains in (False, True, False, True):
            layer.requires_grad_(trains)
            net.zero_grad()
            net(batch(5)).sum().backward()
            found.append(layer.weight.grad is not None)
        heeds = touches or TORCH >= (2, 14)  # later ones look by themselves
        assert found == [False, heeds, False, heeds]


def test_parameters_may_be_removed() -> None:
    net = Net()
    wrap(net)
    before = net(batch(5))
    del net.first.bias
    net.first.bias = None  # type: ignore[assignment]
    assert net(batch(5)).shape == before.shape


def test_kinds_of_calls_have_graphs_of_their_own() -> None:
    """A discriminator sees samples, generated samples of another type, and passes a gradient on with its own frozen."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    call = CompiledCall(module, "net", {}, mode="default", dynamic=None)
    x = torch.randn(3, 4)
    for _ in range(12):
        assert torch.allclose(call(x), module._call_impl(x), atol=1e-6)
        module.requires_grad_(False)
        call(x.clone().requires_grad_()).sum().backward()
        with torch.no_grad():
            call(x)
        module.requires_grad_(True)
    assert call.graphs == 3 and not call.spent and call.failure == ""
    assert sum(budget.eager for budget in call.budgets.values()) == 0
    assert len(call.budgets) == 4


@pytest.mark.parametrize("order", ["above first", "below first", "above paused"])
def test_undo_leaves_what_was_put_in_before(order: str) -> None:
    module = Net()
    lowest, below, above = (CompiledCall(module, "net", {}, mode="eager", dynamic=None) for _ in range(3))
    undos = [put_in([each]) for each in (lowest, below, above)]
    if order == "below first":
        undos.pop(1)()
        assert vars(module)["_compiled_call_impl"] is above
    if order == "above paused":
        del module._compiled_call_impl
    for undo, left in zip(reversed(undos), [below, lowest][-len(undos) + 1 :], strict=False):
        undo()
        assert vars(module)["_compiled_call_impl"] is left
    for undo in undos:  # harmless when called twice
        undo()
        assert "_compiled_call_impl" not in vars(module)


def test_calls_that_are_forced_to_run_eagerly_do_not_count() -> None:
    """A check of ours plays a step with `force_eager`: its calls say nothing about how well graphs fit."""
    module = Net()
    call = wrap(module)
    for rows in (8, 16, 16, 16, 16):
        module(batch(3, rows))
    assert call.budgets[True].exhausted
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2 * call_shapes.ENOUGH):
            module(batch(3, 16))
    captured, eager = call.graphs, call.budgets[True].eager
    module(batch(3, 16))
    assert call.forced == 2 * call_shapes.ENOUGH and not call.spent
    assert (call.graphs, call.budgets[True].eager) == (captured, eager), "the graph is still used"


def _halve(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def _halve_gradients(_module: Any, inputs: Any, _outputs: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in inputs)


@pytest.mark.parametrize("where", ["", "last"])
@pytest.mark.parametrize("backward", [False, True])
def test_hooks_added_later_run_until_they_are_removed(where: str, backward: bool) -> None:
    plain, module = Net(), Net()
    call = wrap(module)
    run(module, batch(7))
    handles = []
    for each in (plain, module):
        part = each.get_submodule(where)
        handles.append(
            part.register_full_backward_hook(_halve_gradients) if backward else part.register_forward_hook(_halve)
        )
    for _ in range(2):
        inputs = [batch(7).requires_grad_(), batch(7).requires_grad_()]
        torch.testing.assert_close(run(module, inputs[0]), run(plain, inputs[1]))
    assert call.hooked == 2 and call.spent == "net: it got hooks after its graphs were made"
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(run(module, batch(7)), run(plain, batch(7)))
    assert (call.graphs, call.hooked) == (1, 2)


def test_a_module_with_hooks_does_not_run_the_graphs_of_one_without() -> None:
    modules, plain, codes = [Net(), Net()], Net(), dict[Any, Any]()
    put_in([CompiledCall(module, "net", codes, mode="default", dynamic=None) for module in modules])
    for module in (modules[1], plain):
        module.last.register_forward_hook(_halve)
    run(modules[0], batch(7))
    torch.testing.assert_close(run(modules[1], batch(7)), run(plain, batch(7)))
    assert modules[1]._compiled_call_impl.graphs == 1  # type: ignore[union-attr, attr-defined]
