"""What the benchmarks share: cases take turns within a budget, and each prints a JSON line as soon as it is done.

A line has what the case found, its seconds, GPU, driver and versions, and over all rounds of this case so far: n, the
median, and a 95 % t interval of the logarithms. So the last line of each case is its summary, also where a run is cut
off. A case that fails has a line with its error, and no further round; what the budget has no room for is named.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fastloop
from fastloop.evidence import machine

ROOT = Path(__file__).resolve().parent.parent
BEGAN = "BENCHMARK_BEGAN"
"""On the monotonic clock, which all processes share: imports take 17 s on a cold machine."""
SHOWN = ("python", "torch", "lightning", "triton", "torchvision", "nvidia-dali-cuda130")


class Case(NamedTuple):
    name: str
    run: Callable[[float], dict[str, Any]]
    """Takes the seconds that are left and returns the line. `setup_s` in it is time that later rounds do not take."""
    expected_s: float = 0.0
    """Of its first round; later ones are expected to take what the one before took."""


def make_parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="default", choices=["default", "tiny"], help="tiny: two CPU cores, a minute")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"in each, all cases take turns; default {rounds}")
    add_budget(parser)
    return parser


def add_budget(parser: argparse.ArgumentParser) -> None:
    """`--budget` in seconds, since the queue began this process where it did; `until` is when that is on the clock."""
    began = float(os.environ.get(BEGAN, time.monotonic()))
    parser.add_argument(
        "--budget",
        dest="until",
        type=lambda text: began + float(text),
        default=math.inf,
        metavar="SECONDS",
        help="for all of it; what does not fit in is left out",
    )


def run_cases(what: str, cases: Sequence[Case], options: argparse.Namespace, *, rate: str, **about: Any) -> None:
    """Run the cases in the given order, then in shuffled rounds; exit with 1 where one failed.

    Args:
        rate: the key of a case's line whose values are summarized over its rounds.
        about: what else is printed with each line.
    """
    failed, out = set[str](), set[str]()
    expected = {case.name: case.expected_s for case in cases}
    values: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(options.rounds):
        for case in cases if number == 0 else random.Random(number).sample(cases, len(cases)):
            left_s, line = options.until - time.monotonic(), {"case": case.name, "round": number, "size": options.size}
            if case.name in failed | out:
                continue
            if expected[case.name] > left_s or left_s <= 0:
                out.add(case.name)
                say(what, line | {"left_out": f"takes about {expected[case.name]:.0f} s, {max(0, left_s):.0f} s left"})
                continue
            began = time.monotonic()
            try:
                found = case.run(left_s)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[-800:]}
            failed |= {case.name} if "error" in found else set()
            seconds = time.monotonic() - began
            expected[case.name] = seconds - found.get("setup_s", 0.0)
            values[case.name] += [found[rate]] if found.get(rate) else []
            say(what, line | {"seconds": round(seconds, 2), **found, **summarize(values[case.name], rate), **about})
    sys.exit(1 if failed else 0)


def say(what: str, line: dict[str, Any]) -> None:
    print(json.dumps({"what": what, **line, **describe_machine()}), flush=True)


@functools.cache
def describe_machine() -> dict[str, Any]:
    gpus = machine.list_gpus()
    versions = {**machine.read_versions(SHOWN), "fastloop": fastloop.__version__}
    where = {"gpu": gpus[0].name, "driver": gpus[0].driver} if gpus else {"gpu": None}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {**where, "visible": visible, "cpus": machine.count_usable_cpus(), "versions": versions}


def summarize(values: Sequence[float], name: str) -> dict[str, Any]:
    """n, the median, and a 95 % interval of the geometric mean; null from fewer than two values."""
    from scipy import stats

    if not values:
        return {"n": 0}
    logs, interval = [math.log(value) for value in values], None
    if len(logs) > 1:
        half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        interval = [math.exp(statistics.mean(logs) + side * half) for side in (-1, 1)]
    return {"n": len(values), f"median_{name}": statistics.median(values), "ci95": interval}


def find_data(name: str, size: str) -> str | None:
    """A file of real data in a folder `shared/data` in or beside this repository; none for the tiny size."""
    if size == "tiny":
        return None
    paths = (folder / "shared" / "data" / name for folder in (ROOT, ROOT.parent))
    return next((str(path) for path in paths if path.exists()), None)


def wait(device: str) -> None:
    """For the device; the host is always there."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
