"""What only a CUDA device can show. Run ``pytest tests/gpu -n 3 -m "not alone"``, then ``-m alone`` without -n."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.planted import cycles_per_ms
from fastloop import FastLoop
from tests.models import Regression, distance, loader, weights
from tests.models import trainer as quiet_trainer

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]


def trainer(loop: FastLoop | None = None, **settings: Any) -> L.Trainer:
    callbacks = [*([loop] if loop else []), *settings.pop("callbacks", [])]
    return quiet_trainer(**{"accelerator": "gpu", "max_epochs": 2, **settings}, callbacks=callbacks)


def watching(rungs: dict[str, Any] | None = None, warmup: int = 3) -> FastLoop:
    enabled = {name: {"enabled": True, **settings} for name, settings in (rungs or {}).items()}
    return FastLoop({"rungs": enabled, "watch": {"warmup_steps": warmup}}, quiet=True)


def took(loop: FastLoop) -> dict[str, bool | None]:
    return {verdict.rung: verdict.took for verdict in loop.verdicts}


class Pictures(Dataset[Any]):
    def __init__(self, count: int = 256, side: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, side, side, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


class ConvNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 16, 3)
        self.features = torch.nn.Sequential(first, torch.nn.BatchNorm2d(16), torch.nn.ReLU(), second)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: L.LightningModule, data: Any, loop: FastLoop | None = None, **settings: Any) -> L.LightningModule:
    trainer(loop, **settings).fit(module, data)
    return module


def losses(module: Any) -> list[float]:
    return [float(loss) for loss in module.losses]


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def test_strategy_by_name_trains_on_the_gpu() -> None:
    loop = watching()
    where = trainer(loop, strategy="fastloop")
    module = seeded(Classifier)
    where.fit(module, DataLoader(Pictures(), batch_size=32))
    assert module.losses[0].device.type == "cuda"
    assert loop.measurement is not None and loop.measurement.device == "cuda"


@pytest.mark.slow
def test_every_rung_takes_on_a_conv_net() -> None:
    names = ("workers", "pin", "prefetch", "amp", "layout", "fused", "compile")
    loop = watching({**{name: {} for name in names}, "workers": {"count": 2}})
    fit(seeded(Classifier), DataLoader(Pictures(512), batch_size=32), loop)
    assert took(loop) == dict.fromkeys(names, True), loop.verdicts


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_changes_no_loss_and_its_control_does(workers: int) -> None:
    data = DataLoader(Pictures(), batch_size=32, shuffle=True, num_workers=workers)
    torch.backends.cudnn.deterministic = True
    try:
        plain = losses(fit(seeded(Classifier), data))
        loop = watching({"prefetch": {"depth": 3}, "pin": {}})
        ahead = losses(fit(seeded(Classifier), data, loop))
        other = losses(fit(seeded(Classifier), DataLoader(Pictures(), batch_size=32), watching({"prefetch": {}})))
    finally:
        torch.backends.cudnn.deterministic = False
    assert ahead == plain
    assert other != plain
    assert took(loop) == {"prefetch": True, "pin": True}


def test_prefetched_batches_are_whole_under_memory_pressure() -> None:
    class Numbered(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4_000_000,), float(index + 1))

    class Check(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.means: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            scratch = torch.empty_like(batch).fill_(-1.0)  # takes whatever memory was freed too early
            torch.cuda._sleep(20_000_000)
            self.means.append(torch.stack([batch.min(), batch.max(), scratch.mean()]))
            return self.weight.sum() * 0 + batch[0, 0] * self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Check()
    fit(module, DataLoader(Numbered(), batch_size=1), watching({"prefetch": {"depth": 2}}), max_epochs=1)
    seen = torch.stack(module.means).cpu()
    expected = torch.arange(1, 61, dtype=torch.float32)
    assert torch.equal(seen[:, 0], expected) and torch.equal(seen[:, 1], expected)


def test_each_transfer_hook_runs_once_and_in_order() -> None:
    class Hooked(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append(f"before {batch[0].device.type}")
            return [batch[0] + 1, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.calls.append("transfer")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append(f"after {batch[0].device.type}")
            return [batch[0] * 2, batch[1]]

    data = DataLoader(Pictures(), batch_size=32)
    plain, hooked = seeded(Hooked), seeded(Hooked)
    fit(plain, data, max_epochs=1)
    fit(hooked, data, watching({"prefetch": {"depth": 2}}), max_epochs=1)
    assert losses(hooked) == pytest.approx(losses(plain), rel=1e-6)
    assert sorted(hooked.calls) == sorted(plain.calls) and len(plain.calls) == 24
    assert hooked.calls[:4] == ["before cpu", "transfer", "before cpu", "transfer"]


def test_pin_has_no_effect_on_a_batch_type_without_pin_memory() -> None:
    class Bag:
        def __init__(self, rows: Any) -> None:
            self.x, self.y = (torch.stack(column) for column in zip(*rows, strict=True))

        def to(self, device: Any, **_: Any) -> Bag:
            self.x, self.y = self.x.to(device), self.y.to(device)
            return self

    class Bagged(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step((batch.x, batch.y), batch_idx)

    loop = watching({"pin": {}})
    fit(Bagged(), loader(collate_fn=Bag), loop)
    assert took(loop) == {"pin": False}
    assert "none of the 2 tensors of a Bag was pinned" in loop.verdicts[0].why


@pytest.mark.parametrize(("accumulate", "batch_size", "micro"), [(1, 16, 5), (4, 4, 16), (4, 4, 7)])
def test_micro_batches_leave_the_weights(accumulate: int, batch_size: int, micro: int) -> None:
    def run(loop: FastLoop | None) -> Any:
        module = seeded(lambda: Regression(torch.optim.AdamW, lr=0.01))
        return weights(fit(module, loader(90, batch_size), loop, max_epochs=12, accumulate_grad_batches=accumulate))

    plain, split = run(None), run(loop := watching({"batch": {"micro_batch": micro}}))
    assert distance(plain, split) < 1e-6
    assert took(loop) == {"batch": True}


@pytest.mark.parametrize(("mode", "flag"), [("bf16-mixed", "highest"), ("16-mixed", "highest"), ("tf32", "highest")])
def test_amp_modes_take_and_are_undone(mode: str, flag: str) -> None:
    loop = watching({"amp": {"mode": mode}, "fused": {}})
    fit(seeded(Classifier), DataLoader(Pictures(), batch_size=32), loop)
    assert took(loop) == {"amp": True, "fused": True}, loop.verdicts
    assert torch.get_float32_matmul_precision() == flag


def test_off_is_bit_equal() -> None:
    data = DataLoader(Pictures(), batch_size=32, shuffle=True)
    torch.backends.cudnn.deterministic = True
    try:
        plain = losses(fit(seeded(Classifier), data))
        watched = losses(fit(seeded(Classifier), data, watching()))
        other = losses(fit(seeded(Classifier), data, watching({"amp": {}})))
    finally:
        torch.backends.cudnn.deterministic = False
    assert watched == plain
    assert other != plain


class Busy(L.LightningModule):
    """Keeps the device busy for a set time each step, and the loader for another."""

    def __init__(self, device_ms: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.cycles = int(device_ms * cycles_per_ms())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.cuda._sleep(self.cycles)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Slow(Dataset[torch.Tensor]):
    def __init__(self, seconds: float, count: int = 60) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(1)


@pytest.mark.alone
def test_a_loader_faster_than_the_device_is_no_wait() -> None:
    loop = watching(warmup=10)
    fit(Busy(40), DataLoader(Slow(0.030), batch_size=1), loop, max_epochs=1)
    seen = loop.measurement
    assert seen is not None and seen.step_ms["mean"] == pytest.approx(40, abs=1.5)
    assert seen.parts_ms["data_wait"] < 0.01 * seen.step_ms["mean"]
    assert [finding.bottleneck for finding in loop.findings] == ["compute_bound"]


@pytest.mark.alone
def test_a_loader_slower_than_the_device_is_the_difference() -> None:
    loop = watching(warmup=10)
    fit(Busy(40), DataLoader(Slow(0.060), batch_size=1), loop, max_epochs=1)
    seen = loop.measurement
    assert seen is not None
    assert seen.parts_ms["data_wait"] == pytest.approx(seen.step_ms["mean"] - 40, abs=2)
    assert loop.findings[0].bottleneck == "data_wait"
    assert loop.findings[0].patch == {"rungs": {"workers": {"enabled": True}}}


class NoSyncs(L.Callback):
    """Makes every synchronisation inside the window an error."""

    def __init__(self, mode: str = "error") -> None:
        self.mode, self.steps = mode, 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.steps += 1
        if trainer.global_step == 5:
            torch.cuda.set_sync_debug_mode(self.mode)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 14:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rungs", [{}, {"prefetch": {}, "pin": {}, "fused": {}, "amp": {}, "layout": {}}])
def test_nothing_synchronizes_inside_the_window(rungs: dict[str, Any]) -> None:
    loop = watching(rungs)
    fit(seeded(Classifier), DataLoader(Pictures(512), batch_size=32), loop, callbacks=[NoSyncs()], max_epochs=1)
    assert loop.measurement is not None and loop.measurement.steps > 0

    class Syncing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    with pytest.raises(RuntimeError, match="synchroniz"):
        fit(Syncing(), DataLoader(Pictures(512), batch_size=32), watching(rungs), callbacks=[NoSyncs()], max_epochs=1)
