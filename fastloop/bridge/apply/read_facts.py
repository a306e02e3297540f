"""Read the facts off a Trainer, a module and a loader, without changing anything or loading a sample here."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import BatchSampler

from fastloop.bridge import namespaces
from fastloop.bridge.apply.read_model import (
    list_gradient_users,
    list_methods,
    list_read_counts,
    overrides,
    read_module,
)
from fastloop.bridge.watch import loader_state
from fastloop.evidence import loader_queue, machine
from fastloop.evidence.batches import sampler_hazards
from fastloop.evidence.batches.given_batches import list_batch_changes
from fastloop.evidence.model.batch_hooks import may_change_training
from fastloop.evidence.model.skipped_batches import may_skip
from fastloop.evidence.samples import between_batches, random_draws, thread_safety
from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples.before_epoch import explain_not_ahead
from fastloop.evidence.samples.between_epochs import (
    list_changes_between_epochs,
    list_changes_during_epochs,
    list_remembered,
)
from fastloop.evidence.samples.spawned import find_spawn_hazard
from fastloop.evidence.samples.worker_shares import explain_repeats
from fastloop.feeds.cache.places import find_disk_root
from fastloop.feeds.cache.prefixes import read_prefix
from fastloop.feeds.dali import pictures
from fastloop.feeds.images.reading import read_facts as read_images
from fastloop.feeds.lazy_loader import makes_iterators
from fastloop.feeds.place.draws import explain_lost_place
from fastloop.feeds.rows.reading import read_facts as read_rows
from fastloop.feeds.workers.packed_list import count_packable
from fastloop.feeds.workers.shared_batches import find_shared
from fastloop.records.facts import Facts, LoaderFacts

COUNTED_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def read_run_facts(trainer: Any, strategy: Any) -> Facts:
    """Facts of the machine, the run and the built model; no loader yet."""
    module, device = strategy.lightning_module, strategy.root_device
    kinds = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    return Facts(
        cpu_count=machine.count_usable_cpus(),
        local_ranks=max(1, int(getattr(strategy, "num_processes", None) or trainer.num_devices)),
        shm_free_bytes=machine.read_shm_free_bytes(),
        is_daemon=bool(multiprocessing.current_process().daemon),
        memory_free_bytes=machine.read_memory_free_bytes(),
        disk_free_bytes=machine.read_disk_free_bytes(find_disk_root()),
        no_sockets_in=_find_no_sockets(),
        device=device.type,
        **_read_device(device),
        compiler=machine.find_cxx_compiler(os.environ),
        has_dali=pictures.is_installed(),
        cuda_version=torch.version.cuda,
        world_size=trainer.world_size,
        strategy=type(strategy).__name__.removeprefix("FastLoop_"),
        is_ddp=_is_ddp(strategy),
        uses_grads=tuple(list_gradient_users([*module.modules(), *trainer.callbacks])) if _is_ddp(strategy) else (),
        user_comm_hook=getattr(strategy, "_ddp_comm_hook", None) is not None,
        static_graph=bool(getattr(strategy, "_ddp_kwargs", {}).get("static_graph")),
        plain_gradients=_has_plain_gradients(strategy),
        precision=str(strategy.precision_plugin.precision),
        own_precision=_is_chosen(strategy.precision_plugin),
        accumulate=trainer.accumulate_grad_batches,
        accumulation_scheduled="GradientAccumulationScheduler" in kinds,
        averages_weights_by_swa="StochasticWeightAveraging" in kinds,
        micro_batches=trainer.accumulate_grad_batches > 1,
        automatic_optimization=module.automatic_optimization,
        reload_every_n_epochs=trainer.reload_dataloaders_every_n_epochs,
        val_check_interval=_keep_number(trainer.val_check_interval),
        val_every_n_epochs=trainer.check_val_every_n_epoch,
        limit_train_batches=_keep_number(trainer.limit_train_batches),
        limit_val_batches=_keep_number(trainer.limit_val_batches),
        max_epochs=_read_limit(trainer.max_epochs),
        max_steps=_read_limit(trainer.max_steps),
        resuming=trainer.ckpt_path is not None,
        counts_batches=tuple(_find_batch_counters(trainer, module)),
        changes_by_batch=tuple(_find_changing(trainer, module)),
        skips_batches=may_skip(module),
        reads_batch_counts=tuple(list_read_counts(module)),
        varies_by_epoch=bool(list_methods(module, r"\bcurrent_epoch\b"))
        or any(_list_overriding(trainer, module, ("on_train_epoch_start",))),
        transfer_hooks=tuple(hook for hook in TRANSFER_HOOKS if find_hook_owner(trainer, hook) is not None),
        timed_hooks=tuple(
            hook for hook in TRANSFER_HOOKS[:2] if between_batches.depends_on_time(find_hook_owner(trainer, hook), hook)
        ),
        **read_module(
            module, syncs_norms=getattr(strategy, "_layer_sync", None) is not None, callbacks=trainer.callbacks
        ),
    )


def _list_overriding(trainer: Any, module: Any, hooks: Sequence[str]) -> Iterator[tuple[Any, str]]:
    for owner in (module, *trainer.callbacks):
        source = type(owner).__module__
        if not source.startswith("fastloop.") or ".recipe_modules." in source:
            yield from ((owner, hook) for hook in hooks if overrides(owner, hook))


def _find_changing(trainer: Any, module: Any) -> Iterator[str]:
    for owner, hook in _list_overriding(trainer, module, COUNTED_HOOKS):
        if may_change_training(owner, hook):
            yield f"{type(owner).__name__}.{hook}"


def _find_batch_counters(trainer: Any, module: Any) -> Iterator[str]:
    yield from (f"{type(owner).__name__}.{hook}" for owner, hook in _list_overriding(trainer, module, COUNTED_HOOKS))
    step = getattr(module, "training_step", None)
    for name in list(inspect.signature(step).parameters)[1:2] if callable(step) else ():
        if list_methods(module, rf"def training_step\(.*\b{name}\b(.|\n)*\b{name}\b"):
            yield f"{type(module).__name__}.training_step, which reads {name},"


def _find_no_sockets() -> str | None:
    """Return the temporary directory if its path is too long for sockets. Only sharing by file descriptor, Linux's
    default, needs them."""
    by_socket = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    return machine.find_socket_obstacle() if by_socket else None


def _is_ddp(strategy: Any) -> bool:
    """Whether this is DDP itself: DeepSpeed's strategy inherits from it, but wraps the model in its own engine."""
    inherits = {base.__name__ for base in type(strategy).__mro__}
    return hasattr(strategy, "_ddp_kwargs") and "DeepSpeedStrategy" not in inherits


