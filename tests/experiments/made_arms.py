"""Arms that train nothing: runs whose files say what a test wants them to say."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastloop.config.loading import Config, load
from fastloop.experiments.ab.arms import Ask
from fastloop.records.measurement import Measurement
from fastloop.records.run_files import PlanFile
from fastloop.records.store import decode, to_json
from fastloop.records.trial import GradientAnswer, Trial

STEPS = 20


@dataclass(frozen=True, kw_only=True)
class MadeArm:
    """An arm of a made-up machine."""

    name: str = "base"
    overrides: tuple[str, ...] = ()
    rate: Callable[[int], float] = lambda _: 100.0
    """Samples per second of the run with this number."""
    spread: float = 0.01
    wrong: str | None = None
    """What is wrong with its training: ledger, gradient, loss or nan."""
    fails_at: int | None = None
    """The run that dies; -1: the one before them that does not count; -2: its plan."""
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    parity_class: str = "exact"
    global_batch: int = 64
    queued: int = 0
    timed: int = STEPS
    """Steps in its windows."""
    step_ms: float = 10.0
    began: Callable[[int], int | None] = lambda _: None
    """The step at which the run with this number began."""
    unsaved: bool = False
    calls: list[tuple[str, Ask]] = field(default_factory=list)

    plans_alone: bool = True
    skips: Mapping[str, str] = field(default_factory=dict)
    """Rungs that its plan leaves out, with the reasons."""

    def config(self) -> Config:
        return load("cifar10", overrides=self.overrides)

    def run(self, label: str, folder: Path, ask: Ask, *, limits: Any = None, progress: Any = None) -> Trial:
        self.calls.append((folder.name, ask))
        folder.mkdir(parents=True, exist_ok=True)
        number = int(folder.name.removeprefix("run-")) if folder.name.startswith("run-") else -1
        number = -2 if ask.variation == "plan" else number
        ok = self.fails_at is None or number != self.fails_at or ask.variation == "gradients"
        skipped = [{"rung": rung, "status": "skipped", "reason": why} for rung, why in self.skips.items()]
        answers = {
            "plan": {"answer.json": {"rungs": skipped, "parity_class": self.parity_class}},
            "gradients": self._answers(ask),
        }
        contents = answers.get(ask.variation) or self._files(number)
        trial = Trial(
            name=label,
            ok=ok,
            cause=None if ok else "killed by SIGKILL at step 7: out of memory",
            seconds=1.0,
            run_dir=folder,
            code=0 if ok else -9,
            last_step=7,
            tail="" if ok else "[rank1]: Traceback\nboom",
            measurement=decode(contents.get("measurement.json"), Measurement),
            answer=decode(contents.get("answer.json"), PlanFile if ask.variation == "plan" else GradientAnswer),
            began=self.began(number),
            unsaved=self.unsaved,
        )
        if ask.variation == "gradients" and ask.reference is None:
            (folder / "gradients.pt").touch()
        for name, content in {**(contents if ok else {}), "trial.json": to_json(trial)}.items():
            (folder / name).write_text(json.dumps(content))
        return trial

    def _files(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self.name} {number}")
        rate = self.rate(number) * (1 + self.spread * draw.uniform(-1, 1))
        losses: list[float | None] = [1.0 + 0.01 * number + (0.5 if self.wrong == "loss" else 0)] * STEPS
        if self.wrong == "nan":
            losses[12] = None
        rows = [
            {
                "rung": rung,
                "took": took,
                "why": "it took" if took else "there is one device",
                "parity_class": self.parity_class,
            }
            for rung, took in self.verdicts.items()
        ]
        steps = [[f"{number}-{step + (self.wrong == 'ledger' and step == 3)}", 64, 1, [0.1]] for step in range(STEPS)]
        return {
            "measurement.json": {
                "steps": self.timed,
                "samples_per_s": rate,
                "loss": losses,
                "device": "cuda",
                "device_name": "a GPU",
                "step_ms": {"mean": self.step_ms, "median": self.step_ms},
                "world_size": 1,
                "global_batch": self.global_batch,
                "micro_batch": self.global_batch,
                "state": [],
                "evidence": {"loader": {"queued_batches": self.queued}},
                "window_too_short": False,
            },
            "verdicts.json": {"verdicts": rows},
            "plan.json": {"parity_class": self.parity_class, "rungs": []},
            "env.json": {"versions": {"torch": "2.11.0"}, "driver": "1"},
            "ledger.json": {"schema": 1, "rank": 0, "ids": "sampler", "why": None, "steps": steps},
        }

    def _answers(self, ask: Ask) -> dict[str, Any]:
        if ask.reference is None:
            return {"answer.json": {"self_deviation": 0.0, "precision": "fp32", "finite": True}}
        deviation = 0.75 if self.wrong == "gradient" else 0.0
        return {"answer.json": {"deviation": deviation, "self_deviation": 0.0, "precision": "fp32", "finite": True}}

    def but(self, **changes: Any) -> MadeArm:
        return dataclasses.replace(self, calls=[], **changes)
