"""Memory that grows every step: planted leaks are named with their lines, what only looks like one is not."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import CatMetric

from fastloop import FastLoop
from fastloop.evidence.model import memory_creep
from fastloop.evidence.model.memory_creep import MemoryLog, find_pace
from tests.models import trainer

MIB = 2**20
EVERYTHING: list[torch.Tensor] = []


# -- is there steady growth? ------------------------------------------------------------------------------------------


def readings(size: Callable[[int], float]) -> list[tuple[int, int]]:
    return [(step, int(size(step))) for step in range(20, 100)]


@pytest.mark.parametrize(
    ("size", "pace"),
    [
        (lambda step: 500 * MIB + step * MIB, MIB),
        (lambda step: step * MIB + (step % 7) * 2 * MIB, MIB),
        (lambda step: 500 * MIB, None),
        (lambda step: 100 * MIB - step * MIB, None),
        (lambda step: min(step, 60) * MIB, None),
        (lambda step: (1 - 0.5 ** (step / 15)) * 900 * MIB, None),
        (lambda step: step % 25 * MIB, None),
        (lambda step: (step >= 50) * 400 * MIB, None),
        (lambda step: step * 1000, None),
    ],
    ids=["steady", "uneven", "flat", "falling", "full cache", "warm-up", "cleared", "one jump", "too little"],
)
def test_only_steady_growth_creeps(size: Callable[[int], float], pace: float | None) -> None:
    found = find_pace(readings(size))
    assert found is None if pace is None else found == pytest.approx(pace, rel=0.1)
    assert find_pace(readings(size)[:15]) is None, "too few to tell"


def test_a_long_fit_is_read_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(memory_creep.time, "monotonic", lambda: now[0])
    log = MemoryLog(torch.device("cpu"))
    for step in range(400_000):
        log.tick(step, lambda: 0)
        now[0] += 0.01
    assert 1000 < len(log.readings[memory_creep.HOST]) < 2000, "over an hour"


def foresee(monkeypatch: pytest.MonkeyPatch, taken: Callable[[int], float], hours: float, free_gib: float) -> list[str]:
    """The warnings of a fit of 1,000 steps an hour, asked every quarter of an hour."""
    now, step = [100.0], [0]
    monkeypatch.setattr(memory_creep.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory_creep.machine, "read_memory_free_bytes", lambda: int(free_gib * 2**30))
    log, said = MemoryLog(torch.device("cpu")), list[str | None]()
    log._read = {memory_creep.HOST: lambda: int(taken(step[0]) * MIB)}
    for step[0] in range(int(1000 * hours)):
        log.tick(step[0], lambda: 0)
        now[0] += 3.6
        if step[0] % 250 == 249:
            said.append(log.foresee_end(20, []))
    return [*filter(None, said)]


def test_memory_that_creeps_for_hours_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = foresee(monkeypatch, lambda step: 500 + 0.4 * step, 3.0, 4.0)
    assert "grew by 400 MiB per 1,000 steps since step 21" in warning
    assert "after about 10,240 more steps, in 10." in warning


@pytest.mark.parametrize(
    ("taken", "hours", "free_gib"),
    [
        (lambda step: 0.4 * step, 0.49, 4.0),
        (lambda step: 0.4 * min(step, 300), 3.0, 4.0),
        (lambda step: 0.4 * (step % 300), 3.0, 4.0),
        (lambda step: 0.4 * step, 3.0, 40.0),
    ],
    ids=["too early", "a cache that is full", "cleared", "it lasts for days"],
)
def test_memory_that_lasts_is_not(monkeypatch: pytest.MonkeyPatch, taken: Any, hours: float, free_gib: float) -> None:
    assert foresee(monkeypatch, taken, hours, free_gib) == []


# -- fits with a leak, and without ------------------------------------------------------------------------------------


class Net(L.LightningModule):
    """One layer whose graph holds half a MiB for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1024)
        self.kept: Any = []
        self.total: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.layer(batch[0]))
        loss = (hidden**2).mean()
        self.keep(hidden, loss)
        return loss

    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class KeepsGraphs(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        self.kept.append(loss)  # leak: graphs


class KeepsTensors(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        self.kept.append({"hidden": hidden.detach()})  # leak: tensors


class AddsUp(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        self.total = 0.9 * self.total + 0.1 * loss  # leak: sum


class KeepsInAGlobal(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        EVERYTHING.append(hidden.detach())  # leak: global


class Recorder:
    def __init__(self) -> None:
        self.taken = list[torch.Tensor]()

    def take(self, hidden: torch.Tensor) -> None:
        self.taken.append(hidden.detach())  # leak: global object


RECORDER = Recorder()


class KeepsInAGlobalObject(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        RECORDER.take(hidden)


class KeepsInAnotherFile(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        sys.modules["keeping"].remember(hidden.detach())


class NeverResets(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = CatMetric()

    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        self.seen.update(hidden.detach())  # leak: metric


class Resets(NeverResets):
    def on_train_epoch_end(self) -> None:
        self.seen.reset()


class Hears(Net):
    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        self.logger.take(hidden)  # type: ignore[union-attr]


class KeepingLogger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[Any]] = {"hidden": []}

    def take(self, hidden: torch.Tensor) -> None:
        self.history["hidden"].append(hidden.detach())  # leak: logger


class KeepsTheLast(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = deque(maxlen=90)

    def keep(self, hidden: torch.Tensor, loss: torch.Tensor) -> None:
        self.kept.append(hidden.detach())


class Clears(KeepsTensors):
    def on_train_epoch_end(self) -> None:
        self.kept.clear()


class HasItsOwn(Net):
    """What was full when the training began grows no further."""

    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.zeros(1) for _ in range(500)]


class Caching(Dataset[Any]):
    """Keeps what it made, and has made all of it after an epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.made = size, dict[int, torch.Tensor]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index not in self.made:
            self.made[index] = torch.ones(1024, 8) * index
        return (self.made[index],)


class Longer(Dataset[Any]):
    """Samples that get longer and longer."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return (torch.ones(8 + 60 * index, 8),)


SAMPLES = TensorDataset(torch.ones(12800, 8))


@pytest.fixture(autouse=True)
def read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("CPU fits")
    monkeypatch.setattr(memory_creep, "SHORTEST_S", 0.0)
    monkeypatch.setattr(memory_creep, "TIMES_COST", 0)
    monkeypatch.setattr(sys.modules[__name__], "EVERYTHING", [])
    monkeypatch.setattr(sys.modules[__name__], "RECORDER", Recorder())


def fit(module: Net, data: Any = None, *, batch_size: int = 128, logger: Any = False, epochs: int = 1) -> FastLoop:
    loop = FastLoop({"watch": {"warmup_steps": 10}}, quiet=True)
    data = DataLoader(SAMPLES if data is None else data, batch_size=batch_size)
    trainer(callbacks=[loop], max_epochs=epochs, logger=logger).fit(module, data)
    return loop


def line_of(leak: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{1 + next(i for i, line in enumerate(lines) if line.endswith(f'# leak: {leak}'))}"


@pytest.mark.parametrize(
    ("module", "leak", "keeper", "graphs"),
    [
        (KeepsGraphs, "graphs", "KeepsGraphs.kept", True),
        (KeepsTensors, "tensors", "KeepsTensors.kept", False),
        (AddsUp, "sum", "AddsUp.total", True),
        (KeepsInAGlobal, "global", "the global EVERYTHING", False),
        (KeepsInAGlobalObject, "global object", "Recorder.taken", False),
        (NeverResets, "metric", "NeverResets.seen", False),
        (Hears, "logger", "KeepingLogger.history", False),
    ],
)
def test_a_leak_is_named_with_its_line(module: type[Net], leak: str, keeper: str, graphs: bool) -> None:
    loop = fit(module(), logger=KeepingLogger() if module is Hears else False)
    assert loop.measurement is not None
    found = loop.measurement.evidence["memory"]
    assert (found["name"], found["holds_graphs"]) == (keeper, graphs) and found["tensors"] in range(95, 106)
    assert found["where"].endswith(line_of(leak)), found
    if not graphs:  # backward has freed what was large
        assert found["mib_per_1000_steps"] == pytest.approx(500, rel=0.2) and found["steps_left"] > 0
    last = loop.findings[-1]
    assert last.bottleneck == "memory_creep" and last.share_pct is None and f"({found['where']}): " in last.why


HELPER = """kept = []

def remember(hidden):
    kept.append(hidden)
"""


@pytest.mark.parametrize("beside", [True, False], ids=["beside the user's file", "of another folder"])
def test_a_global_of_another_file_is_found_where_that_file_is_the_users(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeping.py").write_text(HELPER)
    helper = ModuleType("keeping")
    helper.__file__ = str(tmp_path / "keeping.py")
    exec(HELPER, vars(helper))
    monkeypatch.setitem(sys.modules, "keeping", helper)
    if beside:
        monkeypatch.setattr(sys.modules[__name__], "__file__", str(tmp_path / "train.py"))
    measurement = fit(KeepsInAnotherFile()).measurement
    found = measurement.evidence.get("memory", {}) if measurement is not None else {}
    assert len(vars(helper)["kept"]) == 100
    assert (found.get("name"), found.get("where")) == (("the global kept", "keeping.py:4") if beside else (None, None))


@pytest.mark.parametrize(
    ("module", "data", "grows"),
    [
        (Net, None, False),
        (KeepsTheLast, None, True),
        (Clears, None, True),
        (Resets, None, True),
        (HasItsOwn, Caching(100), True),
        (Net, Longer(), True),
    ],
    ids=[
        "nothing kept",
        "bounded",
        "cleared",
        "a metric that is reset",
        "a filling cache beside a full list",
        "growing shapes",
    ],
)
def test_what_only_looks_like_a_leak_is_none(module: type[Net], data: Any, grows: bool) -> None:
    seen: list[float | None] = []
    find = memory_creep.find_pace

    def spy(*arguments: Any) -> float | None:
        seen.append(find(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_creep, "find_pace", spy)
        patch.setattr(memory_creep, "LEAST_MIB", 0.05)
        loop = fit(module(), data, batch_size=128 if data is None else 1)
    assert loop.measurement is not None and "memory" not in loop.measurement.evidence
    assert not any(finding.bottleneck == "memory_creep" for finding in loop.findings)
    assert len(seen) == 1 and (seen[0] is not None or not grows), "it grew, and was acquitted by who keeps the tensors"
