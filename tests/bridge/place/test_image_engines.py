"""L5: DALI has no place of its own within an epoch, and a cache none at all: they load what the user's sampler says."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from fastloop.feeds.cache import places
from tests.bridge.place.resumed import fit, place
from tests.rungs.test_dali import Sees, load
from tests.runs import watching

ENGINES: dict[str, dict[str, Any]] = {
    "dali": {"dali": {"threads": 2}},
    "cache": {"cache": {}},
    "workers": {"workers": {"count": 2}},
    "threads": {"nodes": {"threads": 2}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    pytest.importorskip("torchvision")
    from tests.feeds.dali.folders import make_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(places, "find_shm_root", lambda: tmp_path / "shm")
    return make_folder(tmp_path / "pictures")


@pytest.mark.parametrize(
    ("first", "then"),
    [("dali", "workers"), ("workers", "dali"), ("cache", "dali"), ("dali", "cache"), ("threads", "workers")],
)
def test_another_engine_goes_on(folder: Path, tmp_path: Path, first: str, then: str) -> None:
    """Twenty pictures in batches of six, killed behind two of four in the second epoch."""
    saved, loops, found = tmp_path / "saved", [], []
    for engine, settings in ((first, {"save": saved}), (then, {"ckpt": saved / "step=6.ckpt"})):
        loops.append(watching(ENGINES[engine]))
        data = load(folder, still=True)
        module, _ = fit(None, data, seed=5 + len(loops), module=Sees(), loop=loops[-1], **settings)  # type: ignore[arg-type]
        found.append(module.labels)  # type: ignore[attr-defined]
        assert [step.status for step in loops[-1].plan.steps] == ["planned"], loops[-1].plan
    whole, resumed = found
    assert resumed == whole[6:] and sorted(chain(*whole[4:6], *resumed)) == list(range(20))
    assert place(saved / "step=6.ckpt")["batches"] == 2
