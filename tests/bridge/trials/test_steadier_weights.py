"""Networks whose gradient rounding alone scatters, and what is wrong with them all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fastloop.bridge.trials import gradient_state
from fastloop.judge.parity import judge_gradient
from fastloop.records import store
from fastloop.records.experiment import Gate
from fastloop.records.trial import GradientAnswer
from tests.twins import Twin, gradient


def judge(*answers: Any) -> Gate:
    """The gradient gate between two answers, as they read in answer.json."""
    base, arm = (store.decode(answer, GradientAnswer) for answer in answers)
    assert base is not None and arm is not None
    return judge_gradient(base, arm, "approximate")


class Convolutions(Twin):
    """Eight convolutions with BatchNorms and ReLUs: bfloat16 moves its gradient by 0.2."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        parts: list[torch.nn.Module] = []
        for before, after in ((3, 16), (16, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 32), (32, 32)):
            layer = torch.nn.Conv2d(before, after, 3, stride=max(1, after // before % 5), padding=1, bias=False)
            parts += [layer, torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(
            *parts, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


class AThirdOff(Convolutions):
    """Its gradients are 36 % off, each in a direction of its own, which leaves their size as it is."""

    only: tuple[str, ...] = ()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        type(self).fired += 1
        for name, parameter in self.named_parameters():
            if not self.only or name.startswith(self.only):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                parameter.grad.add_(noise, alpha=float(0.36 * parameter.grad.norm() / noise.norm()))


class AThirdOffBelow(AThirdOff):
    """The last layer, which has nearly all of the norm at steadier weights, is right."""

    only = tuple(f"net.{number}." for number in range(24))


class Reweighted(Convolutions):
    """Every sixth sample of a batch does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).fired += 1
        counts = torch.arange(len(batch[1])) % 6 != 0
        return (functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none").float() * counts).mean()


def pictures() -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 3, 8, 8, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16)


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    place = tmp_path_factory.mktemp("scattered")
    return gradient(place / "base", kind=Convolutions, train=pictures, accumulate_grad_batches=2)[0], place


def test_a_base_that_rounding_scatters_is_measured_where_it_does_not(scattered: tuple[dict[str, Any], Path]) -> None:
    base, place = scattered
    assert base["rounding"]["bf16"] > 0.18 and base["rounds"] == 10, "the old limit was 0.9 here"
    assert 0 < base["steady_rounding"]["tf32"] < base["steady_rounding"]["bf16"] < 0.05
    assert set(gradient_state.read(place / "base", 0)["raised"]["biases"]) == {
        f"net.{3 * n + 1}.bias" for n in range(8)
    }


@pytest.mark.parametrize("kind", [AThirdOff, AThirdOffBelow, Reweighted])
@pytest.mark.timeout(250)
def test_a_gradient_that_is_a_third_off_fails_under_amp(
    kind: Any, scattered: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    base, place = scattered
    settings: dict[str, Any] = {"train": pictures, "rungs": {"amp": {}}, "accumulate_grad_batches": 2}
    kind.fired = 0
    found, _ = gradient(tmp_path, place / "base", kind=kind, **settings)
    gate = judge(base, found)
    assert kind.fired >= 3 and 0.3 < found["deviation"] < 0.55 and 0.75 < found["kept"] < 1.33 and not found["astray"]
    assert gate.passed is False and (gate.deviation or 0) > 0.3 > 2 * (gate.limit or 1), "a limit of 0.9 passed it"


@pytest.mark.parametrize("rungs", [{"amp": {}}, {"amp": {"mode": "16-mixed"}}, {"layout": {}}], ids=str)
@pytest.mark.timeout(250)
def test_an_honest_arm_passes_where_rounding_scatters_the_gradient(
    rungs: Any, scattered: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    base, place = scattered
    found, _ = gradient(
        tmp_path, place / "base", kind=Convolutions, train=pictures, rungs=rungs, accumulate_grad_batches=2
    )
    gate = judge(base, found)
    assert gate.passed is True and (gate.limit or 1) <= 0.1, gate.why
    # 0.055 on a CPU that emulates bf16, below 0.05 on others; at weights where rounding scatters it is above 0.18.
    assert found["steady"]["deviation"] < 0.07 and found["why"] is None


class WithoutBiases(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        for number in range(1, 24, 3):
            self.net[number] = torch.nn.BatchNorm2d(self.net[number].num_features, affine=False)


def test_where_no_bias_can_be_raised_it_cannot_tell(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kind": WithoutBiases, "train": pictures, "accumulate_grad_batches": 2}
    base, _ = gradient(tmp_path / "base", **settings)
    found, _ = gradient(tmp_path / "arm", tmp_path / "base", rungs={"amp": {}}, **settings)
    gate = judge(base, found)
    assert base["rounding"]["bf16"] > 0.18 and "steady_rounding" not in base and base["rounds"] == 6
    assert gate.passed is None and not gate.is_testable and "a limit above 0.1" in gate.why
