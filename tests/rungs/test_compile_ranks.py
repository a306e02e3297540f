"""compile on two ranks: lengths that differ between them, and a cache of compiled code that somebody else deletes."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bridge.launch import python

PROGRAM = Path(__file__).with_name("compile_ranks.py")
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(400)]


def fit(folder: Path, case: str, backend: str, **env: str) -> list[dict[str, Any]]:
    """What each rank tells."""
    python(PROGRAM, case, backend, cwd=folder, limit_s=300, env=env)
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in (0, 1)]


def assert_same_training(told: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    assert told[0]["weights"] == told[1]["weights"]
    for ours, users in zip(told[0]["weights"], plain[0]["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(users), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return fit(tmp_path_factory.mktemp("plain"), "plain", "no")


def test_lengths_that_vary_under_ddp_take_two_graphs_a_rank_and_name_the_cause(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:  # C7
    told = fit(tmp_path, "lengths", "eager")
    assert_same_training(told, plain)
    for rank in told:
        assert rank["took"] is True and rank["evidence"]["graphs"] == 2, rank["why"]
        assert not rank["evidence"]["failures"] and not rank["evidence"]["limit_hit"]
        (cause,) = rank["evidence"]["recompiles"]
        assert "size mismatch at index 1" in cause and f"recompiled: {cause}" in rank["why"]


@pytest.mark.slow
@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted"])
def test_a_cache_that_ranks_share_ends_no_training_even_if_it_is_deleted_meanwhile(
    deletes: bool, plain: list[dict[str, Any]], tmp_path: Path
) -> None:  # C6
    cache, is_over, deleted = tmp_path / "inductor", threading.Event(), list[Path]()

    def delete() -> None:
        while deletes and not is_over.wait(0.01):
            with contextlib.suppress(OSError):  # the ranks delete temporary files
                deleted.extend(cache.rglob("*"))
            shutil.rmtree(cache, ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        told = fit(tmp_path, "shared", "inductor", TORCHINDUCTOR_CACHE_DIR=str(cache))
    finally:
        is_over.set()
        thread.join()
    assert bool(deleted) is deletes
    assert_same_training(told, plain)
    for rank in told:
        assert rank["took"] is True or (deletes and "fell back to eager: net: " in rank["why"]), rank["why"]
