"""The decoder is chosen by the training's own batches: what makes them faster stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.dali.decoder_choice import BLOCK, BLOCKS, SETTLING, DecoderChoice, check_room
from fastloop.feeds.images.reading import ImageSource

ROUND = SETTLING + BLOCK * BLOCKS


class Training:
    """A training whose device takes `device_s` for a batch, and whose pictures take `loader_s`, by decoder. The host
    runs ahead of the device, but waits for it in every `waits` batches."""

    def __init__(self, device_s: Mapping[str, float], loader_s: Mapping[str, float], *, waits: int = 1) -> None:
        self.device_s, self.loader_s, self.waits = device_s, loader_s, waits
        self.host = self.device = self.loader = 0.0
        self.choice = DecoderChoice("cpu", "mixed", self.synchronize, lambda: self.host)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def run(self, batches: int, pause: Callable[[int], float] = lambda _number: 0.0) -> list[str]:
        """Train; returns the decoder of each batch."""
        used = []
        for number in range(batches):
            now = self.choice.now
            used.append(now)
            self.loader = max(self.loader, self.host - 3 * self.loader_s[now]) + self.loader_s[now]  # three ahead
            waited_s = max(0.0, self.loader - self.host)
            self.host += waited_s + 0.001
            self.device = max(self.device, self.host) + self.device_s[now]
            self.host += pause(number)
            if number % self.waits == 0:
                self.synchronize()
            self.choice.note(waited_s)
        return used


@pytest.mark.parametrize("waits", [1, 10, 50])
@pytest.mark.parametrize(
    ("device", "loader", "used"),
    [
        ({"cpu": 0.05, "mixed": 0.06}, {"cpu": 0.02, "mixed": 0.01}, {0: "cpu", 2: "cpu"}),
        ({"cpu": 0.02, "mixed": 0.03}, {"cpu": 0.05, "mixed": 0.01}, {0: "cpu", 1: "mixed", 2: "mixed"}),
        ({"cpu": 0.10, "mixed": 0.115}, {"cpu": 0.05, "mixed": 0.04}, {0: "cpu", 2: "cpu"}),
        ({"cpu": 0.02, "mixed": 0.049}, {"cpu": 0.05, "mixed": 0.01}, {0: "cpu", 1: "mixed", 2: "cpu"}),
    ],
    ids=["no wait", "the GPU decodes faster", "only the device limits", "not fast enough"],
)
def test_the_faster_one_stays(
    device: Mapping[str, float], loader: Mapping[str, float], used: Mapping[int, str], waits: int
) -> None:
    """Whether the host sees the device's time in every batch, or runs ahead of it."""
    training = Training(device, loader, waits=waits)
    found = training.run(3 * ROUND)
    for number, decoder in used.items():
        assert set(found[number * ROUND + 1 : (number + 1) * ROUND - 1]) == {decoder}, number
    assert training.choice.is_over and training.choice.now == found[-1]


def test_without_waits_nothing_is_tried() -> None:
    """A host that runs ahead waits for pictures even if the device is the limit; then both are compared."""
    training = Training({"cpu": 0.05, "mixed": 0.06}, {"cpu": 0.02, "mixed": 0.01})
    assert set(training.run(3 * ROUND)) == {"cpu"}
    assert training.choice.evidence()["decode_why"] == "training waits for images for 0% of its time"


def test_what_is_told() -> None:
    training = Training({"cpu": 0.02, "mixed": 0.03}, {"cpu": 0.05, "mixed": 0.01})
    training.run(3 * ROUND)
    seen = training.choice.evidence()
    assert seen["decode_ms"] == pytest.approx({"cpu": 51.0, "mixed": 31.0}, abs=1.1)
    assert "ms if the GPU decodes, 5" in seen["decode_why"] and "if the CPU" in seen["decode_why"]


def test_a_validation_or_a_checkpoint_decides_nothing() -> None:
    training = Training({"cpu": 0.05, "mixed": 0.05}, {"cpu": 0.01, "mixed": 0.01})
    training.run(2 * ROUND, pause=lambda number: 30.0 * (number % 20 == 0))
    assert training.choice.is_over and training.choice.now == "cpu"
    assert training.choice.evidence()["decode_ms"]["cpu"] == pytest.approx(51, abs=1.1)


def test_one_that_does_not_work_is_not_tried_again() -> None:
    training = Training({"cpu": 0.02, "mixed": 0.02}, {"cpu": 0.05, "mixed": 0.01})
    training.run(ROUND + 5)
    assert training.choice.now == "mixed"
    training.choice.refuse("mixed", "no driver")
    assert set(training.run(2 * ROUND)) == {"cpu"}
    assert training.choice.evidence()["decode_why"] == "the GPU does not decode: no driver"


def test_the_first_one_does_not_work() -> None:
    choice = DecoderChoice("mixed", "cpu", lambda: None, is_over=True)
    choice.refuse("mixed", "no room")
    assert choice.now == "cpu" and choice.note(1.0) is None
    assert choice.evidence() == {"decode_ms": {}, "decode_why": "the GPU does not decode: no room"}


@pytest.mark.parametrize(
    ("free", "side", "in_training", "why"),
    [
        (8.0, 100, True, None),
        (7.9, 100, True, "but only 7.9 are free"),
        (20.0, 6_000, True, "may take 10.1"),
        (7.9, 100, False, None),
        (80.0, 5_000, False, None),
        (80.0, 6_000, False, "may take 10.1 of its 80 GiB"),
    ],
)
def test_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, side: int, in_training: bool, why: str | None
) -> None:
    """In training a tenth of 80 GiB is free, and twice what 100 whole pictures take, all as large as the largest;
    before it, they take at most a tenth."""
    from PIL import Image

    for number, size in enumerate((10, side)):
        Image.new("L", (size, size)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"")
    source = ImageSource(lambda index: (str(tmp_path / f"{index}.png"), 0), 3, ())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free * 2**30, 80 * 2**30))
    device = torch.device("cuda", 0)
    if why is None:
        check_room(device, source, 100, in_training=in_training)
        return
    with pytest.raises(NotApplicable, match=why):
        check_room(device, source, 100, in_training=in_training)
