"""The engine that makes a loader's batches by picking all their rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from fastloop.errors import NotApplicable, let_through
from fastloop.feeds.device_store.draws import send
from fastloop.feeds.images.nested import find_user_dataset
from fastloop.feeds.images.own_samples import untouched_generators
from fastloop.feeds.images.reading import spread_indices
from fastloop.feeds.rows.reading import Column, NotRows, Rows, read_rows
from fastloop.records.facts import Follows, format_bytes

COMPARED = 16
"""Samples that must equal those of the user's loader, bit for bit, before the engine is used."""


class RowEngine:
    """Returns the same batches as the loader, bit for bit; only the sampler draws random numbers for them. A dataset
    that was given other rows is read again; if it does more than pick rows by then, its own method makes the samples.

    Args:
        loader: its batch sampler chooses the samples; a window of batches becomes one batch.
        device: where the batches are made. Rows on the CPU are copied there once, and again after they were changed in
            place; if this is the CPU, batches are picked from the user's own objects.
        most_bytes: the most memory for copies on the device.
        follows: when other objects in the dataset count: from the next batch on, from the next epoch on, as with the
            user's own workers, or never, as with workers that stay.

    Raises:
        NotApplicable: the dataset's samples are no rows, they do not fit, or differ from the loader's.
    """

    begins_at_iter = True
    advice = (
        "all rows of a batch are already picked at once; a larger batch (which changes the training) needs fewer picks"
    )

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, most_bytes: int, *, follows: Follows = "batches"
    ) -> None:
        self.loader, self.batches = loader, 0
        self._device, self._most_bytes, self._follows = device, most_bytes, follows
        self._dataset = find_user_dataset(loader.dataset)
        self._rows: Rows | None = None
        """None: the dataset does more than pick rows, or they do not fit."""
        self._columns: dict[int, _Values] = {}
        self._read()
        self._relied_on = _list_relied_on(self._dataset, self._rows)

    def load(self, seed: int) -> Iterator[Any]:
        """Return one epoch's batches. The seed is unused: workers would draw nothing from it."""
        if self._follows == "epochs":
            self._follow_changes()
        for column in self._columns.values():
            column.begin_epoch()
        return map(self.make, iter(self.loader.batch_sampler))  # type: ignore[arg-type]

    def make(self, indices: Iterable[Any]) -> Any:
        """Make the batch of these samples, in the form of the default collate function."""
        indices = list(indices)
        if self._follows == "batches":
            self._follow_changes()
        batch = None if self._rows is None else self._pick(self._rows, indices)
        if batch is None:
            return default_collate([self._dataset[index] for index in indices])
        self.batches += 1
        return batch

    def _pick(self, rows: Rows, indices: list[Any]) -> Any:
        """Return the batch; None if the indices are not row numbers: torch accepts other keys too."""
        places = np.asarray(indices)
        if places.ndim != 1 or places.dtype.kind not in "iu" or not len(places):
            return None
        places = places.astype(np.int64)
        outside = places[(places >= rows.count) | (places < -rows.count)]
        if outside.size:
            raise IndexError(f"the sampler requested sample {outside[0]:,} of a dataset of {rows.count:,}")
        places = np.where(places < 0, places + rows.count, places)
        if rows.places is not None:
            places = rows.places[places]
        return self._collate(rows.form, places, send(places, self._device))

    def _follow_changes(self) -> None:
        """Read the dataset again if it holds other objects than before, such as new labels."""
        now = _list_relied_on(self._dataset, self._rows)
        if len(now) == len(self._relied_on) and all(map(is_, now, self._relied_on)):
            return
        try:
            self._read()
        except Exception as error:  # the user's own, too: the loader may never ask for the samples compared here
            let_through(error)
            self._rows, self._columns = None, {}
        self._relied_on = _list_relied_on(self._dataset, self._rows)

    def _read(self) -> None:
        """Put the rows in place and compare a few samples with the dataset's own."""
        try:
            rows = read_rows(self._dataset)
        except NotRows as why:
            raise NotApplicable(str(why)) from None
        if not rows.count:
            raise NotApplicable("the dataset is empty")
        check_room(rows, self._device, self._most_bytes)
        self._rows, self._columns = rows, {id(column): _Values(column, self._device) for column in rows.columns}
        chosen = spread_indices(rows.count, COMPARED)
        with untouched_generators():
            expected = default_collate([self._dataset[index] for index in chosen])
            made = self._pick(rows, chosen)
        if not _is_same(made, expected):
            raise NotApplicable("rows picked at once differ from the loader's batch")

    def _collate(self, form: Any, places: Any, sent: torch.Tensor) -> Any:
        if isinstance(form, Column):
            return self._columns[id(form)].pick(places, sent)
        if isinstance(form, dict):
            return {key: self._collate(part, places, sent) for key, part in form.items()}
        return [self._collate(part, places, sent) for part in form]

    def evidence(self) -> Mapping[str, Any]:
        """Return the number of batches made, and facts about the rows."""
        kept = sum(each.kept_bytes for each in self._columns.values())
        return {"row_batches": self.batches, "rows": self._rows.count if self._rows else 0, "kept_bytes": kept}


