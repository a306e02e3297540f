"""The dali rung: who is loaded by DALI, who must not, and that the samples stay: each once an epoch, over all ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, Subset

from fastloop import FastLoop
from fastloop.errors import ConfigError, FastLoopError, NotApplicable
from fastloop.feeds.dali.planned import DaliEngine
from fastloop.records.card import ClimbState
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.images import ImageFacts, RandomResizedCrop, ToFloat, ToTensor
from fastloop.records.measurement import Measurement
from fastloop.rungs.dali import CARD, Dali
from tests.runs import KeepsTrainers, Run, both, distance, run

DALI: dict[str, Any] = {"dali": {"threads": 2}}
STEPS = (RandomResizedCrop(size=(8, 8)), ToTensor(), ToFloat())
IMAGES = ImageFacts(steps=STEPS, count=100)
NOTE = "a run resumed mid-epoch has different crops and flips for the rest of it; DALI keeps no state"
OWN = "DALI draws its own random numbers: RandomResizedCrop differ on every run"


def facts(loader: dict[str, Any] | None = None, **others: Any) -> Facts:
    settings = {"kind": "DataLoader", "images": IMAGES, "batch_size": 4, "batches": 25, **(loader or {})}
    record = None if loader is None else LoaderFacts(**settings)
    return Facts(**{"cpu_count": 16, "has_dali": True, "max_steps": 100, **others}, loader=record)


@pytest.mark.parametrize(
    ("settings", "given", "expected", "note"),
    [
        ({}, facts({}), ("cpu", 16, "cpu", False), "the CPU decodes, with 16 threads; train loaders only"),
        ({}, facts({}, local_ranks=8), ("cpu", 2, "cpu", False), None),
        (
            {},
            facts({}, device="cuda"),
            ("cpu", 12, "device", True),
            "the CPU decodes, with 12 threads (rule: 8 CPUs for each GPU are enough); train loaders only",
        ),
        ({}, facts({}, device="cuda", local_ranks=2), ("cpu", 6, "device", True), None),
        ({}, facts({}, device="cuda", local_ranks=3), ("mixed", 4, "device", True), None),
        ({}, facts({}, device="cuda", cpu_count=2), ("mixed", 2, "device", True), None),
        (
            {"decode": "mixed", "threads": 6},
            facts({}, device="cuda"),
            ("mixed", 6, "device", True),
            "the GPU decodes, with 6 threads; train loaders only",
        ),
        ({"decode": "cpu", "resize": "cpu"}, facts({}, device="cuda"), ("cpu", 12, "cpu", True), None),
        (
            {},
            facts({}, device="cuda", decodes_beside=True),
            ("mixed", 12, "device", True),
            "the GPU decodes, with 12 threads (rule: it has JPEG decoders of its own); train loaders only",
        ),
        ({"decode": "cpu"}, facts({}, device="cuda", decodes_beside=True), ("cpu", 12, "device", True), None),
    ],
)
def test_plan(settings: dict[str, Any], given: Facts, expected: tuple[Any, ...], note: str | None) -> None:
    change = Dali(enabled=True, **settings).plan(given)
    decode, threads, resize, on_gpu = expected
    other = ({"cpu": "mixed", "mixed": "cpu"}[decode], threads) if on_gpu and "decode" not in settings else None
    assert change.wants == {
        "loader.engine": DaliEngine(
            steps=STEPS,
            decode=decode,
            threads=threads,
            resize=resize,
            batch_size=4,
            on_gpu=on_gpu,
            keeps=True,
            turn_off="rungs.dali.enabled: false",
            other=other,
        )
    }
    assert change.parity == "approximate" and change.notes[1:] == (OWN, NOTE)
    assert note is None or change.notes[0] == note
    later = change.facts["loader"]
    assert (later.engine, later.on_device) == ("DALI", on_gpu)


@pytest.mark.parametrize(
    ("settings", "others", "expected", "tries"),
    [
        ({}, {}, ("mixed", 12), True),
        ({}, {"max_steps": None}, ("mixed", 12), True),
        ({}, {"decodes_beside": True}, ("cpu", 12), True),
        ({}, {"local_ranks": 8}, ("cpu", 2), True),
        ({"threads": 3}, {}, ("mixed", 3), True),
        ({"decode": "cpu"}, {}, None, False),
        ({}, {"max_steps": 1_999}, ("mixed", 12), False),
        ({}, {"weighs_costs": False}, ("mixed", 12), False),
        ({}, {"evaluates": True}, ("mixed", 12), False),
        ({}, {"device": "cpu"}, None, False),
        ({}, {"reload_every_n_epochs": 1}, ("mixed", 12), False),
    ],
)
def test_the_other_decoder_is_there_on_a_gpu_and_may_be_tried_in_long_runs(
    settings: dict[str, Any], others: dict[str, Any], expected: tuple[str, int] | None, tries: bool
) -> None:
    given = facts({}, **{"device": "cuda", "max_steps": 2_000, **others})
    change = Dali(enabled=True, validation=True, **settings).plan(given)
    engine = next(iter(change.wants.values()))
    assert engine.other == expected and (expected is None or engine.tries_other == tries)
    assert ("; if training waits, the other is tried)" in "".join(change.notes)) == tries


def test_plan_waits_and_keeps_to_the_run() -> None:
    assert Dali(enabled=True).plan(facts()).waits_for == "the train loader"
    engine = Dali(enabled=True).plan(facts({"num_workers": 3}, reload_every_n_epochs=1))
    assert not engine.wants["loader.engine"].keeps and "your 3 worker processes are not started" in engine.notes


@pytest.mark.parametrize(
    ("settings", "given", "reason"),
    [
        ({}, facts({}, has_dali=False), 'DALI is not installed; pip install "lightning-fastloop[dali-cuda13]"'),
        (
            {},
            facts({}, has_dali=False, cuda_version="12.8"),
            'DALI is not installed; pip install "lightning-fastloop[dali-cuda12]"',
        ),
        ({}, facts({}, device="mps"), "DALI supports CUDA and the CPU; this run is on mps"),
        ({"decode": "mixed"}, facts({}), "decode: mixed needs CUDA; write auto or cpu"),
        ({}, facts({}, steps_with_iterator=True), "training_step(dataloader_iter) fetches and moves its own batches"),
        (
            {},
            facts({"is_dataloader": False, "kind": "DALIGenericIterator"}),
            "DALIGenericIterator is not a DataLoader: for example, your own DALI iterator is left alone",
        ),
        ({}, facts({"engine": "threads"}), "threads already loads the samples"),
        ({}, facts({"images": "it is a list"}), "DALI loads datasets of image files only: it is a list"),
        (
            {},
            facts({"custom_collate": True}),
            "your own collate_fn builds the batches, but DALI builds whole batches itself",
        ),
        ({}, facts({"auto_collates": False}), "DataLoader has no batch_size, which DALI needs to allocate memory"),
        ({}, facts({"batch_size": None}), "DataLoader has no batch_size, which DALI needs to allocate memory"),
        ({}, facts({"batches": 0}), "the loader has no batches: drop_last, and fewer samples than one batch"),
        (
            {},
            facts({"stateful": True, "kind": "Own"}),
            "Own keeps its own position, which DALI's read-ahead would shift",
        ),
        ({}, facts({"sampler_hazards": ("a is x",)}), "DALI reads the sampler ahead of training: a is x"),
        ({}, facts({"own_iterator": True}), "DataLoader makes its own iterators"),
        (
            {},
            facts({}, device="cuda", transfer_hooks=("on_before_batch_transfer",)),
            "on_before_batch_transfer expects batches that are not on the device yet",
        ),
    ],
)
def test_plan_refuses(settings: dict[str, Any], given: Facts, reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Dali(enabled=True, **settings).plan(given)
    assert str(refused.value) == reason


@pytest.mark.parametrize("settings", [{"threads": 0}, {"decode": "gpu"}, {"resize": "gpu"}, {"threads": "many"}])
def test_impossible_settings_are_config_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"dali\.{next(iter(settings))}"):
        FastLoop({"rungs": {"dali": {"enabled": True, **settings}}})


def test_verdicts() -> None:
    verify = Dali(enabled=True).verify
    assert verify(Measurement()).took is None
    seen = {"images": 64, "plain_batches": 0, "decode": "cpu", "threads": 2}
    assert verify(Measurement(evidence={"dali": seen})).took is True
    told = {**seen, "plain_batches": 2, "why_plain": "a.gif: no", "mean_levels": 0.17, "checked_samples": 16}
    assert verify(Measurement(evidence={"dali": told})).why == (
        "DALI decoded 64 images (cpu, 2 threads); 16 compared samples differ by 0.17 of 255 levels;"
        " 2 batches loaded without it: a.gif: no"
    )
    assert verify(Measurement(evidence={"dali": {**seen, "images": 0}})).took is False
    chosen = {**seen, "decode_why": "a batch takes 4 ms"}
    assert verify(Measurement(evidence={"dali": chosen})).why.endswith("(cpu, 2 threads); a batch takes 4 ms")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"decode": "cpu"}, None),
        ({"decode": "cpu", "decode_ms": {"cpu": 5.0}}, None),
        ({"decode": "mixed", "queues": "32"}, None),
        ({"decode": "mixed"}, "CUDA_DEVICE_MAX_CONNECTIONS is not set, so the GPU's decoder may wait"),
        (
            {"decode": "cpu", "decode_ms": {"cpu": 5.0, "mixed": 6.0}, "queues": "1"},
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so",
        ),
    ],
)
def test_a_verdict_on_the_gpus_decoder_names_its_queues(seen: dict[str, Any], expected: str | None) -> None:
    given = {"images": 64, "plain_batches": 0, "threads": 2, "queues": None, **seen}
    why = Dali(enabled=True).verify(Measurement(evidence={"dali": given})).why
    assert (expected or "DALI decoded") in why and ("set it to 32 before the script starts" in why) is (
        expected is not None
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"image_files": True}, [("", {})]),
        ({"image_files": True, "on_cuda": True}, [("", {})]),
        ({"image_files": True, "on_cuda": True, "stack": {"dali": {}}}, []),
    ],
)
def test_a_climb_tries_it_where_the_samples_are_image_files(given: dict[str, Any], expected: list[Any]) -> None:
    made = CARD.list_variants(ClimbState(**given))
    assert [(variant.name, *variant.settings) for variant in made] == expected
    assert all(variant.changes == "engine" for variant in made)


# -- fits --------------------------------------------------------------------------------------------------------------


class Sees(L.LightningModule):
    """Learns to tell classes apart, and notes the labels of each batch."""

    def __init__(self, convolves: bool = False) -> None:
        super().__init__()
        parts = [torch.nn.Conv2d(3, 4, 3, stride=4)] if convolves else [torch.nn.AvgPool2d(4, 4)]
        self.net = torch.nn.Sequential(*parts, torch.nn.Flatten(), torch.nn.LazyLinear(30))
        self.net(torch.zeros(1, 3, 16, 16))
        self.labels: list[list[int]] = []
        self.orders: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pictures, labels = batch
        self.labels.append(labels.tolist())
        self.orders.append(pictures.is_contiguous())
        return torch.nn.functional.cross_entropy(self.net(pictures), labels % 30)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def pictures(folder: Path, *, still: bool = False, mean: float = 0.5, count: int | None = None) -> Any:
    from torchvision import transforms as T

    from tests.feeds.dali.folders import Numbered, read_folder

    first = [T.Resize((16, 16))] if still else [T.RandomResizedCrop(16), T.RandomHorizontalFlip()]
    dataset = Numbered(read_folder(folder, *first, T.ToTensor(), T.Normalize([mean] * 3, [0.25] * 3)))
    return dataset if count is None else Subset(dataset, range(count))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    pytest.importorskip("torchvision")
    from tests.feeds.dali.folders import make_folder

    return make_folder(tmp_path_factory.mktemp("pictures"))


def load(folder: Path, batch_size: int = 6, *, shuffle: bool = True, drop_last: bool = False, **which: Any) -> Any:
    return DataLoader(pictures(folder, **which), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)


def test_takes(folder: Path) -> None:
    """L1: samples counted over three epochs."""
    ours = run(DALI, load(folder), Sees, max_epochs=3)
    epochs = [ours.module.labels[at : at + 4] for at in (0, 4, 8)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [6, 6, 6, 2]
        assert sorted(chain.from_iterable(epoch)) == list(range(20))
    assert epochs[0] != epochs[1] != epochs[2]
    verdict, seen = ours.verdict("dali"), ours.seen("dali")
    assert verdict.took is True and verdict.parity_class == "approximate"
    assert seen["images"] == 60 and seen["plain_batches"] == 0 and seen["mean_levels"] < 0.35
    assert verdict.why.startswith("DALI decoded 60 images (cpu, 2 threads); 10 compared samples differ by 0.")
    assert set(ours.module.orders) == {True}
    assert ours.loop is not None and ours.loop.measurement is not None
    loaded = ours.loop.measurement.evidence["loader"]
    assert loaded["num_workers"] is None and loaded["queued_batches"] == 3, "no workers to advise on; DALI's own queue"


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("settings", [{}, {"limit_train_batches": 2}, {"accumulate_grad_batches": 2}, {"max_steps": 7}])
def test_parity(folder: Path, drop_last: bool, settings: dict[str, Any]) -> None:
    """The same samples in the same batches, and nearly the same weights; also with validation in between."""
    data, val = partial(load, folder, drop_last=drop_last, still=True), partial(load, folder, still=True, shuffle=False)
    plain, ours = both(DALI, data, Sees, val=val, max_epochs=3, val_check_interval=1.0, **settings)
    assert ours.verdict("dali").took and ours.module.labels == plain.module.labels
    assert ours.record.hooks == plain.record.hooks
    assert distance(plain, ours) < 2e-3
    _, other = both(DALI, partial(load, folder, drop_last=drop_last, still=True, mean=0.45), Sees, max_epochs=3)
    assert distance(plain, other) > 4e-3, "the control: pictures that are 13 levels off"


def test_workers_keep_the_same_order(folder: Path) -> None:
    """Augmentation in the training's own process draws from the shuffle's generator; DALI, as workers, does not."""
    workers = partial(DataLoader, pictures(folder), batch_size=6, shuffle=True, num_workers=1)
    plain, ours = both(DALI, workers, Sees, max_epochs=3)
    assert ours.module.labels == plain.module.labels and ours.verdict("dali").took


VALIDATES: dict[str, Any] = {"dali": {"threads": 2, "validation": True}}


def test_validation_too_where_asked(folder: Path) -> None:
    """Every sample once and in order, after a sanity check too, and the same loss; then the loader is the user's."""
    from torchvision import transforms as T

    from tests.feeds.dali.folders import Numbered, read_folder

    steps = (T.Resize(20), T.CenterCrop(16), T.ToTensor(), T.Normalize([0.5] * 3, [0.25] * 3))
    val = DataLoader(Numbered(read_folder(folder, *steps)), 6)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 2}
    plain, ours = both(VALIDATES, partial(load, folder, still=True), Sees, val=lambda: val, **settings)
    assert ours.module.labels == plain.module.labels and ours.module.labels[:2] == [list(range(6)), list(range(6, 12))]
    assert ours.record.hooks == plain.record.hooks
    losses = [float(each.trainer.callback_metrics["val_loss"]) for each in (plain, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0] != losses[1], "DALI's pixels"
    assert ours.seen("dali")["validation_images"] == 12 + 2 * 20 and ours.seen("dali")["images"] == 40
    assert "; for validation it decoded 52" in ours.verdict("dali").why
    assert ours.trainer.val_dataloaders is val
    assert float(ours.trainer.validate(ours.module, val, verbose=False)[0]["val_loss"]) == losses[1], "as inside fit"
    assert ours.trainer.val_dataloaders is val and "validation_images" not in run(DALI, val, Sees).seen("dali")


@pytest.mark.parametrize("which", ["val", "train"])
def test_validation_stays_the_loaders_where_dali_cannot(folder: Path, which: str) -> None:
    """One that collates by itself is left; where the training has no DALI, validation has none either."""
    own = DataLoader(pictures(folder, still=True), 6, collate_fn=lambda rows: torch.utils.data.default_collate(rows))
    data, val = partial(load, folder, still=True), partial(load, folder, still=True, shuffle=False)
    given: Any = (data, lambda: own) if which == "val" else (lambda: own, val)
    plain, ours = both(VALIDATES, given[0], Sees, val=given[1], max_epochs=2)
    assert ours.module.labels == plain.module.labels
    assert (ours.reason("dali") is None) is (which == "val")
    seen = ours.seen("dali")
    assert seen["validation_images"] == 0
    if which == "val":
        assert seen["validation_why_plain"].startswith("your own collate_fn")
        assert "left one loader as it is: your own collate_fn" in ours.verdict("dali").why


@pytest.mark.parametrize("raises", [False, True])
def test_undo(folder: Path, raises: bool, newborns: Callable[[], list[psutil.Process]]) -> None:
    run(DALI, load(folder), Sees, max_epochs=1)  # what stays for good is there now
    threads = psutil.Process().num_threads()

    class Maybe(Sees):
        broken = raises

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert self.trainer.fit_loop._combined_loader.flattened[0].inner is not loader
            if self.broken and batch_idx == 1:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    loader, fits = load(folder), KeepsTrainers()
    before = dict(vars(loader))

    if raises:
        with pytest.raises(RuntimeError, match="planted"):
            run(DALI, loader, Maybe, callbacks=(fits,), max_epochs=1)
    else:
        run(DALI, loader, Maybe, callbacks=(fits,), max_epochs=1)
    assert psutil.Process().num_threads() <= threads, "DALI's threads have ended, even while the exception is held"
    (trainer,) = fits.trainers
    trainer.lightning_module.broken = False
    trainer.fit(trainer.lightning_module, loader)
    assert dict(vars(loader)) == before and trainer.train_dataloader is loader
    assert psutil.Process().num_threads() <= threads and not newborns()


def test_workers_of_evaluation_beside_it(folder: Path) -> None:
    """They are forked from a process that has DALI's threads."""
    val = DataLoader(pictures(folder), batch_size=6, num_workers=2)
    ours = run(DALI, load(folder), Sees, val=val, max_epochs=2)
    assert ours.verdict("dali").took and "val_loss" in ours.trainer.callback_metrics
    assert ours.seen("dali")["images"] == 40, "evaluation is loaded by its own workers"


def test_pictures_come_as_the_layout_wants_them(folder: Path) -> None:
    ours = run({**DALI, "layout": {}}, load(folder), partial(Sees, True), max_epochs=3)
    assert ours.verdict("layout").took and ours.verdict("dali").took
    assert ours.module.orders[0] and not ours.module.orders[-1], "from the rehearsal on"


def test_accumulation_windows_are_merged(folder: Path) -> None:
    rungs = {**DALI, "batch": {"micro_batch": 8}}
    plain, ours = (
        run(which, load(folder, 4, still=True, drop_last=True), Sees, max_epochs=12, accumulate_grad_batches=2)
        for which in (None, rungs)
    )
    assert ours.verdict("batch").took and ours.verdict("dali").took
    assert list(chain.from_iterable(ours.module.labels)) == list(chain.from_iterable(plain.module.labels))
    assert distance(plain, ours) < 5e-3


def test_rungs_that_have_nothing_to_do_say_so(folder: Path) -> None:
    ours = run({**DALI, "workers": {}}, load(folder), Sees, max_epochs=1)
    assert ours.reason("workers") == "DALI loads the samples, without worker processes"


def test_loaders_that_are_made_anew_each_epoch(folder: Path) -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return load(folder)

    ours = run(DALI, None, Sees, datamodule=Data(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    counts = Counter(chain.from_iterable(ours.module.labels))
    assert ours.verdict("dali").took and counts == dict.fromkeys(range(20), 3)


def test_a_resumed_epoch_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """L5: the place is the sampler's, and DALI, which is ahead of the training, has no say in it."""

    def fit(ckpt: Any = None) -> list[list[int]]:
        save = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=14, save_top_k=-1)
        saves = {"callbacks": (save,), "enable_checkpointing": True}
        return run(DALI, load(folder, 2), Sees, max_epochs=2, ckpt=ckpt, **saves).module.labels  # type: ignore[no-any-return]

    whole = fit()
    rest = fit(next((tmp_path / "saved").iterdir()))
    assert len(whole) == 20 and rest == whole[14:]
    assert sorted(chain.from_iterable(whole[10:14] + rest)) == list(range(20))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_wrong_pixels_leave_the_loader_to_the_next_rung(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted reading of Normalize."""
    from fastloop.feeds.images import reading

    right = reading._READERS["Normalize"]

    def read(transform: Any) -> Any:
        (step,) = right(transform)
        return (dataclasses.replace(step, mean=(0.4, 0.5, 0.5)),)

    monkeypatch.setitem(reading._READERS, "Normalize", read)
    ours = run({**DALI, "workers": {"count": 1}}, load(folder), Sees, max_epochs=2)
    assert (ours.reason("dali") or "").startswith(
        "DALI's images differ from those of the transforms: red is off by +25.5 levels"
    )
    assert ours.verdict("dali").took is False and ours.verdict("workers").took is True
    assert Counter(chain.from_iterable(ours.module.labels)) == dict.fromkeys(range(20), 2)
    with pytest.raises(ConfigError, match="red is off by"):
        run(DALI, load(folder), Sees, max_epochs=1, strict=True)


def test_a_damaged_file_ends_the_training_with_its_name(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    from tests.feeds.dali.folders import make_folder

    make_folder(tmp_path, 40)
    bad = tmp_path / "class1" / "037.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(FastLoopError, match=r"037\.jpg, sample \d+, which cannot be read: OSError: "):
        run(DALI, load(tmp_path), Sees, max_epochs=1)


def test_a_dali_that_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L3. Built for another CUDA, for one."""
    from fastloop.feeds.dali import pixels

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("libnvjpeg.so.12: cannot open shared object file")

    monkeypatch.setattr(pixels, "make_pipeline", fail)
    ours = run(DALI, load(folder), Sees, max_epochs=1)
    assert (ours.reason("dali") or "").startswith("DALI does not start here (OSError: libnvjpeg.so.12: cannot")


def test_without_dali(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L3."""
    monkeypatch.setattr("fastloop.feeds.dali.pictures.is_installed", lambda: False)
    ours = run(DALI, load(folder), Sees, max_epochs=1)
    assert 'pip install "lightning-fastloop[dali-cuda1' in (ours.reason("dali") or "")
    assert len(ours.module.labels) == 4
    with pytest.raises(ConfigError, match=r"lightning-fastloop\[dali-cuda1"):  # exit code 2
        run(DALI, load(folder), Sees, max_epochs=1, strict=True)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(3, 16, 16), number) for number in range(6)])


def test_what_is_no_folder_of_images_is_left_alone(folder: Path) -> None:
    """D16: nothing to load, too."""
    ours = run(DALI, DataLoader(Stream(), batch_size=3), Sees, max_epochs=1)
    assert "DALI loads datasets of image files only: " in (ours.reason("dali") or "")
    ours = run(DALI, load(folder, 6, drop_last=True, count=5), Sees, max_epochs=1)
    assert ours.reason("dali") == "the loader has no batches: drop_last, and fewer samples than one batch"


class Own:
    """A DataModule's own pipeline, as DALI's iterators look to Lightning."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.zeros(2, 3, 16, 16), torch.tensor([0, 1])]] * 3)

    def __len__(self) -> int:
        return 3


def test_a_pipeline_of_the_users_own_stays(folder: Path) -> None:
    ours = run(DALI, Own(), Sees, max_epochs=1)
    assert ours.reason("dali") == "Own is not a DataLoader: for example, your own DALI iterator is left alone"
    assert ours.module.labels == [[0, 1]] * 3


# -- two ranks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, list[list[int]]]]:
    from tests.bridge.launch import fit_on_two_ranks
    from tests.preloaded import quick_starts

    with quick_starts(ranks=True):
        return fit_on_two_ranks(Path(__file__))


@pytest.mark.multirank
@pytest.mark.slow
def test_two_ranks_have_every_sample_once_an_epoch(ranks: list[dict[str, list[list[int]]]]) -> None:
    orders = []
    for epoch in range(3):
        parts = [list(chain.from_iterable(rank["epochs"][2 * epoch : 2 * epoch + 2])) for rank in ranks]
        assert sorted(chain(*parts)) == list(range(20)) and len(parts[0]) == len(parts[1]) == 10
        orders.append(parts[0])
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.multirank
@pytest.mark.slow
def test_two_ranks_resume_where_each_was(ranks: list[dict[str, list[list[int]]]]) -> None:
    """L5: also a rank whose DALI was ahead by other samples than that of the rank which saved."""
    assert all(len(rank["whole"]) == 10 and rank["resumed"] == rank["whole"][7:] for rank in ranks)
    assert all(rank["resumed"] != rank["whole"][5:8] for rank in ranks), "the control: the epoch from its beginning"
    second = [rank["whole"][5:7] + rank["resumed"] for rank in ranks]
    assert sorted(chain.from_iterable(second[0] + second[1])) == list(range(20))


def _fit_as_rank() -> None:
    from tests.feeds.dali.folders import make_folder

    rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
    data = make_folder(Path(f"pictures{rank}"))

    def fit(batch_size: int, epochs: int, ckpt: Path | None = None) -> list[list[int]]:
        saves = ModelCheckpoint("saved", every_n_train_steps=7, save_top_k=-1)
        on_two: dict[str, Any] = {"strategy": "ddp", "devices": 2, "callbacks": (saves,), "enable_checkpointing": True}
        done: Run = run(DALI, load(data, batch_size), Sees, max_epochs=epochs, ckpt=ckpt, **on_two)
        assert done.verdict("dali").took
        return done.module.labels  # type: ignore[no-any-return]

    found = {"epochs": fit(6, 3), "whole": fit(2, 2)}
    (saved,) = Path("saved").iterdir()
    found["resumed"] = fit(2, 2, saved)
    torch.save(found, f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    _fit_as_rank()
