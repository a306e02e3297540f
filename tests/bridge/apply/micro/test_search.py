"""The search for a micro-batch on the first step: what it finds, what it says, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchmetrics

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.micro import choice, search, search_run
from fastloop.bridge.apply.rehearse import optimizer_twins, played
from fastloop.bridge.apply.rehearse.rehearsal import Rehearsal
from fastloop.evidence.clock.one_time import OneTime
from fastloop.judge.micro_batch import FoundSize
from tests import runs
from tests.bridge.apply.micro.test_piece_logs import Memory
from tests.noted import Noted
from tests.runs import KeepsTrainers, Net, Run, batches, both, distance, numbered, run

AUTO, BY_HAND = {"batch": {}}, {"batch": {"micro_batch": 16}}
ACCUMULATE: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
EVEN = partial(batches, 96, shuffle=True)
SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notes of earlier runs, which here are none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Milliseconds that each size seems to take; 16 samples are the fastest."""
    ms = {2: 4.0, 4: 6.0, 8: 8.0, 16: 10.0, 32: 24.0}
    monkeypatch.setattr(search_run.SearchRun, "_read_ms", lambda _run, piece: ms[piece.samples])
    return ms


class Keeps(Net):
    """Has all that a forward pass may leave a trace in."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW, lr=0.01)
        self.net.insert(1, torch.nn.BatchNorm1d(16))
        self.net.insert(2, torch.nn.Dropout(0.2))
        self.error = torchmetrics.MeanSquaredError()
        self.rows, self.seen = 0, [0.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows += len(batch[0])
        self.seen.append(random.random() + float(numpy.random.rand()))
        batch[0].add_(0.01)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.error(self.net(batch[0]), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss


def fit(rungs: Any) -> tuple[Run, Memory]:
    random.seed(0)
    numpy.random.seed(0)
    logger = Memory()
    done = run(rungs, EVEN(), Keeps, logger=logger, log_every_n_steps=1, **ACCUMULATE)
    return done, logger


def list_traces(one: tuple[Run, Memory], other: tuple[Run, Memory]) -> set[str]:
    """In what two runs differ."""
    found = set()
    for name, a, b in (
        ("order", one[0].module.samples, other[0].module.samples),
        ("rows", one[0].module.rows, other[0].module.rows),
        ("draws", one[0].module.seen, other[0].module.seen),
        ("hooks", one[0].record.hooks, other[0].record.hooks),
        ("rates", one[0].record.rates, other[0].record.rates),
        ("logs", one[1].logged, other[1].logged),
    ):
        found |= {name} if a != b else set()
    for name, value in one[0].module.state_dict().items():
        found |= {name} if not torch.equal(value, other[0].module.state_dict()[name]) else set()
    states = [each[0].trainer.optimizers[0].state.values() for each in (one, other)]
    for a, b in zip(*states, strict=True):
        found |= {f"optimizer {name}" for name in a if not torch.equal(a[name], b[name])}
    return found


def test_auto_is_the_run_with_its_number_written_by_hand(
    timed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand, draws = fit(BY_HAND), torch.rand(3)
    ours, ours_draws = fit(AUTO), torch.rand(3)
    assert list_traces(by_hand, ours) == set() and torch.equal(draws, ours_draws)
    assert by_hand[1].logged and ours[0].verdict("batch").took is True
    assert ours[0].verdict("batch").why == (
        "4 loader batches (32 samples) ran as micro-batches of 16/16; 1 BatchNorm layer kept separate statistics for up"
        " to 2 batches; auto chose 16: samples/s by size 8: 1,000, 16: 1,600, 32: 1,333; the sizes are limited by the"
        " samples of your optimizer step, not by memory"
    )
    # The control: without the guards every trace shows.
    monkeypatch.setattr(search_run, "preserve_state", lambda *_modules: torch.enable_grad())
    monkeypatch.setattr(search_run, "map_tensors", lambda batch, _clone: batch)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    traces = list_traces(by_hand, fit(AUTO))
    assert {"rows", "draws", "logs", "net.0.weight", "net.1.running_mean", "optimizer exp_avg", "order"} <= traces


def test_what_was_found_is_run_once_and_not_timed_again(
    timed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    play = search_run.SearchRun._play
    monkeypatch.setattr(
        search_run.SearchRun, "_play", lambda own, piece: (sizes.append(piece.samples), play(own, piece))[1]
    )
    first = run(AUTO, EVEN(), **ACCUMULATE)
    assert set(sizes) == {4, 2, 8, 16, 32} and first.seen("batch")["micro_batch"] == 16
    sizes.clear()
    timed |= {32: 1.0}
    again = run(AUTO, EVEN(), **ACCUMULATE)
    assert sizes == [16] and "the fastest in an earlier run on this machine, and works" in again.verdict("batch").why
    assert distance(first, again) == 0
    # Another shape of batches is another question, and so is memory that somebody else holds now.
    assert run(AUTO, batches(192, 16), **ACCUMULATE | {"accumulate_grad_batches": 2}).seen("batch")["rates"]
    with_less = run(AUTO, EVEN(), partial(Hungry, 8), **ACCUMULATE)
    assert with_less.verdict("batch").took is False and "not enough for 16" in with_less.verdict("batch").why


class Hungry(Net):
    """Fits `most` samples."""

    def __init__(self, most: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.most, self.error = most, error or RuntimeError(SAYS)

    def loss(self, batch: Any) -> torch.Tensor:
        if len(batch[0]) > self.most:
            REFUSED.add(len(batch[0]))
            raise self.error
        return super().loss(batch)


REFUSED = Noted()
Hungry.__name__ = Hungry.__qualname__ = "Net"  # the same model to who remembers it by its class


@pytest.mark.parametrize(
    ("most", "window", "took", "why"),
    [
        (16, 4, 16, "limited by memory: there was not enough for 32"),
        (8, 4, 8, "limited by memory: there was not enough for 16"),
        (4, 1, 4, "limited by memory: there was not enough for 8"),
        (4, 4, 4, "limited by memory: there was not enough for 8"),
    ],
)
def test_a_size_that_does_not_fit_is_not_taken(
    most: int, window: int, took: int, why: str, timed: dict[int, float]
) -> None:
    REFUSED.take()
    timed |= {16: 1e-9, 32: 1e-9, 8: 1.0}
    done = run(AUTO, EVEN(), partial(Hungry, most), max_epochs=1, accumulate_grad_batches=window)
    assert done.seen("batch")["micro_batch"] == took and why in done.verdict("batch").why
    assert set(REFUSED.take()) == {2 * most}, "it was tried, and only while searching"
    assert all(str(size) not in done.seen("batch")["rates"] for size in (16, 32) if size > most)


class Fits(torch.autograd.Function):
    """The identity; its backward fits at most so many samples."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, most: int) -> torch.Tensor:
        context.most = most
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if len(gradient) > context.most:
            REFUSED.add(len(gradient))
            raise torch.OutOfMemoryError(SAYS)
        return gradient, None


