"""Two gloo ranks, by every launcher: the same training on every rank, a measurement on each, one report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.launch import python

PROGRAM = Path(__file__).with_name("two_ranks.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0")


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("launcher", "plain", "ours"),
    [((), "ddp", "ddp"), (TORCHRUN, "ddp", "fastloop_ddp"), ((), "ddp_fork", "ddp_spawn")],
    ids=["ddp", "fastloop_ddp by torchrun", "ddp_spawn"],
)
def test_two_ranks(launcher: tuple[str, ...], plain: str, ours: str, tmp_path: Path) -> None:
    said = python(*launcher, PROGRAM, plain, ours, cwd=tmp_path)
    without, with_rungs = notes(tmp_path, "plain"), notes(tmp_path, "ours")
    for rank in (0, 1):
        assert without[rank]["losses"] == with_rungs[rank]["losses"] and len(without[rank]["losses"]) == 8
        seen = with_rungs[rank]
        assert (seen["world"], seen["world_size"], seen["total_steps"], seen["global_batch"]) == (2, 2, 8, 16)
        assert seen["samples_per_s"] > 0 and seen["findings"] >= 1
        assert seen["took"] == {"workers": True, "overlap": True} and seen["plan"] == ["planned", "planned"]
        assert seen["strategy"] == "FastLoop_DDPStrategy" and seen["order"] == 1
    assert without[0]["losses"] != without[1]["losses"], "both ranks trained on the same samples"
    reports = list(tmp_path.rglob("report.md"))
    assert len(reports) == 1 and with_rungs[0]["run_dir"] == str(reports[0].parent)
    assert with_rungs[1]["run_dir"] is None
    for rank in (0, 1):
        assert re.search(rf"^\| {rank} \| \S+ \| [\d,]+\.\d\d \|", reports[0].read_text(), re.M), "its step, and no n/a"
    assert said.count("REPORT") == 1 and said.count("fastloop ") == 1, said


@pytest.mark.multirank
def test_fsdp_trains_as_without_us_and_says_which_rungs_it_refuses(tmp_path: Path) -> None:
    python(Path(__file__).with_name("fsdp_ranks.py"), cwd=tmp_path)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        plain, watched, rungs = seen["plain"], seen["watched"], seen["rungs"]
        assert len(plain["losses"]) == 8 and watched["losses"] == plain["losses"] == seen["swapped"]["losses"]
        assert rungs["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert watched["strategy"] == "FastLoop_FSDPStrategy" and seen["swapped"]["strategy"] == "PlainFSDP"
        assert (watched["steps"], watched["world_size"]) == (8, 2) and watched["findings"] >= 1
        assert rungs["skipped"] == {
            "batch": "FSDPStrategy keeps its own gradients; only one device and DDP are supported",
            "amp": "FSDPStrategy has its own precision handling; write Trainer(precision=…) instead",
            "layout": "FSDPStrategy stores weights in its own layout",
            "overlap": "needs DDP with several devices; the strategy is FSDPStrategy",
        }
        assert rungs["took"] == {"fused": True, "host": True, **dict.fromkeys(rungs["skipped"], False)}
