"""How long cross-entropy over a large vocabulary takes: as Inductor compiles it by several settings, and in kernels.

    python -m benchmarks.loss_kernels [--rounds 5] [--budget 120] [--size tiny]

16-bit logits of 65,536 tokens over 50,304 classes, as gpt2's step has them; forward and backward, each the median of
ten. `gb_per_s` counts what has to move: the logits read twice, their gradient written once.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import Case, make_parser, run_cases, wait

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two passes": {"online_softmax": False},
    "tuned": {"coordinate_descent_tuning": True},
    "two passes, tuned": {"online_softmax": False, "coordinate_descent_tuning": True},
}
KERNELS = "kernels"
"""Those that the `loss` rung puts into compiled graphs."""
TIMES = 10


@functools.cache
def make_logits(size: str) -> tuple[Any, Any]:
    """Logits [tokens, classes] that want a gradient, and targets [tokens]."""
    import torch

    tokens, classes = (64, 8192) if size == "tiny" else (65536, 50304)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits = torch.randn(tokens, classes, device=device, dtype=torch.bfloat16, requires_grad=True)
    return logits, torch.randint(classes, (tokens,), device=device)


@functools.cache
def compile_loss(name: str) -> Callable[[Any, Any], Any]:
    import torch
    from torch.nn import functional as F

    from fastloop.feeds.loss import graph_kernels

    def loss(logits: Any, target: Any) -> Any:
        if name == KERNELS:
            return graph_kernels.reduce_rows(logits, target, -100)[0].mean()
        return F.cross_entropy(logits.float(), target)

    return torch.compile(loss, options=OPTIONS.get(name), dynamic=False)


def time_loss(name: str, size: str, _left_s: float) -> dict[str, Any]:
    (logits, target), loss = make_logits(size), compile_loss(name)
    began = time.perf_counter()
    loss(logits, target).backward()
    wait(logits.device.type)
    setup_s, spent_ms = time.perf_counter() - began, {"forward": list[float](), "backward": list[float]()}
    for _ in range(TIMES):
        logits.grad, stamps = None, [time.perf_counter()]
        value = loss(logits, target)
        wait(logits.device.type)
        stamps.append(time.perf_counter())
        value.backward()
        wait(logits.device.type)
        stamps.append(time.perf_counter())
        spent_ms["forward"].append(1e3 * (stamps[1] - stamps[0]))
        spent_ms["backward"].append(1e3 * (stamps[2] - stamps[1]))
    medians = {f"{name}_ms": round(statistics.median(each), 3) for name, each in spent_ms.items()}
    both_ms = sum(medians.values())
    return {**medians, "both_ms": both_ms, "gb_per_s": 3 * logits.nbytes / 1e6 / both_ms, "setup_s": round(setup_s, 1)}


def main() -> None:
    options = make_parser(__doc__, rounds=5).parse_args()
    cases = [Case(name, partial(time_loss, name, options.size), 20) for name in (*OPTIONS, KERNELS)]
    run_cases("loss_kernels", cases, options, rate="both_ms")


if __name__ == "__main__":
    main()
