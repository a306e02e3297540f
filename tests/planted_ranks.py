"""The program that test_planted.py starts: two ranks, one of them slow or none; the first says what was named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks import planted

if __name__ == "__main__":
    torch.set_num_threads(1)
    plant = {"slow": planted.SLOW_RANK, "even": planted.EVEN_RANKS}[sys.argv[1]]
    loop = planted.train(plant)
    if loop.measurement is not None and loop.findings and torch.distributed.get_rank() == 0:
        first = loop.findings[0]
        ranks = [rank["rank"] for rank in loop.measurement.ranks]
        Path(sys.argv[2]).write_text(json.dumps({"named": planted.named(loop), "why": first.why, "ranks": ranks}))
