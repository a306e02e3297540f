"""Sizes of a module's arguments from call to call: which dimensions vary, and which calls deserve a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

GRAPHS = 2
"""Graphs of a module in training, and as many in evaluation. A graph with breaks counts once, with all its pieces."""
RARE = 0.1
"""Share of calls up to which sizes that no graph fits, as those of an epoch's short last batch, are exceptions."""
LEARN = 2
"""Calls with new sizes that run eagerly before a second graph is made: by then what varies has been seen to vary."""
STORM = 0.5
"""Share of calls, once both graphs are made, above which running the others eagerly is no exception any more."""
RECENT, ENOUGH = 50, 10
"""Calls that these shares are taken over, and the least for a verdict."""
DEPTH, MEMBERS = 5, 500
"""How far arguments are taken apart: what lies beyond, as behind a reference to the trainer, is no batch."""

_CLOSED = (type(None), str, int, float, torch.nn.Module, torch.dtype, torch.device)
_PLACES = tuple(f"args[{place}]" for place in range(64))

Sizes = dict[str, tuple[int, ...]]
"""Sizes of each tensor among the arguments, by the way to it."""


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors among the arguments of a call, by the way to each.

    Looks into mappings, lists, tuples and, unlike `batch_tree`, the attributes of any object: a graph library's batch
    is one.
    """
    found: dict[str, torch.Tensor] = {}
    seen = set[int]()
    level = [*zip(_PLACES, args, strict=False), *kwargs.items()]
    for _ in range(DEPTH):
        inside: list[tuple[str, Any]] = []
        for way, value in level:
            if isinstance(value, torch.Tensor):
                if not value.is_nested:  # the compiler knows that such lengths vary
                    found[way] = value
            elif not isinstance(value, _CLOSED) and id(value) not in seen and len(seen) < MEMBERS:
                seen.add(id(value))
                inside += ((f"{way}.{key}", member) for key, member in islice(_open(value), MEMBERS))
        if not inside:
            break
        level = inside
    return found


def read_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """Sizes of the tensors among the arguments of a call."""
    return {way: tensor.shape for way, tensor in find_tensors(args, kwargs).items()}


def describe_kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """What modules that can share their graphs have in common: the class, and the shapes of the parameters."""
    return (type(module), *(parameter.shape for parameter in module.parameters()))


def find_changes(before: Sizes, after: Sizes) -> dict[int, int]:
    """Sizes in one batch and what they are in another; none that also stayed, for it says nothing of who has it."""
    pairs = [
        pair
        for way in before.keys() & after.keys()
        if len(before[way]) == len(after[way])
        for pair in zip(before[way], after[way], strict=True)
    ]
    kept = {old for old, new in pairs if old == new}
    return {old: new for old, new in pairs if old not in kept}


def _open(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    return getattr(value, "__dict__", {}).items()


class Seen:
    """Sizes seen so far, and which dimensions varied among them."""

    def __init__(self) -> None:
        self.varying: dict[str, frozenset[int]] = {}
        self._first: Sizes = {}

    def note(self, sizes: Sizes) -> None:
        """Learn from one more call."""
        for way, shape in sizes.items():
            first = self._first.setdefault(way, shape)
            if first != shape and len(first) == len(shape):
                differ = {dim for dim, (a, b) in enumerate(zip(first, shape, strict=True)) if a != b}
                self.varying[way] = self.varying.get(way, frozenset()) | differ


class Fitting:
    """The calls that one graph serves: sizes as when it was made, any size of 2 or more where it was told they vary."""

    def __init__(self, sizes: Sizes, varying: Mapping[str, Collection[int]]) -> None:
        self._varying = dict(varying)
        self._pattern = self._mask(sizes)
        self._latest = sizes

    def __call__(self, sizes: Sizes) -> bool:
        if sizes == self._latest:  # nearly always, and sooner told
            return True
        fits = self._mask(sizes) == self._pattern
        if fits:
            self._latest = sizes
        return fits

    def _mask(self, sizes: Sizes) -> Sizes:
        """-1 for what may vary. Sizes 0 and 1 may not: compilers make special cases of them."""
        masked = dict(sizes)
        for way, dims in self._varying.items():
            if way in sizes:
                masked[way] = tuple(-1 if at in dims and size > 1 else size for at, size in enumerate(sizes[way]))
        return masked


class Budget:
    """The graphs that a module may have in training, or in evaluation, and the calls that run without one.

    Attributes:
        graphs: made so far: calls in which something was compiled.
        calls, eager: all calls since the first graph, and those that ran eagerly.
        spent: why every call runs eagerly from here; empty while graphs serve.
    """

    def __init__(self) -> None:
        self.graphs = self.calls = self.eager = 0
        self.spent = ""
        self.seen = Seen()
        self._fitting: list[Fitting] = []
        self._recent = deque[bool](maxlen=RECENT)

    @property
    def exhausted(self) -> bool:
        return self.graphs >= GRAPHS

    def forget_graphs(self) -> None:
        """They are no longer right; what is known of sizes stays."""
        self.graphs, self.spent = 0, ""
        self._fitting.clear()
        self._recent.clear()

    def fits(self, sizes: Sizes) -> bool:
        """Whether a graph was made for such sizes."""
        return any(fits(sizes) for fits in self._fitting)

    def deserves(self) -> bool:
        """Whether new sizes get a graph: the first ones, and later ones once they are no exception."""
        if self.exhausted:
            return False
        new = sum(self._recent)
        return not self._fitting or (new >= LEARN and new > RARE * len(self._recent))

    def expect(self, sizes: Sizes, varying: Mapping[str, Collection[int]]) -> None:
        """Sizes that a graph is about to be made for."""
        self._fitting.append(Fitting(sizes, varying))

    def count(self, *, captured: bool, eager: bool) -> None:
        """Count a call that something was captured in, or that no graph served."""
        self.calls += 1
        self.eager += eager
        if captured:
            self.graphs += 1
            self._recent.clear()
            return
        self._recent.append(eager)
        if self.exhausted and len(self._recent) >= ENOUGH and sum(self._recent) > STORM * len(self._recent):
            self.spent = f"none of {GRAPHS} graphs fitted {sum(self._recent)} of the last {len(self._recent)} calls"


def merge(*each: Mapping[str, frozenset[int]]) -> dict[str, list[int]]:
    """Dimensions that vary in any of these, in order."""
    ways = dict.fromkeys(way for varying in each for way in varying)
    return {way: sorted(frozenset[int]().union(*(varying.get(way, ()) for varying in each))) for way in ways}
