"""The batch rung: split or merge, what it refuses by name, and that each optimizer step stays the same step.

Split and merge are compared hook by hook in tests/bridge/apply/test_micro_batches.py and test_merge.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from fastloop import FastLoop
from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.rungs.batch import Batch
from tests.models import distance as apart
from tests.rungs.two_ranks import CASES, results
from tests.runs import KeepsTrainers, Net, batches, both, distance, run

NOTE = (
    "the first step's gradient decides whether batches are regrouped: they are left as they are if the loss compares"
    " samples (contrastive, in-batch negatives)"
)
UNSIZED = "DataLoader does not say how many samples a batch has"
WINDOW = {"loader.window": 4, "trainer.accumulate_grad_batches": 1}
SPLIT, MERGE = {"batch": {"micro_batch": 3}}, {"batch": {"micro_batch": 16}}


def facts(batch_size: int | None = 8, batches: int | None = 12, **others: Any) -> Facts:
    return Facts(loader=LoaderFacts(kind="DataLoader", batch_size=batch_size, batches=batches), **others)


@pytest.mark.parametrize(
    ("micro", "given", "wants"),
    [
        (4, facts(), {"step.micro_batch": 4}),
        (4, facts(accumulate=4), {"step.micro_batch": 4}),
        (4, facts(None), {"step.micro_batch": 4}),  # a sampler of the user's: each batch is cut as it comes
        (64, facts(None, accumulate=4), {"step.micro_batch": 64, "step.unmerged": UNSIZED}),
        (16, facts(accumulate=4), {"step.micro_batch": 16, "loader.window": 4, "trainer.accumulate_grad_batches": 1}),
        (64, facts(accumulate=4), {"step.micro_batch": 64, "loader.window": 4, "trainer.accumulate_grad_batches": 1}),
    ],
)
def test_plan(micro: int, given: Facts, wants: dict[str, Any]) -> None:
    change = Batch(enabled=True, micro_batch=micro).plan(given)
    assert change.wants == wants and change.parity == "approximate" and change.notes[0] == NOTE
    assert change.facts["micro_batches"] is True
    assert (change.facts.get("accumulate") == 1) == ("loader.window" in wants)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"accumulate": 4}, None),
        ({}, "an optimizer step is one batch, so there is nothing to merge"),
        ({"accumulate": 4, "counts_batches": ("Ema.on_train_batch_end",)}, "Ema.on_train_batch_end would see fewer"),
        ({"accumulate": 4, "max_steps": 199}, "this run is too short to search for a micro-batch: 199 steps"),
        ({"accumulate": 4, "max_steps": 200}, None),
        ({"accumulate": 4, "max_steps": 24, "weighs_costs": False}, None),
    ],
)
def test_by_a_shipped_ladder(given: dict[str, Any], reason: str | None) -> None:
    """The user's own word stands."""
    assert "step.micro_batch" in Batch(enabled=True).plan(facts(**given)).wants
    if reason is None:
        assert "loader.window" in Batch(enabled=True).plan(facts(**given, by_ladder=frozenset({"batch"}))).wants
        return
    with pytest.raises(NotApplicable, match=reason):
        Batch(enabled=True).plan(facts(**given, by_ladder=frozenset({"batch"})))


@pytest.mark.parametrize(("micro", "accumulate"), [(16, 4), (4, 1)])
def test_hooks_that_may_change_the_training_are_named(micro: int, accumulate: int) -> None:
    """Only where batches are merged: of a batch that is cut, hooks see one backward."""
    seen = {"counts_batches": ("M.on_after_backward", "M.training_step, which reads batch_idx,")}
    looks, changes = (
        Batch(enabled=True, micro_batch=micro).plan(facts(accumulate=accumulate, **seen, changes_by_batch=changing))
        for changing in ((), seen["counts_batches"][:1])
    )
    named = "fewer and larger batches for: M.on_after_backward, M.training_step, which reads batch_idx"
    loud = "DIFFERENT TRAINING: M.on_after_backward may change weights or gradients, now once for every 4 batches"
    assert looks.parity == "approximate" and (named in looks.notes) is (micro == 16)
    assert (changes.parity, loud in changes.notes) == (
        ("changes-training", True) if micro == 16 else ("approximate", False)
    )


