"""The layout rung: channels-last kernels and inputs, and nothing else changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastloop.bridge.apply.read_model import read_module
from fastloop.bridge.fail_open import explain_exception
from fastloop.errors import NotApplicable
from fastloop.feeds.batch_tree import InputsChannelsLast
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Applied
from fastloop.rungs.layout import Layout
from tests import models
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

LAYOUT: dict[str, Any] = {"layout": {}}
LAST = torch.channels_last


class Pictures(L.LightningModule):
    """3 x 8 x 8 pictures to one number; notes the order of its inputs and kernels."""

    def __init__(self, lr: float = 0.05, fused: bool | None = None, adam: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 8, 1),
            torch.nn.Conv2d(8, 4, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(144, 1),
        )
        self.bias = torch.nn.Parameter(torch.zeros(1, 3, 8, 8))
        self.lr, self.fused, self.adam = lr, fused, adam
        self.orders: list[tuple[bool, bool, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.orders.append(
            (
                x.is_contiguous(memory_format=LAST),
                self.net[0].weight.is_contiguous(memory_format=LAST),
                self.bias.is_contiguous(memory_format=LAST),
            )
        )
        return torch.nn.functional.mse_loss(self.net(x + self.bias), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y))
        self.log("channels_last", float(x.is_contiguous(memory_format=LAST)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.fused)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, fused=self.fused)


def pictures(samples: int = 32, side: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, side, side, generator=generator)
    return DataLoader(TensorDataset(x, x.mean(dim=(1, 2, 3)).unsqueeze(1)), batch_size=8)


@pytest.mark.parametrize(("device", "loads_s"), [("cuda", 0.515), ("cpu", 0.0)])
def test_kernels_of_depthwise_convolutions_take_long_to_load(device: str, loads_s: float) -> None:
    """One of these three: groups as many as channels, and more than one."""
    convs = (torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.Conv2d(8, 8, 3, groups=2), torch.nn.Conv2d(1, 8, 3))
    facts = Facts(device=device, **read_module(torch.nn.Sequential(*convs)))
    assert facts.depthwise_convs == ("0",)
    assert Layout(enabled=True).plan(facts).first_call_s == pytest.approx(loads_s)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and running statistics; not BatchNorm's integer counter."""
    return {name: tensor for name, tensor in models.weights(module).items() if tensor.is_floating_point()}


def test_images_become_channels_last_and_are_counted() -> None:
    convert, images = InputsChannelsLast(), torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    masks = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    changed = convert({"images": images, "labels": torch.tensor([0, 1]), "masks": masks})
    assert changed["images"].is_contiguous(memory_format=torch.channels_last)
    assert not changed["images"].is_contiguous() and torch.equal(changed["images"], images)
    assert changed["masks"] is masks and convert.batches == 1


@pytest.mark.parametrize("batch", [torch.ones(2, 3), [torch.ones(2), "text"], None, torch.ones(1, 1, 2, 2).int()])
def test_batches_without_images_are_handed_through(batch: Any) -> None:
    convert = InputsChannelsLast()
    assert convert(batch) is batch and convert.batches == 0


def strides(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in module.state_dict().items()}


def test_plan() -> None:
    with pytest.raises(NotApplicable) as reason:
        Layout(enabled=True).plan(Facts())
    assert str(reason.value) == "the model has no 2-D convolution"
    with pytest.raises(NotApplicable, match="FSDPStrategy stores weights in its own layout"):
        Layout(enabled=True).plan(Facts(convs=("net.0",), plain_gradients=False, strategy="FSDPStrategy"))
    change = Layout(enabled=True).plan(Facts(convs=("net.0",)))
    assert dict(change.wants) == {"step.channels_last_inputs": True}
    assert [(action.keys, action.when) for action in change.actions] == [
        (("model.memory_format",), "model"),
        (("optimizer.memory_format",), "train_start"),
    ]
    assert change.parity == "approximate" and change.evaluation


