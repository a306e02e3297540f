"""Rungs are tried on the first step's calls: what breaks is off, what was tried leaves no trace."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse import budget, compared, memory, recorded_calls, rehearsal
from fastloop.bridge.apply.rehearse.played import RunResults, compare_results
from fastloop.errors import ConfigError
from fastloop.evidence.model import dynamo_graphs
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.loss.cross_entropy import reduce_rows
from fastloop.records.plan import Action, Applied, Change, Site
from fastloop.rungs.amp import Amp
from fastloop.rungs.layout import Layout
from tests.bridge.launch import python

Forward = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a module's forward to the one that a planted rung puts in its place."""


class Inner(torch.nn.Module):
    """Dropout, running statistics and a counter, so that a rehearsal has what it must put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.3)
        )
        self.head, self.calls = torch.nn.Linear(16, 1), 0

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.head(self.layers(x))
        return out if scale is None else scale * out


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Inner()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0], scale=None), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Module):
    """Two optimizers, and a module that is called twice a step, once without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        with torch.no_grad():
            target = self.net(batch[0])
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1] + 0.1 * target)
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.net.layers, self.net.head)]


def data(samples: int = 48) -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(0)
    pairs = TensorDataset(torch.randn(samples, 8, generator=draws), torch.randn(samples, 1, generator=draws))
    return DataLoader(pairs, batch_size=8, shuffle=True)


def plant(monkeypatch: pytest.MonkeyPatch, forward: Forward, kind: Any = Amp, **change: Any) -> None:
    """Let a rung put another forward into ``net``."""

    def do(site: Site) -> Applied:
        net = site.module.net
        net.forward = forward(type(net).forward.__get__(net))
        return Applied(undo=lambda: vars(net).pop("forward", None) and None, probe=lambda: {"dtype": "torch.bfloat16"})

    settings: dict[str, Any] = {"parity": "approximate", "rehearse": "modules", **change}
    wanted = Change(actions=(Action(when="model", do=do),), **settings)
    monkeypatch.setattr(kind, "plan", lambda self, facts: wanted)


def config(*rungs: str, **more: Any) -> dict[str, Any]:
    return {"rungs": {rung: {"enabled": True} for rung in rungs}, "watch": {"warmup_steps": 2}, **more}


class Brief(Module):
    """Ends long before the time that its run is said to take."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.global_step >= 20


def fit(
    settings: Any,
    module: Module | None = None,
    *,
    steps: int = 12,
    by_ladder: tuple[str, ...] = (),
    train: Any = None,
    **trainer: Any,
) -> tuple[FastLoop | None, Module, Any]:
    """A fit of `steps`; the module, and everything that two equal fits have in common."""
    torch.manual_seed(3)
    module = module or Module()
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    loop = None
    if settings is not None:
        loop = FastLoop(settings, quiet=True)
        object.__setattr__(loop.config, "by_ladder", frozenset(by_ladder))
    run = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if loop is None else [loop],
        **trainer,
    )
    torch.manual_seed(4)
    run.fit(module, data() if train is None else train)
    states = [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for optimizer in run.optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    weights = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    return loop, module, (module.losses, weights, states, torch.get_rng_state().tolist(), module.net.calls)


def read(loop: FastLoop | None, rung: str = "amp") -> tuple[bool | None, str]:
    assert loop is not None
    return next((each.took, each.why) for each in loop.verdicts if each.rung == rung)


class Breaks(torch.autograd.Function):
    """Whole forward, broken backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("expected stride 4, got 8")


def _raise(error: BaseException) -> Forward:
    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise error

        return broken

    return forward


HELD: list[weakref.ref[torch.Tensor]] = []


def fail(*_: Any, **__: Any) -> Any:
    kept = torch.ones(4)
    HELD.append(weakref.ref(kept))
    raise RuntimeError("no kernel")


def test_nothing_keeps_what_a_failed_trial_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors would stay on the device, and a checkpoint's hooks in place."""
    HELD.clear()
    plant(monkeypatch, lambda _: fail)
    gc.disable()
    try:
        loop, _, _ = fit(config("amp"))
        assert "no kernel" in read(loop)[1]
        assert HELD and not any(each() is not None for each in HELD)
    finally:
        gc.enable()


FAULTS: dict[str, tuple[Forward, str]] = {
    "raises in forward": (_raise(RuntimeError("no kernel")), "RuntimeError: no kernel"),
    "raises in backward": (lambda old: lambda *a, **k: Breaks.apply(old(*a, **k)), "AssertionError: expected stride 4"),
    "out of memory": (_raise(torch.cuda.OutOfMemoryError("CUDA out of memory: 2 GiB")), "not enough memory"),
    "deviates": (lambda old: lambda *a, **k: 1.2 * old(*a, **k), "deviate by 0.2"),
    "not finite": (lambda old: lambda *a, **k: old(*a, **k) * float("nan"), "not finite"),
    "other shape": (lambda old: lambda *a, **k: old(*a, **k)[:4], "a different shape"),
}