@pytest.mark.parametrize("hooks", [(), ("on_train_batch_end",)])
def test_the_full_ladder_merges_where_nobody_counts_batches(hooks: tuple[str, ...]) -> None:
    class Hears(L.Callback):
        heard = 0

    def count(self: Hears, *_: Any) -> None:
        self.heard += 1

    for hook in hooks:
        setattr(Hears, hook, count)
    watch, hears = FastLoop("full", quiet=True), Hears()
    trainer = L.Trainer(
        max_steps=200,
        accumulate_grad_batches=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hears, watch],
    )
    trainer.fit(Net(), batches(3200))
    (status, reason) = next((step.status, step.reason) for step in watch.plan.steps if step.rung == "batch")
    assert trainer.global_step == 200 and (status == "planned") is not bool(hooks)
    assert not hooks or (hears.heard == 800 and str(reason).startswith("Hears.on_train_batch_end would see fewer"))


@pytest.mark.parametrize(
    ("settings", "given", "reason"),
    [
        ({}, facts(automatic_optimization=False), "manual optimization: the module runs its own backward passes"),
        (
            {},
            facts(plain_gradients=False, strategy="FSDPStrategy"),
            "FSDPStrategy keeps its own gradients; only one device and DDP are supported",
        ),
        (
            {},
            facts(accumulation_scheduled=True),
            "a GradientAccumulationScheduler changes the accumulation during training; it wins",
        ),
        (
            {},
            facts(averages_weights_by_swa=True),
            "StochasticWeightAveraging runs an extra epoch with the backward switched off; it wins",
        ),
        ({}, facts(steps_with_iterator=True), "training_step(dataloader_iter) fetches its own batches"),
        (
            {},
            facts(grad_hooks=True),
            "parameters have post-accumulate gradient hooks, which would run once per micro-batch",
        ),
        (
            {},
            facts(not_mean_losses=("loss (L1Loss with reduction='sum')",)),
            "the loss does not look like a mean over samples: loss (L1Loss with reduction='sum'); if it is one, write"
            " batch.loss_is_mean: true",
        ),
        (
            {"micro_batch": 1},
            facts(batchnorms=("net.1", "net.4")),
            "BatchNorm needs more than one sample: net.1; write 2 or more",
        ),
        ({"micro_batch": 8}, facts(), "the loader's batches already have 8 samples"),
        (
            {"micro_batch": "auto"},
            facts(batchnorms=("net.1",)),
            "limited to your batch size: BatchNorm keeps the statistics of each batch, and gradients are not"
            " accumulated; setting a micro-batch yourself changes the training",
        ),
        (
            {"micro_batch": "auto"},
            facts(accumulate=4, batchnorms=("net.1",), other_batchnorms=("net.1",)),
            "limited to your batch size: BatchNorm keeps the statistics of each batch, and net.1 cannot keep merged"
            " batches apart; setting a micro-batch yourself changes the training",
        ),
        (
            {"micro_batch": "auto"},
            facts(None, accumulate=4, batchnorms=("net.1",)),
            f"limited to your batch size: BatchNorm keeps the statistics of each batch, and windows are not merged"
            f" ({UNSIZED}); setting a micro-batch yourself changes the training",
        ),
        (
            {"micro_batch": "auto"},
            facts(1),
            "limited to your batch size of 1: a larger micro-batch would change the global batch",
        ),
        (
            {"global_batch": 20},
            facts(world_size=2),
            "global_batch=20 must be a multiple of 8 on each of 2 ranks: write 16",
        ),
        (
            {"global_batch": 64},
            facts(None),
            "global_batch=64: DataLoader does not say how many samples a batch has",
        ),
        ({"micro_batch": 8}, facts(accumulate=4), "the loader's batches already have 8 samples"),
        (
            {"micro_batch": 16},
            facts(),
            "micro_batch=16 with batches of 8 and no accumulation: a larger one would change the global batch",
        ),
        (
            {"micro_batch": 12},
            facts(accumulate=4, batchnorms=("net.1",)),
            "micro_batch=12 holds one whole batch of 8, and BatchNorm keeps the statistics of whole batches: write 16"
            " or more, or batch_norm: merge",
        ),
        (
            {"micro_batch": 16},
            facts(accumulate=16),
            "an epoch has 12 batches, fewer than the 16 of one window, so accumulation is already cut short; lower"
            " accumulate_grad_batches",
        ),
    ],
)
def test_plan_refuses(settings: dict[str, Any], given: Facts, reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Batch(**{"enabled": True, "micro_batch": 4, **settings}).plan(given)
    assert str(refused.value) == reason


def test_plan_says_what_changes() -> None:
    """A1 to A3 and A5."""
    names = ("net.1", "net.4", "net.7", "head.bn")
    norms = facts(accumulate=4, batchnorms=names, val_check_interval=8)
    notes = Batch(enabled=True, micro_batch=16, batch_norm="merge").plan(norms).notes
    assert notes == (
        NOTE,
        "4 BatchNorm layers normalize over micro-batches of 16, which changes the training: net.1, net.4, net.7, …",
        "batch_idx and on_train_batch_* now count optimizer steps: one call for every 4 batches",
        "val_check_interval 8 batches = 2 steps",
        "scheduler frequencies that count batches still do; max_steps, learning rates and global_step count optimizer"
        " steps, each with the same samples as before",
    )
    assert Batch(enabled=True, micro_batch=4).plan(Facts()).waits_for == "the train loader"
    Batch(enabled=True, micro_batch=4, loss_is_mean=True).plan(facts(not_mean_losses=("x",)))
    half = Batch(enabled=True, micro_batch=4).plan(facts(precision="bf16-true"))
    assert "gradients accumulate in bf16-true: many small ones are lost; bf16-mixed keeps them" in half.notes
    other = Batch(enabled=True, micro_batch=4, global_batch=16).plan(facts(accumulate=4))
    assert other.wants == {"step.micro_batch": 4, "trainer.accumulate_grad_batches": 2}
    same = Batch(enabled=True, micro_batch=4, global_batch=32).plan(facts(accumulate=4))
    assert same == Batch(enabled=True, micro_batch=4).plan(facts(accumulate=4))
    assert other.notes[:2] == (
        "DIFFERENT TRAINING: an optimizer step has 16 samples instead of 32; learning rates as they are",
        "max_steps and schedules still count steps, each of 0.5 times the samples",
    )


@pytest.mark.parametrize(
    ("settings", "given", "wants", "parity", "told"),
    [
        ({}, {}, {"step.micro_batch": 16, "step.batch_norm": "groups"}, "approximate", "each of your batches: net.1"),
        (
            {"micro_batch": 23},
            {},
            {"step.micro_batch": 16, "step.batch_norm": "groups"},
            "approximate",
            "micro_batch 23 is rounded to 16, whole batches of 8 for BatchNorm",
        ),
        ({"batch_norm": "merge"}, {}, {"step.micro_batch": 16}, "changes-training", "changes the training: net.1"),
        (
            {},
            {"other_batchnorms": ("net.1",)},
            {"step.micro_batch": 16},
            "changes-training",
            "net.1 is synchronized, not torch's own BatchNorm, or an InstanceNorm with running statistics, so batches"
            " cannot be kept apart in it",
        ),
        (
            {"micro_batch": 4},
            {},
            {"step.micro_batch": 4},
            "changes-training",
            "changes the training and cannot be avoided below your batch size of 8: net.1",
        ),
        ({"micro_batch": 3}, {"accumulate": 1}, {"step.micro_batch": 3}, "changes-training", "changes the training"),
    ],
)
def test_plan_of_batchnorm(settings: Any, given: Any, wants: Any, parity: str, told: str) -> None:
    known = facts(**{"accumulate": 4, "batchnorms": ("net.1",), **given})
    change = Batch(**{"enabled": True, "micro_batch": 16, **settings}).plan(known)
    assert change.parity == parity and wants.items() <= change.wants.items()
    assert any(told in note for note in change.notes)
    assert ("step.batch_norm" in change.wants) == bool(change.actions) == (parity == "approximate")


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 0},
        {"micro_batch": -1},
        {"micro_batch": "most"},
        {"global_batch": "grow"},
        {"batch_norm": "keep"},
        {"target_memory": 1.5},
        {"lr_scaling": "cubic"},
        {"lr_scaling": "linear"},
    ],
)
def test_impossible_settings_are_config_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"batch.{next(iter(settings))}"):
        FastLoop({"rungs": {"batch": {"enabled": True, **settings}}})