class Flat(Pictures):
    """Sees pictures as rows, as people write it outside of any module."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0 * batch[0].view(len(batch[0]), -1).mean()


def compute_dice(seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss as people copy it."""
    return 1 - (seen.view(-1) * wanted.view(-1)).mean()


class Dice(torch.nn.Module):
    def forward(self, seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return compute_dice(seen, wanted)


class Masks(torch.nn.Module):
    """A picture for a picture, and where its loss is kept."""

    def __init__(self, **kept: Any) -> None:
        super().__init__()
        self.convs = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3, padding=1))
        vars(self).update(kept)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.convs(batch), batch)


class Masked(Masks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return compute_dice(self.convs(batch), batch)


class MaskedByModule(Masks):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Dice()


class Coder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.Conv2d(3, 3, 3, padding=1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return compute_dice(self.convs(x), x)


class Coded(torch.nn.Module):
    """Asks its model for something else than its forward, which a rehearsal does not play."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.coder.encode(batch)


@pytest.mark.parametrize(
    "make",
    [
        Masked,
        Coded,
        MaskedByModule,
        lambda: Masks(loss=compute_dice),
        lambda: Masks(loss=functools.partial(compute_dice)),
        lambda: Masks(loss=Dice().forward),
        lambda: Masks(losses=[Dice()]),
    ],
)
def test_so_does_a_loss_of_whole_pictures(make: Callable[[], torch.nn.Module]) -> None:
    module = make()
    with pytest.raises(NotApplicable, match=r"^compute_dice calls view"):
        Layout().plan(Facts(**read_module(module)))
    assert Facts(**read_module(Masks(loss=torch.nn.functional.mse_loss))).views == (), "and others have theirs"


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs, self.out = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(144, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.convs(x).view(x.shape[0], -1))


def test_code_that_asks_for_the_usual_order_keeps_it() -> None:
    ours, plain = seeded(Flat), seeded(Flat)
    watcher, _ = fit({"layout": {}}, ours, pictures())
    fit(None, plain, pictures())
    assert (
        verdict(watcher, "layout").took is False and "Flat.training_step calls view" in verdict(watcher, "layout").why
    )
    assert same(models.weights(ours), models.weights(plain))
    inner = read_module(torch.nn.Sequential(Tower()))
    assert (inner["views"], inner["inner_views"]) == ((), ("Tower.forward",))
    Layout().plan(Facts(**inner))
    with pytest.raises(NotApplicable, match=r"^Tower\.forward calls view"):  # which DDP lets nobody rehearse
        Layout().plan(Facts(**inner, is_ddp=True))


def test_takes() -> None:
    module = seeded(Pictures)
    watcher, _ = fit(LAYOUT, module, pictures(), val=pictures())
    assert set(module.orders) == {(True, True, False)}  # inputs and kernels; other 4-D parameters stay
    assert verdict(watcher, "layout").took is True
    assert verdict(watcher, "layout").why.startswith("2 of 2 convolutions hold channels-last weights; ")
    assert evidence(watcher, "layout")["converted_batches"] >= 4

    plain = seeded(Pictures)
    fit(None, plain, pictures())
    assert set(plain.orders) == {(False, False, False)}

    watcher, _ = fit(LAYOUT, seeded())  # a model without convolutions
    assert verdict(watcher, "layout").took is False
    assert verdict(watcher, "layout").why == "the model has no 2-D convolution"

    class TakesItBack(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.to(memory_format=torch.contiguous_format)

    watcher, _ = fit(LAYOUT, seeded(Pictures), pictures(), callbacks=(TakesItBack(),))
    assert verdict(watcher, "layout").took is False
    assert verdict(watcher, "layout").why.startswith("0 of 2 convolutions")


def test_kernels_without_an_order_are_judged_by_the_inputs() -> None:
    assert Layout().verify(Measurement()).took is None
    seen = Measurement(evidence={"layout": {"convs": 0, "channels_last_convs": 0, "converted_batches": 3}})
    assert Layout().verify(seen).took is True
    seen = Measurement(evidence={"layout": {"convs": 0, "channels_last_convs": 0}})
    assert Layout().verify(seen).took is False


def test_parity() -> None:
    def weights(rungs: Any, **settings: Any) -> dict[str, torch.Tensor]:
        module = seeded(Pictures, **settings)
        fit(rungs, module, pictures(), max_epochs=5)
        return weights_of(module)

    plain, ours = weights(None), weights(LAYOUT)
    assert models.distance(plain, ours) < 1e-5
    assert models.distance(plain, weights(LAYOUT, lr=0.05001)) > 1e-5  # the comparison can fail


def test_undo() -> None:
    module = seeded(Pictures)
    before = strides(module)
    _, trainer = fit(LAYOUT, module, pictures())
    assert strides(module) == before
    momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    assert all(momentum.is_contiguous() for momentum in momenta)
    assert all(parameter.grad is None or parameter.grad.is_contiguous() for parameter in module.parameters())

    module, watcher = seeded(Pictures), loop(LAYOUT)
    trainer = models.trainer(callbacks=[watcher, Raises()])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(module, pictures())
    assert strides(module) == before
    trainer.callbacks.pop()
    trainer.fit(module, pictures())
    assert verdict(watcher, "layout").took is True and strides(module) == before


def test_the_users_own_order_and_other_dimensions_stay() -> None:
    class Mixed(Pictures):
        def __init__(self) -> None:
            super().__init__()
            self.volume = torch.nn.Conv3d(1, 1, 3)  # module.to(memory_format=channels_last) fails for 5-D weights
            self.net[4].weight.data = self.net[4].weight.data.contiguous(memory_format=LAST)

    module = seeded(Mixed)
    before = strides(module)
    watcher, _ = fit(LAYOUT, module, pictures())
    assert verdict(watcher, "layout").took is True
    assert strides(module) == before


def test_validation_after_fit_is_validation_inside_fit() -> None:
    module = seeded(Pictures)
    _, trainer = fit(LAYOUT, module, pictures(), val=pictures())
    inside = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.validate(module, pictures(), verbose=False)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == inside
    assert inside["channels_last"] == 1.0
    plain = models.trainer()
    plain.validate(module, pictures(), verbose=False)
    assert float(plain.callback_metrics["channels_last"]) == 0.0


PLAIN_THEN = {"plain, then layout": (None, LAYOUT), "layout, then plain": (LAYOUT, None), "both": (LAYOUT, LAYOUT)}


def resumed(folder: Path, first: Any, then: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """Weights after one epoch under `first` and two more, from its checkpoint, under `then`."""
    keeper = L.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=1)
    fit(first, seeded(Pictures, **settings), pictures(), callbacks=(keeper,), enable_checkpointing=True)
    module = seeded(Pictures, **settings)
    keeper = L.pytorch.callbacks.ModelCheckpoint(dirpath=folder)
    fit(
        then,
        module,
        pictures(),
        ckpt=folder / "last.ckpt",
        max_epochs=3,
        callbacks=(keeper,),
        enable_checkpointing=True,
    )
    return weights_of(module)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"adam": True, "fused": True}])
@pytest.mark.parametrize("runs", PLAIN_THEN)
def test_checkpoints_go_both_ways(tmp_path: Path, runs: str, settings: dict[str, Any]) -> None:
    """Fused optimizers pair elements by their place in memory: state in another order than its kernel does harm."""
    plain = resumed(tmp_path / "plain", None, None, **settings)
    assert models.distance(plain, resumed(tmp_path / "ours", *PLAIN_THEN[runs], **settings)) < 2e-3


def test_that_comparison_sees_state_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"fused": True}
    plain = resumed(tmp_path / "plain", None, None, **settings)
    monkeypatch.setattr("fastloop.rungs.layout._match_state", lambda site: Applied(undo=lambda: None))
    assert models.distance(plain, resumed(tmp_path / "ours", None, LAYOUT, **settings)) > 0.01


def test_checkpoints_are_stored_as_a_plain_run_stores_them(tmp_path: Path) -> None:
    def stored(name: str, rungs: Any, **settings: Any) -> list[torch.Tensor]:
        keeper = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / name, save_last=True, every_n_train_steps=2)
        fit(rungs, seeded(Pictures, **settings), pictures(), callbacks=(keeper,), enable_checkpointing=True)
        checkpoint = torch.load(keeper.last_model_path, weights_only=False)
        states = checkpoint["optimizer_states"][0]["state"].values()
        return [*checkpoint["state_dict"].values(), *(state["momentum_buffer"] for state in states)]

    ours, plain = stored("ours", LAYOUT), stored("plain", None)
    assert all(tensor.is_contiguous() for tensor in ours)
    # Saving mid-epoch changed nothing in the running optimizer.
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(stored("other", LAYOUT, lr=0.06), plain, rtol=1e-4, atol=1e-6)


def test_under_ddp_it_applies_before_the_wrap() -> None:
    """DDP lays its buckets out once where parameters may be unused: kernels that change later get other gradients."""
    rung = Layout(enabled=True)
    assert rung.plan(Facts(convs=("conv",), is_ddp=True)).rehearse is None
    assert rung.plan(Facts(convs=("conv",))).rehearse == "modules"


class Drift(L.Callback):
    """Reads all weights as one vector."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.nn.utils.parameters_to_vector(pl_module.parameters())


class GradientNorm(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for each in pl_module.parameters():
            if each.grad is not None:
                each.grad.view(-1).norm()


def make_pruning() -> L.Callback:
    return L.pytorch.callbacks.ModelPruning("l1_unstructured", amount=0.1)


def make_lambda() -> L.Callback:
    return L.pytorch.callbacks.LambdaCallback(
        on_train_epoch_end=lambda _, module: print(torch.nn.utils.parameters_to_vector(module.parameters()).norm())
    )


@pytest.mark.parametrize("make", [Drift, GradientNorm, make_pruning, make_lambda])
def test_a_callback_that_takes_views_of_weights_keeps_the_usual_order(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], L.Callback]
) -> None:
    watcher, _ = fit(LAYOUT, seeded(Pictures), pictures(), callbacks=(make(),), max_epochs=2)
    assert "calls view, which fails on channels-last images and weights" in verdict(watcher, "layout").why
    monkeypatch.setattr("fastloop.bridge.apply.read_model._find_callbacks_views", lambda callbacks: ())
    with pytest.raises(RuntimeError, match="view size is not compatible") as raised:  # control
        fit(LAYOUT, seeded(Pictures), pictures(), callbacks=(make(),), max_epochs=2)
    assert "rungs.layout.enabled: false" in (explain_exception(raised.value, None, ["layout"]) or "")
    assert explain_exception(raised.value, None, ["amp"]) is None


class NamesModules(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        print(sum(isinstance(each, Tower) for each in pl_module.modules()))


@pytest.mark.parametrize("make", [L.pytorch.callbacks.Timer, NamesModules])
def test_other_callbacks_do_not_keep_it(make: Callable[[], L.Callback]) -> None:
    watcher, _ = fit(LAYOUT, seeded(Pictures), pictures(), callbacks=(make(),))
    assert verdict(watcher, "layout").took


class Searching(Pictures):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01)


def test_so_does_lbfgs(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, _ = fit(LAYOUT, seeded(Searching), pictures())
    assert "LBFGS takes a view of each gradient" in verdict(watcher, "layout").why
    monkeypatch.setattr("fastloop.bridge.apply.read_model.list_methods", lambda *_: [])
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # control
        fit(LAYOUT, seeded(Searching), pictures())
