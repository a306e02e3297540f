"""Rungs that made eager steps slower are judged again by replayed ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.replay import graph_guard, graphed_steps
from fastloop.bridge.apply.replay.graphed_steps import GraphedSteps
from fastloop.bridge.apply.replay.replay_look import ReplayTimingCheck
from fastloop.judge import rehearsal as judge
from fastloop.records.plan import Action, Applied, Change, Site
from fastloop.rungs import host
from fastloop.rungs.amp import Amp
from fastloop.rungs.layout import Layout
from tests import models
from tests.bridge.watch import planted
from tests.feeds.step_graph.fake import FakeRecorder

LONG = 100_000
"""Steps that a run plans, so that trying a rung takes no more than a twentieth; it ends before."""
EAGER_S, REPLAYED_S = 0.10, 0.06


class Machine:
    """A host that launches, and a device that replays: what each takes for a step, and more with which rung.

    Attributes:
        eager_s, replayed_s: seconds more with a rung, by its name.
        on: the rungs that are on; `switched`: what was switched, in order.
    """

    def __init__(self) -> None:
        self.eager_s, self.replayed_s = dict[str, float](), dict[str, float]()
        self.on, self.switched = set[str](), list[str]()
        self.replays = False

    def work(self) -> None:
        more, base_s = (self.replayed_s, REPLAYED_S) if self.replays else (self.eager_s, EAGER_S)
        planted.sleep(base_s + sum(more[rung] for rung in self.on))

    def plant(self, monkeypatch: pytest.MonkeyPatch, kind: Any, rung: str, eager_s: float, replayed_s: float) -> None:
        """Let a rung take this much more time, and do nothing else."""
        self.eager_s[rung], self.replayed_s[rung] = eager_s, replayed_s

        def do(_site: Site) -> Applied:
            self.on.add(rung)
            self.switched.append(f"+{rung}")

            def undo() -> None:
                self.on.discard(rung)
                self.switched.append(f"-{rung}")

            return Applied(undo=undo, probe=lambda: {"dtype": "torch.bfloat16", "convs": 1, "channels_last_convs": 1})

        wants = {"precision.plugin": "bf16-mixed"} if kind is Amp else {}
        wanted = Change(actions=(Action(when="model", do=do),), parity="approximate", rehearse="modules", wants=wants)
        monkeypatch.setattr(kind, "plan", lambda self, facts: wanted)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()

    class Recorder(FakeRecorder):
        def record(self, work: Any) -> Any:
            static, replay = super().record(work)

            def replay_here() -> None:
                machine.replays = True
                replay()
                machine.replays = False

            return static, replay_here

    monkeypatch.setattr(GraphedSteps, "make_recorder", Recorder)
    monkeypatch.setattr(host, "_explain_no_graph", lambda _facts: None)
    monkeypatch.setattr(time, "perf_counter", planted.read_clock_s)
    planted.use_clock(monkeypatch)
    for reader in (graphed_steps, graph_guard):  # naps pass on a clock that is a global variable
        monkeypatch.setattr(reader, "list_step_functions", lambda *_: [])
    return machine


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.work: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.work()
        out: torch.Tensor = self.layer(x)
        return out


class Module(L.LightningModule):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.net = Net()
        object.__setattr__(self.net, "work", machine.work)
        self.ends_at, self.ended = 60, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append((float(outputs["loss"]), self.net.layer.weight.tolist()))
        self.trainer.should_stop = len(self.ended) >= self.ends_at

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


def train(machine: Machine, *rungs: str, steps: int = LONG, accumulate: int = 1, **settings: Any) -> Any:
    torch.manual_seed(3)
    module, loop = Module(machine), None
    if rungs:
        switched: dict[str, Any] = {rung: {"enabled": True} for rung in rungs}
        switched["host"] = {"enabled": True, "step_graph": "auto", "gc_every_steps": None}
        loop = FastLoop({"rungs": switched, "watch": {"warmup_steps": 2}}, quiet=True)
        object.__setattr__(loop.config, "by_ladder", frozenset(switched))
    callbacks = [] if loop is None else [loop]
    settings |= {"max_epochs": -1, "max_steps": steps, "accumulate_grad_batches": accumulate}
    trainer = models.trainer(callbacks=callbacks, **settings)
    torch.manual_seed(4)
    trainer.fit(module, models.loader(48))
    return loop, module


def read_step(loop: Any, rung: str) -> Any:
    return loop.plan.step(rung)


def test_a_rung_that_only_the_host_was_slower_with_comes_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=-0.03)
    loop, module = train(machine, "amp")
    assert machine.switched[:3] == ["+amp", "-amp", "+amp"] and machine.switched.count("+amp") == 2
    step = read_step(loop, "amp")
    assert step.status == "planned" and step.reason is None
    assert step.rehearsed.eager_ms == pytest.approx(60, abs=9) and step.rehearsed.changed_ms == pytest.approx(30, abs=9)
    verdict = next(each for each in loop.verdicts if each.rung == "amp")
    assert verdict.took is True
    seen = loop.measurement.evidence["host"]
    assert seen["recordings"] == 2 and seen["replayed_steps"] > 40 and seen["replay_ms"] == pytest.approx(30, abs=9)
    _, plain = train(machine)
    assert module.ended == plain.ended and len(plain.ended) == 60, "what was switched computes the same"


@pytest.mark.parametrize("more_s", [0.01, 0.0], ids=["slower", "no gain"])
def test_a_rung_that_replays_gain_nothing_with_stays_off(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, more_s: float
) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=more_s)
    loop, module = train(machine, "amp")
    assert machine.switched == ["+amp", "-amp"] * 2 and not machine.on
    step = read_step(loop, "amp")
    assert step.status == "skipped" and step.reason.startswith("slower on the calls of the first step")
    assert step.has_acted, "a few steps were trained with it"
    assert "amp" not in loop.measurement.evidence
    seen = loop.measurement.evidence["host"]
    assert seen["recordings"] == 3 and seen["replayed_steps"] > 40 and seen["replay_ms"] == pytest.approx(60, abs=9)
    _, plain = train(machine)
    assert module.ended == plain.ended


def test_each_rung_is_judged_on_top_of_those_before_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=0.02)
    machine.plant(monkeypatch, Layout, "layout", eager_s=0.05, replayed_s=-0.02)
    loop, _ = train(machine, "amp", "layout")
    assert read_step(loop, "layout").status == "planned" and read_step(loop, "amp").status == "skipped"
    assert read_step(loop, "layout").rehearsed.eager_ms == pytest.approx(60, abs=9)


@pytest.mark.parametrize(("steps", "tried"), [(300, True), (210, False)])
@pytest.mark.parametrize("keeps", [True, False], ids=["", "control"])
def test_a_short_run_keeps_time_for_recording_a_step(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, steps: int, tried: bool, keeps: bool
) -> None:
    """A twentieth of these steps of 0.1 s is 1.5 or 1.0 s, and a recording takes 0.8: replays save 40 % of a step."""
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.0, replayed_s=0.0)
    if not keeps:
        monkeypatch.setattr(GraphedSteps, "estimate_trial_s", lambda self, batch_ms: 0.0)
    loop, _ = train(machine, "amp", steps=steps)
    seen, step = loop.measurement.evidence["host"], read_step(loop, "amp")
    assert (seen["replayed_steps"] > 20) is keeps, seen["graph_refused"]
    assert (step.status == "planned") is (tried or not keeps)
    assert step.reason is None or "s are reserved for recording a step" in step.reason
    assert loop.measurement.one_time_s["rehearsal"] <= 0.05 * 0.1 * steps


@pytest.mark.parametrize(("steps", "hooked"), [(150, False), (210, True)], ids=["too short", "hooked"])
def test_no_time_is_kept_for_a_recording_that_will_not_be_made(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, steps: int, hooked: bool
) -> None:
    """A twentieth of 150 steps of 0.1 s is less than a recording takes; and a replay calls no hooks of modules."""
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.0, replayed_s=0.0)
    if hooked:
        usual = Module.__init__

        def hook(self: Module, given: Machine) -> None:
            usual(self, given)
            self.net.register_forward_hook(lambda *_: None)

        monkeypatch.setattr(Module, "__init__", hook)
    loop, _ = train(machine, "amp", steps=steps)
    assert loop.measurement.evidence["host"]["replayed_steps"] == 0
    assert read_step(loop, "amp").status == "planned", read_step(loop, "amp").reason


def test_steps_that_cannot_be_recorded_are_judged_by_eager_ones(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=-0.03)
    monkeypatch.setattr(GraphedSteps.make_recorder, "syncs", ["train.py:1: loss.item()"])
    loop, _ = train(machine, "amp")
    assert machine.switched == ["+amp", "-amp"]
    assert read_step(loop, "amp").reason.startswith("slower on the calls of the first step")


def test_a_step_that_cannot_be_recorded_with_the_rung_is_recorded_without_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=-0.03)
    original = FakeRecorder.find_syncs
    monkeypatch.setattr(
        FakeRecorder, "find_syncs", lambda self, work: original(self, work) + ["amp waits"] * bool(machine.on)
    )
    loop, _ = train(machine, "amp")
    seen = loop.measurement.evidence["host"]
    assert machine.switched == ["+amp", "-amp"] * 2
    assert read_step(loop, "amp").status == "skipped" and not seen["graph_refused"]
    assert seen["recordings"] == 2 and seen["replayed_steps"] > 40


def test_a_run_that_ends_while_a_rung_is_tried_says_that_it_acted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=-0.03)
    monkeypatch.setattr(Module, "on_train_batch_start", _stop_once_tried(machine), raising=False)
    loop, _ = train(machine, "amp")
    step = read_step(loop, "amp")
    assert machine.switched[:3] == ["+amp", "-amp", "+amp"] and step.status == "skipped" and step.has_acted


def test_a_step_that_fails_with_the_rung_on_trial_is_repeated_without_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal plays modules only."""
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=-0.03)
    original = Module.training_step

    def step(self: Module, batch: Any, batch_idx: int) -> torch.Tensor:
        if machine.on:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(Module, "training_step", step)
    with pytest.warns(UserWarning, match="amp is now off: a step failed with it: TypeError"):
        loop, module = train(machine, "amp")
    assert machine.switched == ["+amp", "-amp"] * 2 and read_step(loop, "amp").reason.startswith(
        "a step failed with it"
    )
    seen = loop.measurement.evidence["host"]
    assert seen["recordings"] == 2 and seen["replayed_steps"] > 40 and len(module.ended) == 60


