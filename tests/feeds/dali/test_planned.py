"""A planned engine checks its decoder first; where the GPU's is refused, the CPU takes over, if it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytest.importorskip("torchvision")
from torch.utils.data import DataLoader
from torchvision import transforms as T

from fastloop.errors import NotApplicable
from fastloop.feeds.dali import pixels
from fastloop.feeds.dali.planned import DaliEngine
from fastloop.feeds.images.reading import read_source
from tests.feeds.dali.folders import make_folder, read_folder


@pytest.fixture
def loader(tmp_path: Path) -> Any:
    return DataLoader(read_folder(make_folder(tmp_path / "pictures", 8), T.Resize((16, 16)), T.ToTensor()), 4)


@pytest.mark.parametrize(
    ("other", "fault", "used"),
    [(("cpu", 2), None, "mixed"), (("cpu", 2), "no driver", "cpu"), (None, "no driver", None)],
)
def test_the_cpu_takes_over_where_it_may(
    loader: Any, monkeypatch: pytest.MonkeyPatch, other: Any, fault: str | None, used: str | None
) -> None:
    tried, said = [], []

    def try_pixels(_loader: Any, _steps: Any, machine: Any) -> pixels.PixelDeviation:
        tried.append(machine.decode)
        if machine.decode == "mixed" and fault is not None:
            raise NotApplicable(fault)
        return pixels.PixelDeviation(samples=8, mean=0.1, largest=1.0, bias=(), gain=())

    monkeypatch.setattr(pixels, "try_pixels", try_pixels)
    want = DaliEngine(
        steps=read_source(loader.dataset).facts.steps,
        decode="mixed",
        threads=2,
        resize="cpu",
        batch_size=4,
        on_gpu=False,
        keeps=True,
        turn_off="",
        other=other,
    )
    if used is None:
        with pytest.raises(NotApplicable, match=fault):
            want.check(loader, said.append)
        return
    found = want.check(loader, said.append)
    assert found["checked_samples"] == 8
    engine = want.make(loader)
    why = {**found, **engine.evidence()}.get("decode_why")
    assert why == (None if fault is None else "the GPU does not decode: no driver")
    assert engine.evidence()["decode"] == used and tried == ["mixed"] + ["cpu"] * (fault is not None)
    assert said[:-1] == ([] if fault is None else ["DALI decodes on the CPU, because on the GPU no driver"])
