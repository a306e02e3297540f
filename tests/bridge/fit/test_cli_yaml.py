"""FastLoop from a LightningCLI configuration, by class path, and its strategies by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from fastloop import FastLoop
from tests.models import Regression, loader

TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(Regression):
    """Without arguments, for the CLI reads types and Regression takes a class."""

    def __init__(self) -> None:
        super().__init__()


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


def fit(folder: Path, loop: dict[str, Any], strategy: str = "fastloop", *more: str) -> tuple[LightningCLI, FastLoop]:
    """Train as ``python train.py fit --config run.yaml`` does."""
    callbacks = [{"class_path": "fastloop.FastLoop", **({"init_args": loop} if loop else {})}]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"trainer": {**TRAINER, "strategy": strategy, "callbacks": callbacks}}))
    made = LightningCLI(
        Plain,
        Data,
        args=["fit", "--config", str(path), *more],
        save_config_callback=None,
        seed_everything_default=False,
    )
    return made, next(callback for callback in made.trainer.callbacks if isinstance(callback, FastLoop))


def test_a_ladder_by_name(tmp_path: Path) -> None:
    made, loop = fit(tmp_path, {"config": "safe", "out": str(tmp_path / "run"), "quiet": True})
    assert loop.config.name == "safe" and loop.quiet and loop.out == tmp_path / "run"
    assert type(made.trainer.strategy).__name__ == "FastLoopStrategy"
    assert {verdict.rung: verdict.took for verdict in loop.verdicts}["cache"], "its dataset holds rows in memory"
    assert (tmp_path / "run" / "report.md").is_file() and len(made.model.losses) == 8


@pytest.mark.parametrize("written", ["mapping", "file", "nothing"])
def test_the_other_ways_to_write_a_config(written: str, tmp_path: Path) -> None:
    settings = {"rungs": {"workers": {"enabled": True, "count": 1}}, "watch": {"warmup_steps": 2}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    config = {"mapping": {"config": settings}, "file": {"config": str(tmp_path / "mine.yaml")}, "nothing": {}}
    made, loop = fit(tmp_path, config[written], "auto")
    assert loop.config.ladder.workers.enabled == (written != "nothing")
    assert loop.config.watch.warmup_steps == (20 if written == "nothing" else 2)
    assert loop.measurement is not None and loop.measurement.total_steps == 8
    assert type(made.trainer.strategy).__name__ == "SingleDeviceStrategy"


def test_a_mistyped_key_reaches_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        fit(tmp_path, {"config": {"rungs": {"worker": {"enabled": True}}}})
    said = f"{error.value} {capsys.readouterr().err}"
    assert "rungs.worker" in said and "write workers" in said, said
