"""A step recorded once: what it reads, what it writes, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.feeds.step_graph.static_step import Ran, StaticStep, read_key
from tests.feeds.step_graph.fake import FakeRecorder


def make() -> tuple[torch.nn.Linear, StaticStep]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    layer.bias.grad = torch.full((1,), 7.0)

    def run(batch: Any) -> Ran:
        loss = (layer(batch["x"]) - batch["y"]).square().mean()
        return Ran(loss=loss, made=[loss, layer.weight.sum()])

    return layer, StaticStep(run, batch(0), dict(layer.named_parameters()))


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 3, generator=generator), "y": torch.randn(4, 1, generator=generator)}


def test_a_replay_is_the_step_on_its_own_batch() -> None:
    layer, step = make()
    given = batch(1)
    made, gradients = step.play(given)
    assert torch.equal(layer.bias.grad, torch.full((1,), 7.0)) and layer.weight.grad is None  # type: ignore[arg-type]
    step.record(FakeRecorder(torch.device("cpu")))
    assert torch.equal(layer.bias.grad, torch.full((1,), 7.0)) and layer.weight.grad is None  # type: ignore[arg-type]
    again, others = step.replay(batch(1))
    assert all(map(torch.equal, made, again)) and made[0] != step.replay(batch(2))[0][0]
    assert gradients.keys() == others.keys() and all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert torch.equal(given["x"], batch(1)["x"])


def test_gradients_stay_where_they_were_recorded_until_it_lets_go() -> None:
    layer, step = make()
    step.record(FakeRecorder(torch.device("cpu")))
    places = []
    for seed in (1, 2):
        step.forward(batch(seed))
        layer.zero_grad()
        step.backward()
        places.append(layer.weight.grad)
    assert places[0] is places[1]
    kept = layer.weight.grad.clone()  # type: ignore[union-attr]
    step.let_go()
    assert layer.weight.grad is not places[0] and torch.equal(layer.weight.grad, kept)  # type: ignore[arg-type]


class OnePool(FakeRecorder):
    """As CUDA graphs with one memory pool: a forward writes where the backward before it left its gradients."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(torch.device("cpu"))
        self.layer, self.left, self.recorded = layer, list[torch.Tensor](), 0

    def record(self, work: Any) -> Any:
        static, replay = super().record(work)
        self.recorded += 1
        if self.recorded == 2:
            self.left = [each.grad for each in self.layer.parameters() if each.grad is not None]
            return static, replay
        return static, lambda: (self._overwrite(), replay())

    def _overwrite(self) -> None:
        for gradient in self.left:
            gradient.detach().fill_(torch.nan)


def test_gradients_survive_the_next_forward() -> None:
    """Accumulation: a window's first gradients wait while its second batch runs forward."""
    layer, step = make()
    recorder = OnePool(layer)
    step.record(recorder)
    layer.zero_grad()
    for seed in (1, 2):
        step.forward(batch(seed))
        step.backward()
    (_, first), (_, second) = step.play(batch(1)), step.play(batch(2))
    assert len(recorder.left) == 2 and all(bool(each.isnan().all()) for each in recorder.left)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, first[name] + second[name])


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ([torch.ones(2, 3), "a", None], True),
        ([torch.zeros(2, 3), "a", None], True),
        ([torch.ones(3, 3), "a", None], False),
        ([torch.ones(2, 3).double(), "a", None], False),
        ([torch.ones(2, 3), "b", None], False),
        ((torch.ones(2, 3), "a", None), False),
        ([torch.ones(2, 3), "a", object()], False),
    ],
)
def test_batches_are_alike_by_everything_but_numbers_in_tensors(other: Any, same: bool) -> None:
    assert (read_key(other) == read_key([torch.ones(2, 3), "a", None])) is same
    assert read_key([torch.ones(2), object()]) != read_key([torch.ones(2), object()])
