"""Batches that are cut where the loss is a mean over tokens: what is counted is found by the gradient of the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from fastloop.bridge.apply.micro import gradient_check
from fastloop.feeds.token_counts import list_token_counters
from tests.bridge.apply.micro.test_gradient_check import WORDS, Tagger, sentences
from tests.bridge.apply.micro.test_piece_logs import Memory
from tests.models import pairs
from tests.runs import Net as Plain
from tests.runs import distance, run

SPLIT, BLIND = {"batch": {"micro_batch": 3}}, {"batch": {"micro_batch": 3, "loss_is_mean": True}}


class Logs(Tagger):
    """AdamW with a schedule, and values that are means over tokens and over samples."""

    first = 0
    """Position of the first token that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer, self.options = torch.optim.AdamW, {"lr": 0.01}
        self.schedule = lambda optimizer, _: {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        real = batch[1] != -100
        real[:, : self.first] = False
        right = (self.net(batch[0]).argmax(-1) == batch[1])[real].float().mean()
        self.log_dict(
            {
                "loss": loss,
                "right": right,
                "words": batch[0].float().mean(),
                "length": (batch[1] != -100).sum(1).float().mean(),
            }
        )
        return loss


class Causal(Logs):
    """Each token predicts the next one; a mask says which count."""

    first = 1

    def loss(self, batch: Any) -> torch.Tensor:
        targets = batch[0].masked_fill(batch[1] == -100, WORDS)[:, 1:]
        return cross_entropy(self.net(batch[0])[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=WORDS)


def logged(rungs: Any, module: Any, **settings: Any) -> tuple[Any, list[Any]]:
    logger = Memory()
    done = run(rungs, sentences(2), module, max_epochs=4, logger=logger, log_every_n_steps=1, **settings)
    return done, logger.logged


@pytest.mark.parametrize(
    ("module", "settings", "counted"),
    [
        (Logs, {}, "entries of tensor 2 of the batch that are not -100"),
        (
            Logs,
            {"gradient_clip_val": 0.05, "accumulate_grad_batches": 4},
            "entries of tensor 2 of the batch that are not -100",
        ),
        (Causal, {}, "entries of tensor 2 of the batch that are not -100, from the second token on"),
    ],
)
def test_token_means(module: Any, settings: Any, counted: str) -> None:
    plain, theirs = logged(None, module, **settings)
    ours, own = logged(SPLIT, module, **settings)
    assert ours.verdict("batch").took is True and f"weighted by {counted}" in ours.verdict("batch").why
    assert plain.trainer.global_step == ours.trainer.global_step >= 12
    assert distance(plain, ours) < 1e-6 and ours.record.rates == plain.record.rates
    assert len(theirs) == len(own) > 3
    for (step, values), (other_step, others) in zip(theirs, own, strict=True):
        assert step == other_step and others == pytest.approx(values, rel=2e-6), step
    # The control: weighted by samples, weights and logged values are others.
    blind, wrong = logged(BLIND, module, **settings)
    assert distance(plain, blind) > 1e-4
    assert wrong[0][1]["loss"] != pytest.approx(theirs[0][1]["loss"], rel=1e-3)


def test_token_means_with_the_scaler_of_float16() -> None:
    def plugins() -> Any:
        return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]

    plain, _ = logged(None, Logs, plugins=plugins(), gradient_clip_val=0.05)
    ours, _ = logged(SPLIT, Logs, plugins=plugins(), gradient_clip_val=0.05)
    blind, _ = logged(BLIND, Logs, plugins=plugins(), gradient_clip_val=0.05)
    assert "weighted by" in ours.verdict("batch").why
    assert distance(plain, ours) < 5e-3 < distance(plain, blind)


def test_what_is_a_mean_over_samples_is_not_weighed_by_tokens() -> None:
    class Pooled(Tagger):
        def loss(self, batch: Any) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]).mean(1), batch[0][:, 0])

    ours = run(SPLIT, sentences(2), Pooled, max_epochs=1)
    assert ours.verdict("batch").took is True and ours.seen("batch").get("weighed_by") is None


class Labels(Tagger):
    """Two classes; an ignored label is given to the loss as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 2))

    def loss(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1], ignore_index=255)


def labels(full: int) -> DataLoader[Any]:
    """The first `full` samples have a label."""
    generator = torch.Generator().manual_seed(0)
    x, chosen = torch.randn(96, 6, generator=generator), torch.randint(0, 2, (96,), generator=generator)
    chosen[full:][torch.rand(96 - full, generator=generator) < 0.3] = 255
    return DataLoader(TensorDataset(x, chosen, torch.arange(96.0)), batch_size=8)


@pytest.mark.parametrize("full", [0, 24])
def test_labels_that_the_code_ignores_by_number(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first batches have none of these, the loss looks like a mean over samples."""
    plain, ours = (run(rungs, labels(full), Labels, max_epochs=2) for rungs in (None, SPLIT))
    assert "weighted by entries of tensor 2 of the batch that are not 255" in ours.verdict("batch").why
    assert distance(plain, ours) < 1e-6
    monkeypatch.setattr(gradient_check, "list_ignored_labels", lambda _: set())
    blind = run(SPLIT, labels(full), Labels, max_epochs=2)
    assert not blind.verdict("batch").took or distance(plain, blind) > 1e-4, "the control"


class ByChance(Plain):
    """A mean over weighted samples. In the first batch's halves, by chance, weights add up as its mask's entries do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weights, _ = batch
        return ((self.net(x) - y).square()[:, 0] * weights).sum() / weights.sum()


def by_chance() -> DataLoader[Any]:
    x, y = pairs(12).tensors
    weights = torch.tensor([1.0, 2, 3, 1, 1, 1, 1, 5, 1, 3, 1, 1])
    mask = torch.arange(3) < torch.tensor([2, 2, 2, 1, 1, 1, 1, 1, 1, 3, 3, 3])[:, None]
    return DataLoader(TensorDataset(x, y, weights, mask), batch_size=6)


def test_a_count_that_fits_two_pieces_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = (run(rungs, by_chance(), ByChance, max_epochs=2) for rungs in (None, SPLIT))
    assert "not split: the loss compares samples" in ours.verdict("batch").why and distance(plain, ours) == 0
    monkeypatch.setattr(gradient_check, "TELLING", 0)
    wrong = run(SPLIT, by_chance(), ByChance, max_epochs=2)
    assert "weighted by" in wrong.verdict("batch").why and distance(plain, wrong) > 1e-3, "the control"


def test_what_could_be_counted() -> None:
    module = torch.nn.Sequential(torch.nn.CrossEntropyLoss(ignore_index=7))
    labels = torch.tensor([[5, 7, 7], [1, 2, 7]])
    batch = {"pixels": torch.zeros(2, 3, 4, 4), "labels": labels, "mask": torch.tensor([[True, False, False]] * 2)}
    found = {(each.place, each.ignored, each.first) for each in list_token_counters(batch, module)}
    assert found == {(1, 7, 0), (1, 7, 1), (2, 0, 0), (2, 0, 1)}
    one = next(each for each in list_token_counters(batch, module) if each.place == 1)
    halves = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 1)]
    assert one.weigh(halves).tolist() == pytest.approx([1 / 3, 2 / 3])
    none = [{**each, "labels": torch.full((rows, 3), 7)} for each, rows in zip(halves, (1, 3), strict=True)]
    none[1] |= {"pixels": torch.zeros(3, 3, 4, 4), "mask": torch.zeros(3, 3)}
    assert one.weigh(none).tolist() == [1 / 4, 3 / 4]  # nothing counts: 0/0 made every weight NaN
