"""A ladder of three rungs, and files to read a configuration from, for the tests of ``fastloop.config.loading``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from fastloop.config.loading import Config, load
from fastloop.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workers:
    enabled: bool = False
    count: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.count, int) and self.count < 1:
            raise ConfigError(
                key="workers.count", got=f"workers.count={self.count}", why="too few", do="write 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Amp:
    enabled: bool = False
    mode: Literal["bf16-mixed", "16-mixed", "tf32"] = "bf16-mixed"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    enabled: bool = False
    cap_mb: int | None = None
    sizes: tuple[int, ...] = (1, 2, 3)
    ratio: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Ladder:
    workers: Workers = Workers()
    amp: Amp = Amp()
    overlap: Overlap = Overlap()


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and beside it a clone that ships a recipe, a ladder and a rung. Configurations have the
    small ladder's rungs."""
    clone, here = tmp_path / "clone", tmp_path / "here"
    texts = {
        "recipes/resnet50": "recipe: {size: default}\nrun: {max_steps: 100}\ntrainer: {accumulate_grad_batches: 4}\n",
        "configs/ladders/safe": "rungs:\n  workers: {enabled: true}\n",
        "configs/rungs/amp": "rungs:\n  amp: {enabled: true}\n",
    }
    for name, text in texts.items():
        path = clone / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (clone / "recipes" / "resnet50.py").touch()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("fastloop.config.shipped.__file__", str(clone / "fastloop" / "config" / "shipped.py"))
    monkeypatch.setattr("fastloop.config.loading.import_ladder_class", lambda: Ladder)
    return here


Read = Callable[..., Config]


@pytest.fixture(name="read")
def read_fixture(folder: Path) -> Read:
    """Load text as my.yaml."""

    def read(text: str, *overrides: str, more: tuple[str, ...] = ()) -> Config:
        (folder / "my.yaml").write_text(text, encoding="utf-8")
        return load("my.yaml", more=more, overrides=overrides)

    return read