@pytest.mark.parametrize("kind", [Module, Manual])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_is_off_and_training_goes_on_as_if_nobody_had_asked(
    fault: str, kind: type[Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, reason = FAULTS[fault]
    _, _, plain = fit(None, kind())
    plant(monkeypatch, forward)
    loop, _, rehearsed = fit(config("amp"), kind())
    took, why = read(loop)
    assert took is False and reason in why, why
    assert rehearsed == plain, "bit for bit"


@pytest.mark.parametrize("kind", [Module, Manual])
def test_what_works_is_on_and_was_tried_without_a_trace(kind: type[Module], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def same(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return original(*args, **kwargs)

        return forward

    _, _, plain = fit(None, kind())
    plant(monkeypatch, same)
    loop, module, rehearsed = fit(config("amp"), kind())
    assert loop is not None and read(loop)[0] is True
    record = next(each for each in loop.verdicts if each.rung == "amp").rehearsed
    assert record is not None and record.deviation == 0 and record.eager_ms and record.changed_ms
    calls = module.net.calls
    first = 2 if kind is Manual else 1
    assert len(seen) == calls - first, "all steps but the first ran with it; what the plays have noted was put back"
    assert rehearsed == plain, "bit for bit"


def test_without_the_guard_a_rehearsal_leaves_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""

    @contextlib.contextmanager
    def careless(*modules: Any) -> Iterator[None]:
        yield

    _, _, plain = fit(None)
    plant(monkeypatch, lambda old: old)
    monkeypatch.setattr(recorded_calls, "preserve_state", careless)
    assert fit(config("amp"))[2] != plain


def test_the_first_step_and_the_sanity_validation_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            at.append(run.global_step)
            return original(*args, **kwargs)

        return forward

    plant(monkeypatch, note, evaluation=True)
    module, loop = Module(), FastLoop(config("amp"), quiet=True)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    run = L.Trainer(max_steps=8, accelerator="cpu", accumulate_grad_batches=2, callbacks=[loop], **quiet)
    run.fit(module, data(), data(8))
    assert read(loop)[0] is True
    assert min(at) == 1, "two batches make the first step, and both ran as they were"
    at.clear()
    run.validate(module, data(8), verbose=False)
    assert at, "evaluation after the fit computes what it computed inside it"


def test_a_validation_has_a_ladders_rung_only_if_the_fit_before_it_kept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ladder's rung has to pay, which only a fit can show; what the user named is used."""
    at: list[int] = []

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (at.append(1), original(*args, **kwargs))[1]

    plant(monkeypatch, note, evaluation=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

    def validate(loop: FastLoop) -> bool:
        at.clear()
        L.Trainer(accelerator="cpu", callbacks=[loop], **quiet).validate(Module(), data(8), verbose=False)
        return bool(at)

    def make(*by_ladder: str) -> FastLoop:
        loop = FastLoop(config("amp"), quiet=True)
        object.__setattr__(loop.config, "by_ladder", frozenset(by_ladder))
        return loop

    assert validate(make()) and not validate(make("amp"))
    loop, _, _ = fit(config("amp"), steps=3000, by_ladder=("amp",), max_time={"seconds": 60}, module=Brief())
    assert loop is not None and validate(loop) is read(loop)[0]
    loop, _, _ = fit(config("amp"), steps=4, by_ladder=("amp",))
    assert loop is not None and read(loop)[0] is False and not validate(loop)


def test_a_broken_rung_stays_off_in_a_later_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, _raise(RuntimeError("no kernel")), evaluation=True)
    loop, module, _ = fit(config("amp"), limit_val_batches=1)
    assert loop is not None and read(loop)[0] is False
    trainer = module.trainer
    assert trainer.validate(module, data(8), verbose=False)


def test_too_slow_is_off_where_a_ladder_switched_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.05)
            return original(*args, **kwargs)

        return forward

    plant(monkeypatch, slow)
    loop, _, _ = fit(config("amp"), steps=3)
    assert read(loop)[0] is True, "the user's own word stands"
    long = {"steps": 30_000, "limit_train_batches": 3, "max_epochs": 10_000, "max_time": {"seconds": 60}}
    loop, _, _ = fit(config("amp"), Brief(), by_ladder=("amp",), **long)
    took, why = read(loop)
    assert took is False and "slower on the calls of the first step" in why


def test_a_short_run_is_not_lengthened(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda old: old)
    loop, _, _ = fit(config("amp"), steps=4, by_ladder=("amp",))
    took, why = read(loop)
    assert took is False and "too short to try it" in why
    assert read(fit(config("amp"), steps=4)[0])[0] is True, "the user's own word stands"


class LineSearch(Module):
    """Its optimizer has no fused form."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=1e-2)


def test_what_the_optimizers_rule_out_is_said_before_that_time_is_short() -> None:
    loop, _, _ = fit(config("fused"), LineSearch(), steps=4, by_ladder=("fused",))
    assert read(loop, "fused") == (False, "LBFGS has no fused form")
    assert "too short to try it" in read(fit(config("fused"), steps=4, by_ladder=("fused",))[0], "fused")[1]


def test_what_cannot_pay_back_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        calls.append(1)
        return original

    plant(monkeypatch, note, pay_back="required")
    loop, _, _ = fit(config("amp"))
    took, why = read(loop)
    assert took is False and "it takes about" in why and "this run has only 11 left" in why and not calls
    plant(monkeypatch, note, pay_back="auto")
    loop, _, _ = fit(config("amp"), by_ladder=("amp",))
    assert read(loop)[0] is False and not calls
    assert read(fit(config("amp"))[0])[0] is True and calls, "it is not weighed where the user asked for it"
    monkeypatch.setattr(rehearsal.Remembered, "find_first_call_s", lambda *_: 0.0)
    calls.clear()
    fit(config("amp"), by_ladder=("amp",))
    assert calls, "a cost that is known counts in place of the guess"


SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a slice": lambda x: torch.cat([x, x], 1)[:, :8],
    "every second row": lambda x: torch.cat([x, x], 0)[::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(8, 8),
}


STRIDES: list[tuple[int, ...]] = []
"""Not in a closure of the model: plays would be taken back out of it."""


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", SLICES)
def test_arguments_are_played_with_their_strides(
    name: str, differentiable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clone` makes slices contiguous: code compiled for that does not fit the training's own calls."""

    class Slices(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            given = SLICES[name](batch[0].clone().requires_grad_(differentiable))
            return torch.nn.functional.mse_loss(self.net(given), batch[1][: len(given)])

    def look(old: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, **more: Any) -> Any:
            STRIDES.append(x.stride())
            return old(x, **more)

        return forward

    STRIDES.clear()
    plant(monkeypatch, look)
    loop, _, _ = fit(config("amp"), Slices())
    assert read(loop)[0] and len(STRIDES) > 11, "plays, and all steps but the first"
    assert len(set(STRIDES)) == 1


@pytest.mark.parametrize(("part", "keeps"), [(lambda x: x[:, :-1], True), (lambda x: x[:, 0], False)])
def test_a_copy_of_a_slice_takes_about_its_own_memory(part: Any, keeps: bool) -> None:
    """The first token of each sequence would take that of all."""
    given = part(torch.randn(4, 64, 8))
    copied = recorded_calls.copy_with_strides(given)
    assert torch.equal(copied, given) and (copied.stride() == given.stride()) is keeps
    assert copied.untyped_storage().nbytes() <= 2 * given.nbytes


def compile_loss(module: Module) -> None:
    loss = torch.compile(torch.nn.functional.mse_loss, backend="eager")
    module.compute = lambda batch: loss(module.net(batch[0]), batch[1])


def compile_later(module: Module) -> None:
    made: list[Any] = []

    def compute(batch: Any) -> Any:
        made[:] = made or [torch.compile(module.net, backend="eager")]
        return torch.nn.functional.mse_loss(made[0](batch[0]), batch[1])

    module.compute = compute


def compile_nothing(module: Module) -> None:
    module.compute = lambda batch: torch.nn.functional.mse_loss(module.net(batch[0]), batch[1])


def run_our_kernel(module: Module) -> None:
    """As the `loss` rung does on CUDA in the first step: a kernel of ours, which Dynamo captures."""
    kernel = torch.compile(reduce_rows, backend="eager")

    def compute(batch: Any) -> Any:
        logits = module.net(batch[0])
        captured = dynamo_graphs.count_captured()
        kernel(logits.detach(), torch.zeros(len(logits), dtype=torch.long), -100)
        seen.append(dynamo_graphs.count_captured() - captured)
        return torch.nn.functional.mse_loss(logits, batch[1])

    seen: list[int] = []
    module.compute, module.captured = compute, seen


@pytest.mark.parametrize("own", [compile_loss, compile_later, compile_nothing, run_our_kernel])
def test_what_the_users_code_compiles_is_not_compiled_twice(
    own: Callable[[Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`amp` stands for a compile, and `layout` for a rung that is none."""

    class Own(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.compute(batch)  # type: ignore[operator]

    torch._dynamo.reset()
    plant(monkeypatch, lambda old: old, pay_back="ignore")
    plant(monkeypatch, lambda old: old, Layout)
    module = Own()
    own(module)
    loop, _, _ = fit(config("amp", "layout"), module)
    took, why = read(loop)
    assert took is (own in (compile_nothing, run_our_kernel)), why
    assert own is not run_our_kernel or module.captured[0] == 1, "it was captured in the first step"
    assert took or "your own code already compiles parts of the step" in why
    assert "compiles" not in read(loop, "layout")[1]


@pytest.mark.parametrize(("steps", "tried"), [(400, False), (100_000_000, True)])
def test_a_ladder_does_not_make_the_users_code_compile_again_unless_that_pays(
    steps: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled network was compiled anew for `amp`, for 6 s in a run of 2 s."""
    tries = []

    class Own(Brief):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 0:
                time.sleep(0.5)  # the compile
            return self.compute(batch)  # type: ignore[operator]

    def fails(_old: Any) -> Any:
        tries.append(1)
        raise RuntimeError("tried")

    torch._dynamo.reset()
    plant(monkeypatch, fails, Layout)
    module = Own()
    compile_later(module)
    loop, _, _ = fit(config("layout"), module, by_ladder=("layout",), steps=steps)
    assert bool(tries) is tried
    assert tried or "your own compiled code would recompile: it takes about" in read(loop, "layout")[1]


@pytest.mark.parametrize(("epochs", "tried"), [(3, False), (-1, True)])
def test_a_run_of_unknown_length_pays_for_nothing(epochs: int, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader without a length; the control is a run that was asked to go on for ever."""

    class Endless(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                self.trainer.should_stop = True

    plant(monkeypatch, lambda old: old, pay_back="required")
    monkeypatch.setattr(budget, "count_planned_steps", lambda trainer: None)
    loop, _, _ = fit(config("amp"), Endless(), steps=-1, max_epochs=epochs)
    took, why = read(loop)
    assert took is tried and (tried or "the loader has no length" in why)


def test_two_that_break_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either works alone; the second breaks in the backward pass once the first is there."""

    def first(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs)

    plant(monkeypatch, first, Amp)

    def do(site: Site) -> Applied:
        net = site.module.net
        before, broken = net.forward, "forward" in vars(net)
        net.forward = lambda *a, **k: Breaks.apply(before(*a, **k)) if broken else before(*a, **k)

        def undo() -> None:
            net.forward = before

        return Applied(undo=undo, probe=lambda: {"convs": 0, "converted_batches": 1, "channels_last_convs": 0})

    both = Change(actions=(Action(when="model", do=do),), parity="approximate", rehearse="modules")
    monkeypatch.setattr(Layout, "plan", lambda self, facts: both)
    _, _, plain = fit(None)
    loop, _, rehearsed = fit(config("amp", "layout"))
    verdicts = {rung: read(loop, rung) for rung in ("amp", "layout")}
    assert sorted(took is True for took, _ in verdicts.values()) == [False, True], verdicts
    off = next(why for took, why in verdicts.values() if not took)
    assert "breaks layout" in off or "works without amp" in off
    assert rehearsed == plain


@pytest.mark.usefixtures("no_alarm")
def test_a_hang_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            time.sleep(60)

        return forward

    monkeypatch.setattr(budget, "LIMIT_S", 1.0)
    _, _, plain = fit(None)
    plant(monkeypatch, hang)
    began = time.monotonic()
    loop, _, rehearsed = fit(config("amp"))
    assert time.monotonic() - began < 30
    assert read(loop) == (False, "it took longer than 1 s") and rehearsed == plain


@pytest.mark.usefixtures("no_alarm")
def test_a_compile_that_reached_its_limit_is_expected_to_take_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected are 10 ms, and it is stopped after a second. The control: the first run tries it."""
    tried: list[int] = []

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        tried.append(1)
        return lambda *_, **__: time.sleep(60)

    monkeypatch.setattr(budget, "LEAST_LIMIT_S", 1.0)
    monkeypatch.setattr(budget, "COMPILE_S", {"cpu": (0.01, 0.0)})
    plant(monkeypatch, slow, pay_back="required")
    loop, _, _ = fit(config("amp"), Brief(), steps=500, max_epochs=100)
    assert read(loop) == (False, "it took longer than 1 s") and len(tried) == 1
    monkeypatch.setattr(budget.judge, "LIKELY_SAVING", 1e-4)
    loop, _, _ = fit(config("amp"), Brief(), steps=500, max_epochs=100)
    took, why = read(loop)
    assert took is False and why.startswith("it takes about 1 s once") and len(tried) == 1


COLD: list[int] = []
"""A global: what the model keeps is put back after each play."""


def plant_cold(
    monkeypatch: pytest.MonkeyPatch, *, first_s: float, later_s: float = 0.0, factor: float = 1.0, **change: Any
) -> None:
    """A module that takes 20 ms, and a rung whose first call takes longer than its later ones."""
    usual = Inner.forward
    COLD.clear()

    def slow(self: Inner, x: torch.Tensor, **how: Any) -> torch.Tensor:
        time.sleep(0.02)
        return usual(self, x, **how)

    def cold(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            COLD.append(1)
            time.sleep(later_s if len(COLD) > 1 else first_s)
            return factor * usual(original.__self__, *args, **kwargs)  # type: ignore[attr-defined]

        return forward

    monkeypatch.setattr(Inner, "forward", slow)
    plant(monkeypatch, cold, **change)


@pytest.mark.parametrize("fault", [None, "raises later"])
def test_what_only_the_first_call_takes_is_no_rehearsal_if_the_rung_stays(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_cold(monkeypatch, first_s=0.4, factor=1.2 if fault else 1.0)
    loop, _, _ = fit(config("amp"))
    assert loop is not None and loop.measurement is not None
    spent = loop.measurement.one_time_s
    assert (read(loop)[0] is True) == (fault is None)
    assert (spent["first_calls"] > 0.3) == (fault is None) and (spent["rehearsal"] > 0.4) == (fault is not None)


@pytest.mark.parametrize(
    ("first_call_s", "later_s", "took"), [(0.01, 0.0, True), (0.0, 0.0, False), (0.01, 0.4, False)]
)
def test_a_slow_first_play_of_what_loads_kernels_is_not_the_last(
    first_call_s: float, later_s: float, took: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: ViT's first bf16 kernels took 1.6 s on a busy machine, and amp, three times as fast later, was off."""
    plant_cold(monkeypatch, first_s=0.5, later_s=later_s, first_call_s=first_call_s)
    long: dict[str, Any] = {"steps": 200_000, "max_epochs": 40_000}
    loop, _, _ = fit(config("amp"), Brief(), by_ladder=("amp",), **long)
    is_on, why = read(loop)
    assert is_on is took and ("slower" not in why) is took, why
    assert (len(COLD) > 1) is (first_call_s > 0), "a rung that loads nothing is played once"


def test_every_play_is_announced_should_it_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def announced(what: str, say: Any) -> Iterator[None]:
        said.append(what)
        yield

    monkeypatch.setattr(rehearsal, "announced", announced)
    plant(monkeypatch, lambda old: old)
    fit(config("amp"))
    assert said == ["replaying the calls of the first step", "trying amp on the calls of the first step"]


def test_a_capture_that_takes_longer_than_its_share_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    long: dict[str, Any] = {"steps": 200_000, "max_epochs": 40_000}
    for seconds, took in ((0.0, True), (3_600.0, False)):
        plant(monkeypatch, lambda old: old, first_call_s=seconds)
        loop, _, _ = fit(config("amp"), Brief(), by_ladder=("amp",), **long)
        assert ("too short to try it" not in read(loop)[1]) is took, "slower by noise is no matter"
    assert read(fit(config("amp"), Brief(), **long)[0])[0] is True, "the user's own word stands"


def test_a_known_failure_is_skipped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        tried.append(1)
        return _raise(RuntimeError("no kernel"))(original)

    plant(monkeypatch, broken)
    fit(config("amp"))
    assert len(tried) == 1
    loop, _, _ = fit(config("amp"))
    took, why = read(loop)
    file = Path(os.environ["XDG_CACHE_HOME"]) / "fastloop" / "rehearsals.json"
    assert took is False and len(tried) == 1 and "RuntimeError: no kernel" in why and f"delete {file}" in why
    file.unlink()
    fit(config("amp"))
    assert len(tried) == 2


@pytest.mark.parametrize("pay_back", [None, "ignore"])
def test_what_lacked_memory_is_tried_again(pay_back: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever wording, and inside another error: another process may have held the memory."""
    tried: list[int] = []

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        tried.append(1)

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            except RuntimeError as error:
                raise ValueError("the backend failed") from error

        return forward

    plant(monkeypatch, broken, pay_back=pay_back)
    for count in (1, 2):
        loop, _, _ = fit(config("amp"))
        assert read(loop) == (False, "there was not enough memory to try it") and len(tried) == count


def test_a_host_that_lacked_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have held it; and it is not the device's."""
    tried: list[int] = []

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        tried.append(1)

        def forward(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("Unable to allocate 8 GiB for an array")

        return forward

    plant(monkeypatch, broken)
    for count in (1, 2):
        took, why = read(fit(config("amp"))[0])
        assert took is False and "MemoryError: Unable to allocate 8 GiB" in why and len(tried) == count


PEAK = [0]
"""Bytes, as a global: what the model keeps is put back after each play."""


@pytest.mark.parametrize(("more", "by_ladder", "kept"), [(30, True, True), (50, True, False), (50, False, True)])
def test_what_will_not_fit_into_a_step_is_off(
    more: int, by_ladder: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of 100 GiB, of which tensors take 10, and the first step 60. A play fits even with the rung."""

    def forget(_device: torch.device) -> int:
        PEAK[0] = 0
        return 10 * 2**30

    def greedy(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            PEAK[0] += more * 2**30
            return out

        return forward

    def usual(self: Inner, x: torch.Tensor, **how: Any) -> torch.Tensor:
        PEAK[0] = 60 * 2**30
        return forward(self, x, **how)

    forward = Inner.forward
    monkeypatch.setattr(Inner, "forward", usual)
    monkeypatch.setattr(memory, "forget_peak", forget)
    monkeypatch.setattr(memory, "read_peak", lambda _device: PEAK[0])
    monkeypatch.setattr(memory, "read_available", lambda _device: 100 * 2**30)
    plant(monkeypatch, greedy)
    rungs = ("amp",) if by_ladder else ()
    loop, _, _ = fit(config("amp"), Brief(), steps=100_000, by_ladder=rungs, max_epochs=20_000)
    took, why = read(loop)
    assert (took is kept) or "slower" in why, why
    assert kept or "it takes 50 GiB more of the device's memory, and the first step left only 40 GiB of it" in why


def test_what_cannot_be_played_again_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(Inner):
        def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
            with torch.no_grad():
                self.head.weight.mul_(0.99)
            return super().forward(x)

    plant(monkeypatch, lambda old: old)
    for by_ladder, expected in (((), True), (("amp",), False)):
        module = Module()
        module.net = Changing()
        loop, _, _ = fit(config("amp"), module, by_ladder=by_ladder, steps=80)
        took, why = read(loop)
        assert took is expected
        if by_ladder:
            assert "net changes its own parameters in forward" in why


def test_scripted_modules_take_no_hooks() -> None:
    """Their calls are not recorded; what the user asked for applies all the same, and the watch goes on."""

    class Scripted(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 1)))
            self.net.calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    problem = recorded_calls.CallRecorder(Scripted(), ["net"], groups=BatchGroups()).problem
    assert problem is not None and problem.startswith("calls of net cannot be recorded: ")
    loop, _, _ = fit(config("amp"), Scripted(), steps=8)
    assert read(loop)[0] is True
    assert loop is not None and loop.measurement is not None and loop.measurement.total_steps == 8


def test_both_halves_of_complex_numbers_are_compared() -> None:
    plain, other = (RunResults(outputs=[torch.tensor([3 + 4j, 1j * imaginary])]) for imaginary in (0, 1))
    assert compare_results(plain, other).outputs == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.5], (0.1, True)),
        ([3e-30, 4e-30], [3e-30, 4.5e-30], (0.1, True)),  # their squares are no float32
        ([3e30, 4e30], [3e30, 4.5e30], (0.1, True)),
        ([float("inf"), 4.0], [float("inf"), 4.4], (0.1, True)),
        ([3.0, 4.0], [3.0, float("nan")], (float("inf"), False)),
        ([0.0, 0.0], [0.0, 0.0], (0.0, True)),
        ([0.0, 0.0], [0.0, 1.0], (float("inf"), True)),
    ],
    ids=["usual", "small", "large", "infinite in both", "not finite", "nothing", "something from nothing"],
)
def test_deviation_of_any_numbers(before: list[float], after: list[float], expected: tuple[float, bool]) -> None:
    found = compare_results(RunResults(outputs=[torch.tensor(before)]), RunResults(outputs=[torch.tensor(after)]))
    assert (found.outputs, found.finite) == (pytest.approx(expected[0], rel=1e-5), expected[1])


@pytest.mark.parametrize("scale", [1.0, 1e-30], ids=["usual", "small"])
def test_the_direction_of_gradients_is_not_that_of_their_largest_tensor(scale: float) -> None:
    """In a ResNet-50 at its random start the first convolution holds 92 % of the gradient, and bf16 scatters it."""
    first = {"conv1": torch.tensor([40.0, 30.0]), "fc": torch.tensor([3.0, 4.0]), "bias": torch.ones(2)}
    plain = RunResults(gradients={name: scale * each for name, each in first.items()})
    scattered = RunResults(gradients={**plain.gradients, "conv1": -plain.gradients["conv1"]})
    turned = RunResults(gradients={name: -each for name, each in plain.gradients.items()})
    assert compare_results(plain, scattered).gradients_cosine == pytest.approx(1 / 3)
    assert compare_results(plain, turned).gradients_cosine == pytest.approx(-1)
    nothing = RunResults(gradients={**plain.gradients, "bias": torch.zeros(2)})
    assert compare_results(plain, nothing).gradients_cosine == pytest.approx(2 / 3), "a lost tensor counts as turned"


def test_only_one_pair_is_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 copies of all gradients of a 16-bit model would take as much memory as the model, four times over."""
    made: list[weakref.ref[torch.Tensor]] = []
    most, usual = [0], torch._foreach_norm

    def norm(tensors: list[torch.Tensor]) -> Any:
        made.extend(weakref.ref(each) for each in tensors)
        most[0] = max(most[0], sum(each() is not None for each in made))
        return usual(tensors)

    monkeypatch.setattr(torch, "_foreach_norm", norm)
    halves = [torch.full((8,), 1.0 + number, dtype=torch.bfloat16) for number in range(6)]
    assert compare_results(RunResults(outputs=halves), RunResults(outputs=halves)).outputs == 0
    assert len(made) == 18 and most[0] <= 6


class Slow(torch.nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 * self.training)
        return super().forward(x)


def test_a_rung_that_is_tried_with_dropout_is_not_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`amp` stands for a compile, beside a rung that is tried without dropout."""
    module = Brief()
    module.net.layers[3] = Slow(0.3)
    monkeypatch.setattr(rehearsal.judge, "SLOWER", 2.0)  # dropout is far more than that, noise is not
    plant(monkeypatch, lambda old: old, pay_back="ignore")
    plant(monkeypatch, lambda old: old, Layout)
    loop, _, _ = fit(config("amp", "layout"), module, steps=100_000, by_ladder=("amp", "layout"), max_epochs=20_000)
    assert read(loop)[0] is True, read(loop)[1]
    assert loop is not None
    times = {each.rung: each.rehearsed for each in loop.verdicts}
    for each in times.values():
        assert each is not None and each.eager_ms and each.changed_ms and min(each.eager_ms, each.changed_ms) > 20


@pytest.mark.parametrize("factor", [1.0, 1.2, 2.0, -1.0])
def test_a_fault_shows_through_other_random_numbers(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`amp` stands for a compile: it is tried with dropout, and draws other random numbers. The control: times 1."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            torch.rand(3)
            return factor * original(*args, **kwargs)

        return forward

    monkeypatch.setattr(compared, "ENOUGH_S", 60.0)  # as many draws on a busy machine
    _, _, plain = fit(None)
    plant(monkeypatch, change, pay_back="ignore")
    loop, _, rehearsed = fit(config("amp"))
    took, why = read(loop)
    assert took is (factor == 1.0), why
    assert took or ("random numbers" in why and rehearsed == plain), why


def test_a_model_that_draws_its_own_noise_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Inner.forward
    monkeypatch.setattr(Inner, "forward", lambda self, x, **how: usual(self, x) + 0.3 * torch.randn(len(x), 1))
    for factor, kept in ((1.0, True), (1.3, False)):
        plant(monkeypatch, lambda old, factor=factor: lambda *a, **k: factor * old(*a, **k))  # type: ignore[misc]
        took, why = read(fit(config("amp"))[0])
        assert took is kept and (took or "random numbers" in why), why


def test_ranks_whose_modules_differ_in_dropout_ask_each_other_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[bool, int] = {False: 0, True: 0}
    for own in asked:

        def gather(_trainer: Any, mine: Any, own: bool = own) -> list[Any]:
            asked[own] += 1
            return [mine, not mine] if isinstance(mine, bool) else [mine, mine]

        monkeypatch.setattr(rehearsal, "gather", gather)
        monkeypatch.setattr("fastloop.bridge.apply.rehearse.ranks.gather", gather)
        change = Change(actions=(), parity="approximate", rehearse="modules", pay_back="ignore")
        step: Any = rehearsal.Step(rung="compile", status="planned", change=change)
        this: Any = rehearsal.Rehearsal.__new__(rehearsal.Rehearsal)
        this.site, this.steps, this._unchanged = types.SimpleNamespace(trainer=None), [step], {own: RunResults()}
        this._captured = 0
        this._budget = types.SimpleNamespace(refuse=lambda *_: None, base_ms=1.0)
        this._play_base = lambda **_: None
        assert this._play_with_dropout() is None
    assert asked[True] == asked[False] > 1


def test_ranks_that_time_an_optimizer_differently_keep_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems slower on the second rank only."""
    times = ((3.0, 2.0), (1.0, 2.0))
    every = [
        rehearsal.RungOutcome(
            rung="fused", rehearsed=rehearsal.Rehearsed(deviation=0.0, eager_ms=eager, changed_ms=changed)
        )
        for eager, changed in times
    ]
    monkeypatch.setattr(rehearsal, "gather", lambda *_: every)
    this: Any = rehearsal.Rehearsal.__new__(rehearsal.Rehearsal)
    this.site = types.SimpleNamespace(trainer=None)
    agreed = [this._agree(rehearsal.Step(rung="fused", status="planned"), mine) for mine in every]
    judged = [rehearsal.judge.drop_slow([each], 0.0, {"fused"})[0].fault for each in agreed]
    assert judged == [None, None]


def test_training_may_end_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda old: old)
    loop, _, _ = fit(config("amp"), steps=1)
    assert read(loop) == (False, "training ended before it could be tried on the calls of the first step")


def test_an_interrupt_in_it_leaves_no_rung_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is of the step before it, and a checkpoint that is written now is as well."""
    plant(monkeypatch, _raise(KeyboardInterrupt()), kind=Layout)
    loop, seen = FastLoop(config("amp", "layout"), quiet=True), []

    class Saves(L.Callback):
        def on_exception(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.precision)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    run = L.Trainer(max_steps=5, accelerator="cpu", callbacks=[Saves(), loop], enable_model_summary=False, **quiet)
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # Lightning 2.5 and later exit
        run.fit(Module(), data())
    assert loop.measurement is not None and loop.measurement.precision == "32-true" and seen == ["32-true"]
    assert read(loop) == (False, "training ended before it could be tried on the calls of the first step")


def test_switched_off_all_rungs_apply_at_once_and_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, _raise(RuntimeError("no kernel")))
    with pytest.raises(RuntimeError, match="no kernel"):
        fit(config("amp", rehearsal="off"))


def test_real_rungs_together() -> None:
    """amp, layout, fused and compile, tried and kept in mid-run."""

    class Images(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(  # type: ignore[assignment]
                torch.nn.Conv2d(2, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 1)
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.net(batch[0].reshape(-1, 2, 2, 2)), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

    module = Images()
    object.__setattr__(module.net, "calls", 0)
    _, _, plain = fit(None, module)
    other = Images()
    object.__setattr__(other.net, "calls", 0)
    loop, _, rehearsed = fit(config("amp", "layout", "fused", "compile"), other)
    assert loop is not None
    assert {each.rung: each.took for each in loop.verdicts} == dict.fromkeys(
        ("amp", "layout", "fused", "compile"), True
    )
    assert all(each.rehearsed is not None for each in loop.verdicts)
    assert rehearsed[0][0] == plain[0][0], "the first step is the user's"
    assert rehearsed[0][1:] != plain[0][1:] and rehearsed[0] == pytest.approx(plain[0], rel=0.1, abs=0.05)


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_all_ranks_agree(tmp_path: Path) -> None:
    """Two gloo ranks; a rung that breaks on one of them is off on both, and nobody waits for the other."""
    python(Path(__file__).with_name("rehearsal_ranks.py"), cwd=tmp_path, limit_s=200)
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-[01].json")}
    assert len(told) == 12
    for rank in (0, 1):
        plain = told[f"plain-{rank}"]
        for case in ("works", "breaks_on_0", "breaks_on_1"):
            seen = told[f"{case}-{rank}"]
            assert (seen["weights"], seen["losses"]) == (plain["weights"], plain["losses"]), case
            took, why = seen["verdicts"]["amp"]
            assert took is (case == "works") and (took or f"on rank {case[-1]}: RuntimeError: no kernel" in why)
        exchanging = told[f"exchanging-{rank}"]
        assert exchanging["verdicts"]["amp"][0] is True and exchanging["rehearsed"] == [], "applied, and not tried"
        assert told[f"works-{rank}"]["rehearsed"] == ["amp"]
        took, why = told[f"compiled-{rank}"]["verdicts"]["compile"]
        assert took is True and "recompiled" not in why, why
    assert told["compiled-0"]["weights"] == told["compiled-1"]["weights"] != told["plain-0"]["weights"]


def test_the_work_is_counted_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much a sample as the plain run counts in a step of its own, but for the loss."""
    # Other tests of this process may have compiled something, and then nothing is counted in a user's own step.
    monkeypatch.setattr("fastloop.bridge.watch.probes.may_count", lambda module: None)
    watched, _, _ = fit(config())
    assert watched is not None and watched.measurement is not None
    plain = watched.measurement.flops["per_sample"]
    plant(monkeypatch, lambda old: old, pay_back="ignore")
    loop, _, _ = fit(config("amp"))
    assert loop is not None and loop.measurement is not None and read(loop)[0] is True
    assert plain and loop.measurement.flops["per_sample"] == pytest.approx(plain, rel=0.01)


class Chained(Module):
    """Two modules, the second of which begins in place and gets what the first has made, detached and not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Inner()
        self.second = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        made = self.net(batch[0])
        loss = torch.nn.functional.mse_loss(self.second(made.detach() + 0) + self.second(made), batch[1])
        self.losses.append(float(loss.detach()))
        return loss


def test_a_later_module_gets_what_an_earlier_one_now_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()

    def halve(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs).bfloat16()

    plant(monkeypatch, halve)
    module = Chained()

    def note(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self is module.second[1]:
            SEEN.append((module.trainer.global_step, x.dtype))
        return torch.nn.functional.linear(x.float(), self.weight, self.bias)

    monkeypatch.setattr(rehearsal, "find_precision", lambda *_: "bf16")
    monkeypatch.setattr(torch.nn.Linear, "forward", note)
    loop, _, _ = fit(config("amp"), module)
    assert read(loop)[0] is True, read(loop)
    assert SEEN.count((1, torch.bfloat16)) > 2, "in the rehearsal, and not only in the step after it"


SEEN: list[tuple[int, torch.dtype]] = []
"""Filled by a layer of torch's: what hooks and the user's modules write to is put back after each play."""


def test_what_a_module_logs_in_a_play_is_no_value_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logging(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.net.log = lambda value: self.log("inner", value, on_step=True, on_epoch=True)  # type: ignore[assignment]
            return super().training_step(batch, batch_idx)

    def logs(self: Inner, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x))
        self.log(out.detach().mean())  # type: ignore[operator]
        return out

    monkeypatch.setattr(Inner, "forward", logs)
    plain = fit(None, Logging(), steps=6, limit_train_batches=6)[1].trainer.callback_metrics
    plant(monkeypatch, lambda old: old)
    loop, module, _ = fit(config("amp"), Logging(), steps=6, limit_train_batches=6)
    assert read(loop)[0] is True
    assert {key: float(value) for key, value in module.trainer.callback_metrics.items()} == {
        key: float(value) for key, value in plain.items()
    }


def test_uncounted_steps_are_rehearsed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that steps its bare optimizers: Lightning's global_step stays 0."""

    class Bare(Manual):
        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return super().optimizers(use_pl_optimizer=False)

    plant(monkeypatch, lambda old: old)
    loop, module, _ = fit(config("amp"), Bare(), steps=-1, max_epochs=3)
    assert module.trainer.global_step == 0 and read(loop)[0] is True


def test_strict_is_about_what_cannot_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda old: old, evaluation=True)
    loop, module, _ = fit(config("amp", strict=True), steps=1, by_ladder=("amp",))
    assert read(loop)[0] is False
    assert module.trainer.validate(module, data(8), verbose=False) is not None
    assert read(fit(config("amp", strict=True), steps=4, by_ladder=("amp",))[0])[0] is False, "too short to try it"
    plant(monkeypatch, _raise(RuntimeError("no kernel")))
    with pytest.raises(ConfigError, match="no kernel"):
        fit(config("amp", strict=True))


@pytest.mark.parametrize(("calls", "repeats"), [(recorded_calls.MOST_CALLS, 1.0), (2 * recorded_calls.MOST_CALLS, 2.0)])
def test_calls_that_are_not_recorded_count_in_the_time_of_a_step(calls: int, repeats: float) -> None:
    """A window of eight batches that ran batch by batch counted as half as long as it was: amp seemed to cost too much
    in a run of 30 steps."""
    module = torch.nn.ModuleDict({"net": torch.nn.Linear(4, 4)})
    recorder = recorded_calls.CallRecorder(module, ["net"], groups=BatchGroups())
    recorder.note_batch((torch.ones(2, 4),))
    for _ in range(calls):
        module["net"](torch.ones(2, 4))
    recorder.stop()
    assert len(recorder.calls) == recorded_calls.MOST_CALLS and recorder.repeats == repeats


@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_frozen_module_takes_is_not_in_the_time_of_a_batch(frozen: bool) -> None:
    """A teacher in evaluation mode is not recorded: the step takes longer than its calls, and no rung is to blame."""
    module = torch.nn.ModuleDict({"teacher": torch.nn.Linear(4, 4), "student": torch.nn.Linear(4, 4)})
    module["teacher"].train(not frozen)
    recorder = recorded_calls.CallRecorder(module, ["teacher", "student"], groups=BatchGroups())
    recorder.note_batch((torch.ones(2, 4),))
    module["teacher"](torch.ones(2, 4)), module["student"](torch.ones(2, 4))
    recorder.stop()
    assert recorder.is_whole is not frozen and len(recorder.calls) == 2 - frozen
