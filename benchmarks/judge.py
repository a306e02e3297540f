"""The judge on the same training again and again: how often does it cry wolf?

    python -m benchmarks.judge aa cifar10 --runs 20 --steps 300 [--warmup 30] [--set recipe.size=tiny …] [--keep DIR]

Trains one configuration --runs times, each in a process of its own, and reads the runs as A/A experiments: of the
pairs of neighbouring runs five are drawn, and of each pair one run is A and the other B. Such a reading is balanced
over time, as an experiment is. Prints a JSON line per run, and one with the share of readings that find a difference.
A reading is not a new experiment: all of them share the same runs, so one unlucky drift shows in many.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.cases import say, summarize
from fastloop.experiments.ab.arms import Ask, ConfigArm
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, allow_quick_starts, read_finished
from fastloop.judge.verdict import compare
from fastloop.records.experiment import Outcome, Sample

PAIRS, DRAWS = 5, 2000


def readings(rates: list[float], draws: int = DRAWS, seed: int = 0) -> dict[str, object]:
    """What the judge says of balanced 5-against-5 draws."""
    draw = random.Random(seed)
    pairs = [(at, at + 1) for at in range(0, len(rates) - 1, 2)]
    verdicts: list[str] = []
    ratios: list[float] = []
    for _ in range(draws):
        chosen = [pair if draw.random() < 0.5 else pair[::-1] for pair in draw.sample(pairs, PAIRS)]
        a, b = (
            Sample(
                name=name,
                samples_per_s=tuple(rates[pair[side]] for pair in chosen),
                places=tuple(pair[side] for pair in chosen),
            )
            for side, name in enumerate(("a", "b"))
        )
        found = compare(a, b, Outcome(passed=True))
        verdicts.append(found.verdict)
        ratios.append(found.ratio or math.nan)
    alarms = sum(verdict in ("faster", "slower") for verdict in verdicts)
    return {
        "draws": draws,
        "alarms": alarms,
        "alarms_pct": 100 * alarms / draws,
        "no_difference_pct": 100 * verdicts.count("no_difference") / draws,
        "ratio_p5_p95": [sorted(ratios)[int(draws * share)] for share in (0.05, 0.95)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["aa"])
    parser.add_argument("conf")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, help="Keep the runs here; finished ones are not repeated.")
    options = parser.parse_args()
    with allow_quick_starts():  # as in `fastloop ab`
        measure(options, options.keep or Path(tempfile.mkdtemp()))


def measure(options: argparse.Namespace, place: Path) -> None:
    arm = ConfigArm(name="a", job=Job(conf=options.conf, overrides=("trainer.logger=false", *options.set)))
    rates: list[float] = []
    for number in range(options.runs + 1):  # the first does not count, as in `fastloop ab`
        ask = Ask(seed=0, steps=options.steps, warmup=options.warmup)
        folder = place / f"run-{number}"
        trial = read_finished(folder) or arm.run(f"run {number}", folder, ask, limits=Limits(total_s=600))
        found = {"samples_per_s": trial.samples_per_s, "cause": trial.cause, "seconds": round(trial.seconds, 1)}
        found |= {"started": trial.started}
        say("aa_run", {"run": number, **found, "load": os.getloadavg()[0]})
        if number and trial.samples_per_s is not None:
            rates.append(trial.samples_per_s)
    spread = statistics.stdev(map(math.log, rates))
    about = {"conf": options.conf, "set": options.set, "steps": options.steps, "spread_pct": 100 * spread}
    say("aa", {**about, **summarize(rates, "samples_per_s"), **readings(rates)})


if __name__ == "__main__":
    main()
