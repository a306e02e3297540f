"""A model that has run is afterwards as it was, bit for bit, whatever it keeps where."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import multiprocessing
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch

from fastloop.bridge.apply.state import untouched as module_under_test
from fastloop.bridge.apply.state.flags import keep_flags
from fastloop.bridge.apply.state.untouched import StateSnapshot, preserve_parameters, preserve_state
from fastloop.errors import NotApplicable

TOTAL, HISTORY, COUNTS = 0, [1.0], Counter({"a": 1})


class Tracker:
    """A user's own object that is a global variable."""

    noted = 0

    def log(self, value: float) -> None:
        self.__dict__.setdefault("logged", []).append(value)


class Vocabulary(dict[int, list[int]]):
    """A large object that is only read."""


TRACKER, LOG, VOCABULARY = Tracker(), Tracker(), Vocabulary((number, [number]) for number in range(200_000))


def note(value: float) -> None:
    HISTORY.append(value)
    TRACKER.noted += len(VOCABULARY[1])
    LOG.log(value)


class Queue:
    """A user's own object with a list and a number in it."""

    def __init__(self) -> None:
        self.items: list[float] = [1.0]
        self.pushed = 1

    def push(self, value: float) -> None:
        self.items.append(value)
        self.pushed += 1


class Slotted:
    """A user's own object without a ``__dict__``."""

    __slots__ = ("items", "later", "pushed")

    def __init__(self) -> None:
        self.items, self.pushed = [1.0], 1

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "pushed":
            object.__setattr__(self, "items", [*self.items, value])


class Keeper(torch.nn.Module):
    """Changes something of every kind when it is called."""

    shared: ClassVar[list[int]] = []
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.slotted, self.bytes, self.numbers = Slotted(), bytearray(b"ab"), array("d", [1.0])
        self.single, self.cell = numpy.zeros(()), ctypes.c_int(1)
        self.marked = torch.nn.Parameter(torch.ones(1))
        self.marked.uses = 0  # type: ignore[attr-defined]
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("average", torch.zeros(4))
        self.calls, self.names, self.seen = 0, ["a"], {"last": 0.0, "all": [0.0]}
        self.ring, self.kinds, self.counter = deque([1, 2], maxlen=2), {"x"}, Counter({"a": 1})
        self.queue, self.tensor, self.array = Queue(), torch.zeros(3), numpy.zeros(2)
        self.random, self.generator, self.numpy = random.Random(0), torch.Generator(), numpy.random.default_rng(0)
        self.rebound = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0))
            self.tensor.add_(1)
        self.rebound = self.rebound + 1
        self.calls += 1
        self.names.append("b")
        self.names[0] = "c"
        self.seen["last"], self.seen["new"] = 3.0, 1
        self.seen["all"].append(2.0)  # type: ignore[attr-defined]
        self.ring.append(self.calls)
        self.kinds.add("y")
        self.counter["a"] += 1
        self.queue.push(0.5)
        self.array += 1
        self.slotted.items.append(3.0)
        self.slotted.pushed, self.slotted.later = 2, 1
        self.bytes += b"c"
        self.numbers[0] = 2.0
        self.numbers.append(3.0)
        self.single[...] = 5.0
        self.cell.value += 1
        self.marked.uses = getattr(self.marked, "uses", 0) + 1  # type: ignore[attr-defined]
        type(self).total += 1
        type(self).new = 1  # type: ignore[attr-defined]
        self.shared.append(1)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.later = "not there before"
        global TOTAL, ADDED
        TOTAL, ADDED = TOTAL + 1, True
        note(2.0)
        COUNTS["a"] += 1
        drawn = self.random.random() + float(self.numpy.random()) + float(torch.rand(1, generator=self.generator))
        return y * drawn + random.random() + float(numpy.random.random())


def look_at_flags() -> tuple[Any, ...]:
    determinism = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    return torch.backends.cudnn.benchmark, precision, threads, torch.get_default_dtype(), *determinism


