"""Synchronisations on a CUDA device: found by both hunters, on the same lines, with times that can be believed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from fastloop.evidence.sync import table
from fastloop.evidence.sync.cuda_warnings import SyncMarks
from fastloop.evidence.sync.hunt import LogSites, SyncHunt

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
DEVICE = torch.device("cuda", 0)
CYCLES = 100_000_000
"""About 50 ms of an idle kernel."""
Row = Mapping[str, Any]


def hunted(run: Callable[[], Any], steps: int = 1) -> tuple[Row, ...]:
    torch.cuda.synchronize()
    hunt = SyncHunt(DEVICE)
    with hunt:
        for _ in range(steps):
            run()
    return hunt.tally.rows(steps)


def marked(run: Callable[[], Any], steps: int = 1) -> tuple[Row, ...]:
    torch.cuda.synchronize()
    marks = SyncMarks()
    with marks:
        for _ in range(steps):
            run()
    return marks.result(steps)


def lines(rows: tuple[Row, ...]) -> set[int]:
    assert all("test_cuda_syncs.py:" in str(row["where"]) for row in rows), rows
    return {int(str(row["where"]).rpartition(":")[2]) for row in rows}


def sleep_ms() -> float:
    """How long the kernel of CYCLES takes on this device, now."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


@pytest.mark.alone
def test_waits_are_named_with_the_time_the_host_stood_still() -> None:
    x = torch.randn(1000, device=DEVICE)

    def step() -> None:
        torch.cuda._sleep(CYCLES)
        x.sum().item()
        torch.cuda._sleep(CYCLES)
        x[x > 0]
        torch.cuda._sleep(CYCLES)
        x.cpu()

    step()
    expected = sleep_ms()
    rows = hunted(step, steps=2)
    first = step.__code__.co_firstlineno
    assert {row["what"] for row in rows} == {".item()", "boolean mask", ".cpu()"}
    assert lines(rows) == {first + 2, first + 4, first + 6} == lines(marked(step, steps=2))
    assert all(row["per_step"] == 1 for row in rows)
    assert all(0.7 * expected < row["ms_per_step"] < 1.5 * expected + 5 for row in rows), (expected, rows)
    assert all(row["ms_per_step"] is None for row in marked(step))


def x_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).cuda()


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    ".item()": lambda x, one, mask: one.item(),
    ".tolist()": lambda x, one, mask: x.tolist(),
    "bool of a tensor": lambda x, one, mask: 1 if one > 0 else 0,
    "int(tensor)": lambda x, one, mask: int(one),
    "float(tensor)": lambda x, one, mask: float(one),
    "a tensor as index or size": lambda x, one, mask: [1, 2][one],
    ".cpu()": lambda x, one, mask: x.cpu(),
    ".to('cpu')": lambda x, one, mask: x.to("cpu"),
    "copy to the device": lambda x, one, mask: torch.ones(3).to(x.device),
    "nonzero": lambda x, one, mask: x.nonzero(),
    "masked_select": lambda x, one, mask: torch.masked_select(x, mask),
    "boolean mask": lambda x, one, mask: x[mask],
    "assignment by boolean mask": lambda x, one, mask: x.__setitem__(mask, torch.ones_like(x[:2])),
    "index by a 0-d tensor": lambda x, one, mask: x[one],
    "a tensor as slice bound": lambda x, one, mask: x[:one],
    "unique": lambda x, one, mask: torch.unique(x),
    "printing a tensor": lambda x, one, mask: repr(x),
    "a tensor in an f-string": lambda x, one, mask: f"{one}",
    ".is_nonzero()": lambda x, one, mask: one.is_nonzero(),
    "torch.equal": lambda x, one, mask: torch.equal(x, x.clone()),
    "torch.allclose": lambda x, one, mask: torch.allclose(x, x),
    "x in tensor": lambda x, one, mask: 2.0 in x,
    "torch.where(mask)": lambda x, one, mask: torch.where(mask),
    "bincount": lambda x, one, mask: torch.bincount(one[None]),
    "one_hot": lambda x, one, mask: nn.functional.one_hot(one[None]),
    "repeat_interleave": lambda x, one, mask: x.repeat_interleave(one.expand(3)),
    "torch.tensor of tensors": lambda x, one, mask: torch.tensor([one, one]),
    "torch.tensor on the device": lambda x, one, mask: torch.tensor(1.0, device=x.device),
    "linalg with an error check": lambda x, one, mask: torch.linalg.inv(torch.eye(2, device=x.device)),
}


