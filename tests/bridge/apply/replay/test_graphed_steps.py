"""Replayed training steps inside a real fit, on the CPU: a replay there runs the step again on the recorded tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.replay import graphed_steps
from fastloop.bridge.apply.replay.graph_guard import Guard
from fastloop.bridge.apply.replay.graphed_steps import MOST_SHAPES, GraphedSteps
from fastloop.bridge.trials.sample_ledger import Ledger
from fastloop.bridge.watch import probes
from fastloop.evidence.clock.one_time import OneTime
from fastloop.rungs import host
from tests import models
from tests.bridge.watch import planted
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
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
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
    recorder.slow_s = 0.2
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


class Anneals(Step):
    """A hook sets numbers that a step reads: its own, those of a layer, those of a plain object, those of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.settings, self.plain = 0.1, {"gamma": 0.1}, Plain()
        self.also = lambda module, batch, index, loss: loss.mul_(module.find_factor())

    def find_factor(self) -> float:
        return self.beta + self.settings["gamma"] + self.plain.delta

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.set_numbers()

    def set_numbers(self) -> None:
        self.beta = 0.5


known: Any = types.ModuleType("a_module_of_the_users")
sys.modules["a_module_of_the_users"] = known
known.__file__, known.THETA = str(Path(__file__).with_name("a_module_of_the_users.py")), 0.1
FACTOR, SETTINGS = 0.1, {"zeta": 0.1}
"""Global variables that a step reads."""


class Outer(Anneals):
    """Reads global variables; a hook sets them."""

    def find_factor(self) -> float:
        return FACTOR + SETTINGS["zeta"]

    def on_train_start(self) -> None:
        globals()["FACTOR"], SETTINGS["zeta"] = 0.1, 0.1


class Plain:
    delta = 0.0

    def __init__(self) -> None:
        self.delta = 0.1


CHANGES: dict[str, tuple[type[Anneals], Callable[[Any], object]]] = {
    "attribute": (Anneals, lambda module: setattr(module, "beta", 0.5)),
    "dict": (Anneals, lambda module: module.settings.update(gamma=0.5)),
    "object": (Anneals, lambda module: setattr(module.plain, "delta", 0.5)),
    "layer": (Anneals, lambda module: setattr(module.net[2], "p", 0.6)),
    "accumulation": (Anneals, lambda module: setattr(module.trainer, "accumulate_grad_batches", 2)),
    "global": (Outer, lambda _module: globals().update(FACTOR=0.5)),
    "global dict": (Outer, lambda _module: SETTINGS.update(zeta=0.5)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "control"])
