"""A tensor that is put back holds what it held, and autograd does not know that it was written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.bridge.apply.state.contents import keep_contents
from tests.runs import Net as Plain
from tests.runs import batches, distance, run


def make_view() -> torch.Tensor:
    """What torchmetrics keeps of a model's outputs."""
    outputs = torch.nn.Linear(2, 3)(torch.ones(4, 2))
    with torch.no_grad():
        return outputs.reshape(-1)


@torch.no_grad()
def test_the_contents_and_the_version_are_those_of_before() -> None:
    for tensor in (torch.ones(3), make_view(), torch.ones(2, dtype=torch.cfloat), torch.eye(2).to_sparse()):
        before, version, undo = tensor.detach().clone(), tensor._version, keep_contents(tensor)
        tensor.detach().mul_(2)
        assert tensor._version > version
        undo()
        assert torch.equal(tensor.to_dense(), before.to_dense()) and tensor._version == version


@torch.no_grad()
def test_what_has_no_version_is_put_back() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    undo = keep_contents(tensor)
    tensor.detach().mul_(2)
    undo()
    assert tensor.tolist() == [1, 1, 1]


def test_a_view_can_still_be_used() -> None:
    kept, written = make_view(), make_view()
    with torch.no_grad():
        undo = keep_contents(kept)
        undo()
        written.detach().copy_(written.detach().clone())
    torch.cat([kept])
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        torch.cat([written])  # the control


class Collects(Plain):
    """Keeps views of its outputs until the epoch ends, like torchmetrics' AUROC."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        outputs = self.net(batch[0])
        with torch.no_grad():
            self.outputs.append(outputs.reshape(-1))
        return loss

    def on_train_epoch_end(self) -> None:
        assert torch.cat(self.outputs).numel()
        self.outputs.clear()


def test_a_model_that_collects_views_is_trained_in_pieces() -> None:
    """The fourth batch is compared again, with views of the first ones in the list."""
    plain, ours = (run(rungs, batches(40), Collects, max_epochs=2) for rungs in (None, {"batch": {"micro_batch": 3}}))
    assert ours.verdict("batch").took is True and distance(plain, ours) < 1e-6
