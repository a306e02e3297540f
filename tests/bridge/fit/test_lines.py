"""Lines for the user."""

from __future__ import annotations

import pytest

from fastloop.bridge.fit import lines


def test_lines(caplog: pytest.LogCaptureFixture) -> None:
    lines.skip("a line that nobody reads")
    assert not caplog.records
    with caplog.at_level("INFO"):
        lines.say("a line")
    assert caplog.messages == ["fastloop: a line"]
    with pytest.warns(UserWarning, match="^fastloop: a warning$"):
        lines.warn("a warning")
