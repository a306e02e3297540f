"""The compute rungs together on a CUDA device: fused kernels, loss scaling and channels-last state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests import models
from tests.rungs import test_fused as fused
from tests.rungs import test_layout as layout
from tests.rungs.fits import fit, seeded, verdict

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
GPU: dict[str, Any] = {"accelerator": "gpu"}


class Norms(fused.Tuned):
    """Notes the gradient norm a hook sees before the step, and where the step counters are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norms: list[float] = []
        self.counters: set[str] = set()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.net[0].weight.grad.norm()))  # type: ignore[index, union-attr]
        self.counters |= {state["step"].device.type for state in optimizer.state.values()}


def test_a_loss_scaler_unscales_before_hooks_see_gradients() -> None:
    half: dict[str, Any] = {"amp": {"mode": "16-mixed"}}
    ours, plain = seeded(Norms), seeded(Norms)
    watcher, _ = fit({**half, "fused": {}}, ours, **GPU)
    fit(half, plain, **GPU)
    assert verdict(watcher, "fused").took is True and verdict(watcher, "amp").took is True
    assert ours.norms == pytest.approx(plain.norms, rel=0.02) and max(plain.norms) < 100
    assert models.distance(models.weights(plain), models.weights(ours)) < 5e-3


def test_step_counters_go_to_the_device_and_back() -> None:
    ours = seeded(Norms)
    watcher, trainer = fit(fused.FUSED, ours, **GPU)
    assert verdict(watcher, "fused").took is True and ours.counters == {"cuda"}
    assert {state["step"].device.type for state in trainer.optimizers[0].state.values()} == {"cpu"}
    watcher, _ = fit(fused.FUSED, seeded(fused.Tuned, kind=torch.optim.Adagrad), **GPU)
    assert verdict(watcher, "fused").why == "Adagrad has no fused form on cuda"


@pytest.mark.parametrize("users", [True, None])
@pytest.mark.parametrize("runs", layout.PLAIN_THEN)
def test_checkpoints_go_both_ways_with_fused_kernels(tmp_path: Path, runs: str, users: bool | None) -> None:
    """CUDA's fused kernels refuse a parameter and a state in different orders."""
    rungs = {None: None, True: layout.LAYOUT if users else {**layout.LAYOUT, **fused.FUSED}}

    def resumed(folder: Path, first: Any, then: Any) -> dict[str, torch.Tensor]:
        keeper = L.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=1)
        fit(
            rungs[first],
            seeded(layout.Pictures, fused=users),
            layout.pictures(),
            callbacks=(keeper,),
            enable_checkpointing=True,
            **GPU,
        )
        module = seeded(layout.Pictures, fused=users)
        keeper = L.pytorch.callbacks.ModelCheckpoint(dirpath=folder)
        watcher, _ = fit(
            rungs[then],
            module,
            layout.pictures(),
            ckpt=folder / "last.ckpt",
            max_epochs=3,
            callbacks=(keeper,),
            enable_checkpointing=True,
            **GPU,
        )
        assert then is None or all(verdict.took for verdict in watcher.verdicts)  # type: ignore[union-attr]
        return layout.weights_of(module)

    first, then = (None if each is None else True for each in layout.PLAIN_THEN[runs])
    plain, ours = resumed(tmp_path / "plain", None, None), resumed(tmp_path / "ours", first, then)
    assert models.distance(plain, ours) < 1e-2
