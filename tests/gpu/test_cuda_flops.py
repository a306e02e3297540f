"""Counting on a CUDA device: its backward runs in a thread of the engine's, its kernels are others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastloop.bridge.apply.state.untouched import preserve_state
from fastloop.evidence.work.captured_graphs import count_kept, keep_graphs
from fastloop.evidence.work.compiled_work import CompiledWork
from fastloop.evidence.work.flops import FlopCount, Work, may_count
from tests.evidence.work.test_flops import Attention, Blocks, trained

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]


def test_the_backward_of_the_device_is_counted() -> None:
    count = trained(nn.Linear(5, 7).cuda(), torch.randn(3, 5, requires_grad=True, device="cuda"))
    assert count.forward == {"matmul": 210} and count.backward == {"matmul": 420} and not count.work.at_least


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_as_on_the_cpu(reentrant: bool, nested: bool) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    here = trained(Blocks(reentrant, nested), x)
    there = trained(Blocks(reentrant, nested).cuda(), x.detach().cuda().requires_grad_())
    assert there.work == here.work and there.forward == here.forward and there.recomputed > 0


@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_every_attention_kernel_counts_the_same(name: str) -> None:
    kernel = getattr(SDPBackend, name)
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    count = FlopCount()
    with sdpa_kernel(kernel), count:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    scores = 2 * 2 * 4 * 128 * 128 * 64
    assert count.work.total == 3 * 2 * scores and not count.work.at_least
    assert count.work.recomputed == (0 if kernel == SDPBackend.MATH else scores)


def test_a_recurrent_kernel_is_named() -> None:
    work = trained_lstm()
    assert work.at_least and any("rnn" in name for name in work.uncounted)


def trained_lstm() -> Work:
    count = FlopCount()
    with count:
        nn.LSTM(4, 4).cuda()(torch.randn(3, 2, 4, device="cuda"))[0].sum().backward()
    return count.work


def test_losses_and_gradients_are_the_same_bit_for_bit() -> None:
    def run(count: FlopCount | None, nudge: float = 0.0) -> list[torch.Tensor]:
        torch.manual_seed(0)
        features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2))
        network = nn.Sequential(features, nn.Flatten(2), Attention(36)).cuda()
        optimizer, seen = torch.optim.SGD(network.parameters(), lr=0.1 + nudge), []
        for _ in range(4):
            with count or contextlib.nullcontext(), torch.autocast("cuda", torch.bfloat16):
                loss = network(torch.randn(8, 3, 8, 8, device="cuda")).square().mean()
            with count or contextlib.nullcontext():
                loss.backward()
            seen += [loss.detach().clone(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    deterministic, before = torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, watched, nudged = run(None), run(FlopCount()), run(None, 1e-3)
    finally:
        torch.backends.cudnn.deterministic = deterministic
        torch.use_deterministic_algorithms(before)
    assert len(plain) > 20 and all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, nudged, strict=True))


def test_compiled_counts_as_eager_and_stays_compiled() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    network: Any = Attention(32).cuda()
    x = torch.randn(2, 16, 32, device="cuda", requires_grad=True)
    eager = trained(network, x).work
    network.compile()
    with torch.compiler.set_stance("force_eager"):
        assert trained(network, x).work == eager
    network(x).sum().backward()
    assert counters["stats"]["unique_graphs"] >= 1 and may_count(nn.Linear(1, 1)) is not None
    torch._dynamo.reset()
    counters.clear()


def test_a_graph_being_captured_is_refused() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(2, device="cuda")
    layer = nn.Linear(2, 2)
    assert may_count(layer) is None
    with torch.cuda.graph(graph):
        why = may_count(layer)
        x + 1
    assert why is not None and "CUDA graph" in why


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_function_that_inductor_compiled_counts_as_eager(mode: str) -> None:
    torch._dynamo.reset()
    network, before = Attention(32).cuda(), count_kept()
    x = torch.randn(2, 16, 32, device="cuda", requires_grad=True)
    eager = trained(network, x).work
    compiled: Any = torch.compile(lambda x: network(x), mode=mode)
    with keep_graphs():
        for _ in range(3):
            compiled(x).sum().backward()
        work = CompiledWork(network, preserve_state)
        work.open()
        compiled(x).sum().backward()
        work.close()
    found = work.count(1)
    assert count_kept() - before == 1 and found["per_sample"] == eager.total and found["at_least"] is False
    torch._dynamo.reset()
