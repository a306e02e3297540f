"""The compile rung: inner modules in place, graphs counted. All but two tests capture graphs and run them eagerly."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse import budget
from fastloop.errors import ConfigError, NotApplicable
from fastloop.feeds.compiled import graph_passes
from fastloop.judge import rehearsal as judge
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs.compile import Compile
from tests import models
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict
from tests.torch_version import TORCH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

COMPILE: dict[str, Any] = {"compile": {}}
FACTS: dict[str, Any] = {"compiler": "g++", "compile_targets": ("net",)}
really_compile = torch.compile


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A backend that runs what it is given, and lists it, instead of Inductor."""
    graphs: list[str] = []

    def run(graph: Any, _inputs: Any) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(_with, run))
    return graphs


def _with(replacement: Any, function: Any, *, backend: Any = None, options: Any = None, dynamic: Any = None) -> Any:
    return really_compile(function, backend=backend or replacement, dynamic=dynamic)


class Head(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.out = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x))


class Own(models.Regression):
    """An inner module of the user's own class."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), Head())


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.wide(self.norm(x)))


class Deep(models.Regression):
    """Eight equal blocks inside the one inner module, behind a layer that gives their inputs gradients."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        blocks = torch.nn.Sequential(*(Block() for _ in range(8)))
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), blocks, Head(8))


