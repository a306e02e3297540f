"""Marks inside Lightning's calls: they are there while they are needed, and nobody can tell afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fastloop.bridge.watch.log_marks import LOGGERS, SELF_LOG, LogMarks
from fastloop.bridge.watch.phases import BODY, Marks
from tests.bridge.watch.made_up import Time
from tests.bridge.watch.test_phases import BACKWARD, FORWARD, Notes
from tests.models import Regression

pytestmark = pytest.mark.short


class Connector:
    """As Lightning's, as far as it is read."""

    turns = 0

    def update_train_step_metrics(self) -> str:
        self.turns += 1
        return "done"


class Trainer:
    def __init__(self, connector: Any) -> None:
        self._logger_connector = connector


class Module(Regression):
    """Logs into the air, for it has no Trainer."""

    time: Time | None = None

    def log(self, name: str, value: Any, **_: Any) -> str:
        if self.time is not None:
            self.time.passes(0.5)
        return name

    def manual_backward(self, loss: Any, *_: Any, **__: Any) -> str:
        return f"backward of {loss}"


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def marks(time: Time) -> Marks:
    clock = Notes()
    clock.note_batch_requested()
    clock.note_batch_received()
    clock.told.clear()
    made = Marks(clock)
    made.in_window = True
    return made


def told(marks: Marks) -> list[str]:
    clock: Any = marks.clock
    return clock.told


def test_log_is_marked_within_a_marked_training_step_and_only_there(marks: Marks, time: Time) -> None:
    module = Module()
    module.time = time
    LogMarks(Trainer(Connector()), module, marks)
    assert "log" not in vars(module) and module.log("outside", 1) == "outside"
    with marks.profile(BODY):
        with marks.profile(FORWARD):
            assert module.log("a", 1) == "a" == module.log("a", value=1, prog_bar=True)
        assert "log" not in vars(module)
        with marks.profile(BACKWARD):
            assert "log" not in vars(module)
    assert told(marks) == ["+forward", *["+callbacks_logging", "-"] * 2, "-", "+backward", "-"]
    assert dict(marks.hooks_s) == {SELF_LOG: pytest.approx(1.0)}


def test_in_a_step_that_is_not_in_detail_nothing_is_replaced(marks: Marks) -> None:
    module = Module()
    LogMarks(Trainer(Connector()), module, marks)
    marks.clock.detailed = False
    with marks.profile(BODY), marks.profile(FORWARD):
        assert "log" not in vars(module) and module.log("a", 1) == "a"
    assert dict(marks.hooks_s) == {}


@pytest.mark.parametrize("automatic", [True, False])
def test_the_backward_of_manual_optimization_is_a_backward(automatic: bool, marks: Marks) -> None:
    module = Module()
    module.automatic_optimization = automatic
    LogMarks(Trainer(Connector()), module, marks)
    with marks.profile(BODY), marks.profile(FORWARD):
        assert module.manual_backward("loss") == "backward of loss"
    inside = [] if automatic else ["+backward", "-"]
    assert told(marks) == ["+forward", *inside, "-"] and vars(module).keys() >= vars(Regression()).keys()
    assert "manual_backward" not in vars(module) and dict(marks.hooks_s) == {}


def test_an_exception_while_logging_passes_and_everything_is_put_back(marks: Marks) -> None:
    class Breaks(Module):
        def log(self, *_: Any, **__: Any) -> str:
            raise KeyError("user's own")

    module = Breaks()
    LogMarks(Trainer(Connector()), module, marks)
    with pytest.raises(KeyError, match="user"), marks.profile(BODY), marks.profile(FORWARD):
        module.log("a", 1)
    assert told(marks) == ["+forward", "+callbacks_logging", "-", "-"] and "log" not in vars(module)


def test_what_the_user_put_in_its_place_meanwhile_stays(marks: Marks) -> None:
    module = Module()
    LogMarks(Trainer(Connector()), module, marks)
    with marks.profile(BODY), marks.profile(FORWARD):
        vars(module)["log"] = own = lambda *_: "own"
    assert vars(module)["log"] is own
    with marks.profile(BODY), marks.profile(FORWARD):
        assert module.log("a", 1) == "own"
    assert vars(module)["log"] is own, "theirs comes back after ours"


def test_no_copy_of_the_module_holds_ours(marks: Marks) -> None:
    module = Module()
    LogMarks(Trainer(Connector()), module, marks)
    with marks.profile(BODY), marks.profile(FORWARD):
        pass
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert "log" not in vars(other)


def compiled_call(module: Module) -> None:
    module.compile(backend="eager")


def compiled_step(module: Module) -> None:
    vars(module)["training_step"] = torch.compile(module.training_step, backend="eager")


def own_log(module: Module) -> None:
    vars(module)["log"] = lambda *_: "own"


def by_lightning(module: Module) -> None:
    vars(module)["_compiler_ctx"] = {"compiler": "dynamo"}


@pytest.mark.parametrize("compiles", [compiled_call, compiled_step, own_log, by_lightning])
def test_a_compiled_step_is_left_alone(compiles: Any, marks: Marks) -> None:
    module = Module()
    compiles(module)
    before = dict(vars(module))
    LogMarks(Trainer(Connector()), module, marks)
    assert marks.around_forward is None
    with marks.profile(BODY), marks.profile(FORWARD):
        assert {name: value for name, value in vars(module).items() if name in before} == before


def test_the_loggers_turn_is_marked_and_given_back(marks: Marks) -> None:
    connector = Connector()
    logs = LogMarks(Trainer(connector), Module(), marks)
    with marks.profile(BODY):
        pass
    assert connector.update_train_step_metrics() == "done" and told(marks) == ["+callbacks_logging", "-"]
    assert set(marks.hooks_s) == {LOGGERS}
    logs.undo()
    logs.undo()
    assert connector.update_train_step_metrics() == "done" and len(told(marks)) == 2 and connector.turns == 2
    assert vars(connector) == {"turns": 2} and marks.around_forward is None


def test_with_the_window_closed_the_turn_is_only_handed_on(marks: Marks) -> None:
    connector = Connector()
    LogMarks(Trainer(connector), Module(), marks)
    marks.clock.close()
    assert connector.update_train_step_metrics() == "done" and told(marks) == []


@pytest.mark.parametrize("trainer", [object(), Trainer(None), Trainer(object())])
def test_another_lightning_without_the_private_name(trainer: Any, marks: Marks) -> None:
    logs = LogMarks(trainer, Module(), marks)
    with marks.profile(BODY), marks.profile(FORWARD):
        pass
    logs.undo()
    assert told(marks) == ["+forward", "-"]


def test_a_copy_of_the_trainer_logs_by_itself(marks: Marks) -> None:
    trainer = Trainer(Connector())
    logs = LogMarks(trainer, Module(), marks)
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert other._logger_connector.update_train_step_metrics() == "done"
        assert other._logger_connector.turns == 1 and trainer._logger_connector.turns == 0
    assert told(marks) == [], "nobody watches a copy"
    assert trainer._logger_connector.update_train_step_metrics() == "done" and told(marks) != [], "but the original"
    logs.undo()


def test_a_copy_made_inside_a_training_step_logs_by_itself(marks: Marks) -> None:
    module = Module()
    LogMarks(Trainer(Connector()), module, marks)
    with marks.profile(BODY), marks.profile(FORWARD):
        assert "log" in vars(module), "or this test shows nothing"
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other.log.__self__ is other and other.log("a", 1) == "a"
