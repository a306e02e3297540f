"""Attention and loss on a CUDA device: the fused kernel runs, within bfloat16's rounding, and less memory is used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastloop.feeds.attention.rewriting import ReplaceAttention
from fastloop.feeds.compiled.calls import CompiledCall, put_in
from fastloop.feeds.compiled.graph_passes import Frozen, choose_backend
from fastloop.feeds.loss.cross_entropy import LargeCrossEntropy
from fastloop.feeds.loss.graph_kernels import UseKernels
from fastloop.feeds.loss.padding import PadVocabulary
from recipes.gpt2 import Attention, Shape
from tests.feeds.loss.test_padding import CLASSES, Model
from tests.rungs.fits import fit, verdict
from tests.rungs.test_attention import Attends
from tests.rungs.test_loss import Words

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
FUSED = ("flash", "cudnn", "sdpa")


def list_kernels(run: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return [event.key.lower() for event in profiled.key_averages()]


def test_the_recipes_attention_runs_in_a_fused_kernel() -> None:
    torch.manual_seed(0)
    ours = Attention(Shape(layers=1, heads=4, width=256, context=512, dropout=0.0)).cuda()
    plain, x = copy.deepcopy(ours), torch.randn(4, 512, 256, device="cuda")
    replace = ReplaceAttention(ours)
    put_in([CompiledCall(ours, "a", {}, mode="eager", dynamic=None, passes=[replace], is_tried=lambda: True)])

    def run(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = module(x)
        return out, torch.autograd.grad(out.float().square().sum(), [module.qkv.weight])[0]

    for a, b in zip(run(plain), run(ours), strict=True):
        assert a.dtype == b.dtype and float((a - b).float().norm() / a.float().norm()) < 2e-2
    assert replace.causal == 1
    assert any(word in kernel for kernel in list_kernels(lambda: run(ours)) for word in FUSED)
    assert not any(word in kernel for kernel in list_kernels(lambda: run(plain)) for word in FUSED)


def test_the_loss_needs_no_float32_copies() -> None:
    rows, classes = 4096, 50257
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, classes, (rows,), device="cuda")
    large, seen = LargeCrossEntropy(pads=True), []
    with torch.autocast("cuda", torch.bfloat16):
        for put in (None, large.put_in, large.put_in):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if put is None:
                loss = F.cross_entropy(logits, target)
            else:
                with put():
                    loss = F.cross_entropy(logits, target)
            (gradient,) = torch.autograd.grad(loss, [logits])
            seen.append((float(loss), gradient, (torch.cuda.max_memory_allocated() - before) / logits.nbytes))
    (expected, theirs, copies), _, (value, ours, own_copies) = seen
    assert large.calls == 2 and large.failure == "" and ours.stride() == (50304, 1)
    assert value == pytest.approx(expected, rel=1e-4)
    assert float((ours - theirs).float().norm() / theirs.float().norm()) < 1e-2
    assert own_copies < 1.5 < 4 < copies


def test_compiled_graphs_compute_the_loss_in_the_kernels() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, use = Model().cuda(), UseKernels()
    compiled = torch.compile(module.forward, **choose_backend("default", (PadVocabulary(), use), Frozen(frozenset())))
    tokens = torch.arange(4096, device="cuda").view(4, 1024) % CLASSES
    seen: list[torch.Tensor] = []

    def run(call: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(tokens, tokens.flip(1))
        seen[:] = [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]

    run(module)
    expected = [*seen]
    run(compiled)
    assert {"_reduce_loss_rows", "_write_loss_gradient"} <= {*list_kernels(lambda: run(compiled))} and use.used == 1
    assert float(seen[0]) == pytest.approx(float(expected[0]), rel=1e-4)
    assert all(float((a - b).norm() / b.norm()) < 1e-2 for a, b in zip(seen[1:], expected[1:], strict=True))


def test_both_rungs_take_in_a_fit_under_bfloat16() -> None:
    settings: dict[str, Any] = {"accelerator": "gpu"}
    torch.manual_seed(0)
    watcher, _ = fit({"amp": {}, "attention": {"backend": "flash"}}, Attends(), **settings)
    assert verdict(watcher, "attention").took is True
    watcher, _ = fit({"amp": {}, "loss": {}, "fused": {}}, Words(), **settings)
    assert verdict(watcher, "loss").took is True
