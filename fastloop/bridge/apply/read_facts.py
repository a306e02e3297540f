"""Read the facts off a Trainer, a module and a loader, without changing anything or loading a sample."""

from __future__ import annotations

import ast
import collections
import inspect
import multiprocessing
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import BatchSampler

from fastloop.bridge import namespaces
from fastloop.evidence import machine
from fastloop.evidence.model import between_batches, thread_safety
from fastloop.evidence.model import dataset as datasets
from fastloop.evidence.model.picture_views import list_names, list_views
from fastloop.feeds import call_shapes
from fastloop.feeds.attention import candidates as attention
from fastloop.feeds.batch_norm import groups
from fastloop.feeds.cache.places import find_disk_root
from fastloop.feeds.cache.prefixes import read_prefix
from fastloop.feeds.dali import pictures
from fastloop.feeds.images.reading import read_facts as read_images
from fastloop.feeds.lazy_loader import makes_iterators
from fastloop.feeds.loss.cross_entropy import find_large
from fastloop.feeds.place.draws import explain_lost_place
from fastloop.feeds.workers.packed_list import count_packable
from fastloop.records.facts import Facts, LoaderFacts

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_LIGHTNING = tuple(f"{name}." for name in namespaces.NAMES)
_MERGES = re.compile(r"\.view\(.*(-1|\*)|\.view_as\(")
_SCALED = (".training_step", ".backward", ".on_after_backward")
_UNSCALED = (".on_before_optimizer_step", ".on_before_zero_grad", ".configure_gradient_clipping")
"""Hooks that run after a loss scaler has unscaled the gradients."""
_BEFORE_STEPS = re.compile(r"__init__|prepare_data|setup|configure_\w+|\w+_dataloader")
_BEFORE_STEPS_OR_FORWARD = re.compile(rf"{_BEFORE_STEPS.pattern}|forward")


def run_facts(trainer: Any, strategy: Any) -> Facts:
    """Facts of the machine, the run and the built model; no loader yet."""
    module, device = strategy.lightning_module, strategy.root_device
    kinds = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    return Facts(
        cpu_count=machine.count_usable_cpus(),
        local_ranks=max(1, int(getattr(strategy, "num_processes", None) or trainer.num_devices)),
        shm_free_bytes=machine.read_shm_free_bytes(),
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
        user_comm_hook=getattr(strategy, "_ddp_comm_hook", None) is not None,
        static_graph=bool(getattr(strategy, "_ddp_kwargs", {}).get("static_graph")),
        plain_gradients=_is_ddp(strategy) or isinstance(strategy, _load_single_device(strategy)),
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
        max_epochs=_read_limit(trainer.max_epochs),
        max_steps=_read_limit(trainer.max_steps),
        resuming=trainer.ckpt_path is not None,
        transfer_hooks=tuple(hook for hook in TRANSFER_HOOKS if find_hook_owner(trainer, hook) is not None),
        timed_hooks=tuple(
            hook for hook in TRANSFER_HOOKS[:2] if between_batches.depends_on_time(find_hook_owner(trainer, hook), hook)
        ),
        **read_module(module, syncs_norms=getattr(strategy, "_layer_sync", None) is not None),
    )


def _find_no_sockets() -> str | None:
    """The temporary directory if its path is too long for sockets; only sharing by file descriptor, Linux's default,
    needs them."""
    by_socket = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    return machine.find_socket_obstacle() if by_socket else None


def _is_ddp(strategy: Any) -> bool:
    """Whether this is DDP itself: DeepSpeed's strategy inherits from it, but wraps the model in its own engine."""
    inherits = {base.__name__ for base in type(strategy).__mro__}
    return hasattr(strategy, "_ddp_kwargs") and "DeepSpeedStrategy" not in inherits


def _is_chosen(precision: Any) -> bool:
    """Whether the user chose this precision: FSDP has its own plugin even for the default."""
    return type(precision).__name__ not in ("Precision", "FSDPPrecision") or precision.precision != "32-true"


