"""The count against arithmetic done by hand, and that counting leaves a training as it was."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastloop.evidence.work.flops import FlopCount, Work, may_count
from tests.torch_version import TORCH

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Other tests of the process may have compiled something."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
    yield


def counted(run: Callable[[], Any]) -> FlopCount:
    count = FlopCount()
    with count:
        run()
    return count


def trained(module: nn.Module, *inputs: Tensor) -> FlopCount:
    return counted(lambda: module(*inputs).sum().backward())


class Attention(nn.Module):
    """One head-split attention [B, T, C], by SDPA or written out."""

    def __init__(self, width: int = 16, heads: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.fused = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, fused

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class Blocks(nn.Module):
    """Two blocks, each checkpointed (or checkpoints within checkpoints) where asked."""

    def __init__(self, reentrant: bool | None = None, nested: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.reentrant, self.nested = reentrant, nested

    def again(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        if self.nested:
            return self.again(lambda y: self.again(self.parts[1], self.again(self.parts[0], y)).sin(), x)
        return self.again(self.parts[1], self.again(self.parts[0], x))


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_linear_costs_two_per_weight_and_sample_forward_and_twice_that_backward() -> None:
    count = trained(nn.Linear(5, 7), torch.randn(3, 5, requires_grad=True))
    assert count.forward == {"matmul": 2 * 3 * 5 * 7} and count.backward == {"matmul": 2 * 2 * 3 * 5 * 7}
    assert count.work == Work(matmul=3 * 2 * 3 * 5 * 7) and count.work.total == 630
    # The first layer of a network needs no gradient of its input.
    assert trained(nn.Linear(5, 7), torch.randn(3, 5)).backward == {"matmul": 2 * 3 * 5 * 7}


@pytest.mark.parametrize(
    ("layer", "shape", "forward"),
    [
        (nn.Conv1d(3, 4, 3), (2, 3, 10), 2 * 2 * 8 * 4 * 3 * 3),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 8, 8), 2 * 2 * (4 * 4) * 4 * 3 * 9),
        (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 6, 6), 2 * 2 * (4 * 4) * 8 * 1 * 9),
        (nn.Conv2d(6, 6, 3, groups=6, padding=1), (2, 6, 6, 6), 2 * 2 * (6 * 6) * 6 * 1 * 9),
        (nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 5, 5), 2 * 2 * (5 * 5) * 3 * 4 * 4),
    ],
    ids=["1d", "strided", "groups", "depthwise", "transposed"],
)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...], forward: int) -> None:
    count = trained(layer, torch.randn(shape, requires_grad=True))
    assert count.forward == {"convolution": forward} and count.backward == {"convolution": 2 * forward}
    assert not count.work.at_least


def test_the_weight_gradient_of_grouped_convolutions_is_what_torch_gets_wrong() -> None:
    """The reason for a formula of our own; when this fails, torch's can be used."""
    layer, x = nn.Conv2d(6, 6, 3, groups=6), torch.randn(2, 6, 6, 6, requires_grad=True)
    with FlopCounterMode(display=False) as theirs:
        layer(x).sum().backward()
    forward = trained(layer, x).forward["convolution"]
    assert trained(layer, x).work.total == 3 * forward < theirs.get_total_flops() == 8 * forward


def test_a_transformer_counts_the_same_fused_and_written_out() -> None:
    B, T, C = 2, 6, 16
    x = torch.randn(B, T, C, requires_grad=True)
    fused, plain = (trained(Attention(fused=fused), x).work for fused in (True, False))
    linear, scores = 2 * B * T * C * 4 * C, 2 * B * T * T * C
    assert fused == Work(matmul=3 * linear, attention=3 * 2 * scores, recomputed=scores)
    assert plain == Work(matmul=3 * (linear + 2 * scores))
    assert fused.total == plain.total and not fused.at_least