def test_a_number_that_a_hook_sets_is_not_that_of_the_recording(
    change: str, is_guarded: bool, recorder: type[FakeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay has the numbers it was recorded with; the control never looks whether they changed."""
    kind, set_numbers = CHANGES[change]
    monkeypatch.setattr(kind, "set_numbers", set_numbers)
    if not is_guarded:
        monkeypatch.setattr(Guard, "holds", lambda _self: True)
    ours, plain = seeded(kind), seeded(kind)
    recorder.bakes = [vars(ours), ours.settings, vars(ours.plain), vars(ours.net[2]), globals(), SETTINGS]
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    found = evidence(watcher, "host")
    assert found["replayed_steps"] > 15 and found["recordings"] == (2 if is_guarded else 1)
    assert same(models.weights(ours), models.weights(plain)) is (is_guarded or change == "accumulation")


class Validates(Step):
    """A metric that only validation updates."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(self.net(batch[0]), batch[1])
        self.log("error", self.error)


def test_validation_leaves_a_recording_as_it_is() -> None:
    watcher, _, _ = run(GRAPH, seeded(Validates), val=models.loader(24))
    found = evidence(watcher, "host")
    assert (found["recordings"], found.get("graph_refused")) == (1, "") and found["replayed_steps"] == 20


class Restless(Anneals):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.beta += 1e-3


def test_a_model_that_keeps_changing_is_given_up_with_what_changed() -> None:
    watcher, _, _ = run(GRAPH, seeded(Restless))
    assert evidence(watcher, "host")["graph_refused"].endswith("recordings, most recently beta")


@pytest.mark.parametrize(("is_observed", "counted"), [(True, 1), (False, 5)], ids=["deferred", "control"])
def test_a_step_whose_work_is_counted_is_not_recorded(
    is_observed: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step is one whose work is counted, and the first that could be recorded."""
    if not is_observed:
        monkeypatch.setattr(graphed_steps, "_is_observed", lambda _device: False)
        monkeypatch.setattr(OneTime, "count", lambda *_: 0)  # a probe would wait for a step without our trials
    monkeypatch.setattr(probes, "may_count", lambda _module: None)  # another test of this process may have compiled
    config = {"rungs": {name: {"enabled": True, **keys} for name, keys in GRAPH.items()}, "watch": {"warmup_steps": 3}}
    works = []
    for rungs in (config, {"watch": config["watch"]}):
        watcher = FastLoop({**rungs, "rehearsal": "off"}, quiet=True)
        models.trainer(callbacks=[watcher], max_epochs=3).fit(seeded(Step), models.loader(60))
        assert watcher.measurement is not None
        works.append(watcher.measurement.flops["per_sample"])
    assert works[0] >= (counted - 0.5) * works[1] and (works[0] == works[1]) is is_observed


class Conf:
    eta = 0.1


def decorate(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Hidden(Anneals):
    """Reads numbers that no attribute of an object holds, or where a name in training_step does not lead."""

    alpha = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.weights = [0.1]

    @decorate
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)

    @staticmethod
    def read_outer() -> float:
        return Conf.eta + known.THETA

    def find_factor(self) -> float:
        return self.alpha + self.weights[0] + self.read_outer()

    def on_train_start(self) -> None:
        Hidden.alpha = Conf.eta = known.THETA = self.weights[0] = 0.1


HIDDEN: dict[str, Callable[[Any], object]] = {
    "a class attribute, hidden by the object's": lambda module: setattr(module, "alpha", 0.5),
    "a class attribute": lambda _module: setattr(Hidden, "alpha", 0.5),
    "an attribute of another class": lambda _module: setattr(Conf, "eta", 0.5),
    "an attribute of a module": lambda _module: setattr(known, "THETA", 0.5),
    "a list's element": lambda module: module.weights.__setitem__(0, 0.5),
}


@pytest.mark.parametrize("change", HIDDEN)
@pytest.mark.parametrize("is_changed", [True, False], ids=["changed", "control"])
def test_a_number_that_is_in_no_object_is_not_that_of_the_recording(
    change: str, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hidden, "set_numbers", HIDDEN[change] if is_changed else lambda _module: None)
    watcher, _, _ = run(GRAPH, seeded(Hidden))
    assert evidence(watcher, "host")["recordings"] == (2 if is_changed else 1)


def read_clock() -> float:
    return time.perf_counter()


class Clock(Step):
    """A function that it calls reads the clock."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert read_clock() > 0
        return super().training_step(batch, batch_idx)


class Kept(Step):
    """A function that it keeps does."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = read_clock


class Prints(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("step", file=sys.stderr)
        return super().training_step(batch, batch_idx)


TRAINER: Any = None


class Asks(Step):
    """Asks a Trainer that is no attribute of the module."""

    def on_train_start(self) -> None:
        globals()["TRAINER"] = self.trainer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert TRAINER.current_epoch >= 0
        return super().training_step(batch, batch_idx)


class Decorated(Step):
    @decorate
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert time.time() > 0
        return super().training_step(batch, batch_idx)


class Encoder(torch.nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        assert self.look() > 0
        return self(x)

    @staticmethod
    def look() -> float:
        return read_clock()


class Encodes(Step):
    """A method of a submodule's, which has a static method."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([self.encoder.encode(batch[0]), batch[1]], batch_idx)


class Partial(Step):
    def __init__(self) -> None:
        super().__init__()
        self.clock = functools.partial(read_clock)


COUNT = 0


class Counts(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global COUNT
        COUNT += 1
        return super().training_step(batch, batch_idx)


class CountsInClass(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Conf.steps = getattr(Conf, "steps", 0) + 1
        return super().training_step(batch, batch_idx)


class Input(Step):
    """A layer has the name of a builtin function."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.open = torch.nn.Linear(8, 8), 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([self.input(batch[0]) * self.open, batch[1]], batch_idx)


class Layer(torch.nn.Linear):
    """A layer of the user's that looks at the environment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        import os as system

        assert system.environ is not None
        return super().forward(input)


class Environment(Step):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Layer(8, 16)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Clock, "time in read_clock"),
        (Kept, "time in read_clock"),
        (Prints, "print in Prints.training_step"),
        (Environment, "os in Layer.forward"),
        (Asks, "TRAINER in Asks.training_step"),
        (Decorated, "time in Decorated.training_step"),
        (Encodes, "time in read_clock"),
        (Partial, "time in read_clock"),
        (Counts, "COUNT in Counts.training_step"),
        (CountsInClass, "Conf in CountsInClass.training_step"),
    ],
)
def test_what_nobody_can_look_at_before_each_step_forbids_a_recording(kind: Any, what: str) -> None:
    watcher, _, _ = run(GRAPH, seeded(kind))
    found = evidence(watcher, "host")
    assert found["graph_refused"] == f"training_step uses {what}, which a replay would skip"
    assert found["replayed_steps"] == 0


def test_a_trial_that_is_refused_for_the_code_has_run_nothing() -> None:
    globals()["COUNT"] = 0
    run(GRAPH, seeded(Counts))
    assert COUNT == 24


def test_attributes_with_names_of_functions_are_fine() -> None:
    watcher, _, _ = run(GRAPH, seeded(Input))
    assert evidence(watcher, "host")["replayed_steps"] == 20


def test_a_busy_device_is_not_recorded(recorder: type[FakeRecorder]) -> None:
    recorder.busy_s = 0.1
    watcher, _ = fit({"host": {"step_graph": "auto"}}, seeded(Step), models.loader(24))
    assert evidence(watcher, "host")["graph_refused"].startswith("the device is busy already: the host launches")
    assert recorder.recordings == 0
    fit(GRAPH, seeded(Step), models.loader(24))
    assert recorder.recordings == 2, "asked for, it need not be faster"


@pytest.mark.parametrize(("epochs", "is_tried"), [(3, False), (20, True)])
def test_a_short_run_is_not_tried(
    epochs: int, is_tried: bool, recorder: type[FakeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its number of batches; `test_replay_look.py` has the time that a trial takes."""
    monkeypatch.setattr(Terms, "explain_no_time", lambda *_: None)
    monkeypatch.setattr(time, "perf_counter", planted.read_clock_s)  # what other processes do takes no time
    watcher = FastLoop({"rungs": {"host": {"enabled": True, "step_graph": "auto"}}}, quiet=True)
    models.trainer(callbacks=[watcher], max_epochs=epochs).fit(seeded(Step), models.loader(60))
    assert (recorder.recordings > 0) is is_tried
    assert is_tried or "this run is too short to try it" in evidence(watcher, "host")["graph_refused"]


@pytest.mark.parametrize(
    ("batch", "replayed"), [({}, True), ({"micro_batch": 3}, False)], ids=["batches stay whole", "batches are cut"]
)
def test_batches_that_a_rung_leaves_whole_are_replayed(batch: dict[str, Any], replayed: bool) -> None:
    """BatchNorm is what would forbid the search, so there is none here."""
    ours = seeded(Step)
    ours.net[1] = torch.nn.Identity()
    watcher, _, _ = run({**GRAPH, "batch": batch}, ours)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"] > 15) is replayed
    assert replayed or found["graph_refused"] == "batches are split into micro-batches"


@pytest.mark.parametrize("size", [32, 16, "auto"], ids=["one piece", "two pieces", "searched"])
def test_merged_windows_are_replayed_where_they_run_in_one_piece(size: Any) -> None:
    """Each epoch has two windows of four batches; the second ends with a short batch."""
    batch, settings = {"batch": {"micro_batch": size}}, {"accumulate_grad_batches": 4, "max_epochs": 24}
    merged, ours = seeded(Step), seeded(Step)
    run(batch, merged, **settings)
    watcher, _, _ = run({**GRAPH, **batch}, ours, **settings)
    pieces, found = evidence(watcher, "batch")["micro_batches"], evidence(watcher, "host")
    assert sum(pieces) == 32
    if len(pieces) == 1:
        assert found["replayed_steps"] == 22, "the first is compared, and the second decides the shape"
    else:
        assert (found["replayed_steps"], found["graph_refused"]) == (0, "batches are split into micro-batches")
    assert same(models.weights(ours), models.weights(merged)) and ours.ended == merged.ended


class Teaches(Step):
    """The weights of a teacher follow the student's, inside training_step."""

    follow: Callable[[Any, Any], object] = staticmethod(lambda teacher, student: None)

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(8, 16).requires_grad_(False)
        self.also = self.teach

    @torch.no_grad()
    def teach(self, *_: Any) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            type(self).follow(teacher, student)


def assign(teacher: Any, student: Any) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


FOLLOWING: dict[str, Callable[[Any, Any], object]] = {
    "in place": lambda teacher, student: teacher.mul_(0.9).add_(student, alpha=0.1),
    "data": lambda teacher, student: teacher.data.mul_(0.9).add_(student.data, alpha=0.1),
    "assigned": assign,
}


@pytest.mark.parametrize("how", FOLLOWING)
def test_a_step_that_writes_to_parameters_is_not_replayed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying it would teach the teacher more than once: what it wrote is put back."""
    monkeypatch.setattr(Teaches, "follow", staticmethod(FOLLOWING[how]))
    ours, plain = seeded(Teaches), seeded(Teaches)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    assert evidence(watcher, "host")["graph_refused"] == "training_step changes parameters"
    assert same(models.weights(ours), models.weights(plain))
    assert not same(models.weights(ours), models.weights(seeded(Teaches))), "it was trained and taught"


def draw(module: Any, *_: Any) -> float:
    return (
        module.source.random() if hasattr(module.source, "random") else float(torch.rand((), generator=module.source))
    )


@pytest.mark.parametrize("kind", [random.Random, numpy.random.default_rng, torch.Generator])
def test_a_generator_that_the_model_owns_is_noticed(kind: Any) -> None:
    ours, plain = seeded(Step, also=draw), seeded(Step, also=draw)
    for each in (ours, plain):
        each.source = torch.Generator().manual_seed(0) if kind is torch.Generator else kind(0)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    assert "that the model keeps, which a replay would skip" in evidence(watcher, "host")["graph_refused"]
    assert draw(ours) == draw(plain), "it stands where a plain run leaves it"


def test_an_iterator_that_the_model_keeps_loses_nothing() -> None:
    ours = seeded(Step, also=lambda module, *_: next(module.more))
    ours.more = iter(range(100))
    watcher, _, _ = run(GRAPH, ours)
    assert evidence(watcher, "host")["graph_refused"].startswith("the model keeps an iterator (range_iterator)")
    assert next(ours.more) == 24, "one for each batch"


def test_a_recording_that_leaves_no_room_is_dropped(recorder: type[FakeRecorder]) -> None:
    recorder.full = "a recording takes 9.0 GiB"
    watcher, _, _ = run(GRAPH, seeded(Step))
    assert evidence(watcher, "host")["graph_refused"] == recorder.full
    assert evidence(watcher, "host")["replayed_steps"] == 0


def test_a_recording_that_few_batches_fit_is_dropped() -> None:
    """Two batches of one size, then others: the recording would only take memory."""
    lengths = [torch.randn(2 + (number > 1) * (1 + number % 7), 8) for number in range(3 * MOST_SHAPES)]
    batches = [(x, x.sum(1, keepdim=True)) for x in lengths]
    watcher, _ = fit(GRAPH, seeded(Step), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert f"{MOST_SHAPES + 1} batches differ from the recorded one" in evidence(watcher, "host")["graph_refused"]
    assert verdict(watcher, "host").took is False


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


def test_batches_with_slots_are_replayed() -> None:
    class Unpacks(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch.x, batch.y), batch_idx)

    def collate(rows: Any) -> Slots:
        return Slots(*(torch.stack(column) for column in zip(*rows, strict=True)))

    data = models.loader(60).dataset
    watcher, _ = fit(GRAPH, seeded(Unpacks), torch.utils.data.DataLoader(data, batch_size=8, collate_fn=collate))
    assert evidence(watcher, "host")["replayed_steps"] > 4


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