def test_takes() -> None:
    split = run(SPLIT, batches(), max_epochs=2)
    assert split.verdict("batch").took is True and split.verdict("batch").parity_class == "approximate"
    assert split.verdict("batch").why == "each loader batch of 8 samples ran as micro-batches of 3/3/2"
    merged = run(MERGE, batches(96), max_epochs=2, accumulate_grad_batches=4)
    assert merged.verdict("batch").why == "4 loader batches (32 samples) ran as micro-batches of 16/16"
    whole = run({"batch": {"micro_batch": 64}}, batches(96), max_epochs=1, accumulate_grad_batches=4)
    assert whole.verdict("batch").took and whole.seen("batch")["merged_batches"] == 4
    same = run({"batch": {"micro_batch": 8}}, batches(), max_epochs=1)
    assert (same.verdict("batch").took, same.verdict("batch").why) == (
        False,
        "the loader's batches already have 8 samples",
    )
    buckets = torch.utils.data.DataLoader(batches(32).dataset, batch_sampler=[range(8), range(8, 16)] * 4)
    unsized = run({"batch": {"micro_batch": 64}}, buckets, max_epochs=1, accumulate_grad_batches=4)
    assert unsized.verdict("batch").why == (
        f"batches are not split: none was larger than micro_batch; nor merged: {UNSIZED}"
    )
    verify = Batch(enabled=True, micro_batch=4).verify
    word = Batch(enabled=True, micro_batch=16, loss_is_mean=True).plan(facts(accumulate=4))
    assert word.wants["step.loss_is_mean"] is True
    assert verify(Measurement()).why == "no optimizer step ran"
    evidence = {"steps": 3, "changed_steps": 0, "uncut_steps": 0, "problem": None, "micro_batches": [3], "samples": 3}
    assert verify(Measurement(evidence={"batch": evidence})).why == (
        "batches are not split: none was larger than micro_batch"
    )
    apart = {**evidence, "apart_steps": 1, "apart_why": "a reason"}
    assert verify(Measurement(evidence={"batch": apart})).why == (
        "windows run batch by batch: a reason; hooks still see one batch per window"
    )
    some = verify(Measurement(evidence={"batch": {**apart, "changed_steps": 2, "samples": 32}}))
    assert some.took and some.why.endswith("; 1 of 3 windows run batch by batch: a reason")


