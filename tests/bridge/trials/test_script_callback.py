"""The callback that a command is given: one fit gets a FastLoop, and later ones of the user's run its rungs."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from fastloop import FastLoop
from fastloop.bridge import namespaces
from fastloop.bridge.trials import script_callback
from fastloop.bridge.trials.script_callback import Injected, add_callbacks
from fastloop.errors import FastLoopError
from tests import models


class Orders:
    """The orders of a command that this process is, for the time of a test."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.place, self.out, self._patch = place, place / "out", patch

    def __call__(self, **more: Any) -> None:
        given = {"out": str(self.out), "config": {"watch": {"warmup_steps": 2}}, "variation": "as_it_is", **more}
        path = self.place / "orders.json"
        path.write_text(json.dumps(given))
        self._patch.setenv("FASTLOOP_EXEC", str(path))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.place / "events.jsonl").read_text().splitlines()]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events()]

    def measured(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "measurement.json").read_text()))


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    for _, connector in namespaces.find_everywhere(script_callback.CONNECTOR):  # as it was, at the end of the test
        monkeypatch.setattr(connector, "configure_logger", connector.configure_logger)
    yield Orders(tmp_path, monkeypatch)


def trainer(**settings: Any) -> Any:
    """A Trainer as Lightning makes it in the command."""
    return models.trainer(**{**settings, "callbacks": [*settings.get("callbacks", []), *add_callbacks()]})


def kinds(trainer: Any) -> list[str]:
    return [type(each).__name__ for each in trainer.callbacks]


class Scheduled(models.Regression):
    """One cycle over all the steps that the Trainer announces; keeps the rates it trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]


class Unfused(models.Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


# -- who gets one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to", [None, "", "{tmp}/gone/orders.json"], ids=["unset", "empty", "gone"])
def test_without_orders_there_is_nothing(set_to: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTLOOP_EXEC", raising=False)
    if set_to is not None:
        monkeypatch.setenv("FASTLOOP_EXEC", set_to.format(tmp=tmp_path))
    assert add_callbacks() == [] == script_callback.add_to_fabric()


def test_switched_off_it_is_nothing(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    orders()
    monkeypatch.setenv("FASTLOOP_DISABLE", "1")
    assert add_callbacks() == [] and not (orders.place / "events.jsonl").exists()


def test_its_report_has_the_name_of_the_script(orders: Orders) -> None:
    """Seen: "train" in the terminal, the module's class in the reports."""
    orders(name="train")
    trainer(max_steps=8).fit(models.Regression(), models.loader())
    assert json.loads((orders.out / "env.json").read_text())["name"] == "train"
    assert "Regression" not in (orders.out / "report.md").read_text()


def test_a_report_that_cannot_be_written_is_an_event(orders: Orders) -> None:
    orders()
    orders.out.write_text("a file in place of the directory")
    with pytest.warns(UserWarning, match="could not be written"):
        trainer(max_steps=8).fit(models.Regression(), models.loader())
    assert [event["why"] for event in orders.events() if event["event"] == "unwritten"] == ["File exists"]


def test_the_first_fit_that_trains_is_measured_and_no_other(orders: Orders) -> None:
    orders(beat=str(orders.place / "beat"))
    first = trainer(max_steps=8)
    first.fit(models.Regression(), models.loader())
    assert kinds(first) == ["Injected", "FastLoop", "Beats"] and (orders.place / "beat").read_text().split()[:2] == [
        "8",
        "8",
    ]
    assert orders.measured()["total_steps"] == 8 and orders.measured()["samples_per_s"] > 0
    first.fit_loop.epoch_loop.max_steps, first.fit_loop.max_epochs = 12, 2
    first.fit(models.Regression(), models.loader())
    assert kinds(first) == ["Injected"], "a further fit of the same Trainer is not even watched"
    second = trainer(max_steps=5)
    second.fit(models.Regression(), models.loader())
    assert kinds(second) == ["Injected"] and orders.measured()["total_steps"] == 8
    began = [(event["measured"], event["step"]) for event in orders.events() if event["event"] == "fit_began"]
    assert began == [(True, 0), (False, 8), (False, 0)]
    assert orders.names() == [
        "constructed",
        "fit",
        "fit_began",
        "fit_ended",
        "fit",
        "fit_began",
        "fit_ended",
        "constructed",
        "fit",
        "fit_began",
        "fit_ended",
    ]


