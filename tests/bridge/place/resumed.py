"""Fits that are cut off and resumed, and what they trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fastloop import FastLoop
from tests import models
from tests.runs import Net, numbered, watching

Rungs = Mapping[str, Mapping[str, Any]] | None
SAMPLES, BATCH = 60, 8
"""Eight batches an epoch, the last one short."""


class Recorded(Net):
    """Remembers each batch it trained on, with its loss."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self.trained: list[tuple[int, list[int], float]] = []
        """Epoch, numbers of the samples, loss."""
        self.ends: list[dict[str, torch.Tensor]] = []
        """Weights at the end of each epoch."""
        self.raises_at: tuple[int, int] | None = None
        """Epoch and batch_idx at which training_step fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.raises_at == (self.current_epoch, batch_idx):
            raise RuntimeError("planted")
        loss = super().training_step(batch, batch_idx)
        self.trained.append((self.current_epoch, batch[2].tolist(), float(loss.detach())))
        return loss

    def on_train_epoch_end(self) -> None:
        self.ends.append(models.weights(self))

    def drawn(self, epoch: int) -> list[int]:
        """Numbers of the samples of an epoch, in order."""
        return [number for when, numbers, _ in self.trained if when == epoch for number in numbers]


def shuffled(seed: int | None = None, **settings: Any) -> DataLoader[Any]:
    """Shuffled by torch's own generator, or by one of the loader's own."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    named = {"shuffle": True, **settings} if "sampler" not in settings else settings
    return DataLoader(numbered(SAMPLES), batch_size=BATCH, generator=generator, **named)


def fit(
    rungs: Rungs,
    train: Any,
    *,
    seed: int,
    ckpt: Path | None = None,
    save: Path | None = None,
    module: Recorded | None = None,
    callbacks: tuple[L.Callback, ...] = (),
    loop: FastLoop | None = None,
    **settings: Any,
) -> tuple[Recorded, L.Trainer]:
    """Fit from the same weights, with torch seeded by `seed`; `save` gets a checkpoint after each optimizer step."""
    if module is None:
        torch.manual_seed(0)
        module = Recorded()
    if save is not None:
        callbacks = (*callbacks, ModelCheckpoint(save, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    saves = any(isinstance(each, L.pytorch.callbacks.Checkpoint) for each in callbacks)
    if loop is None and rungs is not None:
        loop = watching(rungs)
    if loop is not None:
        callbacks = (*callbacks, loop)
    settings = {"max_epochs": 2, "enable_checkpointing": saves, **settings}
    trainer = models.trainer(callbacks=list(callbacks), **settings)
    torch.manual_seed(seed)
    trainer.fit(module, train, ckpt_path=ckpt, **(models.WEIGHTS_ONLY if ckpt else {}))
    return module, trainer


def place(ckpt: Path) -> Any:
    """What a checkpoint says of its place; None where it says nothing."""
    return torch.load(ckpt, weights_only=True)["callbacks"].get("FastLoop", {}).get("place")
