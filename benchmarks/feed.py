"""Does the feed keep up? Loaders alone, and each of them feeding one compiled ResNet-50 beside a resident batch.

    python -m benchmarks.feed [--data FILE] [--seconds 4] [--rounds 2] [--only "train,device store"] [--budget 200]

alone  images/s that reach the device: the DataLoader with workers, the same with the prefetch rung's feed, with
       pictures as bytes, and with kept samples besides; the store on the device; and DALI, as its rung makes it: the
       CPU decodes and the device resizes, the CPU does both, the GPU decodes (mixed)
train  the recipe's network in bf16, channels-last and compiled, batch 256, fed by each of these; `resident` has one
       batch that never moves, and is the limit. It is one process and one compile; arms take turns in each round

Files come from the page cache after the first epoch. `pixels`: how far DALI's pictures are from the dataset's own.
`--size tiny --seconds 1 --workers 1 --eager` runs on two CPU cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.cases import Case, find_data, make_parser, run_cases, wait
from fastloop.bridge.fit.recipes import build_recipe
from fastloop.config.loading import load
from fastloop.evidence import machine
from fastloop.feeds.cache.prefixes import read_prefix
from fastloop.feeds.cache.wanted import KeptSamples
from fastloop.feeds.dali.planned import DaliEngine
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.feeds.device_store.wanted import PicturesOnDevice
from fastloop.feeds.images.byte_batches import AsBytes
from fastloop.feeds.images.reading import read_source
from fastloop.feeds.lazy_loader import clone

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
WARM_BATCHES = 8
"""Not timed at the beginning of each arm: queues fill, kernels are chosen."""


class Feeds:
    """Makes the feeds of the arms: each yields channels-last pictures [N, 3, H, W] and labels, on the device."""

    def __init__(self, dataset: Any, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.kept: Any = None
        self.stored: Any = None
        self.plain = DataLoader(dataset, batch_size=options.batch, shuffle=True, drop_last=True)
        self.loader = DataLoader(
            dataset,
            batch_size=options.batch,
            shuffle=True,
            drop_last=True,
            num_workers=options.workers,
            pin_memory=device.type == "cuda",
            prefetch_factor=2 if options.workers else None,
        )
        self.steps = read_source(dataset).facts.steps
        self.arms: dict[str, Callable[[], Batches]] = {
            "device store": self._from_device,
            "dali cpu": partial(self._dali, "cpu", "device"),
            "cached bytes": self._cached_bytes,
            "dataloader": lambda: (self.move(batch) for batch in self.loader),
            "prefetch": self._prefetch,
            "bytes": self._bytes,
            "dali mixed": partial(self._dali, "mixed", "device"),
            "dali cpu resized": partial(self._dali, "cpu", "cpu"),
        }
        if device.type != "cuda":
            self.arms = {name: self.arms[name] for name in ("device store", "dali cpu", "cached bytes", "dataloader")}

    def move(self, batch: Any) -> Any:
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        return images.contiguous(memory_format=torch.channels_last), labels

    def _prefetch(self) -> Batches:
        feed = DeviceFeed(self.loader, depth=2, device=self.device, stage=self.move)
        return iter(feed)

    def _bytes(self) -> Batches:
        return self._load_bytes(self.plain.dataset)

    def _cached_bytes(self) -> Batches:
        if self.kept is None:
            prefix = read_prefix(self.plain.dataset)
            assert not isinstance(prefix, str), prefix
            self.kept = KeptSamples(store="shm", budget_bytes=None, prefix=prefix).wrap(self.plain.dataset)
        return self._load_bytes(self.kept)

    def _load_bytes(self, dataset: Any) -> Batches:
        want = AsBytes()
        wrapped = want.wrap(dataset)
        loader = clone(self.loader, {"dataset": wrapped})
        for batch in DeviceFeed(loader, depth=2, device=self.device, stage=self._move_bytes):
            yield self.move(want.finish(batch))

    def _move_bytes(self, batch: Any) -> Any:
        return type(batch)(*(tensor.to(self.device, non_blocking=True) for tensor in batch))

    def _from_device(self) -> Batches:
        if self.stored is None:
            workers = self.options.workers
            self.stored = PicturesOnDevice(device=self.device.type, workers=workers).make(self.plain)
        self.stored.wants_channels_last = lambda: True
        for batch in self.stored.load(0):
            yield self.move(batch)

    def _engine(self, decode: Any, resize: Any) -> DaliEngine:
        threads = self.options.threads or (
            min(4, machine.count_usable_cpus()) if decode == "mixed" else machine.count_usable_cpus()
        )
        return DaliEngine(
            steps=self.steps,
            decode=decode,
            threads=threads,
            resize=resize,
            batch_size=self.options.batch,
            on_gpu=self.device.type == "cuda",
            keeps=True,
            turn_off="--only with other feeds",
        )

    def compare_pixels(self, decode: str, _left_s: float) -> dict[str, Any]:
        """How far DALI's pictures are from the dataset's own, by who decodes."""
        return dict(self._engine(decode, "device").check(self.plain, lambda _line: None))

    def _dali(self, decode: Any, resize: Any) -> Batches:
        made = self._engine(decode, resize).make(self.plain)
        made.wants_channels_last = lambda: True
        try:
            for images, labels in made.load(0):
                yield images.contiguous(memory_format=torch.channels_last), labels  # where it is on the CPU
        finally:
            made.close()


def repeat(epoch: Callable[[], Batches]) -> Batches:
    """Epoch after epoch."""
    while True:
        yield from epoch()


def measure(batches: Batches, step: Callable[..., Any], seconds: float, device: torch.device) -> dict[str, Any]:
    """Images/s of `step` on these batches, and what the host waited for them."""
    began = time.perf_counter()
    for _ in range(WARM_BATCHES):
        step(*next(batches))
    wait(device.type)
    warm_s = time.perf_counter() - began
    energy_mj = read_energy_mj(device)
    images, waited_s, began = 0, 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        asked = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked
        step(*batch)
        images += len(batch[0])
    wait(device.type)
    took_s = time.perf_counter() - began
    spent_mj = None if energy_mj is None else (read_energy_mj(device) or 0) - energy_mj
    return {
        "images_per_s": images / took_s,
        "images": images,
        "timed_s": took_s,
        "setup_s": warm_s,
        "host_wait_pct": 100 * waited_s / took_s,
        "joule_per_image": None if spent_mj is None else spent_mj / 1e3 / images,
    }


def read_energy_mj(device: torch.device) -> int | None:
    """Millijoules the GPU has used since the driver was loaded."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except Exception:  # no figure, then
        return None


