"""The measured rates of this device: a large bf16 product and a copy inside its memory, timed once and cached.

``measure`` needs over a gigabyte of the device and up to two seconds, so it is for disposable trial processes: in a
user's run it would move the peak memory. There, only ``read_cached`` is called, which reads a small file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastloop.evidence.gpu.nvml import find_uuid, read_driver
from fastloop.evidence.machine import find_cache_home
from fastloop.records import store
from fastloop.records.trial import DeviceRates

SCHEMA = 1
PRODUCT_SIZES = (8192, 4096, 2048)
"""Sizes of square matrices; three matrices of one size take 384, 96 or 24 MiB."""
COPY_BYTES = (512 << 20, 128 << 20)
"""Each far larger than a level-2 cache; a copy uses two buffers."""
WARM_UPS = 5
MOST_TIMED = 300
"""Enough repeats to get past the first milliseconds, in which an idle chip runs at clocks it cannot sustain."""
LIMIT_MS = 500.0
"""Time limit for the timed repeats of the product, and of the copy."""


def read_cached(uuid: str | None, name: str | None) -> DeviceRates | None:
    """The result of an earlier ``measure`` on this device, with this torch and this driver; None if there is none.

    Touches neither CUDA nor device memory. A broken, foreign or unreadable file counts as missing.
    """
    try:
        path, key = _place(uuid, name)
        found = store.read(path) if path is not None else None
        if found is None or (found["schema"], found["key"]) != (SCHEMA, key):
            return None
        return _check_rates(found["rates"])
    except Exception:
        return None


def measure(device: torch.device) -> DeviceRates:
    """Measure the rates and cache them for ``read_cached``. Never call it in the user's process.

    Uses at most about 1 GiB of device memory at a time, less if less is free, and takes under 2 s after CUDA's start.
    Fields are None if the device cannot do it (no CUDA, no native bf16, too little memory).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return DeviceRates()
    with torch.cuda.device(device):
        product = _time_largest_that_fits(
            PRODUCT_SIZES, lambda n: 3 * 2 * n * n, lambda n: _time_product_ms(n, device), device
        )
        copy = _time_largest_that_fits(COPY_BYTES, lambda size: 2 * size, lambda size: _copy_ms(size, device), device)
        torch.cuda.empty_cache()
    rates = DeviceRates(
        gemm_tflop_per_s=2 * product[0] ** 3 / product[1] / 1e9 if product else None,
        copy_tb_per_s=2 * copy[0] / copy[1] / 1e9 if copy else None,
        gemm_size=product[0] if product else None,
    )
    if rates.copy_tb_per_s and rates.gemm_size in (None, PRODUCT_SIZES[0]):  # otherwise memory was short
        _keep(rates, find_uuid(device), torch.cuda.get_device_name(device))
    return rates


def _time_largest_that_fits(
    sizes: tuple[int, ...], bytes_of: Callable[[int], int], run: Callable[[int], float | None], device: torch.device
) -> tuple[int, float] | None:
    """The largest size that fits into half of the free memory, and its milliseconds."""
    for size in sizes:
        try:
            if bytes_of(size) > torch.cuda.mem_get_info(device)[0] / 2:
                continue
            took = run(size)
        except torch.cuda.OutOfMemoryError:
            continue
        except RuntimeError:  # a product this device or build has no kernel for
            return None
        return (size, took) if took else None
    return None


def _time_product_ms(n: int, device: torch.device) -> float | None:
    # An older chip emulates bf16, and an emulated rate is not a peak.
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    # Random numbers, because zeros draw less power and so run at higher clocks; from a private generator.
    numbers = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16, generator=numbers) for _ in range(2))
    out = torch.empty_like(left)
    return _time_median_ms(lambda: torch.mm(left, right, out=out))


def _copy_ms(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _time_median_ms(lambda: target.copy_(source))


def _time_median_ms(run: Callable[[], Any]) -> float:
    for _ in range(WARM_UPS - 1):
        run()
    repeats = max(3, min(MOST_TIMED, int(LIMIT_MS / max(_time_repeats_ms(run, 1)[0], 1e-3))))
    return median(_time_repeats_ms(run, repeats))


def _time_repeats_ms(run: Callable[[], Any], repeats: int) -> list[float]:
    """Device time of each repeat; all are queued before the first wait."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(marks)]


def _place(uuid: str | None, name: str | None) -> tuple[Path | None, dict[str, Any]]:
    """The cache file for a device's rates, and the key they are valid for."""
    key = {"uuid": uuid, "name": name, "torch": torch.__version__, "driver": read_driver()}
    if uuid is None or name is None:
        return None, key
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return find_cache_home() / "fastloop" / f"rates-{digest}.json", key


def _keep(rates: DeviceRates, uuid: str | None, name: str | None) -> None:
    """Cache the rates, atomically; a folder that is not writable is not an error."""
    with contextlib.suppress(OSError):
        path, key = _place(uuid, name)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"schema": SCHEMA, "key": key, "rates": dataclasses.asdict(rates)}
            store.write(path.parent, {path.name: json.dumps(content)})


def _check_rates(found: Mapping[str, Any]) -> DeviceRates:
    rates = DeviceRates(**found)
    for value in dataclasses.astuple(rates):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{value!r} is not a rate")
    return rates
