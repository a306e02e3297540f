"""Which trainings ended by themselves before their window, and that only the first of them is raised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb import early_end
from fastloop.experiments.climb.early_end import EndsSooner, HeedingRunner, find_early_end
from fastloop.experiments.climb.interface import Result, Runner


@pytest.mark.parametrize(
    ("result", "end"),
    [
        (Result(ok=False, cause="before the window", ended_at=20), 20),
        (Result(ended_at=20), 20),
        (Result(ended_at=20, step_ms=3.0), None),
        (Result(ok=False, cause="exit code 1", ended_at=24), None),
        (Result(ok=False, cause="killed"), None),
    ],
    ids=["too early", "all batches were ready", "in its window", "failed after all steps", "died"],
)
def test_an_early_end(result: Result, end: int | None) -> None:
    assert find_early_end(result, 24) == end and find_early_end(result, None) is None


class Ends:
    """Every training ends after 20 steps."""

    def run(self, *_: Any, **__: Any) -> Result:
        return Result(ok=False, ended_at=20)

    def left_with_grace_s(self) -> float:
        return 5.0


def test_the_first_is_raised() -> None:
    known: list[int] = []
    runner = cast("Any", HeedingRunner(cast("Runner", Ends()), lambda end: end not in known))
    with pytest.raises(EndsSooner) as caught:
        runner.run("a", {}, Ask(steps=24), what="", need_s=0.0)
    known.append(caught.value.steps)
    assert known == [20] and runner.run("a", {}, Ask(steps=24), what="", need_s=0.0).ended_at == 20
    assert runner.left_with_grace_s() == 5.0


def test_its_files_are_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends right after its warm-up is no failure, but has no rate either."""
    forgotten: list[str] = []
    monkeypatch.setattr(early_end, "forget", forgotten.append)
    trial: Any = SimpleNamespace(run_dir=str(tmp_path))
    monkeypatch.setattr(Ends, "run", lambda *_, **__: Result(ended_at=21, trial=trial))
    with pytest.raises(EndsSooner):
        HeedingRunner(cast("Runner", Ends()), lambda _end: True).run("a", {}, Ask(steps=31), what="", need_s=0.0)
    assert forgotten == [str(tmp_path)]


def test_a_loader_alone_has_no_steps() -> None:
    runner = HeedingRunner(cast("Runner", Ends()), lambda _end: True)
    assert runner.run("a", {}, Ask(steps=24, variation="loader"), what="", need_s=0.0).ended_at == 20
