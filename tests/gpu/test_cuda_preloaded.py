"""A forked trial has the device as an executed one has it: the process that it was forked from never touched CUDA."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from fastloop.experiments.trials import preloaded
from fastloop.experiments.trials.supervise import read_last_lines, supervise
from fastloop.experiments.trials.trial import make_environment

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
USES = """
import time
first = time.time()
import json, torch
from torch.utils.data import DataLoader

bad = torch.cuda._is_in_bad_fork()
a = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).cuda()
total = float((a @ a).double().sum())
loader = DataLoader(a.cpu(), 128, num_workers=2, pin_memory=True)
loaded = [float(each.cuda(non_blocking=True).sum()) for each in loader]
compiled = float(torch.compile(lambda x: (x * 2).relu())(a).double().sum())
print(json.dumps({"first": first, "bad": bad, "total": total, "loaded": loaded, "compiled": compiled}))
"""


@pytest.mark.slow
def test_the_device_answers_alike_either_way(tmp_path: Path) -> None:
    script = tmp_path / "uses.py"
    script.write_text(USES)
    environ = make_environment(os.environ)
    said = {}
    with preloaded.quick_starts(environ, scripts=True):
        for how in ("forked", "executed"):
            with pytest.MonkeyPatch.context() as patch:
                if how == "executed":
                    patch.setattr(preloaded, "_server", None)
                ended = supervise([sys.executable, str(script)], tmp_path, env=environ)
            assert ended.code == 0, read_last_lines(tmp_path / "stderr.txt")
            assert (ended.started == "forked") is (how == "forked"), ended.started
            said[how] = json.loads((tmp_path / "stdout.txt").read_text().splitlines()[-1])
    assert said["forked"].pop("first") and said["executed"].pop("first")
    assert said["forked"] == said["executed"] and said["forked"]["bad"] is False
