"""Does a ladder change how well the cifar10 recipe learns? Several seeds of each arm, and the accuracy at the end.

    python -m benchmarks.accuracy [--ladder full] [--seeds 5] [--epochs 15] [--budget 280] [--size tiny]

The recipe as a beginner wrote it, and the same with the ladder: both from the same seeds, on the same pictures, for the
same steps. Then the accuracy on the pictures that neither was trained on. Every run is its own process: first those of
the ladder one after another, so that its rehearsals find a quiet machine, then the plain ones side by side. One JSON
line for each run, and one for the difference: its mean, and a 95 % interval (Welch).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.cases import find_data, make_parser, say

PLAIN = "naive"
LOGS = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def train(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training in this process, and what it came to."""
    import lightning as L

    from fastloop import FastLoop
    from fastloop.bridge.fit.recipes import build_recipe
    from fastloop.config.loading import load

    data = find_data("cifar10-jpg.tar", options.size)
    conf = load("cifar10", overrides=[f"recipe.size={options.size}", *([f"recipe.data={data}"] if data else [])])
    L.seed_everything(seed)
    module, datamodule = build_recipe(conf)
    loops = [] if arm == PLAIN else [FastLoop(arm, quiet=True)]
    quiet: dict[str, Any] = dict.fromkeys(LOGS, False)
    trainer = L.Trainer(devices=1, max_epochs=options.epochs, limit_val_batches=0, callbacks=list(loops), **quiet)
    began = time.perf_counter()
    trainer.fit(module, datamodule=datamodule)
    seconds = time.perf_counter() - began
    trainer = L.Trainer(devices=1, **quiet)
    found = trainer.validate(module, datamodule=datamodule, verbose=False)[0]
    took = [verdict.rung for loop in loops for verdict in loop.verdicts if verdict.took]
    return {"accuracy": found["val_acc"], "loss": found["val_loss"], "fit_s": round(seconds, 1), "took": took}


def run(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.accuracy", "--one", arm, "--seeds", str(seed)]
    command += ["--epochs", str(options.epochs), "--size", options.size]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}  # they run side by side
    left_s = options.until - time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=min(600, left_s),
            check=False,
        )
    except (subprocess.TimeoutExpired, ValueError):
        return {"error": "the budget ended first"}
    if done.returncode:
        return {"error": done.stderr[-600:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(plain: list[float], ours: list[float]) -> dict[str, Any]:
    """The mean difference in accuracy and its interval."""
    from scipy import stats

    result = stats.ttest_ind(ours, plain, equal_var=False)
    low, high = result.confidence_interval(0.95)
    mean = sum(ours) / len(ours) - sum(plain) / len(plain)
    return {"difference": mean, "ci95": [low, high], "n": [len(plain), len(ours)], "differs": not low <= 0 <= high}


def main() -> None:
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--ladder", default="full")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options.one, options.seeds, options)))
        return
    accuracies: dict[str, list[float]] = {PLAIN: [], options.ladder: []}
    for arm, at_once in ((options.ladder, 1), (PLAIN, options.seeds)):
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for seed, found in enumerate(pool.map(lambda seed, arm=arm: run(arm, seed, options), range(options.seeds))):
                accuracies[arm] += [found["accuracy"]] if "accuracy" in found else []
                say("accuracy", {"arm": arm, "seed": seed, "epochs": options.epochs, "size": options.size, **found})
    plain, ours = accuracies.values()
    if min(len(plain), len(ours)) > 1:
        means = {f"{arm}_mean": sum(values) / len(values) for arm, values in accuracies.items()}
        say("accuracy", {"epochs": options.epochs, **means, **compare(plain, ours)})


if __name__ == "__main__":
    main()
