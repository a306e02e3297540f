"""The user's lines by looks at the training thread's stack, and what is not blamed on them."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fastloop.evidence.sync.line_samples import FIRST_STEP, LEAST_LOOKS, LineSamples

BUSY_S = 0.6


def make_caller(name: str, module: str) -> Callable[[Callable[[], None]], None]:
    """A function that looks like one of this module."""
    space: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(work): work()", space)
    return space[name]  # type: ignore[no-any-return]


fit = make_caller("fit", "lightning.pytorch.trainer.trainer")
fetch = make_caller("fetch", "torch.utils.data._utils.fetch")


def count_up(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while sorted(range(20_000), reverse=True) and time.perf_counter() < end:
        pass


def doze(seconds: float) -> None:
    time.sleep(seconds)


def rest(seconds: float) -> None:
    time.sleep(seconds)


def look_at(work: Callable[[], None]) -> Any:
    lines = LineSamples()
    lines.note_step(FIRST_STEP, 100)
    fit(work)
    lines.note_step(FIRST_STEP + 1, 100)
    lines.stop()
    return lines.describe()


@pytest.mark.parametrize("waste", [count_up, doze])
def test_the_function_that_takes_the_time_is_named(waste: Callable[[float], None]) -> None:
    def training_step() -> None:
        waste(BUSY_S)

    found = look_at(training_step)
    assert found["looks"] >= LEAST_LOOKS
    (line,) = found["lines"]
    assert (line["of"], line["function"]) == ("training_step", waste.__name__)
    path, _, number = line["where"].rpartition(":")
    assert path == "tests/evidence/sync/test_line_samples.py" and line["share_pct"] > 50
    assert 1 <= int(number) - waste.__code__.co_firstlineno <= 3


def test_of_two_functions_that_share_the_time_the_callers_line_is_named() -> None:
    def training_step() -> None:
        for waste in (rest, doze):
            waste(BUSY_S / 2)

    (line,) = look_at(training_step)["lines"]
    assert line["function"] == "training_step" and line["share_pct"] > 80


def test_loading_is_a_group_of_its_own() -> None:
    def training_step() -> None:
        doze(BUSY_S / 3)

    def read_sample() -> None:
        count_up(BUSY_S)

    def run() -> None:
        fetch(read_sample)
        training_step()

    # `run` stands for the loop here, so both groups begin with it.
    loading, step = look_at(run)["lines"]
    assert (loading["of"], loading["function"]) == ("loading", "count_up")
    assert step["function"] == "doze" and loading["share_pct"] > step["share_pct"]


def test_what_surrounds_the_fit_is_not_blamed() -> None:
    """The control: the same work inside it."""

    def sleep_outside() -> dict[str, Any]:
        lines = LineSamples()
        lines.note_step(FIRST_STEP, 100)
        make_caller("wait", "torch.nn.modules.module")(lambda: time.sleep(BUSY_S))
        lines.note_step(FIRST_STEP + 1, 100)
        lines.stop()
        return dict(lines.describe())

    assert sleep_outside()["lines"] == []
    assert look_at(lambda: time.sleep(BUSY_S))["lines"]


def test_of_many_lines_alike_the_line_that_called_them_is_named() -> None:
    def spread() -> None:
        time.sleep(BUSY_S / 3)
        time.sleep(BUSY_S / 3)
        time.sleep(BUSY_S / 3)

    def training_step() -> None:
        spread()

    (line,) = look_at(training_step)["lines"]
    assert line["function"] == "training_step" and line["share_pct"] > 80


def test_a_group_has_the_name_of_what_lightning_called_and_validation_is_none() -> None:
    call = make_caller("call", "lightning.pytorch.loops.optimization.closure")
    validate = make_caller("run", "lightning.pytorch.loops.evaluation_loop")
    ask = make_caller("next", "lightning.pytorch.utilities.combined_loader")

    def training_step() -> None:
        doze(BUSY_S / 2)

    def generate() -> None:
        rest(BUSY_S)

    def optimizer_step() -> None:
        validate(lambda: time.sleep(BUSY_S))
        call(training_step)
        ask(generate)

    loading, step = look_at(optimizer_step)["lines"]
    assert (loading["of"], loading["function"]) == ("loading", "rest")
    assert (step["of"], step["function"]) == ("training_step", "doze")
    assert loading["share_pct"] + step["share_pct"] > 90, "of the looks outside of validation"


def test_the_line_of_a_deep_recursion_is_named_with_its_share() -> None:
    def fall(deeper: int) -> None:
        time.sleep(BUSY_S / 40)
        if deeper:
            fall(deeper - 1)
            time.sleep(BUSY_S / 40)

    def training_step() -> None:
        fall(20)

    (line,) = look_at(training_step)["lines"]
    assert line["function"] == "fall" and line["share_pct"] > 60


def test_a_hook_behind_a_decorator_or_lightnings_own_is_a_group() -> None:
    def timed(work: Callable[[], None]) -> Callable[[], None]:
        def wrapper() -> None:
            work()

        return wrapper

    @timed
    def training_step() -> None:
        doze(BUSY_S / 2)

    @timed
    def on_train_batch_end() -> None:
        rest(BUSY_S)

    def warm_up() -> None:
        count_up(BUSY_S)

    def fit_all() -> None:
        for name, work in (("_call", training_step), ("_call", on_train_batch_end), ("lr_scheduler_step", warm_up)):
            make_caller(name, "lightning.pytorch.core.module")(work)

    lines = LineSamples()
    lines.note_step(FIRST_STEP, 100)
    fit(fit_all)
    lines.note_step(FIRST_STEP + 1, 100)
    lines.stop()
    hooks = {"training_step", "on_train_batch_end", "lr_scheduler_step"}
    found = {line["of"]: line["function"] for line in lines.describe(hooks)["lines"]}
    assert found == {"training_step": "doze", "on_train_batch_end": "rest", "lr_scheduler_step": "count_up"}
    assert {line["of"] for line in lines.describe()["lines"]} == {"wrapper", "warm_up"}


def test_a_backward_is_not_the_line_whose_closure_ran_it() -> None:
    close = make_caller("closure", "lightning.pytorch.loops.optimization.automatic")
    update, backward = (make_caller(name, "torch.optim.sgd") for name in ("step", "backward"))

    def optimizer_step() -> None:
        close(functools.partial(backward, functools.partial(time.sleep, 0.6 * BUSY_S)))
        update(functools.partial(time.sleep, 0.4 * BUSY_S))

    (line,) = look_at(optimizer_step)["lines"]
    assert line["share_pct"] == pytest.approx(40, abs=8), "the update alone"
    assert line["where"].endswith(f":{optimizer_step.__code__.co_firstlineno + 2}")


def test_the_switch_interval_is_the_users() -> None:
    """In a process that is forked meanwhile, and after the user has set another."""
    before, seen = sys.getswitchinterval(), list[float]()

    def work() -> None:
        time.sleep(0.05)
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, f"{sys.getswitchinterval():.4f}".encode())
            os._exit(0)
        os.wait()
        seen.append(float(os.read(reading, 100)))
        seen.append(sys.getswitchinterval())
        sys.setswitchinterval(0.02)

    look_at(work)
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)
    assert seen == pytest.approx([before, 0.0005]) and after == pytest.approx(0.02)


def test_it_looks_between_two_steps_and_leaves_nothing_behind() -> None:
    interval, lines = sys.getswitchinterval(), LineSamples()

    def runs() -> bool:
        return any(thread.name == "fastloop-lines" for thread in threading.enumerate())

    for step in range(1, 25):
        lines.note_step(step, 20)
        assert runs() == (FIRST_STEP <= step < 20)
        fit(lambda: time.sleep(0.01))
    assert sys.getswitchinterval() == pytest.approx(interval)
    assert lines.describe()["lines"]


@pytest.mark.parametrize("goes_on", [False, True], ids=["the fit is over", "control: another step ends"])
def test_what_follows_the_last_step_is_not_looked_at(goes_on: bool) -> None:
    """A fit of 16 steps ended with a long validation: the slowest lines of its steps had a third of their shares."""

    def training_step() -> None:
        doze(0.2)

    def validation_step() -> None:
        rest(0.4)

    lines = LineSamples()
    lines.note_step(FIRST_STEP, 100)
    fit(training_step)
    lines.note_step(FIRST_STEP + 1, 100)
    fit(validation_step)
    if goes_on:
        lines.note_step(FIRST_STEP + 2, 100)
    lines.stop()
    found = {line["of"]: line["share_pct"] for line in lines.describe()["lines"]}
    if goes_on:
        assert found.keys() == {"training_step", "validation_step"} and found["training_step"] < 60
    else:
        assert found.keys() == {"training_step"} and found["training_step"] > 90


def test_a_warm_up_that_is_over_before_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineSamples()
    for step in range(1, FIRST_STEP + 1):
        lines.note_step(step, FIRST_STEP)
    assert lines.describe() == {}
    monkeypatch.setattr("fastloop.evidence.sync.line_samples.EVERY_S", 0.2)
    few = LineSamples()
    few.note_step(FIRST_STEP, 20)
    fit(lambda: time.sleep(0.5))
    few.note_step(FIRST_STEP + 1, 20)
    few.stop()
    assert few.describe() == {}, "two looks show no shares"
