"""What a plan may look at: the machine, the run, the model and its train loader. Free of torch and Lightning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.records.images import ImageFacts


@dataclass(frozen=True, kw_only=True)
class PrefixFacts:
    """The part of a dataset's work that is the same each time: what could be kept of each sample."""

    what: str
    """In words: decoded images, or what which method returns."""
    dataset: str
    """Its class, and where its files lie if that is known."""
    fingerprint: str
    """Of that work, in hexadecimal digits."""
    samples: int
    """Different ones, at most."""
    sample_bytes: int | None = None
    """Mean bytes of what is kept of a sample; None where that is not known before one is made."""
    names_files: bool = True
    """It is known which files a sample is made of, so that a changed one is noticed."""


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """What the train loader is, read without taking a sample from it."""

    kind: str
    """Class name of the loader."""
    is_dataloader: bool = True
    """A ``torch.utils.data.DataLoader`` or a subclass of it."""
    map_style: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    batch_size: int | None = None
    """Samples a batch; None where the loader does not batch or a custom batch sampler decides."""
    batches: int | None = None
    """Batches an epoch on this rank; None where the loader has no length."""
    auto_collates: bool = True
    """False for ``batch_size=None``: the dataset hands out whole batches."""
    custom_collate: bool = False
    start_method: str = "fork"
    persistent_workers: bool = False
    stateful: bool = False
    """It can say where it stands (``state_dict``), so a run may resume mid-epoch."""
    draws_random: tuple[str, ...] = ()
    """Places in the dataset that draw random numbers, as far as reading its code shows."""
    shared_draws: tuple[str, ...] = ()
    """Those of them that cannot be given a generator for each thread."""
    worker_hazards: tuple[str, ...] = ()
    """Why worker processes would break or change this dataset: CUDA tensors, open handles, per-epoch state."""
    sampler_hazards: tuple[str, ...] = ()
    """Why the sampler would draw other samples if it were asked ahead of the training: it looks at it."""
    sampler_draws: tuple[str, ...] = ()
    """The sampler's functions that draw from everybody's random numbers between two indices."""
    place_lost: str | None = None
    """Why a run resumed in mid-epoch starts that epoch over; None where it goes on."""
    thread_hazards: tuple[str, ...] = ()
    """Why several threads of this process could get other samples from the dataset than one does."""
    may_change: tuple[str, ...] = ()
    """What may change the dataset between epochs, as far as code shows; empty: nothing does."""
    own_iterator: bool = False
    """Its class makes iterators of its own, whose batches pass through code of the class."""
    unpicklable: str | None = None
    """Attribute path of what cannot travel to a spawned worker."""
    sample_bytes: int | None = None
    """Bytes of one sample, where its tensors are there already or a dry run looked at one."""
    long_lists: tuple[str, ...] = ()
    """Containers in the dataset of which each forked worker would get a copy by and by."""
    packable: int = 0
    """Samples whose list could be packed into arrays that workers share; 0 where that is not worth it."""
    images: ImageFacts | str = "the dataset was not inspected"
    """What happens to each file of a dataset of images; or why it is none."""
    prefix: PrefixFacts | str = "the dataset was not inspected"
    """What could be kept of each sample; or why nothing can."""
    engine: str | None = None
    """What loads in place of the DataLoader, as an earlier rung has it: DALI, threads."""
    on_device: bool = False
    """Its batches come on the device already."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything ``plan`` may look at. ``plan`` is a pure function of it."""

    # the machine
    cpu_count: int = 1
    """CPUs this process may use: affinity and cgroup quota, whichever is smaller."""
    local_ranks: int = 1
    """Training processes that share those CPUs."""
    shm_free_bytes: int | None = None
    """Room in ``/dev/shm`` for batches on their way from workers; None where there is none, or it is not known."""
    memory_free_bytes: int | None = None
    """Memory that this process may still take; None where it is not known."""
    disk_free_bytes: int | None = None
    """Room on the disk that holds the user's cache directory; None where it is not known."""
    no_sockets_in: str | None = None
    """The directory for temporary files, where its path is too long for the sockets that workers send batches by."""
    device: str = "cpu"
    """Device type the run trains on: cpu, cuda, mps."""
    device_name: str | None = None
    compute_capability: tuple[int, int] | None = None
    compiler: str | None = None
    """Path of the C++ compiler Inductor would call; None where there is none."""
    has_dali: bool = False
    """NVIDIA DALI is installed."""
    cuda_version: str | None = None
    """That torch was built for; None: for none."""
    # the run
    world_size: int = 1
    strategy: str = "SingleDeviceStrategy"
    is_ddp: bool = False
    plain_gradients: bool = True
    """Whole gradients live in ``parameter.grad`` (one device or DDP), not in shards or an engine of the strategy's."""
    static_graph: bool = False
    """The user told DDP that all steps have one graph; it then fails where a step has several backward passes."""
    precision: str = "32-true"
    own_precision: bool = False
    """The user chose a precision or a precision plugin."""
    accumulate: int = 1
    """Batches per optimizer step as the Trainer counts them."""
    accumulation_scheduled: bool = False
    """A GradientAccumulationScheduler changes the accumulation during training."""
    averages_weights_by_swa: bool = False
    """StochasticWeightAveraging is there: it runs an extra epoch with the backward switched off."""
    micro_batches: bool = False
    """Several backward passes make one optimizer step, by accumulation or by a split."""
    automatic_optimization: bool = True
    reload_every_n_epochs: int = 0
    val_check_interval: int | float | None = 1.0
    val_every_n_epochs: int | None = 1
    """``check_val_every_n_epoch``; None: ``val_check_interval`` counts batches across epochs."""
    limit_train_batches: int | float | None = 1.0
    max_epochs: int | None = None
    max_steps: int | None = None
    """Both None where the Trainer has no such limit."""
    resuming: bool = False
    transfer_hooks: tuple[str, ...] = ()
    """Batch transfer hooks the user overrides."""
    timed_hooks: tuple[str, ...] = ()
    """Those before and with the transfer that would give something else if they were called earlier."""
    evaluates: bool = False
    """``loader`` is one for validation."""
    steps_with_iterator: bool = False
    """``training_step(self, dataloader_iter)``: the module fetches its own batches."""
    # the model
    batchnorms: tuple[str, ...] = ()
    other_batchnorms: tuple[str, ...] = ()
    """Those that cannot be computed batch by batch: synchronized between ranks, or of a kind of their own."""
    convs: tuple[str, ...] = ()
    """Names of the 2-D convolutions."""
    attends_by_hand: tuple[str, ...] = ()
    """Modules that take a softmax and make matrix products themselves, and models with a switch that do."""
    attends_by_call: tuple[str, ...] = ()
    """Modules that call ``scaled_dot_product_attention``."""
    classes: int = 0
    """Rows of the largest matrix among the parameters, where a loss over so many classes is a large one; else 0."""
    not_mean_losses: tuple[str, ...] = ()
    """Losses that can be seen not to be means over samples."""
    autocasts: tuple[str, ...] = ()
    """Methods of the user's module that enter autocast themselves."""
    views: tuple[str, ...] = ()
    """Methods of the user's module that call ``view``, outside of what `compile_targets` hold."""
    inner_views: tuple[str, ...] = ()
    """Methods of modules inside it that merge dimensions by ``view(.., -1)``."""
    compiled_by_user: tuple[str, ...] = ()
    compile_targets: tuple[str, ...] = ()
    """Inner modules that can be compiled in place."""
    repeated_blocks: tuple[tuple[str, ...], ...] = ()
    """Inner modules of a class that repeats in a list of layers; those of the same shapes stand together."""
    detaches_grads: tuple[str, ...] = ()
    """Methods that call ``grad.detach_()``, which gradient bucket views forbid."""
    refused_losses: tuple[str, ...] = ()
    """Modules and methods that take `binary_cross_entropy`, which torch refuses under autocast on CUDA."""
    handles_grads: tuple[str, ...] = ()
    """Methods that read or clip gradients themselves, where a loss scaler has not unscaled them yet."""
    grad_hooks: bool = False
    """Parameters carry post-accumulate hooks (an optimizer inside the backward, for instance)."""
    user_comm_hook: bool = False
    # the data, known once the Trainer asks for the train loader
    loader: LoaderFacts | None = None

    def after(self, changes: Mapping[str, Any]) -> Facts:
        """These facts as later rungs see them once an earlier rung's change is in."""
        return dataclasses.replace(self, **changes) if changes else self
