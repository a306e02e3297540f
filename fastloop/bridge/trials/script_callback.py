"""The callback that ``fastloop exec`` and ``ab --script`` put into the Trainers of one command, and into no others.

Lightning gets callbacks from entry points whenever it creates a Trainer; ``commands/execute.py`` declares one on the
path of that command only. That entry point returns an `Injected`, which manages a FastLoop. The first fit that trains
gets a FastLoop; one in the script that only watches takes its place, with the command's configuration. Later fits of
the user's own run get its rungs; those of a trial are only counted. A Trainer that never fits is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from fastloop.bridge import namespaces
from fastloop.bridge.fail_open import fail_open, is_disabled
from fastloop.bridge.fit import lines
from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.trials import ceilings, determinism, no_checkpoints
from fastloop.bridge.trials.gradient_probe import GradientProbe
from fastloop.bridge.trials.heartbeat import Beats, drop_other_hooks
from fastloop.bridge.trials.sample_ledger import Ledger
from fastloop.config.loading import Config, load_callback_config
from fastloop.errors import FastLoopError, quote
from fastloop.ladder import Ladder
from fastloop.records import store
from fastloop.records.trial import FAST_DEV_RUN, ScriptEvent, ScriptOrders

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = namespaces.make_callback_class()

ORDERS = "FASTLOOP_EXEC"
"""The environment variable with the path of the orders file. It exists for one command only."""
CONNECTOR = "trainer.connectors.logger_connector.logger_connector._LoggerConnector"
ANSWER, GRADIENTS = "answer.json", "gradients"
EVENTS, CLAIM, TRAINED = "events.jsonl", "claim", "trained"
"""Files beside the orders: the events, the process whose fit is measured, and a mark that its training has begun."""


def add_callbacks() -> list[Any]:
    """Return the callbacks that Lightning adds to a Trainer of this process; none without orders."""
    if is_disabled() or (path := _find_orders()) is None:
        return []
    orders = store.load(path, ScriptOrders)
    assert orders is not None, path
    if orders.stacks:
        _write_stacks_on_request()
    if orders.variation == GRADIENTS:
        determinism.prepare()
    if orders.disposable:
        _keep_logs_in(orders.out)
    keeper = Injected(orders, path.parent)
    if not getattr(rank_zero_only, "rank", 0):
        keeper.note("constructed")
    return [keeper]


def add_to_fabric() -> list[Any]:
    """Report the use of Fabric, and return no callbacks for it, because it has no loop to watch."""
    if (path := _find_orders()) is not None and not getattr(rank_zero_only, "rank", 0):
        _note(path.parent, "fabric")
    return []


def _find_orders() -> Path | None:
    path = Path(os.environ.get(ORDERS) or os.devnull)
    return path if path.is_file() else None


def _write_stacks_on_request() -> None:
    """Make SIGUSR2 print the stack of each thread, unless the script handles that signal itself."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def _keep_logs_in(folder: str) -> None:
    """Make Lightning's default loggers write into this folder, and not into the user's. The script's own loggers, and
    every other use of ``default_root_dir``, do not change. This lasts until the process ends.

    A Trainer makes its logger right after it gets these callbacks. Source: ``configure_logger`` in
    trainer/connectors/logger_connector/logger_connector.py. If a version of Lightning has no such method, logs stay
    where they were.
    """
    for _, connector in namespaces.find_everywhere(CONNECTOR):
        original = getattr(connector, "configure_logger", None)
        if original is not None and not hasattr(original, "__wrapped__"):
            connector.configure_logger = _configure_in(folder, original)


