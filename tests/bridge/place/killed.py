"""A training that kills itself, or goes on.

killed.py FOLDER RUNGS ACCUMULATE RANKS SEED EPOCH BATCH [PICTURES]    EPOCH -1 resumes the last checkpoint

With a folder of pictures it trains on these, and writes down labels, which are the pictures' numbers. Each rank writes
a file, and kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(
    folder: Path, rungs: Any, accumulate: int, ranks: int, seed: int, epoch: int, batch: int, *pictures: Path
) -> None:
    import lightning as L
    import torch
    from torch.utils.data._utils import worker

    from tests.bridge.place.resumed import Recorded, fit, shuffled
    from tests.rungs.test_dali import Sees, load
    from tests.runs import watching

    worker.MP_STATUS_CHECK_INTERVAL = 0.5  # how soon a worker sees that this process is gone

    def list_planned() -> list[str]:
        return [step.rung for step in loop.plan.steps if step.status == "planned"]

    class Killed(Sees if pictures else Recorded):  # type: ignore[misc]
        def training_step(self, seen: Any, batch_idx: int) -> Any:
            if (self.current_epoch, batch_idx) == (epoch, batch):
                (folder / f"killed{self.global_rank}.json").write_text(json.dumps(list_planned()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(seen, batch_idx)

    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    loop, data = watching(rungs), load(*pictures, still=True) if pictures else shuffled()
    how: dict[str, Any] = {"save": folder} if epoch >= 0 else {"ckpt": saved[-1]}
    if ranks > 1:
        L.seed_everything(seed, verbose=False)  # Lightning seeds its DistributedSampler by it
        how |= {"strategy": "ddp", "devices": ranks}
    torch.manual_seed(0)
    module, trainer = fit(None, data, seed=seed, module=Killed(), loop=loop, accumulate_grad_batches=accumulate, **how)
    found = [module.labels if pictures else module.trained, saved[-1].stem if saved else "", list_planned()]
    (folder / f"resumed{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    numbers, images = map(int, sys.argv[3:8]), map(Path, sys.argv[8:])
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *numbers, *images)  # type: ignore[arg-type]
