"""What attention and the loss take of GPT-2's step on a CUDA device, by how each is computed.

    python -m benchmarks.attention [--samples 64] [--steps 5] [--rounds 4] [--budget 200] [--size tiny]

The gpt2 recipe's module (124 million parameters, 1,024 tokens) in bfloat16 with a fused AdamW and resident random
tokens, its blocks compiled once; attention as written or replaced, the loss as written, in two kernels, or compiled
together with the output layer, plain and padded. The arms take turns in each round; `setup_s` is the first two steps,
compiles included. Last the three products of the output layer alone, by how the rows of the logits lie in memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.cases import Case, make_parser, run_cases, wait
from fastloop.feeds.attention.rewriting import ReplaceAttention
from fastloop.feeds.compiled.calls import CompiledCall, put_in
from fastloop.feeds.loss.cross_entropy import LargeCrossEntropy
from fastloop.feeds.loss.padding import PadVocabulary
from recipes.gpt2 import GPT2, Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"default": Shape(), "tiny": Shape(layers=2, heads=2, width=32, context=64, vocabulary=8200)}
PADDED = {"default": 50304, "tiny": 8256}
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def time_ms(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    wait(DEVICE)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(DEVICE)
    return round(1e3 * (time.perf_counter() - began) / repeats, 3)


def time_products(size: str, samples: int) -> dict[str, float]:
    """Forward, gradient of the input and gradient of the weight: rows side by side, apart, or padded with zeros."""
    like: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    rows, width, classes, padded = (
        samples * SHAPES[size].context,
        SHAPES[size].width,
        SHAPES[size].vocabulary,
        PADDED[size],
    )
    x, weight = torch.randn(rows, width, **like), torch.randn(padded, width, **like)
    dense, wide = torch.zeros(rows, classes, **like), torch.zeros(rows, padded, **like)
    found = {}
    for name, logits in {"dense": dense, "apart": wide[:, :classes], "padded": wide}.items():
        used = weight[: logits.shape[1]]
        found[f"forward_{name}_ms"] = time_ms(lambda used=used, logits=logits: torch.mm(x, used.t(), out=logits))
        found[f"input_{name}_ms"] = time_ms(lambda used=used, logits=logits: logits @ used)
        found[f"weight_{name}_ms"] = time_ms(lambda logits=logits: logits.t() @ x)
    return found


class Arms:
    """One model, and the ways to run its step."""

    def __init__(self, size: str, samples: int) -> None:
        self.compiles, self.ready = size == "default", set[str]()  # compiling for a CPU takes minutes
        shape = SHAPES[size]
        self.model: Any = GPT2(shape).to(DEVICE).train()
        self.model.log = lambda *_: None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.tokens = torch.randint(0, 256, (samples, shape.context + 1), device=DEVICE)
        self.replace, self.pad = ReplaceAttention(self.model), PadVocabulary()
        self.loss = LargeCrossEntropy(pads=False)
        self.rows = LargeCrossEntropy(pads=True)
        by_hand, replaced = self._compile([]), self._compile([self.replace])
        plain, padded = self._tail([]), self._tail([self.pad])
        self.arms: dict[str, tuple[Any, Context]] = {
            "by hand": (by_hand, contextlib.nullcontext),
            "attention": (replaced, contextlib.nullcontext),
            "attention, loss": (replaced, self.loss.put_in),
            "attention, loss, gradient's rows apart": (replaced, self.rows.put_in),
            "attention, output layer and loss in one graph": ([*replaced, plain], lambda: self._whole(plain)),
            "attention, output layer and loss in one graph, padded": ([*replaced, padded], lambda: self._whole(padded)),
        }

    def _compile(self, passes: list[Any]) -> list[CompiledCall]:
        codes: dict[Any, Any] = {}
        return [self._call(block, "block", codes, passes) for block in self.model.blocks]

    def _call(self, module: Any, name: str, codes: dict[Any, Any], passes: list[Any]) -> CompiledCall:
        mode = "default" if self.compiles else "eager"
        return CompiledCall(module, name, codes, mode=mode, dynamic=None, passes=passes, is_tried=lambda: True)

    def _tail(self, passes: list[Any]) -> CompiledCall:
        return self._call(Tail(self.model), "tail", {}, passes)

    @contextlib.contextmanager
    def _whole(self, call: CompiledCall) -> Any:
        model = self.model

        def forward(tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            x = model.blocks(model.dropout(model.token(tokens) + model.place[: tokens.size(1)]))
            return call.module(x, following)  # type: ignore[no-any-return]

        model.forward = forward
        try:
            yield
        finally:
            del model.forward

    def measure(self, name: str, steps: int, left_s: float) -> dict[str, Any]:
        """Tokens a second, the last loss, the peak memory, and what was replaced."""
        found: dict[str, Any] = {}
        calls, context = self.arms[name]
        undo = put_in(calls)
        try:
            with context():
                if name not in self.ready:
                    found["setup_s"] = self._time(2)[0]
                    self.ready.add(name)
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                took_s, found["loss"] = self._time(steps)
        finally:
            undo()
        if DEVICE == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["tokens_per_s"] = steps * self.tokens[:, 1:].numel() / took_s
        found["replaced"], found["missed"] = self.replace.replaced, self.replace.missed
        found["padded"] = self.pad.padded
        found["loss_kernels"] = [(each.calls, each.deviation, each.failure) for each in (self.loss, self.rows)]
        return found

    def _time(self, steps: int) -> tuple[float, float]:
        wait(DEVICE)
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        wait(DEVICE)
        return time.perf_counter() - began, float(loss.detach())


class Tail(torch.nn.Module):
    """The end of GPT-2's forward, on its own parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.token = model.norm, model.token

    def forward(self, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(self.norm(x), self.token.weight).flatten(0, 1), following.flatten())


def main() -> None:
    parser = make_parser(__doc__, rounds=4)
    parser.add_argument("--samples", type=int, help="64, or 2 for the tiny size")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    tiny = options.size == "tiny"
    samples = options.samples or (2 if tiny else 64)
    torch.manual_seed(0)
    made = Arms(options.size, samples)
    cases = [Case(name, partial(made.measure, name, options.steps), 1 if tiny else 30) for name in made.arms]
    products = Case("products", lambda _: time_products(options.size, samples), 1 if tiny else 3)
    run_cases("attention", [*cases, products], options, rate="tokens_per_s", samples=samples, steps=options.steps)


if __name__ == "__main__":
    main()