def _configure_in(folder: str, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(original)
    def configure_logger(connector: Any, logger: Any) -> None:
        trainer = connector.trainer
        root = trainer.default_root_dir
        trainer._default_root_dir = folder
        try:
            original(connector, logger)
        finally:
            trainer._default_root_dir = root

    return configure_logger


class Injected(Callback):
    """Gives a Trainer its FastLoop for the one fit that is measured, and the rungs alone for those after it.

    Args:
        place: the directory of the orders.
    """

    def __init__(self, orders: ScriptOrders, place: Path) -> None:
        self.orders, self.place = orders, place
        self.off = False
        self._added: list[Any] = []
        """Callbacks that this one has added to the Trainer for a fit."""
        self._measures = False
        """Whether they measure this fit; otherwise they only bring its rungs."""
        self._own: FastLoop | None = None
        """The script's own FastLoop."""
        self._began = self._unsaved = False
        self._first = 0
        self._own_last: int | None = None
        """The step at which the script itself ends its fit; None if it sets no limit."""
        drop_other_hooks(self, "on_train_batch_end")

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    @fail_open
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._is_of_another(trainer):
            return
        if self.orders.disposable:
            no_checkpoints.keep_back(trainer, partial(self._note_held_back, trainer))
        if stage != "fit":  # the fit's rungs also apply to its evaluation, as with a FastLoop in the script
            return
        self._remove_added(trainer)
        self._began = False
        self._own = next((each for each in trainer.callbacks if isinstance(each, FastLoop)), None)
        yields = self._yields()
        chosen = not yields and self._is_the_one(trainer)
        if trainer.is_global_zero:
            self.note("yielded" if yields else "fit", measured=chosen, why=_name_dev_run(trainer))
        if yields or trainer.fast_dev_run:
            return
        if chosen:
            self._add_measuring(trainer)
        else:
            self._follow_the_first(trainer)
        if self._own is not None and trainer.callbacks.index(self._own) < trainer.callbacks.index(self):
            self._own.setup(trainer, pl_module, stage)  # again: it was set up before it got this configuration

    @fail_open
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_of_another(trainer):
            return
        self._began = True
        if (most := self.orders.max_steps) is not None:
            # Not earlier: by now optimizers and schedules are made for the steps of the real training, and a checkpoint
            # has set the number of steps done. max_steps ends a fit regardless of min_steps and min_epochs, and without
            # the extra validation that should_stop causes.
            self._first, own = trainer.global_step, trainer.fit_loop.epoch_loop.max_steps
            self._own_last = None if own in (None, -1) else own
            self._end_after(trainer, most)
            vars(self).pop("on_train_batch_end", None)  # an earlier fit dropped it
        if trainer.is_global_zero:
            if self._measures:
                (self.place / TRAINED).touch()
            has = {"measured": self._measures, "only_rungs": bool(self._added) and not self._measures}
            self.note("fit_began", step=trainer.global_step, why=_name_dev_run(trainer), **has)

    @fail_open
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Move the end of the fit if a batch takes several optimizer steps: the Trainer counts them all, the orders one
        per batch."""
        if (each := trainer.global_step - self._first) > 0:
            if self.orders.max_steps is not None and each > 1:
                self._end_after(trainer, each * self.orders.max_steps)
            drop_other_hooks(self)

    @fail_open
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or self._is_of_another(trainer):
            return
        if self._began:
            files = _list_imports(self.orders.not_from)
            self.note("fit_ended", measured=self._measures, step=trainer.global_step, files=files)
            for each in (*self._added, self._own):
                if isinstance(each, FastLoop) and each.unwritten is not None:
                    self.note("unwritten", why=each.unwritten)
        elif self._measures:  # such as a learning rate search: the fit comes later, maybe in another process
            (self.place / CLAIM).unlink(missing_ok=True)

    @fail_open
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and not self._is_of_another(trainer):
            self.note(
                "exception",
                rank=trainer.global_rank,
                step=trainer.global_step,
                measured=self._measures,
                why=quote(exception),
            )

    def _end_after(self, trainer: Any, steps: int) -> None:
        """End the fit after this many steps, as the Trainer counts them, unless the script ends it earlier."""
        last = self._first + steps
        trainer.fit_loop.epoch_loop.max_steps = last if self._own_last is None else min(self._own_last, last)

    # -- inside ---------------------------------------------------------------------------------------------------

    def note(self, event: str, **more: Any) -> None:
        """Report an event to the command that gave the orders."""
        _note(self.place, event, **more)

    def stop_watching(self, why: str) -> None:
        """Give up after an error in our own code, so that it does not end the user's training."""
        self.note("gave_up", why=why)
        rank_zero_warn(f"fastloop is disabled for this run: {why}")

    def _is_of_another(self, trainer: Any) -> bool:
        """Whether this was made for an earlier Trainer: Lightning adds it to the script's own list of callbacks, and a
        later Trainer that is given the same list has both. Source: ``on_trainer_init`` in
        trainer/connectors/callback_connector.py."""
        return [each for each in trainer.callbacks if isinstance(each, Injected)][-1:] != [self]

    def _note_held_back(self, trainer: Any) -> None:
        if trainer.is_global_zero and not self._unsaved:
            self._unsaved = True
            self.note("unsaved")

    def _is_the_one(self, trainer: Any) -> bool:
        """Whether this fit is the first that trains, in any process of the command; a fast_dev_run only tries the code.

        All ranks of a fit get the same answer: rank 0 marks that it trains only after the others have checked, because
        there is a barrier after the setup. Source: trainer/call.py, ``_call_setup_hook``.
        """
        if (self.place / TRAINED).exists() or trainer.fast_dev_run:
            return False
        alone = f"process {os.getpid()}"
        group = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
        mine, claim = self.place / f"{CLAIM}-{os.getpid()}", self.place / CLAIM
        mine.write_text(alone if trainer.world_size == 1 else " ".join(group))
        with contextlib.suppress(FileExistsError):
            os.link(mine, claim)  # atomic
        return claim.read_text() == mine.read_text()

    def _yields(self) -> bool:
        """Whether the script's own FastLoop is left as it is, because it turns on rungs.

        Raises:
            FastLoopError: this is a trial, which would compare other rungs than it says.
        """
        if self._own is None or self._own.off or self._own.obeys or not (on := self._own.config.ladder.enabled()):
            return False
        if self.orders.disposable:
            raise FastLoopError(
                got=f"a FastLoop in the script that turns on {', '.join(on)}",
                why="this command chooses the rungs of each run, so the script must not",
                do="remove it from the script for this command; --config passes its configuration to both sides",
            )
        return True

    def _add_measuring(self, trainer: Any) -> None:
        """Add the callbacks for this fit. Lightning sets up those behind this callback right after it."""
        before, out, beat = list(trainer.callbacks), Path(self.orders.out), self.orders.beat
        config = self._read_config()
        if self.orders.variation == GRADIENTS:  # the gradient is taken from the first step, with all rungs on
            config = dataclasses.replace(config, rehearsal="off")
        loop = self._make_loop(config, out)
        loop.in_trial = self.orders.disposable
        if self.orders.seed_offset:
            determinism.shift_seeds(self.orders.seed_offset)
        try:
            ceilings.remove_cost(trainer, self.orders.variation)
            if self.orders.variation == GRADIENTS:
                reference = None if self.orders.reference is None else Path(self.orders.reference)
                probe = GradientProbe.into(trainer, out, reference)
                trainer.callbacks.append(_Answers(probe, loop, out))
            if self.orders.ledger:
                Ledger.into(trainer, out)
            self._insert(trainer, *([] if loop is self._own else [loop]), *([Beats(Path(beat))] if beat else []))
        finally:
            self._measures = True
            self._added = [each for each in trainer.callbacks if not any(each is other for other in before)]

    def _make_loop(self, config: Config, out: Path | None) -> FastLoop:
        """Return the FastLoop for this fit: the script's own, if it has one."""
        if self._own is None:
            return FastLoop.of(config, out=out, quiet=True)
        self._own.obey(config, out=out)
        return self._own

    def _follow_the_first(self, trainer: Any) -> None:
        """Give a later fit of the user's run, such as the next fold, the rungs of the first where they apply, and keep
        its position in the data. Those of a trial get none. Nothing is measured or written."""
        config = self._read_config()
        ladder = Ladder() if self.orders.disposable else config.ladder
        if not ladder.enabled() and self._own is None:
            return
        unwatched = dataclasses.replace(config.watch, enabled=False)
        loop = self._make_loop(dataclasses.replace(config, ladder=ladder, watch=unwatched, strict=False), None)
        loop.writes = False
        if loop is not self._own:
            loop.say = lines.say  # no summary will say where it resumed
            self._added = [loop]
            self._insert(trainer, loop)

    def _read_config(self) -> Config:
        config, _ = load_callback_config(self.orders.config)
        return dataclasses.replace(config, by_ladder=frozenset(self.orders.by_ladder), script=self.orders.name)

    def _insert(self, trainer: Any, *callbacks: Any) -> None:
        after = next(index for index, each in enumerate(trainer.callbacks) if each is self) + 1
        trainer.callbacks[after:after] = callbacks

    def _remove_added(self, trainer: Any) -> None:
        """Remove the callbacks added for one fit; a later fit of the same Trainer does not get them."""
        trainer.callbacks[:] = [each for each in trainer.callbacks if not any(each is added for added in self._added)]
        self._added, self._measures = [], False


def _name_dev_run(trainer: Any) -> str | None:
    return FAST_DEV_RUN if trainer.fast_dev_run else None


class _Answers(Callback):
    """Writes the result of the gradient comparison, once it exists."""

    def __init__(self, probe: GradientProbe, loop: FastLoop, out: Path) -> None:
        self.probe, self.loop, self.out = probe, loop, out
        drop_other_hooks(self)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero and self.probe.answer:
            rungs = {verdict.rung: verdict.took for verdict in self.loop.verdicts}
            content = {"schema": store.SCHEMA, **self.probe.answer, "rungs": rungs}
            store.write(self.out, {ANSWER: store.dump(content)})


def _list_imports(folder: str | None) -> tuple[str, ...]:
    """Return the files below a folder that this process has imported, except those of its Python installation."""
    if folder is None:
        return ()
    files = {os.path.realpath(file) for each in list(sys.modules.values()) if (file := getattr(each, "__file__", None))}
    own = os.path.realpath(sys.prefix)
    return tuple(sorted(file for file in files if _is_below(file, folder) and not _is_below(file, own)))


def _is_below(file: str, folder: str) -> bool:
    return file.startswith(os.path.join(folder, ""))  # noqa: PTH118 - thousands of files


def _note(place: Path, event: str, **more: Any) -> None:
    line = json.dumps(store.to_json(ScriptEvent(event=event, **more)))
    with contextlib.suppress(OSError), (place / EVENTS).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
