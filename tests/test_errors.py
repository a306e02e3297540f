"""Errors for people: got, why, do."""

from __future__ import annotations

import pickle

import pytest

from fastloop.errors import ConfigError, FastLoopError, NotApplicable


@pytest.mark.parametrize(("kind", "code"), [(FastLoopError, 1), (ConfigError, 2)])
def test_the_three_parts(kind: type[FastLoopError], code: int) -> None:
    error = kind(
        got="rungs.amp.mode: 'fp8' (a.yaml:2)",
        why="it is not one of three",
        do="write bf16-mixed",
        key="rungs.amp.mode",
    )
    assert str(error) == "got rungs.amp.mode: 'fp8' (a.yaml:2)\n  why it is not one of three\n  do  write bf16-mixed"
    assert error.exit_code == code and isinstance(error, FastLoopError)


@pytest.mark.parametrize("kind", [FastLoopError, ConfigError])
def test_they_travel_between_processes(kind: type[FastLoopError]) -> None:
    error = kind(got="a", why="b", do="c", key="d")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == str(error)
    assert (back.got, back.why, back.do, back.key) == ("a", "b", "c", "d")


def test_a_reason_is_no_error_for_people() -> None:
    assert not issubclass(NotApplicable, FastLoopError)
    assert str(NotApplicable("needs CUDA")) == "needs CUDA"
