"""What the fused form of an optimizer would save, timed on copies of its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastloop.evidence.model import optimizer_cost
from fastloop.evidence.model.optimizer_cost import MOST_ELEMENTS, describe_optimizers, estimate_fusing_ms

SHAPES = [(8, 8), (8,)] * 80
MANY = len(SHAPES) / 32  # of each drawn parameter


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes 3 ms, a fused one 1 ms."""

    def take(optimizer: torch.optim.Optimizer) -> float:
        optimizer.step()
        return 0.001 if optimizer.defaults["fused"] else 0.003

    monkeypatch.setattr(optimizer_cost, "_time_update", take)


@pytest.mark.parametrize(
    ("made", "ms"),
    [
        (lambda: torch.optim.Adam(parameters((3, 3), (3,))), 2.0),
        (lambda: torch.optim.AdamW(parameters(*SHAPES), lr=0.1, amsgrad=True), 2.0 * MANY),
        (lambda: torch.optim.SGD([{"params": [each]} for each in parameters(*SHAPES)], momentum=0.9), 2.0 * MANY),
        (lambda: torch.optim.Adam(parameters((4, MOST_ELEMENTS))), 8.0),
        (lambda: torch.optim.Adam(parameters((4, MOST_ELEMENTS), (3,))), 10.0),
        (lambda: torch.optim.Adam(parameters((3,)), fused=True), None),
        (lambda: torch.optim.Adam(parameters((3,)), foreach=True), None),
        (lambda: torch.optim.RMSprop(parameters((3,))), None),
        (lambda: torch.optim.Adam([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))]), None),
    ],
    ids=["few", "many", "groups", "large", "both", "fused", "foreach", "no fused form", "complex"],
)
@pytest.mark.usefixtures("paced")
def test_a_few_copies_speak_for_all(made: Any, ms: float | None) -> None:
    assert estimate_fusing_ms(made()) == (None if ms is None else pytest.approx(ms))


def test_the_training_notices_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    before, random = [each.detach().clone() for each in model.parameters()], torch.get_rng_state()
    assert estimate_fusing_ms(optimizer) is not None
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(each.grad is None for each in model.parameters()) and not optimizer.state
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.usefixtures("paced")
def test_optimizers_of_ones_own_are_named() -> None:
    both = [Own(parameters((3,))), torch.optim.Adam(parameters((3,)))]
    told = {"own": ["Own"], "no_fused_form": [], "fusing_saves_ms": pytest.approx(2.0)}
    assert describe_optimizers(both) == {**told, "others": 1}
    assert describe_optimizers(both[:1]) == {**told, "fusing_saves_ms": 0}


def test_how_often_a_step_computes_the_loss_is_told() -> None:
    (weight,) = parameters((3,))
    optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=4)

    def compute_loss() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (weight - 1).pow(4).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    calls: list[int] = []
    for _ in range(3):
        optimizer.step(compute_loss)  # type: ignore[arg-type]
    told = describe_optimizers([optimizer], 3)
    assert told == {"own": [], "no_fused_form": ["LBFGS"], "fusing_saves_ms": 0, "evaluations_per_step": len(calls) / 3}
    assert "evaluations_per_step" not in describe_optimizers([optimizer])


def test_sparse_gradients_have_no_fused_form() -> None:
    rows = torch.nn.Embedding(9, 3, sparse=True)
    optimizer = torch.optim.SGD(rows.parameters())
    rows(torch.zeros(1, dtype=torch.int64)).sum().backward()  # type: ignore[no-untyped-call]
    assert estimate_fusing_ms(optimizer) is None
    assert "takes_sparse_gradients" not in describe_optimizers([optimizer]), "SGD may have dense ones elsewhere"
    found = describe_optimizers([torch.optim.SparseAdam(rows.parameters()), torch.optim.Adam(parameters((3,)))])
    assert found["takes_sparse_gradients"] and found["no_fused_form"] == ["SparseAdam"] and found["others"] == 1


def test_hooks_of_all_optimizers_are_not_called_for_copies() -> None:
    calls: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *given: calls.append(given))
    try:
        assert estimate_fusing_ms(torch.optim.Adam(parameters((3,)))) is None and not calls
    finally:
        handle.remove()


def test_an_optimizer_of_ones_own_that_is_fused_already_is_not_blamed() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert describe_optimizers([Mine(parameters((3,)), fused=True)])["own"] == []
    assert describe_optimizers([Mine(parameters((3,)))])["own"] == ["Mine"]
