"""Checks, before training on them, that a step's samples have the same gradient in different pieces.

The model runs twice on the first window, each time from the same random state, without dropout and with BatchNorm
on its running statistics, so that only the loss can make a difference. The check leaves no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.micro.kept_state import KeptState, Values
from fastloop.bridge.apply.read_model import list_ignored_labels, read_module
from fastloop.bridge.apply.read_training import find_precision
from fastloop.bridge.apply.rehearse.played import raise_if_device_lost, read_streams
from fastloop.bridge.apply.rehearse.ranks import refuse_exchange
from fastloop.bridge.apply.rehearse.recorded_calls import unrecorded
from fastloop.bridge.apply.state.untouched import keep_random_streams, preserve_parameters, preserve_state
from fastloop.bridge.attributes import attribute
from fastloop.errors import describe, is_out_of_memory
from fastloop.evidence.model.dropout import switch_off_dropout, without_functional_dropout
from fastloop.evidence.model.merged_gradient import (
    IN_DOUBT,
    MOST_ALONG,
    MOST_APART,
    measure_difference,
    sample_gradient,
)
from fastloop.feeds.batch_norm.groups import BatchGroups, MeansOfGroups
from fastloop.feeds.batch_tree import map_tensors
from fastloop.feeds.splitting import Piece, average, cut
from fastloop.feeds.token_counts import Counter, find_named_counter, list_token_counters

TakeLoss = Callable[[Any, int], Any]
"""Returns training_step's loss for a batch and that batch's number in its window."""
Note = Callable[[str], object]
UNKNOWN = "could not compare"
"""How a reason begins if nothing could be compared."""
LOGGED_ALIKE = {"fp64": 1e-3, "fp32": 1e-3, "tf32": 5e-3, "fp16": 5e-3, "bf16": 3e-2}
"""Relative difference, by precision, up to which two ways to compute a logged mean give the same value."""

REDUCED: dict[str, Callable[[Iterable[float]], float]] = {"min": min, "max": max, "sum": sum}
TELLING = 4
"""Least number of pieces in which no count of tokens fits by chance."""


class _Sampled(NamedTuple):
    """Sampled elements of gradients [n], on the host."""

    own: list[torch.Tensor]
    others: list[torch.Tensor]
    drew: bool
    """Whether training_step draws random numbers."""
    logged: list[dict[str, float]]
    """Logged values of each piece: first of `own`, then of `others`."""
    reduced: dict[str, str]
    """How Lightning reduces those of them that are not to be averaged."""
    changed: str | None
    """What training_step keeps and would change otherwise in `others` than in `own`; None if there is nothing."""
    is_precise: bool
    """Whether the plugin's autocast was left out."""


class Weighing(NamedTuple):
    """How the pieces of a batch are weighted, if not by their samples."""

    counter: Counter
    names: frozenset[str]
    """Names of logged values that are means over the same count."""


def explain_difference(
    strategy: Any,
    own: Sequence[Piece],
    merged: Sequence[Piece],
    take_loss: TakeLoss,
    groups: BatchGroups | None,
    compares: bool,
    note: Note,
) -> str | None:
    """Why a window must not run as `merged`; None if its gradient equals that of the user's `own` batches.

    Args:
        groups: makes BatchNorm normalize each of the batches separately; None if no rung needs it.
        compares: whether to compare gradients.
        note: receives the names of logged values that are not means over samples.
    """
    means = None if groups is None else MeansOfGroups(groups)
    weights = [piece.weight for piece in own]

    def add_up(seen: _Sampled) -> torch.Tensor:
        return sum((piece.weight * each for piece, each in zip(merged, seen.others, strict=True)), torch.zeros(()))

    sample = partial(_sample, strategy, own, merged, take_loss, groups, means=means)
    try:
        seen = _sample_and_recheck(strategy, sample, weights, add_up)
    except Exception as error:  # an unusual batch shape, out of memory, state that cannot be restored
        return f"{UNKNOWN} accumulated and merged gradients: {_describe_or_raise(strategy, error)}"
    if means is not None and (mixed := means.explain_mixed(len(own))) is not None:
        return mixed
    _note_unequal(strategy, seen, own, merged, note)
    changed = seen.changed and f"training_step changes {seen.changed}: once per window instead of once per batch"
    if changed or not compares:
        return changed
    judged = _judge(strategy, seen, weights, add_up(seen))
    otherwise = "the loss is not a mean over samples: the merged gradient"
    return _explain(seen, *judged, "accumulated and merged", otherwise)


