"""The short way through Lightning's loop: whatever anybody can look at, at any hook, is what it is on the long one."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, IterableDataset

from fastloop.bridge.apply.loop import known_loops
from fastloop.bridge.apply.loop.flat_loop import FlatLoop, HookCalls
from fastloop.bridge.apply.loop.known_loops import HOOKS_PER_BATCH
from tests import models
from tests.rungs.fits import evidence, fit, loop, seeded

THIN: dict[str, Any] = {"host": {"gc_every_steps": None, "step_graph": False}}
OTHER_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
)


def read(value: Any) -> Any:
    """What can be compared of anything a hook is handed or a checkpoint holds."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.detach().tolist()
    if isinstance(value, dict):
        return {name: read(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [read(each) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


def look(trainer: L.Trainer) -> Any:
    loop, connector = trainer.fit_loop, trainer._logger_connector
    return copy.deepcopy(
        {
            "loops": loop.state_dict(),
            "at": (trainer.global_step, trainer.current_epoch, trainer.is_last_batch, str(trainer.state.stage)),
            "hook": trainer.lightning_module._current_fx_name,
            "logs": (
                connector._first_loop_iter,
                loop.epoch_loop._results.batch is None,
                read(trainer.callback_metrics),
            ),
            "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            "grads": [None if each.grad is None else read(each.grad) for each in trainer.lightning_module.parameters()],
        }
    )


def hears(base: type, hooks: tuple[str, ...], of_module: bool) -> Any:
    """A subclass that notes what it sees at each of these hooks."""

    def note(name: str) -> Any:
        def hook(self: Any, *args: Any, **more: Any) -> None:
            trainer = self.trainer if of_module else args[0]
            trainer.seen.append((base.__name__, name, read(args if of_module else args[2:]), read(more), look(trainer)))

        return hook

    return type(f"Hears{base.__name__}", (base,), {name: note(name) for name in hooks})


class Kept(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        if not any(name.startswith("fastloop") for name in metrics):  # what we add for the user to see
            self.rows.append((step, dict(metrics)))


class Logs(models.Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "more": batch_idx}


class Scheduled(Logs):
    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.interval == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return [optimizer], [{"scheduler": plateau, "monitor": "loss_step", "interval": "step"}]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


class Fails(models.Regression):
    """Raises in one of its hooks, at the third batch."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        super().__init__()
        self.count, self.error = 0, error
        own = getattr(self, hook)

        def fail(*args: Any, **more: Any) -> Any:
            self.count += 1
            if self.count == 3:
                raise self.error("planted")
            return own(*args, **more)

        setattr(self, hook, fail)


class Skips(models.Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Nothing(models.Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class Manual(models.Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OwnStep(models.Regression):
    """Takes part in everything that a batch goes through."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device([batch[0] + 1, batch[1]], device, dataloader_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2:
            optimizer_closure()  # no step
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **more: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")

    def backward(self, loss: torch.Tensor, *args: Any, **more: Any) -> None:
        (loss * 2).backward()


class IgnoresClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return None


class LBFGS(torch.optim.LBFGS):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, max_iter=4)


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = args[-1] == 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (list(pair) for pair in models.pairs(40))


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return models.loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class Takes(models.Regression):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class OwnHandler(models.Regression):
    def _apply_batch_transfer_handler(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return super()._apply_batch_transfer_handler([batch[0] + 1, batch[1]], device, dataloader_idx)


class Sometimes(Manual):
    """Optimizes by hand in every other batch, as a callback says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return models.Regression.training_step(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)


class Says(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.automatic_optimization = batch_idx % 2 == 0


class Sets(L.Callback):
    """Sets a function of one of Lightning's objects, or of the module, which is noted from there on."""

    def __init__(self, path: str, name: str, batch: int | None = None) -> None:
        self.path, self.name, self.batch = path, name, batch

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.batch is None:
            self._set(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == self.batch and trainer.current_epoch == 0:
            self._set(trainer, pl_module)

    def _set(self, trainer: Any, pl_module: Any) -> None:
        owner = operator.attrgetter(self.path)(trainer)
        own = getattr(owner, self.name)

        def noted(*args: Any, **more: Any) -> Any:
            pl_module.losses.append((self.name, *(type(each.grad_fn) for each in args if hasattr(each, "grad_fn"))))
            return own(*args, **more)

        setattr(owner, self.name, noted)


class Listens(SimpleProfiler):
    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self.noted = noted

    def start(self, action_name: str) -> None:
        super().start(action_name)
        if action_name.startswith("[LightningModule]"):
            self.noted.append(action_name)


class Profiles(L.Callback):
    """From the third batch on."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 2:
            trainer.profiler = Listens(pl_module.losses)


class ValidatesLate(models.Regression):
    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]

    def on_train_epoch_end(self) -> None:
        self.validation_step = lambda batch, batch_idx: self.losses.append(-1.0)  # type: ignore[method-assign]


def sets(path: str, name: str, batch: int | None = None, **more: Any) -> Callable[[], Case]:
    return lambda: {"module": models.Regression(), "more": [Sets(path, name, batch)], **more}


Case = dict[str, Any]
CASES: dict[str, tuple[Callable[[], Case], bool]] = {
    "plain": (lambda: {"module": models.Regression()}, True),
    "logs": (lambda: {"module": Logs(), "logger": Kept(), "log_every_n_steps": 3}, True),
    "accumulates": (lambda: {"module": Scheduled("step"), "accumulate_grad_batches": 3}, True),
    "epoch schedule": (lambda: {"module": Scheduled("epoch"), "gradient_clip_val": 0.1}, True),
    "plateau": (lambda: {"module": Scheduled("plateau"), "gradient_clip_val": 0.1}, True),
    "validates": (lambda: {"module": Logs(), "val": models.loader(16), "val_check_interval": 3}, True),
    "limits": (lambda: {"module": Logs(), "limit_train_batches": 5, "max_steps": 7}, True),
    "stops": (lambda: {"module": Logs(), "logger": Kept(), "more": [Stops()], "min_epochs": 1}, True),
    "adam, dropout": (lambda: {"module": models.Regression(torch.optim.Adam, dropout=0.3)}, True),
    "several closures": (lambda: {"module": models.Regression(LBFGS)}, True),
    "no closure": (lambda: {"module": models.Regression(IgnoresClosure)}, True),
    "own step": (lambda: {"module": OwnStep()}, True),
    "skips steps": (lambda: {"module": Nothing()}, True),
    "mixed precision": (lambda: {"module": models.Regression(), "precision": "bf16-mixed"}, True),
    "data module": (lambda: {"module": models.Regression(), "train": Data()}, True),
    "stream": (lambda: {"module": Logs(), "train": DataLoader(Stream(), batch_size=8)}, True),
    "averages": (lambda: {"module": models.Regression(), "more": [StochasticWeightAveraging(0.1, 1)]}, True),
    "skips the epoch": (lambda: {"module": Skips()}, False),
    "private method": (lambda: {"module": OwnHandler()}, False),
    "changed loop": (sets("fit_loop.epoch_loop", "_save_loggers_on_train_batch_end"), False),
    "own context": (sets("precision_plugin", "train_step_context"), True),
    "context inside": (sets("precision_plugin", "forward_context"), True),
    "own clipping": (sets("precision_plugin", "_clip_gradients"), True),
    "backward set late": (sets("lightning_module", "backward", 3), True),
    "sometimes manual": (lambda: {"module": Sometimes(), "more": [Says()]}, True),
    "profiler comes": (lambda: {"module": models.Regression(), "more": [Profiles()]}, True),
    "validates late": (lambda: {"module": ValidatesLate(), "val": models.loader(16)}, True),
    "manual": (lambda: {"module": Manual()}, True),
    "iterator": (lambda: {"module": Takes()}, False),
    **{
        f"{error.__name__} in {hook}": (lambda hook=hook, error=error: {"module": Fails(hook, error)}, True)  # type: ignore[misc]
        for hook, error in (
            ("training_step", ValueError),
            ("training_step", KeyboardInterrupt),
            ("backward", ValueError),
            ("optimizer_step", ValueError),
            ("on_train_batch_end", ValueError),
        )
    },
}


def run(case: Case, rungs: Any, hooks: str, ckpt: Any = None) -> Any:
    """What could be seen of one fit."""
    case = dict(case)
    module, train, val, more = case.pop("module"), case.pop("train", None), case.pop("val", None), case.pop("more", [])
    if hooks in ("module", "both"):
        module.__class__ = hears(type(module), tuple(set(HOOKS_PER_BATCH) - set(vars(type(module)))), True)
    callbacks = [
        hears(L.Callback, (*HOOKS_PER_BATCH, *OTHER_HOOKS) if hooks in ("callback", "both") else OTHER_HOOKS, False)()
    ]
    watcher = None if rungs is None else loop(rungs)
    trainer: Any = models.trainer(
        callbacks=[*callbacks, *more, *([watcher] if watcher else [])], **{"max_epochs": 2, **case}
    )
    trainer.seen, raised = [], None
    torch.manual_seed(1)
    try:
        trainer.fit(module, models.loader() if train is None else train, val, ckpt_path=ckpt)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raised = type(error), str(error), place.filename, place.lineno
    told = {
        "seen": trainer.seen,
        "raised": raised,
        "loops": trainer.fit_loop.state_dict(),
        "weights": read(module.state_dict()),
        "losses": module.losses,
        "optimizers": [read(each.state_dict()) for each in trainer.optimizers],
        "rows": [each.rows for each in trainer.loggers],
        "metrics": read(trainer.callback_metrics),
    }
    return told


def _seeded(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Batches that began on the short way."""
    began: list[int] = []
    begin = FlatLoop._begin_batch

    def counted(self: FlatLoop, batch: Any) -> None:
        began.append(1)
        begin(self, batch)

    monkeypatch.setattr(FlatLoop, "_begin_batch", counted)
    yield began


@pytest.mark.parametrize("hooks", ["none", "both"])
@pytest.mark.parametrize("name", CASES)
def test_all_that_can_be_seen_is_the_same(name: str, hooks: str, short: list[int]) -> None:
    make, is_flat = CASES[name]
    plain = run(_seeded(make), None, hooks)
    ours = run(_seeded(make), THIN, hooks)
    assert ours == plain and len(ours["seen"]) >= 2
    assert bool(short) is (is_flat and hooks == "none")


@pytest.mark.parametrize("hooks", ["callback", "module"])
def test_the_short_way_calls_all_hooks_but_one(hooks: str, short: list[int]) -> None:
    ours = run(_seeded(lambda: {"module": Logs()}), THIN, hooks)
    heard = {name for _, name, *_ in ours["seen"]}
    assert heard >= set(HOOKS_PER_BATCH)
    assert ours == run(_seeded(lambda: {"module": Logs()}), None, hooks)
    assert bool(short) is (hooks == "callback"), "on_train_batch_start of a module may end the epoch"


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (FlatLoop, "_end_advance", lambda self, fetcher: None),
        (FlatLoop, "_begin_batch", lambda self, batch: None),
        (HookCalls, "_run", lambda self, trainer, kind, owner, hook, name, args, kwargs: hook(*args, **kwargs)),
    ],
)
def test_a_difference_would_be_seen(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, planted: Any) -> None:
    def case() -> Case:
        return {"module": Logs(), "logger": Kept(), "log_every_n_steps": 3}

    plain = run(_seeded(case), None, "callback")
    monkeypatch.setattr(owner, name, planted)
    assert run(_seeded(case), THIN, "callback") != plain


def test_checkpoints_are_the_same_and_so_is_what_follows(tmp_path: Path, short: list[int]) -> None:
    """In the middle of an epoch; resumed once by the other kind of run, too."""

    def case(name: str, epochs: int) -> Case:
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False)
        return {"module": Scheduled("step"), "more": [saves], "enable_checkpointing": True, "max_epochs": epochs}

    saved: dict[str, Any] = {}
    for name, rungs in (("plain", None), ("ours", THIN)):
        run(_seeded(lambda name=name: case(name, 1)), rungs, "callback")  # type: ignore[misc]
        path = next((tmp_path / name).glob("*step=3*"))
        saved[name] = torch.load(path, weights_only=False)
        saved[name]["callbacks"] = None  # where the files are, and when
    assert read(saved["ours"]) == read(saved["plain"]) and short
    path = next((tmp_path / "plain").glob("*step=3*"))
    plain = run(_seeded(lambda: case("later", 2)), None, "callback", path)
    short.clear()
    assert run(_seeded(lambda: case("again", 2)), THIN, "callback", path) == plain
    assert len(short) == 2 * 8 - 3 - 1, "the first batch after a restart goes Lightning's way"


class KeepsAttributes(models.Regression):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "why",
    [
        "SimpleProfiler records every hook",
        "logs each call",
        "KeepsAttributes defines __setattr__",
        "fastloop does not know",
        "text",
        "is wrapped",
    ],
)
def test_what_is_unusual_is_refused(why: str, monkeypatch: pytest.MonkeyPatch, short: list[int]) -> None:
    more: dict[str, Any] = {"profiler": "simple"} if "Profiler" in why else {}
    if "logs" in why:
        monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda self, level: True)
    if why == "fastloop does not know":
        monkeypatch.setattr(known_loops, "KNOWN", {})
    if why == "is wrapped":  # the text that Python finds is that of the function inside
        own = L.Callback.on_train_batch_end
        monkeypatch.setattr(L.Callback, "on_train_batch_end", functools.wraps(own)(lambda *args: own(*args)))
    if why == "text":
        monkeypatch.setattr(known_loops, "_digest", _raise)
    module = seeded(KeepsAttributes if "defines" in why else models.Regression)
    watcher, trainer = fit(THIN, module, **more)
    assert why in evidence(watcher, "host")["loop_refused"] and not short
    assert trainer.global_step == 8


def _raise(*args: Any) -> str:
    raise OSError("no text")


def test_all_of_it_is_put_back() -> None:
    _, trainer = fit(THIN, seeded())
    epoch_loop = trainer.fit_loop.epoch_loop
    for owner in (epoch_loop, epoch_loop.automatic_optimization, trainer.precision_plugin):
        assert not [name for name, value in vars(owner).items() if callable(value) and hasattr(type(owner), name)]
