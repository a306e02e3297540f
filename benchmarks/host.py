"""What the host rung brings: the loop's own microseconds, and the cifar10 recipe at the user's batch of 128.

    python -m benchmarks.host [--steps 400] [--only loop|resident|store] [--rounds 2] [--budget 200] [--size tiny]

`loop` is a model of two small layers, so that Lightning itself is the step. `resident` trains the recipe's ResNet-18 on
one batch that stays on the device; `store` on its pictures, from the device store. Rates are of the second half of the
steps, by a stopwatch between two synchronizations.
"""

from __future__ import annotations

import logging
import time
import warnings
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.cases import Case, find_data, make_parser, run_cases, wait
from fastloop import FastLoop
from fastloop.bridge.fit.recipes import build_recipe
from fastloop.config.loading import load

KERNELS: dict[str, Any] = {"amp": {}, "layout": {}, "fused": {}}
COMPILED: dict[str, Any] = {**KERNELS, "compile": {"pay_back": "ignore"}}
STORE: dict[str, Any] = {**COMPILED, "cache": {"store": "device"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "resident, compile, host": ("resident", {**COMPILED, "host": {"step_graph": True}}),
    "resident, compile": ("resident", COMPILED),
    "store, compile, host": ("store", {**STORE, "host": {"step_graph": True}}),
    "store, compile": ("store", STORE),
    "loop, host": ("loop", {"host": {"step_graph": True}}),
    "loop, host without graphs": ("loop", {"host": {}}),
    "loop": ("loop", {}),
    "loop and a value, host": ("loop", {"host": {"step_graph": True}}),
    "loop and a value, host without graphs": ("loop", {"host": {}}),
    "loop and a value": ("loop", {}),
    "resident, host": ("resident", {**KERNELS, "host": {"step_graph": True}}),
    "resident": ("resident", KERNELS),
}
"""What there is to learn first."""


class Small(L.LightningModule):
    """Lightning's own work is all there is."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.logs = logs
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(L.Callback):
    """Seconds of the second half of the steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.seconds = steps, 0.0, 0.0
        self.cpu_began = self.cpu_seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (self.steps // 2, self.steps):
            wait(trainer.strategy.root_device.type)
            self.seconds, self.began = time.perf_counter() - self.began, time.perf_counter()
            self.cpu_seconds, self.cpu_began = time.process_time() - self.cpu_began, time.process_time()


def measure(case: str, steps: int, size: str, _left_s: float) -> dict[str, Any]:
    """One fit."""
    (what, rungs), batch = CASES[case], 128 if size == "default" else 32
    if size == "tiny":  # compiling for a CPU takes minutes
        rungs = {name: keys for name, keys in rungs.items() if name != "compile"}
    torch.manual_seed(0)
    watch = Stopwatch(steps)
    config = {"rungs": {name: {"enabled": True, **keys} for name, keys in rungs.items()}}
    loop = FastLoop({**config, "rehearsal": "on" if what == "store" else "off"}, quiet=True)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        devices=1, max_steps=steps, callbacks=[watch, loop], limit_val_batches=0, **dict.fromkeys(quiet, False)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if what == "loop":
        batches = DataLoader([torch.randn(8, 8, device=device)] * steps, batch_size=None)  # type: ignore[arg-type]
        trainer.fit(Small("value" in case), batches)
    else:
        files = find_data("cifar10-jpg.tar", size)
        overrides = [f"recipe.size={size}", *([f"recipe.data={files}"] if files else [])]
        module, data = build_recipe(load("cifar10", overrides=overrides))
        if what == "store":
            trainer.fit(module, data)
        else:
            pair = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
            trainer.fit(module, DataLoader([pair] * steps, batch_size=None))  # type: ignore[arg-type]
    assert loop.measurement is not None
    row: dict[str, Any] = {"steps": steps, "us_per_step": 1e6 * watch.seconds / (steps - steps // 2)}
    row["cpu_us_per_step"] = 1e6 * watch.cpu_seconds / (steps - steps // 2)
    if what != "loop":
        row["img_per_s"] = batch * (steps - steps // 2) / watch.seconds
    row["verdicts"] = {each.rung: each.why for each in loop.verdicts if each.rung == "host" or not each.took}
    found = loop.measurement.evidence.get("host", {})
    return {**row, "host": {name: found[name] for name in found if name != "graph_refused"}}


def main() -> None:
    parser = make_parser(__doc__, rounds=2)
    parser.add_argument("--steps", type=int, help="400, five times that for `loop`; 6 for the tiny size")
    parser.add_argument("--only", choices=["loop", "resident", "store"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tiny = options.size == "tiny"
    steps = options.steps or (6 if tiny else 400)
    expected_s = {"loop": 3, "resident": 25, "store": 30}
    cases = [
        Case(
            name,
            partial(measure, name, 5 * steps if what == "loop" else steps, options.size),
            0 if tiny else expected_s[what],
        )
        for name, (what, _) in CASES.items()
        if options.only in (None, what)
    ]
    run_cases("host", cases, options, rate="us_per_step")


if __name__ == "__main__":
    main()
