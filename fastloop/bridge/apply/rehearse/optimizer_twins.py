"""Steps an optimizer's twin, which has the same class, settings and state, on copies of a few parameters."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastloop.bridge.apply.rehearse.played import RunResults, compare_results, synchronize
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import let_through
from fastloop.feeds.batch_tree import iterate_tensors
from fastloop.feeds.fused_layouts import fit_twin
from fastloop.judge.rehearsal import RungOutcome
from fastloop.records.plan import Rehearsed, Step

MOST_BYTES = 256 * 2**20
"""Limit for the copied parameters of one optimizer; the largest ones that fit are copied."""
GRADIENT = 1e-3
OPTIMIZER_LIMIT = 1e-2
"""Largest deviation of an optimizer's step: comparing small differences of large weights amplifies rounding."""
STATE_COPIES = 2
"""Assumed state size, in copies of the parameters, of an optimizer whose twin cannot step."""


def try_optimizers(
    step: Step, site: LiveSite, *, apply: Callable[[Step], None], unapply: Callable[[Step], None]
) -> RungOutcome:
    """Apply a rung that changes optimizers, and compare steps of their twins without it and with it."""
    apply(step)  # raises for an optimizer it does not know
    unapply(step)
    usual = step_twins(site.optimizers, site.device)
    apply(step)
    changed = step_twins(site.optimizers, site.device)
    deviation = compare_results(usual, changed)
    fault = None
    if not deviation.finite or deviation.largest > OPTIMIZER_LIMIT:
        fault = f"a step of the optimizer deviates by {deviation.largest:.2g}"
    rehearsed = Rehearsed(deviation=deviation.largest, eager_ms=usual.ms, changed_ms=changed.ms)
    return RungOutcome(rung=step.rung, fault=fault, rehearsed=rehearsed)


def step_twins(optimizers: Sequence[Any], device: torch.device) -> RunResults:
    """Let a twin of each optimizer make two steps; the outputs are the changes of its parameters.

    The second step is timed, since the first creates the state if there is none yet.
    """
    played = RunResults()
    for optimizer in optimizers:
        twin, parameters = make_twin(optimizer)
        step: Callable[[], Any] = torch.no_grad()(twin.step)
        step()
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        played.ms += 1e3 * (time.perf_counter() - began)
        played.outputs += [own - before for before, own in parameters]
    return played


def make_twin(optimizer: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a copy of the optimizer without hooks, and pairs of parameters and their copies, whose gradients come from
    a fixed random stream."""
    chosen = _choose(optimizer)
    random = {each.device: torch.Generator(device=each.device) for each in chosen}
    for stream in random.values():
        stream.manual_seed(0)
    copies: dict[int, torch.Tensor] = {}
    for parameter in chosen:
        copies[id(parameter)] = own = parameter.detach().clone()
        noise = torch.randn(own.shape, generator=random[own.device], device=own.device)
        own.grad = torch.empty_like(own).copy_(GRADIENT * noise)
    twin = copy.copy(optimizer)  # uses torch's own __getstate__, which drops hooks
    fit_twin(twin, optimizer)
    twin.param_groups = [
        {**group, "params": [copies[id(each)] for each in group["params"] if id(each) in copies]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for parameter in chosen:
        if parameter in optimizer.state:
            twin.state[copies[id(parameter)]] = copy.deepcopy(dict(optimizer.state[parameter]))
    return twin, [(parameter.detach(), copies[id(parameter)]) for parameter in chosen]


def _choose(optimizer: Any) -> list[torch.Tensor]:
    """The largest parameters that fit together, at least one."""
    every = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    chosen: list[torch.Tensor] = []
    taken = 0
    for each in sorted(every, key=lambda tensor: -tensor.numel()):
        size = each.numel() * each.element_size()
        if not chosen or taken + size <= MOST_BYTES:
            chosen.append(each)
            taken += size
    return chosen


def count_state_bytes(optimizer: Any) -> int:
    """Bytes of optimizer state that do not exist yet, estimated from a step of its twin on a few parameters."""
    every = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    whole: int = sum(each.nbytes for each in every if each not in optimizer.state)
    if not whole:
        return 0
    try:
        twin, pairs = make_twin(optimizer)
        torch.no_grad()(twin.step)()
    except Exception as error:  # such as that of an optimizer that needs a closure
        let_through(error)
        return STATE_COPIES * whole
    made = sum(each.nbytes for state in twin.state.values() for each in iterate_tensors(state))
    return int(whole * made / max(1, sum(own.nbytes for _, own in pairs)))
