"""What a configuration would do, without training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.live_plan import refuse_skipped
from fastloop.bridge.fit.recipes import build_recipe
from fastloop.bridge.fit.training import make_no_batches_error, make_trainer, quiet
from fastloop.config.loading import Config
from fastloop.feeds.batch_tree import walk_storage
from fastloop.ladder import plan
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.plan import Plan


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The plan, and the batches it would hold in memory."""

    plan: Plan
    facts: Facts
    samples_per_step: int | None
    """Samples of all ranks and accumulated batches together."""
    batches_in_flight: int | None
    """Loader batches of one rank: those that workers and device feed hold ready, plus the one in use."""
    bytes_in_flight: int | None
    """The size of these batches, estimated from the first sample."""


def plan_dry(config: Config, *, weighs_costs: bool = True) -> DryRun:
    """Build the recipe and its Trainer, load one sample, and plan. Trains nothing, writes no files.

    Args:
        weighs_costs: leave out rungs that do not pay back in a run of this length; trials keep them.

    Raises:
        ConfigError: as in `train`, and under ``strict`` if a rung cannot apply.
        FastLoopError: there is no batch to train on.
    """
    with quiet():
        pl.seed_everything(config.run.seed, verbose=False)
        module, data = build_recipe(config)
        trainer: Any = make_trainer(config, None, None)
        loader, *more = CombinedLoader(_set_up(trainer, module, data)).flattened
    others = read_facts.list_hook_owners(trainer)
    own = read_facts.read_loader_facts(loader, config.ladder.start_method, others)
    if own.batches == 0:
        raise make_no_batches_error("a train loader of 0 batches")
    own = dataclasses.replace(own, sample_bytes=_measure_sample(loader) if own.map_style else None)
    if more:
        lost = f"Lightning counts the batches of {1 + len(more)} train loaders as one"
        own = dataclasses.replace(own, place_lost=lost)
    facts = dataclasses.replace(
        read_facts.read_run_facts(trainer, trainer.strategy),
        by_ladder=config.by_ladder,
        weighs_costs=weighs_costs,
        resuming=config.run.resume is not None,
        loader=own,
    )
    made = plan(config.ladder, facts)
    if config.strict:
        refuse_skipped(made)
    samples, held, wants = own.batch_size, _count_batches_in_flight(made, loader, own), made.wants
    window = wants.get("loader.window") or wants.get("trainer.accumulate_grad_batches") or facts.accumulate
    return DryRun(
        plan=made,
        facts=dataclasses.replace(facts, accumulate=window),
        batches_in_flight=held,
        bytes_in_flight=_count_bytes(made, own, held),
        samples_per_step=samples * window * facts.world_size if samples else None,
    )


def _set_up(trainer: Any, module: Any, data: Any) -> Any:
    """Run the setup of a fit up to the train loader."""
    trainer.strategy.connect(module)
    module.trainer = data.trainer = trainer
    trainer.datamodule = data
    data.prepare_data()
    data.setup("fit")
    module.setup("fit")
    module.configure_model()
    return data.train_dataloader()


def _measure_sample(loader: Any) -> int | None:
    """Return the bytes of one sample as the loader would batch it; None if a single sample cannot be loaded."""
    try:
        sample = loader.dataset[next(iter(loader.sampler))]
        return sum(tensor.nbytes for tensor in walk_storage(loader.collate_fn([sample])))
    except Exception:  # the user's code, used in an unusual way
        return None


def _count_batches_in_flight(made: Plan, loader: Any, own: LoaderFacts) -> int | None:
    if not own.is_dataloader:
        return None
    workers = made.wants.get("loader.num_workers", own.num_workers)
    ahead = made.wants.get("loader.prefetch_factor", getattr(loader, "prefetch_factor", None) or 0)
    return int(workers * ahead + made.wants.get("feed.depth", 0) + 1)


def _count_bytes(made: Plan, own: LoaderFacts, batches: int | None) -> int | None:
    if batches is None or own.sample_bytes is None or own.batch_size is None:
        return None
    return own.sample_bytes * own.batch_size * int(made.wants.get("loader.window", 1)) * batches