@pytest.mark.parametrize("disposable", [False, True], ids=["the user's run", "a trial"])
def test_a_later_fit_of_the_users_run_has_the_rungs_too(orders: Orders, disposable: bool) -> None:
    """Folds, or a second Trainer that resumes: rungs in the first fit alone would make them unequal."""
    orders(config={"rungs": {"fused": {"enabled": True}}, "strict": True}, disposable=disposable)
    fused = []

    class Fold(models.Regression):
        def on_train_end(self) -> None:
            fused.append(self.trainer.optimizers[0].param_groups[0].get("fused"))

    for _ in range(2):
        fold = trainer(max_steps=5)
        fold.fit(Fold(), models.loader())
    assert fused == [True, None if disposable else True]
    assert kinds(fold) == ["Injected", *([] if disposable else ["FastLoop"])]
    began = [event for event in orders.events() if event["event"] == "fit_began"]
    assert [(event["measured"], event["only_rungs"]) for event in began] == [(True, False), (False, not disposable)]
    files = {path: path.stat().st_mtime_ns for path in orders.out.rglob("*")}
    other = trainer(max_steps=5, logger=CSVLogger(orders.place / "logs"))
    other.fit(Unfused(), models.loader())  # strict is for the fit that is measured: the script goes on
    assert other.global_step == 5 and orders.measured()["total_steps"] == 5
    assert files == {path: path.stat().st_mtime_ns for path in orders.out.rglob("*")}, "only the first one writes"
    assert not list((orders.place / "logs").rglob("measurement.json"))