def _load_single_device(strategy: Any) -> type:
    return namespaces.load(namespaces.find_namespace(strategy), "strategies.SingleDeviceStrategy")  # type: ignore[no-any-return]


def _read_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return {
        "device_name": torch.cuda.get_device_name(device),
        "compute_capability": torch.cuda.get_device_capability(device),
    }


def _keep_number(value: Any) -> int | float | None:
    return value if isinstance(value, (int, float)) else None


def _read_limit(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def overrides(owner: Any, name: str) -> bool:
    """Whether a LightningModule or DataModule overrides one of Lightning's hooks."""
    own = getattr(owner, "__dict__", {}).get(name) is not None  # None: a hook that is switched off
    for base in type(owner).__mro__:
        if own or name in vars(base):
            return own or not base.__module__.startswith(_LIGHTNING)
    return False


def find_hook_owner(trainer: Any, hook: str) -> Any:
    """The object that overrides a batch transfer hook, the DataModule before the module as in Lightning, or None."""
    for owner in (trainer.datamodule, trainer.lightning_module):
        if owner is not None and overrides(owner, hook):
            return owner
    return None


def read_module(module: torch.nn.Module, *, syncs_norms: bool = False) -> dict[str, Any]:
    """What the model consists of, and what its methods do according to their source.

    Args:
        syncs_norms: the strategy will convert every BatchNorm to SyncBatchNorm.
    """
    named = dict(module.named_modules())
    norms = {name: part for name, part in named.items() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)}
    convs = tuple(name for name, part in named.items() if isinstance(part, torch.nn.Conv2d))
    training_step = getattr(module, "training_step", None)
    return {
        "batchnorms": tuple(norms),
        "other_batchnorms": tuple(
            name for name, part in norms.items() if syncs_norms or not isinstance(part, groups.KINDS)
        ),
        "convs": convs,
        "attends_by_hand": (*attention.list_switchable(module), *attention.list_candidates(module)),
        "attends_by_call": tuple(attention.list_sdpa(module)),
        "classes": find_large(module),
        "not_mean_losses": tuple(_find_other_losses(module, named)),
        "autocasts": tuple(_find_methods(module, r"\bautocast\s*\(")),
        "views": tuple(_find_views(module)) if convs else (),
        "inner_views": tuple(_find_inner_views(named.values())) if convs else (),
        "detaches_grads": tuple(_find_methods(module, r"\bgrad\.detach_\(")),
        "refused_losses": (
            *(name for name, part in named.items() if isinstance(part, torch.nn.BCELoss)),
            *(name.partition(".")[2] for name in _find_methods(module, r"\bbinary_cross_entropy\(")),
        ),
        "handles_grads": (
            *(each for each in _find_methods(module, r"(?<!autograd)(?<!\bfunc)\.grad\b") if each.endswith(_SCALED)),
            *(each for each in _find_methods(module, r"\bclip_grad") if not each.endswith(_UNSCALED)),
        ),
        "compiled_by_user": tuple(name or type(module).__name__ for name in named if is_compiled(named[name])),
        "compile_targets": tuple(compile_targets(module)),
        "repeated_blocks": tuple(_group_repeated(module)),
        "grad_hooks": any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters()),
        "steps_with_iterator": callable(training_step)
        and "dataloader_iter" in inspect.signature(training_step).parameters,
    }


def _find_other_losses(module: torch.nn.Module, named: dict[str, torch.nn.Module]) -> Iterator[str]:
    for name, part in named.items():
        if type(part).__name__.endswith("Loss"):
            if getattr(part, "reduction", "mean") in ("sum", "none"):
                yield f"{name} ({type(part).__name__} with reduction={part.reduction!r})"
            elif getattr(part, "weight", None) is not None:
                yield f"{name} ({type(part).__name__} divides by its class weights)"
    for method in _find_methods(module, r"""reduction\s*=\s*["'](sum|none)["']"""):
        yield f"{method} uses reduction='sum' or 'none'"
    for method in _find_methods(module, r"\b(cross_entropy|nll_loss)\(.*\bweight\s*="):
        yield f"{method} divides by its class weights"


