"""Compiled random operators: as Inductor writes them, and as torch's own kernels, which draw what eager code draws.

    python -m benchmarks.compiled_draws [--rounds 5] [--budget 120] [--size tiny]

Two blocks of a transformer with dropout on its residuals, two MLPs with dropout on their wide activations, and two
layers that add noise: each [32, 1024, 768] in bf16 autocast, forward and backward. `deviation` is that of the outputs
from eager ones, drawn from the same seed, relative to these.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import Case, make_parser, run_cases, wait

TIMES = 20
DIM, HEADS, DROPOUT = 768, 12, 0.1


def list_modules() -> dict[str, Callable[[], Any]]:
    """Makers of the modules by name."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (*x.shape[:2], HEADS, DIM // HEADS)
            q, k, v = (each.view(heads).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
            x = x + F.dropout(self.proj(mixed.transpose(1, 2).reshape(x.shape)), DROPOUT)
            return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), DROPOUT)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.dropout(self.down(F.dropout(F.gelu(self.up(self.norm(x))), DROPOUT)), DROPOUT)

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, log = self.up(x).chunk(2, -1)
            out: torch.Tensor = self.down(mean + torch.randn_like(mean) * torch.exp(0.5 * log))
            return out + 0.01 * torch.rand_like(x)

    return {"block": Block, "wide": Wide, "noise": Noise}


@functools.cache
def make_case(name: str, size: str) -> tuple[Any, Any]:
    """Two such modules, and their input."""
    import torch

    device, shape = "cuda" if torch.cuda.is_available() else "cpu", (2, 16, DIM) if size == "tiny" else (32, 1024, DIM)
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(list_modules()[name]() for _ in range(2))).to(device)
    return module, torch.randn(shape, device=device, requires_grad=True)


@functools.cache
def compile_case(name: str, size: str, own: bool) -> Any:
    import torch

    return torch.compile(make_case(name, size)[0], options={"fallback_random": own}, dynamic=False)


def measure(name: str, own: bool, size: str, _left_s: float) -> dict[str, Any]:
    import torch

    (module, x), compiled = make_case(name, size), compile_case(name, size, own)
    kind = x.device.type

    def draw(by: Any) -> Any:
        torch.manual_seed(3)
        with torch.autocast(kind, torch.bfloat16):
            return by(x)

    began = time.perf_counter()
    draw(compiled).sum().backward()
    wait(kind)
    setup_s = time.perf_counter() - began
    eager, ours = draw(module).detach().float(), draw(compiled).detach().float()
    began = time.perf_counter()
    for _ in range(TIMES):
        draw(compiled).sum().backward()
    wait(kind)
    ms = 1e3 * (time.perf_counter() - began) / TIMES
    deviation = float((ours - eager).abs().mean() / eager.abs().mean())
    return {"ms": ms, "setup_s": round(setup_s, 1), "deviation": deviation}


def main() -> None:
    options = make_parser(__doc__, rounds=5).parse_args()
    cases = [
        Case(f"{name}, {'torch' if own else 'Inductor'}'s kernels", partial(measure, name, own, options.size), 10)
        for name in list_modules()
        for own in (True, False)
    ]
    run_cases("compiled_draws", cases, options, rate="ms")


if __name__ == "__main__":
    main()
