"""However a fit ends, the Trainer is the user's own again; and what comes after fit computes what fit computed."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from fastloop import FastLoop
from tests.models import trainer
from tests.runs import feed_on_cpu

pytestmark = pytest.mark.short

RUNGS = {
    "workers": {"enabled": True, "count": 1},
    "batch": {"enabled": True, "micro_batch": 4},
    "amp": {"enabled": True},
    "layout": {"enabled": True},
    "fused": {"enabled": True},
}
CONFIG = {"watch": {"warmup_steps": 1}, "rungs": RUNGS}


def no_trouble(batch_idx: int) -> None:
    """The training_step goes well."""


class Images(L.LightningModule):
    """A convolution and a linear layer; remembers what each stage computed and in which precision."""

    def __init__(self, trouble: Callable[[int], Any] = no_trouble) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
        self.trouble = trouble
        self.losses: list[float] = []
        self.seen: dict[str, list[Any]] = {}

    def _loss(self, batch: Any, stage: str) -> torch.Tensor:
        out = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(out.float(), batch[1])
        channels_last = self.net[0].weight.is_contiguous(memory_format=torch.channels_last)
        self.seen.setdefault(stage, []).append((str(out.dtype), channels_last, float(loss.detach())))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trouble(batch_idx)
        loss = self._loss(batch, "train")
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, self.trainer.state.fn.value)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch, "predict")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def images(samples: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    return DataLoader(TensorDataset(torch.randn(samples, 3, 8, 8, generator=generator), labels), batch_size=8)


def settings(made: L.Trainer, module: Any) -> dict[str, Any]:
    """Everything the rungs change, and the places where something could stay behind."""
    strategy = made.strategy
    return {
        "strategy": type(strategy),
        "attributes": sorted(vars(strategy)),
        "precision": id(strategy.precision_plugin),
        "profiler": id(made.profiler),
        "accumulate": made.accumulate_grad_batches,
        "limit": made.limit_train_batches,
        "val_check_interval": made.val_check_interval,
        "methods": sorted(set(vars(module)) & set(dir(type(module)))),
        "ours": [name for name, value in vars(made).items() if type(value).__module__.startswith("fastloop")],
    }


def changed(made: L.Trainer, module: Any, before: dict[str, Any]) -> dict[str, Any]:
    after = settings(made, module)
    after["flags"] = [(group["fused"], group["foreach"]) for opt in made.optimizers for group in opt.param_groups]
    after["layout"] = [weight.is_contiguous() for weight in module.parameters()]
    wanted = {**before, "flags": [(None, None)] * len(after["flags"]), "layout": [True] * len(after["layout"])}
    # Lightning resets these themselves on every fit; the values are compared above
    return {name: (wanted[name], after[name]) for name in after if after[name] != wanted[name]}


class Raises(Callback):
    """Fails at one of Lightning's hooks."""

    def __init__(self, hook: str, error: type[BaseException] = RuntimeError) -> None:
        self.hook, self.on = hook, True

        def fail(*args: Any, **kwargs: Any) -> None:
            if self.on:
                raise error("on purpose")

        setattr(self, hook, fail)


def boom(error: type[BaseException]) -> Callable[[int], Any]:
    def trouble(batch_idx: int) -> None:
        if batch_idx == 2:
            raise error("on purpose")

    return trouble


