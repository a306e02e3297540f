"""What trying rungs costs is bounded by the run's expected time, whatever the time goes to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fastloop.bridge.apply.rehearse import budget, recorded_calls
from fastloop.bridge.apply.rehearse.remembered import Remembered
from fastloop.records.plan import Change, Step
from tests.bridge.apply.rehearse.test_rehearsal import Brief, Inner, config, fit, plant, read

LATER = pytest.mark.timeout(250)


@LATER
@pytest.mark.parametrize(("steps", "plays"), [(40, False), (100, True)])
def test_nothing_is_played_where_three_plays_are_more_than_the_share(
    steps: int, plays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda old: old)
    calls: list[int] = []
    played = recorded_calls.CallReplayer.replay
    monkeypatch.setattr(
        recorded_calls.CallReplayer, "replay", lambda self, **how: (calls.append(1), played(self, **how))[1]
    )
    loop, _, _ = fit(config("amp"), steps=steps, by_ladder=("amp",))
    took, why = read(loop)
    assert bool(calls) is plays
    assert plays or (took is False and f"5 % of the remaining run, which is {steps - 1} batches" in why)


@LATER
@pytest.mark.parametrize("wait_s", [0.0, 4.0])
def test_time_around_the_modules_counts_too(wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a play copies and puts back may take longer than the modules do."""
    plant(monkeypatch, lambda old: old)
    usual = recorded_calls.preserve_state
    waited: list[float] = []

    @contextlib.contextmanager
    def preserve_state(*modules: torch.nn.Module) -> Iterator[None]:
        time.sleep(wait_s)
        waited.append(wait_s)
        with usual(*modules):
            yield

    monkeypatch.setattr(recorded_calls, "preserve_state", preserve_state)
    loop, _, _ = fit(config("amp"), Brief(), steps=100_000, by_ladder=("amp",), max_time={"seconds": 60})
    took, why = read(loop)
    assert waited
    assert (took is False and "too short to try it" in why) if wait_s else "too short" not in why


