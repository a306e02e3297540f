"""Rungs that a rehearsal kept are held against what it promised, in the steps that follow it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastloop.bridge.apply.rehearse import second_look
from fastloop.bridge.apply.rehearse.second_look import StepTimingCheck
from fastloop.evidence.model import dynamo_graphs
from fastloop.judge import rehearsal as judge_of_rehearsal
from fastloop.judge.second_look import Timed, TimedComparison
from fastloop.records.plan import Action, Applied, Change, Site
from fastloop.report.run import summary
from fastloop.rungs.amp import Amp
from fastloop.rungs.layout import Layout
from tests.bridge.apply.rehearse import test_rehearsal
from tests.bridge.apply.rehearse.test_rehearsal import Manual, Module, config, fit, read
from tests.bridge.launch import python
from tests.bridge.watch import planted

SLOW_S = 0.03
"""What a planted rung sleeps in a step; a step without takes a twentieth of it."""
LONG = 100_000
"""Steps that a run plans, so that trying a rung takes no more than a twentieth; `train` ends it before."""


@pytest.fixture(autouse=True)
def _patient_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays of a third of a millisecond are not told apart, and are not what is tested here.

    Time passes on a clock that nothing else on this machine moves.
    """
    monkeypatch.setattr(judge_of_rehearsal, "SLOWER_MS", 1e3)
    monkeypatch.setattr(time, "perf_counter", planted.read_clock_s)


class Planted:
    """A rung that computes what the module does, and sleeps in real steps but not in the rehearsal.

    Attributes:
        applied: optimizer steps made when it was switched on; `removed`: and off.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: Any = Amp, **probed: Any) -> None:
        self.applied: list[int] = []
        self.removed: list[int] = []
        self.slow: Callable[[torch.Tensor], float] = lambda x: 0.0
        """Seconds that a call of a real step takes longer."""
        self.broken_after = 100
        """Times that it can be switched on."""
        probed = probed or {"dtype": "torch.bfloat16"}

        def do(site: Site) -> Applied:
            if len(self.applied) == self.broken_after:
                raise RuntimeError("no kernel")
            net, trainer = site.module.net, site.module.trainer
            before, had = net.forward, "forward" in vars(net)
            self.applied.append(trainer.global_step)

            def forward(x: torch.Tensor, **more: Any) -> Any:
                if not site.recorded and net.training:
                    planted.sleep(self.slow(x))
                return before(x, **more)

            def undo() -> None:
                self.removed.append(trainer.global_step)
                vars(net).pop("forward", None)
                if had:
                    net.forward = before

            net.forward = forward
            return Applied(undo=undo, probe=lambda: probed)

        wanted = Change(actions=(Action(when="model", do=do),), parity="approximate", rehearse="modules")
        monkeypatch.setattr(kind, "plan", lambda self, facts: wanted)


def train(
    *rungs: str, by_ladder: tuple[str, ...] = (), module: Module | None = None, batches: int = 50, **more: Any
) -> Any:
    """A fit that plans a long run, and is ended after some batches."""
    module = module or Module()
    seen = [0]
    original = type(module).on_train_batch_end

    def stop(outputs: Any, batch: Any, batch_idx: int) -> None:
        original(module, outputs, batch, batch_idx)
        seen[0] += 1
        module.trainer.should_stop = seen[0] >= batches

    object.__setattr__(module, "on_train_batch_end", stop)
    settings = None if rungs == () else config(*rungs, **more.pop("config", {}))
    return fit(settings, module, steps=LONG, by_ladder=by_ladder, **more)


def test_quick_in_the_rehearsal_and_slow_in_steps_is_dropped_under_a_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, plain = train()
    rung = Planted(monkeypatch)
    rung.slow = lambda x: SLOW_S
    loop, module, seen = train("amp", by_ladder=("amp",))
    took, why = read(loop)
    assert took is False and why.startswith("slower in training: forward and backward take"), why
    assert "ms without it (8 batches each, slower by" in why
    assert "forward" not in vars(module.net) and rung.removed[-2] < 35
    assert seen == plain, "bit for bit: what was switched computes the same"
    assert loop.findings[0].title != "SLOWER WITH AMP", "it is off"
    record = next(each for each in loop.verdicts if each.rung == "amp").rehearsed
    assert record is not None and record.changed_ms < 10, "the rehearsal had seen nothing of it"


def test_a_users_own_slow_rung_stays_and_is_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = Planted(monkeypatch)
    rung.slow = lambda x: SLOW_S
    loop, _, _ = train("amp")
    assert read(loop) == (True, "matrix products in training_step ran in torch.bfloat16")
    assert len(rung.applied) - len(rung.removed) == 0 and len(rung.applied) == 3, "on, and twice on again"
    finding = loop.findings[0]
    assert finding.title == "SLOWER WITH AMP" and "(n = 8 each, slower by" in finding.alarm
    head = summary.write_lines(loop.measurement, loop.plan, loop.verdicts, loop.findings)[0]
    assert finding.alarm in head


@pytest.mark.parametrize("kind", [Module, Manual])
def test_an_honest_rung_is_not_touched(kind: type[Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise is set high, so that a busy machine breaks none; and then all is bit for bit the same."""
    monkeypatch.setattr(second_look.judge, "OVER_MS", 1e6)
    _, _, plain = train(module=kind())
    rung = Planted(monkeypatch)
    loop, _, seen = train("amp", by_ladder=("amp",), module=kind())
    assert read(loop)[0] is True and rung.applied == [rung.applied[0]]
    assert "second_look" not in loop.measurement.evidence
    monkeypatch.setattr(StepTimingCheck, "after", lambda *_: None)
    _, _, without = train("amp", by_ladder=("amp",), module=kind())
    assert seen == without == plain


