"""What comes between steps every so often: validation, checkpoints, the turn of an epoch. All of it is serial."""

from __future__ import annotations

from fastloop.diagnose.naming import named, per_step
from fastloop.diagnose.remedies import Remedy
from fastloop.diagnose.split import part_ms
from fastloop.measurement import Measurement
from fastloop.records import Finding


def validation(seen: Measurement, _enabled: tuple[str, ...]) -> Finding | None:
    """Validation inside fit, spread over the steps."""
    spent = part_ms(seen, "validation")
    advice = ("no rung helps: validate less often (check_val_every_n_epoch, val_check_interval) or on fewer batches"
              " (limit_val_batches), and give the validation loader workers")  # fmt: skip
    facts = f"validation took {per_step(seen, spent)}, spread over all steps"
    return named(seen, "validation", spent, facts, Remedy(None, advice))


def checkpoint(seen: Measurement, _enabled: tuple[str, ...]) -> Finding | None:
    """Writing checkpoints while the device waits."""
    spent = part_ms(seen, "checkpoint")
    advice = ("no rung helps: save less often (ModelCheckpoint(every_n_train_steps=...)), or beside the training"
              " (Trainer(plugins=[AsyncCheckpointIO()]))")  # fmt: skip
    facts = f"saving checkpoints took {per_step(seen, spent)}, spread over all steps"
    return named(seen, "checkpoint", spent, facts, Remedy(None, advice))


def epoch_gap(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """The turn of an epoch: loaders start again, hooks run."""
    spent, workers = part_ms(seen, "epoch_gap"), (seen.evidence.get("loader") or {}).get("num_workers")
    if not workers:
        advice = "make epochs longer, and do less in hooks at their ends"
    elif "workers" in enabled:
        advice = "keep the workers between epochs: rungs.workers.persistent: true"
    else:
        advice = f"keep your loader's {workers} workers between epochs: persistent_workers=True"
    facts = f"between epochs the {'GPU' if seen.device == 'cuda' else 'device'} stood still for {per_step(seen, spent)}"
    return named(seen, "epoch_gap", spent, f"{facts}, spread over all steps", Remedy(None, f"no rung helps: {advice}"))
