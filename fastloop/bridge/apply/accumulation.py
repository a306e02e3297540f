"""Accumulation windows as loader batches: the Trainer's counters of batches, rescaled to windows and back; and whether
a window's gradient allows it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastloop.bridge import namespaces
from fastloop.bridge.apply.read_precision import find_precision
from fastloop.bridge.apply.rehearse.untouched import untouched
from fastloop.bridge.apply.site import attribute
from fastloop.errors import NotApplicable, let_through
from fastloop.evidence.model.dropout import switch_off_dropout, without_functional_dropout
from fastloop.evidence.model.merged_gradient import MOST_ALONG, MOST_APART, measure_difference, sample_gradient
from fastloop.feeds.accumulation_windows import WindowSampler, batches_between_validations, count_used_batches
from fastloop.feeds.batch_norm.groups import BatchGroups, MeansOfGroups
from fastloop.feeds.batch_tree import map_tensors
from fastloop.feeds.splitting import Piece
from fastloop.records.plan import Undo

_PROGRESS = "epoch_loop.batch_progress"


class Merge:
    """Turns accumulation off and windows on, and keeps what counted batches right.

    Args:
        window: the Trainer's accumulate_grad_batches.
        undo: takes the key of a setting and what puts its change back.
    """

    def __init__(self, trainer: Any, window: int, *, undo: Callable[[str, Undo], None]) -> None:
        self.trainer, self.window = trainer, window
        self.windows: WindowSampler | None = None
        self._before = (trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval)
        self._frequencies: list[tuple[Any, int]] = []
        self._batches = 1
        self._counts_windows = False
        trainer.accumulate_grad_batches = 1
        undo("loader.window", self.give_up)

    def make_sampler(self, loader: DataLoader[Any]) -> WindowSampler:
        """The loader's batch sampler in windows, within the user's limit_train_batches."""
        _, limit, interval = self._before
        self._batches = count_used_batches(len(loader), limit)
        self.trainer.limit_train_batches = 1.0
        if isinstance(interval, int) or (isinstance(interval, float) and interval != 1.0):
            every = batches_between_validations(self._batches, interval)
            self.trainer.val_check_interval = math.ceil(every / self.window)
        sampler: Any = loader.batch_sampler
        self.windows = WindowSampler(sampler, self.window, self._batches)
        return self.windows

    def train_start(self, behind: int | None = None) -> None:
        """Rescale what exists only now: scheduler frequencies, and the counters of a resumed or earlier fit.

        Args:
            behind: batches of the epoch that a resumed run goes on behind; None: its sampler starts anew.
        """
        for config in self.trainer.strategy.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1:
                self._frequencies.append((config, config.frequency))
                config.frequency = _InBatches(config.frequency, self._count_batches)
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if self.windows is not None and self.trainer.fit_loop.restarting and 0 < done < self._batches:
            if behind is None:
                self.windows.limit_once = self._batches - done // self.window * self.window
            else:
                self.windows.limit_once, self.windows.first_once = (
                    self._batches - behind,
                    self.window - behind % self.window,
                )
        self._count(self._count_windows)
        self._counts_windows = True

    def write_batch_counts(self, checkpoint: dict[str, Any]) -> None:
        """Write the loop's counters into a checkpoint as the plain run counts them, so that either run resumes it."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS)
        if not progress or not self._counts_windows:
            return
        for part in ("total", "current"):
            progress[part] = _recount(progress[part], self._count_batches)

    def count_batches(self, counted: int) -> int:
        """What Lightning counted in this epoch, in batches of the user's loader."""
        return self._count_batches(counted) if self._counts_windows else counted

    def _count_windows(self, batches: int) -> int:
        """Rounded down: a checkpoint from inside a window lacks the gradients of its first batches."""
        epochs, rest = divmod(batches, self._batches)
        return epochs * math.ceil(self._batches / self.window) + rest // self.window

    def _count_batches(self, windows: int) -> int:
        epochs, rest = divmod(windows, math.ceil(self._batches / self.window))
        return epochs * self._batches + rest * self.window

    def _count(self, convert: Callable[[int], int]) -> None:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for part in (progress.total, progress.current):
            part.__dict__.update(_recount(vars(part), convert))

    def give_up(self) -> None:
        """Count batches again. Idempotent."""
        trainer = self.trainer
        trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval = self._before
        if self.windows is not None:
            self.windows.window, self.windows.limit = 1, None
        while self._frequencies:
            config, frequency = self._frequencies.pop()
            config.frequency = frequency
        if self._counts_windows:
            self._counts_windows = False
            self._count(self._count_batches)
            trainer.fit_loop.max_batches = self._batches
            if isinstance(trainer.val_check_interval, (int, float)):
                trainer.val_check_batch = batches_between_validations(self._batches, trainer.val_check_interval)


class _InBatches(int):
    """A scheduler's frequency in batches, asked with a number of windows.

    Lightning steps a scheduler where ``batches % frequency == 0``, and the last window of an epoch may be short.
    """

    batches_of: Callable[[int], int]

    def __new__(cls, frequency: int, batches_of: Callable[[int], int]) -> _InBatches:
        number = super().__new__(cls, frequency)
        number.batches_of = batches_of
        return number

    def __rmod__(self, windows: int) -> int:
        return self.batches_of(windows) % int(self)


