"""From a configuration to a Trainer, and one training in this process."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import sys
import warnings
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from fastloop.bridge import namespaces
from fastloop.bridge.fit import training
from fastloop.bridge.fit.recipe_modules import FOLDER
from fastloop.config.loading import Config, load
from fastloop.errors import ConfigError, FastLoopError
from fastloop.records.secrets import Scrubber
from tests.trainings import NET


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER, "")
    return tmp_path


def configured(*overrides: str) -> Config:
    return load(str(NET), overrides=overrides)


# -- the Trainer ------------------------------------------------------------------------------------------------------


def test_the_trainer_is_what_the_configuration_says(here: Path) -> None:
    made = training.make_trainer(configured("run.max_steps=7", "trainer.accumulate_grad_batches=3"), None, here / "out")
    assert (made.max_steps, made.max_epochs, made.num_devices, made.accumulate_grad_batches) == (7, -1, 1, 3)
    assert isinstance(made.logger, CSVLogger) and Path(made.logger.log_dir) == here / "out"
    assert list(here.iterdir()) == [], "making a Trainer writes nothing"
    assert training.make_trainer(configured(), None, None).logger is None


def test_what_the_user_sets_stands(here: Path) -> None:
    said = configured(
        "trainer.logger=false",
        "trainer.max_epochs=2",
        "trainer.num_sanity_val_steps=1",
        "trainer.enable_model_summary=true",
    )
    made = training.make_trainer(said, None, here)
    assert made.logger is None and made.max_epochs == 2 and made.num_sanity_val_steps == 1
    assert any(type(callback).__name__.endswith("ModelSummary") for callback in made.callbacks)


@pytest.mark.parametrize(
    ("terminals", "term", "bar"),
    [
        ((True, True), "xterm", True),
        ((True, True), "dumb", False),
        ((False, True), "xterm", False),
        ((True, False), "xterm", False),
        ((True, None), "xterm", False),
    ],
)
def test_a_bar_for_terminals_and_lines_for_all_else(
    terminals: tuple[Any, Any], term: str, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in zip(("stdout", "stderr"), terminals, strict=True):
        stream = None if answer is None else SimpleNamespace(isatty=lambda answer=answer: answer)
        monkeypatch.setattr(training, "sys", SimpleNamespace(**{**vars(training.sys), name: stream}))
    monkeypatch.setenv("TERM", term)
    made = training.make_trainer(configured(), None, None)
    assert (made.progress_bar_callback is not None) is bar
    assert any(isinstance(callback, training.ProgressLines) for callback in made.callbacks) is not bar


def test_an_unknown_argument_is_suggested_for() -> None:
    with pytest.raises(ConfigError) as caught:
        training.make_trainer(configured("trainer.limit_train_batch=3"), None, None)
    assert caught.value.got == "trainer.limit_train_batch (command line)"
    assert caught.value.do == "write limit_train_batches" and caught.value.key == "trainer.limit_train_batch"
    with pytest.raises(ConfigError, match=r"see lightning\.pytorch\.Trainer"):
        training.make_trainer(configured("trainer.wurst={a: {b: 1}}"), None, None)


NO_CUDA = "write run.accelerator: cpu, or check CUDA_VISIBLE_DEVICES"


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(visible: int, *overrides: str) -> str | None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        try:
            training._check_devices(configured(*overrides))
        except ConfigError as error:
            return error.do
        return None

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert refused(0, "run.devices=2", "run.accelerator=gpu") == NO_CUDA
    assert refused(0, "run.devices=1", "run.accelerator=cuda") == NO_CUDA
    assert refused(1, "run.devices=2", "run.accelerator=auto") == "write at most 1, or check CUDA_VISIBLE_DEVICES"
    assert refused(2, "run.devices=2", "run.accelerator=gpu") is None
    assert refused(0, "run.devices=2", "run.accelerator=auto") is None
    assert refused(0, "run.devices=2", "run.accelerator=cpu") is None
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert refused(0, "run.accelerator=gpu") is None, "there it means mps"


def test_lightnings_refusal_names_the_key_it_is_about() -> None:
    config = configured("trainer.precision=fp8", "trainer.max_time=1")
    error = training._explain_refusal(config, ValueError("Precision 'fp8' is\n   invalid"))
    assert error.got == "trainer.precision: 'fp8' (command line)" and error.why.endswith("Precision 'fp8' is invalid")
    assert training._explain_refusal(config, ValueError("devices=-1 is odd")).got.startswith("run.devices: 1 ")
    other = training._explain_refusal(config, ValueError("something else"))
    assert other.got.startswith("trainer: ") and "precision, max_time (" in other.got and other.exit_code == 2


@pytest.mark.parametrize("kind", [dict, lambda **given: Namespace(**given)], ids=["dict", "namespace"])
def test_logged_hyperparameters_hold_no_secrets(kind: Any, here: Path) -> None:
    from tests.trainings.own_recipe.net import Settings

    logger = training.RunLogger(here, Scrubber())
    logger.log_hyperparams(kind(lr=0.1, hf_token="hunter2", settings=Settings(api_key="hunter2", batch=7)))
    logger.log_hyperparams()
    logger.save()
    text = (here / "hparams.yaml").read_text()
    assert "lr: 0.1" in text and "hf_token: '***'" in text and "batch: 7" in text and "hunter2" not in text


def test_a_full_disk_costs_logged_values_and_one_warning(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(training.CSVLogger, "save", fill)
    logger = training.RunLogger(here, Scrubber())
    logger.log_metrics({"loss": 1.0}, step=0)
    with pytest.warns(UserWarning, match="logged values could not be written to .*No space left") as warned:
        logger.save()
        logger.finalize("success")
    assert len(warned) == 1


# -- progress ---------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def progress(
    steps: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **state: Any
) -> list[str]:
    """What is said over batches that end at these times with so many optimizer steps done."""
    clock, lines = Clock(), training.ProgressLines()
    monkeypatch.setattr(training, "time", clock)
    for at_s, done in steps:
        clock.now = at_s
        trainer = SimpleNamespace(**{"global_step": done, "max_steps": 100, "is_global_zero": True, **state})
        lines.on_train_batch_end(trainer, None, None, None, 0)
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_a_line_after_two_seconds_and_then_every_five(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every_second = [(100.0 + step, step) for step in range(1, 18)]
    said = progress(every_second, monkeypatch, capsys)
    assert said == [f"step {step} of 100, about {100 - step} s left" for step in (3, 8, 13)]
    assert progress(every_second, monkeypatch, capsys, is_global_zero=False) == []


def test_what_the_first_step_compiled_is_not_extrapolated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = [(160.0, 1), *((160.0 + step, 1 + step) for step in range(1, 7))]
    assert progress(compiled, monkeypatch, capsys) == ["step 3 of 100, about 97 s left"]


def test_one_time_costs_of_later_steps_are_not_extrapolated_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second step rehearses and compiles for 30 s."""
    clock = Clock()
    lines = training.ProgressLines(lambda: 30.0 if clock.now > 101 else 0.0)
    monkeypatch.setattr(training, "time", clock)
    for at_s, done in [(100.0, 1), (131.0, 2), (141.0, 12)]:
        clock.now = at_s
        trainer = SimpleNamespace(global_step=done, max_steps=100, is_global_zero=True)
        lines.on_train_batch_end(trainer, None, None, None, 0)
    assert capsys.readouterr().err.splitlines() == [
        "step 2 of 100, about 98 s left",
        "step 12 of 100, about 88 s left",
    ]