@pytest.mark.parametrize("what", KINDS)
def test_both_hunters_agree_on_every_kind(what: str) -> None:
    x, one = x_of([1.0, 2.0, 3.0]), x_of([1.0])[0].long()
    mask, run = x > 1, KINDS[what]
    run(x, one, mask)
    (row,) = hunted(lambda: run(x, one, mask))
    assert row["what"] == what and row["ms_per_step"] >= 0 and lines((row,)) == {run.__code__.co_firstlineno}
    assert lines(marked(lambda: run(x, one, mask))) == {run.__code__.co_firstlineno}


@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x.shape, x.device, x[0], x[:2], x.sum() / 2),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x.masked_fill_(x > 1, 0.0),
        lambda x: x.__setitem__(x > 1, 0.0),
        lambda x: torch.zeros(3, device=x.device),
        lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
        lambda x: (torch.ones(3).cpu(), 2.0),
        lambda x: torch.ones(()).item(),
        lambda x: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0),
    ],
    ids=["metadata", "where", "masked_fill", "scalar_set", "factory", "pinned", "host_copy", "host_item", "clipping"],
)
def test_what_does_not_wait_is_named_by_neither(run: Callable[[torch.Tensor], Any]) -> None:
    x = x_of([1.0, 2.0, 3.0])
    run(x)
    assert hunted(lambda: run(x)) == () and marked(lambda: run(x)) == ()


def test_a_plain_step_names_nothing_and_the_backward_is_hunted_too() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    x, y = torch.randn(4, 8, device=DEVICE), torch.randint(0, 2, (4,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()

    step()
    assert hunted(step, steps=3) == () and marked(step, steps=3) == ()

    def reads(grad: torch.Tensor) -> None:
        grad.norm().item()

    network[0].weight.register_hook(reads)
    rows = hunted(step, steps=3)
    line = reads.__code__.co_firstlineno + 1
    assert lines(rows) == {line} == lines(marked(step, steps=3))
    assert rows[0]["per_step"] == 1 and rows[0]["ms_per_step"] >= 0


@pytest.mark.alone
def test_explicit_waits_are_timed_and_everything_is_put_back() -> None:
    names = torch.cuda.synchronize, torch.cuda.Event.synchronize
    shown, filters = warnings.showwarning, list(warnings.filters)

    def step() -> None:
        torch.cuda._sleep(CYCLES)
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    step()
    expected = sleep_ms()
    rows = hunted(step)
    first = step.__code__.co_firstlineno
    assert lines(rows) == {first + 2, first + 5} and 0.7 * expected < rows[0]["ms_per_step"] < 1.5 * expected + 5
    assert (torch.cuda.synchronize, torch.cuda.Event.synchronize) == names
    assert warnings.showwarning is shown and warnings.filters == filters and torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("combinations", lambda x: torch.combinations(x)),
        ("arange", lambda x: torch.arange(x[1], device=DEVICE)),
    ],
    ids=["combinations", "arange"],
)
def test_what_has_no_name_is_found_by_the_debug_mode(name: str, run: Callable[[torch.Tensor], Any]) -> None:
    """Their results' sizes depend on values on the device, so that they have to wait; and they are in no table."""
    x = x_of([1.0, 2.0, 3.0])
    run(x)
    assert not table.is_known(name)
    (row,) = hunted(lambda: run(x))
    assert row["what"] == f"torch.{name}" and row["ms_per_step"] >= 0 and row["per_step"] == 1
    line = run.__code__.co_firstlineno
    assert lines((row,)) == {line} == lines(marked(lambda: run(x)))


def test_the_mode_before_is_the_mode_after() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with SyncMarks():
            torch.ones(1, device=DEVICE).item()
        assert torch.cuda.get_sync_debug_mode() == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_log_line_is_blamed_for_what_lightning_reads() -> None:
    import lightning as L

    from tests.models import loader
    from tests.models import trainer as quiet_trainer

    class Logs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Hunts(L.Callback):
        rows: tuple[Row, ...] = ()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.sites, self.hunt = LogSites(module).__enter__(), SyncHunt(DEVICE).__enter__()
            if batch_idx == 6:
                self.hunt.__exit__()
                self.sites.__exit__()
                self.rows = self.hunt.rows(4, self.sites)

    hunts = Hunts()
    quiet_trainer(accelerator="gpu", callbacks=[hunts]).fit(Logs(), loader(64, batch_size=8))
    (row,) = hunts.rows
    assert row["what"] == "self.log(prog_bar=True)" and row["per_step"] >= 1
    assert lines((row,)) == {Logs.training_step.__code__.co_firstlineno + 2}