def test_an_honest_rung_on_a_noisy_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without it a step takes 5 to 25 ms, while the rehearsal had quiet plays: it looks, and keeps it."""
    draw = random.Random(1)

    class Noisy(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            planted.sleep(draw.uniform(0.005, 0.025))
            return super().training_step(batch, batch_idx)

    rung = Planted(monkeypatch)
    loop, _, _ = train("amp", by_ladder=("amp",), module=Noisy())
    assert read(loop)[0] is True and len(rung.applied) == 3
    looked = loop.measurement.evidence["second_look"]
    assert looked["rungs"] == ["amp"] and looked["is_slower"] is False and looked["n"] == 8
    assert not any(each.title == "SLOWER WITH AMP" for each in loop.findings)


def vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 2 to 21 samples, every time of another size; the first is the smallest."""
    draws = torch.Generator().manual_seed(0)
    samples = 2 * 5 + sum(range(6, 22)) * 4
    pairs = TensorDataset(torch.randn(samples, 8, generator=draws), torch.randn(samples, 1, generator=draws))
    sizes = [2, *[6 + (7 * place) % 16 for place in range(49)]]
    starts = [sum(sizes[:place]) % (samples - 21) for place in range(len(sizes))]
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    monkeypatch.setattr(test_rehearsal, "data", lambda: DataLoader(pairs, batch_sampler=batches))


def test_batches_that_differ_in_size_are_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes time in proportion to its batch, and the first, that was rehearsed, was the smallest."""

    class Proportional(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            planted.sleep(0.001 * len(batch[0]))
            return super().training_step(batch, batch_idx)

    vary(monkeypatch)
    Planted(monkeypatch)
    loop, _, _ = train("amp", by_ladder=("amp",), module=Proportional())
    assert read(loop)[0] is True


def test_slow_for_each_shape_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal played the same shapes twice, and training never does."""
    known: set[tuple[int, int]] = set()

    def plan_anew(x: torch.Tensor) -> float:
        key = (len(x), len(known))
        known.add(key)
        return 2 * SLOW_S

    vary(monkeypatch)
    rung = Planted(monkeypatch)
    rung.slow = plan_anew
    loop, _, _ = train("amp", by_ladder=("amp",))
    took, why = read(loop)
    assert took is False and why.startswith("slower in training: "), why


