"""The recipe cifar10: it trains, on made and on real pictures, at the sizes and under the schedule that it promises."""

from __future__ import annotations

import math

import pytest
import torch

from fastloop.errors import ConfigError

pytest.importorskip("torchvision")


@pytest.fixture
def cifar10(recipe):
    return recipe("cifar10")


def test_tiny_trains_and_validates(cifar10, fit):
    module, data = cifar10.build(cifar10.Settings(size="tiny"))
    losses, trainer = fit(module, data, max_steps=40, limit_train_batches=40)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert {"train_loss", "val_loss", "val_acc"} <= set(trainer.callback_metrics)


def test_the_schedule_is_one_cycle_over_the_whole_run(cifar10, fit):
    module, data = cifar10.build(cifar10.Settings(size="tiny"))
    _, trainer = fit(module, data, max_steps=12)
    (schedule,) = (config.scheduler for config in trainer.lr_scheduler_configs)
    assert schedule.total_steps == 12
    assert schedule.last_epoch == 12  # one step of it per optimizer step
    assert schedule.get_last_lr()[0] < 0.025 / 25


def test_batches_have_the_promised_shape(cifar10):
    _, data = cifar10.build(cifar10.Settings(size="tiny"))
    data.prepare_data()
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (32, 3, 32, 32)
    assert labels.shape == (32,)
    assert (len(data.train_set), len(data.val_set)) == (2_000, 400)


def test_default_is_resnet18(cifar10):
    with torch.device("meta"):
        module, data = cifar10.build(cifar10.Settings())
        assert module(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in module.parameters()) == 11_173_962
    assert data.batch_size == 128


def test_trains_on_real_pictures(cifar10, fit, real):
    module, data = cifar10.build(cifar10.Settings(size="tiny", data=real("cifar10-jpg.tar")))
    losses, _ = fit(module, data)
    assert all(math.isfinite(loss) for loss in losses)
    assert (len(data.train_set), len(data.val_set)) == (10_000, 2_000)


def test_a_download_that_fails_says_what_to_do(cifar10, fit, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("name resolution failed")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", unreachable)
    module, data = cifar10.build(cifar10.Settings(size="tiny", data="download"))
    with pytest.raises(ConfigError, match="name resolution failed") as caught:
        fit(module, data)
    assert caught.value.key == "recipe.data"


def test_a_download_is_read_in_place_of_a_folder(cifar10, monkeypatch):
    class Fetched:
        def __init__(self, root, train=True, transform=None, download=False):
            self.train = train
            if download:
                fetched.append(root)

    fetched: list[str] = []
    monkeypatch.setattr("torchvision.datasets.CIFAR10", Fetched)
    _, data = cifar10.build(cifar10.Settings(data="download"))
    data.prepare_data()
    data.setup("fit")
    assert len(fetched) == 1
    assert (data.train_set.train, data.val_set.train) == (True, False)
