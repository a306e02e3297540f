"""The split inside training_step: what a run with it shares with the run without, to the letter."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset

from fastloop.bridge.apply.micro.batches import MicroBatches
from fastloop.errors import FastLoopError
from tests.runs import Net, Run, batches, both, distance, numbered, run

BLIND = {"batch": {"micro_batch": 3, "loss_is_mean": True}}
"""By the user's word, which is wrong here."""
SPLIT = {"batch": {"micro_batch": 3}}
Pair = namedtuple("Pair", "x y n")


def one_cycle(optimizer: Any, module: Any) -> Any:
    steps = module.trainer.estimated_stepping_batches
    return {"scheduler": OneCycleLR(optimizer, 0.02, total_steps=steps), "interval": "step"}


def drops(optimizer: Any, module: Any) -> Any:
    return {"scheduler": StepLR(optimizer, 3, gamma=0.7), "interval": "step", "frequency": 2}


DOUBLE, SINGLE = ("64-true", 1e-14), ("32-true", 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "settings", "accumulate", "precision", "tolerance"),
    [
        (partial(Net, SGD, momentum=0.9), {}, 1, *DOUBLE),
        (partial(Net, SGD, momentum=0.9), {}, 4, *SINGLE),
        (partial(Net, AdamW, lr=0.01), {}, 1, *SINGLE),
        (partial(Net, AdamW, lr=0.01), {}, 4, *DOUBLE),
        (partial(Net, AdamW, one_cycle, lr=0.01), {"gradient_clip_val": 0.1}, 1, *DOUBLE),
        (partial(Net, AdamW, one_cycle, lr=0.01), {"gradient_clip_val": 0.1}, 4, *SINGLE),
        (partial(Net, SGD, drops), {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, 1, *SINGLE),
        (partial(Net, SGD, drops), {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, 4, *DOUBLE),
    ],
)
def test_weights_after_100_steps(
    optimizer: Any, settings: dict[str, Any], accumulate: int, precision: Any, tolerance: float
) -> None:
    """20 samples in batches of 8: the last batch of an epoch is short, and so is the last window."""
    plain, split = both(
        SPLIT,
        partial(batches, 20 * accumulate, shuffle=True),
        optimizer,
        max_epochs=34,
        accumulate_grad_batches=accumulate,
        precision=precision,
        **settings,
    )
    assert plain.trainer.global_step == split.trainer.global_step >= 100
    assert distance(plain, split) < tolerance
    assert split.record.rates == pytest.approx(plain.record.rates, rel=1e-12)
    assert split.module.samples == plain.module.samples
    assert split.verdict("batch").took and split.seen("batch")["micro_batches"] == [3, 3, 2]


def test_distance_sees_one_sample_less() -> None:
    """The control of all comparisons of weights here."""
    plain = run(None, batches(20), max_epochs=1)
    other = run(None, batches(19), max_epochs=1)
    assert distance(plain, other) > 1e-4


def test_unweighted_pieces_are_seen() -> None:
    """Another control: pieces of 3, 3 and 2 that all weigh the same are not the batch of 8."""

    class Unweighted(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * (3 / len(batch[0]) if len(batch[0]) < 3 else 1)

    plain, split = both(BLIND, batches, Unweighted, max_epochs=5)
    assert distance(plain, split) > 1e-5


@pytest.mark.parametrize("accumulate", [1, 4])
def test_callbacks_see_what_they_saw(accumulate: int, tmp_path: Any) -> None:
    def saves() -> tuple[ModelCheckpoint]:
        return (ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1),)

    plain, split = both(
        SPLIT,
        partial(batches, 44),
        val=batches,
        callbacks=saves,
        max_epochs=3,
        val_check_interval=0.5,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=True,
    )
    assert split.record.hooks == plain.record.hooks
    assert {"start", "zero_grad", "backward", "step", "end", "validation", "save"} == {
        hook[0] for hook in plain.record.hooks
    }
    assert split.record.validated == plain.record.validated and len(plain.record.validated) == 6


class Scaled(Net):
    """Runs under autocast; one loss overflows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert torch.is_autocast_enabled("cpu")
        loss = super().training_step(batch, batch_idx)
        return loss * 1e38 if self.trainer.current_epoch == 0 and batch_idx == 1 else loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_the_fp16_scaler(accumulate: int) -> None:
    scalers = []

    def plugin() -> list[Any]:
        scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0**10))
        return [MixedPrecision("16-mixed", "cpu", scalers[-1])]

    def fit(rungs: Any) -> Run:
        return run(rungs, batches(40), Scaled, max_epochs=4, plugins=plugin(), accumulate_grad_batches=accumulate)

    plain, split = fit(None), fit(SPLIT)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9  # both skipped the step that overflowed
    assert distance(plain, split) < 2e-3  # fp16 products round differently in other shapes
    unscaled = run(
        None,
        batches(40),
        partial(Scaled, lr=0.05 / 2**8),
        max_epochs=4,
        plugins=plugin(),
        accumulate_grad_batches=accumulate,
    )
    assert distance(plain, unscaled) > 2e-2  # what a lost scale would do


class Shaped(Dataset):
    """Numbered samples in containers of a kind."""

    def __init__(self, kind: str) -> None:
        self.samples, self.kind = numbered(20), kind

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x, y, n = self.samples[index]
        return {
            "dict": {"x": x, "y": y, "n": n},
            "nested": {"in": [x, {"y": y}], "name": f"n{int(n)}", "n": n},
            "named": Pair(x, y, n),
        }[self.kind]


class Shapes(Net):
    """Reads any of them, and checks that names go with their samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict) and "in" in batch:
            assert batch["name"] == [f"n{number}" for number in batch["n"].tolist()]
            batch = Pair(batch["in"][0], batch["in"][1]["y"], batch["n"])
        elif isinstance(batch, dict):
            batch = Pair(**batch)
        assert isinstance(batch, Pair)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["dict", "nested", "named"])
