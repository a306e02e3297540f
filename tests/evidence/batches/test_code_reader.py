"""Code that changes its batch in place, and code that only looks like it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fastloop.evidence.batches.code_reader import CodeReader


class Cloud:
    def __init__(self) -> None:
        self.pos, self.visits = np.zeros(3), 0

    def centre(self) -> None:
        self.pos -= self.pos.mean()

    def measure(self) -> float:
        return float(self.pos.sum())


class Shifts(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        rows.add_(1)
        return rows


class Scales(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        rows = rows * 2
        return rows.add_(1)


def halve(rows: Any) -> None:
    rows.mul_(0.5)


def double(rows: Any) -> Any:
    return [row * 2 for row in rows]


def get_boxes(target: Any) -> Any:
    return target["boxes"]


class Net(torch.nn.Module):
    """A module whose methods are what the tests read."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.shifts, self.scales = torch.nn.Linear(2, 2), Shifts(), Scales()

    def prepare(self, batch: Any) -> Any:
        images, targets = batch
        return torch.stack(images), targets

    # -- these change what the batch contains

    def divides_items(self, batch: Any, _: int) -> None:
        _, targets = batch
        for target in targets:
            target["boxes"] /= 32

    def divides_in_zip(self, batch: Any, _: int) -> None:
        images, targets = batch
        for _, (image, target) in enumerate(zip(images, targets, strict=True)):
            target["boxes"].div_(image.shape[0])

    def divides_slice(self, batch: Any, _: int) -> None:
        for target in batch[1]:
            boxes = target["boxes"]
            boxes[:, 0] = 0

    def adds_by_comprehension(self, batch: Any, _: int) -> Any:
        return [target["boxes"].add_(1) for target in batch[1]]

    def adds_to_view(self, batch: Any, _: int) -> None:
        rows = batch[1][0]["boxes"].float().view(-1)
        rows += 1

    def writes_out(self, batch: Any, _: int) -> None:
        for target in batch[1]:
            np.divide(target["boxes"], 32, out=target["boxes"])

    def updates_item(self, batch: Any, _: int) -> None:
        for target in batch[1]:
            target.update(boxes=0)

    def sets_item_of_alias(self, batch: Any, _: int) -> None:
        first, *rest = list(batch[1])
        rest[0]["boxes"] = first

    def moves_and_divides(self, batch: Any, _: int) -> None:
        targets = [{key: value.to("cpu") for key, value in target.items()} for target in batch[1]]
        for target in targets:
            target["boxes"] -= 1

    def divides_by_helper(self, batch: Any, _: int) -> None:
        for target in batch[1]:
            halve(get_boxes(target))

    def divides_prepared(self, batch: Any, _: int) -> None:
        images, targets = self.prepare(batch)
        images -= 1
        targets[0]["boxes"] *= 2

    def divides_in_branch(self, batch: Any, _: int) -> None:
        rows = batch[1][0] if self.training else torch.zeros(2)
        rows.sub_(1)

    def divides_in_layer(self, batch: Any, _: int) -> Any:
        return self.net(self.shifts(batch[0][0]))

    def divides_in_inner_function(self, batch: Any, _: int) -> Any:
        def change(rows: Any) -> None:
            rows.mul_(2)

        change(batch[0][0])

    def divides_in_closure(self, batch: Any, _: int) -> Any:
        def closure() -> None:
            batch[0][0].mul_(2)

        self.net.apply(closure)

    def centres(self, batch: Any, _: int) -> None:
        batch[0][0].centre()

    def counts_visits(self, batch: Any, _: int) -> None:
        batch[0][0].visits += 1

    def divides_from_numpy(self, batch: Any, _: int) -> None:
        rows = torch.from_numpy(batch[0][0])
        rows /= 2

    def divides_copied_dict(self, batch: Any, _: int) -> None:
        targets = [dict(target) for target in batch[1]]
        targets[0]["boxes"] /= 2

    # -- these do not

    def sets_new_dict(self, batch: Any, _: int) -> None:
        targets = [dict(target) for target in batch[1]]
        targets[0]["boxes"] = targets[0]["boxes"] / 2

    def moves(self, batch: Any, _: int) -> Any:
        images, targets = batch
        images = torch.stack([image.to("cpu") for image in images])
        images -= 0.5
        targets = [{key: value.to("cpu") for key, value in target.items()} for target in targets]
        total = 0.0
        for image, target in zip(images, targets, strict=True):
            total += functional.l1_loss(self.net(image), target["boxes"])
        total /= len(targets)
        return total

    def normalizes(self, batch: Any, _: int) -> Any:
        rows = batch[0][0]
        rows = rows - rows.mean()
        rows /= rows.std()
        return self.scales(rows)

    def appends(self, batch: Any, _: int) -> Any:
        found = []
        for target in batch[1]:
            found.append(target["boxes"].sum())
        found.sort()
        return found

    def clones(self, batch: Any, _: int) -> Any:
        rows = batch[0][0].clone()
        rows.add_(1)
        targets = copy.deepcopy(batch[1])
        targets[0]["boxes"] /= 2
        return rows

    def doubles(self, batch: Any, _: int) -> Any:
        rows = double(batch[0])
        rows[0] = 1
        return rows

    def measures(self, batch: Any, _: int) -> Any:
        return batch[0][0].measure() / batch[0][0].visits

    def puts_on_top(self, batch: Any, _: int) -> None:
        batch["more"] = batch["rows"] - 1
        batch.pop("rows")


CHANGING = list(vars(Net))[list(vars(Net)).index("divides_items") : list(vars(Net)).index("sets_new_dict")]
HARMLESS = list(vars(Net))[list(vars(Net)).index("sets_new_dict") :]


def changes(name: str, depth: int | None) -> bool:
    return CodeReader(Net(), [Cloud]).changes(vars(Net)[name], {"batch": depth})


@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_a_member_of_its_batch(name: str) -> None:
    assert changes(name, 2) and changes(name, 0)
    assert not changes(name, None), "nothing of it is anybody else's"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_only_what_it_has_made(name: str) -> None:
    assert not changes(name, 2)


def test_the_depth_decides_whether_a_container_is_the_batchs_own() -> None:
    assert changes("puts_on_top", 0) and not changes("puts_on_top", 1)
    assert changes("updates_item", 2) and not changes("updates_item", 3)


class Remembers(Net):
    def training_step(self, batch: Any, _: int) -> None:
        self.last, self.count = batch[0], 0
        self.all = []
        self.all.append(batch[1])

    def on_train_batch_end(self) -> None:
        self.last[0].zero_()

    def on_train_epoch_end(self) -> None:
        for targets in self.all:
            targets[0]["boxes"] /= 2

    def on_fit_end(self) -> None:
        self.count += 1
        self.last = None


def test_what_is_kept_in_attributes_and_changed_later() -> None:
    reader = CodeReader(Remembers())
    assert not reader.changes(Remembers.training_step, {"batch": 2})
    assert reader.kept == {"last": 1, "all": 2}
    assert reader.changes(Remembers.on_train_batch_end, {}) and reader.changes(Remembers.on_train_epoch_end, {})
    assert not reader.changes(Remembers.on_fit_end, {})


def test_code_that_cannot_be_read_may_change_anything() -> None:
    space: dict[str, Callable[..., Any]] = {}
    exec("def step(self, batch):\n    return 1", space)
    assert CodeReader(Net()).changes(space["step"], {"batch": 3})
    assert not CodeReader(Net()).changes(space["step"], {"batch": None})
