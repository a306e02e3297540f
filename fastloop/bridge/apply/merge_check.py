"""May a window's batches be trained on as one? Their gradients taken apart and together say so, before either counts.

The model runs twice on the first window, with the random streams where they are, without dropout and with BatchNorm on
its running statistics, so that nothing but the loss can make a difference. Of that no trace is left.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.site import attribute
from fastloop.bridge.apply.untouched import untouched
from fastloop.evidence.model.dropout import switch_off_dropout, without_functional_dropout
from fastloop.evidence.model.merged_gradient import MOST_ALONG, MOST_APART, measure_difference, sample_gradient
from fastloop.feeds.batch_tree import map_tensors
from fastloop.feeds.splitting import Piece

Step = Callable[[Any, int], Any]
"""training_step's loss for a batch, and the number of that batch in its window."""


def explain_difference(strategy: Any, own: Sequence[Piece], merged: Sequence[Piece], step: Step) -> str | None:
    """Why a window must not run as `merged`; None where its gradient is that of the user's `own` batches."""
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    scaler = getattr(plugin, "scaler", None)
    scale = 1.0 if scaler is None else math.sqrt(scaler.get_scale())  # between what underflows and what overflows

    def sample(piece: Piece, number: int) -> torch.Tensor:
        with plugin.train_step_context():
            loss = step(map_tensors(piece.batch, torch.clone), number)  # a step may write into its batch
        if loss is None:
            raise ValueError("training_step returned no loss")
        return sample_gradient(loss * scale, parameters)

    try:
        with _quiet(module):
            with untouched(module):
                before = _read_streams(strategy)
                apart = [sample(piece, number) for number, piece in enumerate(own)]
                drew = not all(map(torch.equal, before, _read_streams(strategy)))
            with untouched(module):
                together = sum((sample(piece, 0) * piece.weight for piece in merged), start=torch.zeros(()))
    except Exception as error:  # the user's step in a shape it was not written for, memory, what cannot be put back
        said = " ".join(str(error).split())[:200]
        return f"accumulated and merged could not be compared: {type(error).__name__}: {said}"
    found = measure_difference(apart, [piece.weight for piece in own], together)
    if found is None:
        return "accumulated and merged could not be compared: the gradient is not finite"
    if found.along <= MOST_ALONG and found.apart <= MOST_APART[_find_precision(strategy)]:
        return None
    if drew:
        return f"training_step draws random numbers of its own: accumulated and merged differ by {found.apart:.1e}"
    return f"the loss is not a mean over samples: the merged gradient differs by {found.apart:.1e}"


@contextlib.contextmanager
def _quiet(module: Any) -> Iterator[None]:
    """Without logging, compiling, dropout, and the statistics of a batch."""
    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    trained = [part for part in norms if part.training and part.track_running_stats]
    with contextlib.ExitStack() as undo:
        undo.enter_context(attribute(module, "log", lambda *_args, **_named: None))
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


def _find_precision(strategy: Any) -> str:
    """The coarsest arithmetic that this training may use, as `MOST_APART` calls it."""
    module = strategy.lightning_module
    halves = any(parameter.element_size() < 4 for parameter in module.parameters())
    if halves or "16" in str(strategy.precision_plugin.precision) or any(read_facts.read_module(module)["autocasts"]):
        return "half"
    return "tf32" if strategy.root_device.type == "cuda" else "fp32"
