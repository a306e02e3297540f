"""Each kind of synchronisation by the line of this very file, and nothing where there is none."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from fastloop.evidence.sync import hunt as syncs
from fastloop.evidence.sync.hunt import LogSites, SyncHunt
from fastloop.evidence.sync.table import ADVICE
from tests.models import Regression, loader
from tests.models import trainer as quiet_trainer

Row = Mapping[str, Any]
X = torch.tensor([1.0, 2.0, 3.0])
S = torch.tensor(2.0)
ONE = torch.tensor(1)
MASK = X > 1


def hunted(run: Callable[[], Any], steps: int = 1) -> tuple[Row, ...]:
    hunt = SyncHunt()
    with hunt:
        for _ in range(steps):
            run()
    return hunt.tally.rows(steps)


def here(line: int, row: Row) -> bool:
    return str(row["where"]).endswith(f"evidence/sync/test_hunt.py:{line}")


KINDS = {
    ".item()": lambda: S.item(),
    ".tolist()": lambda: X.tolist(),
    "bool of a tensor": lambda: 1 if S > 1 else 0,
    "int(tensor)": lambda: int(S),
    "float(tensor)": lambda: float(S),
    "complex(tensor)": lambda: complex(S),
    "a tensor as index or size": lambda: [1, 2][ONE],
    ".cpu()": lambda: X.cpu(),
    ".to('cpu')": lambda: X.to("cpu"),
    ".numpy()": lambda: X.numpy(),
    "np.asarray(tensor)": lambda: np.asarray(X),
    "nonzero": lambda: X.nonzero(),
    "masked_select": lambda: torch.masked_select(X, MASK),
    "boolean mask": lambda: X[MASK],
    "assignment by boolean mask": lambda: X.clone().__setitem__(MASK, torch.ones(2)),
    "index by a 0-d tensor": lambda: X[ONE],
    "a tensor as slice bound": lambda: X[:ONE],
    "unique": lambda: torch.unique(X),
    "printing a tensor": lambda: repr(X),
    "a tensor in an f-string": lambda: f"{S:.2f}",
    ".is_nonzero()": lambda: S.is_nonzero(),
    "torch.equal": lambda: torch.equal(X, X),
    "torch.allclose": lambda: torch.allclose(X, X),
    "x in tensor": lambda: 2.0 in X,
    "torch.where(mask)": lambda: torch.where(MASK),
    "bincount": lambda: torch.bincount(ONE[None]),
    "one_hot": lambda: nn.functional.one_hot(ONE[None]),
    "repeat_interleave": lambda: X.repeat_interleave(ONE.repeat(3)),
    "torch.tensor of tensors": lambda: torch.tensor([S, S]),
    "torch.tensor on the device": lambda: torch.tensor(1.0, device=X.device),
    "linalg with an error check": lambda: torch.linalg.inv(torch.eye(2)),
}


@pytest.mark.parametrize("what", KINDS)
def test_every_kind_is_named_with_its_line_and_what_to_write_instead(what: str) -> None:
    run = KINDS[what]
    (row,) = hunted(run, steps=3)
    assert here(run.__code__.co_firstlineno, row), row
    assert row["what"] == what and row["per_step"] == 1 and row["ms_per_step"] is None
    assert row["instead"] == ADVICE[what] and len(row["instead"]) > 10


def test_other_ways_to_write_the_same() -> None:
    assert [row["what"] for row in hunted(lambda: (X.unique(), torch.argwhere(X), torch.unique_consecutive(X)))] == [
        "unique, nonzero"
    ]
    assert hunted(lambda: print(S, file=io.StringIO()))[0]["what"] == "printing a tensor"
    assert hunted(lambda: max(S, ONE))[0]["what"] == "bool of a tensor"
    assert hunted(lambda: X[[True, False, True]])[0]["what"] == "boolean mask"
    assert hunted(lambda: X[None, MASK])[0]["what"] == "boolean mask"
    assert hunted(lambda: range(ONE))[0]["what"] == "a tensor as index or size"


@pytest.mark.parametrize(
    "run",
    [
        lambda: (X.shape, X.dtype, X.device, X.ndim, X.size(), X.numel(), X.is_cuda, len(X), X.requires_grad),
        lambda: (X[0], X[:2], X[None], X[..., 0], X[torch.tensor([0, 1])], X[[0, 2]]),
        lambda: torch.where(MASK, X, 0.0).sum() / MASK.sum(),
        lambda: X.clone().masked_fill_(MASK, 0.0),
        lambda: X.clone().__setitem__(MASK, 0.0),
        lambda: X.to(X.device),
        lambda: X.to(torch.float64),
        lambda: X.to("cpu", non_blocking=True),
        lambda: torch.tensor(1.0),
        lambda: torch.zeros(3, device=X.device),
        lambda: torch.as_tensor(X, device=X.device),
        lambda: nn.functional.one_hot(ONE[None], 3),
        lambda: X.repeat_interleave(2),
        lambda: list(X),
        lambda: X is None,
        lambda: hash(X),
        lambda: nn.utils.clip_grad_norm_([nn.Parameter(X)], 1.0),
    ],
    ids=[
        "metadata",
        "indices",
        "where",
        "masked_fill",
        "scalar_set",
        "same_device",
        "dtype",
        "non_blocking",
        "host_tensor",
        "factory",
        "as_tensor",
        "one_hot",
        "repeat",
        "iterate",
        "identity",
        "hash",
        "clipping",
    ],
)
def test_what_does_not_wait_is_not_named(run: Callable[[], Any]) -> None:
    assert hunted(run) == ()


def test_a_training_step_without_synchronizations_names_none() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(network.parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.randn(6, 4)), torch.randint(0, 2, (6,))).backward()
        optimizer.step()

    assert hunted(step, steps=3) == ()

    def waits() -> None:
        step()
        network[0].weight.sum().item()

    assert [row["what"] for row in hunted(waits)] == [".item()"]


def test_a_copy_and_what_follows_it_on_the_line_are_one() -> None:
    assert [(row["what"], row["per_step"]) for row in hunted(lambda: X.cpu().numpy())] == [(".cpu()", 1)]
    assert hunted(lambda: (X.cpu(), S.item()))[0]["per_step"] == 2


def test_a_loader_in_this_process_is_no_step() -> None:
    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(float(index)).item() + X.sum().item()

    assert hunted(lambda: list(DataLoader(Samples(), batch_size=2, shuffle=True))) == ()
    assert hunted(lambda: Samples()[0])[0]["per_step"] == 2  # what was not counted above


# -- the backward -----------------------------------------------------------------------------------------------------


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad.sum().item()
        return grad * 2


def test_the_backward_is_hunted_too() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: print(grad.sum(), file=io.StringIO()))
    rows = hunted(lambda: Reads.apply(x).sum().backward())
    assert {row["what"] for row in rows} == {".item()", "printing a tensor"}
    item = next(row for row in rows if row["what"] == ".item()")
    assert here(Reads.backward.__code__.co_firstlineno + 2, item)
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]


def test_arguments_of_backward_arrive() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with SyncHunt():
        out = x * y
        out.backward(torch.tensor([1.0, 3.0]), True, inputs=[x])
        out.backward(gradient=torch.ones(2), inputs=[y])
    assert x.grad is not None and y.grad is not None
    assert x.grad.tolist() == [1.0, 3.0] and y.grad.tolist() == [1.0, 1.0]


# -- nothing stays ----------------------------------------------------------------------------------------------------


def test_explicit_synchronizations_are_seen_and_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append(1))
    owners = syncs._list_explicit()
    assert len(owners) >= 4
    before = [vars(owner).get(name) for owner, name in owners]
    shown, filters = warnings.showwarning, list(warnings.filters)
    hunt = SyncHunt()
    with pytest.raises(ZeroDivisionError), hunt:
        assert all(vars(owner).get(name) is not was for (owner, name), was in zip(owners, before, strict=True))
        torch.cuda.synchronize()
        raise ZeroDivisionError
    assert calls == [1] and [row["what"] for row in hunt.tally.rows(1)] == ["synchronize()"]
    assert [vars(owner).get(name) for owner, name in owners] == before
    assert warnings.showwarning is shown and warnings.filters == filters
    assert torch._C._len_torch_function_stack() == 0
    S.item()
    assert len(hunt.tally.rows(1)) == 1


def test_a_hunt_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), SyncHunt(torch.device("cuda")):
        pass
    assert torch.cuda.synchronize is synchronize and torch._C._len_torch_function_stack() == 0


def test_an_error_of_the_call_passes_and_an_error_of_the_hunt_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError), SyncHunt():
        X.item()
    monkeypatch.setattr(syncs, "find_site", lambda _: 1 / 0)
    with SyncHunt() as hunt:
        assert S.item() == 2.0
    assert hunt.tally.rows(1) == ()


def trained(hunt: SyncHunt | None = None, lr: float = 0.1) -> list[torch.Tensor]:
    """Weights after four steps, in which a number is read."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    with hunt or contextlib.nullcontext():
        for _ in range(4):
            optimizer.zero_grad()
            loss = network(torch.randn(3, 4)).square().mean()
            loss.item()
            loss.backward()
            optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def test_results_stay_the_same_bit_for_bit() -> None:
    hunt = SyncHunt()
    plain, hunted_, nudged = trained(), trained(hunt), trained(lr=0.1 + 1e-6)
    assert [(row["what"], row["per_step"]) for row in hunt.tally.rows(4)] == [(".item()", 1)], "it hunted"
    assert len(plain) == 4 and all(torch.equal(a, b) for a, b in zip(plain, hunted_, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, nudged, strict=True)), "which would have been seen"