class HungryBackward(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(Fits.apply(self.net(batch[0]), 8), batch[1])  # type: ignore[no-untyped-call]


HungryBackward.__name__ = HungryBackward.__qualname__ = "Net"


def test_a_size_whose_backward_does_not_fit_is_not_taken(timed: dict[int, float]) -> None:
    """B3: and nothing of the attempt stays, in gradients or weights."""
    REFUSED.take()
    done = run(AUTO, EVEN(), HungryBackward, max_epochs=1, accumulate_grad_batches=4)
    by_hand = run({"batch": {"micro_batch": 8}}, EVEN(), HungryBackward, max_epochs=1, accumulate_grad_batches=4)
    assert done.seen("batch")["micro_batch"] == 8 and set(REFUSED.take()) == {16}
    assert "limited by memory: there was not enough for 16" in done.verdict("batch").why
    assert distance(done, by_hand) == 0


def test_one_sample_that_does_not_fit() -> None:
    with (
        pytest.raises(RuntimeError, match="Tried to allocate") as raised,
        pytest.warns(UserWarning, match="one sample does not fit in memory"),
    ):
        run(AUTO, EVEN(), partial(Hungry, 0), max_epochs=1)
    assert raised.traceback[-1].name == "loss"


@pytest.mark.parametrize("error", [ValueError("planted"), MemoryError("of the host")])
def test_the_users_own_error_arrives_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)) as raised, pytest.warns(UserWarning, match="nothing could be"):
        run(AUTO, EVEN(), partial(Hungry, 4, error), **ACCUMULATE)
    assert raised.value is error and raised.traceback[-1].name == "loss"


