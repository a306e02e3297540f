"""The numerics passports of the rungs: the gates' results in past experiments on this machine, newest first.

They are in ``$XDG_CACHE_HOME/fastloop/passports`` (``~/.cache`` without it), one file per rung. A passport is a note,
never a condition: a cache that cannot be written or read counts as empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import datetime, timezone
from pathlib import Path

from fastloop.evidence import machine
from fastloop.records import store
from fastloop.records.experiment import Hardware, Outcome, Passport, PassportsFile, Sample
from fastloop.report.experiments.verdict_words import format_figure

MOST = 20
SHOWN = 3


def choose_folder() -> Path:
    """Return the folder of the passports."""
    return machine.find_cache_home() / "fastloop" / "passports"


def keep(
    rung: str, outcome: Outcome, hardware: Hardware, sample: Sample, *, name: str = "", run_dir: Path | None = None
) -> None:
    """Save the result of an experiment with only this rung, replacing an earlier result from the same directory."""
    if not outcome.gates:
        return
    entry = Passport(
        parity_class=outcome.parity_class,
        passed=outcome.passed,
        gates=tuple(dataclasses.replace(gate, detail={}) for gate in outcome.gates),
        environment=hardware,
        runs=len(sample.samples_per_s),
        name=name,
        run_dir=None if run_dir is None else str(run_dir.absolute()),
        date=datetime.now(timezone.utc).date().isoformat(),
    )
    others = [each for each in load(rung) if run_dir is None or each.run_dir != entry.run_dir]
    with contextlib.suppress(OSError):
        kept = PassportsFile(passports=(entry, *others)[:MOST])
        store.save(choose_folder(), {f"{rung}.json": kept})


def load(rung: str) -> tuple[Passport, ...]:
    """Return the passports of a rung, newest first."""
    return (store.load(choose_folder() / f"{rung}.json", PassportsFile) or PassportsFile()).passports


def describe(rung: str) -> list[str]:
    """Describe the newest passports of a rung, for its manual page."""
    found = load(rung)
    if not found:
        return [f"Numerics: no experiment on this machine yet; fastloop ab CONF --vs {rung} writes a passport."]
    text = ["Numerics, as measured on this machine:"]
    for one in found[:SHOWN]:
        passed = {True: "passed", False: "FAILED", None: "undecided"}[one.passed]
        device = f"{one.environment.device_name}, torch {one.environment.torch}"
        parts = ("", str(one.date), one.name, f"{one.parity_class}, {passed}", device, f"{one.runs} runs")
        text += ["  ".join(parts), *(f"    {gate.name}: {gate.why}" for gate in one.gates)]
        text.append(f"    {_describe_figures(one)}")
    return text


def _describe_figures(one: Passport) -> str:
    """Describe the measured deviation, the smallest that would have been visible, and the software versions."""
    sizes = [(gate.name, format_figure(gate, "deviation"), format_figure(gate, "visible")) for gate in one.gates]
    seen = [f"{name} {deviation} ({visible})" for name, deviation, visible in sizes if {deviation, visible} != {"n/a"}]
    versions = vars(one.environment)
    by = ", ".join(f"{name} {versions[name] or 'n/a'}" for name in ("lightning", "fastloop", "driver"))
    return "; ".join([*([f"deviation (smallest visible): {', '.join(seen)}"] if seen else []), by])