def test_attention_is_counted_as_torch_does_where_torch_can() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    from fastloop.evidence.work import flops

    q, k, v, grad = (torch.empty(2, 4, 6, 8), torch.empty(2, 4, 5, 8), torch.empty(2, 4, 5, 3), torch.empty(2, 4, 6, 3))
    assert flops._count_attention(q, k, v)[1] == sdpa_flop_count(q.shape, k.shape, v.shape)
    theirs = sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    assert sum(flops._count_attention_backward(grad, q, k, v)[1:]) == theirs
    if TORCH < (2, 14):  # the reason for a formula of our own
        with pytest.raises(AssertionError):
            sdpa_flop_count(q.shape, k[:, :2].shape, v[:, :2].shape)
    assert flops._count_attention(q, k[:, :2], v[:, :2]) == flops._count_attention(q, k, v)  # grouped queries


def test_a_residual_network_counts_as_torch_counts_it() -> None:
    torchvision = pytest.importorskip("torchvision")
    network, x = torchvision.models.resnet18(), torch.randn(2, 3, 64, 64)
    with FlopCounterMode(display=False) as theirs:
        network(x).sum().backward()
    work = trained(network, x).work
    assert work.total == theirs.get_total_flops() and not work.at_least
    assert work.matmul == 2 * 2 * 2 * 512 * 1000 + 2 * 2 * 512 * 1000 and work.convolution > 100 * work.matmul


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: torch.randn(3, 4) @ torch.randn(4), 24),
        (lambda: torch.randn(4) @ torch.randn(4), 8),
        (lambda: torch.addbmm(torch.zeros(3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)), 240),
        (lambda: torch.einsum("bij,bjk->bik", torch.randn(2, 3, 4), torch.randn(2, 4, 5)), 240),
        (lambda: torch.addmv(torch.zeros(3), torch.randn(3, 4), torch.randn(4)), 24),
    ],
    ids=["mv", "dot", "addbmm", "einsum", "addmv"],
)
def test_small_products(run: Callable[[], Any], flops: int) -> None:
    assert counted(run).work == Work(matmul=flops)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_work_without_gradients_is_seen(mode: Any) -> None:
    def run() -> None:
        with mode():
            F.linear(torch.randn(2, 3), torch.randn(4, 3))
            F.conv2d(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2))

    assert counted(run).work == Work(matmul=2 * 2 * 3 * 4, convolution=2 * 9 * 4)


def test_autocast_and_accumulation() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    once = trained(layer, x).work.total
    count = FlopCount()
    for _ in range(3):
        with count, torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).sum()
        with count:  # as two overrides of a strategy would enter it
            loss.backward()
    assert count.work.total == 3 * once > 0


def test_what_runs_outside_is_not_counted() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    count = FlopCount()
    layer(x)
    with count:
        x.add(1).softmax(-1).sum()
    layer(x)
    assert count.work == Work()


# -- recomputation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_moves_nothing_but_recomputation(reentrant: bool, nested: bool) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    eager, again = (trained(Blocks(kind, nested), x) for kind in (None, reentrant))
    assert eager.recomputed == 0 and not eager.work.at_least
    assert again.forward == eager.forward and again.backward == eager.backward and not again.work.at_least
    forward = eager.forward["matmul"]
    assert 0.4 * forward <= again.recomputed <= 2 * forward  # not-reentrant stops early; nested goes twice
    if reentrant:
        assert again.recomputed == (2 * forward if nested else forward)


