"""What the rungs bring to each recipe: one trick more at a time, or the naive run, the shipped ladders and a ceiling.

    python -m benchmarks.compute gpt2 resnet50 [--rounds 3] [--budget 280] [--steps 40] [--size tiny]
    python -m benchmarks.compute resnet50 --arms naive,safe,full,resident [--data DIR]

The tricks below go from the beginner's run to the best one set by hand; the longest stack comes first. `resident` is
`full` on batches that are on the device and never move (no data, no copy), see fastloop/bridge/trials/ceilings.py. An
arm may add to one of these: "full+rungs.host.step_graph=auto". Every run is a process of its own, forked from one that
has torch imported. Training equal or not is `fastloop ab RECIPE --vs ...`'s to say, not this one's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, find_data, make_parser, run_cases
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, allow_quick_starts, run_trial

LIMIT_S = 240
GRACE_S = 16
"""What a run that is ended at its limit takes to end."""
DATA = {"resnet50": "imagenet-sample.tar", "cifar10": "cifar10-jpg.tar", "gpt2": "tinyshakespeare.txt"}
STEPS = {"resnet50": 40, "cifar10": 300, "gpt2": 12}
LONGER = {"naive": 1, "safe": 2, "full": 4, "resident": 4}
"""Times the steps: the fast arms hold more batches in queues, and need longer windows to be past them."""
ARMS = {"naive": [], "safe": ["safe"], "full": ["full"], "resident": ["full"]}
FULL = {
    "resnet50": ["rungs.batch.enabled=true", "rungs.batch.micro_batch=256"],
    "gpt2": ["rungs.batch.enabled=true", "rungs.batch.micro_batch=64"],
    "cifar10": ["rungs.batch.enabled=false"],
}
TRICKS: dict[str, list[list[str]]] = {
    "gpt2": [
        ["rungs.amp.enabled=true"],
        ["rungs.batch.enabled=true", "rungs.batch.micro_batch=64"],
        ["rungs.attention.enabled=true"],
        ["rungs.fused.enabled=true"],
        ["rungs.compile.enabled=true"],
        ["rungs.loss.enabled=true"],
        ["rungs.host.enabled=true"],
    ],
    "resnet50": [
        ["rungs.amp.enabled=true", "rungs.layout.enabled=true"],
        ["rungs.workers.enabled=true", "rungs.pin.enabled=true", "rungs.prefetch.enabled=true"],
        ["rungs.compile.enabled=true"],
        ["rungs.batch.enabled=true", "rungs.batch.micro_batch=256"],
        ["rungs.fused.enabled=true", "rungs.host.enabled=true"],
    ],
    "cifar10": [
        ["rungs.amp.enabled=true", "rungs.layout.enabled=true"],
        ["rungs.cache.enabled=true", "rungs.cache.store=device"],
        ["rungs.fused.enabled=true"],
        ["rungs.compile.enabled=true"],
        ["rungs.host.enabled=true"],
        ["rungs.host.step_graph=auto"],
    ],
}


def list_stacks(recipe: str) -> list[tuple[str, str]]:
    """Names and arms, the longest first, down to the naive one."""
    stacks = list(itertools.accumulate(TRICKS[recipe], initial=[]))
    names = ["naive", *(f"{n} {' '.join(trick)}" for n, trick in enumerate(TRICKS[recipe], start=1))]
    shorter = [name.replace("rungs.", "").replace(".enabled=true", "") for name in names]
    return [(name, "+".join(("naive", *stack))) for name, stack in zip(shorter, stacks, strict=True)][::-1]


def train(recipe: str, arm: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """One run in a fresh process; its measurement, or what went wrong."""
    kind, *added = arm.split("+")
    steps = (options.steps or STEPS[recipe]) * (LONGER["full"] if added else LONGER[kind])
    warmup = min(options.warmup, steps // 3)
    overrides = [
        f"run.max_steps={steps}",
        f"watch.warmup_steps={warmup}",
        f"run.seed={options.seed}",
        f"recipe.size={options.size}",
        "trainer.logger=false",
        "trainer.limit_val_batches=0",
    ]
    data = str(Path(options.data) / DATA[recipe]) if options.data else find_data(DATA[recipe], options.size)
    if data:
        overrides.append(f"recipe.data={data}")
    if kind in ("full", "resident"):
        overrides += FULL[recipe]
    overrides += added
    variation: Any = "resident" if kind == "resident" else "as_it_is"
    job = Job(conf=recipe, more=tuple(ARMS[kind]), overrides=tuple(overrides), variation=variation)
    with tempfile.TemporaryDirectory() as folder:
        trial = run_trial(arm, job, Path(folder), limits=Limits(total_s=min(LIMIT_S, left_s)))
        written = json.loads((Path(folder) / "verdicts.json").read_text()) if trial.ok else {}
    if trial.measurement is None or not trial.ok:
        return {"error": f"{trial.cause}: {trial.tail[-600:]}", "started": trial.started}
    seen, verdicts = trial.measurement, written["verdicts"]
    return {
        "arm": arm,
        "samples_per_s": seen.samples_per_s,
        "step_ms": seen.step_ms,
        "lead_ms": seen.lead_ms,
        "data_wait_ms": seen.parts_ms["data_wait"],
        "peak_gib": seen.peak_gib,
        "joule_per_sample": seen.joule_per_sample,
        "one_time_s": {name: value for name, value in seen.one_time_s.items() if value},
        "steps": seen.steps,
        "warmup": warmup,
        "data": bool(data),
        "window_too_short": seen.window_too_short,
        "loss_last": seen.loss[-1] if seen.loss else None,
        "started": trial.started,
        "took": {verdict["rung"]: verdict["why"] for verdict in verdicts if verdict["took"]},
        "inactive": {verdict["rung"]: verdict["why"] for verdict in verdicts if not verdict["took"]},
    }


def main() -> None:
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("recipes", nargs="+", choices=list(DATA))
    parser.add_argument("--steps", type=int, help=f"of the naive arm; default {STEPS}, four times that for the others")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", help="folder with the real data; default: shared/data, else the recipe's own made data"
    )
    parser.add_argument("--arms", help="default: the tricks, one more at a time")
    options = parser.parse_args()
    cases = [
        Case(f"{recipe}: {name}", partial(train, recipe, arm, options), 30 if options.size == "default" else 15)
        for recipe in options.recipes
        for name, arm in ([(arm, arm) for arm in options.arms.split(",")] if options.arms else list_stacks(recipe))
    ]
    options.until -= GRACE_S
    with allow_quick_starts():
        run_cases("compute", cases, options, rate="samples_per_s")


if __name__ == "__main__":
    main()