@pytest.mark.parametrize(
    ("found", "peak_gib", "larger"),
    [
        ({}, 9.9, True),
        ({}, 63.0, False),
        ({"room_gib": None}, 9.9, False),
        ({"micro_batch": 64, "micro_batches": [64]}, 9.9, False),
        ({}, None, False),
    ],
    ids=["much room", "no room for twice", "memory is not the limit", "the whole step", "no peak"],
)
def test_a_verdict_says_what_may_fit_since_other_rungs_started(
    found: dict[str, Any], peak_gib: float | None, larger: bool
) -> None:
    """A gpt2's search found 32 in float32, of 125.1 GiB; in bfloat16 its steps took 9.9."""
    evidence = {"steps": 9, "changed_steps": 8, "uncut_steps": 0, "micro_batches": [32, 32], "samples": 64}
    evidence |= {"searched": "samples/s", "micro_batch": 32, "room_gib": 125.1, **found}
    why = Batch(enabled=True).verify(Measurement(evidence={"batch": evidence}, peak_gib=peak_gib)).why
    said = "a step takes 9.9 of 125.1 GiB: rungs.batch.micro_batch: 64 may fit now"
    assert (said in why) is larger, why


class Data(L.LightningDataModule):
    """Makes its loader anew each epoch, other samples in each, and changes each batch before and after its transfer."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return batches(96 - 8 * self.trainer.current_epoch, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.5, *batch[1:]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 0.5, *batch[1:]]


class WithoutAHook(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize("rungs", [SPLIT, MERGE])
def test_a_datamodule(rungs: Any) -> None:
    accumulate = {"accumulate_grad_batches": 4} if rungs is MERGE else {}
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, **accumulate}
    plain, ours = (run(which, None, datamodule=Data(), **settings) for which in (None, rungs))
    assert ours.verdict("batch").took and ours.module.samples == plain.module.samples
    assert distance(plain, ours) < 1e-6 and plain.trainer.global_step == ours.trainer.global_step
    assert distance(plain, run(None, None, datamodule=WithoutAHook(), **settings)) > 1e-3, "the control"


@pytest.mark.parametrize(
    ("rungs", "train", "settings"),
    [
        (SPLIT, partial(batches, shuffle=True), {}),
        (MERGE, partial(batches, 84, shuffle=True), {"accumulate_grad_batches": 4}),
    ],
)
def test_parity(rungs: Any, train: Any, settings: dict[str, Any]) -> None:
    plain, ours = both(rungs, train, partial(Net, torch.optim.AdamW, lr=0.01), max_epochs=34, **settings)
    assert plain.trainer.global_step == ours.trainer.global_step >= 100
    assert distance(plain, ours) < 1e-6 and ours.module.samples == plain.module.samples
    # The control: two samples change places between steps.
    other = train().dataset
    other.tensors[0][[0, 19]] = other.tensors[0][[19, 0]]
    moved = run(
        rungs,
        torch.utils.data.DataLoader(other, batch_size=8, shuffle=True),
        partial(Net, torch.optim.AdamW, lr=0.01),
        max_epochs=34,
        **settings,
    )
    assert distance(plain, moved) > 1e-4


@pytest.mark.parametrize(
    ("settings", "given", "wants", "parity"),
    [
        ({}, facts(), {"step.whole_batches": False}, "approximate"),
        ({}, facts(accumulate=4), {"step.whole_batches": False, **WINDOW}, "approximate"),
        (
            {"target_memory": 0.5},
            facts(accumulate=4, batchnorms=("net.1",)),
            {"step.whole_batches": True, "step.batch_norm": "groups", "step.target_memory": 0.5, **WINDOW},
            "approximate",
        ),
        (
            {"batch_norm": "merge"},
            facts(accumulate=4, batchnorms=("net.1",)),
            {"step.whole_batches": True, **WINDOW},
            "changes-training",
        ),
    ],
)
def test_plan_of_auto(settings: Any, given: Facts, wants: Any, parity: str) -> None:
    change = Batch(enabled=True, **settings).plan(given)
    assert change.wants == {"step.micro_batch": "auto", "step.target_memory": 0.9} | wants and change.parity == parity


SCHEDULES = {
    "cycle": lambda optimizer, module: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02 * module.scale, total_steps=module.trainer.estimated_stepping_batches
        ),
        "interval": "step",
    },
    "chain": lambda optimizer, _: {
        "scheduler": torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
            ],
            [3],
        ),
        "interval": "step",
    },
}


@pytest.mark.parametrize(
    ("scaling", "factor", "schedule"), [("none", 1.0, "cycle"), ("linear", 4.0, "cycle"), ("sqrt", 2.0, "chain")]
)
def test_a_global_batch_of_ones_own(scaling: str, factor: float, schedule: str) -> None:
    """The same as to write it into the Trainer and the optimizer by hand; and no rate is left behind."""

    class Scaled(Net):
        def __init__(self, scale: float = 1.0) -> None:
            self.scale = scale
            super().__init__(torch.optim.AdamW, SCHEDULES[schedule], lr=0.01 * scale)

    rungs = {"batch": {"micro_batch": 8, "global_batch": 32, "lr_scaling": scaling}}
    ours = run(rungs, batches(96), Scaled, max_epochs=4)
    by_hand = run(None, batches(96), partial(Scaled, factor), max_epochs=4, accumulate_grad_batches=4)
    assert distance(by_hand, ours) < 1e-6 and ours.record.rates == pytest.approx(by_hand.record.rates, rel=1e-9)
    verdict, rates = ours.verdict("batch"), "as they are" if factor == 1 else f"multiplied by {factor:g} ({scaling})"
    assert verdict.took and verdict.parity_class == "changes-training"
    assert verdict.why.startswith("each optimizer step had 32 samples")
    assert ours.loop is not None and ours.loop.plan.steps[0].change.notes[0] == (
        f"DIFFERENT TRAINING: an optimizer step has 32 samples instead of 8; learning rates {rates}"
    )
    assert ours.trainer.accumulate_grad_batches == 1
    left, theirs = (each.trainer.optimizers[0].param_groups[0]["lr"] for each in (ours, by_hand))
    assert left * factor == pytest.approx(theirs)
    assert distance(run(None, batches(96), Scaled, max_epochs=4), ours) > 1e-3


def attributes(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    return {
        "accumulate": trainer.accumulate_grad_batches,
        "limit": trainer.limit_train_batches,
        "interval": trainer.val_check_interval,
        "strategy": type(trainer.strategy).__name__,
        "own": "fastloop" in vars(trainer.strategy),
        "log": "log" in vars(module),
        "hooks": [len(part._forward_hooks) + len(part._backward_hooks) for part in module.modules()],
    }


@pytest.mark.parametrize(("rungs", "settings"), [(SPLIT, {}), (MERGE, {"accumulate_grad_batches": 4})])
def test_undo(rungs: Any, settings: dict[str, Any]) -> None:
    loader = batches(96)
    before = dict(vars(loader))
    reference = run(None, batches(96), max_epochs=1, val_check_interval=8, **settings)
    fits = KeepsTrainers()

    class Raises(Net):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.broken and len(self.samples) == 1:
                raise RuntimeError("planted")
            return loss

    module = Raises()
    with pytest.raises(RuntimeError, match="planted"):
        run(rungs, loader, lambda: module, callbacks=(fits,), max_epochs=1, val_check_interval=8, **settings)
    expected = attributes(reference.trainer, reference.module)
    (trainer,) = fits.trainers
    assert attributes(trainer, module) == expected and dict(vars(loader)) == before
    module.broken = False
    trainer.fit(module, loader)
    loop = next(callback for callback in trainer.callbacks if isinstance(callback, FastLoop))
    assert loop.verdicts[0].took and attributes(trainer, module) == expected and dict(vars(loader)) == before


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Summed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.nn.MSELoss(reduction="sum")

    def loss(self, batch: Any) -> torch.Tensor:
        return self.criterion(self.net(batch[0]), batch[1])


class SummedInCode(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum") / len(batch[0])


class Weighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)
        self.criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))

    def loss(self, batch: Any) -> torch.Tensor:
        return self.criterion(self.net(batch[0]), (batch[1][:, 0] > 0).long())


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("module", "settings", "reason"),
    [
        (Manual, {}, "manual optimization: the module runs its own backward passes"),
        (
            Net,
            {"callbacks": lambda: (GradientAccumulationScheduler({0: 1, 1: 2}),)},
            "a GradientAccumulationScheduler changes the accumulation during training; it wins",
        ),
        (
            Net,
            {"callbacks": lambda: (StochasticWeightAveraging(1e-2, 1),)},
            "StochasticWeightAveraging runs an extra epoch with the backward switched off; it wins",
        ),
        (
            Summed,
            {},
            "the loss does not look like a mean over samples: criterion (MSELoss with reduction='sum'), Summed.__init__"
            " uses reduction='sum' or 'none'; if it is one, write batch.loss_is_mean: true",
        ),
        (
            SummedInCode,
            {},
            "the loss does not look like a mean over samples: SummedInCode.loss uses reduction='sum' or 'none'; if it"
            " is one, write batch.loss_is_mean: true",
        ),
        (
            Weighted,
            {},
            "the loss does not look like a mean over samples: criterion (CrossEntropyLoss divides by its class"
            " weights); if it is one, write batch.loss_is_mean: true",
        ),
    ],
)
def test_refused_by_name_and_the_run_is_the_plain_run(module: Any, settings: dict[str, Any], reason: str) -> None:
    """A7 and losses: the plan says why, and nothing changes."""
    plain, ours = both(SPLIT, batches, module, max_epochs=2, **settings)
    assert ours.reason("batch") == reason and ours.verdict("batch").took is False
    assert distance(plain, ours) == 0 and ours.record.hooks == plain.record.hooks


def test_the_users_word_on_the_loss_counts() -> None:
    word = {"batch": {"micro_batch": 3, "loss_is_mean": True}}
    plain, ours = both(word, batches, SummedInCode, max_epochs=3, precision="64-true")
    assert ours.verdict("batch").took and distance(plain, ours) < 1e-13
    plain, ours = both(word, batches, Summed, max_epochs=1)
    assert distance(plain, ours) > 1e-3  # a wrong word shows


def test_batchnorm_is_warned_by_layer_and_differs() -> None:
    plain, ours = both(SPLIT, batches, Normed, max_epochs=3)
    assert ours.loop is not None and ours.verdict("batch").took
    assert any("1 BatchNorm layer normalizes" in note for note in ours.loop.plan.steps[0].change.notes)
    assert ours.verdict("batch").parity_class == "changes-training"
    assert both(SPLIT, batches, max_epochs=1)[1].verdict("batch").parity_class == "approximate"
    assert distance(plain, ours) > 1e-3


def test_pairs_leave_no_sample_alone_with_batchnorm() -> None:
    """B10: a last batch of three is one piece; of one sample, BatchNorm would raise."""
    plain, ours = both({"batch": {"micro_batch": 2}}, partial(batches, 11), Normed, max_epochs=1)
    assert ours.verdict("batch").took and ours.trainer.global_step == plain.trainer.global_step == 2
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        Normed().train().net(torch.zeros(1, 8))  # the control: what a piece of one sample does


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "like"),
    [
        ("split", "whole"),
        ("split view", "whole"),
        ("merged", "accumulated"),
        ("accumulated split view", "accumulated"),
        ("one rank comes apart", "accumulated"),
    ],
)
def test_two_ranks(case: str, like: str) -> None:
    """100 steps of AdamW on each of two ranks, with one exchange of gradients a step."""
    for rank in results():
        ours, plain = rank[case], rank[like]
        assert all(ours["took"].values()) and set(ours["took"]) == set(CASES[case][0])
        assert ours["steps"] == plain["steps"] >= 100 and ours["strategy"] == "DDPStrategy"
        assert ours["samples"] == plain["samples"] and ours["rates"] == plain["rates"]
        assert apart(plain["weights"], ours["weights"]) < 1e-10  # in float64: in float32 CPUs round differently
        assert plain["exchanges"] == ours["exchanges"] == plain["steps"]
        # The control: without holding the exchange back, the pieces 3/3/2, 3/3/2 and 2/2 of an epoch have one each.
        assert (rank["chatty"]["steps"], rank["chatty"]["exchanges"]) == (6, 16)
    first, second = (rank[case]["weights"] for rank in results())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert apart(results()[0]["plain"]["weights"], first) > 1e-3


@pytest.mark.multirank
def test_two_ranks_agree_on_a_refusal() -> None:
    """Found by one, kept to by both: batch by batch, bit for bit the accumulating run, with one exchange a step."""
    for rank, (ranks, why) in enumerate(zip(results(), ("another rank cannot merge", "planted"), strict=True)):
        ours, plain = ranks["one rank refuses"], ranks["accumulated"]
        assert ours["took"] == {"batch": False} and ours["why"].startswith(why), rank
        assert ours["apart"] == ours["steps"] == plain["steps"] and ours["exchanges"] == plain["exchanges"]
        assert apart(plain["weights"], ours["weights"]) == 0 and ours["samples"] == plain["samples"]


@pytest.mark.multirank
def test_two_ranks_agree_on_the_smaller_size() -> None:
    """The rank with less memory decides; from there on it is the run with that number, bit for bit."""
    for rank in results():
        ours, by_hand = rank["one rank has less memory"], rank["merged"]
        assert ours["took"] == {"batch": True} and "by memory: there was not enough for 32" in ours["searched"]
        assert ours["exchanges"] == by_hand["exchanges"] and ours["samples"] == by_hand["samples"]
        assert apart(by_hand["weights"], ours["weights"]) == 0


@pytest.mark.multirank
def test_a_window_may_come_apart_on_one_rank() -> None:
    first, second = (rank["one rank comes apart"]["apart"] for rank in results())
    assert first == 0 < second < results()[1]["one rank comes apart"]["steps"]