def test_the_rate_is_that_of_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_then_fast = [(100.0, 0), (110.0, 1), (115.0, 51), (120.0, 76)]
    assert progress(slow_then_fast, monkeypatch, capsys) == [
        "step 1 of 100, about 16 min left",
        "step 51 of 100, about 14 s left",
        "step 76 of 100, about 6 s left",
    ]


def test_lines_get_rare_and_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    every_second = [(float(step), step) for step in range(1, 1801)]
    said = [int(line.split()[1]) for line in progress(every_second, monkeypatch, capsys, max_steps=9999)]
    gaps = [later - earlier for earlier, later in pairwise(said)]
    assert gaps == sorted(gaps) and (gaps[0], gaps[-1]) == (5, 60) and len(said) < 60


def test_a_resumed_run_counts_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress([(1.0, 90), (11.0, 95)], monkeypatch, capsys) == ["step 95 of 100, about 10 s left"]


def test_without_a_step_there_is_no_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = progress([(1.0, 0), (11.0, 0), (21.0, 1)], monkeypatch, capsys)
    assert said == ["step 0 of 100, batch 1 of the epoch", "step 1 of 100, about 33 min left"]


# -- quiet ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", list(namespaces.list_installed()))
def test_notices_are_kept_out_in_every_namespace(space: str, caplog: pytest.LogCaptureFixture) -> None:
    speaks = importlib.import_module(f"{space}.utilities.rank_zero")
    core = importlib.import_module("lightning_utilities.core.rank_zero")
    before, core.log = core.log, logging.getLogger(f"{space}.utilities.rank_zero")  # as if imported last
    names = [f"{space}.utilities.rank_zero", "lightning.pytorch.strategies.launchers"]
    propagate = {name: logging.getLogger(name).propagate for name in (space, "lightning", *names)}
    try:
        for name in propagate:
            logging.getLogger(name).propagate = True
        with caplog.at_level(logging.INFO):
            speaks.rank_zero_info("GPU available: heard before")
            with training.quiet():
                speaks.rank_zero_info("GPU available: not heard")
                logging.getLogger(names[0]).warning("a warning")
                logging.getLogger(names[1]).info("Child process with PID 1 terminated with code 1")
            speaks.rank_zero_info("GPU available: heard after")
    finally:
        core.log = before
        for name, value in propagate.items():
            logging.getLogger(name).propagate = value
    said = list(dict.fromkeys(record.getMessage() for record in caplog.records))  # heard by several handlers
    assert said == [
        "GPU available: heard before",
        "a warning",
        "Child process with PID 1 terminated with code 1",
        "GPU available: heard after",
    ]