def _list_relied_on(dataset: Any, rows: Rows | None) -> list[Any]:
    """List the classes, methods and attributes that decide how a dataset makes samples from rows; all attributes if it
    does not."""
    found: list[Any] = []
    while True:
        kind, held = type(dataset), getattr(dataset, "__dict__", {})
        names = held if rows is None or kind is Subset else filter(held.__contains__, rows.names)
        found += [kind, getattr(kind, "__getitem__", None), *(held[name] for name in names)]
        if kind is not Subset:
            return found
        dataset = dataset.dataset


class _Values:
    """One column, on the device where batches are made."""

    def __init__(self, column: Column, device: torch.device) -> None:
        self._values, self._changes, self._device = column.values, column.changes, device
        self._is_there = isinstance(column.values, torch.Tensor) and column.values.device == device
        self._kept: torch.Tensor | None = None
        self._version = -1

    def begin_epoch(self) -> None:
        """Let arrays and lists be copied again: unlike a tensor, they do not count changes."""
        if not isinstance(self._values, torch.Tensor):
            self._kept = None

    @property
    def kept_bytes(self) -> int:
        return 0 if self._kept is None else int(self._kept.nbytes)

    def pick(self, places: Any, sent: torch.Tensor) -> torch.Tensor:
        """Return the rows at these places, as the default collate function stacks them.

        Args:
            sent: the same places on the device.
        """
        if self._device.type == "cpu":
            return _apply(self._changes, _pick_on_host(self._values, places))
        if self._is_there:
            return _apply(self._changes, self._values.index_select(0, sent))
        return self._copy().index_select(0, sent)

    def _copy(self) -> torch.Tensor:
        """Return the column on the device, copied again if it is a tensor that was changed in place."""
        version = self._values._version if isinstance(self._values, torch.Tensor) else 0
        if self._kept is None or version != self._version:
            self._kept, self._version = _apply(self._changes, _into_tensor(self._values)).to(self._device), version
        return self._kept


def _apply(changes: Sequence[Any], values: torch.Tensor) -> torch.Tensor:
    for change in changes:
        values = change(values)
    return values


def _pick_on_host(values: Any, places: Any) -> torch.Tensor:
    """Pick with NumPy: for a few hundred kilobytes torch starts its threads, which took 7 ms on a busy CPU, not 0.1."""
    if isinstance(values, list):
        return _into_tensor([values[place] for place in places])
    if isinstance(values, torch.Tensor):
        if values.dtype == torch.bfloat16:  # unknown to NumPy
            return values.index_select(0, torch.from_numpy(places))
        values = values.numpy()
    return torch.from_numpy(values.take(places, axis=0))


def _into_tensor(values: Any) -> torch.Tensor:
    """Convert values to a tensor. Python's floats become float64, as in torch's default collate function."""
    if isinstance(values, list):
        return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def check_room(rows: Rows, device: torch.device, most_bytes: int) -> None:
    """Raise NotApplicable if more than `most_bytes` of rows would have to be copied to the device."""
    need = 0 if device.type == "cpu" else rows.count_bytes()
    if need > most_bytes:
        raise NotApplicable(
            f"the rows take {format_bytes(need)}, but may take at most {format_bytes(most_bytes)} there"
        )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two batches have the same form and are equal bit for bit, on whatever device they are."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_form = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return same_form and torch.equal(_read_bits(one), _read_bits(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(_is_same, one, other))


def _read_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the values as bytes, so that NaN equals NaN."""
    return values.cpu().contiguous().view(torch.uint8)