def test_a_later_fit_says_where_it_goes_on(orders: Orders, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning warns that such a loader is not resumable."""
    orders(config={"rungs": {"workers": {"enabled": True, "count": 1}}})
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer(max_steps=5, callbacks=[saves], enable_checkpointing=True).fit(models.Regression(), models.loader())
    with caplog.at_level(logging.INFO):
        trainer(max_steps=8).fit(
            models.Regression(), models.loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=False
        )
    (line,) = [each for each in caplog.messages if "continues after" in each]
    assert line.startswith("fastloop: continues after batch 3 of epoch 0, in the same order")


@pytest.mark.parametrize("disposable", [False, True], ids=["the user's run", "a trial"])
def test_trainers_that_share_a_list_of_callbacks(orders: Orders, disposable: bool) -> None:
    """Lightning adds to the script's own list, so a later Trainer also has the callbacks made for those before it."""
    orders(config={"rungs": {"fused": {"enabled": True}}}, disposable=disposable)
    shared: list[Any] = []
    fused = []

    class Fold(models.Regression):
        def on_train_end(self) -> None:
            fused.append(self.trainer.optimizers[0].param_groups[0].get("fused"))

    folds = []
    for _ in range(3):
        shared += add_callbacks()
        folds.append(models.trainer(max_steps=5, callbacks=list(shared)))
        folds[-1].fit(Fold(), models.loader())
        folds[-1].validate(models.Regression(), models.loader(8), verbose=False)
    folds[0].fit_loop.max_epochs = folds[0].fit_loop.epoch_loop.max_steps = 10
    folds[0].fit(Fold(), models.loader())
    rungs = [] if disposable else ["FastLoop"]
    assert [kinds(fold) for fold in folds] == [["Injected"] * place + ["Injected", *rungs] for place in range(3)]
    assert fused == [True, *[None if disposable else True] * 3]
    began = [event for event in orders.events() if event["event"] == "fit_began"]
    assert [event["measured"] for event in began] == [True, False, False, False]
    assert [event["only_rungs"] for event in began[1:]] == [not disposable] * 3
    assert orders.names().count("fit") == orders.names().count("fit_ended") == 4 and "yielded" not in orders.names()


def test_what_is_only_evaluated_is_left_alone(orders: Orders) -> None:
    orders()
    evaluates = trainer()
    evaluates.validate(models.Regression(), models.loader(), verbose=False)
    assert kinds(evaluates) == ["Injected"] and orders.names() == ["constructed"] and not orders.out.exists()


def test_a_rung_stays_for_the_evaluation_after_the_fit(orders: Orders) -> None:
    orders(config={"rungs": {"amp": {"enabled": True}}})
    seen = []

    class Looks(models.Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.net(batch[0]).dtype)

    fits, module = trainer(num_sanity_val_steps=0), Looks()
    fits.fit(module, models.loader(), models.loader(8))
    fits.validate(module, models.loader(8), verbose=False)
    assert seen == [torch.bfloat16, torch.bfloat16]


FUSED: dict[str, Any] = {"rungs": {"fused": {"enabled": True}}}


def test_it_yields_to_a_fastloop_of_the_scripts_that_turns_on_rungs(orders: Orders) -> None:
    orders()
    own = FastLoop({**FUSED, "watch": {"warmup_steps": 1}}, out=orders.place / "own", quiet=True)
    fits = trainer(max_steps=6, callbacks=[own])
    fits.fit(models.Regression(), models.loader())
    assert kinds(fits) == ["FastLoop", "Injected"] and own.measurement is not None
    assert (orders.place / "own" / "measurement.json").is_file() and not orders.out.exists()
    assert orders.names() == ["constructed", "yielded", "fit_began", "fit_ended"]


def test_a_trial_of_such_a_script_ends_before_it_trains(orders: Orders) -> None:
    orders(disposable=True)
    fits = trainer(max_steps=6, callbacks=[FastLoop(FUSED, quiet=True)])
    with pytest.raises(FastLoopError, match="FastLoop in the script that turns on fused"):
        fits.fit(models.Regression(), models.loader())
    assert fits.global_step == 0


@pytest.mark.parametrize("disposable", [False, True], ids=["the user's run", "a trial"])
def test_one_that_only_watches_gets_the_commands_configuration(orders: Orders, disposable: bool) -> None:
    """Its owner reads the results from it. Later fits, also of other Trainers, are as without one."""
    orders(config={**FUSED, "watch": {"warmup_steps": 1}}, disposable=disposable)
    own, fused = FastLoop(out=orders.place / "own"), []

    class Fold(models.Regression):
        def on_train_end(self) -> None:
            fused.append(self.trainer.optimizers[0].param_groups[0].get("fused"))

    for steps in (8, 5):
        fits = trainer(max_steps=steps, callbacks=[own])
        fits.fit(Fold(), models.loader())
        assert kinds(fits) == ["FastLoop", "Injected"]
        if steps == 8:
            assert own.measurement is not None and [each.rung for each in own.verdicts if each.took] == ["fused"]
    assert fused == [True, None if disposable else True]
    assert orders.measured()["total_steps"] == 8 and not (orders.place / "own").exists()
    began = [event for event in orders.events() if event["event"] == "fit_began"]
    assert [event["measured"] for event in began] == [True, False]


def test_a_search_before_the_fit_is_not_the_fit(orders: Orders) -> None:
    orders()
    fits = trainer(max_steps=6)
    Tuner(fits).lr_find(models.Regression(), models.loader(), num_training=5)
    assert not orders.out.exists() and not (orders.place / "claim").exists()
    fits.fit(models.Regression(), models.loader())
    assert orders.measured()["total_steps"] == 6 and "trained" in {path.name for path in orders.place.iterdir()}


def test_a_search_inside_the_fit_belongs_to_it(orders: Orders) -> None:
    orders()
    fits = trainer(max_steps=6, callbacks=[LearningRateFinder(num_training_steps=5)])
    fits.fit(models.Regression(), models.loader())
    assert orders.measured()["total_steps"] == 6 and not orders.measured()["partial"]


def test_a_fit_of_another_process_comes_first(orders: Orders) -> None:
    orders()
    (orders.place / "claim").write_text("process 1")
    fits = trainer(max_steps=2)
    fits.fit(models.Regression(), models.loader())
    assert kinds(fits) == ["Injected"] and not orders.out.exists()


@pytest.mark.parametrize("name", namespaces.NAMES)
def test_each_lightning_takes_it_for_its_own(name: str, orders: Orders) -> None:
    library = pytest.importorskip(name)
    orders()
    kept = add_callbacks()
    assert isinstance(kept[0], library.Callback)

    class Net(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    importlib.import_module(name).Trainer(accelerator="cpu", max_steps=6, callbacks=kept, **quiet).fit(
        Net(), models.loader()
    )
    assert orders.measured()["total_steps"] == 6


# -- the step limit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 4},
        {"max_epochs": 4, "min_steps": 20, "min_epochs": 3},
        {"max_steps": 20, "max_epochs": -1},
    ],
    ids=["epochs", "at-least", "steps"],
)
def test_the_limit_ends_the_fit_and_leaves_the_schedule(settings: dict[str, Any], orders: Orders) -> None:
    whole = Scheduled()
    models.trainer(**settings).fit(whole, models.loader())
    orders(max_steps=11)
    limited = Scheduled()
    fits = trainer(**settings)
    fits.fit(limited, models.loader())
    assert (len(whole.rates) > 11, len(limited.rates), fits.global_step) == (True, 11, 11)
    assert limited.rates == whole.rates[:11]
    shorter = Scheduled()
    models.trainer(**{**settings, "max_steps": 11, "min_steps": None}).fit(shorter, models.loader())
    assert shorter.rates != limited.rates, "a smaller max_steps from the beginning would have changed the schedule"


