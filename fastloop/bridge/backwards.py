"""How many backwards an optimizer step was made of."""

from __future__ import annotations

import torch

_SPREAD = 64
"""Parameters whose gradients are counted in the first step."""


class Backwards:
    """Counts the backwards that reached the parameters: those that were done, not those that were asked for.

    In the first step many parameters are asked, for some may be frozen or take no part; a few of those with the most
    gradients are kept.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parameters = [each for each in module.parameters() if each.requires_grad and each.is_leaf]
        spread = parameters[:: -(-len(parameters) // _SPREAD) or 1]
        self._counters = [_Counter(each) for each in {id(each): each for each in [*spread, *parameters[-1:]]}.values()]
        self._all = True
        self.seen = False
        """Some backward was seen at all: under a strategy with gradients of its own none is."""

    def take(self) -> int:
        """Backwards since it was last asked."""
        count = max((counter.count for counter in self._counters), default=0)
        if count and self._all:
            most = [counter for counter in self._counters if counter.count == count]
            kept = {id(most[n]): most[n] for n in (0, len(most) // 2, len(most) - 1)}
            for counter in self._counters:
                if id(counter) not in kept:
                    counter.handle.remove()
            self._counters, self._all, self.seen = list(kept.values()), False, True
        for counter in self._counters:
            counter.count = 0
        return count

    def remove(self) -> None:
        """Let go of the parameters."""
        for counter in self._counters:
            counter.handle.remove()


class _Counter:
    """How often one parameter got a gradient."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.count = 0
        self.handle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, _: torch.Tensor) -> None:
        self.count += 1
