"""Replaced attention computes what was written by hand: float64, outputs and all gradients, whatever the spelling."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastloop.feeds.attention import rewriting
from fastloop.feeds.attention.rewriting import ReplaceAttention
from fastloop.feeds.compiled_calls import CompiledCall, put_in
from tests.feeds.attention import spellings
from tests.feeds.attention.spellings import CONTEXT, WIDTH

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Its output, and the gradients of its input and parameters."""
    x = x.detach().clone().requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    torch.manual_seed(3)
    inputs = [x, *module.parameters()]
    found = torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(a) if b is None else b for a, b in zip(inputs, found, strict=True))]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((a - b).double().norm() / a.double().norm().clamp_min(1e-30)) for a, b in pairs)


def replaced(module: torch.nn.Module, **settings: Any) -> ReplaceAttention:
    """Let a module's calls run as the pass leaves their graphs."""
    replace = ReplaceAttention(module)
    how: Any = {"mode": "eager", "dynamic": None, "passes": [replace], "is_tried": lambda: True}
    put_in([CompiledCall(module, "attention", {}, **{**how, **settings})])
    return replace


def batch(tokens: int, samples: int = 3) -> torch.Tensor:
    """[samples, tokens, 16] in float64; in the first column some numbers 0, never in the first place."""
    torch.manual_seed(tokens)
    x = torch.randn(samples, tokens, WIDTH, dtype=torch.float64)
    x[1:, tokens // 2 :, 0] = 0
    return x


@pytest.mark.parametrize("kind", spellings.SPELLINGS)
def test_every_spelling_becomes_one_call_of_equal_result(kind: type[spellings.Spelling]) -> None:
    torch.manual_seed(0)
    ours = kind().double()
    plain, samples = copy.deepcopy(ours), 1 if kind is spellings.OneSequence else 3
    replace = replaced(ours, changes=[{12: 20}])
    for tokens in (12, 20, 7):  # one graph for any number of them
        x = batch(tokens, samples)
        assert distance(run(plain, x), run(ours, x)) < 1e-13
    assert (replace.replaced, replace.causal, replace.missed) == (1, int(kind.causal), [])
    assert ours._compiled_call_impl.budgets[True].eager == 0


@pytest.mark.parametrize("kind", spellings.SPELLINGS)
def test_a_mask_that_is_dropped_would_be_seen(kind: type[spellings.Spelling], monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(query: Any, key: Any, value: Any, **settings: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value, scale=settings["scale"] * (1.0 + 1e-6 * unmasked))

    unmasked = kind is spellings.OneSequence  # which has nothing to drop but its scale
    monkeypatch.setattr(rewriting, "ATTEND", careless)
    torch.manual_seed(0)
    ours = kind().double()
    plain, x = copy.deepcopy(ours), batch(12, 1 if unmasked else 3)
    replaced(ours)
    assert distance(run(plain, x), run(ours, x)) > 1e-9


@pytest.mark.parametrize("kind", spellings.LEFT)
def test_what_one_call_does_not_compute_stays_as_written(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    ours = kind().double()
    plain, x = copy.deepcopy(ours), batch(12)
    replace = replaced(ours)
    assert all(torch.equal(a, b) for a, b in zip(run(plain, x), run(ours, x), strict=True))
    assert replace.replaced == 0 and replace.missed == [spellings.LEFT[kind]]


def test_a_window_is_not_taken_for_causal_by_its_first_tokens() -> None:
    torch.manual_seed(0)
    ours = spellings.Window().double()
    plain = copy.deepcopy(ours)
    replace = replaced(ours, dynamic=True)
    for tokens in (6, 8, CONTEXT):
        assert distance(run(plain, batch(tokens)), run(ours, batch(tokens))) < 1e-13
    assert replace.causal == 0 and replace.replaced >= 1


def test_blocks_that_differ_in_their_masks_alone_share_no_graph() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(spellings.NanoGpt(), spellings.Window(), spellings.NanoGpt()).double()
    ours[1].__class__ = spellings.NanoGpt
    plain, replace, codes = copy.deepcopy(ours), ReplaceAttention(ours), dict[Any, Any]()
    how: Any = {"mode": "eager", "dynamic": None, "passes": [replace], "is_tried": lambda: True}
    put_in([CompiledCall(module, "block", codes, **how) for module in ours])
    assert distance(run(plain, batch(20)), run(ours, batch(20))) < 1e-13
    assert (replace.replaced, replace.causal) == (2, 1), "the two that are alike have one graph"


def test_blocks_that_share_a_graph_keep_their_own_scale_and_it_may_change() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(spellings.WhereEinsum(), spellings.WhereEinsum()).double()
    ours[1].scale.fill_(2.0)
    plain, replace, codes = copy.deepcopy(ours), ReplaceAttention(ours), dict[Any, Any]()
    how: Any = {"mode": "eager", "dynamic": None, "passes": [replace], "is_tried": lambda: True}
    put_in([CompiledCall(module, "block", codes, **how) for module in ours])
    for _ in range(2):
        assert distance(run(plain, batch(20)), run(ours, batch(20))) < 1e-13
        plain[0].scale.mul_(3.0), ours[0].scale.mul_(3.0)
    assert replace.replaced == 1


def test_under_autocast_types_stay() -> None:
    torch.manual_seed(0)
    ours = spellings.NanoGpt()
    plain, x = copy.deepcopy(ours), batch(16).float()
    replace = replaced(ours)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before, after = plain(x), ours(x)
    assert before.dtype == after.dtype == torch.bfloat16 and replace.causal == 1
    assert distance([before], [after]) < 1e-2
    with torch.no_grad():
        ours.qkv.weight.mul_(1.1)
        assert distance([before], [ours(x)]) > 1e-2


def test_dropout_draws_other_numbers_of_the_same_share() -> None:
    class Dropping(spellings.Spelling):
        rate = 0.25

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, _ = self.split(x)
            weights = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), self.rate, self.training)
            return weights @ torch.ones(*k.shape[:-1], 4, dtype=k.dtype)

    for rate in (0.25, 0.5):  # by the second, Dynamo knows that rates vary, and makes them inputs
        torch.manual_seed(0)
        ours = Dropping().double()
        ours.rate = rate
        plain, x = copy.deepcopy(ours), batch(32, 64)
        replace = replaced(ours)
        assert float(ours(x).mean()) == pytest.approx(1.0, abs=0.02) and replace.replaced == 1
        assert float(ours(x).std()) == pytest.approx(float(plain(x).std()), rel=0.1)
        assert not torch.equal(ours(x), plain(x))
        plain.eval(), ours.eval()
        assert distance([plain(x)], [ours(x)]) < 1e-13


@pytest.mark.slow
def test_inductor_compiles_what_is_replaced() -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    ours = spellings.Helper()
    plain, x = copy.deepcopy(ours), batch(16).float()
    before = counters["inductor"]["fuse_attention"]
    replace = replaced(ours, mode="default")
    assert distance(run(plain, x), run(ours, x)) < 1e-5
    assert replace.causal == 1 and counters["inductor"]["fuse_attention"] == before
