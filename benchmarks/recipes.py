"""Each recipe naive, under `safe` and under `full`, against a resident batch: what there is to gain and what is gained.

    python benchmarks/recipes.py resnet50 --runs 3 [--data DIR] [--steps 40] [--arms naive,safe,full,resident]

Every run is a fresh process; arms take turns, in an order shuffled each round. `resident` is `full` on batches that
are on the device and never move (no data, no copy), see fastloop/bridge/trials/ceilings.py. An arm may add to one of
these: "full+rungs.host.step_graph=auto". One JSON line per run, then one per arm with the median and a t interval of
log(rate) over its runs. No parity is checked here.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, run_trial

LIMIT_S = 420
DATA = {"resnet50": "imagenet-sample.tar", "cifar10": "cifar10-jpg.tar", "gpt2": "tinyshakespeare.txt"}
FULL = {
    "resnet50": ["rungs.batch.enabled=true", "rungs.batch.micro_batch=256"],
    "gpt2": ["rungs.batch.enabled=true", "rungs.batch.micro_batch=64"],
    "cifar10": ["rungs.batch.enabled=false"],
}
LONGER = {"naive": 1, "safe": 2, "full": 4, "resident": 4}
"""Times --steps: the fast arms hold more batches in queues, and need longer windows to be past them."""
ARMS = {"naive": [], "safe": ["safe"], "full": ["full"], "resident": ["full"]}


def one(recipe: str, arm: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run in a fresh process; its measurement, or what went wrong."""
    kind, *added = arm.split("+")
    steps = options.steps * LONGER[kind]
    overrides = [
        f"run.max_steps={steps}",
        f"watch.warmup_steps={options.warmup}",
        f"run.seed={seed}",
        f"recipe.size={options.size}",
        "trainer.logger=false",
        "trainer.limit_val_batches=0",
    ]
    if options.data:
        overrides.append(f"recipe.data={Path(options.data) / DATA[recipe]}")
    if kind in ("full", "resident"):
        overrides += FULL[recipe]
    overrides += added
    job = Job(
        conf=recipe,
        more=tuple(ARMS[kind]),
        overrides=tuple(overrides),
        variation="resident" if kind == "resident" else "as_it_is",
    )
    with tempfile.TemporaryDirectory() as folder:
        trial = run_trial(arm, job, Path(folder), limits=Limits(total_s=LIMIT_S))
        written = json.loads((Path(folder) / "verdicts.json").read_text()) if trial.ok else {}
    if trial.measurement is None or not trial.ok:
        return {"error": f"{trial.cause}: {trial.tail[-600:]}"}
    seen, verdicts = trial.measurement, written["verdicts"]
    return {
        "samples_per_s": seen.samples_per_s,
        "step_ms": seen.step_ms,
        "lead_ms": seen.lead_ms,
        "data_wait_ms": seen.parts_ms["data_wait"],
        "peak_gib": seen.peak_gib,
        "joule_per_sample": seen.joule_per_sample,
        "steps": seen.steps,
        "window_too_short": seen.window_too_short,
        "loss_last": seen.loss[-1] if seen.loss else None,
        "took": [verdict["rung"] for verdict in verdicts if verdict["took"]],
        "inactive": {verdict["rung"]: verdict["why"] for verdict in verdicts if not verdict["took"]},
    }


def summarise(arm: str, rates: list[float], versions: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    logs = [math.log(rate) for rate in rates]
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    middle = statistics.mean(logs)
    interval = None if half is None else [math.exp(middle - half), math.exp(middle + half)]
    return {
        "what": "recipes",
        "recipe": options.recipe,
        "arm": arm,
        "n": len(rates),
        "samples_per_s": statistics.median(rates),
        "ci95": interval,
        "steps": options.steps * LONGER[arm.split("+")[0]],
        "warmup": options.warmup,
        "data": bool(options.data),
        "size": options.size,
        **versions,
    }


def environment() -> dict[str, Any]:
    import torch

    from fastloop.evidence.machine import versions

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    shown = ("torch", "lightning", "python", "torchvision", "fastloop")
    return {"gpu": name, "versions": {key: value for key, value in versions().items() if key in shown}}


def main(stacks: Mapping[str, Sequence[str]] | None = None) -> None:
    """Arms of the command line, or those that are given for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=list(DATA))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--size", default="default")
    parser.add_argument("--data", help="folder with the real data; without it the recipe's own made data")
    parser.add_argument("--arms", default="naive,safe,full,resident")
    options = parser.parse_args()
    arms = options.arms.split(",") if stacks is None else list(stacks[options.recipe])
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(options.runs):
        for arm in random.Random(number).sample(arms, len(arms)):
            found = one(options.recipe, arm, options, seed=number)
            print(json.dumps({"recipe": options.recipe, "arm": arm, "run": number, **found}), flush=True)
            if found.get("samples_per_s"):
                rates[arm].append(found["samples_per_s"])
    versions = environment()
    for arm, values in rates.items():
        if values:
            print(json.dumps(summarise(arm, values, versions, options)), flush=True)


if __name__ == "__main__":
    main()