def _recount(counters: dict[str, int], convert: Callable[[int], int]) -> dict[str, int]:
    """Counters in the other unit. Lightning reads how far each is from the next (completed one behind processed while
    a batch's last hooks run): that stays.
    """
    done = convert(counters["processed"])
    return {name: max(0, done + value - counters["processed"]) for name, value in counters.items()}


# May a window's batches be trained on as one? Their gradients taken apart and together say so, before either counts.
#
# The model runs twice on the first window, with the random streams where they are, without dropout and with BatchNorm
# on its running statistics, so that nothing but the loss can make a difference. Of that no trace is left.

MOST_COPIED_BYTES = 2**32
"""Of parameters, to the host."""
TakeLoss = Callable[[Any, int], Any]
"""training_step's loss for a batch, and the number of that batch in its window."""


def explain_difference(
    strategy: Any,
    own: Sequence[Piece],
    merged: Sequence[Piece],
    take_loss: TakeLoss,
    groups: BatchGroups | None = None,
    compares: bool = True,
) -> str | None:
    """Why a window must not run as `merged`; None where its gradient is that of the user's `own` batches.

    Args:
        groups: BatchNorm is to see each of the batches by itself; None: that is not asked for.
        compares: look at the gradient.
    """
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    scaler = getattr(plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale() / 16  # without it float16 underflows; it begins too high

    def sample(piece: Piece, number: int) -> torch.Tensor:
        if means is not None:
            means.begin()
        with nullcontext() if groups is None else groups.of(piece.groups):
            with plugin.train_step_context():
                loss = take_loss(map_tensors(piece.batch, torch.clone), number)  # a step may write into its batch
            if loss is None:
                raise ValueError("training_step returned no loss")
            return sample_gradient(loss * scale, parameters)

    means = None if groups is None else MeansOfGroups(groups)
    try:
        with _quiet(strategy), _unwritten(list(module.parameters())):
            with untouched(module), nullcontext() if means is None else means.looking():
                before = _read_streams(strategy)
                apart = [sample(piece, number) for number, piece in enumerate(own)]
                drew = not all(map(torch.equal, before, _read_streams(strategy)))
            with untouched(module), nullcontext() if means is None else means.looking():
                together = sum((sample(piece, 0) * piece.weight for piece in merged), start=torch.zeros(()))
    except Exception as error:  # the user's step in a shape it was not written for, memory, what cannot be put back
        let_through(error)
        said = " ".join(str(error).split())[:200]
        return f"accumulated and merged could not be compared: {type(error).__name__}: {said}"
    if means is not None and (mixed := means.explain_mixed(len(own))) is not None:
        return mixed
    if not compares:
        return None
    found = measure_difference(apart, [piece.weight for piece in own], together)
    if found is None:
        return "accumulated and merged could not be compared: the gradient is not finite"
    halves = any(parameter.element_size() < 4 for parameter in parameters)
    precision = "bf16" if halves else find_precision(module.trainer, module)
    if found.along <= MOST_ALONG and found.apart <= MOST_APART[precision]:
        return None
    if drew:
        return f"training_step draws random numbers of its own: accumulated and merged differ by {found.apart:.1e}"
    return f"the loss is not a mean over samples: the merged gradient differs by {found.apart:.1e}"


@contextlib.contextmanager
def _unwritten(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Parameters that a forward pass writes to are afterwards what they were.

    Raises:
        NotApplicable: there were such.
    """
    versions = [parameter._version for parameter in parameters]
    few = sum(parameter.nbytes for parameter in parameters) <= MOST_COPIED_BYTES
    copies = [parameter.detach().to("cpu", copy=True) for parameter in parameters] if few else []
    try:
        yield
    finally:
        if [parameter._version for parameter in parameters] != versions:
            with torch.no_grad():
                for parameter, copied in zip(parameters, copies, strict=False):
                    parameter.copy_(copied)
            raise NotApplicable("training_step changes parameters")


@contextlib.contextmanager
def _quiet(strategy: Any) -> Iterator[None]:
    """Without logging, compiling, dropout, and the statistics of a batch."""
    module, trainer = strategy.lightning_module, strategy.lightning_module.trainer
    dummy = namespaces.load(namespaces.of(strategy), "loggers.logger.DummyLogger")
    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    trained = [part for part in norms if part.training and part.track_running_stats]
    with contextlib.ExitStack() as undo:
        undo.enter_context(attribute(module, "log", lambda *_args, **_named: None))
        undo.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [dummy() for _ in trainer.loggers]
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(without_functional_dropout())
        undo.callback(switch_off_dropout(module))
        for part in trained:
            part.training = False
            undo.callback(setattr, part, "training", True)
        yield


def _read_streams(strategy: Any) -> list[torch.Tensor]:
    """Where torch's random streams are."""
    device = strategy.root_device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