def look(module: Keeper) -> dict[str, Any]:
    """All that it keeps, as plain values."""
    return {
        "norm": module.norm.running_mean.tolist(),  # type: ignore[union-attr]
        "batches": int(module.norm.num_batches_tracked or 0),
        "average": module.average.tolist(),
        **{
            name: copy.deepcopy(getattr(module, name))
            for name in ("calls", "names", "seen", "ring", "kinds", "counter")
        },
        "queue": copy.deepcopy(vars(module.queue)),
        "tensor": module.tensor.tolist(),
        "rebound": module.rebound.tolist(),
        "array": module.array.tolist(),
        "random": module.random.getstate(),
        "generator": module.generator.get_state().tolist(),
        "numpy": copy.deepcopy(module.numpy.bit_generator.state),
        "later": hasattr(module, "later"),
        "slots": (list(module.slotted.items), module.slotted.pushed, hasattr(module.slotted, "later")),
        "bytes": bytes(module.bytes),
        "numbers": module.numbers.tolist(),
        "single": float(module.single),
        "cell": module.cell.value,
        "parameter": module.marked.uses,  # type: ignore[attr-defined]
        "class": (Keeper.total, list(Keeper.shared), hasattr(Keeper, "new")),
        "global variables": (TOTAL, list(HISTORY), dict(COUNTS), str((vars(TRACKER), vars(LOG))), "ADDED" in globals()),
        "flags": look_at_flags(),
        "streams": (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())),
    }


KEPT = tuple(look(Keeper()))


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    torch.manual_seed(0)
    flags = keep_flags()
    yield Keeper().train()
    flags()
    Keeper.total = 0
    Keeper.shared.clear()
    if hasattr(Keeper, "new"):
        del Keeper.new
    globals().pop("ADDED", None)


@pytest.mark.parametrize("name", KEPT)
def test_everything_is_put_back(keeper: Keeper, name: str) -> None:
    x, before = torch.randn(8, 4), look(keeper)
    with preserve_state(keeper):
        keeper(x)
        assert look(keeper)[name] != before[name], "the call changed it"
    assert look(keeper)[name] == before[name]


def test_the_next_call_computes_what_it_would_have(keeper: Keeper) -> None:
    twin, x = copy.deepcopy(keeper), torch.randn(8, 4)

    def run(module: Keeper, rehearse: Callable[[Keeper], None]) -> torch.Tensor:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        rehearse(module)
        flags = keep_flags()
        out = module(x)
        flags()
        return out

    def guarded(module: Keeper) -> None:
        with preserve_state(module):
            for _ in range(3):
                module(x)

    plain = run(copy.deepcopy(twin), lambda module: None)
    assert torch.equal(run(keeper, guarded), plain)

    def careless(module: Keeper) -> None:
        module(x)

    assert not torch.equal(run(twin, careless), plain), "the control: without the guard"


def test_an_exception_leaves_no_trace_either(keeper: Keeper) -> None:
    before = look(keeper)
    with pytest.raises(ZeroDivisionError), preserve_state(keeper):
        keeper(torch.randn(8, 4))
        raise ZeroDivisionError
    assert look(keeper) == before


def test_what_hooks_keep_is_put_back(keeper: Keeper) -> None:
    seen: list[float] = []
    count = 0

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        nonlocal count
        count += 1
        seen.append(float(output.sum()))

    class Collector:
        def __init__(self) -> None:
            self.outputs: list[torch.Tensor] = []

        def hook(self, module: Any, args: Any, output: torch.Tensor) -> None:
            self.outputs.append(output.detach())

    collector = Collector()
    keeper.norm.register_forward_hook(note)
    keeper.drop.register_forward_hook(collector.hook)
    with preserve_state(keeper):
        keeper(torch.randn(8, 4))
        assert count == 1 and len(seen) == 1 and len(collector.outputs) == 1, "the hooks ran"
    assert (count, seen, collector.outputs) == (0, [], [])
    assert len(keeper.norm._forward_hooks) == 1, "and stay"


