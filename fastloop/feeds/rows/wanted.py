"""The want that picks a batch's rows at once, and when a rung may use it. Imports torch only when used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.feeds.device_store.wanted import SHARE, explain_own_batches, measure_free
from fastloop.records.facts import Facts, LoaderFacts, RowFacts
from fastloop.records.plan import Change


@dataclass(frozen=True, kw_only=True)
class PickedRows:
    """The want ``loader.engine`` for rows that are in memory already."""

    device: str
    """Device type; the process's current device of this type is used."""
    most_bytes: int | None = None
    """Most memory for a copy on the device; None for a share of what is free there at that time."""
    share: float = SHARE

    live: list[Any] = field(default_factory=list, compare=False, repr=False, metadata={"json": None})
    """The engine that `check` made and `make` has not taken yet."""

    def check(self, loader: Any, say: Callable[[str], None] = lambda _line: None) -> Mapping[str, Any]:
        """Put the rows in place and compare a few samples.

        Raises:
            NotApplicable: the rows do not fit, or differ from the user's samples.
        """
        import torch

        from fastloop.feeds.rows.engine import make_engine

        place = torch.cuda.current_device() if self.device == "cuda" else None
        device = torch.device(self.device) if place is None else torch.device(self.device, place)
        most = int(self.share * measure_free(self.device)) if self.most_bytes is None else self.most_bytes
        engine = make_engine(loader, device, most_bytes=most)
        self.live[:] = [engine]
        return engine.evidence()

    def make(self, loader: Any) -> Any:
        """Return the engine for this loader, which is the checked one, or our copy of it."""
        if not self.live:
            self.check(loader)
        engine = self.live.pop()
        engine.loader = loader
        return engine


def plan_rows(facts: Facts, loader: LoaderFacts, most_bytes: int | None = None, *, share: float = SHARE) -> Change:
    """Plan the change of a rung that picks this loader's rows at once.

    Args:
        most_bytes: most memory for a copy on the device; None for a `share` of what is free there.
    Raises:
        NotApplicable: batches picked so might differ from the loader's.
    """
    if (why := explain_no_rows(facts, loader)) is not None:
        raise NotApplicable(f"rows cannot be picked at once: {why}")
    assert isinstance(loader.rows, RowFacts)
    on_gpu = facts.device == "cuda"
    where = f"on the device, which holds all {loader.rows.count:,} rows" if on_gpu else "without a call per sample"
    note = f"picks each batch of {loader.rows.what} at once {where}"
    elsewhere = dataclasses.replace(loader, engine="a batch picked at once", on_device=on_gpu, num_workers=0)
    want = PickedRows(device=facts.device, most_bytes=most_bytes, share=share)
    return Change(wants={"loader.engine": want}, parity="exact", notes=(note,), facts={"loader": elsewhere})


def explain_no_rows(facts: Facts, loader: LoaderFacts) -> str | None:
    """Return why a batch's rows cannot be picked at once; None if they can."""
    if isinstance(loader.rows, str):
        return loader.rows
    if elsewhere := [each for each in loader.rows.devices if each not in ("cpu", facts.device)]:
        return f"{loader.rows.what} holds tensors on {elsewhere[0]}, and this run is on {facts.device}"
    if facts.reload_every_n_epochs:
        return "the Trainer reloads its loaders, and each copy of the rows would stay"
    if loader.changes_within:
        return f"training changes the data: {loader.changes_within[0]}"
    return explain_own_batches(facts, loader)
