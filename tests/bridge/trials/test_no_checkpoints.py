"""Checkpoint files are left alone, whoever wants to write, replace or delete one; Lightning's own scratch files not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner

from fastloop.bridge.trials.no_checkpoints import LeavesAlone, OnlyInside, keep_back
from fastloop.errors import FastLoopError
from tests import models


class Keeps(Callback):
    def __init__(self) -> None:
        self.held: list[int] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        keep_back(trainer, lambda: self.held.append(1))


def each_step(where: Path, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=where, every_n_train_steps=1, enable_version_counter=False, **settings)


def trained(where: Path, *callbacks: Callback, **settings: Any) -> Any:
    """A training that saves in ``ckpts``, and at its end once more by hand."""
    fits = models.trainer(
        enable_checkpointing=True,
        max_steps=4,
        default_root_dir=where,
        **{"callbacks": [each_step(where / "ckpts", save_last=True), *callbacks], **settings},
    )
    fits.fit(models.Regression(), models.loader(), models.loader(8))
    fits.save_checkpoint(where / "end.ckpt")
    return fits


def contents(where: Path) -> dict[str, bytes]:
    return {str(path.relative_to(where)): path.read_bytes() for path in sorted(where.rglob("*")) if path.is_file()}


def test_what_is_there_stays_byte_by_byte_and_nothing_is_added(tmp_path: Path) -> None:
    trained(tmp_path)
    before = contents(tmp_path)
    assert set(before) == {"end.ckpt", "ckpts/last.ckpt", "ckpts/epoch=0-step=4.ckpt"}, "saved, and deleted again"
    keeper = Keeps()
    fits = trained(tmp_path, keeper, OnExceptionCheckpoint(tmp_path, "end"))  # which deletes its file in the end
    assert contents(tmp_path) == before and fits.global_step == 4 and keeper.held
    trained(tmp_path)
    assert contents(tmp_path) != before, "without it they are overwritten"


def test_below_its_own_directory_a_trial_saves_and_deletes_as_ever(tmp_path: Path) -> None:
    own, told = tmp_path / "own", tmp_path / "told"
    trained(own, OnlyInside(own, told))
    assert set(contents(own)) == {"end.ckpt", "ckpts/last.ckpt", "ckpts/epoch=0-step=4.ckpt"} and not told.exists()
    trained(own, callbacks=[each_step(tmp_path / "mine"), OnlyInside(own, told)])
    assert {path.name for path in tmp_path.iterdir()} == {"own", "told"}
    before = contents(own)
    trained(own, OnlyInside(None))
    assert contents(own) == before, "without a directory of its own it leaves all alone"


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("own/a.ckpt", True),
        ("own/deep/a.ckpt", True),
        ("a.ckpt", False),
        ("own/../a.ckpt", False),
        ("own/link/a.ckpt", False),
        ("owned/a.ckpt", False),
        ("s3://own/a.ckpt", False),
    ],
)
def test_where_a_file_really_lies_counts(
    path: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    changed: list[str] = []
    held: list[int] = []
    save = LeavesAlone(lambda checkpoint, filepath: changed.append(filepath), lambda: held.append(1), Path("own"))
    save({"epoch": 1}, filepath=path)
    assert (changed, held) == (([path], []) if inside else ([], [1]))


def test_a_link_to_the_last_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / "last.ckpt").write_text("mine")
    linked = [each_step(tmp_path / "ckpts", save_last="link"), Keeps()]
    trained(tmp_path, callbacks=linked)
    assert contents(tmp_path) == {"ckpts/last.ckpt": b"mine"}


def test_hooks_of_checkpoints_are_called(tmp_path: Path) -> None:
    class Adds(Keeps):
        saved = 0

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            self.saved += 1

    adds = Adds()
    trained(tmp_path, adds)
    assert adds.saved == 9 and not contents(tmp_path), "each step two, and one by hand"


def test_a_search_for_a_learning_rate_gets_its_weights_back(tmp_path: Path) -> None:
    fits, module = models.trainer(max_steps=4, default_root_dir=tmp_path, callbacks=[Keeps()]), models.Regression()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    Tuner(fits).lr_find(module, models.loader(), num_training=5)
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())
    assert not contents(tmp_path), "what it wrote for itself is gone"


def test_again_it_changes_nothing(tmp_path: Path) -> None:
    fits = trained(tmp_path, Keeps())
    first = fits.strategy.save_checkpoint
    fits.validate(models.Regression(), models.loader(8), verbose=False)
    assert fits.strategy.save_checkpoint is first and isinstance(first, LeavesAlone)


def test_one_that_cannot_be_kept_from_it_is_an_error() -> None:
    class Slots:
        __slots__ = ()

        def save_checkpoint(self) -> None: ...

    trainer: Callable[..., Any] = SimpleNamespace  # type: ignore[assignment]
    with pytest.raises(FastLoopError, match="got save_checkpoint of Slots"):
        keep_back(trainer(callbacks=[], strategy=Slots()), lambda: None)
