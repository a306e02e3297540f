"""A training that kills itself, or goes on.

killed.py FOLDER RUNGS ACCUMULATE SEED EPOCH BATCH    EPOCH -1 resumes the last checkpoint
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, rungs: Any, accumulate: int, seed: int, epoch: int, batch: int) -> None:
    from tests.bridge.place.resumed import Recorded, fit, shuffled

    class Killed(Recorded):
        def training_step(self, seen: Any, batch_idx: int) -> Any:
            if (self.current_epoch, batch_idx) == (epoch, batch):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(seen, batch_idx)

    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    if epoch >= 0:
        fit(rungs, shuffled(), seed=seed, save=folder, module=Killed(), accumulate_grad_batches=accumulate)
    else:
        module, _ = fit(rungs, shuffled(), seed=seed, ckpt=saved[-1], accumulate_grad_batches=accumulate)
        (folder / "resumed.json").write_text(json.dumps([module.trained, saved[-1].stem]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:]))
