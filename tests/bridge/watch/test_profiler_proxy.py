"""The stand-in before the user's profiler: theirs sees every call and write, ours hears of its phases."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler

from fastloop.bridge.watch.phases import NEXT, NOTHING
from fastloop.bridge.watch.profiler_proxy import WatchingProfiler

pytestmark = pytest.mark.short


class Context:
    """Notes when it is entered and left, and with what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> None:
        self.log.append(f"+{self.name}")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.log.append(f"-{self.name}" if kind is None else f"!{self.name}")


class Ours:
    """What a watch gives the stand-in: actions that begin with p are phases."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def phase(self, name: str) -> Any:
        return Context(name, self.made) if name.startswith("p") else NOTHING

    def __call__(self, profiler: Any) -> Any:
        return WatchingProfiler(profiler, lambda: self.made.append("ask"), lambda: self.made.append("got"), self.phase)


class Theirs(SimpleProfiler):
    """Notes into the same log."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def start(self, action_name: str) -> None:
        self.log.append(f"their {action_name}")
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        self.log.append(f"their {action_name} ends")
        super().stop(action_name)


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_fetches_and_phases_are_heard_of_and_nothing_else(kind: type) -> None:
    ours = Ours()
    profiler = ours(kind())
    for name in ("run_training_batch", NEXT, "[_EvaluationLoop].val_next"):
        profiler.start(name)
        profiler.stop(name)
        with profiler.profile("[Callback]Other.on_train_batch_end"), profiler.profile(f"p {name}"):
            pass
    assert ours.made == [
        "+p run_training_batch",
        "-p run_training_batch",
        "ask",
        "got",
        f"+p {NEXT}",
        f"-p {NEXT}",
        "+p [_EvaluationLoop].val_next",
        "-p [_EvaluationLoop].val_next",
    ]


@pytest.mark.parametrize(
    ("action", "heard"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", ["ask", "got"]),
        ("[LoopOfTheUsers].train_dataloader_next", ["ask", "got"]),
        ("[_EvaluationLoop].val_next", []),
    ],
)
def test_batches_are_counted_in_a_loop_of_any_class(action: str, heard: list[str]) -> None:
    ours = Ours()
    profiler = ours(PassThroughProfiler())
    profiler.start(action)
    profiler.stop(action)
    assert ours.made == heard


def test_a_profiler_of_the_user_gets_every_call_and_every_write() -> None:
    inner = SimpleProfiler()
    profiler = Ours()(inner)
    profiler.dirpath, profiler._lightning_module = "there", "module"
    for either in (inner, profiler):
        assert (either.dirpath, either._lightning_module) == ("there", "module")
    with profiler.profile("one"), profiler.profile("p"):
        profiler.start("two")
        profiler.stop("two")
        profiler.start("p three")
        profiler.stop("p three")
    assert set(inner.recorded_durations) == {"one", "two", "p", "p three"} and "two" in profiler.summary()
    assert isinstance(profiler, SimpleProfiler) and type(profiler) is WatchingProfiler
    with pytest.raises(AttributeError):
        profiler.not_there  # noqa: B018


def test_theirs_is_inside_ours() -> None:
    """Their own cost is then a part of the phase they look at, and no other phase's."""
    ours = Ours()
    profiler = ours(Theirs(ours.made))
    with profiler.profile("p"):
        ours.made.append("work")
    assert ours.made == ["+p", "their p", "work", "their p ends", "-p"]
    ours.made.clear()
    profiler.start("p")  # as manual optimisation does around its optimizer's step
    profiler.stop("p")
    assert ours.made == ["+p", "their p", "their p ends", "-p"]
    ours.made.clear()
    profiler.start(NEXT)
    profiler.stop(NEXT)
    assert ours.made == ["ask", f"their {NEXT}", f"their {NEXT} ends", "got"]


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler, AdvancedProfiler])
def test_an_exception_passes_through_both(kind: type) -> None:
    ours = Ours()
    profiler = ours(kind())
    with pytest.raises(KeyError, match="user"), profiler.profile("p"):
        raise KeyError("user's own")
    assert ours.made == ["+p", "!p"]
    with profiler.profile("p"):  # theirs is not left in the midst of an action
        pass


def test_an_exception_of_their_profiler_ends_our_phase_too() -> None:
    class Breaks(SimpleProfiler):
        def stop(self, action_name: str) -> None:
            raise ZeroDivisionError("theirs")

    ours = Ours()
    profiler = ours(Breaks())
    with pytest.raises(ZeroDivisionError), profiler.profile("p"):
        pass
    assert ours.made == ["+p", "-p"]


def test_a_stop_without_a_start_is_left_to_theirs() -> None:
    ours = Ours()
    ours(PassThroughProfiler()).stop("p")
    assert ours.made == []
    with pytest.raises(ValueError, match="never started"):
        ours(SimpleProfiler()).stop("p")


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_hold_the_users_profiler(copied: Any) -> None:
    inner = SimpleProfiler(dirpath="there")
    other = copied(Ours()(inner))
    assert type(other) is SimpleProfiler and other.dirpath == "there"


def test_lightnings_empty_profiler_is_not_called() -> None:
    class Refuses(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            raise AssertionError("called")

    Refuses.__name__ = "PassThroughProfiler"
    profiler = Ours()(Refuses())
    with profiler.profile("x"), profiler.profile("p"):
        profiler.start("y")
        profiler.stop("y")
    assert profiler.summary() == ""
