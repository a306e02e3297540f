"""The want: which store it opens, how large, and what is left of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ImageOps
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms as T

from fastloop.errors import NotApplicable
from fastloop.feeds.cache import places
from fastloop.feeds.cache.prefixes import read_prefix
from fastloop.feeds.cache.wanted import KeptSamples, compute_share
from fastloop.records import store
from fastloop.records.facts import PrefixFacts
from tests.feeds.cache.pictures import Arrays, folder
from tests.pictures import Named


@pytest.fixture(autouse=True)
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(places, "find_shm_root", lambda: tmp_path / "shm")
    yield tmp_path
    assert not (tmp_path / "shm").exists(), "left in shared memory"


def want(dataset: Any, **settings: Any) -> KeptSamples:
    prefix = read_prefix(dataset)
    assert isinstance(prefix, PrefixFacts), prefix
    return KeptSamples(**{"store": "shm", "budget_bytes": 10**7, "prefix": prefix, **settings})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def test_shared_memory_is_one_store_for_all_and_is_given_back(tmp_path: Path) -> None:
    plain = folder(tmp_path / "pictures", transform=T.ToTensor())
    one, two = want(plain), want(plain)
    first, second = one.wrap(plain), two.wrap(plain)
    assert [first[index][1] for index in range(6)] == [second[index][1] for index in range(6)]
    assert one.evidence()["misses"] == two.evidence()["hits"] == 6 and two.evidence()["kept_samples"] == 6
    (name,) = names(tmp_path / "shm")
    info = json.loads((tmp_path / "shm" / name / "info.json").read_text())
    assert info["samples"] == 6 and info["what"] == "decoded images" and "pillow" in info["versions"]
    one.close()
    assert names(tmp_path / "shm") == [name]
    two.close()
    two.close()
    assert one.evidence() == {}


def test_disk_stays_for_the_next_run(tmp_path: Path) -> None:
    plain = folder(tmp_path / "pictures", transform=T.ToTensor())
    for path in (None, str(tmp_path / "given")):
        for hits in (0, 6):
            kept = want(plain, store="disk", path=path)
            ours = kept.wrap(plain)
            assert len([ours[index] for index in range(6)]) == 6
            assert kept.evidence()["hits"] == hits and kept.evidence()["store"] == "disk"
            kept.close()
    assert len(names(tmp_path / "home" / "fastloop" / "samples")) == len(names(tmp_path / "given" / "samples")) == 1


def test_another_version_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6."""
    plain = folder(tmp_path / "pictures", transform=T.ToTensor())
    for version in (1, 2):
        monkeypatch.setattr("fastloop.feeds.cache.records.FORMAT", version)
        kept = want(plain, store="disk")
        ours = kept.wrap(plain)
        assert ours[0][1] == 0 and kept.evidence()["hits"] == 0
        kept.close()
    assert [name[:2] for name in names(tmp_path / "home" / "fastloop" / "samples")] == ["1-", "2-"]


def test_a_store_takes_no_more_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = folder(tmp_path / "pictures", 12, T.ToTensor())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000))
    kept = want(plain)
    ours = kept.wrap(plain)
    for _ in range(2):
        assert [ours[index][1] for index in range(12)] == [label for _, label in plain.samples]
    found = kept.evidence()
    assert found["kept_bytes"] <= 18_000 and found["hits"] + found["misses"] == 24 and 1 <= found["hits"] <= 5
    kept.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(NotApplicable, match="there is no room in"):
        want(plain).wrap(plain)


def test_what_a_crash_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    crashed = places.enter(tmp_path / "shm", "left", lambda draft: (draft / "samples.bin").write_bytes(b"x" * 100))
    crashed.leave(remove=False)
    plain = folder(tmp_path / "pictures", transform=T.ToTensor())
    kept = want(plain, store="disk")
    kept.wrap(plain)
    assert not (tmp_path / "shm" / "left").exists()
    kept.close()
    (tmp_path / "shm").rmdir()


