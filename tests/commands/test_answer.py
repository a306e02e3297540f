"""What a command gives back, or ends with."""

from __future__ import annotations

import dataclasses

import pytest

from fastloop.commands.answer import Answer, Failed, leave, left


def test_an_answer_is_a_record() -> None:
    answer = Answer(text="x")
    assert (answer.json, answer.exit_code) == (None, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.text = "y"  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Answer("x")  # type: ignore[misc]


def test_a_failure_carries_its_text_and_code() -> None:
    assert (str(Failed("said")), Failed("said").exit_code, Failed("", exit_code=130).exit_code) == ("said", 1, 130)
    with pytest.raises(TypeError, match="positional"):
        Failed("said", 2)  # type: ignore[misc]


@pytest.mark.parametrize("error", [Failed("x"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_whatever_ends_a_command_can_carry_what_there_is(error: BaseException) -> None:
    assert left(error) is None
    leave(error, {"partial": True})
    assert left(error) == {"partial": True}
