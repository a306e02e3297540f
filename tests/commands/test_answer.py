"""What a command gives back, or ends with."""

from __future__ import annotations

import dataclasses

import pytest

from fastloop.commands.answer import Answer, Failed


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