def test_recorded_steps_follow_the_fallback(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation fails long after the steps were recorded; their kernels would go on in lower precision."""
    machine.plant(monkeypatch, Amp, "amp", eager_s=-0.01, replayed_s=-0.01)

    def validate(self: Module, batch: Any, batch_idx: int) -> None:
        if machine.on:
            raise TypeError("Got unsupported ScalarType BFloat16")

    monkeypatch.setattr(graph_guard.Guard, "holds", lambda _: True)  # it would see the machine's own notes
    monkeypatch.setattr(Module, "validation_step", validate, raising=False)
    monkeypatch.setattr(Module, "val_dataloader", lambda self: models.loader(8), raising=False)
    with pytest.warns(UserWarning, match="amp is now off"):
        loop, _ = train(machine, "amp", num_sanity_val_steps=0, check_val_every_n_epoch=5)
    seen = loop.measurement.evidence["host"]
    assert machine.switched == ["+amp", "-amp"] and seen["recordings"] == 2
    assert seen["replay_ms"] == pytest.approx(60, abs=9), "that of the later recording, without the rung"


def _stop_once_tried(machine: Machine) -> Callable[..., int | None]:
    def stop(self: Any, *_: Any) -> int | None:
        self.trainer.should_stop = machine.switched.count("+amp") == 2
        return -1 if self.trainer.should_stop else None

    return stop


def test_rungs_are_switched_between_two_steps_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=0.01)
    places = list[Any]()
    original = GraphedSteps.record_anew

    def note(self: Any, **options: Any) -> None:
        places.append(self._site.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)
        original(self, **options)

    monkeypatch.setattr(GraphedSteps, "record_anew", note)
    train(machine, "amp", accumulate=3)
    assert len(places) == 2 and all(place % 3 == 0 for place in places)


def test_a_run_that_has_spent_its_share_looks_no_more(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.plant(monkeypatch, Amp, "amp", eager_s=0.05, replayed_s=-0.03)
    told = list[int]()

    def refuse(self: Any, trials: int) -> str:
        told.append(trials)
        return "too short"

    monkeypatch.setattr(GraphedSteps, "explain_no_time", refuse)
    loop, _ = train(machine, "amp")
    assert told == [2] and machine.switched == ["+amp", "-amp"]
    assert loop.measurement.evidence["host"]["replayed_steps"] > 40


@pytest.mark.parametrize(("steps", "is_tried"), [(240, False), (2_000, True)])
def test_recording_a_step_and_rehearsals_share_a_twentieth_of_the_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, steps: int, is_tried: bool
) -> None:
    """A trial of 0.9 s fits into 5 % of the longer run's 200 s; and into those of the shorter one's 24 s, had the
    rehearsal, which kept no time for it here, not spent part of them."""
    machine.plant(monkeypatch, Amp, "amp", eager_s=-0.01, replayed_s=-0.01)
    monkeypatch.setattr(graphed_steps, "RECORDING_S", 0.2)
    monkeypatch.setattr(GraphedSteps, "estimate_trial_s", lambda self, batch_ms: 0.0)
    loop, _ = train(machine, "amp", steps=steps)
    seen = loop.measurement.evidence["host"]
    assert (seen["replayed_steps"] > 40) is is_tried
    assert is_tried or seen["graph_refused"].startswith("this run is too short to try it: that takes about")
    spent_s = loop.measurement.one_time_s["rehearsal"]
    assert 0.3 < spent_s <= 0.05 * steps * EAGER_S


def test_a_compile_comes_back_only_if_it_can_pay_back_again() -> None:
    outcome = judge.RungOutcome(rung="compile", fault="slower", is_slower=True, is_costly=True, first_call_s=20.0)
    for steps, may in ((1_000, False), (100_000, True)):
        look = ReplayTimingCheck.__new__(ReplayTimingCheck)
        look._terms = Terms(steps_left=steps)
        assert look._may_pay(outcome, 3.0) is may