def _find_views(module: torch.nn.Module) -> Iterator[str]:
    """Calls of `view` in code outside the rehearsed modules that may get images: steps, losses, helpers."""
    methods = {name: member for base in type(module).__mro__[::-1] for name, member in vars(base).items()}
    is_left_out = _BEFORE_STEPS.fullmatch if "" not in compile_targets(module) else _BEFORE_STEPS_OR_FORWARD.fullmatch
    users = [
        base for base in type(module).__mro__ if not base.__module__.startswith((*_LIGHTNING, "torch.", "builtins"))
    ]
    named = {each for base in users for member in vars(base).values() for each in list_names(member)}
    targets = [module.get_submodule(name) for name in _find_outermost(module, "")]
    played = [target for target in targets if not named.intersection(_list_other_methods(type(target)))]
    rehearsed = {id(part) for target in played for part in target.modules()}
    yield from list_views(
        [
            *(member for name, member in methods.items() if not is_left_out(name)),
            *(part for part in module.modules() if part is not module and id(part) not in rehearsed),
            *(value for name, value in vars(module).items() if name not in vars(torch.nn.Module())),
        ]
    )


def _list_other_methods(kind: type) -> Iterator[str]:
    """Methods of a module class that may be called besides its forward, such as ``encode``."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    members = [(name, member) for base in bases for name, member in vars(base).items()]
    yield from (name for name, member in members if inspect.isfunction(member) and name not in ("__init__", "forward"))


def _find_inner_views(modules: Iterable[torch.nn.Module]) -> Iterator[str]:
    for kind in dict.fromkeys(map(type, modules)):
        if not kind.__module__.startswith(("torch.", "torchvision.")):
            yield from (
                f"{kind.__name__}.{name}" for name, source in _read_user_methods(kind) if _MERGES.search(source)
            )


def _read_user_methods(module: torch.nn.Module | type) -> Iterator[tuple[str, str]]:
    """Name and source, without comments, of the methods that the user's own classes define."""
    for base in (module if isinstance(module, type) else type(module)).__mro__:
        if base.__module__.startswith((*_LIGHTNING, "torch.", "builtins")):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(member) if callable(member) else None
            if inspect.isfunction(function):
                try:
                    yield name, ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
                except (OSError, TypeError, SyntaxError):  # typed at a prompt, or compiled: no source
                    continue


def _find_methods(module: torch.nn.Module, pattern: str) -> Iterator[str]:
    for name, source in _read_user_methods(module):
        if name.startswith(("validation", "test", "predict")):
            continue
        if re.search(pattern, source):
            yield f"{type(module).__name__}.{name}"


def list_methods(module: torch.nn.Module, pattern: str) -> list[str]:
    """The module's own methods for training whose source contains `pattern`."""
    return [*_find_methods(module, pattern)]


def compile_targets(module: torch.nn.Module) -> Iterator[str]:
    """Names of the modules worth compiling: the outermost inner modules that hold parameters.

    If the LightningModule holds only bare layers and calls its own ``forward``, that is the target (written as '').
    With DDP, Lightning borrows ``forward`` for the training step, so the layers are the targets.
    """
    targets = list(_find_outermost(module, ""))
    layers = [
        name
        for name in targets
        if type(module.get_submodule(name)).__module__.startswith("torch.nn.modules.")
        and not list(module.get_submodule(name).children())
    ]
    if targets and len(layers) == len(targets) and overrides(module, "forward"):
        calls_itself = any(re.search(r"\bself\(", source) for name, source in _read_user_methods(module))
        if calls_itself and not torch.distributed.is_initialized():
            targets = [""]
    yield from targets


