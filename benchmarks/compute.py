"""Which trick brings what: each recipe with one rung more at a time, beside the naive run, in one shuffled series.

    python benchmarks/compute.py gpt2 --runs 3 [--data DIR] [--steps 40] [--size tiny]

The stacks below go from the beginner's run to the best one set by hand; options and output are those of
benchmarks/recipes.py. Training equal or not is `fastloop ab RECIPE --vs ...`'s to say, not this one's.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from recipes import main  # benchmarks/recipes.py; the package of that name stands further down the path

TRICKS: dict[str, list[list[str]]] = {
    "gpt2": [
        ["rungs.amp.enabled=true"],
        ["rungs.batch.enabled=true", "rungs.batch.micro_batch=64"],
        ["rungs.attention.enabled=true"],
        ["rungs.fused.enabled=true"],
        ["rungs.compile.enabled=true"],
        ["rungs.loss.enabled=true"],
        ["rungs.host.enabled=true"],
    ],
    "resnet50": [
        ["rungs.amp.enabled=true", "rungs.layout.enabled=true"],
        ["rungs.workers.enabled=true", "rungs.pin.enabled=true", "rungs.prefetch.enabled=true"],
        ["rungs.compile.enabled=true"],
        ["rungs.batch.enabled=true", "rungs.batch.micro_batch=256"],
        ["rungs.fused.enabled=true", "rungs.host.enabled=true"],
    ],
    "cifar10": [
        ["rungs.amp.enabled=true", "rungs.layout.enabled=true"],
        ["rungs.cache.enabled=true", "rungs.cache.store=device"],
        ["rungs.fused.enabled=true"],
        ["rungs.compile.enabled=true"],
        ["rungs.host.enabled=true"],
        ["rungs.host.step_graph=auto"],
    ],
}


def stack(tricks: list[list[str]]) -> list[str]:
    """The naive arm, then one more trick in each."""
    return ["+".join(("naive", *more)) for more in itertools.accumulate(tricks, initial=[])]


if __name__ == "__main__":
    main({recipe: stack(tricks) for recipe, tricks in TRICKS.items()})
