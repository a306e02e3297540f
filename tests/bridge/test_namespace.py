"""Which of Lightning's two names an object belongs to, and what happens where one of them is broken."""

from __future__ import annotations

import sys

import lightning.pytorch
import pytest
import pytorch_lightning

from fastloop.bridge import namespace, strategy

SPACES = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


@pytest.mark.parametrize("name", SPACES)
def test_an_object_belongs_to_the_namespace_of_its_first_lightning_base(name: str) -> None:
    kind = SPACES[name].strategies.SingleDeviceStrategy
    mine = type("Mine", (kind,), {"__module__": "lightning_like.strategies"})
    assert namespace.of(kind) == namespace.of(mine) == namespace.of(mine("cpu")) == name
    assert namespace.load(name, "strategies.SingleDeviceStrategy") is kind


def test_what_is_not_lightnings_is_refused() -> None:
    with pytest.raises(TypeError, match=r"builtins\.dict is not a Lightning class"):
        namespace.of({})


def test_installed_names_come_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(namespace.installed()) == list(SPACES)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)  # type: ignore[arg-type]  # as if it were broken
    assert "lightning.pytorch" in namespace.installed()
    strategy.register()
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(namespace.installed()) == ["lightning.pytorch"]
