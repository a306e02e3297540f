"""DALI's batches on a real device: right pixels, right order, and nothing overwritten while it is still read."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fastloop import FastLoop
from tests.rungs.test_dali import Sees, load, pictures

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
ARMS = [("cpu", "cpu"), ("cpu", "device"), ("mixed", "device"), ("both", "device")]
"""Where to decode and to resize; both: half of each batch on the GPU, half on the CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.feeds.dali.folders import make_folder

    return make_folder(tmp_path_factory.mktemp("pictures"), 40)


def describe(decode: str, resize: str) -> Any:
    from fastloop.feeds.dali.graph import DaliResources

    threads, where = (8, "mixed") if decode == "both" else (2, decode)
    return DaliResources(threads=threads, device_id=torch.cuda.current_device(), decode=where, resize=resize)


def make(loader: Any, decode: str, resize: str) -> Any:
    from fastloop.feeds.dali.engine import DaliLoader
    from fastloop.feeds.images.reading import read_source

    steps, machine = read_source(loader.dataset).facts.steps, describe(decode, resize)
    return DaliLoader(loader, steps, machine, batch_size=loader.batch_size, turn_off="")


@pytest.mark.parametrize(("decode", "resize"), ARMS)
@pytest.mark.parametrize("last", [True, False])
def test_batches_are_those_of_the_dataset(folder: Path, decode: str, resize: str, last: bool) -> None:
    loader = DataLoader(pictures(folder, still=True), batch_size=6)
    engine = make(loader, decode, resize)
    engine.wants_channels_last = lambda: last
    for ours, plain in zip(engine.load(0), loader, strict=True):
        assert ours[0].is_cuda and ours[1].is_cuda and torch.equal(ours[1].cpu(), plain[1])
        assert 255 * 0.25 * (ours[0].cpu() - plain[0]).abs().mean() < (0.5 if decode == "cpu" else 2.0)
        assert ours[0].is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    assert engine.plain_batches == 0
    engine.close()


@pytest.mark.parametrize(
    ("room", "kept", "why"), [(0.0, "mixed", "if the GPU decodes"), (2.0, "cpu", "GiB there, but only")]
)
def test_the_gpus_decoder_is_tried_in_mid_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, room: float, kept: str, why: str
) -> None:
    from fastloop.feeds.dali import decoder_choice, engine
    from fastloop.feeds.dali.graph import DaliResources
    from fastloop.feeds.images.reading import read_source

    for name, value in {"SETTLING": 1, "BLOCK": 1, "BLOCKS": 2, "WAITS": -1.0, "FASTER": 1e9}.items():
        monkeypatch.setattr(decoder_choice, name, value)
    monkeypatch.setattr(decoder_choice, "ROOM", room)
    loader = DataLoader(pictures(folder, still=True), batch_size=4)
    first, other = (
        DaliResources(threads=2, device_id=torch.cuda.current_device(), decode=decode, resize="device")
        for decode in ("cpu", "mixed")
    )
    steps = read_source(loader.dataset).facts.steps
    ours = engine.DaliLoader(loader, steps, first, batch_size=4, turn_off="", other=other, tries_other=True)
    before = torch.cuda.get_rng_state()
    for made, plain in zip(ours.load(0), loader, strict=True):
        assert torch.equal(made[1].cpu(), plain[1])
        assert 255 * 0.25 * (made[0].cpu() - plain[0]).abs().mean() < 2.0
    assert torch.equal(before, torch.cuda.get_rng_state())
    seen = ours.evidence()
    assert seen["decode"] == kept and why in seen["decode_why"] and ours.plain_batches == 0
    ours.close()


@pytest.mark.parametrize(("decode", "resize"), ARMS)
def test_all_chains_of_transforms(folder: Path, decode: str, resize: str) -> None:
    """With the same random draws, as before a training's first step. The GPU's decoder rounds colors otherwise: chains
    that stretch colors or pick single pixels of these noisy pictures may be refused, never passed off as equal."""
    from fastloop.feeds.dali.pixels import check_pixels
    from fastloop.feeds.images.reading import read_source
    from tests.feeds.dali.folders import read_folder
    from tests.feeds.dali.test_pixels import CHAINS

    machine, wrong = describe(decode, resize), {}
    for name, chain_of in CHAINS.items():
        dataset = read_folder(folder, *chain_of)
        try:
            check_pixels(dataset, (source := read_source(dataset)), source.facts.steps, machine)
        except Exception as error:
            wrong[name] = str(error)
    assert wrong.keys() <= (set() if decode == "cpu" else {"all colors", "nearest"}), wrong
    assert all(why.startswith("DALI's images differ from those of the transforms") for why in wrong.values())


@pytest.mark.parametrize(("decode", "resize"), ARMS[:-1])  # of both, either may decode a picture
@pytest.mark.parametrize("side_stream", [False, True])
def test_a_batch_stays_until_the_device_has_read_it(folder: Path, decode: str, resize: str, side_stream: bool) -> None:
    """The device sleeps, then reads; the host has long dropped the batch by then, and DALI made others."""
    loader = DataLoader(pictures(folder, still=True), batch_size=2)
    engine = make(loader, decode, resize)
    engine.wants_channels_last = lambda: True
    expected = [float(images.double().sum()) for images, _ in engine.load(0)]
    assert len(set(expected)) == len(expected)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        for _ in range(3):
            for images, _ in engine.load(0):
                torch.cuda._sleep(20_000_000)
                sums.append(images.double().sum())
                del images
    torch.cuda.synchronize()
    assert [float(value) for value in sums] == pytest.approx(expected * 3, rel=1e-9)
    engine.close()


@pytest.mark.parametrize("decode", ["auto", "cpu", "mixed"])
def test_a_fit(folder: Path, decode: str) -> None:
    rungs = {"dali": {"decode": decode}, "pin": {}, "prefetch": {}, "workers": {}, "layout": {}}
    config = {"rungs": {name: {"enabled": True, **keys} for name, keys in rungs.items()}, "watch": {"warmup_steps": 1}}
    import lightning as L

    loop, module = FastLoop(config, quiet=True), Sees(convolves=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[loop],
    )
    trainer.fit(module, load(folder))
    verdicts = {verdict.rung: verdict for verdict in loop.verdicts}
    assert verdicts["dali"].took, verdicts["dali"].why
    for rung in ("pin", "prefetch"):
        assert verdicts[rung].why.startswith("DALI makes the batches on the device")
    labels = [sorted(chain.from_iterable(module.labels[at : at + 7])) for at in (0, 7, 14)]
    assert labels == [list(range(40))] * 3


def test_validation_on_the_device(folder: Path) -> None:
    """Every sample once and in order, the loss of the dataset's own pictures, in float32 and in a trained layout."""
    import lightning as L

    losses, labels = [], []
    for rungs in ({}, {"dali": {"enabled": True, "validation": True}, "layout": {"enabled": True}}):
        torch.manual_seed(0)
        loop, module = FastLoop({"rungs": rungs, "watch": {"warmup_steps": 1}}, quiet=True), Sees(convolves=True)
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign, misc]
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[loop],
        )
        val = DataLoader(pictures(folder, still=True), batch_size=6)
        trainer.fit(module, load(folder, shuffle=False, still=True), val)
        losses.append(float(trainer.callback_metrics["val_loss"]))
        labels.append(module.labels)
        assert trainer.val_dataloaders is val
    assert labels[0] == labels[1] and losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert loop.measurement is not None and loop.measurement.evidence["dali"]["validation_images"] == 12 + 2 * 40
