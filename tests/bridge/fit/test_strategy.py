"""The mixin: the right base in each namespace, nothing changed without an applier, copies that work."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from fastloop.bridge import namespaces
from fastloop.bridge.fit import strategy
from fastloop.errors import NotApplicable
from tests.models import Regression, loader, trainer

pytestmark = pytest.mark.short

PUBLIC = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


@pytest.mark.parametrize("space", namespaces.NAMES)
@pytest.mark.parametrize("name", PUBLIC)
def test_a_mixed_class_keeps_its_namespace_and_layout(space: str, name: str) -> None:
    kind: Any = namespaces.load(space, f"strategies.{name}")
    mixed = strategy.mix_in(kind)
    assert mixed is strategy.mix_in(kind) and issubclass(mixed, kind) and namespaces.find_namespace(mixed) == space
    assert mixed.__name__ == f"FastLoop_{name}"
    ours = [base for base in mixed.__mro__ if base.__module__ == "fastloop.bridge.fit.strategy"]
    assert all(issubclass(base, namespaces.load(space, "strategies.Strategy")) for base in ours) and len(ours) == 2
    alive = kind.__new__(kind)
    undo = strategy.extend(alive)  # CPython refuses where the layouts differ
    assert type(alive) is mixed
    strategy.extend(alive)()  # it is extended already: nothing to do, or to undo
    assert type(alive) is mixed
    undo()
    assert type(alive) is kind


def test_a_class_that_cannot_be_extended_is_a_reason() -> None:
    with pytest.raises(NotApplicable, match="the strategy object cannot be extended: "):
        strategy.extend(object())


def test_only_public_methods_of_lightnings_strategy_are_overridden() -> None:
    base: Any = namespaces.load("lightning.pytorch", "strategies.Strategy")
    ddp: Any = namespaces.load("lightning.pytorch", "strategies.DDPStrategy")
    bases = [kind for kind in strategy.make_mixin("lightning.pytorch").__mro__ if "fastloop" in kind.__module__]
    ours = {name for kind in bases for name, value in vars(kind).items() if callable(value)} - {"__reduce_ex__"}
    assert ours and not [name for name in ours if name.startswith("_")]
    assert all(hasattr(base, name) or hasattr(ddp, name) for name in ours)


class Note:
    """An applier that only notes who called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        results = {
            "loader": lambda loader: loader,
            "to_device": lambda batch, move, index: move(batch),
            "training_step": lambda step, *args, **kwargs: step(*args, **kwargs),
            "backward": lambda run, *args: run(*args),
        }

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.calls or self.calls[-1] != name:
                self.calls.append(name)
            return results.get(name, lambda *args: None)(*args, **kwargs)

        return call


@pytest.mark.parametrize("named", [False, True], ids=["swapped", "by name"])
def test_calls_reach_the_applier_in_lightnings_order(named: bool) -> None:
    strategy.register()
    made = trainer(strategy="fastloop" if named else "auto")
    if not named:
        strategy.extend(made.strategy)
    plain, module, note = Regression(), Regression(), Note()
    module.load_state_dict(plain.state_dict())
    vars(made.strategy)["fastloop"] = note
    made.fit(module, loader(16))
    once = ["to_device", "training_step", "backward"]
    assert note.calls == ["model_built", "loader", *once, *once]
    trainer().fit(plain, loader(16))
    assert module.losses == plain.losses


@pytest.mark.parametrize("space", namespaces.NAMES)
@pytest.mark.parametrize("name", ["fastloop", "fastloop_ddp", "fastloop_fsdp"])
def test_names_are_registered_once_in_every_namespace(space: str, name: str) -> None:
    registry = importlib.import_module(space).strategies.StrategyRegistry
    strategy.register()
    before = registry[name]
    strategy.register()
    assert registry[name] is before and name in registry.available_strategies()


@pytest.mark.parametrize("name", ["fsdp", "fastloop_fsdp"])
def test_lightning_refuses_fsdp_without_a_gpu_before_the_fit(name: str) -> None:
    strategy.register()
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        trainer(strategy=name, devices=2)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("name", ["auto", "fastloop", "fastloop_ddp", "fastloop_fsdp"])
def test_copies_keep_their_class_and_leave_the_applier(how: Any, name: str) -> None:
    made = trainer(strategy=StrategyRegistry.get(name) if "fsdp" in name else name)  # the name needs a GPU
    strategy.extend(made.strategy)
    kind = type(made.strategy)
    vars(made.strategy)["fastloop"] = note = Note()
    twin = how(made.strategy)
    assert type(twin) is kind and "fastloop" not in vars(twin) and vars(made.strategy)["fastloop"] is note
    assert twin.root_device == torch.device("cpu")
    assert set(vars(twin)) == set(vars(made.strategy)) - {"fastloop"}
