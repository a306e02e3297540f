"""The only code that changes live objects, and that changes them back.

The mixed strategy has an Applier for the length of one fit (or validate, test, predict). The Applier gets a plan from
the ladder when the model is built, and again when the train loader is known; it runs the planned actions at the moments
Lightning offers, keeps an undo for each, and collects the evidence probes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.changes import Changes
from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.loaders import TrainLoaders, is_called_by_evaluation_loop
from fastloop.bridge.apply.micro.batches import MicroBatches
from fastloop.bridge.apply.micro.search_terms import make_choice
from fastloop.bridge.apply.precision_fallback import PrecisionFallback
from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.rehearse.rehearsal import ApplierHandle, Rehearsal
from fastloop.bridge.apply.rehearse.time_limit import leaves_on_sigterm
from fastloop.bridge.apply.replay.graphed_steps import GraphedSteps
from fastloop.bridge.apply.site import LiveSite
from fastloop.bridge.apply.tries import RungTrials
from fastloop.bridge.apply.validation_loaders import Validation
from fastloop.bridge.place.keeping import PlaceKeeper
from fastloop.errors import FastLoopError, describe
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.batch_tree import BatchWindow
from fastloop.feeds.cache import places
from fastloop.feeds.place.kept_order import EpochPlace
from fastloop.judge.rehearsal import RungOutcome
from fastloop.ladder import Ladder, plan
from fastloop.records.facts import Facts
from fastloop.records.plan import Action, Applied, Moment, Plan, Step, Undo


class Applier:
    """Applies a ladder to one run.

    Args:
        ladder: the rungs.
        strict: a rung that cannot apply is an error.
        warn: receives a line that the user must not miss.
        say: receives a line about progress.
        terms: the conditions under which rungs are rehearsed; None: they apply at once, without a rehearsal.
        by_ladder: rungs that a shipped ladder, not the user, switched on.
        refused: rungs that an earlier fit of this Trainer found not to work, and why; new ones are added.
        cheaper: rungs for which that fit kept the cheaper variant; new ones are added.
        one_time: collects one-time costs, which belong to no step.
    """

    def __init__(
        self,
        ladder: Ladder,
        *,
        strict: bool = False,
        warn: Callable[[str], None],
        say: Callable[[str], None] = lambda _line: None,
        terms: Terms | None = None,
        by_ladder: frozenset[str] = frozenset(),
        refused: dict[str, str],
        cheaper: set[str],
        one_time: OneTime,
    ) -> None:
        self.ladder, self.strict, self.warn, self.say, self.terms = ladder, strict, warn, say, terms
        self.one_time, self._by_ladder = one_time, by_ladder
        self._live = LivePlan(ladder, strict=strict, refused=refused, cheaper=cheaper)
        self.rung_trials: RungTrials | None = None
        self.scaler_state: Mapping[str, Any] | None = None
        """The mixed-precision loss scaler's state in the checkpoint that the run resumes."""
        self.place = PlaceKeeper(warn=warn, say=say)
        self.loaders: TrainLoaders | None = None
        self.micro: MicroBatches | None = None
        self.graphs: GraphedSteps | None = None
        self.validation: Validation | None = None
        self._fallback: PrecisionFallback | None = None
        self._site: LiveSite | None = None
        self._changes = Changes(warn)

    # -- the moments, in the order in which Lightning reaches them ------------------------------------------------

    def model_built(self, trainer: Any, strategy: Any) -> None:
        """The module is built and restored, but not yet on its device or wrapped."""
        places.sweep(places.find_shm_root())  # a killed run's samples are no longer in the way of what is planned
        try:
            facts = read_facts.read_run_facts(trainer, strategy)
            weighs_costs = self.terms is not None and self.terms.weighs_costs
            facts = replace(facts, by_ladder=self._by_ladder, weighs_costs=weighs_costs, strict=self.strict)
            planned = plan(self.ladder, facts)
        except FastLoopError:
            raise
        except Exception as error:
            self.skip_all(f"this training could not be inspected: {describe(error)}")
            return
        self._site = LiveSite(
            trainer, strategy, facts, self.scaler_state, warn=self.warn, say=self.say, one_time=self.one_time
        )
        self._site.graph_steps = self._graph_steps
        self._fallback = PrecisionFallback(
            trainer, self._live, is_on=self._changes.holds, give_up=self._give_up_precision
        )
        rehearses = trainer.state.fn == "fit" and self.terms is not None
        if trainer.state.fn != "fit":
            # Other stages get only the rungs that change results, to compute the same as validation inside fit.
            planned = Plan(steps=tuple(step for step in planned.steps if step.change.evaluation))
        self._live.begin(
            planned, (step.rung for step in planned.planned if rehearses and step.change.rehearse is not None)
        )
        self.validation = Validation(self._site, self._live, self._changes)
        self._live.check_strict()
        self._run("model")

    @property
    def plan(self) -> Plan:
        """What each enabled rung does, or why it does nothing."""
        return self._live.plan

    def skip_all(self, reason: str) -> None:
        """Skip every rung, for one reason."""
        self._live.skip_all(reason)

    def before_wrap(self) -> None:
        """DDP is about to wrap the model: its settings can still be changed."""
        self._run("before_wrap")

    def wrapped(self) -> None:
        """The model is wrapped."""
        self._run("wrapped")

    def loader(self, loader: Any) -> Any:
        """Return the loader that Lightning should use. A train loader is changed as planned or not at all; validation
        loaders may get an engine."""
        site = self._site
        if site is None:
            return loader
        stage = site.trainer.state.stage
        if stage in ("validate", "sanity_check") or (stage == "train" and is_called_by_evaluation_loop()):
            return loader if self.validation is None else self.validation.change(loader)
        if not self._live.loader_rungs or stage != "train":
            return loader
        before = self._live.plan, self.loaders, self.micro, len(self._changes)
        try:
            if self.loaders is None:
                self.loaders = TrainLoaders(
                    site,
                    self._live,
                    place=self.place,
                    undo=self._undo_setting,
                    give_up=self._give_up,
                    by_ladder=self.terms.by_ladder if self.terms else (),
                )
            return self._change_loader(self.loaders, loader, site)
        except FastLoopError:
            raise
        except Exception as error:
            reason = describe(error)
        self._live.plan, self.loaders, self.micro, undos = before
        self._changes.undo_down_to(undos)
        if self.loaders is None or self.strict:
            names, self._live.loader_rungs = self._live.loader_rungs, frozenset()
            for step in self.plan.steps:
                if step.rung in names:
                    self._live.skip(step, reason)
        return loader

    def train_start(self) -> None:
        """Optimizers exist and hold their restored state; the first step is next."""
        self._live.check_optimizers(self._site, self._changes.undo)
        self._run("train_start")
        if self.validation is not None:
            self.validation.give_back_unplanned()
        if self.loaders is not None:
            self.loaders.train_start()
        if self._live.held and self.terms is not None and self._site is not None:
            self.rung_trials = RungTrials(
                Rehearsal(self._site, self._live.held_steps, self.terms.of_run(self._site.trainer), self._handle),
                pause=self._undo_but_keep_evidence,
                record_outcomes=self._record_outcomes,
                graphs=self.graphs,
                may_grow=lambda: self.micro is not None and self.micro.choice.may_grow,
            )

    @property
    def facts(self) -> Facts | None:
        """Facts of the machine, the run and the model as built; None if they could not be read."""
        return None if self._site is None else self._site.facts

    @property
    def held(self) -> list[str]:
        """Rungs that wait for the rehearsal."""
        return sorted(self._live.held)

    def first_batch_done(self, batch: Any) -> None:
        """The first batch was trained on without changes."""
        if self.rung_trials is not None:
            self.rung_trials.first_batch_done(batch)

    def rehearse(self, batch: Any) -> None:
        """Before this batch, between two steps: if due, try rungs or take a second look at them."""
        if self.rung_trials is not None:
            self.rung_trials.run_due(batch)

    @property
    def is_trying(self) -> bool:
        """Whether `rehearse` has something to do before the next batch."""
        return self.rung_trials is not None and self.rung_trials.has_trials_left

    def to_device(self, batch: Any, move: Callable[[Any], Any], dataloader_idx: int) -> Any:
        """Move a batch to the device, unless a feed has already done so."""
        if self._site is None:
            return move(batch)
        if isinstance(batch, BatchWindow) and self.micro is not None:
            return self.micro.show_window(self._site.staging.finish_window(batch, move, dataloader_idx))
        return self._site.staging.finish(batch, partial(move, batch), dataloader_idx)

    def find_whole(self, batch: Any) -> tuple[Any, float]:
        """The batch, or the whole window if Lightning sees only one batch of it; and its share of a full window."""
        return (batch, 1.0) if self.micro is None else self.micro.windows.find_whole(batch)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one training_step of the module, in one piece or several."""
        site = self._site
        if site is None:
            return step(*args, **kwargs)
        step = site.take_notes(step)
        for note in site.every_batch:
            note()
        if self.rung_trials is not None:
            self.rung_trials.note_batch(args)
            for convert in self.rung_trials.take_late_conversions() if args else ():
                batch = convert(args[0]) if self.micro is None else self.micro.windows.convert(args[0], convert)
                args = (batch, *args[1:])
        runs_whole = self.micro is None or self.micro.choice.runs_whole
        whole = step if self.graphs is None else self.graphs.wrap(step, runs_whole=runs_whole)
        if self.micro is None or not args:
            return self.run_step(whole, *args, **kwargs)
        run, run_whole = (partial(self.run_step, each, **kwargs) for each in (step, whole))
        return self.micro.run(run, run_whole, args[0], args[1:])

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step of any stage, and repeat it without lower precision if that made it fail."""
        return step(*args, **kwargs) if self._fallback is None else self._fallback.run(step, *args, **kwargs)

    def backward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run the backward of a batch, and repeat it without lower precision if that made it fail."""
        if self.micro is not None:
            self.micro.before_backward()
        if self._fallback is not None:
            run = partial(self._fallback.run_backward, run, repeats=self.micro is None)
        loss = run(*args)
        if self.graphs is not None:
            self.graphs.after_backward()
        if self.micro is not None:
            self.micro.after_backward()
        if self.rung_trials is not None:
            self.rung_trials.backward_ends()
        return loss

    # -- evidence and undo ----------------------------------------------------------------------------------------

    def evidence(self) -> Mapping[str, Mapping[str, Any]]:
        """Read every probe now; later readings are merged into earlier ones."""
        probes = [] if self.loaders is None else self.loaders.list_probes()
        owned = ((self._live.find_owner(key), probe) for key, probe in probes)
        found = self._changes.read((rung, probe) for rung, probe in owned if rung is not None)
        others = {"second_look": self.rung_trials and self.rung_trials.seen, "resumed": self.place.resumed}
        return {**found, **{name: each for name, each in others.items() if each}}

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove from a checkpoint what a run without us would not have written."""
        if self.loaders is not None:
            self.loaders.clean_checkpoint(checkpoint)
        self._changes.clean(checkpoint)

    def read_place(self) -> EpochPlace | None:
        """The training's position in its data, for a checkpoint; None if no rung changes the loader."""
        return None if self.loaders is None else self.loaders.read_place()

    def undo(self) -> None:
        """Undo everything, the last change first. Idempotent; a failing undo is reported, and the others still run."""
        self.end_rehearsal()
        self._changes.undo_down_to(0)
        self.place.let_go()
        self.loaders = self.micro = self.validation = self._fallback = self._site = None

    def end_rehearsal(self) -> None:
        """Training is over: skip the rungs that were never tried."""
        if self.rung_trials is not None:
            self.rung_trials.end()
        self._live.skip_held("training ended before it could be tried on the calls of the first step")

    # -- inside ---------------------------------------------------------------------------------------------------

    def _change_loader(self, loaders: TrainLoaders, loader: Any, site: LiveSite) -> Any:
        original = loaders.find_original(loader)
        kept = 0 if self.validation is None else self.validation.count_kept_workers()
        facts = read_facts.add_loader(site.facts, site.trainer, original, self.ladder.start_method, kept)

        def plan_anew(refused: Plan, why: str) -> Plan:
            owner, is_used = refused.owner("loader.engine"), loaders.has_engine()
            if not self._live.plan_without_engine(owner, why, is_used=is_used):
                self._give_up("loader.engine", why)
            return self._live.plan_loader(facts)

        with leaves_on_sigterm(site.trainer):
            changed = loaders.check_engines(loader, self._live.plan_loader(facts), plan_anew)
        if self.micro is None and changed.wants.get("step.micro_batch"):
            choice = make_choice(site, changed, self._live, self._handle)
            self.micro = MicroBatches(choice)
            self._changes.add(choice.rung, Applied(undo=lambda: None, probe=choice.evidence))
        result = loaders.change(loader, changed, facts)
        if self.micro is not None:
            self.micro.windows.sampler, self.micro.choice.whole = loaders.windows, loaders.batch_sizes
        return result

    @property
    def _handle(self) -> ApplierHandle:
        return ApplierHandle(
            apply=self._apply_step,
            unapply=lambda step: self._changes.undo(step.rung),
            settings=partial(getattr, self.ladder),
        )

    def _give_up(self, key: str, reason: str, *, is_refusal: bool = True, has_acted: bool = False) -> None:
        """Give up a setting planned for one train loader that cannot apply to all of them, or is not worth it."""
        for step in self.plan.planned:
            if key in step.change.wants:
                if "step.micro_batch" in step.change.wants:
                    self.micro = None
                self._live.give_up(step, reason, is_refusal=is_refusal, has_acted=has_acted)
                if self.validation is not None:
                    self.validation.give_back(step.rung)

    def _run(self, moment: Moment) -> None:
        """Run the planned actions of a moment. A rung that fails is skipped with the reason, and training goes on."""
        actions = [(step, action) for step in self.plan.planned for action in step.change.actions]
        for step, action in actions:
            if action.when == moment and step.rung not in self._live.held and self._live.is_planned(step):
                try:
                    self._run_action(step, action)
                except Exception as error:
                    self._live.skip(step, describe(error))

    def _run_action(self, step: Step, action: Action) -> None:
        if self._site is not None:
            self._changes.add(step.rung, action.do(self._site))

    def _graph_steps(self, asked: bool) -> Applied:
        assert self._site is not None
        self.graphs = graphs = GraphedSteps(
            self._site,
            asked=asked,
            terms=self.terms,
            is_ready=lambda: self.rung_trials is None or self.rung_trials.eager_trials_are_over,
        )

        def undo() -> None:
            graphs.undo()
            self.graphs = None

        return Applied(undo=undo, probe=graphs.evidence)

    def _apply_step(self, step: Step) -> None:
        """Run all actions of a rung at once, in mid-run."""
        for action in step.change.actions:
            self._run_action(step, action)

    def _undo_but_keep_evidence(self, step: Step) -> None:
        """Undo a rung that may come back, and keep its evidence."""
        known = self.evidence().get(step.rung, {})
        self._changes.undo(step.rung)
        self._changes.evidence[step.rung] = dict(known)

    def _record_outcomes(self, outcomes: Sequence[RungOutcome]) -> None:
        """Update the plan and the evidence with the outcomes of the rungs that were tried."""
        for outcome in outcomes:
            if outcome.fault is not None:
                self._changes.evidence.pop(outcome.rung, None)
        self._live.record(outcomes)

    def _give_up_precision(self, step: Step, why: str) -> None:
        if self.rung_trials is not None:
            self.rung_trials.end()
        self._changes.undo(step.rung)
        if self.graphs is not None and self.graphs.replay_ms is not None:
            self.graphs.record_anew()
        self._record_outcomes([RungOutcome(rung=step.rung, fault=why, is_lasting=False)])
        self.warn(f"{step.rung} is now off: {why}")

    def _undo_setting(self, key: str, undo: Undo) -> None:
        self._changes.add(self._live.find_owner(key) or key, Applied(undo=undo))
