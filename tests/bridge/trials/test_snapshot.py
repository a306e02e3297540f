"""Weights and gradients by name, and the file they are left in."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.bridge.apply import read_training
from fastloop.bridge.trials import gradient_state

CPU = torch.device("cpu")


def trainer_with(precision: str = "32-true", scaler: Any = None) -> Any:
    plugin = SimpleNamespace(precision=precision, scaler=scaler)
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu"), precision_plugin=plugin))


def test_what_is_saved_is_read_and_every_rank_has_its_own_batches(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    gradient_state.save(folder, 0, {"loss": 1.5, "weights": {"a": torch.ones(3)}, "batches": [[torch.zeros(1)]]})
    gradient_state.save(folder, 2, {"batches": [[torch.ones(1)]]})
    assert len(list(folder.iterdir())) == 2
    assert [float(gradient_state.read(folder, rank)["batches"][0][0]) for rank in (0, 1, 2)] == [0, 0, 1]
    assert gradient_state.read(folder, 2)["loss"] == 1.5


def test_reading_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("run",))

    torch.save({"weights": Evil()}, tmp_path / "gradients.pt")
    with pytest.raises(pickle.UnpicklingError):
        gradient_state.read(tmp_path, 0)


def test_names_without_what_compiling_puts_in() -> None:
    module = torch.nn.Module()
    module.inner = torch.compile(torch.nn.BatchNorm1d(2))
    module.lazy = torch.nn.LazyLinear(3)
    assert list(gradient_state.copy_state(module)) == [
        "inner.weight",
        "inner.bias",
        "inner.running_mean",
        "inner.running_var",
        "inner.num_batches_tracked",
    ]
    module.inner.weight.data.zero_()
    copied = gradient_state.copy_state(module)["inner.weight"]
    module.inner.weight.data.fill_(1)
    assert copied.sum() == 0, "a copy"


def test_the_gradients_of_one_optimizer() -> None:
    a, b, frozen = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).requires_grad_(False)
    module = torch.nn.ModuleList([a, b, frozen])
    (a(torch.ones(1, 2)) + b(torch.ones(1, 2))).sum().backward()
    optimizer = torch.optim.SGD([*a.parameters(), *frozen.parameters()], lr=1)
    found = gradient_state.copy_gradient(trainer_with(), module, optimizer, CPU)
    assert set(found) == {"0.weight", "0.bias"} and found["0.bias"].item() == 1
    scaler = SimpleNamespace(get_scale=lambda: 4.0)
    assert gradient_state.copy_gradient(trainer_with(scaler=scaler), module, optimizer, CPU)["0.bias"].item() == 1
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # a fused one divides by itself, later
    assert gradient_state.copy_gradient(trainer_with(scaler=scaler), module, optimizer, CPU)["0.bias"].item() == 0.25


class Casts(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu"):
            return x


@pytest.mark.parametrize(
    ("said", "module", "expected"),
    [
        ("32-true", torch.nn.Conv2d(1, 1, 1), "fp32"),
        ("bf16-mixed", torch.nn.Linear(1, 1), "bf16"),
        ("bf16-true", torch.nn.Linear(1, 1), "bf16"),
        ("16-mixed", torch.nn.Linear(1, 1), "fp16"),
        ("64-true", torch.nn.Linear(1, 1), "fp64"),
        ("32-true", Casts(), "bf16"),
    ],
    ids=["32", "bf16-mixed", "bf16-true", "16", "64", "the user's own autocast"],
)
def test_the_precision_in_use(said: str, module: torch.nn.Module, expected: str) -> None:
    assert read_training.find_precision(trainer_with(said), module) == expected


@pytest.mark.parametrize(
    ("products", "convolutions", "expected"), [(False, True, "tf32"), (False, False, "fp32"), (True, False, "tf32")]
)
def test_float32_on_a_gpu_may_be_tf32(
    products: bool, convolutions: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastloop.bridge.watch.measurement.read_tf32", lambda: (products, convolutions))
    trainer = trainer_with()
    trainer.strategy.root_device = torch.device("cuda")
    assert read_training.find_precision(trainer, torch.nn.Conv2d(1, 1, 1)) == expected
    assert read_training.find_precision(trainer, torch.nn.Linear(1, 1)) == ("tf32" if products else "fp32")
