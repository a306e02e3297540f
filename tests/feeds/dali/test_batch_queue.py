"""The batches of an epoch are those of the sampler, each once and in its order, and no more are drawn than it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytest.importorskip("torchvision")
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from fastloop.feeds.dali import pixels
from fastloop.feeds.dali.batch_queue import BatchQueue
from fastloop.feeds.lazy_loader import clone
from tests.feeds.dali.folders import Numbered, damage, make_folder, read_folder
from tests.feeds.dali.test_engine import STILL, count_threads, labels_of, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"))


def test_batches_that_are_put_back_come_first_and_in_order() -> None:
    files: Any = SimpleNamespace(source=SimpleNamespace(count=20, locate=lambda index: (f"{index}.jpg", index)))
    queue = BatchQueue(files, torch.device("cpu"))
    queue.begin([[0, 1], [2, 3], [4, 5], [6, 7]])
    queue.fill(3)
    assert [bytes(path) for path in queue.feed()] == [b"0.jpg", b"1.jpg"]
    queue.put_back()
    assert not queue.under_way
    with pytest.raises(StopIteration):
        queue.feed()
    assert [each.indices for each in iter(queue.draw, None)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    queue.begin([[0], [1], [2]])
    queue.fill(2)
    queue.feed()
    queue.drop_waiting()
    assert [each.indices for each in queue.under_way] == [[0]] and queue.draw().indices == [2]


def test_orders_of_a_generator_of_ones_own(folder: Path) -> None:
    """A sampler that is asked beyond its end would shuffle the next epoch differently."""
    dataset = Numbered(read_folder(folder, *STILL))

    def order(read: Any) -> list[list[list[int]]]:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
        loader = clone(DataLoader(dataset), {"batch_sampler": BatchSampler(sampler, 6, drop_last=False)})
        return [read(loader) for _ in range(2)]

    plain = order(lambda loader: labels_of(DataLoader(dataset, batch_sampler=loader.batch_sampler)))
    assert order(lambda loader: labels_of(make(loader).load(0))) == plain


class Raises:
    """A batch sampler that breaks."""

    batch_size = 2

    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(self.after):
            yield [2 * at, 2 * at + 1]
        raise KeyError("planted")


@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_the_sampler_raises_comes_after_the_batches_before_it(folder: Path, after: int) -> None:
    loader = clone(DataLoader(Numbered(read_folder(folder))), {"batch_sampler": Raises(after)})
    ours, seen = make(loader), []
    before = count_threads()
    with pytest.raises(KeyError, match="planted"):
        for batch in ours.load(0):
            seen.append(batch[1].tolist())
    assert seen == [[2 * at, 2 * at + 1] for at in range(after)]
    ours.close()
    assert count_threads() <= before


def test_what_the_labels_raise(folder: Path) -> None:
    class Mislabeled(Numbered):
        def image_path_and_label(self, index: int) -> tuple[str, int]:
            if index == 5:
                raise ValueError("planted")
            return super().image_path_and_label(index)

    with pytest.raises(ValueError, match="planted"):
        list(make(DataLoader(Mislabeled(read_folder(folder)), batch_size=2)).load(0))


@pytest.mark.filterwarnings("ignore:fastloop:UserWarning")
@pytest.mark.parametrize("looks", [True, False])
def test_sixteen_bits_of_gray_are_the_datasets_to_make(
    tmp_path: Path, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D17. PIL cuts them off and DALI scales them; not looking, the control, another picture comes out."""
    make_folder(tmp_path, 12)
    damage((tmp_path / "class2" / "006.jpg").rename(tmp_path / "class2" / "006.png"), "16 bit")
    if not looks:
        monkeypatch.setattr(pixels, "_MAY_BE_DEEP", ())
    loader = DataLoader(read_folder(tmp_path, *STILL), batch_size=4)
    ours = make(loader)
    for _ in range(2):
        apart = max(255 * (mine[0] - plain[0]).abs().mean() for mine, plain in zip(ours.load(0), loader, strict=True))
        assert (apart < 0.5) if looks else (apart > 20)
    assert ours.plain_batches == 2 * looks and ours.images == 24 - 8 * looks