def test_modules_outside_of_the_models_own_registers_are_put_back() -> None:
    """Held in a plain list, say, by a module that comes before them."""

    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.others = [torch.nn.BatchNorm1d(4)]
            self.own = self.others[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.others[1](self.own(x))

    model = Holds()
    model.others.append(torch.nn.BatchNorm1d(4))
    with preserve_state(model):
        model(torch.randn(8, 4))
        assert [int(norm.num_batches_tracked) for norm in model.others] == [1, 1]
    assert [int(norm.num_batches_tracked) for norm in model.others] == [0, 0]


def test_a_model_that_keeps_too_much_is_refused(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MOST_OBJECTS", 20)
    with pytest.raises(NotApplicable, match="keeps more than 20 Python objects"), preserve_state(keeper):
        pass


def test_parameters_and_gradients_are_left_alone(keeper: Keeper) -> None:
    weight = keeper.norm.weight
    weight.grad = torch.ones_like(weight)
    grad, version = weight.grad, weight._version
    with preserve_state(keeper):
        keeper(torch.randn(8, 4))
    assert keeper.norm.weight is weight and weight.grad is grad and weight._version == version


def test_what_cannot_be_put_back_keeps_nothing_else_from_it(keeper: Keeper) -> None:
    keeper.register_buffer("wide", torch.ones(1).expand(8))
    keeper.old = numpy.random.RandomState(0)
    before, drawn = look(keeper), str(keeper.old.get_state())
    with preserve_state(keeper):
        keeper(torch.randn(8, 4))
        keeper.old.rand(3)
    assert look(keeper) == before and str(keeper.old.get_state()) == drawn

    class Stuck(dict[str, int]):
        def clear(self) -> None:
            raise RuntimeError("frozen")

    keeper.stuck = Stuck(a=1)
    before = look(keeper)
    with pytest.raises(RuntimeError, match="frozen"), preserve_state(keeper):
        keeper(torch.randn(8, 4))
        keeper.stuck["b"] = 2
    assert look(keeper) == before


def test_a_module_that_is_no_registered_child_is_put_back(keeper: Keeper) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aside = [keeper]  # as people keep a teacher out of the state dict

    holder, before = Holder(), look(keeper)
    vars(holder)["hidden"] = keeper
    with preserve_state(holder):
        keeper(torch.randn(8, 4))
        assert look(keeper) != before
    assert look(keeper) == before


@pytest.mark.parametrize("kept", [itertools.count(), iter([1.0]), (number for number in range(3))])
def test_a_model_that_keeps_an_iterator_is_refused(keeper: Keeper, kept: Any) -> None:
    keeper.queue.source = kept  # type: ignore[attr-defined]
    with pytest.raises(NotApplicable, match="the model keeps an iterator"), preserve_state(keeper):
        pass


def test_what_a_cache_took_is_dropped() -> None:
    """Results of a module that was changed only for a trial; the control is a cache that took nothing."""
    keeper = Keeper()
    keeper.table = functools.lru_cache(lambda length: torch.ones(length))  # type: ignore[assignment]
    first = keeper.table(3)
    with preserve_state(keeper):
        assert keeper.table(3) is first
    assert keeper.table(3) is first
    with preserve_state(keeper):
        tried = keeper.table(4)
    assert keeper.table(4) is not tried


def test_what_processes_share_is_put_back(keeper: Keeper) -> None:
    keeper.shared_values = one, many = multiprocessing.Value("i", 1), multiprocessing.Array("d", [1.0, 2.0])
    with preserve_state(keeper):
        one.value, many[1] = 2, 3.0
    assert one.value == 1 and list(many) == [1.0, 2.0]


@pytest.mark.parametrize("change", ["slot", "class", "parameter"])
def test_a_change_of_names_is_found(keeper: Keeper, change: str) -> None:
    kept = StateSnapshot()
    kept.capture_module(keeper)
    assert kept.find_change() is None
    if change == "slot":
        keeper.slotted.later = 3
    elif change == "class":
        Keeper.total = 7
    else:
        keeper.marked.uses = 7  # type: ignore[attr-defined]
    expected = {"slot": "Slotted.later", "class": "Keeper.total", "parameter": "Parameter.uses"}
    assert kept.find_change() == expected[change]
    kept.restore()
    assert kept.find_change() is None


@pytest.mark.parametrize("raised", [ValueError("the user's own"), KeyboardInterrupt()])
def test_an_exception_of_a_step_that_writes_to_parameters_passes(raised: BaseException) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(type(raised)) as seen, preserve_parameters([weight]):
        weight.data.mul_(2)
        raise raised
    assert seen.value is raised and torch.equal(weight, torch.ones(3)), "put back all the same"


def test_a_lost_device_does_not_hide_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(IndexError, match="theirs"), preserve_parameters([torch.nn.Parameter(torch.ones(3))]):
        monkeypatch.setattr(torch.linalg, "vector_norm", lose)
        raise IndexError("theirs")


@pytest.mark.filterwarnings("error")
def test_a_write_to_the_imaginary_part_of_a_parameter_is_seen() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0 + 2.0j]))
    with pytest.raises(NotApplicable, match="changes parameters"), preserve_parameters([weight]):
        weight.data.imag.mul_(2)
    assert weight.tolist() == [1.0 + 2.0j]
    with preserve_parameters([weight]):
        pass
