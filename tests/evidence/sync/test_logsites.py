"""The lines that log, taken from any object with `log` and `log_dict`, and nothing of it left behind."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.evidence.sync import hunt
from fastloop.evidence.sync.hunt import LogSites


class Module:
    def __init__(self) -> None:
        self.logged: list[tuple[str, Any]] = []

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        sync_dist: bool = False,
    ) -> None:
        self.logged.append((name, value))

    def log_dict(self, dictionary: dict[str, Any], prog_bar: bool = False, sync_dist: bool = False) -> None:
        for name, value in dictionary.items():
            self.log(name, value, prog_bar, sync_dist=sync_dist)


def step(module: Module) -> None:
    module.log("loss", 1, True, on_step=True)
    module.log_dict({"a": 2, "b": 3}, sync_dist=True)


def test_lines() -> None:
    module = Module()
    with LogSites(module) as found:
        step(module)
    first = step.__code__.co_firstlineno
    assert module.logged == [("loss", 1), ("a", 2), ("b", 3)]
    assert {name: site.rpartition(":")[2] for name, site in found.sites.items()} == {
        "loss": str(first + 1),
        "a": str(first + 2),
        "b": str(first + 2),
    }
    assert found.sites["loss"].startswith("tests/evidence/sync/test_logsites.py:")


def test_nothing_is_left_even_after_an_error() -> None:
    module = Module()
    with pytest.raises(ZeroDivisionError), LogSites(module):
        assert "log" in vars(module) and "log_dict" in vars(module)
        raise ZeroDivisionError
    assert set(vars(module)) == {"logged"}

    def own(*_: Any) -> None: ...

    module.log = own  # type: ignore[method-assign]
    with LogSites(module):
        assert module.log is not own
    assert module.log is own


def test_what_cannot_be_noted_is_logged_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    monkeypatch.setattr(hunt, "find_site", lambda _: 1 / 0)
    with LogSites(module) as found:
        module.log("loss", 1)
        with pytest.raises(TypeError):
            module.log()  # type: ignore[call-arg]
    assert module.logged == [("loss", 1)] and found.sites == {}


def test_an_object_that_does_not_log() -> None:
    bare = type("Bare", (), {})()
    with LogSites(bare) as found:
        assert not vars(bare)
    assert found.sites == {}
