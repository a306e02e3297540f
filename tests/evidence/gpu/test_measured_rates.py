"""Measured rates: what is kept, for whom, and that a bad cache is no error. The rates themselves need a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.evidence.gpu import measured_rates as module
from fastloop.evidence.gpu.measured_rates import DeviceRates, measure, read_cached

UUID, NAME = "GPU-1", "NVIDIA H200"
FOUND = DeviceRates(gemm_tflop_per_s=700.0, copy_tb_per_s=4.0, gemm_size=8192)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "read_driver", lambda: "580.65")
    return tmp_path / "fastloop"


def keep(rates: DeviceRates = FOUND) -> None:
    module._keep(rates, UUID, NAME)


def the_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_what_was_kept_comes_back(cache: Path) -> None:
    assert read_cached(UUID, NAME) is None
    keep()
    assert read_cached(UUID, NAME) == FOUND
    keep(DeviceRates(copy_tb_per_s=0.9))
    assert read_cached(UUID, NAME) == DeviceRates(copy_tb_per_s=0.9)
    assert the_file(cache).suffix == ".json", "a draft was left behind"
    assert cache.stat().st_mode & 0o077 == 0


def test_other_devices_versions_and_drivers_have_their_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    assert read_cached("GPU-2", NAME) is None and read_cached(UUID, "NVIDIA H200 NVL") is None
    assert read_cached(None, NAME) is None and read_cached(UUID, None) is None
    with monkeypatch.context() as other:
        other.setattr(module, "read_driver", lambda: "590.1")
        assert read_cached(UUID, NAME) is None
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "99.0")
        assert read_cached(UUID, NAME) is None
    assert read_cached(UUID, NAME) == FOUND


def changed(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(b"\xff\x00\xfe"),
        lambda path: path.write_text("[1, 2]"),
        changed(schema=2),
        changed(key={"uuid": "GPU-2"}),
        changed(rates={"copy_tb_per_s": "fast"}),
        changed(rates={"copy_tb_per_s": -1.0}),
        changed(rates={"gemm_tflop_per_s": float("nan")}),
        changed(rates={"colour": 1.0}),
        changed(rates=None),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut", "binary", "list", "schema", "key", "text", "negative", "nan", "field", "null", "directory"],
)
def test_a_broken_file_counts_as_none(cache: Path, harm: Callable[[Path], Any]) -> None:
    keep()
    harm(the_file(cache))
    assert read_cached(UUID, NAME) is None


def test_a_broken_file_is_replaced(cache: Path) -> None:
    keep()
    the_file(cache).write_text("{")
    keep()
    assert read_cached(UUID, NAME) == FOUND


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the directory should be")
    keep()
    assert read_cached(UUID, NAME) is None
    cache.unlink()
    fired = []

    def full(*_: Any, **__: Any) -> None:
        fired.append(True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    keep()
    assert fired and read_cached(UUID, NAME) is None and list(cache.iterdir()) == []


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    keep()
    assert read_cached(UUID, NAME) == FOUND and (tmp_path / "home" / ".cache" / "fastloop").is_dir()


def test_without_cuda_nothing_is_measured_or_kept(cache: Path) -> None:
    assert measure(torch.device("cpu")) == DeviceRates() and not cache.exists()


@pytest.fixture
def device(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CUDA device in name: 80 GiB free, a product in 1.5 ms and a copy in 0.25 ms, or what a test sets."""
    settings: dict[str, Any] = {"free": 80 << 30, "product": lambda n: 1.5, "copy": lambda size: 0.25}
    for name, answer in {
        "is_available": lambda: True,
        "device": lambda _: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "get_device_name": lambda _: NAME,
        "mem_get_info": lambda _: (settings["free"], 80 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(module, "find_uuid", lambda _: UUID)
    monkeypatch.setattr(module, "_time_product_ms", lambda n, _: settings["product"](n))
    monkeypatch.setattr(module, "_copy_ms", lambda size, _: settings["copy"](size))
    return settings


CUDA = torch.device("cuda", 0)


def test_rates_from_times(device: dict[str, Any]) -> None:
    found = measure(CUDA)
    # 2 * 8192^3 operations in 1.5 ms; 512 MiB read and 512 MiB written in 0.25 ms.
    assert found.gemm_tflop_per_s == pytest.approx(733.0, rel=1e-3)
    assert found.copy_tb_per_s == pytest.approx(4.295, rel=1e-3)
    assert found.gemm_size == 8192 and read_cached(UUID, NAME) == found


@pytest.mark.parametrize("how", ["little free", "out of memory"])
def test_short_memory_takes_smaller_sizes_and_is_not_kept(device: dict[str, Any], how: str) -> None:
    tried: list[int] = []

    def product(n: int) -> float:
        tried.append(n)
        if how == "out of memory" and n > 4096:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return 0.2

    device["product"] = product
    if how == "little free":
        device["free"] = 600 << 20
    found = measure(CUDA)
    assert found.gemm_size == 4096 and found.gemm_tflop_per_s == pytest.approx(687.2, rel=1e-3)
    assert tried == ([4096] if how == "little free" else [8192, 4096])
    assert read_cached(UUID, NAME) is None, "next time there may be more memory"


def test_no_memory_at_all(device: dict[str, Any]) -> None:
    device["free"] = 10 << 20
    assert measure(CUDA) == DeviceRates() and read_cached(UUID, NAME) is None


def test_a_chip_without_bf16_keeps_its_copy_rate(device: dict[str, Any]) -> None:
    device["product"] = lambda n: None
    found = measure(CUDA)
    assert found.gemm_tflop_per_s is None and found.gemm_size is None and found.copy_tb_per_s is not None
    assert read_cached(UUID, NAME) == found

    def broken(n: int) -> float:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    device["product"] = broken
    assert measure(CUDA).gemm_tflop_per_s is None


def test_memory_needed_stays_under_the_promise() -> None:
    assert max(3 * 2 * n * n for n in module.PRODUCT_SIZES) < 1.5 * 2**30
    assert max(2 * size for size in module.COPY_BYTES) < 1.5 * 2**30


def test_reading_the_cache_does_not_start_cuda(tmp_path: Path) -> None:
    code = (
        "import torch; from fastloop.evidence.gpu.measured_rates import read_cached\n"
        f"assert read_cached({UUID!r}, {NAME!r}) is None and not torch.cuda.is_initialized()"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
