"""The looks at single steps, driven by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fastloop.bridge.apply.state.untouched import preserve_state
from fastloop.bridge.watch.phases import BODY, Marks
from fastloop.bridge.watch.probes import MOST_LEAD_IN, CountWork, HuntSyncs, TraceProbe
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_clock import Clock
from tests.bridge.watch.made_up import CPU, forget_compiles

FORWARD, BACKWARD = "[Strategy]S.training_step", "[Strategy]S.backward"
BY_HAND = 3 * 2 * 8 * 16 - 2 * 8 * 16
"""A layer of 8 by 16, whose input needs no gradient."""


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    forget_compiles()


@pytest.fixture
def marks() -> Marks:
    """Of a clock that is still in its warm-up."""
    return Marks(Clock(CPU, warmup_steps=100, one_time=OneTime()))


def train(marks: Marks, model: torch.nn.Module, rows: int = 4, elsewhere: int = 0) -> None:
    """One batch, with work outside forward and backward too."""
    with marks.profile(BODY), marks.profile("[LightningModule]N.optimizer_step"):
        with marks.profile(FORWARD):
            loss = model(torch.ones(rows, 8)).sum()
        with marks.profile(BACKWARD):
            loss.backward()
        for _ in range(elsewhere):
            torch.ones(64, 64) @ torch.ones(64, 64)


def test_work_is_counted_per_sample_over_the_batches_of_a_step(marks: Marks) -> None:
    look, model = CountWork(), torch.nn.Linear(8, 16)
    look.attach(model, marks)
    train(marks, model)
    look.batch(4)  # before its step: none of it counts
    look.begin()
    for rows in (4, 2):
        train(marks, model, rows, elsewhere=3)
        look.batch(rows)
    look.end()
    train(marks, model)
    look.batch(4)
    look.end()
    assert look.found["per_sample"] == BY_HAND == look.found["matmul"], "an optimizer's products are none of it"
    assert marks.around_work is None and _get_current_dispatch_mode_stack() == []


def test_a_step_that_raised_leaves_no_counting_behind(marks: Marks) -> None:
    look, model = CountWork(), torch.nn.Linear(8, 16)
    look.attach(model, marks)
    look.begin()
    with pytest.raises(RuntimeError, match="shapes"), marks.profile(BODY), marks.profile(FORWARD):
        assert len(_get_current_dispatch_mode_stack()) == 1, "it counts"
        model(torch.ones(4, 9))
    look.end()
    assert _get_current_dispatch_mode_stack() == [] and look.found["per_sample"] is None


def test_what_must_not_be_counted_says_why(marks: Marks) -> None:
    never = CountWork()
    never.begin()  # not attached: the fit has not started
    never.end()
    assert never.found["per_sample"] is None and "too short" in never.found["why"]
    look = CountWork()
    look.attach(torch.compile(torch.nn.Linear(8, 16), backend="eager"), marks)
    look.begin()
    assert marks.around_work is None
    look.end()
    assert look.found["per_sample"] is None and "compiled" in look.found["why"]


def test_modules_that_are_compiled_in_the_first_steps_are_counted_in_a_later_one(marks: Marks) -> None:
    """Something was compiled in this process: a step before ours cannot be counted while it runs."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    model = torch.nn.Linear(8, 16)
    look = CountWork(preserve_state)
    look.attach(model, marks)
    look.begin()
    train(marks, model)
    look.batch(4)
    look.end()
    assert look.found["per_sample"] is None and "torch.compile is in use" in look.found["why"]
    model.compile(backend="eager")
    look.begin()
    train(marks, model)
    look.batch(4)
    look.end()
    assert look.found["per_sample"] == BY_HAND


def test_the_calls_of_a_compiled_module_are_counted_after_the_step(marks: Marks) -> None:
    model = torch.compile(torch.nn.Linear(8, 16), backend="eager")
    look = CountWork(preserve_state)
    look.attach(model, marks)
    train(marks, model)
    look.begin()
    assert marks.around_work is None, "the step stays as it is"
    for rows in (4, 2):
        train(marks, model, rows)
        look.batch(rows)
    look.end()
    assert look.found["per_sample"] == BY_HAND and "without data" in look.found["source"]
    forward = vars(model)["forward"]
    look.begin()
    assert vars(model)["forward"] is forward, "it is known"


def test_a_compiled_step_that_is_given_up_leaves_the_module_alone(marks: Marks) -> None:
    model = torch.compile(torch.nn.Linear(8, 16), backend="eager")
    forward = vars(model)["forward"]
    look = CountWork(preserve_state)
    look.attach(model, marks)
    look.begin()
    assert vars(model)["forward"] is not forward
    look.give_up()
    assert vars(model)["forward"] is forward


