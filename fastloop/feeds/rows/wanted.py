"""The want that picks a batch's rows at once, and when a rung may use it. Imports torch only when used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.feeds.device_store.wanted import SHARE, CheckedEngine, explain_own_batches
from fastloop.records.facts import Facts, Follows, LoaderFacts, RowFacts
from fastloop.records.plan import Change


@dataclass(frozen=True, kw_only=True)
class PickedRows(CheckedEngine):
    """The want for rows that are already in memory."""

    share: float = SHARE
    """Share of the device's free memory, if `most_bytes` is None."""
    follows: Follows = "batches"
    """From when on other rows in the dataset count, as in the user's loader."""

    def _start(self, loader: Any, say: Callable[[str], None]) -> Any:
        import torch

        from fastloop.feeds.rows.engine import RowEngine

        place = torch.cuda.current_device() if self.device == "cuda" else None
        device = torch.device(self.device) if place is None else torch.device(self.device, place)
        return RowEngine(loader, device, self._find_most(self.share), follows=self.follows)


def plan_rows(facts: Facts, loader: LoaderFacts, most_bytes: int | None = None, *, share: float = SHARE) -> Change:
    """Plan the change of a rung that picks this loader's rows at once.

    Args:
        most_bytes: most memory for a copy on the device; None for a `share` of what is free there.

    Raises:
        NotApplicable: batches picked this way might differ from the loader's.
    """
    if (why := explain_no_rows(facts, loader)) is not None:
        raise NotApplicable(f"rows cannot be picked at once: {why}")
    assert isinstance(loader.rows, RowFacts)
    on_gpu = facts.device == "cuda"
    where = f"on the device, which holds all {loader.rows.count:,} rows" if on_gpu else "without a call per sample"
    note = f"picks each batch of {loader.rows.what} at once {where}"
    elsewhere = dataclasses.replace(loader, engine="the row picker", on_device=on_gpu, num_workers=0)
    follows: Follows = "batches" if not loader.num_workers else "nothing" if loader.persistent_workers else "epochs"
    want = PickedRows(device=facts.device, most_bytes=most_bytes, share=share, follows=follows)
    return Change(wants={"loader.engine": want}, parity="exact", notes=(note,), facts={"loader": elsewhere})


def explain_no_rows(facts: Facts, loader: LoaderFacts) -> str | None:
    """Return why a batch's rows cannot be picked at once; None if they can."""
    if isinstance(loader.rows, str):
        return loader.rows
    if elsewhere := [each for each in loader.rows.devices if each not in ("cpu", facts.device)]:
        return f"{loader.rows.what} holds tensors on {elsewhere[0]}, and this run is on {facts.device}"
    if facts.reload_every_n_epochs:
        return "the Trainer reloads its loaders, and each copy of the rows would stay in memory"
    if loader.changes_within:
        return f"training changes the data: {loader.changes_within[0]}"
    return explain_own_batches(facts, loader)