@pytest.mark.parametrize("slow", ["amp", "layout"])
def test_of_two_rungs_the_one_that_costs_goes(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = {
        "amp": Planted(monkeypatch),
        "layout": Planted(monkeypatch, Layout, convs=0, converted_batches=1, channels_last_convs=0),
    }
    rungs[slow].slow = lambda x: SLOW_S
    loop, _, _ = train("amp", "layout", by_ladder=("amp", "layout"), batches=80)
    assert {rung: read(loop, rung)[0] for rung in rungs} == {rung: rung != slow for rung in rungs}
    assert read(loop, slow)[1].startswith("slower in training: ")


def test_rungs_that_only_cost_together_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {2: TimedComparison(with_ms=9, without_ms=3, low_ms=5, high_ms=7, n=8)}
    rungs = {
        "amp": Planted(monkeypatch),
        "layout": Planted(monkeypatch, Layout, convs=0, converted_batches=1, channels_last_convs=0),
    }
    monkeypatch.setattr(second_look.judge, "is_suspicious", lambda *_: True)
    fair = TimedComparison(with_ms=3, without_ms=3, low_ms=-1, high_ms=1, n=8)
    answers = iter([found[2], fair, fair])
    monkeypatch.setattr(second_look.judge, "compare", lambda *_: next(answers))
    loop, _, _ = train("amp", "layout", by_ladder=("amp", "layout"), batches=80)
    for rung in rungs:
        assert read(loop, rung) == (False, f"slower in training, together with amp, layout: {found[2]}")


def test_it_is_switched_between_optimizer_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of three batches, validations in between; and what was switched leaves the training as it was."""
    at: list[bool] = []

    class Watching(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            at.append(self.trainer.fit_loop._should_accumulate())

    more = {"accumulate_grad_batches": 3, "batches": 60}
    _, _, plain = train(module=Watching(), **more)
    at.clear()
    rung = Planted(monkeypatch)
    rung.slow = lambda x: SLOW_S
    switched: list[bool] = []
    switch = StepTimingCheck._switch

    def noting(self: StepTimingCheck, *args: Any) -> None:
        switched.append(at[-1])
        switch(self, *args)

    monkeypatch.setattr(StepTimingCheck, "_switch", noting)
    loop, _, seen = train("amp", by_ladder=("amp",), module=Watching(), **more)
    assert read(loop)[0] is False and switched == [False] * 5 and any(at)
    assert seen == plain


def test_a_rung_that_cannot_come_back_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, plain = train()
    rung = Planted(monkeypatch)
    rung.slow, rung.broken_after = lambda x: SLOW_S, 1
    loop, module, seen = train("amp")
    assert read(loop) == (False, "switching it in training failed: RuntimeError: no kernel")
    assert "forward" not in vars(module.net) and seen == plain


@pytest.mark.parametrize("why", ["short", "trial", "off", "costly", "ended"])
def test_no_second_look(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the first test of this file."""
    began: list[int] = []
    after = StepTimingCheck.after

    def noting(*args: Any) -> StepTimingCheck | None:
        if (found := after(*args)) is not None:
            began.append(1)
        return found

    monkeypatch.setattr(StepTimingCheck, "after", noting)
    rung = Planted(monkeypatch)
    rung.slow = lambda x: SLOW_S
    if why == "short":
        fit(config("amp"), steps=39)
    elif why == "off":
        train("amp", batches=20, config={"rehearsal": "off"})
    elif why == "trial":
        callback = test_rehearsal.FastLoop
        monkeypatch.setattr(test_rehearsal, "FastLoop", lambda *a, **k: _make_trial(callback(*a, **k)))
        train("amp", batches=20)
    elif why == "costly":
        plan = Amp.plan
        monkeypatch.setattr(Amp, "plan", lambda self, facts: _with_cost(plan(self, facts)))
        train("amp", batches=20)
    else:
        loop, _, _ = train("amp", batches=16)  # in the midst of it, while the rung is off
        assert read(loop)[0] is True and len(rung.removed) == 1
    assert began == [1] * (why == "ended")
    assert len(rung.applied) == 1


def _make_trial(loop: Any) -> Any:
    loop.in_trial = True
    return loop


def _with_cost(change: Change) -> Change:
    return Change(
        actions=change.actions, parity=change.parity, rehearse=change.rehearse, pay_back="ignore", wants=change.wants
    )


def test_real_rungs_are_switched_in_mid_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """amp and layout go and come back; the run learns as the plain one does, and both are active in the end."""

    class Images(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(  # type: ignore[assignment]
                torch.nn.Conv2d(2, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 1)
            )
            object.__setattr__(self.net, "calls", 0)
            self.dtypes: list[torch.dtype] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            out = self.net(batch[0].reshape(-1, 2, 2, 2))
            self.dtypes.append(out.dtype)
            loss = torch.nn.functional.mse_loss(out, batch[1])
            self.losses.append(float(loss.detach()))
            return loss

    _, _, plain = train(module=Images())
    monkeypatch.setattr(second_look.judge, "is_suspicious", lambda *_: True)
    loop, module, seen = train("amp", "layout", module=Images())
    assert {each.rung: each.took for each in loop.verdicts} == {"amp": True, "layout": True}
    off = [place for place, dtype in enumerate(module.dtypes) if dtype == torch.float32]
    assert off == [0, *range(11, 16), *range(21, 26)], "the first step; and two blocks of four, with one before each"
    assert seen[0] == pytest.approx(plain[0], rel=0.2, abs=0.1)


class Wide(Module):
    """Whose calls say whether they were compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))  # type: ignore[assignment]
        object.__setattr__(self.net, "calls", 0)
        self.compiled: list[bool] = []
        self.dtypes: list[torch.dtype] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.compiled.append("_compiled_call_impl" in vars(self.net))
        out = self.net(batch[0])
        self.dtypes.append(out.dtype)
        return torch.nn.functional.mse_loss(out, batch[1])


@pytest.mark.parametrize("paused", [True, False])
def test_what_is_compiled_is_switched_without_compiling_anew(paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control undoes the rung and applies it again, as other rungs."""
    monkeypatch.setattr(second_look.judge, "is_suspicious", lambda *_: True)
    monkeypatch.setattr(second_look.judge, "MARGIN_MS", 1e6)
    graphs: list[int] = []
    switch = StepTimingCheck._switch

    def noting(self: StepTimingCheck, *args: Any) -> None:
        graphs.append(dynamo_graphs.count_captured())
        switch(self, *args)

    monkeypatch.setattr(StepTimingCheck, "_switch", noting)
    if not paused:
        monkeypatch.setattr(StepTimingCheck, "_is_costly", lambda *_: False)
    loop, module, _ = train("amp", "compile", module=Wide())
    assert {each.rung: each.took for each in loop.verdicts} == {"amp": True, "compile": True}
    off = [0, *range(11, 16), *range(21, 26)]
    assert [place for place, compiled in enumerate(module.compiled) if not compiled] == off
    assert [place for place, dtype in enumerate(module.dtypes) if dtype == torch.float32] == off
    assert (len({*graphs, dynamo_graphs.count_captured()}) == 1) is paused


@pytest.mark.parametrize("compile_costs", [True, False])
def test_what_is_compiled_goes_alone_or_with_all_it_was_compiled_with(
    compile_costs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = TimedComparison(with_ms=9, without_ms=3, low_ms=5, high_ms=7, n=8)
    fair = TimedComparison(with_ms=3, without_ms=3, low_ms=-1, high_ms=1, n=8)
    monkeypatch.setattr(second_look.judge, "is_suspicious", lambda *_: True)
    answers = iter([slow, slow, fair] if compile_costs else [slow, fair])
    monkeypatch.setattr(second_look.judge, "compare", lambda *_: next(answers))
    monkeypatch.setattr(test_rehearsal.rehearsal.Remembered, "find_first_call_s", lambda *_: 0.0)
    loop, module, _ = train("amp", "compile", by_ladder=("amp", "compile"), module=Wide(), batches=90)
    if compile_costs:
        assert read(loop, "compile") == (False, f"slower in training: {slow}") and read(loop, "amp")[0] is True
    else:
        why = f"slower in training, together with amp, compile: {slow}"
        assert read(loop, "compile") == read(loop, "amp") == (False, why)
    assert not module.compiled[-1] and not next(answers, None)
    assert (module.dtypes[-1] == torch.bfloat16) is compile_costs


def test_the_state_of_a_loss_scaler_lasts() -> None:
    class Plugin:
        def state_dict(self) -> dict[str, float]:
            return {"scale": 512.0}

    class Strategy:
        precision_plugin = Plugin()

    class Found:
        scaler_state: Any = None
        strategy = Strategy()

    look = StepTimingCheck.__new__(StepTimingCheck)
    look.site = Found()  # type: ignore[assignment]
    look._switch([], False)
    assert look.site.scaler_state == {"scale": 512.0}


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_all_ranks_switch_together(tmp_path: Path) -> None:
    """Two gloo ranks; what one of them finds slower is off on both. The control: nobody suspects anything."""
    python(Path(__file__).with_name("second_look_ranks.py"), cwd=tmp_path, limit_s=200)
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-[01].json")}
    assert len(told) == 6
    for rank in (0, 1):
        assert told[f"nobody-{rank}"]["verdicts"]["amp"][0] is True
        took, why = told[f"rank_1-{rank}"]["verdicts"]["amp"]
        assert took is False and why.startswith("slower in training: ")
        for case in ("nobody", "rank_1"):
            seen, plain = told[f"{case}-{rank}"], told[f"plain-{rank}"]
            assert (seen["weights"], seen["losses"]) == (plain["weights"], plain["losses"])


def test_its_price_is_microseconds_while_it_watches_and_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[bool] = []

    class Watching(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            hooks.append(any(getattr(each, "on_train_batch_start", 1) is None for each in self.trainer.callbacks))

    Planted(monkeypatch)
    looks: list[StepTimingCheck] = []
    after = StepTimingCheck.after

    def noting(*args: Any) -> StepTimingCheck | None:
        looks.extend(filter(None, [after(*args)]))
        return looks[-1]

    monkeypatch.setattr(StepTimingCheck, "after", noting)
    monkeypatch.setattr(second_look.judge, "OVER_MS", 1e6)
    train("amp", batches=20, module=Watching())
    assert hooks == [False] * 11 + [True] * 9, "Lightning does not even call us any more"
    look, batch = looks[0], next(iter(test_rehearsal.data()))
    look._batches = iter(lambda: None, 1)  # type: ignore[assignment]
    took_s = []
    for _ in range(500):
        began = time.perf_counter()
        look.batch_starts(batch)
        look.forward_starts()
        look.backward_ends()
        took_s.append(time.perf_counter() - began)
    assert min(took_s) < 50e-6, "on any machine, and whatever else it does"


@pytest.mark.parametrize(
    ("peak", "largest", "room"), [(60, 100, True), (70, 100, False), (40, 200, False), (30, 200, True)]
)
@pytest.mark.parametrize("forgotten", [False, True])
def test_batches_without_a_rung_must_fit(
    peak: int, largest: int, room: bool, forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 are there, 50 of them reserved by torch; the first batch had 100 elements."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20 if forgotten else peak)

    class Found:
        device = torch.device("cuda")
        step_bytes = peak if forgotten else None

    look = StepTimingCheck.__new__(StepTimingCheck)
    look.site, look._first_size = Found(), 100  # type: ignore[assignment]
    assert look._has_room([Timed(10.0, 50), Timed(10.0, largest)]) is room