def test_a_step_without_work_is_counted_again_and_one_with_it_is_not(marks: Marks) -> None:
    look, model = CountWork(), torch.nn.Linear(8, 16)
    look.attach(model, marks)
    for number in (1, 2):
        look.begin()
        with marks.profile(BODY), marks.profile(FORWARD):
            if number == 2:
                model(torch.ones(4, 8))  # and returns None
        look.batch(4)
        look.end()
        assert look.found["per_sample"] is None and "the counted step had no" in look.found["why"]
    look.begin()
    train(marks, model)
    look.batch(4)
    look.end()
    assert look.found["per_sample"] == BY_HAND, "what was seen before is not added"
    look.begin()
    assert marks.around_work is None, "it is known"


class Module:
    """Reads a number a step, and logs."""

    def __init__(self) -> None:
        self.logged: list[str] = []

    def log(self, name: str, value: Any, **_: Any) -> None:
        self.logged.append(name)

    def step(self) -> None:
        torch.ones(()).item()  # a line of the user's
        self.log("loss", 1.0)


def test_the_hunt_names_the_line_per_step_and_leaves_everything_as_it_was() -> None:
    look, module = HuntSyncs(CPU), Module()
    look.attach(module)
    module.step()
    look.begin()
    assert len(_get_current_function_mode_stack()) == 1 and "log" in vars(module)
    for _ in range(3):
        module.step()
        module.step()
        look.step_ends()
    look.end()
    module.step()
    look.end()
    assert _get_current_function_mode_stack() == [] and "log" not in vars(module) and module.logged == ["loss"] * 8
    lines = Path(__file__).read_text().splitlines()
    number = 1 + next(index for index, line in enumerate(lines) if line.endswith("# a line of the user's"))
    (row,) = look.found
    assert look.hunted_steps == 3
    assert row["where"].endswith(f"test_probes.py:{number}") and row["per_step"] == 2.0 and row["ms_per_step"] is None


def test_a_hunt_that_never_began_found_nothing() -> None:
    look = HuntSyncs(CPU)
    look.end()
    assert look.found == () and look.steps > 0 and look.hunted_steps == 0


def trace(marks: Marks, place: Path | None, profiler: Any = None, steps: int = 2, queued: int = 0) -> TraceProbe:
    look = TraceProbe(SimpleNamespace(profiler=profiler), CPU, steps, lambda: place)
    look.attach(marks, queued)
    return look


@pytest.mark.parametrize("kept", [True, False], ids=["with a run directory", "without one"])
def test_a_trace_of_whole_steps(kept: bool, marks: Marks, tmp_path: Path) -> None:
    look, model = trace(marks, tmp_path if kept else None), torch.nn.Linear(8, 16)
    look.begin()
    for _ in range(look.steps):
        train(marks, model)
        look.step_ends()
    look.end()
    assert look.found.get("skipped") is None and look.found["steps"] == 2 and marks.ranges is None
    assert [path.name for path in tmp_path.iterdir()] == (["trace.json.gz"] if kept else [])
    if kept:
        with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        assert names.count("fastloop/forward") >= 2 and names.count("fastloop/optimizer") >= 2


def test_the_place_is_asked_for_when_it_begins(marks: Marks, tmp_path: Path) -> None:
    places: list[Path] = []
    look = TraceProbe(SimpleNamespace(profiler=None), CPU, 2, lambda: places.append(tmp_path) or tmp_path)
    look.attach(marks, 0)
    assert places == []
    look.begin()
    look.end()
    assert places == [tmp_path] and "skipped" in look.found, "it ended before a traced step"


@pytest.mark.parametrize(("queued", "lead_in"), [(0, 2), (8, 8), (1000, MOST_LEAD_IN)])
def test_the_queues_pass_first(marks: Marks, queued: int, lead_in: int) -> None:
    assert trace(marks, None, queued=queued).steps == lead_in + 1 + 2


def test_a_trainer_with_a_pytorch_profiler_gets_no_second_one(marks: Marks) -> None:
    class PyTorchProfiler: ...

    look = trace(marks, None, PyTorchProfiler())
    look.begin()
    for _ in range(look.steps):
        look.step_ends()
    look.end()
    assert "PyTorchProfiler" in look.found["skipped"]


def test_a_fit_that_ends_before_it_says_so(marks: Marks) -> None:
    assert "ended before" in trace(marks, None).found["skipped"]