class TwoOptimizers(models.Regression):
    """Steps two optimizers in each batch, which the Trainer counts as two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        one, *others = self.parameters()
        return torch.optim.SGD([one], lr=0.01), torch.optim.SGD(others, lr=0.01)


def test_the_limit_counts_batches_of_two_optimizers_once(orders: Orders) -> None:
    orders(max_steps=6)
    for _ in range(2):
        module = TwoOptimizers()
        trainer(max_epochs=9).fit(module, models.loader())
        assert module.batches == 6
    assert orders.measured()["total_steps"] == 6
    own = TwoOptimizers()
    trainer(max_steps=8).fit(own, models.loader())
    assert own.batches == 4, "the script's own limit counts as the Trainer does"


def test_the_limit_counts_from_a_checkpoint_and_holds_for_every_fit(orders: Orders) -> None:
    before = models.trainer(max_steps=5)
    before.fit(models.Regression(), models.loader())
    before.save_checkpoint(orders.place / "at5.ckpt")
    orders(max_steps=4)
    for _ in range(2):
        resumed = trainer(max_epochs=9)
        resumed.fit(models.Regression(), models.loader(), ckpt_path=orders.place / "at5.ckpt", **models.WEIGHTS_ONLY)
        assert resumed.global_step == 9
    own = trainer(max_steps=3)
    own.fit(models.Regression(), models.loader())
    assert own.global_step == 3, "a limit of the script's own that comes first stands"


# -- what else is asked -----------------------------------------------------------------------------------------------


def test_a_ledger_and_a_ceiling_on_request(orders: Orders) -> None:
    orders(ledger=True, variation="replayed")
    module = models.Regression(lr=0.0)
    trainer(max_steps=16, max_epochs=-1).fit(module, models.loader(256))
    ledger = json.loads((orders.out / "ledger.json").read_text())
    assert ledger["optimizer_steps"] == 16 == orders.measured()["total_steps"]
    assert len(set(module.losses)) == 8, "the same few batches again"


def test_gradients_on_request(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(script_callback.determinism, "prepare", lambda: prepared.append(1))
    torch.manual_seed(3)
    module = models.Regression(dropout=0.5)
    orders(variation="gradients", config={"watch": {"enabled": False}})
    trainer(max_epochs=9).fit(module, models.loader())
    base = json.loads((orders.out / "answer.json").read_text())
    assert base["why"] is None and base["self_deviation"] == 0 and base["rungs"] == {}
    for path in ("claim", "trained"):
        (orders.place / path).unlink()

    class Quarter(models.Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad *= 0.25

    deviations = []
    for kind in (models.Regression, Quarter):
        place = orders.place / kind.__name__
        place.mkdir()
        arm = Orders(place, orders._patch)
        arm(variation="gradients", reference=str(orders.out), config={"rungs": {"amp": {"enabled": kind is Quarter}}})
        trainer(max_epochs=9).fit(kind(dropout=0.5), models.loader())
        answer = json.loads((arm.out / "answer.json").read_text())
        deviations.append(answer["deviation"])
        assert answer["rungs"] == ({"amp": True} if kind is Quarter else {})
    assert deviations[0] == 0 and deviations[1] == pytest.approx(0.75, abs=0.02)
    assert len(prepared) == 3, "what CUDA reads when it starts has to be set when the Trainer is made"


def test_stacks_on_request(orders: Orders, capfd: pytest.CaptureFixture[str]) -> None:
    import faulthandler

    orders(stacks=True)
    try:
        assert len(add_callbacks()) == 1
        os.kill(os.getpid(), signal.SIGUSR2)
        assert "test_stacks_on_request" in capfd.readouterr().err
    finally:
        faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, mine := lambda *_: None)
    try:
        add_callbacks()
        assert signal.getsignal(signal.SIGUSR2) is mine
        os.kill(os.getpid(), signal.SIGUSR2)
        assert "test_stacks_on_request" not in capfd.readouterr().err, "the script's own use of the signal stands"
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.parametrize("disposable", [True, False])
def test_a_disposable_run_leaves_checkpoints_alone(disposable: bool, orders: Orders) -> None:
    orders(**({"disposable": True} if disposable else {}))
    fits = trainer(
        max_steps=4,
        enable_checkpointing=True,
        default_root_dir=orders.place / "mine",
        callbacks=[ModelCheckpoint(every_n_train_steps=1, save_last=True)],
    )
    fits.fit(models.Regression(), models.loader())
    fits.save_checkpoint(orders.place / "mine" / "end.ckpt")
    assert orders.names().count("unsaved") == disposable and orders.measured()["total_steps"] == 4
    assert len(list((orders.place / "mine").rglob("*.ckpt"))) == (0 if disposable else 3)


@pytest.mark.parametrize("disposable", [True, False])
@pytest.mark.parametrize("name", namespaces.NAMES)
def test_a_disposable_run_keeps_lightnings_own_logs_to_itself(
    name: str, disposable: bool, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer and its users find them by ``log_dir``; what the script makes and names stays where it says."""
    library = importlib.import_module(name)
    shell = orders.place / "shell"
    shell.mkdir()
    monkeypatch.chdir(shell)
    orders(disposable=disposable)

    def make(**settings: Any) -> Any:
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        return library.Trainer(accelerator="cpu", callbacks=add_callbacks(), **quiet, **settings)

    first, second, named = make(), make(logger=True), make(default_root_dir=shell / "named")
    for each in (first, second, named):
        each.logger.log_metrics({"loss": 1.0}, step=1)
        each.logger.save()
    assert first.log_dir != second.log_dir and Path(second.log_dir).is_dir(), "a version each, as in a shell"
    assert list(Path(first.log_dir).iterdir()), "a script that reads its logs finds them"
    assert (first.default_root_dir, named.default_root_dir) == (str(shell), str(shell / "named"))
    assert Path(first.log_dir).is_relative_to(orders.out if disposable else shell)
    left = {each.name for each in shell.iterdir()}
    assert left == (set() if disposable else {"lightning_logs", "named"})
    own = importlib.import_module(f"{name}.loggers").CSVLogger("mine")
    assert make(logger=own).log_dir == own.log_dir and not Path(own.log_dir).is_relative_to(orders.out)
    assert make(logger=False).log_dir == str(shell)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_what_a_training_raises_is_told_with_the_step(orders: Orders) -> None:
    class Raises(models.Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 5:
                raise ValueError("no\nluck")
            return super().training_step(batch, batch_idx)

    orders()
    with pytest.raises(ValueError, match="luck"):
        trainer().fit(Raises(), models.loader())
    told = orders.events()[-1]
    assert told == {
        "event": "exception",
        "rank": 0,
        "step": 5,
        "measured": True,
        "only_rungs": False,
        "why": "ValueError: no luck",
        "files": [],
    }
    assert orders.measured()["partial"] is True


def test_an_error_of_ours_is_no_end_of_the_training(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no room")

    orders()
    monkeypatch.setattr(Injected, "_is_the_one", fails)
    module = models.Regression()
    with pytest.warns(UserWarning, match="fastloop is disabled for this run: setup: OSError: no room"):
        trainer(max_steps=4).fit(module, models.loader())
    assert len(module.losses) == 4 and "gave_up" in orders.names() and not orders.out.exists()


def test_checkpoints_hold_nothing_of_it(orders: Orders, tmp_path: Path) -> None:
    orders()
    fits = trainer(max_steps=4)
    fits.fit(models.Regression(), models.loader())
    fits.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["callbacks"] == {} and "fastloop" not in str(saved.keys()).lower()


# -- the runs of one arm ----------------------------------------------------------------------------------------------


def test_runs_of_a_script_with_a_seed_of_its_own_are_different_runs(orders: Orders) -> None:
    """For both arms alike, and from the same weights: run-0 is the script's, run-1 shuffles otherwise."""
    ends = []
    for offset in (None, 0, 1, 1, 2):
        for name in ("claim", "trained"):
            (orders.place / name).unlink(missing_ok=True)
        if offset is not None:
            orders(seed_offset=offset)
        torch.manual_seed(5)
        model = models.Regression()
        fitted = models.trainer(max_steps=4) if offset is None else trainer(max_steps=4)
        fitted.fit(model, models.loader(shuffle=True))
        ends.append([each.tolist() for each in model.parameters()])
    plain, same, other, again, third = ends
    assert plain == same and other == again and plain != other != third != plain
