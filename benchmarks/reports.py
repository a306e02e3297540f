"""The recipes' reports: each one naive and under `full`, diagnosed with ceilings, synchronisations and a trace.

    python -m benchmarks.reports resnet50:naive gpt2:full … --data DIR --out DIR [--devices 2]

Writes `<recipe>_<arm>[_x2].{md,html,json}` into --out, and prints one JSON line each. Every training is a process of
its own (`fastloop diagnose`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cases import say
from benchmarks.compute import DATA, FULL

LIMIT_S = 480
STEPS = {
    "resnet50:naive": (40, 6),
    "resnet50:full": (170, 20),
    "gpt2:naive": (14, 4),
    "gpt2:full": (70, 10),
    "cifar10:naive": (420, 30),
    "cifar10:full": (1400, 60),
}
"""Optimizer steps and warm-up: windows of ten seconds or more, for the energy counter."""
KEPT = (
    "samples_per_s",
    "step_ms",
    "parts_ms",
    "lead_ms",
    "trail_ms",
    "gpu",
    "tflop_per_s",
    "mfu",
    "flops",
    "peaks",
    "joule_per_sample",
    "kernels",
    "syncs",
    "ceilings",
    "peak_gib",
    "watch_us_per_step",
    "steps",
    "window_too_short",
    "state",
)


def diagnose(case: str, options: argparse.Namespace, folder: Path) -> subprocess.CompletedProcess[str]:
    recipe, _, arm = case.partition(":")
    steps, warmup = STEPS[case]
    steps = max(12, steps // options.devices)
    overrides = [
        f"run.max_steps={steps}",
        f"watch.warmup_steps={warmup}",
        f"run.devices={options.devices}",
        "trainer.logger=false",
        "trainer.limit_val_batches=0",
        "watch.usd_per_gpu_hour=3.0",
    ]
    if options.data:
        overrides.append(f"recipe.data={Path(options.data) / DATA[recipe]}")
    if arm == "full":
        overrides += FULL[recipe]
    command = [
        sys.executable,
        "-m",
        "fastloop",
        "diagnose",
        recipe,
        *overrides,
        "--syncs",
        "--trace",
        "3",
        "--out",
        str(folder),
        *(["--config", "full"] if arm == "full" else []),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)


def keep(case: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Copy what is to be kept, and give the figures."""
    name = case.replace(":", "_") + (f"_x{options.devices}" if options.devices > 1 else "")
    for kind in ("md", "html"):
        if (folder / f"report.{kind}").is_file():
            shutil.copy(folder / f"report.{kind}", Path(options.out) / f"{name}.{kind}")
    seen = json.loads((folder / "measurement.json").read_text())
    told = json.loads((folder / "findings.json").read_text())
    found = {key: seen.get(key) for key in KEPT}
    ranks = [{key: rank.get(key) for key in ("rank", "step_ms", "parts_ms")} for rank in seen.get("ranks") or []]
    content = {
        "what": "report",
        "case": case,
        "devices": options.devices,
        "findings": told["findings"],
        **found,
        "ranks": ranks,
        "environment": json.loads((folder / "env.json").read_text()),
    }
    (Path(options.out) / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return {"named": [finding["bottleneck"] for finding in told["findings"]], "samples_per_s": seen["samples_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(STEPS))
    parser.add_argument("--data")
    parser.add_argument("--out", required=True)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for case in options.cases:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            try:
                done = diagnose(case, options, folder)
                found = {"rc": done.returncode, "said": (done.stdout or done.stderr[-1500:]).splitlines()}
                if (folder / "measurement.json").is_file():
                    found |= keep(case, options, folder)
            except subprocess.TimeoutExpired:
                found = {"rc": None, "said": [f"over {LIMIT_S} s"]}
        took_s = round(time.monotonic() - began)
        say("report", {"case": case, "devices": options.devices, "took_s": took_s, **found})


if __name__ == "__main__":
    main()