def weigh_pieces(
    strategy: Any, batch: Any, pieces: Sequence[Piece], take_loss: TakeLoss, note: Note
) -> tuple[str | None, Weighing | None]:
    """Why the user's batch must not run in `pieces`, and how to weight them if not by their samples.

    If the whole batch does not fit in memory, one piece is compared with its halves.

    Args:
        note: receives the names of logged values that are not means over samples.
    """
    whole, weights = Piece(batch, sum(piece.samples for piece in pieces), 1.0), [piece.weight for piece in pieces]
    try:
        with refuse_exchange(strategy.lightning_module.trainer):
            sample = partial(_sample, strategy, pieces, [whole], take_loss)
            seen = _sample_and_recheck(strategy, sample, weights, lambda seen: seen.others[0])
    except Exception as error:
        if is_out_of_memory(error):
            first = pieces[0]
            if first.samples < 2:
                return None, None  # nothing smaller could be compared
            error.__traceback__ = None  # its frames hold the tensors that did not fit
            return weigh_pieces(strategy, first.batch, cut(first.batch, -(-first.samples // 2)), take_loss, note)
        return f"{UNKNOWN} whole and split gradients: {_describe_or_raise(strategy, error)}", None
    if seen.changed is not None:
        return f"training_step changes {seen.changed}: once per micro-batch instead of once per batch", None
    judged = _judge(strategy, seen, weights, seen.others[0])
    what = "the loss compares samples or is not a mean over them: the gradient of the micro-batches"
    why = _explain(seen, *judged, "whole and split", what)
    if why is not None and judged[0] is not None:
        return why, None
    ignored = list_ignored_labels(strategy.lightning_module)
    # What the code names comes first: with as many labels in each piece, other means look the same.
    named = find_named_counter(batch, ignored)
    best = _find_fitting(strategy, seen, pieces, [] if named is None else [named])
    if best is None and why is not None:
        best = _find_fitting(strategy, seen, pieces, list_token_counters(batch, strategy.lightning_module, ignored))
        if best is not None and len(pieces) < TELLING:
            best = _confirm(strategy, whole, pieces[0].samples, take_loss, best)
    if best is None:
        if why is None:
            _note_unequal(strategy, seen, pieces, [whole], note)
        return why, None
    _note_unequal(strategy, seen, pieces, [whole], note, by_weight=best.names)
    return None, best


def _confirm(strategy: Any, whole: Piece, size: int, take_loss: TakeLoss, found: Weighing) -> Weighing | None:
    """The weighting if it also fits in smaller pieces: one of many counts may fit two or three by chance."""
    smaller = cut(whole.batch, max(1, size * 2 // 3))
    if max(piece.samples for piece in smaller) == size:
        return found
    try:
        with refuse_exchange(strategy.lightning_module.trainer):
            seen = _sample(strategy, smaller, [whole], take_loss)
    except Exception as error:
        _describe_or_raise(strategy, error)
        return None
    return found if _find_fitting(strategy, seen, smaller, [found.counter]) is not None else None


def _find_fitting(
    strategy: Any, seen: _Sampled, pieces: Sequence[Piece], counters: Iterable[Counter]
) -> Weighing | None:
    """The weighting with which the gradient of the pieces is closest to that of the whole; None if none fits."""
    found: dict[float, Weighing] = {}
    for counter in counters:
        weights = counter.weigh([piece.batch for piece in pieces]).tolist()
        if _judge(strategy, seen, weights, seen.others[0]) == (None, None):
            distance = measure_difference(seen.own, weights, seen.others[0])
            means = [{name: each[name] for name in each if name not in seen.reduced} for each in seen.logged]
            names = _find_token_means(means, [piece.samples for piece in pieces], weights)
            found.setdefault(distance.apart if distance else 0.0, Weighing(counter, names))
    return found[min(found)] if found else None


def _explain(seen: _Sampled, reason: str | None, differs: str | None, which: str, otherwise: str) -> str | None:
    """Put the result of `_judge` for `which` gradients into words; None if they are equal."""
    if reason is not None:
        return f"{UNKNOWN} {which} gradients: {reason}"
    if differs is not None and seen.drew:
        return f"training_step draws its own random numbers: {which} gradients differ {differs}"
    return None if differs is None else f"{otherwise} differs {differs}"


def _find_token_means(
    logged: Sequence[dict[str, float]], samples: Sequence[int], weights: Sequence[float]
) -> frozenset[str]:
    """Names of logged values for which the pieces' mean by `weights` is closer to the whole batch's value (the last
    entry) than their mean by samples."""
    *pieces, whole = logged
    names = set()
    for name, value in whole.items():
        parts = [piece[name] for piece in pieces if name in piece]
        if len(parts) == len(pieces):
            names |= {name} if abs(average(parts, weights) - value) < abs(average(parts, samples) - value) else set()
    return frozenset(names)


def _note_unequal(
    strategy: Any,
    seen: _Sampled,
    own: Sequence[Piece],
    others: Sequence[Piece],
    note: Note,
    by_weight: Collection[str] = (),
) -> None:
    """Note each logged value whose mean over samples, or sum or extreme, differs between the `own` pieces and the
    others. Values in `by_weight` are left out: they are other means."""
    if seen.drew:
        return  # it may differ for that reason
    limit = LOGGED_ALIKE[find_precision(strategy.lightning_module.trainer, strategy.lightning_module)]
    parts = seen.logged[: len(own)], seen.logged[len(own) :]
    for name in {**parts[0][0], **parts[1][0]}:
        if name in by_weight or not all(name in each for part in parts for each in part):
            continue
        reduce = REDUCED.get(seen.reduced.get(name, ""))
        first, second = (
            reduce(each[name] for each in part)
            if reduce is not None
            else average([each[name] for each in part], [piece.samples for piece in pieces])
            for part, pieces in zip(parts, (own, others), strict=True)
        )
        if abs(first - second) > limit * max(abs(first), abs(second)):
            note(name)


def _sample_and_recheck(
    strategy: Any,
    sample: Callable[..., _Sampled],
    weights: Sequence[float],
    find_other: Callable[[_Sampled], torch.Tensor],
) -> _Sampled:
    """Sample gradients, and once more without autocast if rounding could be why they differ on this rank."""
    seen = sample()
    found = measure_difference(seen.own, weights, find_other(seen))
    is_plugins = str(strategy.precision_plugin.precision).endswith("-mixed")
    if (
        found is None
        or found.along <= IN_DOUBT
        or not is_plugins
        or any(read_module(strategy.lightning_module)["autocasts"])
    ):
        return seen
    try:
        with refuse_exchange(strategy.lightning_module.trainer):
            return sample(means=None, is_precise=True)  # the first time has shown where samples are
    except Exception as error:  # too much memory, or a kernel that takes no float32
        _describe_or_raise(strategy, error)
        return seen


def _sample(
    strategy: Any,
    own: Sequence[Piece],
    others: Sequence[Piece],
    take_loss: TakeLoss,
    groups: BatchGroups | None = None,
    means: MeansOfGroups | None = None,
    *,
    is_precise: bool = False,
) -> _Sampled:
    """Sample the gradients of all these pieces; `is_precise` leaves out the plugin's autocast."""
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    scaler = getattr(plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale() / 16  # without one float16 underflows; it begins too high

    def run(piece: Piece, number: int) -> Any:
        logged.append({})
        with nullcontext() if is_precise else plugin.train_step_context():
            return take_loss(map_tensors(piece.batch, torch.clone), number)  # a step may write into its batch

    def sample(piece: Piece, number: int) -> torch.Tensor:
        if means is not None:
            means.begin()
        with nullcontext() if groups is None else groups.of(piece.groups):
            loss = run(piece, number)
            if loss is None:
                raise ValueError("training_step returned no loss")
            return sample_gradient(loss * scale, parameters)

    def run_last() -> Values:
        with preserve_state(module), refuse_exchange(strategy.lightning_module.trainer):
            streams()
            with nullcontext() if groups is None else groups.of(own[-1].groups):
                run(own[-1], len(own) - 1)
            return state.read()

    def note(name: str, value: Any, *_args: Any, reduce_fx: Any = "mean", **_named: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if (how := str(getattr(reduce_fx, "__name__", reduce_fx))) not in ("mean", "avg"):
            reduced[name] = how
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            logged[-1][name] = float(value)

    logged: list[dict[str, float]] = []
    reduced: dict[str, str] = {}
    with quiet(strategy, note), _without_chance(module), preserve_parameters(module.parameters()):
        with preserve_state(module) as kept, nullcontext() if means is None else means.looking():
            state, before = KeptState(module, kept), read_streams(strategy.root_device)
            first = [sample(piece, number) for number, piece in enumerate(own[:-1])]
            streams = keep_random_streams()
            first.append(sample(own[-1], len(own) - 1))
            drew = not all(map(torch.equal, before, read_streams(strategy.root_device)))
            after, known, kinds = state.read(), list(logged), dict(reduced)
        logged.clear()
        with preserve_state(module), nullcontext() if means is None else means.looking():
            second = [sample(piece, 0) for piece in others]
            whole, known = state.read(), known + logged
        limit = LOGGED_ALIKE[find_precision(module.trainer, module)]
        changed = state.find_changed(after, whole, limit)
        changed = state.leave_out_forgotten(changed, after, run_last, limit)
    return _Sampled(first, second, drew, known, kinds, state.name(changed), is_precise)


def _judge(
    strategy: Any, seen: _Sampled, weights: Sequence[float], other: torch.Tensor
) -> tuple[str | None, str | None]:
    """Return why the gradients cannot be compared, or None; and by how much the weighted sum of the user's own differs
    from `other` if that is too much, else None."""
    found = measure_difference(seen.own, weights, other)
    if found is None:
        return "the gradient is not finite", None
    module = strategy.lightning_module
    halves = any(each.element_size() < 4 for each in module.parameters() if each.requires_grad)
    precision = "bf16" if halves else "tf32" if seen.is_precise else find_precision(module.trainer, module)
    if found.apart > MOST_APART[precision]:
        return None, f"by {found.apart:.1e}"
    if found.along > (IN_DOUBT if seen.is_precise else MOST_ALONG):
        return None, f"by {found.apart:.1e}, and by {found.along:.1e} along the batches' own gradients"
    return None, None


def _describe_or_raise(strategy: Any, error: Exception) -> str:
    """Put an error of the user's step into words; raise it if it lost the device, because nothing after it can run."""
    raise_if_device_lost(strategy.root_device, error)
    return describe(error)


@contextlib.contextmanager
def quiet(strategy: Any, log: Callable[..., None] = lambda *_args, **_named: None) -> Iterator[None]:
    """Run without logging (`log` gets the values instead), recording and compiling."""
    module, trainer = strategy.lightning_module, strategy.lightning_module.trainer
    dummy = namespaces.load(namespaces.find_namespace(strategy), "loggers.logger.DummyLogger")
    with contextlib.ExitStack() as undo:
        undo.enter_context(unrecorded())
        undo.enter_context(attribute(module, "log", log))
        undo.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [dummy() for _ in trainer.loggers]
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _without_chance(module: torch.nn.Module) -> Iterator[None]:
    """Run without dropout, and with BatchNorm on its running statistics."""
    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    trained = [part for part in norms if part.training and part.track_running_stats]
    with contextlib.ExitStack() as undo:
        undo.enter_context(without_functional_dropout())
        undo.callback(switch_off_dropout(module))
        for part in trained:
            part.training = False
            undo.callback(setattr, part, "training", True)
        yield
