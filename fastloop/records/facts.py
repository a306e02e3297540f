"""The facts that a plan may use: the machine, the run, the model and its train loader. Free of torch and Lightning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.records.images import ImageFacts


@dataclass(frozen=True, kw_only=True)
class PrefixFacts:
    """The deterministic first part of a dataset's work, whose result could be cached for each sample."""

    what: str
    """Description: decoded images, or the method whose return value is cached."""
    dataset: str
    """The dataset's class, and the location of its files if known."""
    fingerprint: str
    """Fingerprint of that work, in hexadecimal digits."""
    samples: int
    """Upper limit on the number of distinct samples."""
    sample_bytes: int | None = None
    """Mean cached bytes per sample; None if unknown until a sample has been made."""
    names_files: bool = True
    """Whether the files behind each sample are known, so that a changed file is noticed."""


Follows = Literal["batches", "epochs", "nothing"]
"""When a loader begins to use objects that replace others in the dataset: the next batch, the next epoch, or never."""


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """A dataset whose samples are rows of tensors, arrays or lists in memory, and nothing else."""

    what: str
    """The dataset's class."""
    count: int
    devices: tuple[str, ...] = ()
    """Types of the devices that hold tensors."""


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """Properties of the train loader, read without taking a sample from it."""

    kind: str
    """Class name of the loader."""
    is_dataloader: bool = True
    """A ``torch.utils.data.DataLoader`` or a subclass of it."""
    map_style: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    batch_size: int | None = None
    """Samples per batch; None if the loader does not batch or a custom batch sampler decides."""
    batches: int | None = None
    """Batches per epoch on this rank; None if the loader has no length."""
    auto_collates: bool = True
    """False for ``batch_size=None``: the dataset returns whole batches."""
    custom_collate: bool = False
    start_method: str = "fork"
    persistent_workers: bool = False
    stateful: bool = False
    """Whether it can save its position (``state_dict``), so that a run may resume mid-epoch."""
    draws_random: tuple[str, ...] = ()
    """Places in the dataset that draw random numbers, as found by reading its code."""
    init_draws: tuple[str, ...] = ()
    """Functions that a worker runs at its start and that draw random numbers, besides seeds."""
    asks_process: tuple[str, ...] = ()
    """Functions that run for a sample and ask which process they are in."""
    shared_draws: tuple[str, ...] = ()
    """The subset of ``draws_random`` that cannot get one generator per thread."""
    worker_hazards: tuple[str, ...] = ()
    """Why worker processes would break or change this dataset: CUDA tensors, open handles, per-epoch state."""
    holds_training: tuple[str, ...] = ()
    """Parts of the training that the dataset or collate function can reach: the module, an optimizer, a callback."""
    sampler_hazards: tuple[str, ...] = ()
    """Why the sampler would draw other samples if it ran ahead of the training: it depends on the training's state."""
    sampler_draws: tuple[str, ...] = ()
    """The sampler's functions that draw from the global random streams between two indices."""
    place_lost: str | None = None
    """Why a run that resumes mid-epoch would restart that epoch; None if it continues."""
    thread_hazards: tuple[str, ...] = ()
    """Why several threads of this process could get different samples from the dataset than one thread."""
    may_change: tuple[str, ...] = ()
    """What may change the dataset between epochs, as found by reading code; empty if nothing does."""
    not_ahead: str | None = None
    """Why samples of the next epoch could differ if they were made before it begins, as found by reading code."""
    changes_within: tuple[str, ...] = ()
    """What training changes of the samples' code and data while batches are loaded, as found by reading code."""
    remembers: tuple[str, ...] = ()
    """Containers that its samples fill, such as a cache; empty in a new worker."""
    repeats: str | None = None
    """Why an epoch has every sample several times: its workers each read an iterable dataset whole; None if nothing
    shows it."""
    own_iterator: bool = False
    """Its class returns custom iterators, so batches pass through code of that class."""
    spawn_hazard: str | None = None
    """Why workers that do not fork would fail, and what to do; None if nothing is known, or they fork."""
    sample_bytes: int | None = None
    """Bytes per sample, if its tensors already exist or a dry run measured one."""
    long_lists: tuple[str, ...] = ()
    """Containers in the dataset that each forked worker would gradually copy."""
    packable: int = 0
    """Samples whose list could be packed into arrays shared by workers; 0 if not worthwhile."""
    images: ImageFacts | str = "the dataset was not inspected"
    """The processing of each file of an image dataset; or why the dataset is not one."""
    rows: RowFacts | str = "the dataset was not inspected"
    """The rows in memory that are its samples; or why its samples are something else."""
    prefix: PrefixFacts | str = "the dataset was not inspected"
    """The part of each sample that could be cached; or why there is none."""
    engine: str | None = None
    """What an earlier rung uses to load instead of the DataLoader: DALI, threads."""
    on_device: bool = False
    """Its batches already arrive on the device."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything ``plan`` may use. ``plan`` is a pure function of it."""

    # the machine
    cpu_count: int = 1
    """CPUs this process may use: the smaller of affinity and cgroup quota."""
    local_ranks: int = 1
    """Training processes that share those CPUs."""
    shm_free_bytes: int | None = None
    """Free space in ``/dev/shm`` for batches sent by workers; None if it does not exist or is unknown."""
    memory_free_bytes: int | None = None
    """Memory that this process may still allocate; None if unknown."""
    disk_free_bytes: int | None = None
    """Free space on the disk that holds the user's cache directory; None if unknown."""
    is_daemon: bool = False
    """Whether this is a daemonic process, as in a ``multiprocessing.Pool``: it may not start workers."""
    no_sockets_in: str | None = None
    """The directory for temporary files, if its path is too long for the sockets that workers send batches through."""
    device: str = "cpu"
    """Device type the run trains on: cpu, cuda, mps."""
    device_name: str | None = None
    compute_capability: tuple[int, int] | None = None
    decodes_beside: bool = False
    """The GPU has JPEG decoders of its own, and this process enough hardware queues to use them beside the training."""
    compiler: str | None = None
    """Path of the C++ compiler Inductor would call; None if there is none."""
    has_dali: bool = False
    """NVIDIA DALI is installed."""
    cuda_version: str | None = None
    """The version torch was built for; None for a build without CUDA."""
    # the run
    world_size: int = 1
    strategy: str = "SingleDeviceStrategy"
    is_ddp: bool = False
    plain_gradients: bool = True
    """Whole gradients live in ``parameter.grad`` (one device or DDP), not in shards or in the strategy's own engine."""
    static_graph: bool = False
    """The user set DDP's ``static_graph``; DDP then fails if a step has several backward passes."""
    precision: str = "32-true"
    own_precision: bool = False
    """The user chose a precision or a precision plugin."""
    strict: bool = False
    """A rung that cannot apply is an error."""
    by_ladder: frozenset[str] = frozenset()
    """Rungs that a shipped ladder switched on, and not the user."""
    weighs_costs: bool = True
    """The one-time cost of such a rung must pay back in this run; False in a trial."""
    counts_batches: tuple[str, ...] = ()
    """The user's code that would notice fewer and larger batches: a hook of each batch, ``batch_idx`` in its step."""
    changes_by_batch: tuple[str, ...] = ()
    """Those of these hooks that may change weights or gradients, as far as their code shows."""
    skips_batches: bool = False
    """``training_step`` returns no loss for some batches, as its code shows."""
    reads_batch_counts: tuple[str, ...] = ()
    """What the module reads of the Trainer's own numbers of batches, which are others where windows are merged."""
    varies_by_epoch: bool = False
    """The user's code reads the number of the epoch, or has a hook at its start: the loss may change there."""
    accumulate: int = 1
    """Batches per optimizer step as the Trainer counts them."""
    accumulation_scheduled: bool = False
    """A GradientAccumulationScheduler changes the accumulation during training."""
    averages_weights_by_swa: bool = False
    """The run uses StochasticWeightAveraging, which runs an extra epoch with the backward disabled."""
    micro_batches: bool = False
    """Several backward passes make one optimizer step, by accumulation or by a split."""
    automatic_optimization: bool = True
    reload_every_n_epochs: int = 0
    val_check_interval: int | float | None = 1.0
    val_every_n_epochs: int | None = 1
    """``check_val_every_n_epoch``; None: ``val_check_interval`` counts batches across epochs."""
    limit_train_batches: int | float | None = 1.0
    limit_val_batches: int | float | None = 1.0
    max_epochs: int | None = None
    max_steps: int | None = None
    """``max_epochs`` and ``max_steps`` are None if the Trainer has no such limit."""
    resuming: bool = False
    transfer_hooks: tuple[str, ...] = ()
    """Batch transfer hooks the user overrides."""
    timed_hooks: tuple[str, ...] = ()
    """Hooks before or during the transfer that would return something else if they were called earlier."""
    evaluates: bool = False
    """Whether ``loader`` is a validation loader."""
    validation_workers: int = 0
    """Workers of validation loaders, as far as these were requested before the train loader."""
    kept_validation_workers: int = 0
    """The user's workers of validation loaders that stay between validations."""
    steps_with_iterator: bool = False
    """``training_step(self, dataloader_iter)``: the module fetches its own batches."""
    # the model
    batchnorms: tuple[str, ...] = ()
    """Layers with statistics of batches: also an InstanceNorm with ``track_running_stats``."""
    other_batchnorms: tuple[str, ...] = ()
    """Those that cannot be computed batch by batch: synchronized between ranks, custom, or an InstanceNorm."""
    convs: tuple[str, ...] = ()
    """Names of the 2-D convolutions."""
    depthwise_convs: tuple[str, ...] = ()
    """Those of them that have one group for each input channel, and several."""
    attends_by_hand: tuple[str, ...] = ()
    """Modules that compute softmax and matrix products themselves, and models with a switch that makes them do so."""
    attends_by_call: tuple[str, ...] = ()
    """Modules that call ``scaled_dot_product_attention``."""
    classes: int = 0
    """Rows of the largest matrix among the parameters, if a loss over that many classes is large; else 0."""
    not_mean_losses: tuple[str, ...] = ()
    """Losses that are recognizably not means over samples."""
    autocasts: tuple[str, ...] = ()
    """Methods of the user's module that enter autocast themselves."""
    views: tuple[str, ...] = ()
    """Functions and methods of the user's module and callbacks that call ``view``, outside the modules in
    `compile_targets`."""
    inner_views: tuple[str, ...] = ()
    """Methods of submodules that merge dimensions by ``view(.., -1)``."""
    compiled_by_user: tuple[str, ...] = ()
    double_backward: tuple[str, ...] = ()
    """Methods and functions of the user's that pass ``create_graph`` to autograd."""
    keeps_graph: tuple[str, ...] = ()
    """Those that pass ``retain_graph``."""
    inner_modules: tuple[str, ...] = ()
    """Names of the outermost modules with parameters that are more than one layer."""
    compile_targets: tuple[str, ...] = ()
    """Inner modules that can be compiled in place."""
    repeated_blocks: tuple[tuple[str, ...], ...] = ()
    """Submodules of a class that repeats in a list of layers, grouped by equal shapes."""
    detaches_grads: tuple[str, ...] = ()
    """Methods that call ``grad.detach_()``, which gradient bucket views forbid."""
    uses_grads: tuple[str, ...] = ()
    """Under DDP, the user's functions that use ``.grad`` for more than to zero it."""
    refused_losses: tuple[str, ...] = ()
    """Modules and methods that call `binary_cross_entropy`, which torch rejects under autocast on CUDA."""
    handles_grads: tuple[str, ...] = ()
    """Methods that read or clip gradients themselves, before a loss scaler has unscaled them."""
    line_searches: tuple[str, ...] = ()
    """Methods of the user's module whose source creates an optimizer that compares losses: LBFGS."""
    own_line_searches: tuple[str, ...] = ()
    """Those of them that configure_optimizers does not call: the Trainer may not know the optimizers that they
    create."""
    grad_hooks: bool = False
    """Parameters carry post-accumulate hooks (an optimizer inside the backward, for instance)."""
    user_comm_hook: bool = False
    # the data, known once the Trainer requests the train loader
    loader: LoaderFacts | None = None

    @property
    def batch_room_bytes(self) -> int | None:
        """Room for the batches of all workers on this machine: ``/dev/shm``, and no more than the free memory, of which
        it is a part. None if unknown."""
        if self.shm_free_bytes is None or self.memory_free_bytes is None:
            return self.shm_free_bytes
        return min(self.shm_free_bytes, self.memory_free_bytes)

    def after(self, changes: Mapping[str, Any]) -> Facts:
        """These facts as later rungs see them after an earlier rung's change."""
        return dataclasses.replace(self, **changes) if changes else self


_UNITS = {1e3: "kB", 1e6: "MB", 1e9: "GB", 1e12: "TB"}


def format_bytes(size: float) -> str:
    """Format a size with three digits, in the largest unit of which it is at least one: ``525 MB``."""
    fitting = [scale for scale in _UNITS if size >= 0.9995 * scale]  # 999.9 MB would be rounded to 1e+03
    return f"{size / fitting[-1]:.3g} {_UNITS[fitting[-1]]}" if fitting else f"{size:.0f} bytes"