@LATER
def test_a_slow_rung_of_a_ladder_does_not_use_up_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the run is 0.2 s. The control: a rung that the user asked for is played as often as needed."""
    usual = Inner.forward

    def wait(self: Inner, x: torch.Tensor, **how: Any) -> torch.Tensor:
        time.sleep(0.01)
        return usual(self, x, **how)

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            CALLS.append(0.4)
            time.sleep(0.4)
            return original(*args, **kwargs)

        return forward

    monkeypatch.setattr(Inner, "forward", wait)
    monkeypatch.setattr(budget.judge, "FIRST_CALL_MS", 0.0)
    plant(monkeypatch, slow)
    CALLS.clear()
    loop, _, _ = fit(config("amp"), Brief(), steps=400, by_ladder=("amp",), max_epochs=100)
    took, why = read(loop)
    assert took is False and "slower on the calls of the first step" in why, why
    assert len(CALLS) == 1
    assert loop is not None and loop.measurement is not None
    assert loop.measurement.one_time_s["rehearsal"] < 2.0
    CALLS.clear()
    loop, _, _ = fit(config("amp"), steps=4)
    assert read(loop)[0] is True and len(CALLS) == 2 + 3


CALLS: list[float] = []
"""A global: what the model keeps is put back after each play."""


@pytest.mark.parametrize(
    ("left", "max_steps", "steps", "batches", "expected"),
    [
        (199, -1, 2, 1, (398, 0.5)),  # two optimizers in each batch
        (199, 300, 2, 1, (298, 0.5)),
        (199, -1, 2, 4, (99, 2.0)),  # both once in four batches
        (None, -1, 2, 1, (None, 0.5)),
        (budget.ENDLESS - 1, -1, 2, 1, (budget.ENDLESS - 1, 0.5)),
    ],
)
def test_steps_of_a_module_that_steps_by_itself(
    left: int | None, max_steps: int, steps: int, batches: int, expected: tuple[int | None, float]
) -> None:
    trainer = SimpleNamespace(max_steps=max_steps, global_step=2)
    terms = budget.Terms(steps_left=left).of_manual_steps(trainer, steps, batches)
    assert (terms.steps_left, terms.batches_per_step) == expected


def make_budget(steps_left: int, by_ladder: frozenset[str] = frozenset()) -> tuple[budget.TrialBudget, Step]:
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(10)))
    terms = budget.Terms(steps_left=steps_left, by_ladder=by_ladder)
    memory = Remembered([module], torch.device("cpu"))
    made = budget.TrialBudget(terms, module, [module], memory, lambda _rung: None, 0.0)
    made.base_ms = 100.0
    change: Any = Change(actions=(), parity="approximate", rehearse="modules", pay_back="required")
    return made, Step(rung="compile", status="planned", change=change)


def test_a_failure_with_one_optimizer_is_none_of_another() -> None:
    module, settings = torch.nn.Linear(2, 2), {"foreach": False}
    change: Any = Change(actions=(), parity="approximate", rehearse="optimizers")
    step = Step(rung="fused", status="planned", change=change)

    def make(optimizer: Any) -> budget.TrialBudget:
        memory = Remembered([module], torch.device("cpu"), [optimizer])
        return budget.TrialBudget(budget.Terms(), module, [module], memory, lambda _rung: settings, 0.0)

    make(torch.optim.Adam(module.parameters())).keep_failure(step, "it deviates")
    assert "it already failed" in str(make(torch.optim.Adam(module.parameters(), lr=0.1)).refuse(step))
    assert make(torch.optim.SGD(module.parameters(), lr=0.1)).refuse(step) is None


def test_a_compile_whose_code_was_cached_once_has_the_usual_time() -> None:
    made, step = make_budget(10**6)
    usual_s = made.limit_s(step)
    made.add_one_time(step, 0.5)
    assert made.limit_s(step) == usual_s == pytest.approx(3 * 24)
    made.add_one_time(step, 100.0)
    assert made.limit_s(step) == pytest.approx(300)


def test_what_reached_its_limit_is_not_tried_again_in_an_equal_run() -> None:
    """The limit here is what the run can save: a third of 1,500 steps of 100 ms."""
    made, step = make_budget(1500)
    limit_s = made.limit_s(step)
    assert limit_s == pytest.approx(50) and made.refuse(step) is None
    made.note_limit(step, limit_s)
    assert "it takes about 62 s once" in (made.refuse(step) or "")
    longer, step = make_budget(3000)
    assert longer.refuse(step) is None


def test_a_compile_can_save_no_more_than_the_rungs_before_it_leave() -> None:
    """It is expected to take 24 s. A third of 1,500 steps of 100 ms is 50 s; of the 40 ms that amp leaves, 20."""
    made, step = make_budget(1500)
    made.changed_ms = 100.0
    assert made.refuse(step) is None and made.limit_s(step) == pytest.approx(50)
    made.changed_ms = 40.0
    assert "a third of the 40 ms of each step" in (made.refuse(step) or "")
    assert made.limit_s(step) == pytest.approx(20)


def test_rungs_that_are_slower_give_a_compile_nothing_to_save() -> None:
    """Slow ones are left out in the end; what a compile could save is then a third of the unchanged step."""
    made, step = make_budget(600)
    made.changed_ms = 500.0
    assert "a third of the 100 ms of each step" in (made.refuse(step) or "")
    assert made.limit_s(step) == pytest.approx(20)


@pytest.mark.parametrize(
    ("launch_share", "only_device", "is_tried"), [(0.0, True, True), (0.9, False, True), (0.9, True, False)]
)
def test_kernels_are_loaded_only_for_device_time_that_they_can_save(
    launch_share: float, only_device: bool, is_tried: bool
) -> None:
    """150 steps of 100 ms: a third of them is 5 s. If the host launches work for 90 ms of each, 1.5 s can be saved."""
    made, _ = make_budget(150, by_ladder=frozenset({"amp"}))
    made.launch_share = launch_share
    change = Change(rehearse="modules", first_call_s=2.0, only_device=only_device)
    why = made.refuse(Step(rung="amp", status="planned", change=change))
    assert (why is None) is is_tried and (is_tried or "that takes about 2" in str(why)), why


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.ones(8), torch.ones(1)) for _ in range(96))


@pytest.mark.parametrize("max_epochs", [2, -1])
def test_max_time_is_no_length_where_the_epochs_are_counted(max_epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour is a cap there: two epochs of unknown length may take a second."""
    plant(monkeypatch, lambda old: old, pay_back="required")
    how: dict[str, Any] = {"max_epochs": max_epochs, "max_time": {"hours": 1}}
    loop, _, _ = fit(config("amp"), Brief(), steps=-1, train=DataLoader(Stream(), 8), **how)
    assert ("it is unknown whether that pays back" in read(loop)[1]) is (max_epochs == 2), read(loop)
