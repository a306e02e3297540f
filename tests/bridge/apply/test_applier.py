"""Actions at their moments, undone in reverse; rungs that fail are skipped alone; conflicts come before any change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch

from fastloop import ConfigError, FastLoop, Verdict
from fastloop.bridge.apply.applier import Applier
from fastloop.bridge.apply.changes import Changes
from fastloop.config.loading import load_callback_config
from fastloop.errors import NotApplicable
from fastloop.evidence.clock.one_time import OneTime
from fastloop.ladder import Ladder
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Moment
from tests.models import Regression, loader, trainer

pytestmark = pytest.mark.short


@dataclass(frozen=True, kw_only=True)
class Fake:
    """A rung that wants what the test says, and notes in `log` what is done to it."""

    name: str
    log: list[str] = field(default_factory=list)
    moments: tuple[Moment, ...] = ("model",)
    evaluation: bool = False
    enabled: bool = True
    start_method: str = "auto"
    plans: Callable[[Facts], Change] | None = None
    does: Callable[[Any], None] = lambda site: None
    undoes: Callable[[], None] = lambda: None

    def plan(self, facts: Facts) -> Change:
        if self.plans is not None:
            return self.plans(facts)
        actions = tuple(Action(keys=(f"{self.name}.{when}",), when=when, do=self._do(when)) for when in self.moments)
        return Change(actions=actions, evaluation=self.evaluation)

    def _do(self, when: Moment) -> Callable[[Any], Applied]:
        def do(site: Any) -> Applied:
            self.does(site)
            self.log.append(f"{self.name} {when}")
            return Applied(undo=lambda: self.log.append(f"undo {self.name} {when}") or self.undoes(), probe=self._probe)

        return do

    def _probe(self) -> Mapping[str, Any]:
        return {"asked": len(self.log), "nothing": None}

    def verify(self, seen: Measurement) -> Verdict:
        return Verdict(took=bool(seen.evidence.get(self.name)), why=str(seen.evidence.get(self.name)))


def loop_of(strict: bool = False, **rungs: Any) -> FastLoop:
    config, _ = load_callback_config(None)
    ladder: Any = Ladder(**rungs)
    return FastLoop.of(dataclasses.replace(config, ladder=ladder, strict=strict), out=None, quiet=True)


def fit(loop: FastLoop | None, module: Regression | None = None, **settings: Any) -> tuple[L.Trainer, Regression]:
    torch.manual_seed(0)
    made, module = trainer(callbacks=[loop] if loop else [], **settings), module or Regression()
    made.fit(module, loader())
    return made, module


def test_actions_run_at_their_moments_and_are_undone_in_reverse() -> None:
    log: list[str] = []
    moments: tuple[Moment, ...] = ("model", "train_start")
    loop = loop_of(**{name: Fake(name=name, log=log, moments=moments) for name in ("layout", "fused")})

    class Notes(Regression):
        def configure_optimizers(self) -> Any:
            log.append("optimizers")
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            log.append("step") if batch_idx == 0 else None
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            log.append("end")

    fit(loop, Notes())
    done = ["layout model", "fused model", "optimizers", "layout train_start", "fused train_start"]
    assert log == [*done, "step", "end", *(f"undo {each}" for each in reversed(done) if each != "optimizers")]
    assert [verdict.took for verdict in loop.verdicts] == [True, True] and "nothing" not in loop.verdicts[0].why


@pytest.mark.parametrize("error", [NotApplicable("not here"), ValueError("broken")])
@pytest.mark.parametrize("moment", ["model", "train_start"])
def test_a_rung_that_fails_is_skipped_alone(error: Exception, moment: Moment) -> None:
    def fail(site: Any) -> None:
        raise error

    log: list[str] = []
    rungs = {"layout": Fake(name="layout", moments=(moment,), does=fail), "fused": Fake(name="fused", log=log)}
    loop = loop_of(**rungs)
    _, module = fit(loop)
    assert module.losses == fit(None)[1].losses
    assert [(verdict.rung, verdict.took) for verdict in loop.verdicts] == [("layout", False), ("fused", True)]
    assert str(error) in loop.verdicts[0].why and log == ["fused model", "undo fused model"]
    untouched = Regression()
    with pytest.raises(ConfigError, match=str(error)):
        fit(loop_of(strict=True, **rungs), untouched)
    assert untouched.losses == []


def test_an_undo_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("stuck")

    warned: list[str] = []
    monkeypatch.setattr("fastloop.bridge.fit.lines.rank_zero_warn", warned.append)
    log: list[str] = []
    made, _ = fit(loop_of(layout=Fake(name="layout", log=log), fused=Fake(name="fused", undoes=fail)))
    assert warned == ["fastloop: fused could not be undone: ValueError: stuck"]
    assert log == ["layout model", "undo layout model"] and type(made.strategy).__name__ == "SingleDeviceStrategy"


def test_undo_is_idempotent() -> None:
    log: list[str] = []
    applier = Applier(
        Ladder(layout=Fake(name="layout", log=log)), warn=log.append, one_time=OneTime(), refused={}, cheaper=set()
    )  # type: ignore[arg-type]
    made = trainer()
    made.strategy.connect(Regression())
    made.state.fn = L.pytorch.trainer.states.TrainerFn.FITTING
    applier.model_built(made, made.strategy)
    applier.undo()
    applier.undo()
    assert log == ["layout model", "undo layout model"]
    assert applier.loader("loader") == "loader" and applier.training_step(lambda batch: batch, 1) == 1


def test_two_rungs_for_one_setting_are_refused_before_anything_moves() -> None:
    log: list[str] = []
    both = {name: Fake(name="same", log=log) for name in ("layout", "fused")}
    module = Regression()
    with pytest.raises(ConfigError, match="`layout` and `fused` both set"):
        fit(loop_of(**both), module)
    assert log == [] and module.losses == []


def test_other_stages_get_only_what_changes_results() -> None:
    log: list[str] = []
    loop = loop_of(layout=Fake(name="layout", log=log, evaluation=True), fused=Fake(name="fused", log=log))
    for stage in (trainer(callbacks=[loop]).validate, trainer(callbacks=[loop]).test):
        module = Regression()
        module.test_step = module.validation_step  # type: ignore[method-assign]
        stage(module, loader(), verbose=False)
    assert log == ["layout model", "undo layout model"] * 2


def test_what_only_takes_something_back_is_no_evidence() -> None:
    changes = Changes(warn=pytest.fail)
    changes.add("loaders", Applied(undo=lambda: None))
    changes.add("one", Applied(undo=lambda: None, probe=lambda: {"seen": 1}))
    assert changes.read() == {"one": {"seen": 1}}


def test_evidence_that_cannot_be_read_is_said_and_stops_nothing() -> None:
    class Silent(Fake):
        def _probe(self) -> Mapping[str, Any]:
            raise RuntimeError("no answer")

    loop = loop_of(layout=Silent(name="layout"), fused=Fake(name="fused"))
    fit(loop)
    assert "RuntimeError: no answer" in loop.verdicts[0].why and loop.verdicts[1].took


# -- the train loader, which is changed as planned or not at all ------------------------------------------------------


def wants(settings: Mapping[str, Any]) -> Callable[[Facts], Change]:
    return lambda facts: Change(waits_for="the train loader") if facts.loader is None else Change(wants=settings)


def test_a_loader_change_that_fails_leaves_the_users_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Fake(name="workers", plans=wants({"loader.num_workers": 1, "loader.prefetch_factor": 2}))
    pin = Fake(name="pin", plans=wants({"loader.timeout": 30}))
    for failing in (False, True):
        if failing:
            monkeypatch.setattr("fastloop.bridge.apply.loaders.clone", lambda *args, **kwargs: 1 / 0)
        loop = loop_of(workers=workers, pin=pin)
        _, module = fit(loop)
        assert module.losses == fit(None)[1].losses
        assert {step.status for step in loop.plan.steps} == ({"skipped"} if failing else {"planned"})
        assert all("ZeroDivisionError" in (step.reason or "") for step in loop.plan.steps) == failing


def test_a_window_whose_loader_then_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = {"rungs": {"batch": {"enabled": True, "micro_batch": 16}}}
    plain, _ = fit(None, accumulate_grad_batches=2)
    steps = []
    for failing in (False, True):
        if failing:
            monkeypatch.setattr("fastloop.bridge.apply.loaders.clone", lambda *args, **kwargs: 1 / 0)
        loop = FastLoop(merged, quiet=True)
        made, module = fit(loop, accumulate_grad_batches=2)
        steps.append((made.global_step, len(module.losses), loop.plan.steps[0].status))
    assert steps == [(4, 4, "planned"), (4, 8, "skipped")] and plain.global_step == 4


def test_a_rung_counts_as_planned_once_it_applies_to_one_loader() -> None:
    class Both(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    loop = FastLoop({"rungs": {"workers": {"enabled": True, "count": 1}}}, quiet=True)
    made, module = trainer(callbacks=[loop]), Both()
    made.fit(module, {"a": loader(num_workers=1), "b": loader()})
    assert [step.status for step in loop.plan.steps] == ["planned"] and loop.verdicts[0].took, loop.verdicts
    loop = FastLoop({"rungs": {"workers": {"enabled": True, "count": 1}}}, quiet=True)
    trainer(callbacks=[loop]).fit(Both(), {"a": loader(num_workers=1), "b": loader(num_workers=1)})
    assert [step.status for step in loop.plan.steps] == ["skipped"]


def test_a_checkpoint_holds_nothing_of_the_rungs() -> None:
    kept: list[Any] = []

    class Keeps(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            fused = trainer.optimizers[0].param_groups[0]["fused"]
            kept.append((trainer._checkpoint_connector.dump_checkpoint(), fused))

    for rungs in ({}, {"fused": {"enabled": True}}):
        torch.manual_seed(0)
        loop = FastLoop({"rungs": rungs}, quiet=True)
        trainer(callbacks=[loop, Keeps()]).fit(Regression(torch.optim.AdamW), loader())
    (plain, not_fused), (ours, fused) = kept
    assert (not_fused, fused) == (None, True)
    assert plain["optimizer_states"][0]["param_groups"] == ours["optimizer_states"][0]["param_groups"]
    assert plain.keys() == ours.keys() and plain["callbacks"] == ours["callbacks"] and plain["loops"] == ours["loops"]