def test_batches_of_many_shapes(kind: str) -> None:
    plain, split = both(SPLIT, lambda: DataLoader(Shaped(kind), batch_size=8, shuffle=True), Shapes, max_epochs=4)
    assert distance(plain, split) < 1e-6 and split.module.samples == plain.module.samples
    assert split.seen("batch")["changed_steps"] == 12


class Outputs(Net):
    """Returns more than a loss; keeps what on_train_batch_end gets."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {
            "loss": loss,
            "predictions": self.net(batch[0]).detach(),
            "mean": batch[0].mean(),
            "numbers": batch[2].tolist(),
            "kind": "k",
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


def test_outputs_are_those_of_the_whole_batch() -> None:
    plain, split = both(SPLIT, batches, Outputs, max_epochs=2)
    for a, b in zip(plain.module.outputs, split.module.outputs, strict=True):
        assert a.keys() == b.keys() and b["numbers"] == a["numbers"] and b["kind"] == "k"
        torch.testing.assert_close(b["predictions"], a["predictions"])
        torch.testing.assert_close(b["loss"], a["loss"])
        torch.testing.assert_close(b["mean"], a["mean"])
        assert not b["loss"].requires_grad


class Skips(Net):
    """Skips every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


def test_training_step_returning_none_skips_the_batch() -> None:
    plain, split = both(SPLIT, partial(batches, 40), Skips, max_epochs=3)
    assert distance(plain, split) < 1e-6 and split.record.hooks == plain.record.hooks
    assert distance(plain, run(None, batches(40), max_epochs=3)) > 1e-3


class SkipsSome(Net):
    """Skips batches whose targets are low on average, and those of fewer than `least` samples."""

    least = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch[1].mean() < 0 or len(batch[1]) < self.least else loss


class SkipsSmall(SkipsSome):
    least = 4