def _find_outermost(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if type(child).__module__.startswith("torchmetrics.") or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _find_outermost(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _group_repeated(module: torch.nn.Module) -> Iterable[tuple[str, ...]]:
    """Names of the repeated blocks, grouped by class and shapes."""
    groups: dict[Any, tuple[str, ...]] = {}
    for name in _find_repeated(module, ""):
        kind = call_shapes.describe_kind(module.get_submodule(name))
        groups[kind] = (*groups.get(kind, ()), name)
    return groups.values()


def _find_repeated(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    """Members of layer lists that contain layers themselves and whose class occurs more than once in the list."""
    is_list = isinstance(module, _LISTS)
    kinds = collections.Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        holds = not isinstance(child, _LISTS) and any(True for _ in child.children())
        if is_list and holds and kinds[type(child)] > 1 and any(True for _ in child.parameters()):
            yield path
        else:
            yield from _find_repeated(child, path)


def read_loader_facts(
    loader: Any, start_method: str = "auto", others: Sequence[Any] = (), *, ranks: int = 1
) -> LoaderFacts:
    """Facts of a train loader, and of workers started by `start_method`. Reads attributes and code only.

    Args:
        others: the module and the callbacks, whose hooks may use the data.
        ranks: number of training processes.
    """
    lost = explain_lost_place(loader, ranks)
    if not isinstance(loader, DataLoader):
        return LoaderFacts(
            kind=type(loader).__name__,
            is_dataloader=False,
            map_style=False,
            batches=count_batches(loader),
            stateful=hasattr(loader, "state_dict"),
            place_lost=lost,
        )
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    unpicklable = None
    if (method if start_method == "auto" else start_method) != "fork":
        travels = {"dataset": loader.dataset, "collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
        unpicklable = next(
            filter(None, (datasets.find_unpicklable(item, name) for name, item in travels.items())), None
        )
    default = torch.utils.data.default_collate
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    hazards = between_batches.find_sampler_hazards(sampler, loader.dataset, others)
    return LoaderFacts(
        kind=type(loader).__name__,
        map_style=not isinstance(loader.dataset, IterableDataset),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        batch_size=_read_batch_size(loader),
        batches=count_batches(loader),
        auto_collates=loader.batch_sampler is not None,
        custom_collate=loader.collate_fn is not default,
        start_method=str(method),
        persistent_workers=loader.persistent_workers,
        stateful=hasattr(loader, "state_dict"),
        draws_random=datasets.draws_random(loader.dataset, loader.collate_fn),
        shared_draws=thread_safety.list_shared_draws(loader.dataset, loader.collate_fn),
        worker_hazards=datasets.find_worker_hazards(loader.dataset, loader.collate_fn),
        sampler_hazards=hazards,
        sampler_draws=between_batches.list_draws(sampler),
        place_lost=lost or next(iter(hazards), None),
        thread_hazards=(
            *thread_safety.find_thread_hazards(loader.dataset, loader.collate_fn),
            *between_batches.list_holders(loader.dataset, others, between=True),
        ),
        may_change=between_batches.list_changers(loader.dataset, others),
        own_iterator=makes_iterators(type(loader)),
        sample_bytes=datasets.sample_bytes(loader.dataset) if loader.collate_fn is default else None,
        unpicklable=unpicklable,
        long_lists=datasets.list_long(loader.dataset),
        packable=count_packable(loader.dataset),
        images=read_images(loader.dataset),
        prefix=read_prefix(loader.dataset),
    )


def _read_batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None:
        return loader.batch_size
    # A plain BatchSampler, from the user or from Lightning, has one batch size; a custom one need not.
    sampler = loader.batch_sampler
    return getattr(sampler, "batch_size", None) if isinstance(sampler, BatchSampler) else None


def count_batches(loader: Any) -> int | None:
    """Batches per epoch; None for a loader without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_compiled(module: Any) -> bool:
    """Whether the module's calls are compiled, by us or by the user."""
    return (
        type(module).__name__ == "OptimizedModule"
        or vars(module).get("_compiled_call_impl") is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        or getattr(module, "_compiler_ctx", None) is not None  # how Lightning marks trainer.fit(torch.compile(module))
    )
