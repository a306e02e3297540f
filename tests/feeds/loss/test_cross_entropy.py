"""Cross-entropy over many classes: equal to PyTorch's own, as it is checked on the first call; others pass through."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastloop.feeds.loss import cross_entropy as losses
from fastloop.feeds.loss.cross_entropy import LargeCrossEntropy

CLASSES = 8200
USUAL = torch._C._nn.cross_entropy_loss


def logits_and_targets(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """[20, 8200] and [20], of which two are ignored."""
    torch.manual_seed(0)
    target = torch.randint(0, CLASSES, (20,))
    target[[3, 17]] = -100
    return (3 * torch.randn(20, CLASSES, dtype=dtype)).requires_grad_(), target


def both(large: LargeCrossEntropy, *given: Any, **settings: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of the logits, by PyTorch's own and by this one."""
    found = []
    for where in (contextlib.nullcontext(), large.put_in()):
        with where:
            value = F.cross_entropy(*given, **settings)
        (gradient,) = torch.autograd.grad(value.square().sum(), [given[0]])
        found.append((value.detach(), gradient))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_pytorchs(reduction: str, dtype: torch.dtype) -> None:
    large, close = LargeCrossEntropy(pads=True), losses.CLOSE[dtype]
    (expected, gradient), (value, ours) = both(large, *logits_and_targets(dtype), reduction=reduction)
    assert large.calls == 1 and large.failure == "" and large.deviation is not None and large.deviation < close
    assert value.dtype == expected.dtype and value.shape == expected.shape
    assert float((value - expected).double().norm() / expected.double().norm()) < close
    assert float((ours - gradient).double().norm() / gradient.double().norm()) < close
    assert float((0.99 * ours - gradient).double().norm() / gradient.double().norm()) > close / 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classes_in_the_second_place_of_three(reduction: str) -> None:
    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    turned = logits.detach().view(4, 5, CLASSES).requires_grad_()
    (expected, gradient), (value, ours) = both(large, turned.transpose(1, 2), target.view(4, 5), reduction=reduction)
    assert large.calls == 1 and value.shape == expected.shape
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours, gradient)


@pytest.mark.parametrize(("pads", "row"), [(True, 8256), (False, 8200)])
def test_rows_of_the_gradient_lie_apart_and_shapes_stay(pads: bool, row: int) -> None:
    hidden = torch.randn(2, 10, 4, dtype=torch.float64)
    strides: list[Any] = []
    gradients = []
    for large in (None, LargeCrossEntropy(pads=pads)):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, CLASSES, dtype=torch.float64)
        logits = layer(hidden)
        assert logits.shape == (2, 10, CLASSES) and logits.is_contiguous()
        flat = logits.flatten(0, 1)
        flat.register_hook(lambda gradient: strides.append((gradient.shape, gradient.stride())))
        with contextlib.nullcontext() if large is None else large.put_in():
            value = F.cross_entropy(flat, torch.arange(20))
        gradients.append(torch.autograd.grad(value, list(layer.parameters())))
    assert strides == [((20, CLASSES), (CLASSES, 1)), ((20, CLASSES), (row, 1))]
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "settings",
    [{"label_smoothing": 0.1}, {"weight": torch.ones(CLASSES, dtype=torch.float64)}, {"classes": 100}, {"soft": True}],
)
def test_other_calls_pass_through(settings: dict[str, Any]) -> None:
    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    if few := settings.pop("classes", None):
        logits, target = logits[:, :few].detach().requires_grad_(), target.clamp(max=few - 1)
    if settings.pop("soft", False):
        target = torch.rand(20, CLASSES, dtype=torch.float64)
    (expected, gradient), (value, ours) = both(large, logits, target, **settings)
    assert large.calls == 0 and torch.equal(value, expected) and torch.equal(ours, gradient)
    assert bool(large.passed) == (few is None)


def test_bytes_as_targets_pass_through() -> None:
    """PyTorch's ``target != -100`` ignores 156 among them, its loss does not."""
    large, (logits, _) = LargeCrossEntropy(pads=True), logits_and_targets()
    (expected, _), (value, _) = both(large, logits, torch.arange(150, 170).to(torch.uint8))
    assert large.calls == 0 and large.passed and large.failure == "" and torch.equal(value, expected)


def test_targets_of_another_size_are_pytorchs_error() -> None:
    """The kernels do not look at how many there are."""
    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    with large.put_in(), pytest.raises(ValueError, match="to match target batch_size"):
        F.cross_entropy(logits, target[1:])
    assert large.failure == ""


def test_kernels_get_targets_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    really, steps = losses.reduce_rows, []

    def reduce(*given: Any) -> Any:
        steps.append(given[1].stride(0))
        return really(*given)

    monkeypatch.setattr(losses, "reduce_rows", reduce)
    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    with large.put_in():
        F.cross_entropy(logits, torch.stack([target, target], 1)[:, 0])
        F.cross_entropy(logits, target[0].expand(20))
    assert steps == [1, 1]


