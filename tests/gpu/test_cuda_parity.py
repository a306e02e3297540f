"""Parity on a GPU: ids through the device feed, gradients of both precisions, and kernels that repeat themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.evidence.model.gradient_distance import measure_gradient_distance
from fastloop.judge import parity
from fastloop.records.store import decode
from fastloop.records.trial import GradientAnswer
from tests import twins

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]

ON_GPU = {"accelerator": "gpu", "devices": 1}


class Convolves(twins.Twin):
    """With a convolution, a BatchNorm and an embedding, whose backward adds up in any order unless it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv1d(1, 8, 3, padding=1), torch.nn.BatchNorm1d(8)
        self.rows = torch.nn.Embedding(4, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.norm(self.conv(batch[0][:, None])).mean(1) + self.rows((batch[0][:, 0] > 0).long())
        return super().training_step((torch.relu(x), batch[1]), batch_idx)


@pytest.mark.parametrize(
    "rungs",
    [{"prefetch": {"depth": 3}, "pin": {}}, {"prefetch": {}, "workers": {"count": 2}}],
    ids=["prefetch", "with workers"],
)
def test_the_same_samples_through_a_device_feed(rungs: Any, tmp_path: Path) -> None:
    base, _ = twins.ledger(tmp_path / "base", max_epochs=2, **ON_GPU)
    arm, _ = twins.ledger(tmp_path / "arm", rungs=rungs, max_epochs=2, **ON_GPU)
    gate = twins.judge_ledgers(base, arm)
    assert base["ids"] == arm["ids"] == "sampler" and gate.passed, gate
    assert [row[2] for row in arm["steps"]] == [4] * 6


def test_the_base_repeats_itself_in_deterministic_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    base, _ = twins.gradient(tmp_path / "base", kind=Convolves, **ON_GPU)
    assert base["why"] is None and base["self_deviation"] == 0 and base["precision"] == "tf32", base
    exact, _ = twins.gradient(tmp_path / "exact", tmp_path / "base", Convolves, rungs={"prefetch": {}}, **ON_GPU)
    assert parity.judge_gradient(decode(base, GradientAnswer), decode(exact, GradientAnswer), "exact").passed, exact


@pytest.mark.parametrize(
    "rungs",
    [
        {"amp": {"mode": "bf16-mixed"}},
        {"amp": {"mode": "16-mixed"}},
        {"amp": {"mode": "tf32"}},
        {"fused": {}},
        {"compile": {}},
    ],
    ids=["bf16", "fp16", "tf32", "fused", "compile"],
)
def test_rungs_that_round_otherwise_pass_and_a_quarter_does_not(rungs: Any, tmp_path: Path) -> None:
    class Quarter(Convolves):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.25)

    base, _ = twins.gradient(tmp_path / "base", kind=Convolves, **ON_GPU)
    arm, _ = twins.gradient(tmp_path / "arm", tmp_path / "base", Convolves, rungs=rungs, **ON_GPU)
    gate = parity.judge_gradient(decode(base, GradientAnswer), decode(arm, GradientAnswer), "approximate")
    assert gate.passed, gate
    wrong, _ = twins.gradient(tmp_path / "wrong", tmp_path / "base", Quarter, rungs=rungs, **ON_GPU)
    assert (
        parity.judge_gradient(decode(base, GradientAnswer), decode(wrong, GradientAnswer), "approximate").passed
        is False
    )


def test_gradients_are_as_far_apart_on_the_device_as_on_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(300, 200, generator=generator) for name in "ab"}
    arm = {name: (tensor + 1e-3 * torch.randn(300, 200, generator=generator)).cuda() for name, tensor in base.items()}
    there, here = (measure_gradient_distance(base, arm, device) for device in (torch.device("cuda"), None))
    assert there["deviation"] == pytest.approx(here["deviation"], rel=1e-9) and there["deviation"] > 0
    assert there["kept"] == pytest.approx(here["kept"], rel=1e-9) and there["lost"] == here["lost"] == []
