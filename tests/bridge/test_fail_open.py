"""Hooks that fail open, and the switch that turns them off."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.bridge.fail_open import disabled, fail_open
from fastloop.errors import ConfigError, FastLoopError


class Owner:
    off = False

    def __init__(self) -> None:
        self.why: list[str] = []

    def stop_watching(self, why: str) -> None:
        self.why.append(why)

    @fail_open
    def hook(self, error: BaseException | None, result: Any = None) -> Any:
        """What it does."""
        if error is not None:
            raise error
        return result


def test_what_a_hook_returns_is_handed_on() -> None:
    owner = Owner()
    assert owner.hook(None, result=3) == 3 and owner.why == []
    assert (Owner.hook.__name__, Owner.hook.__doc__) == ("hook", "What it does.")


def test_an_exception_of_ours_is_said_and_swallowed() -> None:
    owner = Owner()
    assert owner.hook(ValueError("broken")) is None and owner.why == ["hook: ValueError: broken"]


@pytest.mark.parametrize("kind", [FastLoopError, ConfigError])
def test_errors_meant_for_a_person_pass(kind: type[FastLoopError]) -> None:
    owner = Owner()
    with pytest.raises(kind, match="why not"):
        owner.hook(kind(got="it", why="why not", do="that"))
    assert owner.why == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        Owner().hook(kind())


def test_off_calls_nothing() -> None:
    owner = Owner()
    owner.off = True
    assert owner.hook(ValueError("never raised"), result=3) is None and owner.why == []


@pytest.mark.parametrize(("value", "off"), [(None, False), ("", False), ("0", False), ("1", True), ("true", True)])
def test_the_switch(value: str | None, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTLOOP_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTLOOP_DISABLE", value)
    assert disabled() == off