def test_compiled_code_is_looked_into_under_force_eager() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    compiled = torch.compile(step, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        (row,) = hunted(lambda: compiled(X))
    assert row["what"] == "bool of a tensor" and here(step.__code__.co_firstlineno + 1, row)
    torch._dynamo.reset()


# -- CUDA's rules, with tensors that say they are there ---------------------------------------------------------------


def test_on_cuda_host_tensors_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    with SyncHunt(torch.device("cuda")) as hunt:
        _ = (S.item(), X.tolist(), X[MASK], float(S), X.cpu(), torch.tensor([1.0]), X.unique())
    assert hunt.tally.rows(1) == ()
    with SyncHunt(torch.device("cuda")) as hunt:
        warned(X)  # what the debug mode says counts, whatever the function
        warnings.warn("called a synchronizing CUDA operation (planted)", stacklevel=1)
    rows = hunt.tally.rows(1)
    assert [row["what"] for row in rows] == ["torch.warned", "a synchronization"]
    assert rows[0]["ms_per_step"] >= 0 and rows[1]["ms_per_step"] is None


def warned(x: torch.Tensor) -> torch.Tensor:
    """As a torch function that nobody knows of."""
    if torch.overrides.has_torch_function((x,)) or torch._C._len_torch_function_stack():
        return torch.overrides.handle_torch_function(warned, (x,), x)
    warnings.warn("called a synchronizing CUDA operation (planted)", stacklevel=1)
    return x


# -- Lightning --------------------------------------------------------------------------------------------------------


class Quiet(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class Logs(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        self.log_dict({"a": loss, "b": loss}, prog_bar=False)
        self.log("number", 3.0)
        return loss


class Hunts(L.Callback):
    """Hunts in steps 2 to 6, as the bridge does."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.open = contextlib.ExitStack()
            self.sites = self.open.enter_context(LogSites(module))
            self.hunt = self.open.enter_context(SyncHunt(torch.device("cpu")))
        if batch_idx == 6:
            self.open.close()
            self.rows = self.hunt.rows(4, self.sites)


def lightning_rows(module: Any, **settings: Any) -> tuple[Row, ...]:
    hunts = Hunts()
    callbacks = [hunts, *settings.pop("callbacks", ())]
    quiet_trainer(**{"max_epochs": 1, **settings}, callbacks=callbacks).fit(module, loader(64, batch_size=8))
    return hunts.rows


def test_what_lightning_reads_for_a_log_line_is_blamed_on_that_line() -> None:
    rows = lightning_rows(Logs())
    first = Logs.training_step.__code__.co_firstlineno
    shown = next(row for row in rows if row["what"] == "self.log(prog_bar=True)")
    assert here(first + 2, shown) and shown["per_step"] >= 1 and "prog_bar" in shown["instead"]
    number = next(row for row in rows if row["what"] == "self.log of a number")
    assert here(first + 4, number)
    assert not any(here(first + 3, row) for row in rows)  # neither shown nor, in these steps, written
    assert not any("trainer.fit" in str(row) or here(lightning_rows.__code__.co_firstlineno + 2, row) for row in rows)


def test_a_quiet_module_is_quiet_under_lightning() -> None:
    assert lightning_rows(Quiet()) == ()
    (row,) = lightning_rows(Regression())  # which records its losses
    assert row["what"] == "float(tensor)" and str(row["where"]).startswith("tests/models.py:")


def test_a_logger_reads_what_it_writes(tmp_path: Any) -> None:
    from lightning.pytorch.loggers import CSVLogger

    rows = lightning_rows(Logs(), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    line = Logs.training_step.__code__.co_firstlineno + 3
    (row,) = [row for row in rows if here(line, row)]
    assert row["what"] == "self.log to a logger" and row["per_step"] == 2


class OwnCheckpoint(ModelCheckpoint):
    """As people extend it."""

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"every_n_train_steps": 2}, "ModelCheckpoint(every_n_train_steps=2)"),
        ({"every_n_train_steps": 1, "monitor": "shown"}, "ModelCheckpoint(every_n_train_steps=1)"),
    ],
    ids=["saves", "monitors"],
)
def test_what_a_callback_of_lightnings_reads_is_the_callbacks(given: dict[str, Any], name: str, tmp_path: Any) -> None:
    saves = ModelCheckpoint(tmp_path, **given)
    rows = lightning_rows(Logs(), callbacks=[saves], enable_checkpointing=True)
    (row,) = [row for row in rows if "callback" in row["what"]]
    assert (row["where"], row["what"]) == (name, "Lightning callback") and row["per_step"] >= 0.5
    assert not any("model_checkpoint.py" in row["where"] for row in rows) and "every_n_train_steps" in row["instead"]


def test_one_that_a_user_extends_is_the_users_line(tmp_path: Any) -> None:
    saves = OwnCheckpoint(tmp_path, every_n_train_steps=1, monitor="shown")
    rows = lightning_rows(Logs(), callbacks=[saves], enable_checkpointing=True)
    line = OwnCheckpoint._save_topk_checkpoint.__code__.co_firstlineno + 1
    assert any(here(line, row) and row["what"] == "Lightning callback" for row in rows), rows


def test_sync_dist_is_the_log_lines(tmp_path: Any) -> None:
    from lightning.fabric.utilities.distributed import _sync_ddp
    from lightning.pytorch.trainer.connectors.logger_connector import result

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        meta = result._Metadata(fx="training_step", name="loss", on_step=True, on_epoch=False)
        meta.sync = result._Sync(_should=True, fn=_sync_ddp)
        metric = result._ResultMetric(meta, is_tensor=True)
        rows = hunted(lambda: metric.update(S, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert [row["what"] for row in rows] == ["self.log(sync_dist=True)"] and "on_epoch" in rows[0]["instead"]
    assert here(test_sync_dist_is_the_log_lines.__code__.co_firstlineno + 9, rows[0])


def test_without_log_sites_the_line_is_lightnings() -> None:
    hunts = Hunts()
    hunt = SyncHunt()
    hunts.rows = ()

    class Plain(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                hunt.__enter__()
            if batch_idx == 3:
                hunt.__exit__()

    quiet_trainer(max_epochs=1, callbacks=[Plain()]).fit(Logs(), loader(64, batch_size=8))
    row = next(row for row in hunt.tally.rows(2) if "prog_bar" in row["what"])
    assert row["what"] == "self.log(prog_bar=True) of shown" and row["where"].startswith("lightning/")
