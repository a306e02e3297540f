"""Does the feed keep up? Loaders alone, and each of them feeding one compiled ResNet-50 beside a resident batch.

    python benchmarks/feed.py --data imagenet-sample.tar [--seconds 8] [--rounds 3] [--arms alone,train] [--workers 15]

alone  images/s that reach the device: the DataLoader with workers, the same with the prefetch rung's feed, with
       pictures as bytes, and with kept samples besides; the store on the device; and DALI, as its rung makes it: the
       CPU decodes and the device resizes, the CPU does both, the GPU decodes (mixed)
train  the recipe's network in bf16, channels-last and compiled, batch 256, fed by each of these; `resident` has one
       batch that never moves, and is the limit. It is one process and one compile; arms take turns in each round

One JSON line per arm and round, then one per arm with the median, the lowest and the highest of its rounds. An arm that
fails says so in a line of its own, and the others go on. Files come from the page cache after the first epoch.
`--size tiny --seconds 1 --rounds 1 --workers 1 --eager` runs on two CPU cores in a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

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
            "dataloader": lambda: (self.move(batch) for batch in self.loader),
            "prefetch": self._prefetch,
            "bytes": self._bytes,
            "cache, bytes": self._cached_bytes,
            "device store": self._from_device,
            "dali cpu": partial(self._dali, "cpu", "device"),
            "dali cpu, resized there": partial(self._dali, "cpu", "cpu"),
            "dali mixed": partial(self._dali, "mixed", "device"),
        }
        if device.type != "cuda":
            self.arms = {name: self.arms[name] for name in ("dataloader", "cache, bytes", "device store", "dali cpu")}

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
            min(4, machine.usable_cpus()) if decode == "mixed" else machine.usable_cpus()
        )
        return DaliEngine(
            steps=self.steps,
            decode=decode,
            threads=threads,
            resize=resize,
            batch_size=self.options.batch,
            on_gpu=self.device.type == "cuda",
            keeps=True,
        )

    def compare_pixels(self) -> None:
        """Print how far DALI's pictures are from the dataset's own, by who decodes."""
        for decode in ("cpu", "mixed") if self.device.type == "cuda" else ("cpu",):
            try:
                found = dict(self._engine(decode, "device").check(self.plain, lambda _line: None))
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:400]}
            say({"what": "pixels", "decode": decode, **found})

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
    for _ in range(WARM_BATCHES):
        step(*next(batches))
    _wait(device)
    energy_mj = read_energy_mj(device)
    images, waited_s, began = 0, 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        asked = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked
        step(*batch)
        images += len(batch[0])
    _wait(device)
    took_s = time.perf_counter() - began
    spent_mj = None if energy_mj is None else (read_energy_mj(device) or 0) - energy_mj
    return {
        "images_per_s": images / took_s,
        "images": images,
        "seconds": took_s,
        "host_wait_pct": 100 * waited_s / took_s,
        "joule_per_image": None if spent_mj is None else spent_mj / 1e3 / images,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def run_arms(what: str, arms: dict[str, Callable[[], Batches]], step: Any, options: Any, device: torch.device) -> None:
    """Let the arms take turns, and print what each comes to."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in names:
            batches = repeat(arms[name])
            try:
                found = measure(batches, step, options.seconds, device)
                rates[name].append(found["images_per_s"])
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:400]}
            finally:
                batches.close()  # type: ignore[attr-defined]
            say({"what": what, "arm": name, "round": number, **found})
    limit = statistics.median(rates.get("resident") or [0.0])
    for name, found_rates in rates.items():
        if found_rates:
            middle = statistics.median(found_rates)
            line = {"what": f"{what}, all rounds", "arm": name, "n": len(found_rates), "images_per_s": middle}
            line |= {"lowest": min(found_rates), "highest": max(found_rates)}
            say({**line, "of_resident": middle / limit if limit else None})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder or a tar of photographs; without it the recipe's own made ones")
    parser.add_argument("--recipe", default="resnet50", choices=["resnet50", "cifar10"])
    parser.add_argument("--arms", default="alone,train", help="alone, train, or names of single feeds among them")
    parser.add_argument("--seconds", type=float, default=8, help="of each arm in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, help="256, or 16 for the tiny size")
    parser.add_argument("--workers", type=int, help="of the DataLoader; default: all CPUs but one, at most 15")
    parser.add_argument("--threads", type=int, help="DALI's; default: as the rung chooses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="default", choices=["default", "tiny"])
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    cpus = machine.usable_cpus()
    options.workers = max(1, min(15, cpus - 1)) if options.workers is None else options.workers
    options.batch = options.batch or (16 if options.size == "tiny" else 256)
    device = torch.device(options.device)
    overrides = [f"recipe.size={options.size}"]
    if options.data:
        overrides.append(f"recipe.data={Path(options.data).absolute()}")
    module, data = build_recipe(load(options.recipe, overrides=overrides))
    data.prepare_data()
    data.setup("fit")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    torch_version = {"torch": torch.__version__, "cuda": torch.version.cuda}
    say({"what": "feed", "gpu": name, "cpus": cpus, "pid": os.getpid(), **torch_version, **vars(options)})
    feeds = Feeds(data.train_set, options, device)
    feeds.compare_pixels()
    wanted = options.arms.split(",")
    chosen = {name: feed for name, feed in feeds.arms.items() if name in wanted} or feeds.arms
    if "alone" in wanted:
        run_arms("alone", chosen, lambda *_: None, options, device)
    if "train" in wanted:
        step = make_step(module.network, options, device)
        batch = feeds.move(next(iter(feeds.plain)))
        began = time.perf_counter()
        for _ in range(3):
            step(*batch)
        _wait(device)
        say({"what": "first steps, with the compile", "seconds": time.perf_counter() - began})
        run_arms("train", {"resident": lambda: iter([batch] * 64), **chosen}, step, options, device)


if __name__ == "__main__":
    main()
