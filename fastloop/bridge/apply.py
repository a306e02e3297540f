"""The only code that changes live objects, and that changes them back.

An Applier is handed to the mixed strategy for the length of one fit (or validate, test, predict). It asks the ladder
for a plan when the model is built, and again when the train loader is known; it runs what was planned at the moments
Lightning offers, keeps an undo for each, and collects the evidence probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastloop.bridge import namespace, survey
from fastloop.bridge.loaders import TrainLoaders
from fastloop.bridge.microbatch import MicroBatches
from fastloop.bridge.step import ChannelsLast, DtypeSpy
from fastloop.errors import ConfigError, FastLoopError, NotApplicable
from fastloop.ladder import Ladder, plan
from fastloop.records import Action, Facts, Moment, Plan, Step


@dataclass
class Site:
    """The live objects an action may act on."""

    trainer: Any
    strategy: Any
    facts: Facts

    @property
    def module(self) -> Any:
        return self.strategy.lightning_module

    @property
    def wrapped(self) -> Any:
        """The model as the strategy wrapped it."""
        return self.strategy.model

    @property
    def optimizers(self) -> list[Any]:
        return list(self.strategy.optimizers)


class Applier:
    """Applies a ladder to one run.

    Args:
        ladder: the rungs.
        strict: a rung that cannot apply is an error before step 1.
        warn: takes one line for the user.
    """

    def __init__(self, ladder: Ladder, *, strict: bool = False, warn: Callable[[str], None]) -> None:
        self.ladder, self.strict, self.warn = ladder, strict, warn
        self.plan = Plan()
        self.loaders: TrainLoaders | None = None
        self.micro: MicroBatches | None = None
        self._site: Site | None = None
        self._loader_rungs: frozenset[str] = frozenset()
        """Enabled rungs whose plan waits for the train loader."""
        self._undos: list[tuple[str, Callable[[], None]]] = []
        self._probes: list[tuple[str, Callable[[], Mapping[str, Any]]]] = []
        self._cleans: list[Callable[[dict[str, Any]], None]] = []
        self._evidence: dict[str, dict[str, Any]] = {}
        self._convert: ChannelsLast | None = None
        self._spy: DtypeSpy | None = None

    # -- the moments, in the order in which Lightning reaches them ------------------------------------------------

    def model_built(self, trainer: Any, strategy: Any) -> None:
        """The module is built and restored, not yet on its device nor wrapped."""
        try:
            facts = survey.run_facts(trainer, strategy)
            planned = plan(self.ladder, facts)
        except FastLoopError:
            raise
        except Exception as error:
            self.skip_all(f"this run could not be read: {_said(error)}")
            return
        self._site = Site(trainer, strategy, facts)
        if trainer.state.fn != "fit":
            # Other stages get what changes results, so that they compute what validation inside fit computed.
            planned = Plan(steps=tuple(step for step in planned.steps if step.change.evaluation))
        self.plan = planned
        self._loader_rungs = frozenset(step.rung for step in planned.steps if step.status == "waiting")
        self._check_strict()
        if "step.channels_last_inputs" in planned.wants:
            self._convert = ChannelsLast()
            self._probe("layout", self._convert.evidence)
        step, mode = planned.step("amp"), planned.wants.get("precision.plugin")
        if step is not None and mode is not None:
            self._try(step, partial(self._set_precision, strategy, mode))
        self._run("model")

    def skip_all(self, reason: str) -> None:
        """No rung applies, for one reason."""
        enabled = self.ladder.enabled()
        self.plan = Plan(steps=tuple(Step(rung=name, status="skipped", reason=reason) for name in enabled))
        self._check_strict()

    def before_wrap(self, strategy: Any) -> None:
        """DDP is about to wrap the model: its settings are still keywords."""
        wants = {key.removeprefix("ddp."): value for key, value in self.plan.wants.items() if key.startswith("ddp.")}
        if wants:
            before = dict(strategy._ddp_kwargs)
            strategy._ddp_kwargs = {**before, **wants}
            self._undo("overlap", lambda: setattr(strategy, "_ddp_kwargs", before))

    def wrapped(self, strategy: Any) -> None:
        """The model is wrapped."""
        if (step := self.plan.step("overlap")) is not None and step.status == "planned":
            self._probe("overlap", lambda: _ddp_settings(strategy.model))
        self._run("wrapped")

    def loader(self, loader: Any) -> Any:
        """Lightning asks what to do with a loader. Only train loaders are changed, each as planned or not at all."""
        site = self._site
        if site is None or not self._loader_rungs or site.trainer.state.stage != "train":
            return loader
        before = self.plan, self.loaders, self.micro, len(self._undos)
        try:
            if self.loaders is None:
                self.loaders = TrainLoaders(site.trainer, site.strategy, undo=self._undo, give_up=self._give_up)
            return self._change_loader(self.loaders, loader, site)
        except FastLoopError:
            raise
        except Exception as error:
            reason = _said(error)
        self.plan, self.loaders, self.micro, undos = before
        self._undo_down_to(undos)
        if self.loaders is None or self.strict:
            self._skip_loader_rungs(reason)
        return loader

    def train_start(self) -> None:
        """Optimizers exist and hold their restored state; the first step is next."""
        self._run("train_start")
        if self.loaders is not None:
            self.loaders.train_start()

    def batch(self, batch: Any, move: Callable[[], Any], dataloader_idx: int) -> Any:
        """A batch goes to the device; one that the feed brought there is not moved again."""
        if self.loaders is not None and self.loaders.staged:
            moved = self.loaders.after_transfer(batch, dataloader_idx)
        else:
            if self.loaders is not None:
                self.loaders.look_at(batch)
            moved = move()
        return moved if self._convert is None else self._convert(moved)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One training_step of the module, in one piece or several."""
        site = self._site
        if site is None:
            return step(*args, **kwargs)
        if self._spy is not None:
            step = self._spy.around(site.module, step)
        if self.micro is None or not args:
            return step(*args, **kwargs)
        return self.micro.run(site.strategy, site.trainer, lambda *inner: step(*inner, **kwargs), args[0], args[1:])

    def before_backward(self) -> None:
        """Lightning is about to run the backward of a batch."""
        if self.micro is not None:
            self.micro.before_backward()

    # -- evidence and undo ----------------------------------------------------------------------------------------

    def evidence(self) -> Mapping[str, Mapping[str, Any]]:
        """Ask every probe now; later answers are added to earlier ones."""
        probes = list(self._probes)
        if self.loaders is not None:
            probes += self.loaders.probes()
        for rung, probe in probes:
            try:
                found = {key: value for key, value in probe().items() if value is not None}
            except Exception as error:  # evidence must never stop a training
                found = {"unreadable": _said(error)}
            self._evidence.setdefault(rung, {}).update(found)
        return self._evidence

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take out of a checkpoint what a run without us would not have written."""
        if self.loaders is not None:
            self.loaders.clean_checkpoint(checkpoint)
        for clean in self._cleans:
            clean(checkpoint)

    def undo(self) -> None:
        """Put everything back, last change first. Idempotent; a failing undo is named and the others go on."""
        self._undo_down_to(0)
        self._probes.clear()
        self._cleans.clear()
        self.loaders = self.micro = self._site = self._convert = self._spy = None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _change_loader(self, loaders: TrainLoaders, loader: Any, site: Site) -> Any:
        loader_facts = survey.loader_facts(loaders.original(loader), self.ladder.workers.start_method)
        facts = dataclasses.replace(site.facts, loader=loader_facts)
        changed = self._plan_loader(facts)
        if changed.wants.get("step.micro_batch") and self.micro is None:
            self.micro = MicroBatches(changed.wants["step.micro_batch"], strict=self.strict)
            self._probe("batch", self.micro.evidence)
        result = loaders.change(loader, changed, facts)
        if self.micro is not None:
            self.micro.windows, self.micro.whole = loaders.windows, loaders.batch_sizes
        return result

    def _give_up(self, rung: str, reason: str) -> None:
        """A rung that was planned for one train loader cannot apply to all of them."""
        self._loader_rungs -= {rung}
        if rung == "batch":
            self.micro = None
        if (step := self.plan.step(rung)) is not None:
            self._skip(step, reason)

    def _run(self, moment: Moment) -> None:
        """Run the planned actions of a moment."""
        for step in self.plan.planned:
            for action in step.change.actions:
                if action.when == moment:
                    self._try(step, partial(self._act, step, action))

    def _act(self, step: Step, action: Action) -> None:
        applied = action.do(self._site)
        self._undo(step.rung, applied.undo)
        self._probe(step.rung, applied.probe)
        self._cleans.append(applied.clean)

    def _try(self, step: Step, do: Callable[[], None]) -> None:
        """What cannot apply is skipped with its reason, and training goes on."""
        try:
            do()
        except Exception as error:
            self._skip(step, _said(error))

    def _skip(self, step: Step, reason: str) -> None:
        skipped = dataclasses.replace(step, status="skipped", reason=reason)
        self.plan = Plan(steps=tuple(skipped if other is step else other for other in self.plan.steps))
        self._check_strict()

    def _skip_loader_rungs(self, reason: str) -> None:
        names, self._loader_rungs = self._loader_rungs, frozenset()
        for step in self.plan.steps:
            if step.rung in names:
                self._skip(step, reason)

    def _plan_loader(self, facts: Facts) -> Plan:
        """What a train loader gets. A rung counts as planned once it applies to one of them."""
        steps = {step.rung: step for step in plan(self.ladder, facts).steps if step.rung in self._loader_rungs}
        self.plan = Plan(steps=tuple(old if old.status == "planned" else steps.get(old.rung, old)
                                     for old in self.plan.steps))  # fmt: skip
        self._check_strict()
        return Plan(steps=tuple(steps.values()))

    def _check_strict(self) -> None:
        if not self.strict:
            return
        for step in self.plan.steps:
            if step.status == "skipped":
                raise ConfigError(key=f"rungs.{step.rung}", got=f"rungs.{step.rung} under strict: true",
                                  why=step.reason or "it cannot apply",
                                  do=f"write rungs.{step.rung}.enabled: false, or strict: false")  # fmt: skip

    def _set_precision(self, strategy: Any, mode: str) -> None:
        plugin = namespace.load(namespace.of(strategy), "plugins.precision.MixedPrecision")
        before = strategy._precision_plugin
        strategy.precision_plugin = plugin(mode, strategy.root_device.type)
        self._undo("amp", lambda: setattr(strategy, "_precision_plugin", before))
        self._spy = DtypeSpy(strategy.root_device)
        self._probe("amp", self._spy.evidence)

    def _undo_down_to(self, count: int) -> None:
        while len(self._undos) > count:
            rung, undo = self._undos.pop()
            try:
                undo()
            except Exception as error:
                self.warn(f"{rung} could not be undone: {_said(error)}")

    def _undo(self, rung: str, undo: Callable[[], None]) -> None:
        self._undos.append((rung, undo))

    def _probe(self, rung: str, probe: Callable[[], Mapping[str, Any]]) -> None:
        self._probes.append((rung, probe))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, NotApplicable) else f"{type(error).__name__}: {error}"


def _ddp_settings(model: Any) -> dict[str, Any]:
    """The settings a living DDP object runs with."""
    return {"gradient_as_bucket_view": model.gradient_as_bucket_view, "static_graph": model.static_graph,
            "bucket_cap_mb": model.bucket_bytes_cap // 2**20}  # fmt: skip