class OwnCheckpoint(torch.autograd.Function):
    """What libraries with a checkpoint of their own do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            out = x @ weight
        return torch.autograd.grad(out, (x, weight), grad)


def test_a_checkpoint_of_somebody_else() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    count = counted(lambda: OwnCheckpoint.apply(x, weight).sum().backward())
    once = 2 * 3 * 4 * 5
    assert (count.forward["matmul"], count.backward["matmul"], count.recomputed) == (once, 2 * once, once)


def test_double_backward_is_counted_and_said_where_it_hides_recomputation() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)

    def penalty(product: Callable[[Tensor], Tensor]) -> FlopCount:
        def run() -> None:
            (grad,) = torch.autograd.grad(product(x @ weight).square().sum(), x, create_graph=True)
            grad.square().sum().backward()

        return counted(run)

    plain = penalty(lambda y: y)
    assert plain.recomputed == 0 and not plain.work.at_least and plain.backward["matmul"] >= 3 * 2 * 3 * 4 * 5
    square = torch.randn(5, 5, requires_grad=True)

    class Ambiguous(OwnCheckpoint):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight.T, x.T @ grad

    assert penalty(lambda y: Ambiguous.apply(y, square) @ square).work.at_least


# -- at least ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda: nn.LSTM(4, 4)(torch.randn(3, 2, 4))[0].sum().backward(), "aten.mkldnn_rnn_layer"),
        (lambda: torch.fft.fft(torch.randn(8)), "aten._fft_r2c"),
        (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), torch.randn(4, 4)), "aten._sparse_addmm"),
        (lambda: torch.eye(4).to_sparse_csr() @ torch.randn(4, 4), "aten.mm"),
        (lambda: torch.linalg.inv(torch.eye(4)), "aten.linalg_inv_ex"),
        (lambda: torch.cdist(torch.randn(50, 4), torch.randn(50, 4)), "aten._euclidean_dist"),
        (lambda: nn.Bilinear(2, 2, 2)(torch.randn(2, 2), torch.randn(2, 2)), "aten._trilinear"),
        (
            lambda: torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8)),
            "aten._int_mm",
        ),
        (lambda: torch.ao.nn.quantized.dynamic.Linear(4, 4)(torch.randn(2, 4)), "quantized.linear_dynamic"),
    ],
    ids=["lstm", "fft", "sparse", "csr", "inverse", "distances", "bilinear", "integers", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_heavy_operators_without_a_formula_are_named(run: Callable[[], Any], name: str) -> None:
    work = counted(run).work
    assert work.at_least and name in work.uncounted


def test_custom_operators_are_named_and_at_most_five() -> None:
    library = torch.library.Library("fastloop_flops_test", "DEF")
    for index in range(7):
        library.define(f"op{index}(Tensor x) -> Tensor")
        library.impl(f"op{index}", lambda x: x.clone(), "CPU")
    namespace = torch.ops.fastloop_flops_test
    work = counted(lambda: [getattr(namespace, f"op{index}")(torch.ones(2)) for index in range(7)]).work
    assert work.at_least and work.uncounted == tuple(f"fastloop_flops_test.op{index}" for index in range(5))


class Flexible(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        out: torch.Tensor = flex_attention(q, q, q)
        return out


def test_flex_attention_is_not_run_where_counting_would_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.8 and older."""
    monkeypatch.setattr("fastloop.evidence.work.flops._RUNS_HIGHER_ORDER", False)
    assert may_count(nn.Linear(2, 2)) is None
    assert "flex_attention" in str(may_count(nn.Sequential(Flexible())))


@pytest.mark.skipif(TORCH < (2, 9), reason="this torch cannot")
def test_flex_attention_runs_and_is_named() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16)
    count = FlopCount()
    with count, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to compile it
        out = flex_attention(q, q, q)
    assert count.work.at_least and any("flex_attention" in name for name in count.work.uncounted)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize(
    "run",
    [
        lambda: nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0),
        lambda: nn.GRUCell(2, 2)(torch.randn(1, 2)),
        lambda: nn.BatchNorm2d(2)(torch.randn(2, 2, 3, 3)).sum().backward(),
        lambda: nn.Embedding(4, 4, sparse=True)(torch.tensor([1])).sum().backward(),
        lambda: F.interpolate(torch.randn(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
        lambda: torch.jit.script(nn.Linear(2, 2))(torch.randn(1, 2)),
    ],
    ids=["clipping", "gru_cell", "batchnorm", "embedding", "resize", "script"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_cheap_or_known_makes_no_at_least(run: Callable[[], Any]) -> None:
    assert not counted(run).work.at_least


def test_a_formula_that_fails_costs_the_count_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastloop.evidence.work import flops

    calls = []

    def broken(*_: Any, **__: Any) -> int:
        calls.append(1)
        raise ValueError("planted")

    monkeypatch.setitem(flops.flop_registry, torch.ops.aten.addmm, broken)
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    count = FlopCount()
    with count:
        out = layer(x)
    assert calls == [1] and torch.equal(out, layer(x)) and count.work == Work(at_least=True, uncounted=("aten.addmm",))


# -- nothing changes --------------------------------------------------------------------------------------------------


def losses_and_gradients(count: FlopCount | None, nudge: float = 0.0) -> list[Tensor]:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
    network = nn.Sequential(convolution, nn.Flatten(2), Attention(36))
    seen = []
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2 + nudge)
    for _ in range(3):
        with count or torch.enable_grad():
            loss = network(torch.randn(4, 3, 8, 8)).square().mean()
            loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_losses_and_gradients_are_the_same_bit_for_bit() -> None:
    count = FlopCount()
    plain, watched, nudged = losses_and_gradients(None), losses_and_gradients(count), losses_and_gradients(None, 1e-6)
    assert count.work.convolution > 0 and count.work.attention > 0
    assert len(plain) == len(watched) > 20 and all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, nudged, strict=True))


