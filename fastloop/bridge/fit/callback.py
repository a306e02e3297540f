"""FastLoop, the callback: the one line that users add to their Trainer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fastloop import diagnose
from fastloop.bridge import namespaces
from fastloop.bridge.apply import read_training
from fastloop.bridge.apply.applier import Applier
from fastloop.bridge.apply.environment import set_variables
from fastloop.bridge.apply.loop.known_loops import HOOKS_PER_BATCH
from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.state.untouched import preserve_state
from fastloop.bridge.fail_open import explain_exception, fail_open, ignoring_dead_workers, is_disabled
from fastloop.bridge.fit import lines, own_loader, run_directory, strategy
from fastloop.bridge.watch import loader_state
from fastloop.bridge.watch.session import Session, describe_death
from fastloop.config.loading import Config, load_callback_config
from fastloop.config.schema import check_arguments
from fastloop.errors import FastLoopError, NotApplicable
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.gpu.forks import protect_children
from fastloop.feeds.place.kept_order import EpochPlace
from fastloop.ladder import collect_cards, verify
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Plan, Verdict
from fastloop.report.run import summary

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = namespaces.make_callback_class()

strategy.register()


class FastLoop(Callback):
    """Watches a training run, applies the rungs that are switched on, and reports what it measured.

    Args:
        config: None to watch only; a shipped ladder's name (``"safe"``), a YAML file, or a mapping such as
            ``{"rungs": {"amp": {"enabled": True}}}``.
        out: directory for the run's files; default ``<trainer.log_dir>/fastloop/<utc>``, none without a logger.
        strict: a rung that cannot apply is an error before step 1; defaults to the config's value.
        quiet: print nothing.

    After ``fit``, it has ``plan``, ``measurement``, ``verdicts`` and ``findings`` in every process that trained. Under
    ``ddp_spawn`` the main process does not train.

    Raises:
        ConfigError: the configuration cannot be used; names file, line and key.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        quiet: bool = False,
    ) -> None:
        self.off, self.quiet = is_disabled(), quiet
        self.out: Path | None = None
        self.hunt_syncs = False
        """Find every device synchronization with its line, in a few slower steps after the timed ones."""
        self.say: Callable[[str], None] = lines.skip if quiet else lines.say
        """Receives a line about progress."""
        self.writes = True
        """Whether the run's files are written, if there is a place for them."""
        self.in_trial = self.obeys = False
        """Whether this is a trial of an experiment, which represents a longer run; whether a command configured it."""
        self._refused: dict[str, str] = {}
        """Rungs that did not work in a rehearsal, and why."""
        self._cheaper: set[str] = set()
        """Rungs for which a rehearsal kept the cheaper variant."""
        self._forget()
        self._reset_fit()
        for name in HOOKS_PER_BATCH:
            self._switch_hook(name, False)
        if self.off:
            return
        self.config, ignored = load_callback_config(config)
        self.strict = self.config.strict if strict is None else strict
        check_arguments(out=out, strict=self.strict, quiet=quiet)
        self.out = None if out is None else Path(out)
        set_variables(self.config.ladder)
        if ignored and not quiet:
            lines.say(f"ignored, because you create the Trainer yourself: {', '.join(ignored)}")

    @classmethod
    def of(cls, config: Config, *, out: Path | None, quiet: bool = False) -> FastLoop:
        """Make a callback from a configuration that is already checked. This is not an argument of ``FastLoop`` because
        LightningCLI reads the arguments' types: if one of them is a dataclass, it opens any given file itself."""
        loop = cls(out=out, quiet=quiet)
        loop.config, loop.strict = config, config.strict
        set_variables(config.ladder)
        return loop

    def obey(self, config: Config, *, out: Path | None) -> None:
        """Use a command's configuration instead of its own, and print nothing: the command does that."""
        self.config, self.strict, self.out, self.say = config, config.strict, out, lines.skip
        self.quiet = self.obeys = True
        set_variables(config.ladder)

    def _forget(self) -> None:
        """Clear the results of the last fit."""
        self.plan = Plan()
        self.measurement: Measurement | None = None
        self.verdicts: tuple[Verdict, ...] = ()
        self.findings: tuple[Finding, ...] = ()
        self.report_extras: Mapping[str, Any] = {}
        """Extra content of the report; see `run_directory.choose_report_extras`."""
        self.run_dir: Path | None = None
        """The directory to which this rank wrote the run's files; None if it did not."""
        self.unwritten: str | None = None
        """Why the run's files could not be written; None if they could, or if there is no place for them."""
        self._loader_seen, self._steps_before = dict[str, Any](), (0, 0)
        self._place: EpochPlace | None = None
        """The position in the data at which the fit ended."""

    def _reset_fit(self) -> None:
        """Reset the state that belongs to one fit only, and is neither copied nor pickled."""
        self._applier: Applier | None = None
        self._session: Session | None = None
        self._one_time = OneTime()
        self._hint: str | None = None
        """An explanation of the exception that ended the fit, see `explain_exception`."""
        self._restore: list[Callable[[], object]] = []
        self._stopped = self._training = self._first = False

    def __getstate__(self) -> dict[str, Any]:
        blank = FastLoop.__new__(FastLoop)
        blank._reset_fit()
        return {**vars(self), **vars(blank)}

    @property
    def spent_once_s(self) -> float:
        """Seconds that this fit has spent so far on one-time costs, which no later step pays again."""
        return self._one_time.spent_s

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    @fail_open
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._undo()  # a fit that raised may not have called teardown
        others = [callback for callback in trainer.callbacks if isinstance(callback, FastLoop)]
        if len(others) > 1:
            raise FastLoopError(
                got=f"{len(others)} FastLoop callbacks in one Trainer",
                why="only one may own each setting",
                do="keep one, and put all rungs into its config",
            )
        if stage == "fit":
            self._forget()
            self._refused.clear()
            self._cheaper.clear()
        if self.config.ladder.enabled():
            self._attach(trainer)
        if stage == "fit":
            self._switch_hook("on_train_batch_end", self.config.watch.enabled or self._applier is not None)
            if trainer.strategy.root_device.type == "cuda":
                protect_children()  # loader workers; both watching and rungs make CUDA events
            if self.config.watch.enabled:
                self._start_watch(trainer)

    @fail_open
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first, self._steps_before = True, read_training.read_optimizer_steps(trainer)
        if self._applier is not None:
            self._applier.train_start()
            self.plan = self._applier.plan
            self._switch_hook("on_train_batch_start", self._applier.is_trying)
        if self._session is not None:
            self._restore += self._session.train_start(trainer, pl_module)

    @fail_open
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._applier is not None:
            self._applier.rehearse(batch)
            self.plan = self._applier.plan
            if self._session is not None:
                self._session.watch.begin_probe_again()
        self._switch_hook("on_train_batch_start", self._applier is not None and self._applier.is_trying)

    @fail_open
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._session is not None:
            whole = (batch, 1.0) if self._applier is None else self._applier.find_whole(batch)
            self._session.batch_end(trainer, outputs, *whole)
        if self._first:
            self._first, self._training = False, True
            self._switch_hook("on_train_batch_end", self._session is not None)
            if self._applier is not None:
                self._applier.first_batch_done(batch)
            self._collect_evidence(trainer)

    @fail_open
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.validation_starts()

    @fail_open
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.validation_ends()

    @fail_open
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._measure(trainer)

    @fail_open
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.measurement is None:  # there was no step to train
            self._measure(trainer)
        self._conclude(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            with ignoring_dead_workers():
                self._on_exception(trainer, pl_module, exception)
        except Exception as error:  # the user's exception must not be hidden by ours
            lines.say(f"no report for this run: {error}")
        finally:
            self._undo()

    @fail_open
    def _on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        rungs, held = [step.rung for step in self.plan.planned], self._applier.held if self._applier else ()
        if not trainer.received_sigterm and (line := explain_exception(exception, pl_module, rungs, held)) is not None:
            lines.warn(line)
            self._hint = line
        if not self._training:
            return
        if self.measurement is None:
            self._measure(trainer, exception)
        else:
            seen, died_of = self.measurement, describe_death(exception, trainer)
            evidence = {**seen.evidence, **self._list_hints()}
            self.measurement = dataclasses.replace(seen, partial=True, died_of=died_of, evidence=evidence)
            self._diagnose()
        self._conclude(trainer)

    @fail_open
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._applier is not None:
            self._applier.clean_checkpoint(checkpoint)
        # Not in a state_dict method: with two FastLoops, Lightning would then raise its own error instead of ours.
        if (place := self._read_place()) is not None:
            checkpoint["callbacks"][self.state_key] = {"place": place}

    @fail_open
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._applier is not None:
            self._applier.scaler_state = checkpoint.get("MixedPrecision") or checkpoint.get("native_amp_scaling_state")
            self._applier.place.saved = checkpoint["callbacks"].get(self.state_key, {}).get("place")

    @fail_open
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._undo()

    # -- inside ---------------------------------------------------------------------------------------------------

    @fail_open
    def _read_place(self) -> EpochPlace | None:
        """Return the training's position in its data; None if no rung changes how it is loaded."""
        return self._place if self._applier is None else self._applier.read_place()

    def stop_watching(self, why: str) -> None:
        """Give up with one warning; rungs stay as they are, because the run has begun with them."""
        if not self._stopped:
            rank_zero_warn(f"fastloop stopped watching, training continues: {why}")
        if self._session is not None:
            self._session.stop()
        self._session, self._stopped = None, True

    def _switch_hook(self, hook: str, on: bool) -> None:
        """Switch a hook on or off. Lightning skips hooks that are not callable, and a call costs microseconds per step.
        Hooks that a subclass overrides stay on."""
        if on or getattr(type(self), hook) is not getattr(FastLoop, hook):
            vars(self).pop(hook, None)
        else:
            setattr(self, hook, None)

    def _attach(self, trainer: Any) -> None:
        """Make an applier, and let the Trainer's own strategy call it."""
        owner: Any = trainer.strategy
        terms = Terms(by_ladder=self.config.by_ladder, weighs_costs=not self.in_trial)
        off = set() if trainer.state.fn == "fit" else self.config.by_ladder - {step.rung for step in self.plan.planned}
        self._applier = applier = Applier(
            self.config.ladder.without(off),
            strict=self.strict,
            warn=lines.warn,
            say=self.say,
            terms=terms if self.config.rehearsal == "on" else None,
            by_ladder=self.config.by_ladder,
            refused=self._refused,
            cheaper=self._cheaper,
            one_time=self._one_time,
        )
        try:
            self._restore.append(strategy.extend(owner))
        except NotApplicable as reason:
            applier.skip_all(str(reason))
            self.plan = applier.plan
            return
        owner.fastloop = applier
        self._restore += [lambda: vars(owner).pop("fastloop", None), applier.undo]

    def _start_watch(self, trainer: Any) -> None:
        self._session = Session(
            trainer,
            self.config.watch,
            warn=lines.warn,
            hunt_syncs=self.hunt_syncs,
            place=lambda: self._find_directory(trainer),
            one_time=self._one_time,
            preserve_state=preserve_state,
        )
        attached = self._session.attach(trainer, self._note_batch_requested, self._note_batch_received)
        self._restore += [self._session.stop, attached]

    def _find_directory(self, trainer: Any) -> Path | None:
        """Return the run's directory, the same at each call; None on other ranks than 0, or if nothing is written."""
        if self.run_dir is None and trainer.is_global_zero and self.writes:
            self.run_dir = run_directory.choose_directory(trainer, self.out)
        return self.run_dir

    @fail_open
    def _note_batch_requested(self) -> None:
        if self._session is not None:
            self._session.watch.note_batch_requested()

    @fail_open
    def _note_batch_received(self) -> None:
        if self._session is not None:
            self._session.watch.note_batch_received()

    def _collect_evidence(self, trainer: Any) -> dict[str, Any]:
        found = dict(self._applier.evidence()) if self._applier is not None else {}
        self._loader_seen = loader_state.gather_evidence(trainer) or self._loader_seen
        return {**found, "loader": self._loader_seen, "model": read_training.read_evidence(trainer, self._steps_before)}

    def _measure(self, trainer: Any, raised: BaseException | None = None) -> None:
        if self._session is not None:
            self._session.watch.note_end()  # gathering evidence takes time
        evidence = {**self._collect_evidence(trainer), **self._list_hints()}
        evidence |= own_loader.gather_loader_evidence(trainer, self._applier, self.config.ladder, self._loader_seen)
        if self._applier is not None:
            self._applier.end_rehearsal()
            self.plan = self._applier.plan
        if self._session is not None:
            self.measurement = self._session.measure(trainer, evidence, raised)
        else:
            device, partial = trainer.strategy.root_device.type, raised is not None
            self.measurement = Measurement(evidence=evidence, device=device, partial=partial, total_steps=None)
        self._diagnose()

    def _list_hints(self) -> dict[str, Any]:
        return {} if self._hint is None else {"died": {"hint": self._hint}}

    def _diagnose(self) -> None:
        if self.measurement is None:
            return
        self.verdicts = verify(self.config.ladder, self.plan, self.measurement)
        if self._session is not None:
            enabled = self.config.ladder.enabled()
            self.findings = diagnose.list_findings(self.measurement, collect_cards(), enabled, self.verdicts)

    def _conclude(self, trainer: Any) -> None:
        self._training = False
        if self.measurement is None or not trainer.is_global_zero:
            return
        self.report_extras = run_directory.choose_report_extras(self, trainer.lightning_module)
        where = self._find_directory(trainer)
        self.run_dir = where if where is not None and run_directory.write(where, self) else None
        if not self.quiet and (self._session is not None or self.config.ladder.enabled()):
            report, found = run_directory.describe_report(trainer, self), (self.verdicts, self.findings)
            for line in summary.write_lines(self.measurement, self.plan, *found, report, **self.report_extras):
                rank_zero_info(line)

    def _undo(self) -> None:
        """Restore the Trainer, the last change first. Idempotent."""
        # Lightning may still write checkpoints later, after an exception or after the fit.
        self._place = self._read_place()
        restore = self._restore
        self._reset_fit()
        self._restore = restore  # an interrupt leaves the rest to the next call
        while restore:
            try:
                restore[-1]()
            except Exception as error:  # the other changes must still be undone
                rank_zero_warn(f"fastloop could not undo every change: {type(error).__name__}: {error}")
            restore.pop()
