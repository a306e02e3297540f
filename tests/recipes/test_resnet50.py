"""The recipe resnet50: it trains, on made and on real photographs, at the sizes that it promises."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("torchvision")


@pytest.fixture
def resnet50(recipe):
    return recipe("resnet50")


def test_tiny_trains_and_validates(resnet50, fit):
    module, data = resnet50.build(resnet50.Settings(size="tiny"))
    losses, trainer = fit(module, data, max_steps=5, accumulate_grad_batches=4, limit_train_batches=20)
    assert len(losses) == 20
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert {"train_loss", "val_loss", "val_acc"} <= set(trainer.callback_metrics)


def test_an_epoch_has_a_thousand_batches_though_photographs_are_few(resnet50):
    _, data = resnet50.build(resnet50.Settings(size="tiny"))
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_dataloader()) == 1_000
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (8, 3, 64, 64)
    assert images.dtype == torch.float32
    assert set(labels.tolist()) <= set(range(10))
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 40


def test_default_is_resnet50_at_224_px(resnet50):
    with torch.device("meta"):
        module, data = resnet50.build(resnet50.Settings())
    assert sum(parameter.numel() for parameter in module.parameters()) == 25_557_032
    assert (data.batch_size, data.crop_px) == (64, 224)


def test_trains_on_real_photographs(resnet50, fit, real):
    module, data = resnet50.build(resnet50.Settings(size="tiny", data=real("imagenet-sample.tar")))
    losses, _ = fit(module, data)
    assert all(math.isfinite(loss) for loss in losses)
    assert len(data.val_set) == 16  # a tenth of 160 photographs
    assert len(data.train_dataloader()) == 1_000
