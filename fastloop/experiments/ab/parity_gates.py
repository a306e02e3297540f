"""The parity gates of an experiment, from the files of its runs and from separate gradient trials."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fastloop import ladder
from fastloop.experiments.ab.arms import Arm, Ask, Progress, label_of
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import read_finished
from fastloop.judge import parity
from fastloop.records.experiment import Gate, Outcome
from fastloop.records.measurement import Measurement
from fastloop.records.plan import PARITY_ORDER, Parity
from fastloop.records.run_files import load_parity_class, load_plan, load_verdicts
from fastloop.records.store import decode, load
from fastloop.records.trial import GradientAnswer, Ledger, Trial

_LEDGER = re.compile(r"ledger(-\d+)?\.json")
KEPT = "gradients.pt"
"""The file that the base's gradient trial leaves for its arms' trials, see `bridge/trials/gradient_probe.py`."""


def find_class(trials: Sequence[Trial]) -> Parity:
    """Return the weakest parity class that any plan of these trials promises."""
    return max((load_parity_class(trial.run_dir) for trial in trials), key=PARITY_ORDER.index, default="exact")


def split_by_effect(trials: Sequence[Trial]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the enabled rungs that took effect in every run, and those that did not, with the reason."""
    inactive: dict[str, str] = {}
    verdicts = [verdict for trial in trials for verdict in load_verdicts(trial.run_dir)]
    for verdict in verdicts:
        if not verdict.took:
            inactive.setdefault(verdict.rung, verdict.why)
    return tuple(dict.fromkeys(each.rung for each in verdicts if each.rung not in inactive)), inactive


def regroups(trial: Trial) -> bool:
    """Whether a trial's optimizer steps run in micro-batches other than the loader's batches."""
    return ladder.regroups([step.rung for step in load_plan(trial.run_dir).planned])


def augments_by(trial: Trial) -> str | None:
    """Return the rung that decides where random augmentations run, if that may change the random numbers they draw."""
    loose = [step.rung for step in load_plan(trial.run_dir).planned if step.change.parity == "approximate"]
    return next((rung for rung, card in ladder.collect_cards().items() if card.loads_elsewhere and rung in loose), None)


def judge_ledgers(pairs: Sequence[tuple[Trial, Trial]], parity_class: Parity) -> Gate:
    """Check that two arms saw the same samples in the same steps, run by run and rank by rank."""
    found = []
    for base, arm in pairs:
        names = {
            path.name
            for trial in (base, arm)
            for path in trial.run_dir.glob("ledger*.json")
            if _LEDGER.fullmatch(path.name)
        }
        ranks = max((trial.measurement or Measurement()).world_size for trial in (base, arm))
        names |= {f"ledger-{rank}.json" for rank in range(1, ranks)}  # a killed rank leaves no ledger
        for name in sorted(names):
            left, right = load(base.run_dir / name, Ledger), load(arm.run_dir / name, Ledger)
            if left is None or right is None:
                return Gate(name="ledger", passed=None, why=f"a run wrote no {name}")
            found.append((left, right))
    if not found:
        return Gate(name="ledger", passed=None, why="no run wrote a ledger")
    return parity.judge_ledger(
        found,
        regrouped=any(regroups(base) or regroups(arm) for base, arm in pairs),
        reshuffled=any(augments_by(base) != augments_by(arm) for base, arm in pairs),
        parity_class=parity_class,
    )


def judge_gradients(
    base: Arm,
    arm: Arm,
    base_folder: Path,
    folder: Path,
    parity_class: Parity,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Gate:
    """Compare the gradients of one step of both arms, at the same weights and on the same samples. Runs two trials
    unless they finished earlier; the base's trial serves all its arms."""
    second, first = read_finished(folder, "gradients"), read_finished(base_folder, "gradients")
    if first is None or (second is None and not (base_folder / KEPT).is_file()):
        label = label_of(base.name, base_folder)
        first = base.run(label, base_folder, Ask(variation="gradients"), limits=limits, progress=progress)
    if not first.ok:
        return Gate(name="gradient", passed=None, why=f"the base's gradient could not be taken: {first.cause}")
    if second is None:
        ask = Ask(variation="gradients", reference=base_folder.absolute())
        second = arm.run(label_of(arm.name, folder), folder, ask, limits=limits, progress=progress)
    if not second.ok:
        return Gate(name="gradient", passed=None, why=f"the arm's gradient could not be taken: {second.cause}")
    left, right = (decode(trial.answer, GradientAnswer) or GradientAnswer() for trial in (first, second))
    return parity.judge_gradient(left, right, parity_class)


def sweep(folder: Path) -> None:
    """Delete the weights and gradients that a base keeps for its arms: together they take twice the model's size."""
    for kept in folder.rglob(KEPT):
        kept.unlink(missing_ok=True)


def judge_losses(pairs: Sequence[tuple[Trial, Trial]], parity_class: Parity) -> Gate:
    """Check that the losses of two arms agree, run by run."""
    seen = [[trial.measurement or Measurement() for trial in pair] for pair in pairs]
    repeats = all(each.device == "cpu" for pair in seen for each in pair)
    losses, others = ([pair[side].loss for pair in seen] for side in (0, 1))
    redrawn = any(augments_by(base) != augments_by(arm) for base, arm in pairs)
    return parity.judge_loss(losses, others, parity_class, bitwise=repeats, redrawn=redrawn)


def judge_parity(pairs: Sequence[tuple[Trial, Trial]], gradient: Gate | None, parity_class: Parity) -> Outcome:
    """Combine the gates of these pairs of runs with the gradient's. If no parity is claimed, only a non-finite loss
    fails."""
    if not pairs:
        return parity.sum_up_gates(parity_class, ())
    losses = judge_losses(pairs, parity_class)
    if parity_class == "changes-training":
        if losses.passed is False and losses.limit is None:  # the only way to fail without a limit: not finite
            return Outcome(parity_class=parity_class, passed=False, why=f"loss: {losses.why}", gates=(losses,))
        return parity.sum_up_gates(parity_class, ())
    found = (judge_ledgers(pairs, parity_class), *([gradient] if gradient is not None else []), losses)
    return parity.sum_up_gates(parity_class, found)
