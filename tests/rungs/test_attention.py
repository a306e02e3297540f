"""The attention rung: one call in place of attention by hand, alone, under the compile rung, and rehearsed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fastloop import FastLoop
from fastloop.errors import NotApplicable
from fastloop.feeds.attention import rewriting
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs.attention import Attention
from tests import models
from tests.bridge.watch.made_up import forget_compiles
from tests.feeds.attention import spellings
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ATTENTION: dict[str, Any] = {"attention": {}}


class Net(torch.nn.Module):
    """Numbers [B, 8] as 8 tokens [B, 8, 16], two layers of attention, their mean [B, 1]."""

    def __init__(self, kind: type[torch.nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.spread, self.out = torch.nn.Linear(1, 16), torch.nn.Linear(16, 1)
        self.layers = torch.nn.ModuleList([kind(), kind()])
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.spread(x[..., None])
        for layer in self.layers:
            found = layer(x)
            x = x + self.dropout(found[0] if isinstance(found, tuple) else found)
        return self.out(x).mean(dim=1)


class Attends(models.Regression):
    def __init__(self, kind: type[torch.nn.Module] = spellings.NanoGpt, lr: float = 0.05, dropout: float = 0.0) -> None:
        super().__init__(lr=lr)
        self.net: Any = Net(kind, dropout)


class Ready(spellings.Spelling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), is_causal=True))


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({}, {}, None),
        ({"backend": "flash"}, {"device": "cuda"}, None),
        ({"backend": "flash"}, {"device": "cuda", "attends_by_hand": (), "attends_by_call": ("net",)}, None),
        ({"backend": "flash"}, {}, "backend flash needs CUDA; this run is on cpu"),
        (
            {},
            {"double_backward": ("Net.step",)},
            "Net.step may take gradients of gradients (create_graph), which fused kernels do not support",
        ),
        ({}, {"compiled_by_user": ("net",)}, "net is compiled by your own code, so its graphs cannot be changed"),
    ],
)
def test_plan(settings: dict[str, Any], facts: dict[str, Any], reason: str | None) -> None:
    rung = Attention(enabled=True, **settings)
    if reason is not None:
        with pytest.raises(NotApplicable) as refused:
            rung.plan(Facts(**{"attends_by_hand": ("net",), **facts}))
        assert str(refused.value) == reason
        return
    change = rung.plan(Facts(**{"attends_by_hand": ("net",), **facts}))
    assert [(action.keys, action.when) for action in change.actions] == [(("model.attention",), "model")]
    assert change.parity == "approximate" and change.evaluation and change.rehearse == "modules"


def test_takes() -> None:
    module = seeded(Attends)
    watcher, trainer = fit(ATTENTION, module, val=models.loader(16), num_sanity_val_steps=0)
    found = evidence(watcher, "attention")
    assert found["modules"] == 2 and found["causal"] == found["replaced"] >= 1
    assert found["calls"] == 2 * (trainer.global_step + 2), "every call of training and validation ran so"
    assert verdict(watcher, "attention").took is True
    assert f"{found['calls']} calls of 2 modules ran in such graphs" in verdict(watcher, "attention").why
    inside = float(trainer.callback_metrics["val_loss"])
    trainer.validate(module, models.loader(16), verbose=False)
    assert float(trainer.callback_metrics["val_loss"]) == inside

    off, _ = fit({}, seeded(Attends))
    assert not evidence(off, "attention")
    assert Attention().verify(Measurement()).took is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            Ready,
            "net.layers.0 already calls scaled_dot_product_attention, and with backend: auto torch picks the kernel",
        ),
        (torch.nn.Tanh, "no inner module has a softmax between two matrix products"),
        (spellings.ReturnsWeights, "no attention was replaced: its weights are also used elsewhere"),
    ],
)
def test_says_why_it_does_not_take(kind: Any, why: str) -> None:
    ours, plain = seeded(Attends, kind=kind), seeded(Attends, kind=kind)
    watcher, _ = fit(ATTENTION, ours)
    fit(None, plain)
    assert (verdict(watcher, "attention").took, verdict(watcher, "attention").why) == (False, why)
    assert same(models.weights(ours), models.weights(plain))


def test_parity() -> None:
    def weights(rungs: Any, **settings: Any) -> dict[str, torch.Tensor]:
        module = seeded(Attends, **settings).double()
        fit(rungs, module, models.loader(batch_size=7), max_epochs=2, precision="64-true")
        return models.weights(module)

    plain, ours = weights(None), weights(ATTENTION)
    assert models.distance(plain, ours) < 1e-12
    assert models.distance(plain, weights(ATTENTION, lr=0.05001)) > 1e-8


def test_the_compile_rung_compiles_what_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def run(graph: Any, _inputs: Any, **_settings: Any) -> Any:
        compiled.append(str(graph.code))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", run)
    ours, plain = seeded(Attends), seeded(Attends)
    watcher, _ = fit({"attention": {}, "compile": {"scope": "model"}}, ours)
    fit(None, plain)
    assert len(compiled) == 1 and compiled[0].count("_nn.scaled_dot_product_attention(") == 2
    assert "softmax" not in compiled[0]
    found = evidence(watcher, "attention")
    assert (found["replaced"], found["calls"]) == (2, 0), "in the graph of the whole, not in those of the modules"
    assert verdict(watcher, "attention").took is True and verdict(watcher, "compile").took is True
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5


def test_float64_is_left_as_written_where_it_is_compiled() -> None:
    """Else the first backward raises: in compiled code, the kernel's own numbers have another type."""
    ours, plain = seeded(Attends).double(), seeded(Attends).double()
    for module in (ours, plain):
        del module.net.layers[1]  # half as much for the compiler
    settings: dict[str, Any] = {"max_epochs": 1, "precision": "64-true"}
    watcher, _ = fit({"attention": {}, "compile": {"scope": "model"}}, ours, models.loader(batch_size=7), **settings)
    fit(None, plain, models.loader(batch_size=7), **settings)
    assert verdict(watcher, "compile").took is True and "in float64" in verdict(watcher, "attention").why
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-12


