"""The arithmetic of what counts batches."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.evidence.worker_limits import count_used_batches
from fastloop.feeds.accumulation_windows import (
    count_batches_between_validations,
    explain_no_merge,
    list_changed_counts,
)
from fastloop.records.facts import Facts, LoaderFacts


@pytest.mark.parametrize(("limit", "expected"), [(None, 10), (4, 4), (99, 10), (1.0, 10), (0.25, 2), (0.05, 0)])
def test_used_batches(limit: Any, expected: int) -> None:
    assert count_used_batches(10, limit) == expected


@pytest.mark.parametrize(("interval", "expected"), [(4, 4), (1.0, 10), (0.5, 5), (0.01, 1)])
def test_batches_between_validations(interval: Any, expected: int) -> None:
    assert count_batches_between_validations(10, interval) == expected


DENSE, RAGGED = 12, 10
MOVED = "is not a multiple of accumulate_grad_batches=4: validation would move; write a multiple"


@pytest.mark.parametrize(
    ("batches", "facts", "reason"),
    [
        (DENSE, {}, None),
        (RAGGED, {}, None),
        (DENSE, {"val_check_interval": None}, None),
        (DENSE, {"val_check_interval": 8}, None),
        (DENSE, {"val_check_interval": 4}, None),
        (DENSE, {"val_check_interval": 6}, f"val_check_interval=6 {MOVED}"),
        (DENSE, {"val_check_interval": 0.5}, f"val_check_interval=0.5 (6 batches) {MOVED}"),
        (DENSE, {"val_check_interval": 0.34}, None),  # 4 batches
        (RAGGED, {"val_check_interval": 10}, None),  # the end of an epoch
        (RAGGED, {"val_check_interval": 8}, None),
        (
            RAGGED,
            {"val_check_interval": 4},
            "val_check_interval=4: the short last window of an epoch (2 of 4 batches)"
            " would count as a full one, with a validation after it",
        ),
        (DENSE, {"val_check_interval": 4, "val_every_n_epochs": None}, None),
        (RAGGED, {"val_check_interval": 10, "val_every_n_epochs": None}, None),
        (
            RAGGED,
            {"val_check_interval": 8, "val_every_n_epochs": None},
            "val_check_interval=8 counts across epochs (check_val_every_n_epoch=None), and an epoch has 10 batches, not"
            " a multiple of accumulate_grad_batches=4: validation would move",
        ),
        (
            DENSE,
            {"limit_train_batches": 10, "val_check_interval": 4},
            "val_check_interval=4: the short last window of an epoch (2 of 4 batches) would count as a full one, with a"
            " validation after it",
        ),
        (
            DENSE,
            {"skips_batches": True},
            "training_step returns no loss for some batches: the whole merged window would be skipped",
        ),
        (
            DENSE,
            {"reads_batch_counts": ("Net.training_step reads trainer.is_last_batch",)},
            "Net.training_step reads trainer.is_last_batch, which changes if windows are merged",
        ),
        (
            3,
            {},
            "an epoch has 3 batches, fewer than the 4 of one window, so accumulation is already cut short;"
            " lower accumulate_grad_batches",
        ),
        (
            DENSE,
            {"limit_train_batches": 0.2},
            "an epoch has 2 batches, fewer than the 4 of one window, so accumulation is already cut short; lower"
            " accumulate_grad_batches",
        ),
        (
            0,
            {},
            "an epoch has 0 batches, fewer than the 4 of one window, so accumulation is already cut short;"
            " lower accumulate_grad_batches",
        ),
    ],
)
def test_when_windows_cannot_be_merged(batches: int, facts: dict[str, Any], reason: str | None) -> None:
    loader = LoaderFacts(kind="DataLoader", batch_size=8, batches=batches)
    assert explain_no_merge(Facts(accumulate=4, loader=loader, **facts), loader) == reason


READY_MADE = (
    "K yields ready-made batches, so an accumulation window cannot be merged; a micro_batch smaller than the batch can"
    " still split them"
)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ({"is_dataloader": False}, READY_MADE),
        ({"map_style": False}, READY_MADE),
        ({"auto_collates": False}, READY_MADE),
        ({"stateful": True}, "K keeps its own position for resuming, which merging would shift"),
        ({}, "K does not say how many samples a batch has"),
        ({"batches": None}, "K does not say how many batches an epoch has, so the last window's size is unknown"),
    ],
)
def test_which_loaders_cannot_be_merged(loader: dict[str, Any], reason: str) -> None:
    record = LoaderFacts(**{"kind": "K", "batches": 12, **loader})
    assert explain_no_merge(Facts(accumulate=4, loader=record), record) == reason


def test_what_counts_steps_is_named() -> None:
    loader = LoaderFacts(kind="DataLoader", batches=12, custom_collate=True, num_workers=2)
    notes = list_changed_counts(Facts(accumulate=4, val_check_interval=8, limit_train_batches=0.5), loader)
    assert notes == [
        "batch_idx and on_train_batch_* now count optimizer steps: one call for every 4 batches",
        "val_check_interval 8 batches = 2 steps",
        "limit_train_batches 0.5 still counts your loader's batches",
        "scheduler frequencies that count batches still do; max_steps, learning rates and global_step count optimizer"
        " steps, each with the same samples as before",
        "each of your batches is collated as before, but one worker collates 4 in a row, so random draws there differ",
    ]
    draws = LoaderFacts(kind="DataLoader", batches=12, draws_random=("Crop",))
    assert list_changed_counts(Facts(accumulate=4), draws)[-1] == (
        "samples now draw random numbers (Crop) for 4 batches at once, so their draws and the model's, such as"
        " dropout, come in a different order"
    )
    quiet = list_changed_counts(Facts(accumulate=4), LoaderFacts(kind="DataLoader", batches=12))
    assert list_changed_counts(Facts(accumulate=4, device="cuda"), draws) == quiet, "it draws from another stream"
    one = LoaderFacts(kind="DataLoader", batches=12, custom_collate=True, num_workers=1)
    assert list_changed_counts(Facts(accumulate=4), one) == quiet
    assert len(quiet) == 2 and "0.34" in list_changed_counts(Facts(val_check_interval=0.34), loader)[1]
