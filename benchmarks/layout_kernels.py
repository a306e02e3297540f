"""How long channels-last convolutions take at first and later, by model, in float32 and bfloat16.

    python -m benchmarks.layout_kernels [--rounds 1] [--budget 200] [--size tiny]

Forward and backward of torchvision models and others on resident pictures: five steps as usual, then six channels-last
ones. Each case is a process of its own, because kernels are loaded once for each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

from benchmarks.cases import Case, make_parser, run_cases, wait

MODELS = ("lraspp_mobilenet_v3", "resnet18", "resnet50", "discriminator")


def make_model(name: str, size: str) -> tuple[Any, tuple[int, ...]]:
    """A model and the shape of its pictures, N C H W."""
    from torch import nn
    from torchvision import models

    count, side = (2, 64) if size == "tiny" else (64, 224)
    shape = (count, 3, side, side)
    if name == "lraspp_mobilenet_v3":
        return models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=3), shape
    if name != "discriminator":
        return models.get_model(name, num_classes=10), shape
    widths = (64, 128, 256, 512)
    layers = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2)]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(512, 1, 4)), (count, 3, 64, 64)


def time_steps(name: str, precision: str, size: str) -> dict[str, Any]:
    """Milliseconds of each step, in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, shape = make_model(name, size)
    model, pictures = model.to(device).train(), torch.randn(*shape, device=device)

    def step() -> float:
        wait(device)
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            out = model(pictures)
            out = out["out"] if isinstance(out, dict) else out
            out.float().square().mean().backward()
        wait(device)
        return round(1e3 * (time.perf_counter() - began), 1)

    usual = [step() for _ in range(5)]
    model = model.to(memory_format=torch.channels_last)
    pictures = pictures.contiguous(memory_format=torch.channels_last)
    convs = [each for each in model.modules() if isinstance(each, torch.nn.Conv2d)]
    return {
        "convs": len(convs),
        "depthwise": sum(each.groups == each.in_channels > 1 for each in convs),
        "usual_ms": usual,
        "channels_last_ms": [step() for _ in range(6)],
    }


def run_apart(name: str, precision: str, size: str, left_s: float) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.layout_kernels", "--case", name, precision, "--size", size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=min(120, left_s))
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-600:]}
    return found if "error" in found else {**found, "first_ms": found["channels_last_ms"][0]}


def main() -> None:
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "PRECISION"), help="one of them, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(time_steps(*options.case, options.size)))
        return
    names = [(name, precision) for name in MODELS for precision in ("fp32", "bf16")]
    cases = [Case(" ".join(each), partial(run_apart, *each, options.size), 20) for each in names]
    run_cases("layout_kernels", cases, options, rate="first_ms")


if __name__ == "__main__":
    main()
