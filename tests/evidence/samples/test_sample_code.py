"""Whose code it is, and what methods write. What samples change: test_dataset."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from fastloop.evidence.samples.sample_code import (
    find_super,
    is_installed,
    list_changes,
    list_globals,
    list_sample_functions,
    list_writers,
)
from fastloop.feeds.lazy_loader import Bounded

TABLE = {"a": 1}


def load(index: int) -> Any:
    return TABLE, index


class Data(Dataset):
    def __init__(self) -> None:
        self.made = True

    def __getitem__(self, index: int) -> Any:
        return self._read(index)

    def _read(self, index: int) -> Any:
        self.last = index
        return load(index)

    def switch(self, mode: str) -> None:
        self.mode = mode
        self.table["mode"] = mode
        self.seen.append(mode)
        other = mode
        other += "x"

    @property
    def size(self) -> int:
        return 3


def test_whose_code_it_is() -> None:
    assert all(is_installed(thing) for thing in (json.dumps, torch.nn.Linear, TensorDataset, int, Bounded))
    assert not any(is_installed(thing) for thing in (Data, load, lambda: None))


def test_the_functions_of_a_sample_are_followed() -> None:
    assert [function.__name__ for function in list_sample_functions(Data())] == ["__getitem__", "_read", "load"]
    assert [function.__name__ for function in list_sample_functions(load)] == ["load"]
    assert list_sample_functions(TensorDataset(torch.zeros(1))) == ()


class Base(Dataset):
    def __getitem__(self, index: int) -> Any:
        return load(index)


class BySuper(Base):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class ByName(Base):
    def __getitem__(self, index: int) -> Any:
        return Base.__getitem__(self, index)


class Between(Base):
    pass


class Later(Between):
    def __getitem__(self, index: int) -> Any:
        return super(Later, self).__getitem__(index)  # noqa: UP008


class Other(Base):
    """Has nothing of its base's method."""

    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize(("kind", "is_called"), [(BySuper, True), (ByName, True), (Later, True), (Other, False)])
def test_a_base_class_is_followed_where_it_is_called(kind: type, is_called: bool) -> None:
    names = [function.__qualname__ for function in list_sample_functions(kind())]
    assert names == [f"{kind.__name__}.__getitem__", *(["Base.__getitem__", "load"] if is_called else [])]


class Counts(Base):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def _note(self, seen: list[int], index: int) -> None:
        seen.append(index)


class GivesItself(Counts):
    def __getitem__(self, index: int) -> Any:
        super()._note(self.seen, index)
        return index


def test_what_a_base_class_is_given_is_followed() -> None:
    assert list_changes(GivesItself.__getitem__, GivesItself) == (".seen",)
    assert find_super(GivesItself.__getitem__, GivesItself, "_note") is Counts._note
    assert find_super(GivesItself.__getitem__, GivesItself, "missing") is None
    assert find_super(load, GivesItself, "_note") is None


def test_globals_are_told_from_attributes() -> None:
    assert dict(list_globals(load)) == {"TABLE": TABLE}
    assert dict(list_globals(lambda item: item.TABLE)) == {}
    assert "TABLE" in dict(list_globals(lambda: [TABLE for _ in range(3)]))


def test_what_methods_write_that_run_for_no_sample() -> None:
    assert list(list_writers(Data)) == [("switch", "mode"), ("switch", "table"), ("switch", "seen")]
    assert list(list_writers(TensorDataset)) == []


def test_a_package_is_installed_wherever_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install --target`` puts packages, and what describes them, into any folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "by_target").mkdir()
    (tmp_path / "by_target" / "__init__.py").write_text("class Outer: ...\n")
    (tmp_path / "by_target" / "inner.py").write_text("class Inner: ...\n")
    (tmp_path / "by_target-1.0.dist-info").mkdir()
    own = tmp_path / "scripts"
    own.mkdir()
    monkeypatch.syspath_prepend(str(own))
    (own / "by_hand.py").write_text("class Own: ...\n")
    import by_hand
    import by_target.inner

    assert is_installed(by_target.Outer) and is_installed(by_target.inner.Inner)
    assert not is_installed(by_hand.Own)


def test_a_module_that_a_package_writes_elsewhere_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch Geometric makes the code of its layers when they are first used."""

    def add(name: str, file: str) -> Any:
        made = ModuleType(name)
        made.__file__, made.Layer = file, type("Layer", (), {"__module__": name})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, made)
        return made.Layer

    for file in ("/layer.py", "/tmp/some/where/else/layer.py"):
        assert is_installed(add("torch.nn.made.layer", file))
        assert not is_installed(add("unknown.nn.made.layer", file)) and not is_installed(add("layer", file))
