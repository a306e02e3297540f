"""What compiling a model's repeated blocks costs and brings, against the whole: cold, and from torch's cache on disk.

    python benchmarks/compile_scope.py [--size default] [--device cuda] [--batch 8] [--steps 20]

The twelve blocks of the gpt2 recipe, forward and backward under bf16 autocast, on one batch that stays on the device.
Each line is a process of its own: the whole and the blocks, with an empty cache and again with what the first one left.
One JSON line each: the first step's seconds, the median of the later steps, graphs, and what torch's cache served.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from fastloop.bridge.apply import read_facts
from fastloop.feeds.compiled_calls import CompiledCall, put_in


def measure(scope: str, size: str, device: str, batch: int, steps: int) -> dict[str, Any]:
    """One process's part."""
    sys.path[0] = str(Path(__file__).parents[1])  # beside this file lies another recipes.py
    recipe = importlib.import_module("recipes.gpt2")
    torch.manual_seed(0)
    module, _ = recipe.build(recipe.Settings(size=size))
    module.to(device)
    context, width = module.place.shape
    groups = read_facts.read_module(module)["repeated_blocks"]
    targets = {"model": ["blocks"], "blocks": [name for group in groups for name in group], "eager": []}[scope]
    codes: dict[Any, Any] = {}
    calls = [CompiledCall(module.get_submodule(each), each, codes, mode="default", dynamic=None) for each in targets]
    put_in(calls)
    x = torch.randn(batch, context, width, device=device, requires_grad=True)
    times = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = module.blocks(x).float().square().mean()
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {
        "first_step_s": round(times[0], 3),
        "median_step_ms": round(1e3 * statistics.median(times[1:]), 3),
        "modules": len(calls),
        "graphs": sum(call.graphs for call in calls),
        "failures": [call.failure for call in calls if call.failure],
        "cache_hits": counters["aot_autograd"].get("autograd_cache_hit", 0),
        "cache_misses": counters["aot_autograd"].get("autograd_cache_miss", 0),
    }


def main() -> None:
    """Parse the options, run the processes one after the other, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="default", choices=("default", "tiny"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scope", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scope:
        print(json.dumps(measure(**vars(options))))
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    for scope in ("eager", "model", "blocks"):
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm") if scope != "eager" else ("",):
                done = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], "--scope", scope],
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                told = json.loads(done.stdout.splitlines()[-1])
                print(json.dumps({"scope": scope, "start": start, **told, "device": where, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
