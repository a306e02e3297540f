"""Replayed updates of the optimizer inside a real fit, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from fastloop.bridge.apply.replay.recorded_update import RecordedUpdate
from fastloop.bridge.attributes import StandsFor
from fastloop.feeds.step_graph.static_update import StaticUpdate
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
        if name in ("net.0.bias", "net.1.running_mean"):  # the gradient before a normalization is but rounding
            continue
        torch.testing.assert_close(models.weights(ours)[name], weight, rtol=1e-4, atol=1e-6)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list that each recording of an update adds to."""
    made, usual = list[int](), RecordedUpdate.__init__
    monkeypatch.setattr(RecordedUpdate, "__init__", lambda self, *given: (made.append(1), usual(self, *given))[1])
    return made


def read_steps(trainer: Any) -> set[float]:
    return {float(each["step"]) for each in trainer.optimizers[0].state_dict()["state"].values()}


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 19), (3, 2)])
def test_updates_are_replayed_where_their_gradients_are(accumulate: int, updates: int) -> None:
    """The first batch is replayed inside the step that torch has begun. Sums over batches are elsewhere, but where an
    eager backward, of a short batch, adds to a replayed one's gradient."""
    ours, plain = seeded(Fused), seeded(Fused)
    watcher, trainer, hooks = run(GRAPH, ours, accumulate_grad_batches=accumulate)
    _, others, expected = run(None, plain, accumulate_grad_batches=accumulate)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"]) == (20, updates)
    assert f"{updates} updates of the optimizer replayed" in verdict(watcher, "host").why
    assert_close(ours, plain)
    assert [seen[0] for seen in hooks.seen] == [seen[0] for seen in expected.seen]
    assert trainer.global_step == others.global_step
    assert not isinstance(vars(trainer.optimizers[0]).get("step"), StandsFor), "torch's own again"
    state, usual = (each.optimizers[0].state_dict() for each in (trainer, others))
    assert state["param_groups"] == usual["param_groups"]
    assert read_steps(trainer) == read_steps(others) == {trainer.global_step}


def test_settings_that_change_in_each_step_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneCycleLR cycles betas, too. It is tried twice in 20 replays."""
    made = spy(monkeypatch)
    ours, plain = seeded(Fused, cycles=True), seeded(Fused, cycles=True)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"], len(made)) == (20, 0, 2)
    assert found["update_refused"] == "the optimizer's gradients, state or settings change at every step"
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


class Wrapped(Fused):
    """Counts its optimizer's steps by a wrapper of its own, which is made before training or in it."""

    late = False

    def configure_optimizers(self) -> Any:
        self.calls = 0
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        if not self.late:
            self.wrap(optimizer)
        return optimizer

    def wrap(self, optimizer: Any) -> None:
        usual = optimizer.step

        def step(closure: Any = None) -> Any:
            self.calls += 1
            return usual(closure)

        optimizer.step = step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.late and self.trainer.global_step == 12:
            self.wrap(self.trainer.optimizers[0])


class WrappedLate(Wrapped):
    late = True


@pytest.mark.parametrize(("kind", "calls"), [(Wrapped, 24), (WrappedLate, 12)])
def test_a_wrapper_of_the_step_is_called(kind: Any, calls: int) -> None:
    ours = seeded(kind)
    watcher, trainer, _ = run(GRAPH, ours)
    found = evidence(watcher, "host")
    assert ours.calls == calls and read_steps(trainer) == {24.0}
    assert (found["replayed_updates"] > 0) is (kind is WrappedLate)
    assert kind is WrappedLate or found["update_refused"] == "the optimizer's step is not torch's own"
    trainer.optimizers[0].step(lambda: None)
    assert ours.calls == calls + 1, "it is still there"