def rehearsed(module: Any) -> FastLoop:
    """A fit in which the rung is tried on the calls of the first step."""
    config = {"rungs": {"attention": {"enabled": True}}, "watch": {"warmup_steps": 1}, "rehearsal": "on"}
    watcher = FastLoop(config, quiet=True)
    torch.manual_seed(1)
    models.trainer(callbacks=[watcher]).fit(module, models.loader())
    return watcher


def test_a_rehearsal_lets_what_is_equal_pass() -> None:
    watcher = rehearsed(seeded(Attends, dropout=0.1))
    seen = verdict(watcher, "attention")
    assert seen.took is True and seen.rehearsed is not None
    assert seen.rehearsed.deviation is not None and seen.rehearsed.deviation < 1e-4


def test_a_rehearsal_refuses_an_ignored_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def careless(query: Any, key: Any, value: Any, **settings: Any) -> Any:
        asked.append(settings.pop("is_causal"))
        return F.scaled_dot_product_attention(query, key, value, **settings)

    monkeypatch.setattr(rewriting, "ATTEND", careless)
    ours, plain = seeded(Attends), seeded(Attends)
    watcher = rehearsed(ours)
    fit(None, plain)
    assert all(asked) and verdict(watcher, "attention").took is False
    assert "deviate" in verdict(watcher, "attention").why
    assert same(models.weights(ours), models.weights(plain)), "it had a part in the training"


@pytest.mark.parametrize("compiles", [False, True])
def test_its_graphs_are_counted_operator_by_operator(compiles: bool) -> None:
    def train(rungs: Any, watched: bool = True) -> tuple[FastLoop, Any]:
        module = seeded(Attends)
        watch = {"enabled": watched, "warmup_steps": 2}
        watcher = FastLoop({"rungs": {rung: {"enabled": True} for rung in rungs}, "watch": watch}, quiet=True)
        torch.manual_seed(1)
        models.trainer(callbacks=[watcher], max_epochs=2).fit(module, models.loader())
        return watcher, module

    forget_compiles()  # what other tests compiled cannot be told from what the fit runs
    plain, _ = train([])
    ours, module = train(["attention", "compile"] if compiles else ["attention"])
    graphs = counters["stats"]["unique_graphs"]
    assert plain.measurement is not None and ours.measurement is not None and verdict(ours, "attention").took is True
    found, expected = ours.measurement.flops, plain.measurement.flops
    assert found is not None and expected is not None and expected["per_sample"] > 0
    assert ("without data" in found["source"]) is compiles
    if not compiles:
        assert found["per_sample"] == pytest.approx(expected["per_sample"]) and found["at_least"] is False
        forget_compiles()
        _, unwatched = train(["attention"], watched=False)
        assert same(models.weights(module), models.weights(unwatched)), "counting changed the training"
        assert counters["stats"]["unique_graphs"] == graphs, "counting compiled anew"


def test_undo() -> None:
    module, watcher = seeded(Attends), loop(ATTENTION)
    before = {name: set(vars(part)) for name, part in module.named_modules()}
    with pytest.raises(RuntimeError, match="planted"):
        models.trainer(callbacks=[watcher, Raises()]).fit(module, models.loader())
    assert verdict(watcher, "attention").took is True
    for _ in range(2):
        left = {key for name, part in module.named_modules() if name for key in set(vars(part)) ^ before[name]}
        assert not left
        again, _ = fit(ATTENTION, module)
        assert verdict(again, "attention").took is True
