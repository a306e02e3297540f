"""Whether a training_step may return no loss for some batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.evidence.model.skipped_batches import may_skip


class Base(torch.nn.Module):
    def loss(self, batch: Any) -> Any:
        return batch.sum()


class Plain(Base):
    def training_step(self, batch: Any) -> Any:
        if batch.isnan().any():
            raise ValueError
        else:  # noqa: RET506
            return self.loss(batch)


class InInner(Base):
    def training_step(self, batch: Any) -> Any:
        def show(each: Any) -> None:
            return None

        show(batch)
        with torch.no_grad():
            return self.loss(batch)


class NoLoss(Base):
    def training_step(self, batch: Any) -> None:
        return


class Returns(Base):
    def training_step(self, batch: Any) -> Any:
        if batch.isnan().any():
            return  # noqa: RET502
        return self.loss(batch)


class Either(Base):
    def training_step(self, batch: Any) -> Any:
        return self.loss(batch) if batch.isfinite().all() else None


class Falls(Base):
    def training_step(self, batch: Any) -> Any:  # noqa: RET503
        if batch.isfinite().all():
            return self.loss(batch)


class InHelper(Base):
    def step(self, batch: Any) -> Any:
        if batch.isnan().any():
            return None
        return self.loss(batch)

    def training_step(self, batch: Any) -> Any:
        return self.step(batch)


class InBase(Returns):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch)


class OtherHelper(Base):
    def find(self, batch: Any) -> Any:
        return None if batch.isnan().any() else batch

    def training_step(self, batch: Any) -> Any:
        found = self.find(batch)
        return self.loss(batch if found is None else found)


@pytest.mark.parametrize(
    ("kind", "skips"),
    [
        (Plain, False),
        (InInner, False),
        (NoLoss, False),
        (OtherHelper, False),
        (Base, False),
        (Returns, True),
        (Either, True),
        (Falls, True),
        (InHelper, True),
        (InBase, True),
    ],
)
def test_which_steps_may_skip(kind: type, skips: bool) -> None:
    assert may_skip(kind()) is skips