def _is_chosen(precision: Any) -> bool:
    """Whether the user chose this precision: FSDP has its own plugin even for the default."""
    return type(precision).__name__ not in ("Precision", "FSDPPrecision") or precision.precision != "32-true"


def _has_plain_gradients(strategy: Any) -> bool:
    """Whether each parameter holds its whole gradient after the backward."""
    single = namespaces.load(namespaces.find_namespace(strategy), "strategies.SingleDeviceStrategy")
    return _is_ddp(strategy) or isinstance(strategy, single)


def _read_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    capability = torch.cuda.get_device_capability(device)
    return {
        "device_name": torch.cuda.get_device_name(device),
        "compute_capability": capability,
        "decodes_beside": pictures.decodes_beside(capability, os.environ),
    }


def _keep_number(value: Any) -> int | float | None:
    return value if isinstance(value, (int, float)) else None


def _read_limit(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def find_hook_owner(trainer: Any, hook: str) -> Any:
    """Return the object that overrides a batch transfer hook (as in Lightning, the DataModule comes first), or None."""
    for owner in (trainer.datamodule, trainer.lightning_module):
        if owner is not None and overrides(owner, hook):
            return owner
    return None


def add_loader(run: Facts, trainer: Any, loader: Any, start_method: str, kept_validation_workers: int) -> Facts:
    """Facts of a run together with those of its train loader."""
    return replace(
        run,
        loader=read_loader_facts(loader, start_method, list_hook_owners(trainer), ranks=run.world_size),
        validation_workers=loader_state.count_validation_workers(trainer),
        kept_validation_workers=kept_validation_workers,
    )


def list_hook_owners(trainer: Any) -> list[Any]:
    """The module and the callbacks, whose hooks may use the data."""
    return [trainer.lightning_module, *trainer.callbacks]


def read_loader_facts(
    loader: Any, start_method: str = "auto", others: Sequence[Any] = (), *, ranks: int = 1
) -> LoaderFacts:
    """Facts of a train loader, and of workers started by `start_method`. Reads attributes and code; only
    where training changes its batches, a forked process makes one, too.

    Args:
        others: see `list_hook_owners`.
        ranks: number of training processes.
    """
    lost = explain_lost_place(loader, ranks)
    if not isinstance(loader, DataLoader):
        return LoaderFacts(
            kind=type(loader).__name__,
            is_dataloader=False,
            map_style=False,
            batches=loader_queue.count_batches(loader),
            stateful=hasattr(loader, "state_dict"),
            place_lost=lost,
        )
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    spawn_hazard = None
    if (method if start_method == "auto" else start_method) != "fork":
        parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
        spawn_hazard = find_spawn_hazard(parts)
    default = torch.utils.data.default_collate
    code = _read_code_facts(loader, others)
    return LoaderFacts(
        kind=type(loader).__name__,
        map_style=not isinstance(loader.dataset, IterableDataset),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        batch_size=_read_batch_size(loader),
        batches=loader_queue.count_batches(loader),
        auto_collates=loader.batch_sampler is not None,
        custom_collate=loader.collate_fn is not default,
        start_method=str(method),
        persistent_workers=loader.persistent_workers,
        stateful=hasattr(loader, "state_dict"),
        place_lost=lost or next(iter(code["sampler_hazards"]), None),
        own_iterator=makes_iterators(type(loader)),
        sample_bytes=datasets.sample_bytes(loader.dataset) if loader.collate_fn is default else None,
        spawn_hazard=spawn_hazard,
        long_lists=datasets.list_long(loader.dataset),
        packable=count_packable(loader.dataset),
        images=read_images(loader.dataset),
        rows=read_rows(loader.dataset),
        prefix=read_prefix(loader.dataset),
        **code,
    )


def _read_code_facts(loader: DataLoader[Any], others: Sequence[Any]) -> dict[str, Any]:
    """What the code that makes samples, and the code that runs beside it, shows about loading elsewhere or earlier."""
    data, collate, init = loader.dataset, loader.collate_fn, loader.worker_init_fn
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    worker_hazards = datasets.find_worker_hazards(data, collate)
    thread_hazards = thread_safety.find_thread_hazards(data, collate)
    changed_batches = _list_batch_changes(loader, others)
    return {
        "draws_random": random_draws.draws_random(data, collate),
        "init_draws": random_draws.list_init_draws(init),
        "asks_process": datasets.list_asking(data, collate),
        "shared_draws": thread_safety.list_shared_draws(data, collate),
        "worker_hazards": worker_hazards,
        "holds_training": tuple(
            each.rpartition(" (")[0] for each in worker_hazards if each.endswith(datasets.TRAINING)
        ),
        "sampler_hazards": sampler_hazards.find_sampler_hazards(sampler, data, others),
        "sampler_draws": sampler_hazards.list_draws(sampler),
        "thread_hazards": (*thread_hazards, *between_batches.list_holders(data, others, while_loading=True)),
        "may_change": (
            *list_changes_between_epochs(data, others, collate=collate, worker_init=init, sampler=sampler),
            *changed_batches,  # a worker's copy, too, where its tensors come in shared memory
        ),
        "not_ahead": explain_not_ahead(data, others, collate=collate, worker_init=init),
        "changes_within": (*list_changes_during_epochs(data, others, collate=collate, loader=loader), *changed_batches),
        "remembers": list_remembered(data, collate),
        "repeats": explain_repeats(loader),
    }


def _list_batch_changes(loader: DataLoader[Any], others: Sequence[Any]) -> tuple[str, ...]:
    trainers = (getattr(other, "_trainer", None) for other in others)
    trainer = next((each for each in trainers if each is not None), None)
    datamodule, strategy = getattr(trainer, "datamodule", None), getattr(trainer, "strategy", None)
    device = getattr(getattr(strategy, "root_device", None), "type", "cpu")
    given = (*others, *([] if datamodule is None else [datamodule]))
    return list_batch_changes(loader, given, lambda: find_shared(loader), copies_tensors=device != "cpu")


def _read_batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None:
        return loader.batch_size
    # A plain BatchSampler, from the user or from Lightning, has one batch size; a custom one need not.
    sampler = loader.batch_sampler
    return getattr(sampler, "batch_size", None) if isinstance(sampler, BatchSampler) else None