@pytest.mark.parametrize("module", [SkipsSome, SkipsSmall])
def test_a_piece_without_a_loss_does_not_decide_for_its_batch(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, rungs = {"max_epochs": 2, "gradient_clip_val": 0.1}, {"batch": {"micro_batch": 3, "loss_is_mean": True}}
    plain, split = (run(each, batches(40, shuffle=False), module, **settings) for each in (None, rungs))
    assert 0 < plain.trainer.global_step <= 10 and distance(plain, split) < 1e-6
    assert "returned no loss for a micro-batch" in split.verdict("batch").why
    monkeypatch.setattr(MicroBatches, "_run_whole", lambda self, step, batch, rest: self._skip(batch))
    assert distance(plain, run(rungs, batches(40), module, **settings)) > 1e-3, "the control"


class Ragged(Net):
    """A batch with a member that has another first dimension."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, torch.zeros(5, 2)]


class Images(Net):
    """Gets a list of images [3, 4, 4] instead of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16 * 3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert all(image.shape == (3, 4, 4) for image in batch)
        return self.net(torch.stack(batch).flatten(1)).square().mean()


def images() -> DataLoader[Any]:
    """The last batch has three images, as many as each has channels."""
    count = 19
    data = torch.arange(count * 48.0).reshape(count, 3, 4, 4) / 1000
    return DataLoader(data, batch_size=8, collate_fn=list)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("train", "module", "why"),
    [
        (batches, Ragged, "a tensor of shape (5, 2) in a batch of 8 samples"),
        (images, Images, "the loader's batches have 8 samples, but the first tensor 3 rows"),
    ],
)
def test_a_batch_that_cannot_be_cut_runs_whole(train: Any, module: Any, why: str) -> None:
    micro = {"batch": {"micro_batch": 2}}
    plain, split = both(micro, train, module, max_epochs=2)
    verdict = split.verdict("batch")
    assert verdict.took is False and verdict.why == f"batches are not split: {why}"
    assert distance(plain, split) == 0
    before = module()
    start = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    with pytest.raises(FastLoopError, match=r"turn rungs\.batch off, or turn strict off") as error:
        run(micro, train(), lambda: before, strict=True)
    assert why in str(error.value)
    assert all(torch.equal(start[name], tensor) for name, tensor in before.state_dict().items())
    assert all(parameter.grad is None for parameter in before.parameters())


def test_only_some_batches_that_cannot_be_cut() -> None:
    class Sometimes(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [*batch, torch.zeros(5, 2)] if self.trainer.global_step % 2 else batch

    split = run(SPLIT, batches(16), Sometimes, max_epochs=2)
    verdict = split.verdict("batch")
    assert verdict.took is True and "2 of 4 batches could not be cut" in verdict.why


def test_a_loss_that_compares_samples_is_not_cut() -> None:
    """A6: in-batch negatives. The first step's gradient shows it, and all batches run whole."""

    class Contrast(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            keys = self.net(batch[0])
            scores = keys @ batch[1].T
            return torch.nn.functional.cross_entropy(scores, torch.arange(len(keys)))

    plain, split = both(SPLIT, batches, Contrast, max_epochs=5)
    verdict = split.verdict("batch")
    assert verdict.took is False and distance(plain, split) == 0
    assert "the loss compares samples or is not a mean over them: the gradient of the micro-batches diff" in verdict.why
    # The control: cut without a look, it trains something else.
    assert distance(plain, run(BLIND, batches(), Contrast, max_epochs=5)) > 1e-2


def test_the_users_backward_and_a_second_closure_call() -> None:
    class Own(Net):
        calls = 0

        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            loss.backward(*args, **kwargs)

    plain, split = both(SPLIT, batches, Own, max_epochs=1)
    assert distance(plain, split) < 1e-6 and (plain.module.calls, split.module.calls) == (3, 8)
    search = partial(Net, torch.optim.LBFGS, max_iter=3, lr=0.1)
    plain, split = both(SPLIT, batches, search, max_epochs=1, precision="64-true")
    assert distance(plain, split) < 1e-12


def test_frozen_and_unused_parameters() -> None:
    class Partly(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)
            self.unused = torch.nn.Linear(2, 2)

    plain, split = both(SPLIT, batches, Partly, max_epochs=3, precision="64-true")
    assert distance(plain, split) < 1e-14
    assert split.module.net[0].weight.grad is None and split.module.unused.weight.grad is None


def test_parameters_that_training_step_freezes_and_frees() -> None:
    class Toggles(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.net[0].requires_grad_(batch_idx % 2 == 0)
            return super().training_step(batch, batch_idx)

    plain, split = both(SPLIT, batches, Toggles, max_epochs=3, precision="64-true")
    assert distance(plain, split) < 1e-14 and split.verdict("batch").took is True