class Bag:
    """A batch that nobody sees into."""

    def __init__(self, samples: Any) -> None:
        self.x, self.y, self.numbers = torch.utils.data.default_collate(samples)


def test_a_batch_that_cannot_be_cut_is_not_searched() -> None:
    class Bags(Net):
        def training_step(self, bag: Any, batch_idx: int) -> Any:
            return super().training_step([bag.x, bag.y, bag.numbers], batch_idx)

    plain, ours = both(AUTO, partial(batches, 40, collate_fn=Bag), Bags, max_epochs=1)
    assert distance(plain, ours) == 0 and ours.verdict("batch").took is False
    assert "no search: the batch holds no tensor with a first dimension" in ours.verdict("batch").why


def test_limited_by_the_dataset(timed: dict[int, float]) -> None:
    """B1: an epoch has two batches, and four were to be accumulated."""
    done = run(AUTO, batches(16), **ACCUMULATE)
    assert done.loop is not None and done.verdict("batch").took is False
    notes = " ".join(done.loop.plan.steps[0].change.notes)
    assert "batches are not merged: an epoch has 2 batches, fewer than the 4 of one window" in notes
    assert set(done.seen("batch")["rates"]) == {"2", "4", "8"}


def test_the_users_own_batches_stay_where_they_are_the_fastest(timed: dict[int, float]) -> None:
    timed[8] = 1.0
    plain, ours = both(AUTO, EVEN, **ACCUMULATE)
    assert ours.verdict("batch").took is False and distance(plain, ours) == 0
    assert ours.verdict("batch").why.startswith(
        "windows run batch by batch: keeping your micro-batch size: samples/s by"
    )
    plain, ours = both(AUTO, EVEN, max_epochs=1)
    assert ours.verdict("batch").why.startswith(
        "batches are not split: keeping your micro-batch size: samples/s by size 2:"
    )
    assert distance(plain, ours) == 0 and ours.record.hooks == plain.record.hooks


