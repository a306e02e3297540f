"""The parity gates of an experiment, from the files of its runs and from trials of their own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop import parity
from fastloop.commands.arms import Arm, Ask, Progress
from fastloop.commands.readback import read
from fastloop.commands.supervise import Limits
from fastloop.commands.trial import Trial, finished
from fastloop.comparison import Gate, Outcome
from fastloop.records import PARITY_ORDER, Parity

_LEDGER = re.compile(r"ledger(-\d+)?\.json")
KEPT = "gradients.pt"
"""What the base's gradient trial leaves for those of its arms, see `bridge/gradients.py`."""
_REGROUPS = ("step.micro_batch", "loader.window")
_LOADS_ELSEWHERE = ("workers", "prefetch")
"""Rungs that make random augmentations elsewhere or earlier: the one that says where, if both are there, first."""


def class_of(trials: Sequence[Trial]) -> Parity:
    """The weakest class that any plan of these trials promises."""
    said = [(read(trial.run_dir / "plan.json") or {}).get("parity_class") for trial in trials]
    return max((each for each in said if each in PARITY_ORDER), key=PARITY_ORDER.index, default="exact")


def took(trials: Sequence[Trial]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The enabled rungs that took in every run, and those that did not, with the reason."""
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for trial in trials:
        for row in (read(trial.run_dir / "verdicts.json") or {}).get("verdicts") or []:
            seen.setdefault(str(row.get("rung")), []).append(row)
    active = tuple(rung for rung, rows in seen.items() if all(row.get("took") is True for row in rows))
    return active, {rung: next(str(row.get("why")) for row in rows if row.get("took") is not True)
                    for rung, rows in seen.items() if rung not in active}  # fmt: skip


def regroups(trial: Trial) -> bool:
    """Whether its optimizer steps run in other micro-batches than the loader's."""
    return any(key in (row.get("wants") or {}) for row in _planned(trial) for key in _REGROUPS)


def augments_by(trial: Trial) -> str | None:
    """The rung that decides where random augmentations are made, as far as that may change another's random numbers."""
    loose = {row.get("rung") for row in _planned(trial) if row.get("parity_class") == "approximate"}
    return next((rung for rung in _LOADS_ELSEWHERE if rung in loose), None)


def _planned(trial: Trial) -> list[Mapping[str, Any]]:
    """The rows of the rungs that its plan has."""
    rows = (read(trial.run_dir / "plan.json") or {}).get("rungs") or []
    return [row for row in rows if row.get("status") == "planned"]


def ledger(pairs: Sequence[tuple[Trial, Trial]], parity_class: Parity) -> Gate:
    """Whether two arms saw the same samples in the same steps, run by run and rank by rank."""
    found = []
    for base, arm in pairs:
        names = {path.name for trial in (base, arm) for path in trial.run_dir.glob("ledger*.json")
                 if _LEDGER.fullmatch(path.name)}  # fmt: skip
        for name in sorted(names):
            left, right = read(base.run_dir / name), read(arm.run_dir / name)
            if left is None or right is None:
                return Gate(name="ledger", passed=None, why=f"a run left no {name}")
            found.append((left, right))
    if not found:
        return Gate(name="ledger", passed=None, why="no run left a ledger")
    return parity.ledger_gate(found, regrouped=any(regroups(base) != regroups(arm) for base, arm in pairs),
                              reshuffled=any(augments_by(base) != augments_by(arm) for base, arm in pairs),
                              parity_class=parity_class)


def gradient(base: Arm, arm: Arm, base_folder: Path, folder: Path, parity_class: Parity, *,
             limits: Limits | None = None, progress: Progress | None = None) -> Gate:  # fmt: skip
    """The gradient of one step of both arms, at the same weights and on the same samples; two trials, or those of an
    earlier day. The base's serves all its arms."""
    second, first = finished(folder), finished(base_folder)
    if first is None or (second is None and not (base_folder / KEPT).is_file()):
        first = base.run(f"gradient of {base.name}", base_folder, Ask(variation="gradients"), limits=limits,
                         progress=progress)  # fmt: skip
    if not first.ok:
        return Gate(name="gradient", passed=None, why=f"the base's gradient could not be taken: {first.cause}")
    if second is None:
        ask = Ask(variation="gradients", reference=base_folder.absolute())
        second = arm.run(f"gradient of {arm.name}", folder, ask, limits=limits, progress=progress)
    if not second.ok:
        return Gate(name="gradient", passed=None, why=f"the arm's gradient could not be taken: {second.cause}")
    return parity.gradient_gate(first.answer or {}, second.answer or {}, parity_class)


def sweep(folder: Path) -> None:
    """Delete the weights and gradients that a base keeps for its arms: they are as large as the model, twice."""
    for kept in folder.rglob(KEPT):
        kept.unlink(missing_ok=True)


def loss(pairs: Sequence[tuple[Trial, Trial]], parity_class: Parity) -> Gate:
    """Whether the losses of two arms agree, run by run."""
    seen = [[trial.measurement or {} for trial in pair] for pair in pairs]
    losses = [[tuple(each.get("loss") or ()) for each in pair] for pair in seen]
    repeats = all(each.get("device") == "cpu" for pair in seen for each in pair)
    return parity.loss_gate([base for base, _ in losses], [arm for _, arm in losses], parity_class, bitwise=repeats)


def outcome(pairs: Sequence[tuple[Trial, Trial]], gradient: Gate | None, parity_class: Parity) -> Outcome:
    """All that these pairs of runs and the gradient say. A training that claims no parity has to stay finite."""
    if not pairs:
        return parity.outcome(parity_class, ())
    losses = loss(pairs, parity_class)
    if parity_class == "changes-training":
        broken = losses.passed is False and losses.limit is None  # the only way to fail without a limit: not finite
        return Outcome(parity_class=parity_class, passed=False, why=f"loss: {losses.why}", gates=(losses,)) \
            if broken else parity.outcome(parity_class, ())  # fmt: skip
    found = (ledger(pairs, parity_class), *([gradient] if gradient is not None else []), losses)
    return parity.outcome(parity_class, found)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """As it stands in ``comparison.json`` and ``climb.json``; ``undecided``: the gates that could have told."""
    gates = [dataclasses.asdict(gate) for gate in outcome.gates]
    return {"class": outcome.parity_class, "passed": outcome.passed, "why": outcome.why,
            "undecided": [gate.name for gate in outcome.undecided], "gates": gates}  # fmt: skip
