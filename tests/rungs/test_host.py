"""The host rung: garbage collection at chosen steps, and when steps may be replayed. How is in test_graphed_steps."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.replay.graphed_steps import GraphedSteps
from fastloop.errors import ConfigError, NotApplicable
from fastloop.evidence.gpu import forks
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs import host
from fastloop.rungs.host import MOST_YOUNG, Host
from tests import models
from tests.feeds.step_graph.fake import FakeRecorder
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

GARBAGE: dict[str, Any] = {"host": {"gc_every_steps": 3}}
CUDA: dict[str, Any] = {"device": "cuda"}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"device": "cpu"}, "CUDA graphs need CUDA; this run is on cpu"),
        ({**CUDA, "world_size": 2, "strategy": "DDPStrategy"}, "DDPStrategy exchanges gradients"),
        ({**CUDA, "plain_gradients": False, "strategy": "FSDPStrategy"}, "FSDPStrategy exchanges gradients"),
        ({**CUDA, "automatic_optimization": False}, "manual optimization"),
        ({**CUDA, "accumulation_scheduled": True}, "the number of batches in a step changes"),
        ({**CUDA, "steps_with_iterator": True}, "fetches its own batches"),
        ({**CUDA, "grad_hooks": True}, "hooks on their gradients"),
        ({**CUDA, "averages_weights_by_swa": True}, "StochasticWeightAveraging"),
        ({**CUDA, "precision": "16-mixed"}, "loss scale"),
    ],
)
def test_plan(facts: dict[str, Any], reason: str) -> None:
    change = Host(enabled=True, step_graph="auto").plan(Facts(**CUDA))
    assert [action.keys for action in change.actions] == [("host.loop",), ("host.gc",), ("host.step_graph",)]
    assert change.parity == "approximate" and change.notes == ()
    left = Host(enabled=True, step_graph="auto").plan(Facts(**facts))
    assert [action.keys for action in left.actions] == [("host.loop",), ("host.gc",)] and left.parity == "exact"
    assert reason in left.notes[0]
    with pytest.raises(NotApplicable, match=f"no step graph: .*{reason}"):
        Host(enabled=True, step_graph=True).plan(Facts(**facts))


def test_each_half_can_be_switched_off() -> None:
    only = Host(enabled=True).plan(Facts(**CUDA))
    assert [action.keys for action in only.actions] == [("host.loop",), ("host.gc",)] and (only.parity, only.notes) == (
        "exact",
        (),
    )
    graphs = Host(enabled=True, gc_every_steps=None, step_graph="auto").plan(Facts(**CUDA))
    assert [action.keys for action in graphs.actions] == [("host.loop",), ("host.step_graph",)]
    with pytest.raises(ConfigError, match=r"host\.gc_every_steps=0"):
        loop({"host": {"gc_every_steps": 0}})


class Litter(models.Regression):
    """Leaves a cycle behind at each step, and notes how the collector is set in the middle of training."""

    def __init__(self, fails: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.found: dict[str, Any] = {}
        self.alive: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        cycle: list[Any] = []
        cycle.append(cycle)
        self.found = {"threshold": gc.get_threshold()[0]}


def test_takes() -> None:
    passes: list[int] = []

    def note(phase: str, info: Any) -> None:
        if phase == "start":
            passes.append(info["generation"])

    module = seeded(Litter)
    gc.callbacks.append(note)
    try:
        watcher, _ = fit(GARBAGE, module)
    finally:
        gc.callbacks.remove(note)
    assert module.found == {"threshold": MOST_YOUNG}
    assert evidence(watcher, "host")["gc_passes"] == 2 and passes.count(1) >= 2
    assert verdict(watcher, "host").took is True
    told = "8 batches took the short path through Lightning's loop; 2 garbage collections at chosen steps"
    assert verdict(watcher, "host").why == told, "what it did not do goes unsaid"
    assert Host(enabled=True).verify(Measurement()).took is None
    ranks = Host(enabled=True).verify(Measurement(evidence={"host": {"flat_batches": 0, "direct_hooks": 1}}))
    assert (ranks.took, ranks.why) == (True, "hooks were called directly")


def test_a_graph_asked_for_by_name_must_be_replayed() -> None:
    garbage = {"gc_passes": 4, "gc_every_steps": 10}
    none = {**garbage, "replayed_steps": 0, "eager_steps": 40, "recordings": 0, "graph_refused": "its reason"}
    seen = Measurement(evidence={"host": none})
    assert Host(enabled=True, step_graph="auto").verify(seen).took is True
    named = Host(enabled=True, step_graph=True).verify(seen)
    assert named.took is False and "no step was replayed: its reason" in named.why


def test_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; with a step graph, too, on a device where a replay repeats the step exactly."""
    ours, plain = seeded(dropout=0.2), seeded(dropout=0.2)
    fit(GARBAGE, ours)
    fit(None, plain)
    assert ours.losses == plain.losses and same(models.weights(ours), models.weights(plain))
    monkeypatch.setattr(GraphedSteps, "make_recorder", FakeRecorder)
    monkeypatch.setattr(host, "_explain_no_graph", lambda _facts: None)

    class Quiet(models.Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    replayed = seeded(Quiet, dropout=0.2)
    watcher, _ = fit({"host": {"step_graph": True}}, replayed)
    assert evidence(watcher, "host")["replayed_steps"] == 7
    assert same(models.weights(replayed), models.weights(plain))
    other = seeded(Quiet, dropout=0.2, lr=0.05001)
    fit({"host": {"step_graph": True}}, other)
    assert not same(models.weights(other), models.weights(plain))


@pytest.mark.parametrize("raises", [False, True])
def test_undo(raises: bool) -> None:
    before = gc.get_threshold(), gc.isenabled()
    module = seeded(Litter)
    if raises:
        with pytest.raises(RuntimeError, match="planted"):
            fit(GARBAGE, module, callbacks=(Raises(),))
    else:
        fit(GARBAGE, module)
    assert module.found["threshold"] == MOST_YOUNG and (gc.get_threshold(), gc.isenabled()) == before


class Forks(Litter):
    """Notes how the collector is set in a child that starts while it trains, as a loader's worker does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if not (child := os.fork()):
            os._exit(int(gc.get_threshold()[0] == MOST_YOUNG))
        self.found["child_differs"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_workers_collect_garbage_at_their_own_pace() -> None:
    module = seeded(Forks)
    fit(GARBAGE, module)
    assert module.found == {"threshold": MOST_YOUNG, "child_differs": True}
    assert forks._thresholds is None, "later children are as this process is"


@pytest.mark.parametrize("off", [gc.disable, partial(gc.set_threshold, 0)], ids=["disabled", "threshold"])
def test_a_collector_that_the_user_set_stays_as_it_is(off: Callable[[], None]) -> None:
    before = gc.get_threshold()
    off()
    chosen, module = (gc.get_threshold(), gc.isenabled()), seeded(Litter)
    try:
        watcher, _ = fit(GARBAGE, module)
        assert (gc.get_threshold(), gc.isenabled()) == chosen and module.found["threshold"] == chosen[0][0]
    finally:
        gc.enable()
        gc.set_threshold(*before)
    assert "your script turned the garbage collector off; your choice stands" in verdict(watcher, "host").why


def test_passes_over_everything_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may take 0.3 s: the next comes 60 s later, and so late that it takes at most 0.5 % of the time."""
    now_s, passes = 0.0, list[tuple[float, int]]()

    def collect(generation: int) -> None:
        nonlocal now_s
        passes.append((now_s, generation))
        now_s += 0.4 if generation == 2 else 0.0

    monkeypatch.setattr(host.gc, "collect", collect)
    monkeypatch.setattr(host.time, "monotonic", lambda: now_s)
    counted = host._Passes(10)
    for _ in range(300):
        counted.count_batch()
        now_s += 1.0
    assert counted.done == len(passes) == 30
    assert [round(at) for at, generation in passes if generation == 2] == [69, 159, 250]
