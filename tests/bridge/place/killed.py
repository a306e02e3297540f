"""A training that kills itself, or goes on.

killed.py FOLDER RUNGS ACCUMULATE SEED EPOCH BATCH [PICTURES]    EPOCH -1 resumes the last checkpoint

With a folder of pictures it trains on these, and writes down labels, which are the pictures' numbers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(
    folder: Path, rungs: Any, accumulate: int, seed: int, epoch: int, batch: int, pictures: Path | None = None
) -> None:
    import torch

    from tests.bridge.place.resumed import Recorded, fit, shuffled
    from tests.rungs.test_dali import Sees, load
    from tests.runs import watching

    def list_planned() -> list[str]:
        return [step.rung for step in loop.plan.steps if step.status == "planned"]

    class Killed(Recorded if pictures is None else Sees):  # type: ignore[misc]
        def training_step(self, seen: Any, batch_idx: int) -> Any:
            if (self.current_epoch, batch_idx) == (epoch, batch):
                (folder / "killed.json").write_text(json.dumps(list_planned()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(seen, batch_idx)

    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    loop, data = watching(rungs), shuffled() if pictures is None else load(pictures, still=True)
    how: dict[str, Any] = {"save": folder} if epoch >= 0 else {"ckpt": saved[-1]}
    torch.manual_seed(0)
    module, _ = fit(None, data, seed=seed, module=Killed(), loop=loop, accumulate_grad_batches=accumulate, **how)
    trained = module.trained if pictures is None else module.labels
    (folder / "resumed.json").write_text(json.dumps([trained, saved[-1].stem, list_planned()]))


if __name__ == "__main__":
    numbers, pictures = [int(word) for word in sys.argv[3:7]], [Path(word) for word in sys.argv[7:]]
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *numbers, *pictures)  # type: ignore[arg-type]