def test_gradients_can_be_differentiated_and_nothing_is_kept_without_them() -> None:
    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    seconds = []
    for is_on in (False, True):
        with large.put_in() if is_on else contextlib.nullcontext():
            loss = F.cross_entropy(logits, target)
            (gradient,) = torch.autograd.grad(loss, [logits], create_graph=True)
        seconds.append(torch.autograd.grad(gradient.square().sum(), [logits])[0])
    torch.testing.assert_close(seconds[1], seconds[0], rtol=1e-9, atol=1e-15)
    with torch.inference_mode(), large.put_in():
        assert F.cross_entropy(logits, target).item() == pytest.approx(float(loss.detach()), rel=1e-12)
    assert large.calls == 2


def test_logits_may_change_in_place_after_the_loss() -> None:
    """PyTorch's own keeps none of them, so it allows that, and runs from the next call on."""
    large, gradients = LargeCrossEntropy(pads=True), []
    for is_on in (False, True, True):
        leaf, target = logits_and_targets()
        with large.put_in() if is_on else contextlib.nullcontext():
            logits = leaf * 1.0
            loss = F.cross_entropy(logits, target)
            logits.detach().sub_(5.0)
            (gradient,) = torch.autograd.grad(loss, [leaf])
        gradients.append(gradient)
    assert large.calls == 1 and large.failure == "the logits are changed in place after the loss"
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-15)
    assert torch.equal(gradients[2], gradients[0])


def test_copies_of_logits_are_kept_for_a_few_calls_only() -> None:
    large = LargeCrossEntropy(pads=True)
    with large.put_in():
        for _ in range(5):
            logits, target = logits_and_targets()
            F.cross_entropy(logits, target).backward()  # type: ignore[no-untyped-call]
        kept = F.cross_entropy(logits, target).grad_fn
    while kept is not None and not hasattr(kept, "copy"):
        kept = kept.next_functions[0][0]
    assert kept is not None and kept.copy is None and large.unchanged == 5


@pytest.mark.parametrize("where", ["reduce_rows", "write_gradient"])
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_kernel_that_fails_or_deviates_is_not_used(where: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    really, asked = getattr(losses, where), []

    def broken(*args: Any) -> Any:
        asked.append(where)
        if how == "raises":
            raise RuntimeError("no kernel")
        found = really(*args)
        return (1.1 * found[0], found[1]) if where == "reduce_rows" else args[4].mul_(1.1)

    large = LargeCrossEntropy(pads=True)
    kernels = {"reduce_rows": losses.reduce_rows, "write_gradient": losses.write_gradient} | {where: broken}
    monkeypatch.setattr(losses, "find_kernels", lambda _logits: tuple(kernels.values()))
    (expected, gradient), (value, ours) = both(large, *logits_and_targets())
    assert asked == [where]
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours, gradient)
    assert large.failure == ("RuntimeError: no kernel" if how == "raises" else large.failure) and large.failure
    both(large, *logits_and_targets())
    assert asked == [where], "it was asked again"


@pytest.mark.parametrize("where", ["reduce_rows", "write_gradient"])
def test_a_first_call_without_targets_is_no_check(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    really = getattr(losses, where)

    def broken(*args: Any) -> Any:
        found = really(*args)
        return (1.1 * found[0], found[1]) if where == "reduce_rows" else args[4].mul_(1.1)

    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    both(large, logits, torch.full_like(target, -100), reduction="sum")
    assert large.calls == 1 and large.deviation is None and not large.row
    with monkeypatch.context() as patch:
        patch.setattr(losses, where, broken)
        both(large, logits, target)
    assert "the first rows deviate" in large.failure


def test_pytorchs_own_comes_back() -> None:
    large = LargeCrossEntropy(pads=True)
    with pytest.raises(KeyError), large.put_in():
        assert torch._C._nn.cross_entropy_loss is not USUAL
        raise KeyError
    assert torch._C._nn.cross_entropy_loss is USUAL


def test_pytorchs_own_comes_back_in_any_order() -> None:
    first, second = (LargeCrossEntropy(pads=True).put_in() for _ in range(2))
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert torch._C._nn.cross_entropy_loss is not USUAL
    second.__exit__(None, None, None)
    assert torch._C._nn.cross_entropy_loss is USUAL


def test_a_reference_to_it_is_pickled_copied_and_takes_part() -> None:
    taken, (logits, target) = F.cross_entropy, logits_and_targets()  # as by from ... import, before a fit
    large = LargeCrossEntropy(pads=True)
    with large.put_in():
        assert pickle.loads(pickle.dumps(F.cross_entropy)) is copy.deepcopy(F.cross_entropy) is F.cross_entropy
        assert taken(logits, target).isfinite() and torch.nn.CrossEntropyLoss()(logits, target).isfinite()
    assert large.calls == 2


def test_dynamo_captures_the_usual_call() -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    large, (logits, target) = LargeCrossEntropy(pads=True), logits_and_targets()
    compiled = torch.compile(lambda: F.cross_entropy(2 * logits, target), backend=keep, fullgraph=True)
    with large.put_in():
        value = compiled()
    assert len(graphs) == 1 and "nn.functional.cross_entropy(" in graphs[0]
    torch.testing.assert_close(value, F.cross_entropy(2 * logits, target))
