"""Modules that return objects such as Hugging Face's ModelOutput pass a rehearsal, and the user gets the same type."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fastloop.feeds.batch_tree import iterate_tensors
from tests.bridge.apply.rehearse.test_rehearsal import Module, config, fit

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class ModelOutput(OrderedDict[str, Any]):
    """The parts of transformers' class that matter here: an ordered dictionary whose subclasses are dataclasses, with
    the fields that are not None as keys, in step with its attributes, and taken by position, too."""

    def __post_init__(self) -> None:
        first, *others = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        if isinstance(first, dict) and all(other is None for other in others):
            name = fields(self)[0].name  # type: ignore[arg-type]
            setattr(self, name, None)
            super().__delitem__(name)
            for key, value in first.items():
                setattr(self, key, value)
            return
        for field in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"You cannot use ``__delitem__`` on a {type(self).__name__} instance.")

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {field.name for field in fields(self)} and value is not None:  # type: ignore[arg-type]
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self.keys())


@dataclass
class Registered(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class Unregistered(Registered):
    """No node of a pytree: torch looks for the very class."""


def _unflatten(values: Any, keys: list[str], output_type: type[ModelOutput]) -> ModelOutput:
    return output_type(**dict(zip(keys, values, strict=True)))


pytree.register_pytree_node(
    Registered,
    lambda output: (list(output.values()), list(output.keys())),
    partial(_unflatten, output_type=Registered),
    serialized_type_name="tests.Registered",
)


class Encoder(torch.nn.Module):
    """Returns an output, with or without hidden states."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.body, self.head = kind, torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        loss = None if labels is None else torch.nn.functional.mse_loss(logits.float(), labels)
        return self.kind(loss=loss, logits=logits, hidden_states=(x, hidden))


class Decoder(torch.nn.Module):
    """Takes an output, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(16, 1)

    def forward(self, encoded: Any) -> Any:
        return type(encoded)(logits=self.out(encoded.hidden_states[-1]) + encoded.logits)


class Model(Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.decoder = Encoder(kind), Decoder()  # type: ignore[assignment]
        self.got: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        encoded = self.net(batch[0], labels=batch[1])
        decoded = self.decoder(encoded)
        self.got += [encoded, decoded]
        loss: torch.Tensor = encoded.loss + torch.nn.functional.mse_loss(decoded["logits"].float(), batch[1])
        self.losses.append(float(loss.detach()))
        return loss


@pytest.mark.parametrize("kind", [Registered, Unregistered])
def test_outputs_pass_the_rehearsal_and_keep_their_type(kind: Any) -> None:
    _, plain, _ = fit(None, Model(kind))
    loop, module, _ = fit(config("amp", "compile"), Model(kind))
    assert loop is not None
    for verdict in loop.verdicts:
        assert verdict.took is True and verdict.rehearsed is not None, verdict.why
        assert 0 < (verdict.rehearsed.deviation or 0) < 0.1
    assert isinstance(module, Model) and isinstance(plain, Model)
    assert len(module.got) == len(plain.got) == 24
    for ours, users in zip(module.got, plain.got, strict=True):
        assert type(ours) is type(users) is kind and list(ours) == list(users)
        assert ours[-1] is ours[list(ours)[-1]] is getattr(ours, list(ours)[-1]), "all three ways to a value"
        assert len(list(iterate_tensors(ours))) == len(list(iterate_tensors(users)))
    assert {each.logits.dtype for each in (*module.got, *plain.got)} == {torch.float32}, "what it keeps is widened"
    assert module.losses == pytest.approx(plain.losses, rel=0.1, abs=0.05)
    assert module.losses[0] == plain.losses[0], "the first step is the user's"