@pytest.mark.parametrize(
    ("trouble", "hook", "error"),
    [
        (boom(RuntimeError), None, RuntimeError),
        (boom(KeyboardInterrupt), None, SystemExit),
        (None, "on_validation_start", RuntimeError),
        (None, "on_fit_start", RuntimeError),
        (None, "on_train_start", RuntimeError),
        (None, "on_train_end", RuntimeError),
        (None, "setup", RuntimeError),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_fit_that_raises_leaves_nothing_behind(
    trouble: Callable[[int], Any] | None, hook: str | None, error: type[BaseException], tmp_path: Path
) -> None:
    module, loop = Images(*([trouble] if trouble else [])), FastLoop(CONFIG, out=tmp_path / "run", quiet=True)
    raiser = Raises(hook or "on_predict_start")
    made = trainer(callbacks=[loop, raiser], num_sanity_val_steps=0)
    before = settings(made, module)
    with pytest.raises(error, match="1" if error is SystemExit else "on purpose"):
        made.fit(module, images(), images())
    assert changed(made, module, before) == {}
    trained = bool(module.losses)
    assert (loop.measurement is not None and loop.measurement.partial) == trained
    assert (tmp_path / "run" / "measurement.json").exists() == trained

    module.trouble, raiser.on = no_trouble, False
    made.fit_loop.max_epochs = made.current_epoch + 1
    made.fit(module, images(), images())
    assert changed(made, module, before) == {}
    assert loop.measurement is not None and not loop.measurement.partial and loop.measurement.total_steps == 4
    assert all(verdict.took for verdict in loop.verdicts), loop.verdicts


def test_where_on_exception_never_reaches_us_the_next_stage_cleans_up() -> None:
    """Lightning stops calling callbacks when one of them raises in on_exception, and calls no teardown."""
    raiser, module, loop = Raises("on_exception", ValueError), Images(boom(RuntimeError)), FastLoop(CONFIG, quiet=True)
    made = trainer(callbacks=[raiser, loop])
    before = settings(made, module)
    with pytest.raises(ValueError, match="on purpose"):
        made.fit(module, images())
    assert "strategy" in changed(made, module, before), "Lightning called us after all: the test tests nothing"
    raiser.on, module.trouble = False, no_trouble
    made.fit(module, images())
    assert changed(made, module, before) == {}
    assert all(verdict.took for verdict in loop.verdicts), f"planned on what the last fit left behind: {loop.verdicts}"
    assert loop.measurement is not None and loop.measurement.total_steps == 4


def test_an_exception_inside_fit_reaches_the_user_even_if_ours_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FastLoop(CONFIG, quiet=True)
    monkeypatch.setattr(loop, "_measure", lambda trainer, raised: 1 / 0)
    made = trainer(callbacks=[loop])
    with pytest.raises(RuntimeError, match="on purpose"), pytest.warns(UserWarning, match="ZeroDivisionError"):
        made.fit(Images(boom(RuntimeError)), images())
    assert type(made.strategy).__name__ == "SingleDeviceStrategy"


def test_stages_after_fit_compute_what_validation_in_fit_computed() -> None:
    torch.manual_seed(0)
    module, loop = Images(), FastLoop(CONFIG, quiet=True)
    made = trainer(callbacks=[loop], num_sanity_val_steps=0)
    before = settings(made, module)
    made.fit(module, images(), images())
    made.validate(module, images(), verbose=False)
    made.test(module, images(), verbose=False)
    made.predict(module, images())
    assert {kind for kind, _, _ in module.seen["fit"]} == {"torch.bfloat16"}
    assert all(channels_last for _, channels_last, _ in module.seen["fit"])
    assert module.seen["validate"] == module.seen["test"] == module.seen["predict"] == module.seen["fit"]
    assert changed(made, module, before) == {}
    assert loop.measurement is not None and loop.measurement.total_steps == 4, "a later stage forgot the fit"
    plain = trainer()
    plain.validate(module, images(), verbose=False)
    assert module.seen["validate"][4:] != module.seen["fit"], "the rungs make no difference: nothing was compared"


def test_validate_alone_is_not_reported(tmp_path: Path) -> None:
    loop = FastLoop(CONFIG, out=tmp_path / "run")
    trainer(callbacks=[loop]).validate(Images(), images(), verbose=False)
    assert loop.measurement is None and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
@pytest.mark.parametrize("config", [None, CONFIG], ids=["watching", "rungs"])
def test_a_profiler_of_the_user_is_wrapped_and_given_back(kind: type, config: Any, tmp_path: Path) -> None:
    def actions(loop: FastLoop | None) -> set[str]:
        profiler = kind(dirpath=tmp_path, filename="profile")
        made = trainer(profiler=profiler, callbacks=[loop] if loop else [])
        made.fit(Images(), images())
        assert made.profiler is profiler
        report = (tmp_path / "fit-profile.txt").read_text()
        found = re.findall(r"Profile stats for: (\S+)" if kind is AdvancedProfiler else r"(?m)^\|\s+(\S+)\s+\|", report)
        return {name.replace("FastLoop_", "") for name in found if not name.startswith("[Callback]")}

    plain = actions(None)
    assert {"run_training_batch", "[_TrainingEpochLoop].train_dataloader_next"} <= plain
    added = {"[fastloop]backward"} if config else set()  # of the pieces of a batch, inside training_step
    assert actions(FastLoop(config, quiet=True)) == plain | added


def test_a_profiler_by_name_keeps_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(profiler="simple", callbacks=[FastLoop(quiet=True)])
    made.fit(Images(), images())
    assert "[_TrainingEpochLoop].train_dataloader_next" in made.profiler.summary()


class CopiesTheTrainer(Callback):
    """What tuners and some loggers do in the middle of a fit."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            found = next(callback for callback in trainer.callbacks if isinstance(callback, FastLoop))
            vars(found).pop("log", None), vars(found).pop("log_dict", None)  # Lightning's, bound to the module
            parts = (trainer.profiler, trainer.strategy, found)
            self.copies += [copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))]


@pytest.mark.parametrize("config", [None, {"rungs": {"amp": {"enabled": True}}}], ids=["watching", "rungs"])
def test_copies_and_pickles_made_during_fit_are_unwatched(config: Any) -> None:
    copies = CopiesTheTrainer()
    made = trainer(callbacks=[FastLoop(config, quiet=True), copies])
    made.fit(Images(), images())
    assert len(copies.copies) == 2
    for profiler, strategy, loop in copies.copies:
        assert type(profiler).__name__ == "PassThroughProfiler"
        assert "fastloop" not in vars(strategy) and isinstance(strategy, L.pytorch.strategies.SingleDeviceStrategy)
        again = Images()
        trainer(callbacks=[loop]).fit(again, images())
        assert loop.measurement is not None and loop.measurement.total_steps == 4


class Hooked(Images):
    """Its hook runs ahead of time, behind a feed."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class CopiesAll(Callback):
    """A worker that is spawned for a collate function of the datamodule gets all of this."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            found = (trainer.fit_loop, trainer.strategy, trainer.precision_plugin, pl_module)
            self.copies += [copy.deepcopy(found), pickle.loads(pickle.dumps(found))]


def test_copies_of_the_loop_and_its_loaders_have_no_part_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own can be copied and pickled while batches are loaded."""
    feed_on_cpu(monkeypatch)
    copies = CopiesAll()
    rungs = {"host": {"enabled": True}, "workers": {"enabled": True, "count": 1}, "prefetch": {"enabled": True}}
    loop = FastLoop({"rungs": rungs}, quiet=True)
    made = trainer(callbacks=[loop, copies])
    made.fit(Hooked(), images())
    assert {step.rung for step in loop.plan.planned} == set(rungs)
    assert len(copies.copies) == 2
    for fit_loop, _, precision, module in copies.copies:
        for part in (fit_loop.epoch_loop, fit_loop.epoch_loop.automatic_optimization, precision, module):
            assert not any(isinstance(each, functools.partial) for each in vars(part).values())
        (loader,) = fit_loop._combined_loader.flattened
        assert type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler


@pytest.mark.parametrize("fitted", [False, True], ids=["before fit", "after fit"])
def test_the_whole_trainer_can_be_copied(fitted: bool) -> None:
    for config in (None, CONFIG):
        for strategy in ("auto", "fastloop"):
            module = Images()
            made = trainer(callbacks=[FastLoop(config, quiet=True)], strategy=strategy)
            if fitted:
                made.fit(module, images())
            twin = copy.deepcopy(made)
            assert type(twin.strategy) is type(made.strategy)
            again = Images()
            twin.fit_loop.max_epochs = 2
            twin.fit(again, images())
            assert len(again.losses) == (4 if fitted else 8) * (2 if config else 1)


def test_a_callback_pickles_before_and_after_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)  # Inductor would take ten seconds
    loop = FastLoop("full", quiet=True)
    fresh = pickle.loads(pickle.dumps(loop))
    assert fresh.config == loop.config and fresh.on_train_batch_start is None
    made = trainer(callbacks=[loop])
    made.fit(Images(), images())
    vars(loop).pop("log", None), vars(loop).pop("log_dict", None)
    again = pickle.loads(pickle.dumps(loop))
    assert again.measurement == loop.measurement and again.verdicts == loop.verdicts and len(again.plan.steps) > 5
