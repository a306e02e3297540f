"""Ceilings on a CUDA device: which batches are pinned, which are there already, and that trials answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.commands.console import Request
from fastloop.commands.headspace import headspace
from fastloop.experiments.trials.trial import Job, run_trial
from tests.bridge.trials.test_ceilings import Net, fit, loaded
from tests.trainings import SLOW

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(240)]
GPU: dict[str, Any] = {"accelerator": "gpu", "max_steps": 40, "max_epochs": -1}


class Arrives(Net):
    """Notes where its batches lie when Lightning is about to move them."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []
        self.there: list[bool] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.pinned.append(batch["number"].is_pinned())
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.there.append(batch["x"].is_cuda)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


@pytest.mark.parametrize(("rungs", "pinned"), [({}, False), ({"pin": {}}, True)], ids=["as loaded", "pin"])
def test_replayed_batches_are_pinned_as_configured(rungs: Any, pinned: bool) -> None:
    module, _ = fit(loaded()[1], Arrives(), rungs=rungs, **GPU)
    assert set(module.pinned) == {pinned} and len(module.pinned) == 40 and set(module.there) == {False}


def test_replayed_batches_go_through_the_feed() -> None:
    data, loader = loaded()
    _, loop = fit(loader, Arrives(), rungs={"prefetch": {}, "pin": {}}, **GPU)
    assert loop is not None and loop.measurement is not None
    fed = loop.measurement.evidence["prefetch"]
    assert fed["batches"] >= 40 and fed["copied_bytes"] > 0 and data.read == 64


@pytest.mark.alone
@pytest.mark.parametrize("rungs", [{}, {"prefetch": {}}], ids=["plain", "prefetch"])
def test_resident_batches_are_there_already(rungs: Any) -> None:
    module, loop = fit(loaded()[1], Arrives(), on_device=True, rungs=rungs, **GPU)
    assert len(set(module.places)) == 2 and module.after == 40
    assert module.there[:2] == [False, False] and set(module.there[2:]) <= {True}, "moved once"
    assert loop is not None and loop.measurement is not None
    assert (loop.measurement.parts_ms["h2d"] or 0) < 0.3


@pytest.mark.slow
def test_rates_and_work_are_answered(tmp_path: Path) -> None:
    job = Job(conf=str(SLOW), overrides=("run.accelerator=gpu",))
    rates = run_trial("rates", replace(job, variation="rates"), tmp_path / "rates")
    assert rates.ok and rates.answer is not None, rates.tail
    assert 50 < rates.answer.gemm_tflop_per_s < 5000 and 0.2 < rates.answer.copy_tb_per_s < 20
    work = run_trial("flops", job.counted(), tmp_path / "flops")
    assert work.ok and work.answer is not None and work.answer.per_sample == 608, work.tail


@pytest.mark.slow
def test_a_slow_loader_has_headroom(tmp_path: Path) -> None:
    overrides = ("run.accelerator=gpu", "recipe.load_ms=20")
    answer = headspace(str(SLOW), Request(overrides=overrides, out=str(tmp_path / "a"), limit_s=200), lambda line: None)
    assert answer.json is not None
    assert all(answer.json["ceilings"][name]["ratio"] > 3 for name in ("replayed", "resident")), answer.text
