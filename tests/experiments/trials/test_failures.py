"""What a command ends with."""

from __future__ import annotations

import pytest

from fastloop.experiments.trials.failures import Failed


def test_a_failure_carries_its_text_and_code() -> None:
    assert (str(Failed("said")), Failed("said").exit_code, Failed("", exit_code=130).exit_code) == ("said", 1, 130)
    with pytest.raises(TypeError, match="positional"):
        Failed("said", 2)  # type: ignore[misc]