def test_no_hooks_and_no_mode_are_left() -> None:
    hooks, layer, count = nn.modules.module._global_forward_pre_hooks, nn.Linear(2, 2), FlopCount()
    with pytest.raises(ZeroDivisionError), count:
        layer(torch.randn(1, 2))
        assert not hooks and not layer._forward_pre_hooks and not layer._forward_hooks
        raise ZeroDivisionError
    assert torch._C._len_torch_dispatch_stack() == 0 and count.work.total == 8
    with FlopCounterMode(display=False):
        assert hooks  # which is what the lines above look for


def test_two_counts_nest() -> None:
    outer, inner = FlopCount(), FlopCount()
    with outer, inner:
        nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()
    assert outer.work == inner.work and outer.work.total == 16 and outer.backward == inner.backward


# -- and torch.compile ------------------------------------------------------------------------------------------------


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def test_a_compiled_module_counts_under_force_eager_and_compiles_afterwards() -> None:
    net, x = Net(), torch.randn(2, 4)
    eager = trained(net, x).work
    assert may_count(net) is None
    net.compile(backend="eager")
    assert "torch.compile" in str(may_count(net)) and "`0`" in str(may_count(nn.Sequential(net)))
    assert "compiled" in str(may_count(torch.compile(Net(), backend="eager")))
    assert may_count(nn.Linear(2, 2)) is None  # nothing has been compiled so far
    with torch.compiler.set_stance("force_eager"):
        assert trained(net, x).work == eager
    assert graphs() == 0
    net(x)
    assert graphs() == 1
    assert "torch.compile is in use" in str(may_count(nn.Linear(2, 2)))


def noting(runs: list[str]) -> Callable[..., Any]:
    """A backend that notes when it compiles and when what it compiled runs."""

    def backend(graph: Any, _inputs: Any) -> Any:
        runs.append("compile")
        return lambda *args: (runs.append("run"), graph(*args))[1]

    return backend


@pytest.mark.skipif(not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="torch has no way to say it")
def test_counting_by_mistake_leaves_compiled_code_compiled() -> None:
    class Hard(FlopCount):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return False

    def afterwards(kind: type[FlopCount], runs: list[str]) -> list[str]:
        """What of the compiled code runs in a step after one that was counted."""
        net, x = Net(), torch.randn(2, 4)
        net.compile(backend=noting(runs))
        with kind() as count:
            net(x)
        assert count.work.total == 2 * 2 * 4 * 4
        before = len(runs)
        net(x)
        return runs[before:]

    runs = list[str]()
    assert afterwards(FlopCount, runs) == ["run"] and runs == ["compile", "run", "run"]
    torch._dynamo.reset()
    if TORCH < (2, 14):  # later ones compile it a second time
        assert afterwards(Hard, []) == [], "what the method is there against: it is switched off, and nothing says so"


def test_in_a_live_step_force_eager_would_replace_what_is_compiled() -> None:
    """Why `may_count` refuses after any compilation: nothing tells whether a compiled function takes part in a step."""
    net, x, runs = Net(), torch.randn(2, 4), list[str]()
    net.compile(backend=noting(runs))
    net(x)
    with torch.compiler.set_stance("force_eager"):
        counted(lambda: Net()(x))
        assert runs == ["compile", "run"], "beside an uncompiled module nothing happens to it"
        counted(lambda: net(x))
    assert runs == ["compile", "run"], "its own step ran without the compiled code, which may round differently"
    net(x)
    assert runs == ["compile", "run", "run"]