class Several(models.Regression):
    """A ModuleList, whose members are called one by one."""

    widths: tuple[int, ...] = (8, 16, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in pairs])
        self.net: Any = None
        self.head = Head(self.widths[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        for layer in self.layers:
            x = torch.relu(layer(x))
        return torch.nn.functional.mse_loss(self.head(x), y)


class Many(Several):
    widths = (8, *range(10, 22))


class Bare(models.Regression):
    """Bare layers, and the work in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)


class Logging(Own):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True)
        return loss


class Breaking(models.Regression):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x) * (1.0 if x.sum().item() > 1e9 else 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.net = Breaking.Net()


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({}, {}, None),
        ({"mode": "reduce-overhead"}, {"device": "cuda"}, None),
        ({"mode": "reduce-overhead"}, {"accumulate": 4}, None),
        ({"scope": "blocks"}, {}, "no list of layers repeats a block; write scope: model"),
        ({}, {"device": "cuda", "accumulate": 4}, None),
        ({}, {"compiled_by_user": ("net", "head")}, "net, head is already compiled by your own code"),
        ({}, {"compiler": None}, "Inductor needs a C++ compiler, and none was found: install gcc or g++"),
        (
            {},
            {"compile_targets": ()},
            "no inner module to compile: the LightningModule has no submodule with parameters",
        ),
        *[
            (
                {"mode": mode},
                {"device": "cuda", **several},
                f"mode {mode} replays CUDA graphs, which overwrite gradients under accumulation; write mode: default",
            )
            for mode in ("reduce-overhead", "max-autotune")
            for several in ({"accumulate": 2}, {"micro_batches": True}, {"accumulation_scheduled": True})
        ],
    ],
)
def test_plan(settings: dict[str, Any], facts: dict[str, Any], reason: str | None) -> None:
    rung = Compile(enabled=True, **settings)
    if reason is not None:
        with pytest.raises(NotApplicable) as refused:
            rung.plan(Facts(**{**FACTS, **facts}))
        assert str(refused.value) == reason
        return
    change = rung.plan(Facts(**{**FACTS, **facts}))
    assert [(action.keys, action.when) for action in change.actions] == [(("model.compile",), "model")]
    assert change.notes == ("compiles net",)
    assert change.parity == "approximate" and change.evaluation


def test_scope() -> None:
    facts = Facts(**FACTS, repeated_blocks=(("net.0", "net.2"), ("net.1",)))

    def note(change: Any) -> str:
        assert change.actions[0].keys == ("model.compile",) and change.rehearse == "modules"
        return change.notes[0]

    blocks = "compiles net.0, net.2, net.1, once for each of 2 shapes"
    auto, model, only = (Compile(enabled=True, scope=scope).plan(facts) for scope in ("auto", "model", "blocks"))
    assert (note(auto), note(model), note(only)) == ("compiles net", "compiles net", blocks)
    assert auto.cheaper is not None and model.cheaper is only.cheaper is None
    assert (note(auto.cheaper), auto.cheaper.first_call_of) == (blocks, ("net.0", "net.1"))
    assert Compile(enabled=True).plan(Facts(**FACTS)).cheaper is None


def test_equal_blocks_are_compiled_once(backend: list[str]) -> None:
    plain, ours, wrong = seeded(Deep), seeded(Deep), seeded(Deep, lr=0.0501)
    watcher, _ = fit({"compile": {"scope": "blocks"}}, ours)
    assert len(backend) == 1 and backend[0].count("torch.tanh") == 1, "the graph of one block"
    assert evidence(watcher, "compile")["modules"] == 8 and evidence(watcher, "compile")["eager_calls"] == 0
    assert verdict(watcher, "compile").took is True
    assert verdict(watcher, "compile").why == "1 graph captured for 8 modules"
    fit(None, plain)
    fit(None, wrong)
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-6
    assert models.distance(models.weights(plain), models.weights(wrong)) > 1e-6
    backend.clear()
    fit({"compile": {"scope": "model"}}, seeded(Deep))
    assert len(backend) == 1 and backend[0].count("torch.tanh") == 9, "the control: all blocks in one graph"


class Tied(models.Regression):
    """Its forward computes the output layer, with another layer's weight, and the loss."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.net = torch.nn.Sequential(Block(), torch.nn.Tanh(), torch.nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(torch.nn.functional.linear(self.net(x), self.net[2].weight[:1]), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(*batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(*batch))


def fit_rehearsed(module: L.LightningModule) -> FastLoop:
    watcher = FastLoop({"rungs": {"compile": {"enabled": True}}, "watch": {"warmup_steps": 1}}, quiet=True)
    models.trainer(callbacks=[watcher]).fit(module, models.loader())
    return watcher


def test_a_forward_with_its_own_loss_is_one_graph(backend: list[str]) -> None:
    plain, ours, wrong = seeded(Tied), seeded(Tied), seeded(Tied, lr=0.0501)
    assert verdict(fit_rehearsed(ours), "compile").took is True
    assert len(backend) == 1 and "mse_loss" in backend[0] and "tanh" in backend[0]
    fit(None, plain)
    fit(None, wrong)
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-6
    assert models.distance(models.weights(plain), models.weights(wrong)) > 1e-6


def test_inner_modules_where_that_graph_fails(backend: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(graph: Any, _inputs: Any) -> Any:
        backend.append(str(graph.code))
        if "mse_loss" in backend[-1]:
            raise RuntimeError("no kernel")
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(_with, run))
    plain, ours = seeded(Tied), seeded(Tied)
    assert verdict(fit_rehearsed(ours), "compile").took is True
    assert ["mse_loss" in graph for graph in backend] == [True, False]
    fit(None, plain)
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-6
    backend.clear()
    assert verdict(fit_rehearsed(seeded(Tied)), "compile").took is True
    assert ["mse_loss" in graph for graph in backend] == [False], "the failure is remembered"


def test_later_evaluation_runs_what_the_fit_kept(backend: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole forward's graph deviates, so the fit has inner modules; so has `trainer.validate` after it."""

    def run(graph: Any, _inputs: Any) -> Any:
        backend.append(str(graph.code))
        wrong = 1.2 if "mse_loss" in backend[-1] else 1.0
        return lambda *args: [wrong * each for each in graph.forward(*args)]

    monkeypatch.setattr(torch, "compile", functools.partial(_with, run))
    watcher = FastLoop({"rungs": {"compile": {"enabled": True}}, "watch": {"warmup_steps": 1}}, quiet=True)
    module, trainer = seeded(Tied), models.trainer(callbacks=[watcher])
    trainer.fit(module, models.loader())
    assert verdict(watcher, "compile").took is True and watcher.plan.planned[0].change.cheaper is None
    backend.clear()
    (found,) = trainer.validate(module, models.loader(), verbose=False)
    assert ["mse_loss" in graph for graph in backend] == [False]
    (plain,) = models.trainer().validate(module, models.loader(), verbose=False)
    assert found["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-4)


def test_both_faults_are_told_where_the_inner_modules_fail_too(
    backend: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no kernel of the loss" if "mse_loss" in str(graph.code) else "no kernel of a layer")

    monkeypatch.setattr(torch, "compile", functools.partial(_with, run))
    why = verdict(fit_rehearsed(seeded(Tied)), "compile").why
    assert why.index("no kernel of the loss") < why.index("no kernel of a layer")


def test_blocks_where_the_model_cannot_pay_back(backend: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second may be spent on each of ten layers; the model has 18, a block two."""
    monkeypatch.setattr(budget.Remembered, "find_first_call_s", lambda *_: None)
    monkeypatch.setattr(judge, "explain_no_pay_back", lambda cost_s, *_: None if cost_s <= 10 else "too dear")
    tried: list[str] = []
    for per_layer_s in (0.5, 1.0, 10.0):
        backend.clear()
        monkeypatch.setattr(budget, "COMPILE_S", {"cpu": (0.0, per_layer_s)})
        settings = {"compile": {"enabled": True, "pay_back": "required"}}
        watcher = FastLoop({"rungs": settings, "watch": {"warmup_steps": 1}}, quiet=True)
        models.trainer(callbacks=[watcher]).fit(seeded(Deep), models.loader())
        tried.append(backend[0] if backend else verdict(watcher, "compile").why)
    whole, blocks, none = tried
    assert (whole.count("torch.tanh"), blocks.count("torch.tanh"), none) == (9, 1, "too dear")


@pytest.mark.parametrize(("sizes", "graphs"), [([9, 5, 6, 4], 1), ([9, 9, 9, 9, 5, 6, 4, 5, 6, 4], 2)])
def test_blocks_follow_sizes_that_the_first_batches_show(sizes: list[int], graphs: int, backend: list[str]) -> None:
    """A rehearsal records calls of the whole model only. The control: sizes that vary later have their own graph."""
    settings = {"compile": {"enabled": True, "scope": "blocks"}}
    watcher = FastLoop({"rungs": settings, "watch": {"warmup_steps": 1}}, quiet=True)
    models.trainer(callbacks=[watcher]).fit(seeded(Deep), of_sizes(2 * sizes))
    assert verdict(watcher, "compile").took is True and len(backend) == graphs


def test_the_module_itself_has_a_name_in_the_plan() -> None:
    change = Compile(enabled=True).plan(Facts(compiler="g++", compile_targets=("",)))
    assert change.notes[0] == "compiles the module's own forward"


@pytest.mark.parametrize("kind", [Own, models.Regression, Several, Many, Bare, Logging])
def test_takes(kind: Any, backend: list[str]) -> None:
    watcher, _ = fit(COMPILE, seeded(kind))
    assert backend, "nothing was handed to the backend"
    assert evidence(watcher, "compile")["graphs"] == len(backend)
    assert not evidence(watcher, "compile")["limit_hit"]
    assert verdict(watcher, "compile").took is True
    plural = "" if len(backend) == 1 else "s"
    assert verdict(watcher, "compile").why.startswith(f"{len(backend)} graph{plural} captured")


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        (1, "4 graphs captured; 8 of 8 calls ran eagerly: no graph fit them"),
        (3, "4 graphs captured for 3 modules; in one of them 8 of 8 calls ran eagerly: no graph fit them"),
    ],
)
def test_calls_are_counted_in_one_module_and_graphs_in_all(modules: int, why: str) -> None:
    counted = {"graphs": 4, "modules": modules, "eager_calls": 8, "of_calls": 8}
    seen = {**counted, "failures": [], "recompiles": [], "breaks": [], "limit_hit": False}
    assert Compile().verify(Measurement(evidence={"compile": seen})).why == why


def test_the_short_last_batch_of_an_epoch_gets_no_graph(backend: list[str]) -> None:
    why = "1 graph captured; 2 of 22 calls ran eagerly: no graph fit them"
    pairs = torch.utils.data.TensorDataset(torch.randn(42, 8), torch.randn(42, 1))  # ten batches of 4, one of 2
    train = torch.utils.data.DataLoader(pairs, batch_size=4)
    watcher, _ = fit(COMPILE, seeded(), train, max_epochs=2)
    assert len(backend) == 1 and evidence(watcher, "compile")["eager_calls"] == 2
    assert verdict(watcher, "compile").took is True and verdict(watcher, "compile").why == why
    backend.clear()
    few = torch.utils.data.DataLoader(torch.utils.data.Subset(pairs, range(18)), batch_size=4)  # one of five is short
    watcher, _ = fit(COMPILE, seeded(), few, max_epochs=5)
    assert len(backend) == 2 and evidence(watcher, "compile")["eager_calls"] == 2


def test_torchs_own_compile_misses_a_bare_sequential(backend: list[str]) -> None:
    module = seeded()
    module.net.compile()
    fit(None, module)
    if TORCH < (2, 14):  # later ones do capture it
        assert backend == []
    backend.clear()
    own = seeded(Own)
    own.net[2].compile()
    fit(None, own)
    assert backend  # the same call captures a class of the user's


def test_does_not_take_what_is_never_called(backend: list[str]) -> None:
    class Aside(models.Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.mse_loss(self.net.forward(x), y)

    watcher, _ = fit(COMPILE, seeded(Aside))
    assert backend == []
    assert verdict(watcher, "compile").took is False
    assert verdict(watcher, "compile").why == "0 graphs captured: nothing was compiled"

    # graphs of a function that the user compiled are not ours
    function = torch.compile(lambda x: x + 1)

    class Apart(Aside):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step((function(batch[0]), batch[1]), batch_idx)

    watcher, _ = fit(COMPILE, seeded(Apart))
    assert len(backend) == 1
    assert verdict(watcher, "compile").why == "0 graphs captured: nothing was compiled"
    assert Compile().verify(Measurement()).took is None


def test_parity(backend: list[str]) -> None:
    def weights(rungs: Any, **settings: Any) -> dict[str, torch.Tensor]:
        module = seeded(Own, **settings)
        fit(rungs, module, max_epochs=2)
        return models.weights(module)

    plain, ours = weights(None), weights(COMPILE)
    assert backend and models.distance(plain, ours) < 1e-6
    assert models.distance(plain, weights(COMPILE, lr=0.0501)) > 1e-6


@pytest.mark.slow
def test_inductor_takes_and_keeps_parity() -> None:
    ours, plain, wrong = seeded(Own), seeded(Own), seeded(Own, lr=0.051)
    watcher, trainer = fit(COMPILE, ours, val=models.loader(16), num_sanity_val_steps=0)
    assert verdict(watcher, "compile").took is True and evidence(watcher, "compile")["graphs"] >= 1
    inside = float(trainer.callback_metrics["val_loss"])
    trainer.validate(ours, models.loader(16), verbose=False)
    assert float(trainer.callback_metrics["val_loss"]) == inside
    fit(None, plain)
    fit(None, wrong)
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    assert models.distance(models.weights(plain), models.weights(wrong)) > 1e-5


@pytest.mark.slow
def test_compiled_dropout_draws_what_it_draws_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, dropout and shuffling share a random stream: with other draws, the second epoch has another order."""

    def weights(rungs: Any) -> dict[str, torch.Tensor]:
        module = seeded(Own)
        module.net.insert(2, torch.nn.Dropout(0.5))
        fit(rungs, module, DataLoader(models.pairs(), batch_size=8, shuffle=True), max_epochs=2)
        return models.weights(module)

    plain = weights(None)
    assert models.distance(plain, weights(COMPILE)) < 1e-5
    torch._dynamo.reset()
    monkeypatch.setattr(graph_passes, "_list_options", lambda mode: torch._inductor.list_mode_options(mode))
    assert models.distance(plain, weights(COMPILE)) > 1e-3, "the control: as Inductor does it by default"


def test_undo(backend: list[str]) -> None:
    module, watcher = seeded(Own), loop(COMPILE)
    before = {name: set(vars(part)) for name, part in module.named_modules()}
    trainer = models.trainer(callbacks=[watcher])
    trainer.fit(module, models.loader())

    def differing() -> set[str]:
        return {key for name, part in module.named_modules() if name for key in set(vars(part)) ^ before[name]}

    assert backend and not differing()
    first = len(backend)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, models.loader())
    assert verdict(watcher, "compile").took is True and len(backend) > first

    module, watcher = seeded(Own), loop(COMPILE)
    with pytest.raises(RuntimeError, match="planted"):
        models.trainer(callbacks=[watcher, Raises()]).fit(module, models.loader())
    assert not differing() and verdict(watcher, "compile").took is True


def test_ten_fits_in_one_process_never_reach_the_recompile_limit(backend: list[str]) -> None:
    module = seeded(Own)
    for _ in range(10):
        watcher, _ = fit(COMPILE, module, limit_train_batches=2)
        assert verdict(watcher, "compile").took is True
        assert not evidence(watcher, "compile")["limit_hit"]


def test_alike_modules_share_their_graphs(backend: list[str]) -> None:
    class Alike(Several):
        widths = (8,) * 14

    fit(COMPILE, seeded(Alike))
    # 13 layers of one shape: the first sees an input without gradient, all others one with; and the head
    assert len(backend) == 3


def test_checkpoint_keys_and_copies(tmp_path: Path, backend: list[str]) -> None:
    copies: dict[str, Any] = {}

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            copies["deep"] = copy.deepcopy(pl_module)
            copies["pickled"] = pickle.loads(pickle.dumps(pl_module))

    for kind in (Own, Bare):
        keeper = ModelCheckpoint(dirpath=tmp_path / kind.__name__, save_last=True)
        module = seeded(kind)
        watcher, _ = fit(COMPILE, module, callbacks=(Copies(), keeper), enable_checkpointing=True)
        assert verdict(watcher, "compile").took is True
        stored = torch.load(keeper.last_model_path, weights_only=False)["state_dict"]
        assert stored.keys() == seeded(kind).state_dict().keys()
        part, x = "net" if kind is Own else "", torch.ones(2, 8)
        for made in copies.values():
            inner, original = made.get_submodule(part), module.get_submodule(part)
            assert torch.equal(inner(x), original(x))
            with torch.no_grad():
                next(inner.parameters()).fill_(1.0)
            assert not torch.equal(inner(x), original(x))  # the copy calls its own weights


def test_weight_averaging_goes_on(backend: list[str]) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging
    ours, plain = seeded(Own), seeded(Own)
    watcher, _ = fit(COMPILE, ours, callbacks=(averaging(decay=0.5),), max_epochs=2)
    fit(None, plain, callbacks=(averaging(decay=0.5),), max_epochs=2)
    assert verdict(watcher, "compile").took is True
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-6
    without = seeded(Own)
    fit(None, without, max_epochs=2)
    assert models.distance(models.weights(plain), models.weights(without)) > 1e-6


def of_sizes(sizes: list[int]) -> Any:
    """Batches of these sizes."""
    places = [list(range(size)) for size in sizes]
    return torch.utils.data.DataLoader(models.pairs(max(sizes)), batch_sampler=places)


@pytest.mark.parametrize("dynamic", ["auto", None])
def test_a_recompile_for_sizes_that_vary_is_said_with_its_cause(dynamic: Any, backend: list[str]) -> None:  # C1
    watcher, _ = fit({"compile": {"dynamic": dynamic}}, seeded(Own), of_sizes([8, 5, 6, 4, *range(7, 20)]))
    cause = "tensor 'args[0]' size mismatch at index 0. expected 8, actual 4"
    assert len(backend) == 2 and evidence(watcher, "compile")["recompiles"] == [cause]
    found = f"2 graphs captured; recompiled: {cause}; 2 of 17 calls ran eagerly: no graph fit them"
    assert (verdict(watcher, "compile").took, verdict(watcher, "compile").why) == (True, found)


def test_a_storm_ends_in_eager_with_its_reason(backend: list[str]) -> None:  # C1
    ours, plain = seeded(Own), seeded(Own)
    watcher, _ = fit({"compile": {"dynamic": False}}, ours, of_sizes(list(range(1, 21))))
    fit(None, plain, of_sizes(list(range(1, 21))))
    assert len(backend) == 2 and not evidence(watcher, "compile")["limit_hit"]
    assert models.distance(models.weights(ours), models.weights(plain)) < 1e-6
    assert verdict(watcher, "compile").took is False
    storm = "net: 10 of the last 10 calls matched none of 2 graphs: eager from then on"
    assert verdict(watcher, "compile").why.endswith(storm)


def test_a_storm_in_training_is_said_beside_a_few_other_calls(backend: list[str]) -> None:
    class Asks(Own):
        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                self.net(torch.ones(3, 8))

    watcher, _ = fit({"compile": {"dynamic": False}}, seeded(Asks), of_sizes(list(range(1, 21))))
    assert verdict(watcher, "compile").took is False
    assert "18 of 20 calls ran eager" in verdict(watcher, "compile").why
    assert verdict(watcher, "compile").why.endswith("eager from then on")


def test_graph_breaks_are_said_with_their_line(backend: list[str]) -> None:  # C2
    watcher, _ = fit(COMPILE, seeded(Breaking))
    line = inspect.getsourcelines(Breaking.Net.forward)[1] + 1
    (cause,) = evidence(watcher, "compile")["breaks"]
    assert ".item()" in cause and cause.endswith(f" at tests/rungs/test_compile.py:{line}")
    assert f"graph break: {cause}" in verdict(watcher, "compile").why
    assert verdict(watcher, "compile").took is True


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # C4
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    reason = "Inductor needs a C++ compiler, and none was found: install gcc or g++"
    ours, plain = seeded(Own), seeded(Own)
    watcher, _ = fit(COMPILE, ours)
    fit(None, plain)
    assert (verdict(watcher, "compile").took, verdict(watcher, "compile").why) == (False, reason)
    assert same(models.weights(ours), models.weights(plain))

    strict = loop(COMPILE, strict=True)
    with pytest.raises(ConfigError) as error:
        models.trainer(callbacks=[strict]).fit(seeded(Own), models.loader())
    assert error.value.why.endswith(reason) and error.value.key == "rungs.compile"


def test_a_failing_backend_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:  # C4
    calls = []

    def broken(graph: Any, _inputs: Any) -> Any:
        calls.append(graph)
        raise OSError("no space left\nfor kernels")

    monkeypatch.setattr(torch, "compile", functools.partial(_with, broken))
    ours, plain = seeded(Own), seeded(Own)
    watcher, trainer = fit(COMPILE, ours)
    fit(None, plain)
    assert len(calls) == 1, "it was tried again"
    assert trainer.global_step == 8 and same(models.weights(ours), models.weights(plain))
    assert verdict(watcher, "compile").took is False
    why = verdict(watcher, "compile").why
    assert why == (
        "fell back to eager: net: BackendCompilerFailed: backend='broken' raised: OSError: no space left for kernels"
    )
    assert "_compiled_call_impl" not in vars(ours.net)


def rehearsed(module: Any, train: Any = None) -> FastLoop:
    """A fit in which the rung is tried on the calls of the first step."""
    config = {"rungs": {"compile": {"enabled": True}}, "watch": {"warmup_steps": 1}, "rehearsal": "on"}
    watcher = FastLoop(config, quiet=True)
    torch.manual_seed(1)
    models.trainer(callbacks=[watcher]).fit(module, train or models.loader())
    return watcher


def test_the_first_steps_sizes_are_known_to_the_first_graph(backend: list[str]) -> None:
    class Twice(Own):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return super().training_step(batch, batch_idx) + super().training_step((x[:3], y[:3]), batch_idx)

    watcher = rehearsed(seeded(Twice))
    assert verdict(watcher, "compile").took is True
    assert len(backend) == 1 and evidence(watcher, "compile")["eager_calls"] == 0


def test_the_second_batchs_sizes_are_known_to_the_first_graph(backend: list[str]) -> None:
    sizes = [6, 5, *range(7, 20)]
    watcher = rehearsed(seeded(Own), of_sizes(sizes))
    assert len(backend) == 1 and evidence(watcher, "compile")["eager_calls"] == 0
    assert verdict(watcher, "compile").why == "1 graph captured"


def test_what_fails_while_it_is_tried_is_told_to_whoever_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(graph: Any, _inputs: Any) -> Any:
        calls.append(graph)
        raise OSError("no space left")

    monkeypatch.setattr(torch, "compile", functools.partial(_with, broken))
    ours, plain = seeded(Own), seeded(Own)
    watcher = rehearsed(ours)
    fit(None, plain)
    assert calls and same(models.weights(ours), models.weights(plain))
    assert verdict(watcher, "compile").took is False
    assert "no space left" in verdict(watcher, "compile").why and "fell back" not in verdict(watcher, "compile").why


def test_errors_of_the_users_own_pass(backend: list[str]) -> None:
    class Wrong(Own):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(5, 1))

    with pytest.raises(RuntimeError, match=r"shape|size"):
        fit(COMPILE, seeded(Wrong))


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_what_the_user_compiled_is_not_doubled(how: str, backend: list[str]) -> None:  # C8
    compiler: Callable[..., Any] = torch.compile

    class Compiled(Own):
        def __init__(self) -> None:
            super().__init__()
            if how == "in place":
                self.net.compile(backend="eager")
            else:
                self.net = compiler(self.net)

    module = seeded(Compiled)
    before = module.net._compiled_call_impl if how == "in place" else type(module.net)
    watcher, _ = fit(COMPILE, module)
    assert verdict(watcher, "compile").took is False
    assert verdict(watcher, "compile").why == "net is already compiled by your own code"
    assert before == (module.net._compiled_call_impl if how == "in place" else type(module.net))


@pytest.mark.parametrize("fact", ["double_backward", "keeps_graph"])
def test_graphs_that_are_used_twice_are_refused(fact: str) -> None:
    with pytest.raises(NotApplicable, match=r"Net\.training_step .*_graph"):
        Compile(enabled=True).plan(Facts(**{**FACTS, fact: ("Net.training_step",)}))
