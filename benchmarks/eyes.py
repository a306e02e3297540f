"""Are the eyes right? Each check prints one JSON line.

    python -m benchmarks.eyes [parts] [flops] [marks]

parts  the step's parts from events against the same steps' trace, for steps bound by the device, the loader, launches,
       copies and a callback: within max(2 % of the step, 0.3 ms)
flops  one model eager, compiled and checkpointed: the same FLOPs, and MFU in the ratio of the rates
marks  what the watch's own calls cost, one by one
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import planted, trace_parts
from benchmarks.cases import say
from fastloop import FastLoop
from fastloop.bridge.watch import measurement, session
from fastloop.evidence.clock import step_clock
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.gpu.efficiency import add_work
from fastloop.evidence.work.flops import FlopCount

TRACED = 20
PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer", "callbacks_logging")


class Transformer(L.LightningModule):
    """A few blocks; `kind`: eager, compiled or checkpointed."""

    def __init__(self, kind: str, width: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.embed = torch.nn.Embedding(1000, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = torch.nn.Linear(width, 1000)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpointed" else block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(
    module: L.LightningModule, loader: Any, steps: int, config: dict[str, Any], *, callbacks: tuple[Callback, ...] = ()
) -> FastLoop:
    loop = FastLoop(config, quiet=True)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="bf16-mixed",
        callbacks=[*callbacks, loop],
    )
    trainer.fit(module, loader)
    return loop


class Both:
    """Stands in for the trace's look: events of every phase and a trace, over the same steps."""

    def __init__(self, inner: Any, window: dict[str, Any]) -> None:
        self.inner, self.found_window, self.marks = inner, window, None
        self.clock: step_clock.Clock | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attach(self, marks: Any, queued_steps: int) -> None:
        self.marks = marks
        self.inner.attach(marks, queued_steps)

    def begin(self) -> None:
        self.inner.begin()
        lead = self.inner.steps - TRACED
        self.clock = self.marks.clock = step_clock.Clock(
            self.marks.clock.device, warmup_steps=max(0, lead - 1), one_time=OneTime()
        )

    def end(self) -> None:
        window = self.clock.close()
        self.found_window.update(
            {phase: 1e3 * s for phase, s in window.parts_s.items()},
            steps=window.steps,
            step=1e3 * window.wall_s / window.steps,
        )
        self.inner.end()


def parts(per_ms: float) -> None:
    """Events against the trace."""
    cases = {
        "device": planted.CUDA_PLANTS["fp32_gemm"],
        "loader": planted.CUDA_PLANTS["loader"],
        "hidden_loader": planted.CUDA_PLANTS["hidden_loader"],
        "launches": planted.CUDA_PLANTS["launches"],
        "copies": planted.CUDA_PLANTS["unpinned"],
        "callback": planted.CUDA_PLANTS["callback"],
    }
    step_clock.FIRST_IN_DETAIL = 10**9
    made = session.TraceProbe
    for name, plant in cases.items():
        seen: dict[str, Any] = {}
        session.TraceProbe = lambda *args, _seen=seen: Both(made(*args), _seen)  # type: ignore[misc,assignment]
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder)
            eyes_place = FastLoop._find_directory
            FastLoop._find_directory = lambda *_, _kept=kept: _kept  # type: ignore[method-assign,misc]
            planted.train(plant, "cuda", per_ms=per_ms, config={"watch": {"warmup_steps": 10, "trace_steps": TRACED}})
            FastLoop._find_directory = eyes_place  # type: ignore[method-assign]
            told = trace_parts.read_parts(kept / "trace.json.gz")
        limit = max(0.02 * told["step_ms"], 0.3)
        off = {phase: seen.get(phase, 0.0) - told["parts_ms"].get(phase, 0.0) for phase in PHASES}
        # A hook's range in the trace holds the making of its marks, which the events between them do not: what the host
        # does between two batches is compared as a whole.
        hooks, between = off.pop("callbacks_logging"), seen.get("host_other", 0.0) - told["between_ms"]
        off["between batches"] = hooks + between
        say(
            "parts",
            {
                "case": name,
                "events_ms": seen,
                "trace_ms": told["parts_ms"],
                "trace_step_ms": told["step_ms"],
                "trace_between_ms": told["between_ms"],
                "off_ms": off,
                "limit_ms": limit,
                "right": all(abs(ms) <= limit for ms in off.values()),
                "steps": [seen.get("steps"), told["steps"]],
            },
        )
    session.TraceProbe = made  # type: ignore[misc]
    step_clock.FIRST_IN_DETAIL = 8


def flops() -> None:
    """One model, three ways."""
    tokens = torch.randint(0, 1000, (4096, 512))
    loader = DataLoader(TensorDataset(tokens), 16)
    counter = FlopCount()
    module = Transformer("eager").cuda()
    with torch.autocast("cuda", torch.bfloat16), counter:
        module.training_step([tokens[:2].cuda()], 0).backward()
    trial = counter.work.per(2, "a trial")
    shown = {}
    for kind in ("eager", "checkpointed", "compiled"):
        torch.manual_seed(0)
        config: dict[str, Any] = {"watch": {"warmup_steps": 10}}
        if kind == "compiled":
            config["rungs"] = {"compile": {"enabled": True}}
        loop = fit(Transformer(kind), loader, 110, config)
        seen = loop.measurement
        if seen.flops.get("per_sample") is None:
            seen = add_work(seen, flops=trial)
        shown[kind] = (seen.samples_per_s, seen.mfu["datasheet"])
        say(
            "flops",
            {
                "kind": kind,
                "flops": dict(seen.flops),
                "samples_per_s": seen.samples_per_s,
                "tflop_per_s": seen.tflop_per_s,
                "mfu": dict(seen.mfu),
                "peaks": dict(seen.peaks),
                "took": [verdict.took for verdict in loop.verdicts],
            },
        )
    for kind in ("checkpointed", "compiled"):
        rate, mfu = (shown[kind][number] / shown["eager"][number] for number in (0, 1))
        say(
            "flops",
            {
                "kind": f"{kind} over eager",
                "rate_ratio": rate,
                "mfu_ratio": mfu,
                "right": abs(rate / mfu - 1) < 0.01,
            },
        )


def marks() -> None:
    """Microseconds of the single calls, and of a whole step's."""
    device = torch.device("cuda")
    event, other = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    event.record(stream)
    other.record(stream)
    torch.cuda.synchronize()
    loss = torch.zeros((), device=device)
    calls: dict[str, Callable[[], Any]] = {
        "perf_counter": time.perf_counter,
        "current_stream": lambda: torch.cuda.current_stream(device),
        "record": lambda: event.record(stream),
        "query": other.query,
        "elapsed_time": lambda: other.elapsed_time(other),
        "detach": loss.detach,
    }
    spent = {}
    for name, call in calls.items():
        begun = time.perf_counter()
        for _ in range(5000):
            call()
        spent[name] = round((time.perf_counter() - begun) / 5000 * 1e6, 2)
        torch.cuda.synchronize()
    steps = [round(measurement.measure_cost_us(device, 2000), 1) for _ in range(5)]
    say("marks", {"us": spent, "step_us": steps})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", default=["marks", "parts", "flops"])
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    say("eyes", {"checks": options.checks})
    if "marks" in options.checks:
        marks()
    if "parts" in options.checks:
        parts(planted.cycles_per_ms())
    if "flops" in options.checks:
        flops()


if __name__ == "__main__":
    main()