def test_warnings_that_matter_are_heard() -> None:
    ours = {
        "does not have many workers which may be a bottleneck": False,
        "log_every_n_steps=50": False,
        "the loss is detached": True,
    }
    for text, heard in ours.items():
        for module in ("lightning.pytorch.trainer.connectors.data_connector", "pytorch_lightning.x"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with training.quiet():
                    warnings.warn_explicit(f"The 'train_dataloader' {text}", UserWarning, "x.py", 1, module=module)
                    warnings.warn_explicit(text, UserWarning, "x.py", 1, module="mine")
            assert len(caught) == 1 + heard, (text, module)


def test_filters_and_levels_are_put_back() -> None:
    before = list(warnings.filters), [logging.getLogger(name).level for name in training._HINTS]
    with training.quiet():
        assert {logging.getLogger(name).level for name in training._HINTS} == {logging.WARNING}
    assert before == (list(warnings.filters), [logging.getLogger(name).level for name in training._HINTS])


# -- a training -------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_a_training(here: Path) -> None:
    loop = training.train(configured("run.max_steps=3", "rungs.workers.enabled=true"), here / "out")
    assert loop.measurement is not None and loop.measurement.total_steps == 3 and loop.run_dir == here / "out"
    assert [verdict.rung for verdict in loop.verdicts] == ["workers"]


def test_the_seed_decides_the_weights(here: Path) -> None:
    losses = []
    for seed in (1, 1, 2):
        loop = training.train(configured("run.max_steps=3", f"run.seed={seed}"), None)
        assert loop.measurement is not None
        losses.append(loop.measurement.loss)
    assert losses[0] == losses[1] != losses[2] and list(here.iterdir()) == []


@pytest.mark.short
def test_lightning_is_told_to_load_no_code(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    torch.save({"state_dict": {}}, here / "x.ckpt")
    told: dict[str, Any] = {}

    def fit(self: pl.Trainer, *args: Any, weights_only: Any = None, **options: Any) -> None:
        told.update(options, weights_only=weights_only)

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    for trusted in (False, True):
        with pytest.raises(FastLoopError, match="0 optimizer steps"):
            training.train(configured("run.resume=x.ckpt"), None, trust_checkpoint=trusted)
        assert told["weights_only"] is not trusted and told["ckpt_path"] == "x.ckpt"


def test_before_lightning_could_be_told(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    torch.save({"state_dict": {}}, here / "x.ckpt")
    told: dict[str, Any] = {}

    def fit(self: pl.Trainer, model: Any, datamodule: Any = None, ckpt_path: Any = None) -> None:
        told.update(at=ckpt_path)

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    with pytest.raises(FastLoopError, match="0 optimizer steps"):
        training.train(configured("run.resume=x.ckpt"), None)
    assert told == {"at": "x.ckpt"}


@pytest.mark.parametrize("name", ["missing.ckpt", "folder", "x" * 300])
def test_a_checkpoint_that_is_no_file(name: str, here: Path) -> None:
    (here / "folder").mkdir()
    for trusted in (True, False):
        with pytest.raises(ConfigError, match="there is no such file") as caught:
            training.train(configured(f"run.resume={name}"), None, trust_checkpoint=trusted)
        assert caught.value.key == "run.resume" and caught.value.got.endswith("(command line)")


def test_files_of_an_earlier_run_go_once_this_one_is_ready(here: Path) -> None:
    (here / "report.md").write_text("earlier")
    with pytest.raises(ConfigError):
        training.train(configured("trainer.precision=fp8"), here)
    assert (here / "report.md").read_text() == "earlier"
    with pytest.raises(ValueError, match="no luck"):
        training.train(configured("recipe.at=0", "recipe.does=raise"), here)
    assert not (here / "report.md").exists()


def test_the_process_is_left_as_it_was(here: Path) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM]
    before = [signal.getsignal(number) for number in numbers], sys.stdout, os.getcwd()
    training.train(configured("run.max_steps=2"), here / "out")
    assert before == ([signal.getsignal(number) for number in numbers], sys.stdout, os.getcwd())
