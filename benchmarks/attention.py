"""What attention and the loss take of GPT-2's step on a CUDA device, by how each is computed.

    python benchmarks/attention.py [--samples 64] [--steps 5] [--windows 4]

The gpt2 recipe's module (124 million parameters, 1,024 tokens) in bfloat16 with a fused AdamW and resident random
tokens, its blocks compiled once; attention as written or replaced, the loss as written, in two kernels, or compiled
together with the output layer, plain and padded. The arms take turns within each round of windows. First the three
products of the output layer alone, by how the rows of the logits lie in memory. JSON lines; an arm that fails says why
and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fastloop.feeds.attention.rewriting import ReplaceAttention
from fastloop.feeds.compiled_calls import CompiledCall, put_in
from fastloop.feeds.loss.cross_entropy import LargeCrossEntropy
from fastloop.feeds.loss.padding import PadVocabulary
from recipes.gpt2 import GPT2, Shape

WIDTH, CLASSES, PADDED = 768, 50257, 50304
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def time_ms(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(repeats):
        run()
    ended.record()
    torch.cuda.synchronize()
    return round(began.elapsed_time(ended) / repeats, 2)


def time_products(rows: int) -> dict[str, float]:
    """Forward, gradient of the input and gradient of the weight: rows side by side, apart, or padded with zeros."""
    like: Any = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, WIDTH, **like), torch.randn(PADDED, WIDTH, **like)
    dense, wide = torch.zeros(rows, CLASSES, **like), torch.zeros(rows, PADDED, **like)
    found = {}
    for name, logits in {"dense": dense, "apart": wide[:, :CLASSES], "padded": wide}.items():
        used = weight[: logits.shape[1]]
        found[f"forward_{name}_ms"] = time_ms(lambda used=used, logits=logits: torch.mm(x, used.t(), out=logits))
        found[f"input_{name}_ms"] = time_ms(lambda used=used, logits=logits: logits @ used)
        found[f"weight_{name}_ms"] = time_ms(lambda logits=logits: logits.t() @ x)
    return found


class Arms:
    """One model, and the ways to run its step."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.model: Any = GPT2(Shape()).cuda().train()
        self.model.log = lambda *_: None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.tokens = torch.randint(0, 256, (samples, 1025), device="cuda")
        self.replace, self.pad = ReplaceAttention(self.model), PadVocabulary()
        self.loss = LargeCrossEntropy(compiles=True, pads=False)
        self.rows = LargeCrossEntropy(compiles=True, pads=True)
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
        how: Any = {"mode": "default", "dynamic": None, "passes": passes, "is_tried": lambda: True}
        codes: dict[Any, Any] = {}
        return [CompiledCall(block, "block", codes, **how) for block in self.model.blocks]

    def _tail(self, passes: list[Any]) -> CompiledCall:
        tail = Tail(self.model)
        return CompiledCall(tail, "tail", {}, mode="default", dynamic=None, passes=passes, is_tried=lambda: True)

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

    def run(self, name: str, steps: int) -> tuple[float, float]:
        """Tokens a second, and the last loss."""
        calls, context = self.arms[name]
        undo = put_in(calls)
        try:
            with context():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
                return steps * self.samples * 1024 / (time.perf_counter() - began), float(loss.detach())
        finally:
            undo()


class Tail(torch.nn.Module):
    """The end of GPT-2's forward, on its own parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.token = model.norm, model.token

    def forward(self, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(self.norm(x), self.token.weight).flatten(0, 1), following.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--windows", type=int, default=4)
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(
        json.dumps({"products": time_products(asked.samples * 1024), "gpu": torch.cuda.get_device_name()}), flush=True
    )
    made, rates, losses, peaks = Arms(asked.samples), dict[str, list[float]](), dict[str, float](), dict[str, float]()
    for name in made.arms:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        began = time.time()
        try:
            made.run(name, 2)
        except Exception as error:
            print(json.dumps({"arm": name, "failed": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            continue
        rates[name], peaks[name] = [], torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"arm": name, "first_two_steps_s": round(time.time() - began, 1)}), flush=True)
    for _ in range(asked.windows):
        for name in rates:
            rate, losses[name] = made.run(name, asked.steps)
            rates[name].append(round(rate))
    for name, seen in rates.items():
        told = {"tokens_per_s": statistics.median(seen), "windows": seen, "peak_gib": round(peaks[name], 1)}
        print(
            json.dumps({"arm": name, **told, "loss": losses[name] if math.isfinite(losses[name]) else None}), flush=True
        )
    evidence = {"replaced": made.replace.replaced, "missed": made.replace.missed, "padded": made.pad.padded}
    kernels = [(each.calls, each.deviation, each.failure) for each in (made.loss, made.rows)]
    print(json.dumps({**evidence, "loss": kernels, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
