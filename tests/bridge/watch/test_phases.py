"""Which of Lightning's actions is which phase, and that marking them stands in nobody's way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler

from fastloop.bridge.watch.phases import BODY, NEXT, NOTHING, PIECE, Marks, find_phase
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_clock import Clock
from tests.bridge.watch.made_up import CPU, Time
from tests.models import Regression, loader, trainer

pytestmark = pytest.mark.short

CHECKPOINT = "[Callback]ModelCheckpoint{'monitor': 'a.b', 'mode': 'min'}"
FORWARD, BACKWARD = "[Strategy]DDPStrategy.training_step", "[Strategy]DDPStrategy.backward"


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        (FORWARD, "forward"),
        (BACKWARD, "backward"),
        ("[Strategy]FastLoop_DDPStrategy.batch_to_device", "h2d"),
        ("[LightningModule]Net.optimizer_step", "optimizer"),
        ("optimizer_step", "optimizer"),
        ("save_checkpoint", "checkpoint"),
        (f"{PIECE}backward", "backward"),
        (f"{CHECKPOINT}.on_train_batch_end", "callbacks_logging"),
        ("[LightningModule]Net.on_after_backward", "callbacks_logging"),
        ("[LightningModule]Net.on_validation_model_zero_grad", "begin:validation"),
        ("[LightningModule]Net.on_validation_model_eval", "begin:validation"),
        ("[Callback]Bar.on_validation_start", "begin:validation"),
        ("[LightningModule]Net.on_validation_model_train", "end:validation"),
        ("[Callback]Bar.on_train_epoch_end", "begin:epoch_gap"),
        ("[LightningModule]Net.on_train_epoch_end", "begin:epoch_gap"),
        ("[Callback]Beats.on_train_batch_end", None),
        ("[Callback]BeatsOfMine.on_train_batch_end", "callbacks_logging"),
        ("[Callback]FastLoop.on_train_batch_end", None),
        ("[Strategy]X.validation_step", None),
        ("[LightningModule]Net.lr_scheduler_step", "callbacks_logging"),
        ("run_training_epoch", None),
        ("[LightningModule]Net.configure_gradient_clipping", None),
        ("[LightningModule]Net.optimizer_zero_grad", None),
        ("[_EvaluationLoop].val_next", None),
        ("a user's own", None),
        ("", None),
        (".", None),
    ],
)
def test_the_phase_of_an_action(action: str, phase: str | None) -> None:
    assert find_phase(action) == phase


class Notes(Clock):
    """A clock that notes what it is told."""

    def __init__(self, warmup_steps: int = 0) -> None:
        super().__init__(CPU, warmup_steps, one_time=OneTime())
        self.told: list[str] = []

    def enter(self, phase: str) -> None:
        self.told.append(f"+{phase}")
        super().enter(phase)

    def leave(self) -> None:
        self.told.append("-")
        super().leave()

    def rest(self, phase: str) -> None:
        self.told.append(f"rest {phase}")
        super().rest(phase)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """Open, with a batch."""
    Time(monkeypatch)
    made = Notes()
    made.note_batch_requested()
    made.note_batch_received()
    made.told.clear()
    yield made
    made.close()


def test_phases_nest_and_what_is_none_costs_nothing(clock: Notes) -> None:
    marks = Marks(clock)
    with marks.profile(BODY), marks.profile("[LightningModule]N.optimizer_step"):
        assert marks.in_work
        with marks.profile(FORWARD), marks.profile(f"{PIECE}backward"):
            assert clock.phase == "backward"
        assert clock.phase == "optimizer"
        with marks.profile("[Callback]A.on_before_zero_grad"):
            assert clock.phase == "callbacks_logging"
    assert clock.told == ["+optimizer", "+forward", "+backward", "-", "-", "+callbacks_logging", "-", "-"]
    assert clock.phase == "host_other" and not marks.in_work and not clock.in_body
    assert marks.profile("run_training_epoch") is NOTHING
    assert marks.profile(FORWARD) is marks.profile(FORWARD), "looked up once"


def test_a_hook_that_nobody_has_overridden_is_not_marked(clock: Notes) -> None:
    marks = Marks(clock)
    marks.empty_hooks = {"[Callback]A.on_before_zero_grad", "[Callback]A.on_validation_start"}
    with marks.profile(BODY):
        assert marks.profile("[Callback]A.on_before_zero_grad") is NOTHING
        assert marks.profile("[Callback]B.on_before_zero_grad") is not NOTHING
        with marks.profile("[Callback]A.on_validation_start"):
            assert clock.phase == "validation", "a turn is one, whoever hears of it"


def test_an_exception_passes_and_every_phase_is_left(clock: Notes) -> None:
    marks = Marks(clock)
    with pytest.raises(KeyError, match="user"), marks.profile(BODY), marks.profile(FORWARD):
        raise KeyError("user's own")
    assert clock.told == ["+forward", "-"] and not marks.in_work and clock.phase == "host_other"


def test_only_steps_in_detail_are_marked_inside_and_all_steps_outside(clock: Notes) -> None:
    marks = Marks(clock)
    clock.detailed = False
    with marks.profile(BODY):
        assert marks.profile(FORWARD) is NOTHING is marks.profile("[Callback]A.on_before_zero_grad")
    assert marks.profile("[Callback]A.on_train_batch_end") is not NOTHING
    clock.detailed = True
    with marks.profile(BODY):
        assert marks.profile(FORWARD) is not NOTHING
    clock.close()
    assert marks.profile("[Callback]A.on_train_batch_end") is NOTHING is marks.profile(FORWARD)


def test_before_the_window_nothing_is_marked() -> None:
    clock = Notes(warmup_steps=3)
    clock.note_batch_requested()
    clock.note_batch_received()
    marks = Marks(clock)
    with marks.profile(BODY), marks.profile(FORWARD), marks.profile("[Callback]A.on_before_zero_grad"):
        pass
    assert clock.told == [] and dict(marks.hooks_s) == {}


def test_inside_validation_only_a_checkpoint_is_marked(clock: Notes) -> None:
    marks = Marks(clock)
    with marks.profile(BODY):
        pass
    for hook in ("on_validation_model_zero_grad", "on_validation_model_eval"):
        with marks.profile(f"[LightningModule]N.{hook}"):
            assert clock.phase == "validation"
    for name in ("[Strategy]X.batch_to_device", "[Callback]A.on_validation_batch_end", BACKWARD):
        assert marks.profile(name) is NOTHING
    with marks.profile("save_checkpoint"):
        assert clock.phase == "checkpoint"
        assert marks.profile("[Callback]A.on_save_checkpoint") is NOTHING, "a part of the checkpoint"
    assert clock.phase == "validation"
    with marks.profile("[LightningModule]N.on_validation_model_train"):
        assert clock.phase == "validation"
    assert clock.phase == "host_other"
    assert clock.told == ["rest validation", "+checkpoint", "-", "rest host_other"]


def test_the_gap_between_epochs_lasts_until_the_next_batch(clock: Notes) -> None:
    marks = Marks(clock)
    with marks.profile(BODY):
        pass
    for callback in "AB":
        with marks.profile(f"[Callback]{callback}.on_train_epoch_end"):
            assert clock.phase == "epoch_gap"
    assert marks.profile("[Callback]A.on_train_epoch_start") is NOTHING
    clock.note_batch_requested()
    assert clock.phase == "epoch_gap", "the loader starts its workers"
    clock.note_batch_received()
    assert clock.phase == "host_other" and clock.told == ["rest epoch_gap", "+epoch_gap"]


def test_hooks_are_timed_by_name_and_nothing_else_is(clock: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    time, marks = Time(monkeypatch), Marks(clock)
    for whole in (False, True, True, True):
        marks.in_window = whole
        with marks.profile("[Callback]A.on_train_batch_end"):
            time.passes(0.5)
        with marks.profile("[Callback]FastLoop.on_train_batch_end"), marks.profile(FORWARD):
            time.passes(0.5)
    assert dict(marks.hooks_s) == {"[Callback]A.on_train_batch_end": pytest.approx(1.5)}


class Ranges:
    def __init__(self) -> None:
        self.log: list[str] = []

    def push(self, name: str) -> None:
        self.log.append(name)

    def pop(self) -> None:
        self.log.append("-")


def test_a_trace_gets_the_phases_with_the_window_closed(clock: Notes) -> None:
    marks = Marks(clock)
    clock.close()
    marks.ranges = ranges = Ranges()
    with marks.profile("[Callback]A.on_train_epoch_end"):  # an epoch ends within the trace
        pass
    with marks.profile(BODY), marks.profile(FORWARD), marks.profile(f"{PIECE}backward"):
        pass
    assert ranges.log == ["forward", "backward", "-", "-"]


class Around:
    reforms_backward = False

    def __init__(self) -> None:
        self.log: list[str] = []

    def __enter__(self) -> None:
        self.log.append("+")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.log.append("-" if kind is None else kind.__name__)


def test_what_stands_around_the_work_is_entered_once_per_forward_and_backward() -> None:
    marks, around = Marks(Notes(warmup_steps=9)), Around()
    marks.around_work = around
    with marks.profile(BODY), marks.profile("[LightningModule]N.optimizer_step"):
        with marks.profile(FORWARD), marks.profile(f"{PIECE}backward"):
            pass
        with marks.profile(BACKWARD):
            pass
    assert around.log == ["+", "-", "+", "-"] and not marks.counts
    with pytest.raises(KeyError), marks.profile(BODY), marks.profile(FORWARD):
        raise KeyError
    assert around.log[4:] == ["+", "KeyError"] and not marks.counts


@pytest.mark.parametrize("change", ["comes", "goes"])
def test_what_stands_around_the_work_may_change_inside_it(change: str) -> None:
    """Where training_step fetches its batches itself, or watching gives up: what was entered is left, nothing else."""
    marks, around = Marks(Notes(warmup_steps=9)), Around()
    marks.around_work = around if change == "goes" else None
    marks.ranges = Ranges()
    with marks.profile(BODY), marks.profile(FORWARD):
        marks.around_work = None if change == "goes" else around
    assert around.log == (["+", "-"] if change == "goes" else []) and not marks.counts


def test_around_a_forward_comes_what_it_says_and_goes_whatever_happens(clock: Notes) -> None:
    marks, log = Marks(clock), []

    def around() -> Any:
        log.append("before")
        return lambda: log.append("after")

    marks.around_forward = around
    with marks.profile(BACKWARD):
        pass
    with pytest.raises(KeyError), marks.profile(FORWARD):
        raise KeyError
    marks.around_forward = None
    with marks.profile(FORWARD):
        pass
    assert log == ["before", "after"]


def test_lightning_has_not_renamed_what_is_read_here(tmp_path: Path) -> None:
    names: set[str] = set()

    class Overrides(Regression):
        def on_validation_model_train(self) -> None:  # the action is there for those only who do
            super().on_validation_model_train()

    class Listens(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            names.add(action_name)

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    made = trainer(profiler=Listens(), max_epochs=2, enable_checkpointing=True, callbacks=[saves])
    made.fit(Overrides(), loader(), loader())
    read = {find_phase(name) for name in names}
    assert (
        {
            "h2d",
            "forward",
            "backward",
            "optimizer",
            "callbacks_logging",
            "checkpoint",
            "begin:validation",
            "end:validation",
            "begin:epoch_gap",
        }
        <= read
        and BODY in names
        and any(name.endswith(NEXT) for name in names)
    )


def test_what_a_checkpoint_hook_does_after_saving_is_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    time_s = [10.0]
    monkeypatch.setattr("fastloop.evidence.clock.step_clock.now", lambda: time_s[0])
    monkeypatch.setattr("time.perf_counter", lambda: time_s[0])
    clock = Clock(CPU, warmup_steps=0, one_time=OneTime())
    marks = Marks(clock)

    def passes(ms: float) -> None:
        time_s[0] += ms / 1e3

    for number in range(40):
        clock.note_batch_requested()
        clock.note_batch_received()
        with marks.profile(BODY):
            passes(5)
        with marks.profile("[Callback]ModelCheckpoint{'every': 1}.on_train_batch_end"):
            passes(1)
            for _ in range(2):  # the best one, and the last one
                with marks.profile("save_checkpoint"):
                    passes(3)
                passes(2)  # deletes the one before
        with marks.profile("[Callback]Other.on_train_batch_end"):
            passes(4)
        clock.batch_done(8, step_ends=True)
        assert clock.phase == "host_other", number
    window = clock.close()
    assert window is not None
    found = {phase: round(1e3 * seconds, 3) for phase, seconds in window.parts_s.items()}
    assert found["checkpoint"] == 10 and 4 <= found["callbacks_logging"] <= 5