def make_step(network: torch.nn.Module, options: argparse.Namespace, device: torch.device) -> Callable[..., Any]:
    """A training step of the recipe's, with amp, layout and compile."""
    network = network.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    run: Any = network if options.eager else torch.compile(network)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def run_arm(
    feed: Callable[[], Batches], step: Any, options: Any, device: torch.device, _left_s: float
) -> dict[str, Any]:
    """One turn of a feed."""
    batches = repeat(feed)
    try:
        return measure(batches, step, options.seconds, device)
    finally:
        batches.close()  # type: ignore[attr-defined]


class FirstCall:
    """A step that is compiled when it is first wanted."""

    def __init__(self, network: torch.nn.Module, options: argparse.Namespace, device: torch.device) -> None:
        self.make, self.step = partial(make_step, network, options, device), None

    def __call__(self, *batch: torch.Tensor) -> None:
        self.step = self.step or self.make()
        self.step(*batch)


def main() -> None:
    parser = make_parser(__doc__, rounds=2)
    parser.add_argument(
        "--data", help="a folder or a tar of photographs; default: shared/data, else the recipe's made ones"
    )
    parser.add_argument("--recipe", default="resnet50", choices=["resnet50", "cifar10"])
    parser.add_argument("--only", default="", help="alone, train, pixels, or names of feeds, separated by commas")
    parser.add_argument("--seconds", type=float, default=4, help="of each arm in each round")
    parser.add_argument("--batch", type=int, help="256, or 16 for the tiny size")
    parser.add_argument("--workers", type=int, help="of the DataLoader; default: all CPUs but one, at most 15")
    parser.add_argument("--threads", type=int, help="DALI's; default: as the rung chooses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    cpus = machine.count_usable_cpus()
    options.workers = max(1, min(15, cpus - 1)) if options.workers is None else options.workers
    options.batch = options.batch or (16 if options.size == "tiny" else 256)
    device = torch.device(options.device)
    overrides = [f"recipe.size={options.size}"]
    samples = {"resnet50": "imagenet-sample.tar", "cifar10": "cifar10-jpg.tar"}
    if data := options.data or find_data(samples[options.recipe], options.size):
        overrides.append(f"recipe.data={Path(data).absolute()}")
    module, pictures = build_recipe(load(options.recipe, overrides=overrides))
    pictures.prepare_data()
    pictures.setup("fit")
    feeds = Feeds(pictures.train_set, options, device)
    run_cases(
        "feed",
        list_cases(feeds, FirstCall(module.network, options, device), options, device),
        options,
        rate="images_per_s",
        **{name: getattr(options, name) for name in ("recipe", "batch", "workers", "eager")},
        data=bool(data),
    )


def list_cases(feeds: Feeds, step: Any, options: argparse.Namespace, device: torch.device) -> list[Case]:
    """Into the network, the feeds alone, and the pixels: those that are asked for."""
    wanted, turn_s = set(filter(None, options.only.split(","))), 1.5 * options.seconds
    parts, names = wanted & {"alone", "train", "pixels"}, wanted & set(feeds.arms)
    if unknown := wanted - parts - names:
        raise SystemExit(f"no such part or feed: {', '.join(sorted(unknown))}; there are {', '.join(feeds.arms)}")
    batch = feeds.move(next(iter(feeds.plain)))
    arms = {"resident": lambda: iter([batch] * 64)} | {
        name: feed for name, feed in feeds.arms.items() if name in (names or feeds.arms)
    }
    first_s = {"resident": 60.0, "device store": 30.0} if options.size == "default" else {}
    cases = [
        Case(f"train, {name}", partial(run_arm, feed, step, options, device), turn_s + first_s.get(name, 3))
        for name, feed in arms.items()
    ]
    cases += [
        Case(f"alone, {name}", partial(run_arm, feed, lambda *_: None, options, device), turn_s + 3)
        for name, feed in arms.items()
        if name != "resident"
    ]
    decoders = ("cpu", "mixed") if device.type == "cuda" else ("cpu",)
    cases += [Case(f"pixels, {decode}", partial(feeds.compare_pixels, decode), 3) for decode in decoders]
    return [case for case in cases if not parts or case.name.partition(",")[0] in parts]


if __name__ == "__main__":
    main()
