"""The host rung on a CUDA device: replayed steps beside eager ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from fastloop.bridge.trials.sample_ledger import Ledger
from tests import models
from tests.rungs.fits import evidence, fit, seeded, verdict

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
GPU: dict[str, Any] = {"accelerator": "gpu"}
GRAPH: dict[str, Any] = {"host": {"step_graph": True, "gc_every_steps": 10}}


class Pictures(L.LightningModule):
    """Two convolutions with batch normalization and dropout, clipped, on a one-cycle schedule that moves momentum."""

    def __init__(self, dropout: float = 0.1, lr: float = 0.1, planted: str | None = None, **settings: Any) -> None:
        super().__init__()
        nn = torch.nn
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(32, 64, 3),
            nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        self.lr, self.planted, self.settings = lr, planted, settings
        self.losses: list[float] = []
        self.logged: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        if self.planted == "item":
            assert loss.item() > 0
        if self.planted == "wait":
            torch.cuda.synchronize()
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged.append(float(self.trainer.callback_metrics["train_step"]))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, **self.settings)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Still(Pictures):
    """Never learns, so that only dropout can tell two steps on the same batch apart."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def pictures(samples: int = 15 * 32 + 8) -> DataLoader[Any]:
    """Batches of 32 and a short last one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 16, 16, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(samples) % 10), batch_size=32)


def both(rungs: Any, kind: Any = Pictures, accumulate: int = 1, **settings: Any) -> tuple[Any, Any, Any]:
    """The watcher, the module trained with these rungs, and the one trained with those of them that are no graphs."""
    rest = {name: keys for name, keys in rungs.items() if name != "host"}
    more = {"max_epochs": 2, "gradient_clip_val": 1.0, "accumulate_grad_batches": accumulate, **GPU}
    ours, plain = seeded(kind, **settings), seeded(kind, **settings)
    watcher, _ = fit(rungs, ours, pictures(), **more)
    fit(rest or None, plain, pictures(), **more)
    return watcher, ours, plain


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("accumulate", [1, 4])
def test_replayed_steps_train_as_eager_ones_do(accumulate: int) -> None:
    """Losses, dropout's masks, the schedule, clipping, batch normalization's statistics, logged values."""
    watcher, ours, plain = both(GRAPH, accumulate=accumulate)
    found = evidence(watcher, "host")
    assert found["replayed_steps"] == 29 and found["eager_steps"] == 3 and found["recordings"] == 1, found
    print({"deviation": found["deviation"], "eager_ms": found["eager_ms"], "replay_ms": found["replay_ms"]})
    assert verdict(watcher, "host").took is True
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4) and len(ours.losses) == 32
    assert ours.logged == pytest.approx([accumulate * loss for loss in ours.losses]) and ours.rates == plain.rates
    assert int(ours.net[1].num_batches_tracked) == 32
    floats = [{k: v for k, v in models.weights(each).items() if v.is_floating_point()} for each in (plain, ours)]
    assert models.distance(*floats) < 1e-3


class Adams(Pictures):
    """A fused AdamW whose learning rate changes in each step; its state is loaded again once if `loads`."""

    loads = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.loads and self.trainer.global_step == 20:
            self.trainer.optimizers[0].load_state_dict(self.trainer.optimizers[0].state_dict())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Loads(Adams):
    loads = True


@pytest.mark.parametrize(("kind", "updates"), [(Adams, 28), (Loads, 25)])
def test_replayed_updates_train_as_torch_does(kind: Any, updates: int) -> None:
    """A state that was loaded is elsewhere: torch updates it until there is another recording."""
    watcher, ours, plain = both(GRAPH, kind)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"]) == (29, updates), found
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3) and ours.rates == plain.rates
    floats = [{k: v for k, v in models.weights(each).items() if v.is_floating_point()} for each in (plain, ours)]
    assert models.distance(*floats) < 1e-3


def test_an_average_of_the_weights_follows_replayed_updates() -> None:
    """Lightning's callback leaves the average in the module at the end; by the weights themselves it is elsewhere."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="from Lightning 2.6 on")

    def train(rungs: Any, *given: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        module = seeded(Adams)
        watcher, _ = fit(rungs, module, pictures(), callbacks=given, max_epochs=2, **GPU)
        return watcher, {k: v for k, v in models.weights(module).items() if v.is_floating_point()}

    watcher, ours = train(GRAPH, callbacks.EMAWeightAveraging(decay=0.9))
    _, plain = train(None, callbacks.EMAWeightAveraging(decay=0.9))
    _, latest = train(None)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"]) == (29, 28), found
    assert models.distance(ours, plain) < 1e-3 < models.distance(ours, latest)


def test_the_ledger_of_a_trial_lets_steps_be_replayed(tmp_path: Path) -> None:
    """It counts backwards by hooks on gradients; an A/B would otherwise measure another stack than the user runs."""
    ours = seeded(Pictures)
    watcher, _ = fit(GRAPH, ours, pictures(), callbacks=(Ledger(tmp_path),), max_epochs=2, **GPU)
    assert evidence(watcher, "host")["replayed_steps"] == 29
    steps = json.loads((tmp_path / "ledger.json").read_text())["steps"]
    assert len(steps) == 32 and {row[2] for row in steps} == {1}


def test_each_replay_drops_other_numbers() -> None:
    ours = seeded(Still, dropout=0.5)
    batch = next(iter(pictures()))
    watcher, _ = fit(GRAPH, ours, DataLoader([batch] * 10, batch_size=None), **GPU)
    assert evidence(watcher, "host")["replayed_steps"] == 9
    assert len(set(ours.losses)) == 10


@pytest.mark.parametrize("planted", ["item", "wait"])
def test_a_step_that_waits_goes_on_eagerly(planted: str) -> None:
    """The first is found before anything is recorded; the second breaks the recording, and leaves no harm."""
    watcher, ours, plain = both(GRAPH, planted=planted)
    found = evidence(watcher, "host")
    print(found["graph_refused"])
    assert found["replayed_steps"] == 0 and verdict(watcher, "host").took is False
    assert planted != "item" or "loss.item()" in found["graph_refused"]
    assert ours.losses == plain.losses
    again, other, _ = both(GRAPH)
    assert evidence(again, "host")["replayed_steps"] == 29 and len(other.losses) == 32


@pytest.mark.slow
def test_graphs_hold_compiled_mixed_channels_last_steps() -> None:
    rungs = {"amp": {}, "layout": {}, "fused": {}, "compile": {}, **GRAPH}
    watcher, ours, plain = both(rungs)
    found = evidence(watcher, "host")
    assert found["replayed_steps"] == 29, found
    print({"deviation": found["deviation"], "eager_ms": found["eager_ms"], "replay_ms": found["replay_ms"]})
    assert ours.losses == pytest.approx(plain.losses, rel=0.02)


def test_checkpoints_have_the_same_keys(tmp_path: Path) -> None:
    def save(rungs: Any, folder: Path) -> dict[str, Any]:
        keeper = ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=5)
        settings: dict[str, Any] = {"callbacks": (keeper,), "enable_checkpointing": True, **GPU}
        fit(rungs, seeded(Pictures), pictures(), **settings)
        return torch.load(folder / "last.ckpt", weights_only=False)  # type: ignore[no-any-return]

    ours, plain = save(GRAPH, tmp_path / "ours"), save(None, tmp_path / "plain")
    assert ours.keys() == plain.keys() and ours["state_dict"].keys() == plain["state_dict"].keys()
    assert ours["global_step"] == plain["global_step"] and ours["lr_schedulers"] == plain["lr_schedulers"]
    states = [saved["optimizer_states"][0] for saved in (ours, plain)]
    assert (
        states[0]["param_groups"] == states[1]["param_groups"]
        and states[0]["state"].keys() == states[1]["state"].keys()
    )
