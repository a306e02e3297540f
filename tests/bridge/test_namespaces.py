"""Which of Lightning's two names an object belongs to, and what happens where one of them is broken."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
from lightning_utilities.core import rank_zero

from fastloop import FastLoop
from fastloop.bridge import namespaces
from tests.bridge.launch import python

pytestmark = pytest.mark.short

SPACES = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


@pytest.mark.parametrize("name", SPACES)
def test_an_object_belongs_to_the_namespace_of_its_first_lightning_base(name: str) -> None:
    kind = SPACES[name].strategies.SingleDeviceStrategy
    mine = type("Mine", (kind,), {"__module__": "lightning_like.strategies"})
    assert (
        namespaces.find_namespace(kind)
        == namespaces.find_namespace(mine)
        == namespaces.find_namespace(mine("cpu"))
        == name
    )
    assert namespaces.load(name, "strategies.SingleDeviceStrategy") is kind


def test_what_is_not_lightnings_is_refused() -> None:
    with pytest.raises(TypeError, match=r"builtins\.dict is not a Lightning class"):
        namespaces.find_namespace({})


def test_installed_names_come_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(namespaces.list_installed()) == list(SPACES)
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(namespaces.list_installed()) == ["lightning.pytorch"]


def test_a_broken_installation_of_the_other_name_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pytorch_lightning.py").write_text("raise ImportError('made for another torch')")
    program = (
        "from fastloop import FastLoop\n"
        "from tests.models import Regression, loader, trainer\n"
        "made = trainer(strategy='fastloop', callbacks=[FastLoop('safe', quiet=True)])\n"
        "made.fit(Regression(), loader())\n"
        "print('TRAINED', made.global_step)\n"
    )
    said = python("-c", program, cwd=tmp_path)
    assert "TRAINED 8" in said


@pytest.mark.parametrize("name", SPACES)
def test_the_callback_is_one_of_each_namespace(name: str) -> None:
    assert issubclass(FastLoop, SPACES[name].Callback)


def test_messages_go_to_the_logger_of_the_namespace_that_was_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """``logging.getLogger("lightning.pytorch").setLevel(ERROR)`` silenced nothing any more."""

    def take_over(name: str, path: str) -> None:
        rank_zero.log = logging.getLogger(name)

    first, second = SPACES
    monkeypatch.setattr(rank_zero, "log", logging.getLogger(second))
    monkeypatch.setattr(namespaces, "load", take_over)
    list(namespaces.find_everywhere("callbacks.Callback"))
    assert rank_zero.log.name == second
    for name in SPACES:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("lightning_utilities"))
    next(namespaces.find_everywhere("callbacks.Callback"))
    assert rank_zero.log.name == first  # nobody had taken them over


def test_fastloop_leaves_messages_where_a_script_has_them(tmp_path: Path) -> None:
    program = (
        "import sys, lightning\nassert 'pytorch_lightning' not in sys.modules\nfrom fastloop import FastLoop\n"
        "from lightning_utilities.core import rank_zero\nprint('LOG', rank_zero.log.name)"
    )
    assert "LOG lightning.pytorch.utilities.rank_zero" in python("-c", program, cwd=tmp_path, executed=True)
