"""The gradient of one optimizer step at the initial weights, compared with another arm's. For disposable processes.

The base saves in ``gradients.pt`` its initial weights, the samples of its first optimizer step and their gradient. An
arm trains one step from the same weights on the same samples, cut into its own batches, and reports how far its
gradient is from the base's. Dropout is off, kernels are deterministic if possible, and both repeat their step, to
separate a real difference from run-to-run noise. The base repeats it several more times: with other random numbers, for
a step that draws some itself; and from weights with an error as large as a precision's rounding, to measure the effect
of rounding alone on this gradient. Behind ReLUs and BatchNorms that is 1e-2 for float32 and 0.3 for bfloat16, in a
transformer 1e-6 and 1e-2, so one limit for all would be wrong. If the effect is too large for a meaningful limit, all
arms also make the step from other weights, where it is smaller: see `gradient_state.raise_biases`.

The gradient is the one before clipping, averaged over ranks and accumulated batches; if either arm clips, the gradient
that the optimizer gets is compared too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from fastloop.bridge.apply import read_facts, read_model, read_training
from fastloop.bridge.attributes import attribute
from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.trials import ceilings, determinism, gradient_state
from fastloop.bridge.trials.gradient_state import RAISED, ROUNDING, STARTS, TWICE, Round
from fastloop.bridge.trials.heartbeat import drop_other_hooks
from fastloop.bridge.trials.no_checkpoints import Measured, train_until_measured
from fastloop.config.loading import Config
from fastloop.evidence.model.dropout import switch_off_dropout
from fastloop.evidence.model.gradient_distance import Gradient, is_finite, measure_gradient_distance
from fastloop.feeds.batch_tree import CannotRegroup, iterate_tensors
from fastloop.feeds.regrouping import Leaves, copy_tensors, regroup
from fastloop.feeds.splitting import get_loss
from fastloop.judge.parity import is_sharp
from fastloop.records import store

MOST_STEPS = 40
"""A loss scaler may take many steps to find a scale that float16 can represent."""


def measure(config: Config, out: Path, beat: Path | None, reference: Path | None) -> Mapping[str, Any]:
    """Measure the gradient of one optimizer step of a configuration, with all its rungs.

    Args:
        out: the directory in which the base saves the data for the comparison.
        beat: the file that gets the heartbeat, see `heartbeat.py`.
        reference: the base's directory; None if this is the base.

    Returns:
        The content of `GradientProbe.answer`, and ``rungs``: whether each enabled one took effect.

    Raises:
        FastLoopError: as in `training.train`.
    """
    determinism.prepare()
    made: list[Any] = []

    def prepare(trainer: Any, loop: FastLoop) -> None:
        made[:] = [GradientProbe.into(trainer, out, reference), loop]
        made[0].leave = Measured

    train_until_measured(config, beat, prepare)
    probe, loop = made
    return {**probe.answer, "rungs": {verdict.rung: verdict.took for verdict in loop.verdicts}}


class GradientProbe(Callback):
    """Takes the gradient of a Trainer's first optimizer step, and ends the fit.

    Args:
        out: the directory for ``gradients.pt``.
        reference: the base's directory; None if this is the base.
    """

    def __init__(self, out: Path, reference: Path | None = None) -> None:
        self.out, self.reference = out, reference
        self.leave: type[Exception] | None = None
        """The exception that ends the fit; if None, ``trainer.should_stop`` ends it, as a user's script expects."""
        self.answer: dict[str, Any] = {}
        """On the first rank, after the fit: ``loss``, ``precision`` and ``batches`` of the step, ``finite``,
        ``rounds``; ``self_deviation`` between two repetitions; ``clips``, how gradients are clipped. For the base also
        ``random_deviation`` with other random numbers, ``rounding`` by precision, and ``steady_rounding``, the same
        with raised biases, if those were needed. For an arm the result of
        `gradient_distance.measure_gradient_distance`, ``steady``, the same with the base's raised biases,
        ``weights_missing`` and ``weights_extra``. ``why`` if there is nothing to compare."""
        self.why: str | None = None
        self._undo = contextlib.ExitStack()
        self._known: dict[str, Any] = {}
        self._kept: list[tuple[list[Any], list[Leaves]]] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._raised: dict[str, torch.Tensor] = {}
        self._starts = STARTS if reference is None else TWICE
        self._rounds: list[Round] = []
        self._round = Round()
        self._step = self._steps = 0
        self._clips: str | None = None
        self._device = self._keeps_on = torch.device("cpu")
        self._ended = False
        drop_other_hooks(self, "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")

    @classmethod
    def into(cls, trainer: Any, out: Path, reference: Path | None = None) -> GradientProbe:
        """Make a Trainer's next fit one optimizer step. Call before the fit, or in a callback's ``setup``."""
        probe = cls(out, reference)
        trainer.callbacks.append(probe)
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        ceilings.replay(trainer, change=probe.feed, count=lambda: trainer.accumulate_grad_batches)
        return probe

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":  # a script may test its trained model
            return
        self._undo.enter_context(determinism.make_repeatable())
        gradient_state.find_path(self.out, trainer.global_rank).unlink(missing_ok=True)
        if self.reference is not None:
            try:
                self._known = gradient_state.read(self.reference, trainer.global_rank)
            except Exception as error:
                self.why = f"the base's gradient cannot be read: {type(error).__name__}: {error}"
                return
            if self._known["world_size"] != trainer.world_size:
                self.why = f"the base has {self._known['world_size']} ranks, but this arm has {trainer.world_size}"

    def feed(self, batches: list[Any]) -> list[Any]:
        """Return the batches to train on: the loader's own, or the base's samples in batches of the loader's sizes."""
        number = len(self._kept)
        if self.reference is not None and self.why is None:
            try:
                theirs = regroup(batches, self._known["batches"][number])
                batches = [*theirs, *batches[len(theirs) :]]  # those after them are not used
            except (CannotRegroup, IndexError) as error:
                self.why = f"the base's samples do not fit this arm's batches: {error}"
        self._kept.append((batches, [copy_tensors(batch) for batch in batches]))
        return batches

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not read_facts.read_run_facts(trainer, trainer.strategy).plain_gradients:
            self.why = f"{type(trainer.strategy).__name__} does not keep whole gradients in the parameters"
        determinism.make_deterministic()
        self._undo.callback(switch_off_dropout(pl_module))
        theirs = self._known.get("weights", {})
        own = gradient_state.copy_state(pl_module)
        if odd := [name for name in own if name in theirs and own[name].shape != theirs[name].shape]:
            self.why = f"the base's {odd[0]} has a different shape"
        if theirs:
            self.answer["weights_missing"] = [name for name in theirs if name not in own]
            self.answer["weights_extra"] = [name for name in own if name not in theirs]
        self._weights = own if self.why is not None else {**own, **theirs}
        self._raised = gradient_state.raise_biases(pl_module) if self.reference is None else {}
        if self.why is None and (raised := self._known.get("raised")):
            self._raised, self._starts = raised["biases"], (*TWICE, *RAISED[:1])
        self._clips, self._device = _clips(trainer, pl_module), trainer.strategy.root_device
        if pl_module.automatic_optimization:
            clip = functools.partial(self._clip, trainer, pl_module, pl_module.configure_gradient_clipping)
            self._undo.enter_context(attribute(pl_module, "configure_gradient_clipping", clip))
        # Ignore the configured numbers of steps and epochs: the probe takes what it needs. Schedules are already made.
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        self._step = trainer.global_step
        self._restore_start(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._round.batches:
            self._round.begins = batch_idx
            determinism.seed_everything(self._round.start.seed)
        self._round.batches += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not pl_module.automatic_optimization:
            self._round.gradient |= gradient_state.copy_gradient(trainer, pl_module, optimizer, self._keeps_on)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (loss := get_loss(outputs)) is not None:
            self._round.loss = (self._round.loss or 0.0) + float(loss)
        self._refresh()
        if trainer.global_step == self._step or self._ended:
            return
        self._step, done = trainer.global_step, self._round
        self._steps += 1
        if self._counts(trainer, done):
            self._rounds.append(done)
            self._keeps_on = gradient_state.choose_device(self._device, done.gradient)
            if self._starts is STARTS and len(self._rounds) == len(STARTS) and self._raised and self._is_scattered():
                self._starts = (*STARTS, *RAISED)
        self._restore_start(pl_module)
        if len(self._rounds) == len(self._starts) or self._steps >= MOST_STEPS:
            self._end(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not self._ended and stage == "fit" and self._rounds:
            self._conclude(trainer)
        self._undo.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._undo.close()

    # -- a round --------------------------------------------------------------------------------------------------

    def _restore_start(self, module: Any) -> None:
        """Return to the start: weights, buffers, random numbers."""
        start = self._starts[min(len(self._rounds), len(self._starts) - 1)]
        self._round = Round(start)
        start.set(module, {**self._weights, **self._raised} if start.raised else self._weights)

    def _is_scattered(self) -> bool:
        """Whether rounding changes this gradient more than any useful limit allows."""
        return any(not is_sharp(each) for each in self._measure_distances(ROUNDING))

    def _measure_distances(self, starts: Iterable[str], reference: str = "first") -> list[float | None]:
        """Deviations of these rounds' gradients from the reference round's; None for rounds that were not made."""
        made = {each.start.name: each for each in self._rounds}
        known = vars(made[reference]) if reference in made else {}
        return [self._compare(known, made[name])["deviation"] if name in made else None for name in starts]

    def _refresh(self) -> None:
        """Restore the replayed batches: on the CPU a step works on the same tensors, and may have changed them."""
        with torch.no_grad():
            for batches, copies in self._kept:
                for batch, leaves in zip(batches, copies, strict=True):
                    for tensor, kept in zip(iterate_tensors(batch), leaves, strict=True):
                        if tensor.device.type == "cpu" and not torch.equal(tensor, kept):
                            tensor.copy_(kept)

    def _clip(self, trainer: Any, module: Any, original: Any, optimizer: Any, *args: Any, **named: Any) -> None:
        """Copy the gradient before and after clipping; this runs after every hook that may change a gradient."""
        self._round.gradient = gradient_state.copy_gradient(trainer, module, optimizer, self._keeps_on)
        original(optimizer, *args, **named)
        if self._clips:
            self._round.clipped = gradient_state.copy_gradient(trainer, module, optimizer, self._keeps_on)

    def _counts(self, trainer: Any, done: Round) -> bool:
        """Whether this step counts as a round: it used the first batches, as many as the first round, and did not
        overflow under a loss scaler."""
        if self._kept and done.begins % len(self._kept[0][0]):
            return False
        if self._rounds and done.batches != self._rounds[0].batches:
            return False
        scaled = getattr(trainer.strategy.precision_plugin, "scaler", None) is not None
        return is_finite(done.gradient) or not scaled or self._steps >= MOST_STEPS

    # -- the end --------------------------------------------------------------------------------------------------

    def _end(self, trainer: Any) -> None:
        self._conclude(trainer)
        if self.leave is not None:
            raise self.leave
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0
        trainer.should_stop = True

    def _conclude(self, trainer: Any) -> None:
        self._ended = True
        first = self._rounds[0] if self._rounds else self._round
        own, random = self._measure_distances(("again", "random"))
        self.answer |= {
            "why": self.why or (None if first.gradient else "no optimizer step with a gradient was made"),
            "loss": first.loss,
            "precision": read_training.find_precision(trainer, trainer.lightning_module),
            "batches": first.batches,
            "finite": is_finite(first.gradient),
            "rounds": len(self._rounds),
            "self_deviation": own,
            "clips": self._clips,
        }
        steady = next((each for each in self._rounds if each.start is RAISED[0]), None)
        if self.reference is None:
            self._save(trainer, first, steady)
            self.answer |= {
                "random_deviation": random,
                "rounding": dict(zip(ROUNDING, self._measure_distances(ROUNDING), strict=True)),
            }
            if steady is not None:
                raised = self._measure_distances((each.name for each in RAISED[1:]), RAISED[0].name)
                self.answer["steady_rounding"] = dict(zip(ROUNDING, raised, strict=True))
        elif self.answer["why"] is None and trainer.is_global_zero:
            self.answer |= self._compare(self._known, first)
            if steady is not None:
                self.answer["steady"] = self._compare(self._known["raised"], steady)

    def _compare(self, known: Mapping[str, Any], done: Round) -> dict[str, Any]:
        """Compare a gradient with the base's: before clipping, or as the optimizer gets it, whichever deviates more.
        With raised biases the last layer has nearly all of the norm, so the deviation with equal weight per layer
        counts too."""
        pairs = [(known["gradient"], done.gradient)]
        if known["clipped"] or done.clipped:  # with an optimizer like AdamW, the loss does not show how clipping scales
            pairs.append((known["clipped"] or known["gradient"], done.clipped or done.gradient))
        found = max((self._measure_deviation(*pair) for pair in pairs), key=lambda each: each["deviation"])
        alike = found["layers"] if done.start.raised else None
        return {**found, "deviation": max(found["deviation"], alike or 0.0)}

    def _measure_deviation(self, base: Gradient, arm: Gradient) -> dict[str, Any]:
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # no memory, or an operation that a sparse gradient lacks there
                return measure_gradient_distance(base, arm, self._device)
        return measure_gradient_distance(base, arm)

    def _save(self, trainer: Any, first: Round, steady: Round | None) -> None:
        """Save the data with which arms are compared."""
        batches = [[copies[n % len(copies)] for n in range(first.batches)] for _, copies in self._kept if copies]
        content: dict[str, Any] = {"schema": store.SCHEMA, "world_size": trainer.world_size, "batches": batches}
        if trainer.is_global_zero:
            content["weights"] = self._weights
            content |= {"gradient": first.gradient, "clipped": first.clipped}
            if steady is not None:
                content["raised"] = {"biases": self._raised, "gradient": steady.gradient, "clipped": steady.clipped}
        gradient_state.save(self.out, trainer.global_rank, content)


def _clips(trainer: Any, module: Any) -> str | None:
    """Describe how gradients are clipped; None if they are not."""
    if read_model.overrides(module, "configure_gradient_clipping"):
        return "in configure_gradient_clipping"
    limit, how = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    return f"by {getattr(how, 'value', how) or 'norm'} to {limit:g}" if limit else None
