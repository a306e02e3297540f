"""Replayed updates of the optimizer inside a real fit, on the CPU."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from fastloop.bridge.apply.replay import recorded_update
from tests import models
from tests.bridge.apply.replay import test_graphed_steps
from tests.bridge.apply.replay.test_graphed_steps import GRAPH, Step, run
from tests.feeds.step_graph.fake import FakeRecorder
from tests.rungs.fits import evidence, seeded, verdict

recorder = test_graphed_steps.recorder


class Fused(Step):
    """A fused AdamW with a schedule, and what a hook on its step notes."""

    def __init__(self, hooked: bool = False, fused: bool | None = True, cycles: bool = False) -> None:
        super().__init__()
        self.hooked, self.fused, self.cycles, self.counted = hooked, fused, cycles, list[int]()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)
        if self.hooked:
            optimizer.register_step_post_hook(lambda *_: self.counted.append(1))
        how: Any = {"max_lr": 0.02, "total_steps": 200, "cycle_momentum": self.cycles}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **how)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def assert_close(ours: Step, plain: Step) -> None:
    """Rates are 32-bit numbers in a replay."""
    for mine, theirs in zip(ours.ended, plain.ended, strict=True):
        assert mine[0] == theirs[0] and mine[4] == theirs[4], "the same batches and learning rates"
        assert mine[1:3] == pytest.approx(theirs[1:3], rel=1e-5)
    for name, weight in models.weights(plain).items():
        torch.testing.assert_close(models.weights(ours)[name], weight, rtol=1e-4, atol=1e-6)


def read_steps(trainer: Any) -> set[float]:
    return {float(each["step"]) for each in trainer.optimizers[0].state_dict()["state"].values()}


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 19), (3, 0)])
def test_updates_are_replayed_where_their_gradients_are(accumulate: int, updates: int) -> None:
    """The first batch is replayed inside the step that torch has begun; sums over several batches are elsewhere."""
    ours, plain = seeded(Fused), seeded(Fused)
    watcher, trainer, hooks = run(GRAPH, ours, accumulate_grad_batches=accumulate)
    _, others, expected = run(None, plain, accumulate_grad_batches=accumulate)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"]) == (20, updates)
    assert ("19 updates of the optimizer were replayed" in verdict(watcher, "host").why) is (updates > 0)
    assert_close(ours, plain)
    assert [seen[0] for seen in hooks.seen] == [seen[0] for seen in expected.seen]
    assert trainer.global_step == others.global_step
    assert not isinstance(vars(trainer.optimizers[0]).get("step"), recorded_update.partial), "torch's own again"
    state, usual = (each.optimizers[0].state_dict() for each in (trainer, others))
    assert state["param_groups"] == usual["param_groups"]
    assert read_steps(trainer) == read_steps(others) == {trainer.global_step}


@pytest.mark.parametrize("most", [2, 32])
def test_settings_that_change_in_each_step_end_it(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """OneCycleLR cycles betas, too."""
    monkeypatch.setattr(recorded_update, "MOST_MISSED", most)
    ours, plain = seeded(Fused, cycles=True), seeded(Fused, cycles=True)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"]) == (20, 0)
    assert ("gradients or settings of the optimizer are others" in found["update_refused"]) is (most == 2)
    assert_close(ours, plain)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"hooked": True}, "the optimizer's step has a hook"), ({"fused": None}, "AdamW is not fused")],
)
def test_what_is_not_replayed_is_said(settings: dict[str, Any], why: str) -> None:
    torch.manual_seed(0)
    ours = Fused(**settings)
    watcher, _, _ = run(GRAPH, ours)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"], found["update_refused"]) == (20, 0, why)
    assert f"no update of the optimizer was replayed: {why}" in verdict(watcher, "host").why
    assert len(ours.counted) == 24 * bool(settings.get("hooked"))


def test_the_fused_rung_still_counts_its_steps() -> None:
    watcher, _, _ = run({**GRAPH, "fused": {}}, seeded(Fused, fused=None))
    assert evidence(watcher, "host")["replayed_updates"] > 0
    assert evidence(watcher, "fused")["steps"] == 24


def test_an_update_that_differs_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FakeRecorder.record

    def record(self: FakeRecorder, work: Any) -> Any:
        static, replay = usual(self, work)
        return static, replay if static else lambda: (replay(), replay())  # an update returns nothing

    monkeypatch.setattr(FakeRecorder, "record", record)
    ours, plain = seeded(Fused), seeded(Fused)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    found = evidence(watcher, "host")
    assert found["replayed_steps"] == 20 and found["replayed_updates"] == 0
    assert found["update_refused"].startswith("a replayed update deviates by")
    assert_close(ours, plain)


class Loads(L.Callback):
    """Loads the optimizer's own state again, which puts it elsewhere."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 12:
            trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())


def test_a_state_that_was_loaded_is_the_one_that_is_updated() -> None:
    ours, plain = seeded(Fused), seeded(Fused)
    watcher, trainer, _ = run(GRAPH, ours, callbacks=(Loads(),))
    _, others, _ = run(None, plain, callbacks=(Loads(),))
    assert 0 < evidence(watcher, "host")["replayed_updates"] < 20 == evidence(watcher, "host")["replayed_steps"]
    assert_close(ours, plain)
    assert read_steps(trainer) == read_steps(others) == {24.0}
