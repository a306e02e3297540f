"""Replaced attention computes what was written by hand: float64, outputs and all gradients, whatever the spelling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastloop.feeds.attention import rewriting
from fastloop.feeds.attention.rewriting import ReplaceAttention
from fastloop.feeds.compiled.calls import CompiledCall, put_in
from tests.feeds.attention import spellings
from tests.feeds.attention.spellings import CONTEXT, WIDTH

pytestmark = [pytest.mark.timeout(250), pytest.mark.usefixtures("fresh_dynamo")]


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


class BarsAllByAdding(spellings.Spelling):
    """All tokens of the samples whose last number is below 0 are barred, by a number that is added."""

    number = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        mask = torch.zeros_like(x[:, :, 0]).masked_fill((x[:, :, 0] == 0) | (x[:, -1:, -1] < 0), self.number)
        return self.join((q @ k.transpose(-2, -1) + mask[:, None, None, :]).softmax(-1) @ v)


@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
def test_gradients_of_rows_that_an_added_mask_bars(number: float) -> None:
    """The kernel's own backward is off by a factor there."""
    torch.manual_seed(0)
    ours, x = BarsAllByAdding(), batch(12).float()
    ours.number = number
    plain, replace = copy.deepcopy(ours), replaced(ours)
    (out, _, qkv, _, *rest), (our_out, _, our_qkv, _, *our_rest) = run(plain, x), run(ours, x)
    values = slice(2 * WIDTH, None)  # the scores get no gradients from these rows, as their fill gives them none
    assert distance([out, qkv[values], *rest], [our_out, our_qkv[values], *our_rest]) < 1e-5
    assert (x[:, -1, -1] < 0).any() and replace.replaced == 1


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


class Passed(spellings.Spelling):
    """The mask comes as an argument: True where a score counts, or how many tokens back."""

    def forward(self, x: torch.Tensor, allowed: Any) -> torch.Tensor:
        q, k, v = self.split(x)
        places = torch.arange(x.shape[1])
        apart = places[:, None] - places
        if not isinstance(allowed, torch.Tensor):
            allowed = (apart >= 0) & (apart < allowed)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~allowed[: x.shape[1], : x.shape[1]], -1e9)
        return self.join(torch.softmax(scores, dim=-1) @ v)


class Biased(spellings.Spelling):
    """A bias that is all zeros at first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        return self.join(torch.softmax(q @ k.transpose(-2, -1) + self.past[: x.shape[1], : x.shape[1]], dim=-1) @ v)


def let_see_ahead(module: Any) -> None:
    module.past[:, :4] = True


def let_see_all(module: Any) -> None:
    module.past = torch.ones_like(module.past)


def narrow(module: Any) -> None:
    module.given -= 27


def pass_another(module: Any) -> None:
    module.given = torch.ones_like(module.past)


CHANGES = [
    *((spellings.NanoGpt, None, change) for change in (let_see_ahead, let_see_all)),
    (Biased, None, let_see_ahead),
    *((Passed, "past", change) for change in (let_see_ahead, pass_another)),
    (Passed, 30, narrow),
]


@pytest.mark.parametrize(("kind", "given", "change"), CHANGES)
def test_a_mask_may_change_in_training(kind: type[spellings.Spelling], given: Any, change: Any) -> None:
    torch.manual_seed(0)
    ours: Any = kind().double()
    ours.past = torch.zeros_like(ours.past) if kind is Biased else ours.past == 1
    ours.given = ours.past if given == "past" else given
    plain = copy.deepcopy(ours)
    replace = replaced(ours)

    def apart() -> float:
        one, other = (
            module(batch(12), *([] if given is None else [module.given])).detach() for module in (plain, ours)
        )
        return float((one - other).abs().max())

    assert apart() < 1e-13 and replace.replaced == 1
    if given == 30:
        plain.given, ours.given = 29, 29  # from here on it is a number that varies
        assert apart() < 1e-13
    change(plain), change(ours)
    assert apart() < 1e-13
    assert ours._compiled_call_impl.budgets[True].eager == 0, "a new graph serves the changed mask"


def test_blocks_that_share_a_graph_may_change_their_masks_apart() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(spellings.NanoGpt(), spellings.NanoGpt()).double()
    plain, replace, codes = copy.deepcopy(ours), ReplaceAttention(ours), dict[Any, Any]()
    how: Any = {"mode": "eager", "dynamic": None, "passes": [replace], "is_tried": lambda: True}
    put_in([CompiledCall(module, "block", codes, **how) for module in ours])
    for place in (None, 1, 0, 1):
        if place is not None:
            let_see_ahead(plain[place]), let_see_ahead(ours[place])
        assert distance(run(plain, batch(20)), run(ours, batch(20))) < 1e-13
    assert replace.replaced == 2, "one for both, and one for both once their masks change"


def test_a_mask_that_is_written_anew_keeps_its_graph() -> None:
    ours = spellings.NanoGpt().double()
    replace = replaced(ours)
    for _ in range(20):  # as DDP does in every step
        run(ours, batch(12))
        ours.past.copy_(ours.past.clone())
    assert replace.replaced == replace.causal == 1


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