class Hooked(L.Callback):
    """Registers hooks around the optimizer's step in mid-run, and notes the order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 12 and not self.seen:
            optimizer = trainer.optimizers[0]
            self.seen.append("registered")
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self.seen.append(("pre", len(args) + len(kwargs))))
            optimizer.register_step_post_hook(lambda *_: self.seen.append("post"))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen += ["trained"] * bool(self.seen)


def test_hooks_that_come_later_are_called_as_by_torch() -> None:
    hooks = Hooked(), Hooked()
    watcher, _, _ = run(GRAPH, seeded(Fused), callbacks=(hooks[0],))
    run(None, seeded(Fused), callbacks=(hooks[1],))
    assert evidence(watcher, "host")["replayed_updates"] > 0
    assert hooks[0].seen == hooks[1].seen and len(hooks[1].seen) == 1 + 3 * 12


def leave_parameters(module: torch.nn.Module, replay: Callable[[], None]) -> None:
    kept = [each.detach().clone() for each in module.parameters()]
    replay()
    for each, old in zip(module.parameters(), kept, strict=True):
        each.detach().copy_(old)


@pytest.mark.parametrize("wrong", [leave_parameters, lambda _, replay: (replay(), replay())], ids=["counters", "twice"])
def test_an_update_that_differs_is_left_to_torch(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FakeRecorder.record
    ours, plain = seeded(Fused), seeded(Fused)

    def record(self: FakeRecorder, work: Any) -> Any:
        static, replay = usual(self, work)
        return static, replay if static else partial(wrong, ours, replay)  # an update returns nothing

    monkeypatch.setattr(FakeRecorder, "record", record)
    watcher, _, _ = run(GRAPH, ours)
    run(None, plain)
    found = evidence(watcher, "host")
    assert found["replayed_steps"] == 20 and found["replayed_updates"] == 0
    assert found["update_refused"].startswith("a replayed update deviates by")
    assert_close(ours, plain)


# -- memory: what a recording writes to stays where it was -------------------------------------------------------------


def record_on_memory(self: StaticUpdate, _recorder: Any) -> None:
    """As a graph does: the memory of parameters, gradients and state is that of the recording."""
    optimizer = self._optimizer
    groups, state = [], {}
    for group, rate in zip(optimizer.param_groups, self._sent, strict=True):
        own = []
        for each in group["params"]:
            alias = torch.nn.Parameter(each.detach())
            alias.grad = None if each.grad is None else each.grad.detach()
            state[alias] = {name: value.detach() for name, value in optimizer.state.get(each, {}).items()}
            own.append(alias)
        groups.append({**group, "params": own, "lr": rate})
    twin = type(optimizer)(groups, fused=True)
    twin.state.update(state)
    self._replay = twin.step


def record_step_on_memory(self: FakeRecorder, work: Any) -> Any:
    static = work()
    memory = [each.detach() for each in static]

    def replay() -> None:
        now = [each.data for each in static]
        for each, own in zip(static, memory, strict=True):
            each.data = own
        made = [each.detach() for each in work()]
        for own, each in zip(memory, made, strict=True):
            own.copy_(each)
        for each, own in zip(static, now, strict=True):
            each.data = own

    return static, replay


class Moves(Fused):
    """Does something to the optimizer's memory in mid-run, at the start of a batch or before its update."""

    at: Sequence[int] = (14,)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    def start(self, optimizer: Any) -> None: ...

    def before_update(self, optimizer: Any) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step in self.at:
            self.start(self.trainer.optimizers[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step in self.at:
            self.before_update(optimizer)


class MovesState(Moves):
    def start(self, optimizer: Any) -> None:
        for state in optimizer.state.values():
            for each in state.values():
                each.data = each.data.clone()  # as to the CPU and back


class ReplacesState(Moves):
    def start(self, optimizer: Any) -> None:
        weight = self.net[1].weight
        optimizer.state[weight].update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))


class ClipsWeights(Moves):
    def before_update(self, optimizer: Any) -> None:
        self.net[0].weight.data = self.net[0].weight.data.clamp(-0.05, 0.05)


class ScalesGradients(Moves):
    at = range(100)

    def before_update(self, optimizer: Any) -> None:
        for each in self.parameters():
            each.grad.data = each.grad.data * (1 + self.trainer.global_step)  # type: ignore[union-attr]


KINDS = [Moves, MovesState, ReplacesState, ClipsWeights, ScalesGradients]


@pytest.mark.parametrize(("kind", "looks"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in KINDS[1:])])
def test_memory_that_moved_is_not_written_to(kind: Any, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRecorder, "record", record_step_on_memory)
    monkeypatch.setattr(StaticUpdate, "record", record_on_memory)
    if not looks:
        monkeypatch.setattr(StaticUpdate, "has_addresses", lambda _: True)
    ours, plain = seeded(kind), seeded(kind)
    watcher, trainer, _ = run(GRAPH, ours)
    _, others, _ = run(None, plain)
    found = evidence(watcher, "host")
    assert (found["replayed_updates"] > 0) is (kind is not ScalesGradients or not looks)
    if looks:
        assert_close(ours, plain)
        assert read_steps(trainer) == read_steps(others) == {24.0}
        return
    with pytest.raises(AssertionError):
        assert_close(ours, plain)
        assert read_steps(trainer) == {24.0}


class Loads(L.Callback):
    """Loads the optimizer's own state again, which puts it elsewhere."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 12:
            trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())


def test_a_state_that_was_loaded_is_the_one_that_is_updated() -> None:
    """By torch for three updates; then by another recording."""
    ours, plain = seeded(Fused), seeded(Fused)
    watcher, trainer, _ = run(GRAPH, ours, callbacks=(Loads(),))
    _, others, _ = run(None, plain, callbacks=(Loads(),))
    found = evidence(watcher, "host")
    assert (found["replayed_steps"], found["replayed_updates"], found["update_refused"]) == (20, 5 + 4 + 7, "")
    assert_close(ours, plain)
    assert read_steps(trainer) == read_steps(others) == {24.0}
