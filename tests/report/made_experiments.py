"""Contents of comparison.json, climb.json and tune.json of made-up experiments. They say nothing about any device."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from fastloop.records.experiment import ExperimentResult
from fastloop.records.store import decode
from tests.report.samples import HOSTILE

HARDWARE: dict[str, Any] = {
    "device_name": "NVIDIA H200",
    "devices": 1,
    "torch": "2.11.0",
    "lightning": "2.6.6",
    "fastloop": "0.1.0",
    "driver": "580.159.04",
}
LONG = "rungs.workers.count=8,rungs.workers.prefetch_factor=4,trainer.accumulate_grad_batches=8,recipe.size=default"
JAPANESE = "\u5c4e\u6839\u306e\u4e0a\u306e\u732b\u3068\u72ac\u306e\u5b9f\u9a13\u8a2d\u5b9a\u30d5\u30a1\u30a4\u30eb"


def gate(name: str, passed: bool | None = True, why: str = "as it should be", **more: Any) -> dict[str, Any]:
    return {"name": name, "passed": passed, "why": why, "deviation": None, "limit": None, "visible": None, **more}


LEDGER = gate("ledger", why="40 steps, the same samples, backwards and learning rates")
GRADIENT = gate("gradient", deviation=0.0031, limit=0.05, visible=0.0001, why="within the limit of bf16")
LOSS = gate("loss", deviation=0.1, limit=0.5, visible=0.2, why="the interval lies inside the limits")
HELD = {"class": "approximate", "passed": True, "why": "all gates hold", "gates": [LEDGER, GRADIENT, LOSS]}
BROKEN = {
    "class": "approximate",
    "passed": False,
    "why": "the gradient differs",
    "gates": [
        LEDGER,
        gate("gradient", False, deviation=0.75, limit=0.05, visible=0.0001, why="0.75 of its norm is another"),
    ],
}
UNKNOWN = {
    "class": "approximate",
    "passed": None,
    "why": "the loss could not tell",
    "gates": [LEDGER, gate("loss", None, why="5 runs are too few")],
}
CLAIMLESS = {"class": "changes-training", "passed": None, "why": "the batch is another", "gates": []}


def result_of(content: dict[str, Any]) -> ExperimentResult:
    """The record of a comparison.json with this content."""
    found = decode(content, ExperimentResult)
    assert found is not None
    return found


def order(names: Sequence[str], runs: int) -> list[str]:
    """There and back again."""
    return [name for run in range(runs) for name in (names if run % 2 == 0 else names[::-1])]


def arm(name: str, rates: Sequence[float], places: Sequence[int], **more: Any) -> dict[str, Any]:
    rate = sum(rates) / len(rates) if rates else None
    return {
        "name": name,
        "runs": len(rates),
        "samples_per_s": list(rates),
        "places": list(places),
        "seeds": list(range(len(rates))),
        "active_rungs": [],
        "inactive_rungs": [],
        "inactive_why": {},
        "step_ms": None if not rate else 256_000 / rate,
        "peak_gib": 20.5,
        "global_batch": 256,
        "failed": None,
        **more,
    }


def judged(
    name: str, ratio: float | None, half: float = 0.03, verdict: str | None = None, parity: Any = None, **more: Any
) -> dict[str, Any]:
    ends = None if ratio is None else [ratio - half, ratio + half]
    found = "inconclusive" if ends is None else "faster" if ends[0] > 1 else "slower" if ends[1] < 1 else "inconclusive"
    return {
        "arm": name,
        "ratio": ratio,
        "ci95": ends,
        "mde_pct": None if ratio is None else 3.1,
        "verdict": verdict or found,
        "why": f"of {name} the judge says so",
        "alpha": 0.05,
        "runs": 0 if ratio is None else 5,
        "parity": copy.deepcopy(HELD if parity is None else parity),
        **more,
    }


def versus(
    rates: dict[str, float], comparisons: Sequence[dict[str, Any]], *, runs: int = 5, drift: float = 0.01, **more: Any
) -> dict[str, Any]:
    """An experiment in which each arm runs at its rate, with some noise, on a machine that slows down."""
    ran = order(list(rates), runs)
    wave = [1 + 0.008 * math.sin(2.3 * place) - drift * place / len(ran) for place in range(len(ran))]
    arms = []
    for name, rate in rates.items():
        places = [place for place, who in enumerate(ran) if who == name]
        arms.append(arm(name, [round(rate * wave[place], 2) for place in places], places))
    content = {
        "schema": 1,
        "run_dir": "fastloop-runs/resnet50/20261103T101500",
        "name": "resnet50",
        "steps": 300,
        "warmup_steps": 100,
        "order": ran,
        "arms": arms,
        "comparisons": list(comparisons),
        "hardware": dict(HARDWARE),
        "config_diff": {one["arm"]: [[f"rungs.{one['arm']}.enabled", False, True]] for one in comparisons},
        "flags": [],
        "failures": [],
        "partial": False,
        "seconds": 1234.5,
    }
    first = comparisons[0] if comparisons else {}
    return content | {key: first.get(key) for key in ("ratio", "ci95", "verdict", "parity")} | more


def faster() -> dict[str, Any]:
    content = versus({"base": 344.0, "amp": 454.0}, [judged("amp", 1.32)])
    content["arms"][1] |= {"active_rungs": ["amp"], "inactive_rungs": ["pin"], "inactive_why": {"pin": "needs CUDA"}}
    return content


def parity_failed() -> dict[str, Any]:
    return versus({"base": 344.0, "amp": 454.0}, [judged("amp", 1.32, verdict="inconclusive", parity=BROKEN)])


def six() -> dict[str, Any]:
    """Everything that can come of an arm, and names of every kind."""
    hostile = " ".join(HOSTILE.split())
    content = versus(
        {"base": 344.0, LONG: 361.0, JAPANESE: 340.0, hostile: 345.0, "amp": 454.0, "layout": 310.0, "broken": 0.0},
        [
            judged(LONG, 1.05, 0.02, parity=UNKNOWN),
            judged(JAPANESE, 0.99, 0.01, "no_difference"),
            judged(hostile, 1.0, 0.05),
            judged("amp", 1.32, verdict="inconclusive", parity=BROKEN),
            judged("layout", 0.9, 0.02),
            judged("broken", None, parity={"class": "exact", "passed": None, "gates": []}),
        ],
        runs=4,
        flags=["window too short for the queues of 2 runs"],
        partial=True,
    )
    content["arms"][-1] |= arm("broken", [], [], runs=0, failed="out of memory", peak_gib=None, global_batch=None)
    content["arms"][1]["inactive_rungs"] = ["compile"]
    content["failures"] = [
        {
            "arm": "broken",
            "run": f"run-{run}",
            "cause": "out of memory",
            "last_step": 41 - run,
            "tail": "Traceback <script>\n  torch.OutOfMemoryError",
        }
        for run in range(4)
    ]
    return content


def base_failed() -> dict[str, Any]:
    content = versus({"base": 1.0, "amp": 1.0}, [], runs=1, ratio=None, verdict=None)
    content["arms"] = [arm("base", [], [], failed="exit code 7", peak_gib=None), arm("amp", [], [])]
    content["failures"] = [
        {
            "arm": "base",
            "run": "run-0",
            "cause": "exit code 7",
            "last_step": None,
            "tail": "ValueError: no",
        }
    ]
    return content | {"order": ["base"], "config_diff": {"amp": [["rungs.amp.enabled", False, True]]}}


def one_run() -> dict[str, Any]:
    short = judged("amp", None, why="insufficient: 1 run of each, a verdict needs 3", runs=1) | {"ratio": 1.3}
    return versus({"base": 344.0, "amp": 454.0}, [short], runs=1, partial=True)


def nulls() -> dict[str, Any]:
    """A file of which nothing is known but its keys."""
    return dict.fromkeys(versus({"base": 1.0}, []), None) | {"schema": 1, "name": "resnet50"}


AB = {
    "faster": faster,
    "parity": parity_failed,
    "six": six,
    "base-failed": base_failed,
    "one-run": one_run,
    "nulls": nulls,
    "slower": lambda: versus({"base": 344.0, "watch": 309.0}, [judged("watch", 0.899, 0.004)]),
    "same": lambda: versus({"base": 344.0, "b": 344.0}, [judged("b", 1.001, 0.006, "no_difference")], runs=10),
    "huge": lambda: versus({"base": 330.0, "top": 2680.0}, [judged("top", 8.12, 0.2)]),
    "nothing": dict,
}


def rung(
    name: str, before: float, saved: float | None, *, kept: bool = True, predicted: float | None = None, **more: Any
) -> dict[str, Any]:
    error = None if None in (saved, predicted) or not saved else 100 * ((predicted or 0.0) - saved) / abs(saved)
    return {
        "rung": name,
        "family": "compute",
        "patch": {"rungs": {name: {"enabled": True}}},
        "step_ms_before": before,
        "step_ms_after": None if saved is None else before - saved,
        "predicted_saved_ms": predicted,
        "measured_saved_ms": saved,
        "ci95_saved_ms": None if saved is None else [saved - 4, saved + 4],
        "prediction_error_pct": error,
        "kept": kept,
        "why": "looks faster, ledger and gradient hold" if kept else "not faster within the noise",
        "parity": copy.deepcopy(HELD),
        "tuned": None,
        "runs": 2,
        **more,
    }


def climb(rungs: Sequence[dict[str, Any]], top_ms: float, naive_ms: float = 743.0, **more: Any) -> dict[str, Any]:
    stack = {key: value for one in rungs if one["kept"] for key, value in one["patch"]["rungs"].items()}
    return {
        "schema": 1,
        "run_dir": "fastloop-runs/climb",
        "name": "resnet50",
        "hardware": dict(HARDWARE),
        "naive": {"samples_per_s": 256_000 / naive_ms, "step_ms": naive_ms},
        "ceilings_samples_per_s": {"replayed": 2697.0, "resident": 2720.0, "no_exchange": None},
        "rungs": list(rungs),
        "stack": {"rungs": stack},
        "date": "2026-11-03",
        "top": {"samples_per_s": 256_000 / top_ms, "step_ms": top_ms},
        "stopped": "no ceiling is above 3 %",
        "confirmed": None,
        "budget_s": 1200.0,
        "spent_s": 845.0,
        "partial": False,
        **more,
    }


def climbed() -> dict[str, Any]:
    workers = rung(
        "workers",
        743,
        560,
        predicted=590,
        tuned={"count": 8},
        patch={"rungs": {"workers": {"enabled": True, "count": 8}}},
        parity={**HELD, "class": "exact"},
    )
    rungs = [
        workers,
        rung("pin", 183, 4, predicted=6),
        rung("prefetch", 179, 12, predicted=10),
        rung("compile", 167, None, kept=False, predicted=30, why="no graph was compiled: rolled back, no credit"),
        rung("amp", 167, 55, predicted=61, patch={"rungs": {"amp": {"enabled": True, "mode": "bf16-mixed"}}}),
        rung("layout", 112, -9, kept=False, predicted=8),
        rung("fused", 112, 3, kept=False, predicted=5, parity=BROKEN, why="gradient failed: " + "0.75 " * 40),
        rung("batch", 112, 14, predicted=12),
    ]
    return climb(
        rungs,
        98.0,
        confirmed={
            "ratio": 7.52,
            "ci95": [7.31, 7.74],
            "verdict": "faster",
            "mde_pct": 3.3,
            "runs": 5,
            "parity": copy.deepcopy(HELD),
            "run_dir": "confirm",
        },
    )


def long_climb() -> dict[str, Any]:
    """As many attempts as there are rungs, twice, with names of every kind."""
    names = [
        "workers",
        "pin",
        "prefetch",
        JAPANESE,
        "attention",
        "compile",
        "layout",
        "fused",
        "overlap",
        "batch",
        " ".join(HOSTILE.split()),
        "host",
        LONG,
    ]
    rungs, before = [], 743.0
    for index, name in enumerate(names):
        kept = index % 3 != 1
        rungs.append(
            rung(
                name,
                before,
                40.0 + index,
                kept=kept,
                predicted=45.0,
                patch={"rungs": {["workers", "pin", "amp"][index % 3]: {"enabled": True}}},
            )
        )
        before -= 40.0 + index if kept else 0.0
    over = {"replayed": 900.0, "resident": 905.0, "no_exchange": 910.0}
    return climb(rungs, before, ceilings_samples_per_s=over, partial=True, stopped=None)


def climb_nulls() -> dict[str, Any]:
    return dict.fromkeys(climb([], 1.0)) | {"schema": 1, "name": "resnet50", "rungs": [{"rung": "amp", "kept": True}]}


CLIMBS = {
    "climbed": climbed,
    "long": long_climb,
    "nulls": climb_nulls,
    "nothing": dict,
    "none-kept": lambda: climb([rung("amp", 743, 2, kept=False)], 743.0),
    "screened": lambda: climb([rung("amp", 743, 200, predicted=None)], 543.0),
    "unproven": lambda: climb(
        [rung("amp", 743, 200)],
        543.0,
        confirmed={"ratio": 1.3, "ci95": [1.2, 1.4], "verdict": "faster", "mde_pct": 3, "runs": 5, "parity": BROKEN},
    ),
}


def tune(
    points: Sequence[tuple[Any, float | None, str]], best: Any, key: str = "rungs.workers.count", **more: Any
) -> dict[str, Any]:
    _, rung_, setting = key.split(".")
    return {
        "schema": 1,
        "run_dir": "fastloop-runs/tune",
        "name": "resnet50",
        "what": rung_,
        "key": key,
        "points": [
            {
                "value": value,
                "step_ms": step,
                "samples_per_s": step and 256_000 / step,
                "ok": step is not None,
                "why": why,
            }
            for value, step, why in points
        ],
        "best": best,
        "patch": None if best is None else {"rungs": {rung_: {"enabled": True, setting: best}}},
        "why": "the quickest step; more workers than CPUs cost more than they bring",
        **more,
    }


TUNES = {
    "workers": lambda: tune(
        [(0, 743.0, ""), (1, 700.0, ""), (2, 402.0, ""), (4, 233.5, ""), (8, 121.2, ""), (16, 129.0, "")],
        8,
        hardware=dict(HARDWARE),
    ),
    "batch": lambda: tune(
        [
            (64, 120.0, ""),
            (128, 101.0, ""),
            (256, 95.0, ""),
            (512, None, "out of memory, rank 0"),
            (1024, None, "not tried: " + "512 did not fit " * 20),
        ],
        256,
        "rungs.batch.micro_batch",
    ),
    "names": lambda: tune(
        [
            ("default", 95.0, ""),
            ("reduce-overhead", 91.0, ""),
            (LONG, 88.0, ""),
            (" ".join(HOSTILE.split()), None, HOSTILE),
            (JAPANESE, 99.0, ""),
        ],
        LONG,
        "rungs.compile.mode",
        partial=True,
    ),
    "linear": lambda: tune([(count, 300.0 / count + count, "") for count in range(1, 33)], 17),
    "all-failed": lambda: tune([(2, None, "exit code 7"), (4, None, "exit code 7")], None, why="no value ran"),
    "single": lambda: tune([(2, 100.0, "")], 2),
    "flat": lambda: tune([(1, 5.0, ""), (2, 5.0, ""), (4, 5.0, "")], 1),
    "nulls": lambda: dict.fromkeys(tune([], None)) | {"schema": 1, "name": "resnet50", "points": [{"value": None}]},
    "nothing": dict,
}
