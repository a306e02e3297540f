"""Replayed training steps inside a real fit, on the CPU: a replay there runs the step again on the recorded tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from fastloop.bridge.apply.graphed_steps import MOST_SHAPES, GraphedSteps
from fastloop.bridge.trials.sample_ledger import Ledger
from fastloop.rungs import host
from tests import models
from tests.feeds.step_graph.fake import FakeRecorder
from tests.rungs.fits import evidence, fit, same, seeded, verdict

GRAPH: dict[str, Any] = {"host": {"step_graph": True, "gc_every_steps": None}}


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[FakeRecorder]:
    """A recorder of this test's own, and a plan that takes the CPU for a device with graphs."""
    own = type("OwnRecorder", (FakeRecorder,), {})
    monkeypatch.setattr(GraphedSteps, "make_recorder", own)
    monkeypatch.setattr(host, "_explain_no_graph", lambda _facts: None)
    return own


class Step(L.LightningModule):
    """Normalization, dropout, a schedule and logs; `also` runs inside each training_step."""

    def __init__(self, also: Callable[[Any, Any, int, Any], object] | None = None, dropout: float = 0.3) -> None:
        super().__init__()
        nn = torch.nn
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 1))
        self.also, self.ended = also, list[Any]()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"most": loss.detach() * 2}, reduce_fx="max", on_epoch=True)
        if self.also is not None:
            self.also(self, batch, batch_idx, loss)
        return {"loss": loss, "twice": 2 * loss.detach(), "what": "kept"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.ended.append((batch_idx, float(outputs["loss"].detach()), float(outputs["twice"]), metrics, rate))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Hooks(L.Callback):
    """Notes what the hooks around a backward see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, hook: str, module: Any, *numbers: Any) -> None:
        gradient = module.net[0].weight.grad
        self.seen.append((hook, None if gradient is None else float(gradient.norm()), *map(float, numbers)))

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("zero", pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self.note("before", pl_module, loss.detach())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.note("after", pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("step", pl_module)


def run(rungs: Any, module: Any, **settings: Any) -> tuple[Any, Any, Hooks]:
    hooks = Hooks()
    defaults: dict[str, Any] = {"max_epochs": 3, "gradient_clip_val": 0.5, "callbacks": (hooks,)}
    watcher, trainer = fit(rungs, module, models.loader(60), **{**defaults, **settings})
    return watcher, trainer, hooks


class Zeroes(Step):
    """Keeps its gradients, and makes zeros of them."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Adds(Step):
    """Makes zeros of its gradients at every other step only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "accumulate"), [(Step, 1), (Step, 3), (Zeroes, 1), (Adds, 1)])
def test_everybody_sees_what_an_eager_run_shows(kind: Any, accumulate: int) -> None:
    """Hooks and the gradients they find, outputs, logged values, the schedule, statistics, a short last batch."""
    ours, plain = seeded(kind), seeded(kind)
    watcher, trainer, hooks = run(GRAPH, ours, accumulate_grad_batches=accumulate)
    _, others, expected = run(None, plain, accumulate_grad_batches=accumulate)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["eager_steps"], found["recordings"]) == (20, 4, 1)
    assert found["deviation"] == 0 and verdict(watcher, "host").took is True
    assert ours.ended == plain.ended and len(ours.ended) == 24
    assert hooks.seen == expected.seen and len(hooks.seen) >= 2 * 24
    assert same(models.weights(ours), models.weights(plain))
    assert {k: float(v) for k, v in trainer.callback_metrics.items()} == {
        k: float(v) for k, v in others.callback_metrics.items()
    }
    assert trainer.global_step == others.global_step >= 24 / accumulate


def test_a_replay_is_not_the_forward_run_again_by_lightning(recorder: type[FakeRecorder]) -> None:
    """Were replays not what trains, a fault planted in them would not show."""
    recorder.error = 1e-6
    ours, plain = seeded(Step), seeded(Step)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    assert evidence(watcher, "host")["replayed_steps"] == 20 and recorder.replays > 40
    assert not same(models.weights(ours), models.weights(plain))


PLANTED: dict[str, tuple[Callable[..., object], str]] = {
    "batch_idx": (lambda module, batch, index, loss: index % 2 == 0, "batch_idx"),
    "epoch": (lambda module, batch, index, loss: module.current_epoch, "trainer.current_epoch"),
    "number": (lambda module, *_: module.log("rate", 0.5), "self.log('rate')"),
    "kept": (lambda module, batch, index, loss: setattr(module, "last", loss.detach()), "Step.last"),
    "list": (lambda module, batch, index, loss: module.ended.append(loss.detach()), "a list that the model keeps"),
    "buffer": (lambda module, batch, index, loss: setattr(module, "average", loss.detach()), "a dict that the model"),
    "random": (lambda *_: random.random(), "host random numbers"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_a_replay_would_leave_out_is_refused(planted: str) -> None:
    also, why = PLANTED[planted]
    ours, plain = seeded(Step, also=also), seeded(Step, also=also)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    assert why in evidence(watcher, "host")["graph_refused"]
    assert verdict(watcher, "host").took is False and why in verdict(watcher, "host").why
    assert same(models.weights(ours), models.weights(plain)) and ours.ended == plain.ended


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "sync": ({"syncs": ["train.py:9: loss.item()"]}, "waits for the device: train.py:9: loss.item()"),
    "capture": ({"raises": RuntimeError("operation not permitted")}, "RuntimeError: operation not permitted"),
    "wrong": ({"error": 0.1}, "the replay does not match the step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recording_that_fails_leaves_no_trace(recorder: type[FakeRecorder], fault: str) -> None:
    planted, why = FAULTS[fault]
    for name, value in planted.items():
        setattr(recorder, name, value)
    ours, plain = seeded(Step), seeded(Step)
    watcher, _, hooks = run(GRAPH, ours)
    _, _, expected = run(None, plain)
    assert why in evidence(watcher, "host")["graph_refused"] and "replayed_steps" not in verdict(watcher, "host").why
    assert ours.ended == plain.ended and hooks.seen == expected.seen
    assert same(models.weights(ours), models.weights(plain))


@pytest.mark.parametrize(("asked", "replayed"), [("auto", False), (True, True)])
def test_replays_that_are_slower_are_the_users_own_wish(
    recorder: type[FakeRecorder], asked: Any, replayed: bool
) -> None:
    recorder.slow_s = 0.4
    ours = seeded(Step)
    watcher, _ = fit({"host": {"step_graph": asked}}, ours, models.loader(24))
    found = evidence(watcher, "host")
    assert (found["replayed_steps"] > 0) is replayed
    assert replayed or found["graph_refused"].startswith("the device is busy already")
    assert verdict(watcher, "host").took is True, "the rest of the rung did"


class Unfreezes(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)


def test_a_model_that_changes_is_recorded_anew() -> None:
    class Constant(Step):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(filter(lambda each: each.requires_grad, self.parameters()), lr=0.05)

    ours, plain = seeded(Constant), seeded(Constant)
    watcher, _, _ = run(GRAPH, ours, callbacks=(Unfreezes(),))
    run(None, plain, callbacks=(Unfreezes(),))
    assert evidence(watcher, "host")["recordings"] == 2
    assert same(models.weights(ours), models.weights(plain)) and ours.ended == plain.ended


def test_batches_that_are_never_alike_are_given_up() -> None:
    lengths = [torch.randn(2 + number % 7, 8) for number in range(3 * MOST_SHAPES)]
    batches = [(x, x.sum(1, keepdim=True)) for x in lengths]
    ours = seeded(Step)
    watcher, _ = fit(GRAPH, ours, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert "batch shapes" in evidence(watcher, "host")["graph_refused"]
    assert len(ours.ended) == 3 * MOST_SHAPES


def test_a_hook_of_the_users_is_refused_by_its_module() -> None:
    ours = seeded(Step)
    calls: list[int] = []
    ours.net[3].register_forward_hook(lambda *_: calls.append(1))
    watcher, _, _ = run(GRAPH, ours)
    assert evidence(watcher, "host")["graph_refused"].startswith("net.3 has a hook") and len(calls) == 24


def test_the_ledger_of_a_trial_counts_replays_as_backwards(tmp_path: Path) -> None:
    """It counts by hooks on gradients, which a replay calls; trying and recording a step does not."""
    ours = seeded(Step)
    watcher, _, _ = run(GRAPH, ours, callbacks=(Ledger(tmp_path),), accumulate_grad_batches=2)
    assert evidence(watcher, "host")["replayed_steps"] > 10
    steps = json.loads((tmp_path / "ledger.json").read_text())["steps"]
    assert len(steps) == 12 and {row[2] for row in steps} == {2}


def test_a_hook_of_the_users_on_a_gradient_is_refused() -> None:
    ours = seeded(Step)
    calls: list[int] = []
    ours.net[3].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    watcher, _, _ = run(GRAPH, ours)
    assert evidence(watcher, "host")["graph_refused"].startswith("net.3.weight has a hook on its gradient")
    assert len(calls) == 24, "one for each batch"
