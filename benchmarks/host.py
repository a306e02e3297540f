"""What the host rung brings: the loop's own microseconds, and the cifar10 recipe at the user's batch of 128.

    python -m benchmarks.host [--steps 400] [--only own|loop|resident|store] [--rounds 2] [--budget 200] [--size tiny]

`own` and `loop` have a model of two small layers, so that Lightning itself is the step. `own` is CPU time: what each
case adds to a loop by hand that runs right before it; of a run the 10th percentile of ten steps each, because other
processes only ever add. `resident` trains the recipe's ResNet-18 on
one batch that stays on the device; `store` on its pictures, from the device store. Rates are of the second half of the
steps, by a stopwatch between two synchronizations.
"""

from __future__ import annotations

import itertools
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
OWN: dict[str, tuple[bool, dict[str, Any] | None]] = {
    "own": (False, None),
    "own, watched": (False, {}),
    "own, host": (False, {"rungs": {"host": {"enabled": True}}, "watch": {"enabled": False}}),
    "own, host, watched": (False, {"rungs": {"host": {"enabled": True}}}),
    "own and a value": (True, None),
    "own and a value, host": (True, {"rungs": {"host": {"enabled": True}}, "watch": {"enabled": False}}),
}
"""Whether a value is logged, and FastLoop's configuration."""
CHUNK = 10
"""Steps between two looks at the clock."""


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


class Looks(L.Callback):
    """Process time after every few batches."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] % CHUNK == 0:
            self.seconds.append(time.process_time())

    def quiet_us(self) -> float:
        """A step in the run's quiet moments, without its first tenth."""
        seconds = self.seconds[len(self.seconds) // 10 :]
        took = sorted(after - before for before, after in itertools.pairwise(seconds))
        return 1e6 * took[len(took) // 10] / CHUNK


def step_by_hand(steps: int) -> float:
    """What Lightning and its hooks are compared with."""
    module, looks = Small(logs=False), Looks()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(DataLoader([torch.randn(8, 8)] * steps, batch_size=None)):  # type: ignore[arg-type]

        def closure(batch: torch.Tensor = batch, index: int = index) -> torch.Tensor:
            loss = module.training_step(batch, index)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
        looks.on_train_batch_end(index)
    return looks.quiet_us()


def step_of(logs: bool, config: Any, steps: int) -> float:
    watch = Looks()
    loops = [] if config is None else [FastLoop({**config, "rehearsal": "off"}, quiet=True)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, callbacks=[watch, *loops], limit_val_batches=0, **quiet
    )
    trainer.fit(Small(logs), DataLoader([torch.randn(8, 8)] * steps, batch_size=None))  # type: ignore[arg-type]
    return watch.quiet_us()


def measure_own(case: str, steps: int, _left_s: float) -> dict[str, Any]:
    """Two fits' worth: by hand, and by Lightning."""
    torch.set_num_threads(1)
    by_hand = step_by_hand(steps)
    return {"steps": steps, "by_hand_us_per_step": by_hand, "us_per_step": step_of(*OWN[case], steps) - by_hand}


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
    parser.add_argument("--only", choices=["own", "loop", "resident", "store"])
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
    if options.only in (None, "own"):
        cases = [*(Case(name, partial(measure_own, name, 5 * steps), 0 if tiny else 3) for name in OWN), *cases]
    run_cases("host", cases, options, rate="us_per_step")


if __name__ == "__main__":
    main()