def test_a_replayed_graph_is_refused() -> None:
    layer = nn.Linear(2, 2)
    assert may_count(layer) is None

    def replay(x: Tensor) -> Tensor:
        return x

    replay.__module__ = "torch.cuda.graphs"
    layer.forward = replay  # type: ignore[method-assign]
    assert "CUDA graph" in str(may_count(layer))


def test_neither_asking_nor_counting_imports_dynamo() -> None:
    code = (
        "import sys, torch; from fastloop.evidence.work.flops import FlopCount, may_count; m = torch.nn.Linear(2, 2)\n"
        "assert may_count(m) is None\nwith FlopCount() as count: m(torch.ones(1, 2)).sum().backward()\n"
        "assert count.work.total == 16, count.work\nassert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# -- the record -------------------------------------------------------------------------------------------------------


def test_per_sample() -> None:
    work = Work(matmul=60, convolution=30, attention=10, recomputed=20, at_least=True, uncounted=("aten.x",))
    assert work.total == 100
    assert work.per(10, source="trial") == {
        "per_sample": 10,
        "matmul": 6,
        "convolution": 3,
        "attention": 1,
        "recomputed": 2,
        "at_least": True,
        "uncounted": ["aten.x"],
        "source": "trial",
    }
    assert work.per(0)["per_sample"] is None and "samples" in work.per(0)["why"]


@pytest.mark.parametrize(
    ("module", "dtype", "size", "share"),
    [
        (nn.Linear(64, 48), torch.bfloat16, 0, 0.0),
        (nn.Linear(64, 50), torch.bfloat16, 50, 1.0),
        (nn.Linear(50, 64), torch.bfloat16, 50, 1.0),
        (nn.Linear(64, 1), torch.bfloat16, 0, 0.0),
        (nn.Linear(64, 50), torch.float32, 0, 0.0),
        (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50)), torch.bfloat16, 50, 150 / (128 + 150)),
    ],
    ids=["aligned", "output", "input", "column", "fp32", "in part"],
)
def test_misaligned_matmuls(module: nn.Module, dtype: torch.dtype, size: int, share: float) -> None:
    """A matrix of 50 columns: 16-bit rows of 100 bytes. Of the first layer in two, the backward has one product."""
    wide = 50 if size and isinstance(module, nn.Linear) and module.in_features == 50 else 64
    x = torch.randn(8, wide, dtype=dtype)
    work = counted(lambda: module.to(dtype)(x).square().sum().backward()).work
    assert work.misaligned_size == size and work.misaligned == pytest.approx(share * work.matmul)
    assert ("misaligned" in work.per(8)) is (size > 0)


def test_no_work_is_not_a_count_of_0() -> None:
    assert Work().per(4) == {
        "per_sample": None,
        "source": "one eager step of this run",
        "why": "the counted step had no product, convolution or attention",
        "no_products": True,
    }
    unknown = Work(recomputed=3, at_least=True, uncounted=("mine.kernel",)).per(4)
    assert unknown["per_sample"] is None and unknown["why"] == "the counted step had nothing with a formula"
    assert not unknown["no_products"]


def test_a_step_without_a_backward_is_none_to_go_by() -> None:
    layer = torch.nn.Linear(8, 16)
    with FlopCount() as count:
        loss = layer(torch.ones(4, 8)).sum()
    assert count.work.total == 2 * 4 * 8 * 16
    assert count.per(4)["per_sample"] is None and count.per(4)["why"] == "the counted step had no backward"
    with count:
        loss.backward()
    assert count.per(4, "a trial") == count.work.per(4, "a trial") and count.per(4)["per_sample"] == 2 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("forward", "reforms"),
    [
        (lambda x: x.cumprod(0), True),
        (lambda x: x.prod(), True),
        (lambda x: x.masked_fill(x > 0, torch.ones(())), True),
        (lambda x: x.masked_fill(x > 0, 1.0), False),
        (lambda x: x.cumsum(0) * torch.tensor([2, 3]).prod(), False),
    ],
)
def test_a_backward_that_torch_would_write_otherwise_is_known_beforehand(forward: Any, reforms: bool) -> None:
    x = torch.linspace(-1, 2, 7, requires_grad=True)
    with (count := FlopCount()):
        forward(x)
    assert count.reforms_backward is reforms
    assert ("would round differently" in str(count.per(7).get("why"))) is reforms
