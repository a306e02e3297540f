"""What compiling a model's repeated blocks costs and brings, against the whole: cold, and from torch's cache on disk.

    python -m benchmarks.compile_scope [--size default] [--device cuda] [--batch 8] [--steps 20] [--budget 240]

The twelve blocks of the gpt2 recipe, forward and backward under bf16 autocast, on one batch that stays on the device.
Each line is a process of its own: the whole and the blocks, with an empty cache and again with what the first one left.
Each line: the first step's seconds, the median of the later steps, graphs, and what torch's cache served.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.cases import ROOT, Case, make_parser, run_cases, wait
from fastloop.bridge.apply import read_model
from fastloop.feeds.compiled.calls import CompiledCall, put_in
from recipes import gpt2


def measure(scope: str, size: str, device: str, batch: int, steps: int, mode: str) -> dict[str, Any]:
    """One process's part."""
    torch.manual_seed(0)
    module, _ = gpt2.build(gpt2.Settings(size=size))
    module.to(device)
    context, width = module.place.shape
    groups = read_model.read_module(module)["repeated_blocks"]
    targets = {"model": ["blocks"], "blocks": [name for group in groups for name in group], "eager": []}[scope]
    codes: dict[Any, Any] = {}
    calls = [CompiledCall(module.get_submodule(each), each, codes, mode=mode, dynamic=None) for each in targets]
    put_in(calls)
    x = torch.randn(batch, context, width, device=device, requires_grad=True)
    times = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = module.blocks(x).float().square().mean()
        loss.backward()
        wait(device)
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


def start_twice(scope: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """A process with an empty cache, and one with what the first left in it."""
    asked = {name: getattr(options, name) for name in ("size", "device", "batch", "steps", "mode")}
    code = f"import json; from benchmarks import compile_scope as c; print(json.dumps(c.measure({scope!r}, **{asked})))"
    found, until = dict[str, Any](), time.monotonic() + left_s
    with tempfile.TemporaryDirectory() as cache:
        for begin in ("cold", "warm") if scope != "eager" else ("cold",):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=until - time.monotonic(),
                check=False,
            )
            if done.returncode:
                return {**found, "error": f"{begin}: {done.stderr[-800:]}"}
            found[begin] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "step_ms": found[begin]["median_step_ms"]}


def main() -> None:
    """Parse the options, run the processes one after the other, print."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", default="default", help="eager captures and does not compile")
    options = parser.parse_args()
    expected = {"blocks": 45, "model": 90, "eager": 20} if options.size == "default" else {}
    cases = [
        Case(scope, partial(start_twice, scope, options), expected.get(scope, 0))
        for scope in ("blocks", "model", "eager")
    ]
    run_cases("compile_scope", cases, options, rate="step_ms", batch=options.batch)


if __name__ == "__main__":
    main()