@pytest.mark.usefixtures("no_alarm")
def test_a_search_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch, timed: dict[int, float]) -> None:
    """And keeps nothing of the trial that did: its tensors would stay on the device."""
    monkeypatch.setattr(search_run, "LIMIT_S", 1.0)
    held: list[weakref.ref[torch.Tensor]] = []

    class Slow(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            if len(batch[0]) > 16 and self.trainer.global_step == 0:
                large = torch.ones(8)
                held.append(weakref.ref(large))
                while True:
                    pass
            return super().loss(batch)

    gc.disable()
    try:
        done = run(AUTO, EVEN(), Slow, **ACCUMULATE)
        assert held and held[0]() is None
    finally:
        gc.enable()
    assert "keeping your micro-batch size: nothing could be tried: it took longer than 1 s" in done.verdict("batch").why


def test_ctrl_c_leaves_nothing_behind(timed: dict[int, float]) -> None:
    """B8: loggers, `log`, modes and threads are what they were; nothing is remembered."""
    module = Hungry(16, KeyboardInterrupt())
    logger, fits = Memory(), KeepsTrainers()

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(AUTO, EVEN(), lambda: module, logger=logger, callbacks=(fits,), **ACCUMULATE)
    (trainer,) = fits.trainers
    assert trainer.global_step == 0 and trainer.loggers == [logger] and "log" not in vars(module)
    assert module.training and all(each.grad is None for each in module.parameters())
    module.most = 32
    assert run(AUTO, EVEN(), lambda: module, **ACCUMULATE).seen("batch")["rates"]


KILLED = """
import os, signal
from tests.runs import Net, batches, run

class Dies(Net):
    def loss(self, batch):
        if len(batch[0]) == 16:
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch)

run({"batch": {}}, batches(96, shuffle=True), Dies, max_epochs=2, accumulate_grad_batches=4)
"""


@pytest.mark.usefixtures("quick_starts")
def test_a_search_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    """Neither notes that the next run would believe, nor anything half written."""
    homes = {name: str(tmp_path / name) for name in ("XDG_CACHE_HOME", "TMPDIR")}
    for place in homes.values():
        Path(place).mkdir()
    environ = os.environ | homes | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL and "killed" in done.stdout, done.stderr[-2000:]
    left = [path for place in homes.values() for path in Path(place).rglob("*") if path.is_file()]
    assert left == []


def test_a_lost_device_ends_it_at_once(timed: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """B7: every later call would fail; the user's own error says why."""
    lost = RuntimeError("CUDA error: device-side assert triggered")
    tried: list[int] = []

    def synchronize(_device: Any) -> None:
        if tried:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Asserts(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            if len(batch[0]) == 16:
                tried.append(16)
                raise lost
            return super().loss(batch)

    monkeypatch.setattr(played, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="device-side assert") as raised:
        run(AUTO, EVEN(), Asserts, **ACCUMULATE)
    assert raised.value is lost and tried == [16]


def test_a_ladder_searches_in_long_runs_only(timed: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    made = runs.watching

    def by_ladder(*args: Any, **settings: Any) -> Any:
        loop = made(*args, **settings)
        loop.config = dataclasses.replace(loop.config, by_ladder=frozenset({"batch"}))
        return loop

    monkeypatch.setattr(runs, "watching", by_ladder)
    monkeypatch.setattr(read_facts, "COUNTED_HOOKS", ())  # else the callback that records batches would be heard
    plain, ours = both(AUTO, EVEN, **ACCUMULATE)
    assert ours.verdict("batch").why == "this run is too short to search for a micro-batch: 6 steps"
    assert distance(plain, ours) == 0 and ours.record.hooks == plain.record.hooks
    assert run(AUTO, EVEN(), **ACCUMULATE | {"max_epochs": 80}).seen("batch")["micro_batch"] == 16


def test_rungs_that_wait_are_on_while_sizes_are_timed_and_off_for_step_1(
    timed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else float32 would choose for bfloat16. What the first step trains on is the run with the number by hand."""
    seen: list[tuple[str, bool, bool]] = []

    class Pictures(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(
                0, torch.nn.Sequential(torch.nn.Unflatten(1, (2, 2, 2)), torch.nn.Conv2d(2, 2, 2), torch.nn.Flatten())
            )
            self.net[1] = torch.nn.Linear(2, 16)

        def loss(self, batch: Any) -> torch.Tensor:
            kernel = self.net[0][1].weight
            seen.append((now[0], torch.is_autocast_enabled("cpu"), kernel.is_contiguous()))
            return super().loss(batch)

    now = ["run"]

    def during(name: str, call: Any) -> Any:
        def watched(own: Any, *args: Any) -> Any:
            now[0] = name
            try:
                return call(own, *args)
            finally:
                now[0] = "run"

        return watched

    for name in ("play_plain", "_time_each"):
        monkeypatch.setattr(search_run.SearchRun, name, during(name, getattr(search_run.SearchRun, name)))
    rungs = {"amp": {}, "layout": {}}
    by_hand = run({**BY_HAND, **rungs}, EVEN(), Pictures, **ACCUMULATE)
    seen.clear()
    ours = run({**AUTO, **rungs}, EVEN(), Pictures, **ACCUMULATE)
    assert {each[1:] for each in seen if each[0] == "play_plain"} == {(False, True)}
    assert {each[1:] for each in seen if each[0] == "_time_each"} == {(True, False)}
    first = next(number for number, each in enumerate(seen) if each[0] == "_time_each")
    assert next(each for each in seen[first:] if each[0] == "run") == ("run", False, True)
    assert ours.verdict("amp").took is True and ours.seen("batch")["micro_batch"] == 16
    assert distance(by_hand, ours) == 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A device of 120 GiB, 15 of them others', on which a micro-batch takes 10 GiB and 4 a sample, or less with amp."""
    state: dict[str, Any] = {"room": 100, "played": [], "retries": {}, "with_amp": 4, "stances": []}
    play = search_run.SearchRun._play

    def watched(own: Any, piece: Any) -> float:
        state["played"].append(piece.samples)
        state["stances"].append((piece.samples, torch._dynamo.eval_frame._stance.stance))
        with own.strategy.precision_plugin.train_step_context():
            state["a_sample"] = state["with_amp"] if torch.is_autocast_enabled("cpu") else 4
        return play(own, piece)

    fakes = {
        "mem_get_info": lambda _device: (105 * GIB, 120 * GIB),
        "memory_reserved": lambda _device: 0,
        "max_memory_reserved": lambda _device: (10 + state["a_sample"] * state["played"][-1]) * GIB,
        "reset_peak_memory_stats": lambda _device: state.update(forgotten=len(state["played"])),
        "memory_stats": lambda _device: {
            "num_alloc_retries": sum(state["retries"].get(size, 0) for size in state["played"])
        },
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(search_run.SearchRun, "_play", watched)
    monkeypatch.setattr(search_run.Room, "_read_bytes", lambda *_: state["room"] * GIB)
    return state


GIB = 2**30


@pytest.mark.parametrize(
    ("room", "retries", "never", "took", "why"),
    [
        (100, {}, {32}, 16, "by memory: 32 would take about 138.0 of 100.0 GiB (15.0 GiB are held by others)"),
        (140, {}, set(), 32, "by the samples of your optimizer step, not by memory"),
        (140, {16: 2}, {32}, 8, "by memory: 16 takes 74.0 (2 allocations had to be retried) of 140.0 GiB"),
        (30, {}, {8, 16, 32}, 4, "by memory: 8 would take about 42.0 of 30.0 GiB"),
    ],
)
def test_memory_is_predicted_before_it_is_taken(
    room: int, retries: Any, never: set[int], took: int, why: str, timed: dict[int, float], device: dict[str, Any]
) -> None:
    """What is expected not to fit never runs, and what only fits after retries is not taken."""
    device |= {"room": room, "retries": retries}
    timed |= {32: 1.0, 16: 2.0, 8: 4.0, 4: 8.0}
    done = run(AUTO, EVEN(), partial(Net, torch.optim.AdamW), **ACCUMULATE)
    assert not never & set(device["played"]) and done.seen("batch")["micro_batch"] == took
    assert why in done.verdict("batch").why and took in device["played"]
    assert done.seen("batch").get("room_gib") == (room if why.startswith("by memory") else None)
    assert device["forgotten"] == len(device["played"]), "the peak of trials is none of the training"


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], set[int]]]:
    """For each rehearsal, its rungs and the samples in the calls that it replays."""
    seen: list[tuple[list[str], set[int]]] = []
    really = Rehearsal.run

    def watched(rehearsal: Rehearsal, *rest: Any) -> Any:
        samples = {len(call.args[0]) for call in rehearsal._recorder.calls}
        seen.append(([step.rung for step in rehearsal.steps], samples))
        return really(rehearsal, *rest)

    monkeypatch.setattr(Rehearsal, "run", watched)
    return seen


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda made, **_how: really(made, backend="eager"))


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(("with_amp", "grows"), [(2, True), (4, False)])
def test_a_size_that_only_fits_with_a_rung_is_used_once_the_rung_is_on(
    with_amp: int, grows: bool, timed: dict[int, float], device: dict[str, Any], rehearsed: Any
) -> None:
    """The compile waits for it, so that the model is compiled once, for these calls."""
    device["with_amp"] = with_amp
    timed |= {32: 1.0, 16: 2.0, 8: 4.0, 4: 8.0}
    plain = run(None, EVEN(), **ACCUMULATE)
    ours = run({**AUTO, "amp": {}, "compile": {}}, EVEN(), **ACCUMULATE)
    assert ours.verdict("amp").took and ours.verdict("compile").took and ours.trainer.global_step == 6
    assert ours.seen("batch")["micro_batch"] == (32 if grows else 16)
    assert rehearsed == ([(["amp"], {16}), (["compile"], {32})] if grows else [(["amp", "compile"], {16})])
    assert ("32 only fits with amp" in ours.verdict("batch").why) is grows
    assert ours.seen("batch")["micro_batches"] == ([32] if grows else [16, 16])
    as_trained = {samples for samples, stance in device["stances"] if stance == "default"}
    assert as_trained == {16, 32}, "with the graphs that the rungs capture"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) < 0.02


@pytest.mark.parametrize(("theirs", "took"), [((16, 32), 32), ((16, None), 16), ((8, 16), 16), ((8, None), 8)])
def test_ranks_agree_on_the_size_that_needs_a_rung(
    theirs: tuple[int, int | None],
    took: int,
    timed: dict[int, float],
    device: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank has less room, or none for larger sizes."""
    device["with_amp"] = 2
    timed |= {32: 1.0, 16: 2.0, 8: 4.0, 4: 8.0}
    other = FoundSize(size=theirs[0], later=theirs[1])
    monkeypatch.setattr(search, "gather", lambda _trainer, mine: [mine, (other, mine[1])])
    ours = run({**AUTO, "amp": {}}, EVEN(), **ACCUMULATE)
    assert ours.seen("batch")["micro_batch"] == took and ours.trainer.global_step == 6


class Contrast(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]).mean() - 1).square()


@pytest.mark.parametrize("module", [Contrast, Net])
def test_the_larger_size_is_compared_before_it_is_used(
    module: type[Net], timed: dict[int, float], device: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step ran in batches of the user's size, in which a loss that compares samples is no other."""
    device["with_amp"] = 2
    timed |= {32: 1.0, 16: 2.0, 8: 4.0, 4: 8.0}
    other = FoundSize(size=8, later=16)
    monkeypatch.setattr(search, "gather", lambda _trainer, mine: [mine, (other, mine[1])])
    ours = run({**AUTO, "amp": {}}, EVEN(), module, **ACCUMULATE)
    assert ours.verdict("batch").took is (module is Net)
    assert ("not a mean over samples" in ours.verdict("batch").why) is (module is Contrast)
    assert ours.seen("batch")["apart_steps"] == (0 if module is Net else 5)
    assert ours.loop is not None and (step := ours.loop.plan.step("batch")) is not None
    assert step.change.parity == "approximate", "nothing was trained on that changes the training"


def test_a_size_that_does_not_fit_after_all_is_not_used(
    timed: dict[int, float], device: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rung was left out, or another process took the memory."""
    device["with_amp"] = 2
    timed |= {32: 1.0, 16: 2.0, 8: 4.0, 4: 8.0}
    monkeypatch.setattr(search, "fits_in_memory", lambda _strategy, size, _trial: size < 32)
    ours = run({**AUTO, "amp": {}}, EVEN(), **ACCUMULATE)
    assert ours.seen("batch")["micro_batch"] == 16 and ours.seen("batch")["micro_batches"] == [16, 16]
    assert "32 did not fit after all" in ours.verdict("batch").why and ours.trainer.global_step == 6


@pytest.mark.usefixtures("compiles")
def test_a_named_size_that_only_fits_with_a_rung_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, rehearsed: Any
) -> None:
    tries = list[int]()

    def play(_run: Any, piece: Any) -> float:
        tries.append(piece.samples)
        if len(tries) == 1:
            raise torch.OutOfMemoryError(SAYS)
        return 1.0

    monkeypatch.setattr(choice, "LIMITED", ("cpu",))
    monkeypatch.setattr(search_run.SearchRun, "_play", play)
    ours = run({**BY_HAND, "amp": {}, "compile": {}}, EVEN(), **ACCUMULATE)
    assert rehearsed == [(["amp"], {8}), (["compile"], {16})] and tries == [16, 16]
    assert ours.seen("batch")["apart_steps"] == 1 and ours.verdict("compile").took


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.LBFGS, {}, optimizer_twins.STATE_COPIES),  # its step wants a closure
    ],
)
def test_the_state_that_an_optimizer_will_have(kind: Any, options: Any, copies: int) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    before = [each.clone() for each in model.parameters()]
    assert optimizer_twins.count_state_bytes(optimizer) == pytest.approx(copies * 4 * 10_100, rel=0.01)
    assert not optimizer.state and all(map(torch.equal, before, model.parameters()))
    if kind is torch.optim.AdamW:
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        assert optimizer_twins.count_state_bytes(optimizer) == 0, "it is there, and takes its memory already"


def pad(samples: Any) -> Any:
    """The samples from number 32 on are three times as long."""
    x, y, numbers = torch.utils.data.default_collate(samples)
    return x.repeat(1, 3 if int(numbers.max()) >= 32 else 1), y, numbers


LENGTHS = Noted()
"""Of all that ran, tries as well."""


class Padded(Keeps):
    """Fits `most` numbers; a sample has 8 of them, or 24."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.net[1] = torch.nn.Identity()  # BatchNorm would keep the user's batch whole
        self.most = most

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LENGTHS.add(tuple(batch[0].shape))
        if batch[0].numel() > self.most:
            raise torch.OutOfMemoryError(SAYS)
        return super().training_step([batch[0][:, :8].clone(), *batch[1:]], batch_idx)


def fit_padded(rungs: Any, most: int) -> tuple[Run, Memory]:
    random.seed(0)
    numpy.random.seed(0)
    logger, data = Memory(), batches(64, 16, collate_fn=pad)
    LENGTHS.take()
    return run(rungs, data, partial(Padded, most), logger=logger, log_every_n_steps=1, max_epochs=2), logger


@pytest.fixture
def four(timed: dict[int, float]) -> None:
    """Micro-batches of 4 are the fastest."""
    timed |= {2: 4.0, 4: 1.0, 8: 8.0, 16: 16.0}


@pytest.mark.usefixtures("four")
def test_a_longer_batch_is_tried_once_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits leaves no trace: it is the run with the number written by hand."""
    monkeypatch.setattr("fastloop.bridge.apply.micro.choice.RARER", 1_000)  # gradients are compared once
    by_hand, ours = fit_padded({"batch": {"micro_batch": 4}}, 500), fit_padded(AUTO, 500)
    assert ours[0].seen("batch")["micro_batch"] == 4 and list_traces(by_hand, ours) == set()
    long = [shape for shape in LENGTHS.take() if shape[1] == 24]
    assert long == [(4, 24)] * (1 + 2 * 2 * 4), "one try, and four pieces of two batches of each epoch"


@pytest.mark.usefixtures("four")
def test_longer_samples_that_do_not_fit_take_a_smaller_size() -> None:
    plain = fit_padded(None, 500)
    with pytest.warns(UserWarning, match="has 26 values per sample, and micro-batches of 4 do not fit; using .* of 2"):
        ours = fit_padded(AUTO, 50)
    assert ours[0].seen("batch")["micro_batch"] == 2 and ours[0].module.samples == plain[0].module.samples
    assert "; 4 did not fit longer samples that came later" in ours[0].verdict("batch").why
    said = "nor do smaller ones; using micro-batches of 1 from now on .limited by memory.*shorten your longest"
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match=said):
        fit_padded(AUTO, 23)


class Skips(Padded):
    """Takes no step of the longer batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch[0].shape[1] == 8 else None


@pytest.mark.usefixtures("four")
@pytest.mark.filterwarnings("error:a later batch")
def test_longer_samples_that_the_user_skips_change_nothing() -> None:
    ours = run(AUTO, batches(64, 16, collate_fn=pad), partial(Skips, 500), max_epochs=2)
    assert ours.seen("batch")["micro_batch"] == 4 and "did not fit" not in ours.verdict("batch").why


@pytest.mark.usefixtures("four")
def test_a_batch_that_runs_whole_anyway_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a limited number of tokens: the longer their samples, the fewer. And steps without a try cost none."""
    spans: list[str] = []
    add = OneTime.add_span
    monkeypatch.setattr(
        OneTime, "add_span", lambda ledger, cause, *ends: [spans.append(cause), add(ledger, cause, *ends)]
    )
    sizes = [range(16), range(16, 32), *(range(start, start + 3) for start in range(32, 62, 3))]
    data = torch.utils.data.DataLoader(numbered(64), batch_sampler=list(map(list, sizes)), collate_fn=pad)
    LENGTHS.take()
    ours = run(AUTO, data, partial(Padded, 500))
    assert ours.seen("batch")["micro_batch"] == 4
    assert [shape for shape in LENGTHS.take() if shape[1] == 24] == [(3, 24)] * 10
    assert spans.count("rehearsal") <= 2, "the search, and the first batch that was cut"


# -- a size that counts on a compile ----------------------------------------------------------------------------------


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))


MS = {8: 8.0, 16: 10.0, 32: 12.0}


def fit_compiled(monkeypatch: pytest.MonkeyPatch, backend: Any, ms: dict[int, float] = MS) -> Run:
    """A run with `auto` and `compile`. Eager BatchNorm in groups makes merged batches slow, and one call makes them
    fast."""
    really = torch.compile
    monkeypatch.setattr(
        search_run.SearchRun, "_read_ms", lambda _run, piece: ms[piece.samples] * (4 if piece.groups > 1 else 1)
    )
    monkeypatch.setattr(torch, "compile", lambda made, **_how: really(made, backend=backend))
    done = run(AUTO | {"compile": {}}, EVEN(), Normed, **ACCUMULATE)
    monkeypatch.setattr(torch, "compile", really)
    return done


def test_sizes_are_timed_as_the_compiled_model_will_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, eager = run(None, EVEN(), Normed, **ACCUMULATE), run(AUTO, EVEN(), Normed, **ACCUMULATE)
    ours = fit_compiled(monkeypatch, "eager")
    assert ours.verdict("compile").took is True
    assert ours.seen("batch")["micro_batch"] == 32 and ours.seen("batch")["micro_batches"] == [32]
    assert ours.seen("batch")["rates"] == pytest.approx({"8": 1e3, "16": 1.6e3, "32": 32e3 / 12})
    assert ours.module.samples == plain.module.samples and distance(plain, ours) < 1e-5
    assert distance(plain, eager) < 1e-5


def test_a_size_that_is_the_best_without_a_compile_too_stays_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler today")

    for how in ("samples/s by size", "the fastest in an earlier run"):
        ours = fit_compiled(monkeypatch, fail, {8: 32.0, 16: 20.0, 32: 12.0})
        assert how in ours.verdict("batch").why and ours.seen("batch")["micro_batch"] == 32


def test_a_refused_compile_brings_the_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the user's own, which the next run takes from the beginning."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler today")

    plain = run(None, EVEN(), Normed, **ACCUMULATE)
    for said in ("8 because compile was refused, and 32 was for the compiled model", "keeping your micro-batch size"):
        ours = fit_compiled(monkeypatch, fail)
        assert "no compiler today" in (ours.reason("compile") or "") and said in ours.verdict("batch").why
        assert ours.seen("batch")["micro_batch"] == 8 and ours.verdict("batch").took is False
        assert ours.module.samples == plain.module.samples and distance(plain, ours) < 1e-5
