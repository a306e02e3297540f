"""The only code that changes live objects, and that changes them back.

An Applier is handed to the mixed strategy for the length of one fit (or validate, test, predict). It asks the ladder
for a plan when the model is built, and again when the train loader is known; it runs what was planned at the moments
Lightning offers, keeps an undo for each, and collects the evidence probes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastloop.bridge import namespace, survey
from fastloop.bridge.loaders import TrainLoaders
from fastloop.bridge.microbatch import MicroBatches
from fastloop.errors import ConfigError, NotApplicable
from fastloop.evidence.dtype import product_dtype
from fastloop.feeds.tree import map_tensors
from fastloop.ladder import Ladder, plan
from fastloop.records import Applied, Facts, Moment, Plan, Step


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
        self._undos: list[tuple[str, Callable[[], None]]] = []
        self._probes: list[tuple[str, Callable[[], Mapping[str, Any]]]] = []
        self._evidence: dict[str, dict[str, Any]] = {}
        self._channels_last = False
        self._spied = False

    # -- the moments, in the order in which Lightning reaches them ------------------------------------------------

    def model_built(self, trainer: Any, strategy: Any) -> None:
        """The module is built and restored, not yet on its device nor wrapped."""
        facts = survey.run_facts(trainer, strategy)
        self._site = Site(trainer, strategy, facts)
        planned = plan(self.ladder, facts)
        if trainer.state.fn != "fit":
            # Other stages get what changes results, so that they compute what validation inside fit computed.
            planned = Plan(steps=tuple(step for step in planned.steps if step.change.evaluation))
        self.plan = planned
        self._check_strict()
        if "step.channels_last_inputs" in planned.wants:
            self._channels_last = True
            self._probe("layout", lambda: {"converted_batches": self._converted})
        if (mode := planned.wants.get("precision.plugin")) is not None:
            self._set_precision(strategy, mode)
        self._run("model")

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
        """Lightning asks what to do with a loader; only train loaders are changed."""
        site = self._require_site()
        if not self.ladder.enabled() or site.trainer.state.stage != "train":
            return loader
        if self.loaders is None:
            self.loaders = TrainLoaders(site.trainer, site.strategy, undo=self._undo)
        try:
            facts = dataclasses.replace(site.facts, loader=survey.loader_facts(self.loaders.original(loader)))
            changed = self._plan_loader(facts)
            if changed.wants.get("step.micro_batch") and self.micro is None:
                self.micro = MicroBatches(changed.wants["step.micro_batch"], strict=self.strict)
                self._probe("batch", self.micro.evidence)
            result = self.loaders.change(loader, changed, facts)
        except ConfigError:
            raise
        except NotApplicable as reason:
            self._skip_waiting(str(reason))
            return loader
        if self.micro is not None:
            self.micro.windows = self.loaders.windows
        return result

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
        return self._to_channels_last(moved) if self._channels_last else moved

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One training_step of the module, in one piece or several."""
        if not self._spied:
            step = self._spy(step)
        if self.micro is None or not args:
            return step(*args, **kwargs)
        site = self._require_site()
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
                found = {"unreadable": f"{type(error).__name__}: {error}"}
            self._evidence.setdefault(rung, {}).update(found)
        return self._evidence

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take out of a checkpoint what a run without us would not have written."""
        if self.loaders is not None:
            self.loaders.clean_checkpoint(checkpoint)
        step = self.plan.step("fused")
        if step is not None and step.status == "planned":
            for state in checkpoint.get("optimizer_states", ()):
                for group in state.get("param_groups", ()):
                    group.update(fused=None, foreach=None)

    def undo(self) -> None:
        """Put everything back, last change first. Idempotent; a failing undo is named and the others go on."""
        while self._undos:
            rung, undo = self._undos.pop()
            try:
                undo()
            except Exception as error:
                self.warn(f"{rung} could not be undone: {type(error).__name__}: {error}")
        self._probes.clear()
        self.loaders = self.micro = self._site = None
        self._channels_last = self._spied = False

    # -- inside ---------------------------------------------------------------------------------------------------

    _converted = 0

    def _require_site(self) -> Site:
        assert self._site is not None, "the strategy was not set up"
        return self._site

    def _run(self, moment: Moment) -> None:
        """Run the planned actions of a moment. What cannot apply is skipped with its reason, and training goes on."""
        site = self._require_site()
        for step in self.plan.planned:
            for action in step.change.actions:
                if action.when != moment:
                    continue
                try:
                    applied: Applied = action.do(site)
                except NotApplicable as reason:
                    self._skip(step, str(reason))
                except Exception as error:
                    if self.strict:
                        raise
                    self._skip(step, f"{type(error).__name__}: {error}")
                else:
                    self._undo(step.rung, applied.undo)
                    self._probe(step.rung, applied.probe)

    def _skip(self, step: Step, reason: str) -> None:
        skipped = dataclasses.replace(step, status="skipped", reason=reason)
        self.plan = Plan(steps=tuple(skipped if other is step else other for other in self.plan.steps))
        self._check_strict()

    def _skip_waiting(self, reason: str) -> None:
        for step in self.plan.steps:
            if step.status == "waiting":
                self._skip(step, reason)

    def _plan_loader(self, facts: Facts) -> Plan:
        """Plan again with the loader known; what was settled before stays as it was."""
        new = plan(self.ladder, facts)
        settled = {step.rung: step for step in self.plan.steps if step.status != "waiting"}
        if any(step.status == "waiting" for step in self.plan.steps):
            self.plan = Plan(steps=tuple(settled.get(step.rung, step) for step in new.steps))
            self._check_strict()
            return Plan(steps=tuple(step for step in new.steps if step.rung not in settled))
        return Plan(steps=tuple(step for step in new.steps if step.rung in self._loader_rungs()))

    def _loader_rungs(self) -> set[str]:
        base = plan(self.ladder, self._require_site().facts)
        return {step.rung for step in base.steps if step.status == "waiting"}

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

        def undo() -> None:
            strategy._precision_plugin = before

        self._undo("amp", undo)

    def _spy(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Note, inside the first training_step, the dtype a matrix product has there."""
        self._spied = True
        site = self._require_site()
        module, original = site.module, site.module.training_step

        def spied(*args: Any, **kwargs: Any) -> Any:
            self._evidence.setdefault("amp", {})["dtype"] = product_dtype(site.strategy.root_device)
            return original(*args, **kwargs)

        def once(*args: Any, **kwargs: Any) -> Any:
            with _attribute(module, "training_step", spied):
                return step(*args, **kwargs)

        return once if self.plan.step("amp") is not None else step

    def _to_channels_last(self, batch: Any) -> Any:
        converted = False

        def change(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal converted
            if tensor.dim() != 4 or not tensor.is_floating_point():
                return tensor
            converted = True
            return tensor.contiguous(memory_format=torch.channels_last)

        changed = map_tensors(batch, change)
        self._converted += converted
        return changed if converted else batch

    def _undo(self, rung: str, undo: Callable[[], None]) -> None:
        self._undos.append((rung, undo))

    def _probe(self, rung: str, probe: Callable[[], Mapping[str, Any]]) -> None:
        self._probes.append((rung, probe))


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Any:
    """Set an instance attribute for a moment, and leave the instance as it was."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _ddp_settings(model: Any) -> dict[str, Any]:
    """The settings a living DDP object runs with."""
    return {"gradient_as_bucket_view": model.gradient_as_bucket_view, "static_graph": model.static_graph,
            "bucket_cap_mb": model.bucket_bytes_cap // 2**20}  # fmt: skip
