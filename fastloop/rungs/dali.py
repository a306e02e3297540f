"""Let NVIDIA DALI read, decode, crop and normalize image files instead of the DataLoader.

Faster because  it decodes in C++ threads, and only the part of each image that is used; no pixel passes through Python.
Costs           random crops that differ from torchvision's (same distribution); pixels that differ by 0.2 of 255
                levels; device memory for three batches and, if the GPU decodes, some of its time;
                CUDA_DEVICE_MAX_CONNECTIONS is set to 32 unless you set it.
Don't use when  data_wait is already under 2 % of the step, or the transforms go beyond torchvision's common ones.
Evidence        images that DALI decoded for the training
Source          https://docs.nvidia.com/deeplearning/dali/user-guide/docs/
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.feeds.accumulation_windows import count_steps
from fastloop.feeds.dali.pictures import AHEAD, MOST_QUEUES, QUEUES, Where, find_obstacle, is_installed, name_cure
from fastloop.feeds.dali.planned import DaliEngine
from fastloop.records.card import Card, ClimbState, Variant
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.images import RANDOM, ImageFacts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Verdict, say_count
from fastloop.records.readings import compute_validation_loading_pct, loads_little_for_validation, read_loader

ENOUGH_CPUS = 8
"""With at least this many CPUs per GPU, the CPU decodes first on a GPU without JPEG decoders of its own."""
LEAST_STEPS = 2_000
"""In runs of at least this many optimizer steps, trying the other decoder is worth its cost: about two seconds, and
some slower batches."""
MIXED_THREADS = 4
"""Enough threads to keep the GPU's decoder busy where there are too few to decode beside it: 22,026 images/s, compared
with 24,278 with more."""
LEFT_FREE = 4
"""One in this many CPUs is left to the thread that launches kernels. On an H100 with 16 CPUs, 12 threads trained 5,368
images/s and 16 trained 5,265: with 12, the median step was as fast, and fewer steps were slow."""


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """Try DALI in place of the loader if the samples are image files and DALI is installed."""
    if not state.image_files or not is_installed():
        return
    if "dali" not in state.stack:
        yield Variant(changes="engine")


def _advise_validation(seen: Measurement, on: bool) -> str | None:
    """Suggest DALI for validation too if it loads the train set, and validation waits for its pictures."""
    found, loading_pct = seen.evidence.get("dali") or {}, compute_validation_loading_pct(seen)
    if not (on and found.get("images")) or "validation_images" in found:
        return None
    if loading_pct is None or loads_little_for_validation(seen):
        return None
    return "write rungs.dali.validation: true, and DALI loads the pictures for validation too"


CARD = Card(
    family="feed",
    does="DALI decodes image files outside Python, and only the part of each that is used",
    answers={"data_wait": 2, "decoding": 1, "mostly_decoding": 2},
    applies=lambda seen: read_loader(seen).get("decode_ms") is not None,
    replaces_loader=lambda _seen: True,
    variants=_list_variants,
    batches_ready=lambda settings, _workers: 0 if settings is None else AHEAD,
    first_start_s=2.0,
    loads_elsewhere=True,
    advice={"validation": _advise_validation},
    variables={QUEUES: str(MOST_QUEUES)},
)


@dataclass(frozen=True, kw_only=True)
class Dali:
    """An ImageFolder's train loader through DALI: the same samples in the same batches. Evaluation does not change,
    except for validation loaders if `validation` is true.

    Supports ImageFolder, DatasetFolder with torchvision's image loader, Subset and ConcatDataset of them, and datasets
    with a method ``image_path_and_label(index)``; with torchvision's RandomResizedCrop, Resize, CenterCrop, RandomCrop,
    RandomHorizontalFlip, ColorJitter, ToTensor (ToImage, ToDtype) and Normalize. Before the first step, DALI and the
    dataset make the same real samples, with the same crops and flips; if they differ by more than rounding, this rung
    is off.
    """

    enabled: bool = False
    decode: Literal["auto", "cpu", "mixed"] = "auto"
    """Where to decode: cpu, or mixed = on the GPU, and half of each batch on the CPU from 8 threads on; auto = mixed if
    the GPU has JPEG decoders of its own (A100, H100, H200, B200) or there are fewer than 8 CPUs per GPU, and the CPU
    if these pictures are not right or too large there. In runs of 2,000 steps or more, auto tries the other if training
    waits for pictures, and keeps the faster one."""
    threads: int | Literal["auto"] = "auto"
    """DALI's threads per rank; auto = three quarters of the rank's CPUs (all without a GPU), or at most 4 if there are
    fewer than 8 and the GPU decodes."""
    resize: Literal["auto", "cpu", "device"] = "auto"
    """Where to resize CPU-decoded pictures; auto = on the device, which is less busy."""
    validation: bool = False
    """Use DALI for validation too: the same samples in order, with the same pixel deviations as in training."""

    def __post_init__(self) -> None:
        why, do = "nothing would decode", "write a positive number or auto"
        require_positive("dali.threads", self.threads, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Request an engine in place of the train loader if its samples are known to be image files."""
        if facts.steps_with_iterator:
            raise NotApplicable("training_step(dataloader_iter) fetches and moves its own batches")
        if not facts.has_dali:
            raise NotApplicable(f"DALI is not installed; {name_cure(facts.cuda_version)}")
        if facts.device not in ("cpu", "cuda"):
            raise NotApplicable(f"DALI supports CUDA and the CPU; this run is on {facts.device}")
        if self.decode == "mixed" and facts.device != "cuda":
            raise NotApplicable("decode: mixed needs CUDA; write auto or cpu")
        if facts.loader is None:
            may_want = ("loader.engine", *(("evaluation.engine",) if self.validation else ()))
            return Change(waits_for="the train loader", may_want=may_want, evaluation=self.validation)
        loader = facts.loader
        images = _find_images(loader, facts)
        on_gpu = facts.device == "cuda"
        decode, threads = self._choose(facts)
        engine = DaliEngine(
            steps=images.steps,
            decode=decode,
            threads=threads,
            resize="cpu" if self.resize == "cpu" or not on_gpu else "device",
            batch_size=loader.batch_size or 1,
            on_gpu=on_gpu,
            keeps=not facts.reload_every_n_epochs,
            turn_off="rungs.dali.enabled: false",
            other=self._find_other(decode, facts),
            tries_other=self._tries_other(facts),
        )
        if facts.evaluates:
            return Change(wants={"evaluation.engine": engine}, parity="approximate")
        return Change(
            wants={"loader.engine": engine},
            parity="approximate",
            notes=tuple(self._list_notes(engine, images, loader, facts)),
            facts={"loader": dataclasses.replace(loader, engine="DALI", on_device=on_gpu, num_workers=0)},
        )

    def _choose(self, facts: Facts) -> tuple[Where, int]:
        """Choose where to decode, and the number of threads."""
        decode = self.decode
        if decode == "auto":
            by_gpu = facts.decodes_beside or _count_cpus(facts) < ENOUGH_CPUS
            decode = "mixed" if facts.device == "cuda" and by_gpu else "cpu"
        return decode, self._count_threads(decode, facts)

    def _find_other(self, decode: Where, facts: Facts) -> tuple[Where, int] | None:
        """The decoder to use if the first one does not work, and its threads; None without a choice."""
        if self.decode != "auto" or facts.device != "cuda":
            return None
        other: Where = "mixed" if decode == "cpu" else "cpu"
        return other, self._count_threads(other, facts)

    @staticmethod
    def _tries_other(facts: Facts) -> bool:
        """Whether the run is long enough to try the other decoder. Each reload of the loader would start the trial
        again."""
        steps = count_steps(facts)
        long = steps is None or steps >= LEAST_STEPS
        return long and facts.weighs_costs and not facts.evaluates and not facts.reload_every_n_epochs

    def _count_threads(self, decode: Where, facts: Facts) -> int:
        if self.threads != "auto":
            return self.threads
        cpus = _count_cpus(facts)
        if decode == "mixed" and cpus < ENOUGH_CPUS:
            return min(cpus, MIXED_THREADS)
        return cpus - cpus // LEFT_FREE if facts.device == "cuda" else cpus

    def _list_notes(self, engine: DaliEngine, images: ImageFacts, loader: LoaderFacts, facts: Facts) -> list[str]:
        by = "the GPU decodes" if engine.decode == "mixed" else "the CPU decodes"
        rule = f" (rule: {ENOUGH_CPUS} CPUs for each GPU are enough)" if facts.device == "cuda" else ""
        if facts.decodes_beside:
            rule = " (rule: it has JPEG decoders of its own)"
        if engine.other is not None and engine.tries_other:
            rule = rule[:-1] + "; if training waits, the other is tried)"
        loaders = "train and validation loaders" if self.validation else "train loaders only"
        notes = [f"{by}, with {engine.threads} threads{rule if self.decode == 'auto' else ''}; {loaders}"]
        if random := [type(step).__name__ for step in images.steps if isinstance(step, RANDOM)]:
            notes.append(f"DALI draws its own random numbers: {', '.join(random)} differ on every run")
        if loader.num_workers:
            notes.append(f"your {loader.num_workers} worker processes are not started")
        notes.append("a run resumed mid-epoch has different crops and flips for the rest of it; DALI keeps no state")
        return notes

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if DALI decoded images; also reports batches it could not load, and pixel deviations."""
        found = seen.evidence.get("dali", {})
        images, plain = found.get("images"), found.get("plain_batches")
        if images is None:
            return Verdict(took=None, why="no batch was requested from the train loader")
        why = f"DALI decoded {images} images ({found.get('decode')}, {found.get('threads')} threads)"
        if (chosen := found.get("decode_why")) is not None:
            why += f"; {chosen}"
        by_gpu = "mixed" in (found.get("decode"), *found.get("decode_ms", {}))
        if by_gpu and (queues := found.get("queues")) != str(MOST_QUEUES):
            may = f"{QUEUES} is {queues or 'not set'}, so the GPU's decoder may wait for the training's kernels"
            why += f"; {may}: set it to {MOST_QUEUES} before the script starts"
        if (mean := found.get("mean_levels")) is not None:
            why += f"; {found['checked_samples']} compared samples differ by {mean:.2f} of 255 levels"
        if plain:
            why += f"; {say_count(plain, 'batch')} loaded without it: {found.get('why_plain')}"
        if self.validation:
            why += f"; for validation it decoded {found.get('validation_images', 0)}"
            plain = found.get("validation_why_plain")
            why += "" if plain is None else f", and left one loader as it is: {plain}"
        return Verdict(took=images > 0, why=why)


def _count_cpus(facts: Facts) -> int:
    """CPUs for each rank."""
    return max(1, facts.cpu_count // max(1, facts.local_ranks))


def _find_images(loader: LoaderFacts, facts: Facts) -> ImageFacts:
    """Return the facts about the image files; raise NotApplicable with the obstacle if DALI cannot load them."""
    kind, images, no_images = loader.kind, loader.images, find_obstacle(loader.images)
    before_transfer = facts.device == "cuda" and "on_before_batch_transfer" in facts.transfer_hooks
    obstacles = (
        (
            not loader.is_dataloader,
            f"{kind} is not a DataLoader: for example, your own DALI iterator is left alone",
        ),
        (loader.engine is not None, f"{loader.engine} already loads the samples"),
        (no_images, str(no_images)),
        (loader.custom_collate, "your own collate_fn builds the batches, but DALI builds whole batches itself"),
        (
            not loader.auto_collates or loader.batch_size is None,
            f"{kind} has no batch_size, which DALI needs to allocate memory",
        ),
        (loader.batches == 0, "the loader has no batches: drop_last, and fewer samples than one batch"),
        (loader.stateful, f"{kind} keeps its own position, which DALI's read-ahead would shift"),
        (loader.sampler_hazards, f"DALI reads the sampler ahead of training: {'; '.join(loader.sampler_hazards)}"),
        (loader.own_iterator, f"{kind} makes its own iterators"),
        (before_transfer, "on_before_batch_transfer expects batches that are not on the device yet"),
    )
    for is_in_the_way, reason in obstacles:
        if is_in_the_way:
            raise NotApplicable(reason)
    assert isinstance(images, ImageFacts)
    return images
