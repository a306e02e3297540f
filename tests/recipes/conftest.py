"""Recipes as fastloop loads them, from their folder as a package of any name, with a cache folder of their own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = "fastloop_recipes"


@pytest.fixture(scope="session")
def recipe() -> Callable[[str], ModuleType]:
    """recipe("gpt2") is the module recipes/gpt2.py."""
    if PACKAGE not in sys.modules:
        spec = ModuleSpec(PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [str(ROOT / "recipes")]
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return lambda name: importlib.import_module(f"{PACKAGE}.{name}")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that recipes cache data in: data is made once for all tests here, and never in the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "fastloop" / "data"


@pytest.fixture
def real() -> Callable[[str], str]:
    """real("photos.tar") is the path of that file in the folder of real data beside the repository, or skips."""

    def find(name: str) -> str:
        path = ROOT.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"there is no {name} beside the repository")
        return str(path)

    return find


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


@pytest.fixture
def fit() -> Callable[..., tuple[list[float], L.Trainer]]:
    """fit(module, data) trains three optimizer steps on the CPU; gives the micro-batches' losses and the Trainer."""

    def run(module: L.LightningModule, data: L.LightningDataModule, **more: Any) -> tuple[list[float], L.Trainer]:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        losses = _Losses()
        torch.manual_seed(0)
        options = {"max_steps": 3, "accelerator": "cpu", "enable_checkpointing": False, "num_sanity_val_steps": 0}
        trainer = L.Trainer(callbacks=[losses], **(quiet | options | more))
        trainer.fit(module, data)
        return losses.seen, trainer

    return run
