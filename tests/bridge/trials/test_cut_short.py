"""Trials end before the first validation of scripts that stop and schedule by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from fastloop.bridge.trials.heartbeat import Beats
from tests import models


class Plateau(models.Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def fit(module: Any, path: Path, *callbacks: Any, **more: Any) -> int:
    settings = {"max_steps": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True, **more}
    trainer = models.trainer(**settings, callbacks=[ModelCheckpoint(path, monitor="val_loss"), *callbacks])
    trainer.fit(module, models.loader(), models.loader(samples=8))
    return int(trainer.global_step)


def test_what_goes_by_a_validation_does_without(tmp_path: Path) -> None:
    stopping, beats = EarlyStopping("val_loss"), Beats(tmp_path / "beat")
    assert fit(models.Regression(), tmp_path, stopping, beats) == 3 and not stopping.stopped_epoch
    with pytest.raises(RuntimeError, match="Early stopping conditioned on metric `val_loss`"):
        fit(models.Regression(), tmp_path, EarlyStopping("val_loss"))
    epoch = {"max_steps": -1, "max_epochs": 1, "limit_val_batches": 0}  # as the trial of a gradient
    assert fit(Plateau(), tmp_path, beats, **epoch) == 8
    with pytest.raises(Exception, match="ReduceLROnPlateau conditioned on metric val_loss"):
        fit(Plateau(), tmp_path, **epoch)
