"""A fit that ends before its first validation, although the Trainer plans with one.

A trial trains a few steps. What stops or schedules by a metric of the validation finds none at the end of that epoch,
and Lightning would raise: EarlyStopping and ReduceLROnPlateau are then told to go on without.
"""

from __future__ import annotations

from typing import Any


def do_without_metrics(trainer: Any) -> None:
    """Let a Trainer go on where a metric to go by is missing. In ``on_train_start``: the schedulers are made by then.

    Source: ``strict`` of callbacks/early_stopping.py and of ``LRSchedulerConfig`` in utilities/types.py.
    """
    for each in (*trainer.callbacks, *trainer.lr_scheduler_configs):
        if getattr(each, "strict", None) is True:
            each.strict = False