ENDS = """
    import sys
    from pathlib import Path
    from tests.feeds.cache.test_wanted import want, places
    from tests.feeds.cache.pictures import Arrays
    root = Path(sys.argv[1])
    places.find_shm_root = lambda: root / "shm"
    data = Arrays(root / "arrays")
    want(data).wrap(data)
    data[1]
    print((root / "shm").exists())
    sys.exit(3)
"""


def test_a_program_that_ends_without_a_teardown_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ENDS), str(tmp_path)]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | {"PYTHONPATH": root})
    assert (done.returncode, done.stdout) == (3, "True\n"), done.stderr
    assert not (tmp_path / "shm").exists()


def test_marked_methods_are_as_before_afterwards(tmp_path: Path) -> None:
    data = Arrays(tmp_path / "arrays")
    before = dict(vars(data))
    one, two = want(data), want(data)
    assert one.wrap(data) is data and two.wrap(data) is data, "two loaders of one dataset"
    assert [data[index][0][0] for index in (1, 1, 2)] == [1, 1, 2]
    assert one.evidence()["hits"] == 1 and two.evidence()["hits"] == 0
    two.close()
    one.close()
    assert vars(data) == before


def test_it_can_be_written_down(tmp_path: Path) -> None:
    plain = folder(tmp_path / "pictures", transform=T.ToTensor())
    kept = want(plain, store="redis", url="redis://127.0.0.1:1/0")
    with pytest.raises(NotApplicable, match="no server answers"):
        kept.wrap(plain)
    written = store.to_json(kept)
    assert written["prefix"]["samples"] == 6 and "live" not in written and written["budget_bytes"] == 10**7


@pytest.mark.parametrize(
    ("room", "size", "share"), [(None, 9, 1.0), (10, None, 1.0), (10**6, 10, 1.0), (500, 10, 0.485)]
)
def test_shares(room: int | None, size: int | None, share: float) -> None:
    prefix = PrefixFacts(what="", dataset="", fingerprint="", samples=100, sample_bytes=size)
    assert compute_share(prefix, room) == pytest.approx(share)


class Mirrors(Named):
    def __getitem__(self, index: int) -> Any:
        path, label = self.inner.samples[index]
        return self.transform(ImageOps.mirror(self.inner.loader(path))), label


class Relabels(Named):
    def __getitem__(self, index: int) -> Any:
        return self.inner[index][0], 9 - self.inner[index][1]


class ToLists(Named):
    def __getitem__(self, index: int) -> Any:
        return list(self.inner[index])


class Draws(Named):
    def __getitem__(self, index: int) -> Any:
        random.random()
        return self.inner[index]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Mirrors, "returns a different image for sample 0 than image_path_and_label and transform do"),
        (Relabels, "returns a different label for sample 0 than image_path_and_label and transform do"),
        (ToLists, "returns a different form for sample 0 than image_path_and_label and transform do"),
        (Draws, "draws other random numbers than its transform"),
    ],
)
def test_samples_that_are_not_what_their_dataset_says(kind: Any, why: str, tmp_path: Path) -> None:
    plain = kind(folder(tmp_path / "pictures", transform=T.Compose([T.RandomCrop(20), T.ToTensor()])))
    kept = want(Subset(plain, [0, 1]), store="disk")
    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(NotApplicable, match=f"{kind.__name__}'s __getitem__ {why}"):
        kept.wrap(ConcatDataset([plain, plain]))
    assert before == (random.getstate(), torch.get_rng_state().tolist())
    assert names(tmp_path / "home") == [] and kept.evidence() == {}


def test_samples_that_are(tmp_path: Path) -> None:
    plain = Named(folder(tmp_path / "pictures", transform=T.Compose([T.RandomCrop(20), T.ToTensor()])))
    (tmp_path / "pictures" / "class0" / "0.png").write_bytes(b"")
    kept = want(plain)
    ours = kept.wrap(plain)
    assert ours[1][1] == 0 and kept.evidence()["misses"] == 1, "no sample was kept before"
    kept.close()
