"""The board, the measured rates and the memory they leave alone, on a real GPU: ``pytest tests/gpu``."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fastloop.evidence.gpu.datasheets import find_peak
from fastloop.evidence.gpu.gpm import Gpm
from fastloop.evidence.gpu.measured_rates import measure, read_cached
from fastloop.evidence.gpu.nvml import Gpu, Unreadable, find_uuid
from fastloop.evidence.gpu.sampler import Board, BoardSeen

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(150),
    pytest.mark.alone,
]


@pytest.fixture
def gpu() -> Gpu:
    """The GPU under test; skips where NVML does not read it whole."""
    try:
        found = Gpu.open(find_uuid(torch.device("cuda", 0)))
    except Unreadable as reason:
        pytest.skip(str(reason))
    if found.mig:
        found.close()
        pytest.skip("partitioned (MIG)")
    return found


def products(seconds: float) -> int:
    """bf16 products for so long, the queue kept short; returns how many."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, end, count = torch.empty_like(left), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(left, right, out=out)
        torch.cuda.synchronize()
        count += 20
    return count


def watch(gpu: Gpu, work: object, seconds: float) -> BoardSeen:
    board = Board(find_uuid(torch.device("cuda", 0)))
    board.start()
    work(seconds)  # type: ignore[operator]
    found = board.stop()
    assert found is not None, board.why
    return found


def test_a_known_load_and_its_energy(gpu: Gpu) -> None:
    counters, counts_energy = gpu.open_counters(), gpu.energy_mj() is not None
    gpu.close()
    products(1.0)
    found = watch(gpu, products, 12.0)
    means = found.means
    print(dict(means), found.joule, found.state, found.seconds)
    assert means["nvml_busy_pct"] > 90 and means["watts"] > 200
    assert 300 < means["sm_clock_mhz"] <= means["sm_clock_max_mhz"]
    assert 11 <= len(found.timeline) <= 14 and found.seconds == pytest.approx(12, abs=1)
    if counters:
        assert means["tensor_active_pct"] > 50 and means["gr_active_pct"] > 90 and means["sm_active_pct"] > 50
        assert 0 <= means["dram_active_pct"] < 60 and means["pcie_tx_gb_per_s"] < 5
    if counts_energy and not any("computed on this GPU" in sentence for sentence in found.state):
        assert found.joule is not None
        assert found.joule == pytest.approx(means["watts"] * found.seconds, rel=0.15)


def test_an_idle_gpu_reads_idle(gpu: Gpu) -> None:
    counters = gpu.open_counters()
    gpu.close()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    time.sleep(2)
    found = watch(gpu, time.sleep, 5.0)
    print(dict(found.means), found.state)
    assert found.joule is None, "under ten seconds"
    assert found.means["nvml_busy_pct"] < 10
    if counters:
        assert found.means["gr_active_pct"] < 10 and found.means["tensor_active_pct"] < 10


def test_half_a_load_reads_half_where_nvml_says_busy(gpu: Gpu) -> None:
    """One small kernel at a time keeps NVML's figure up and the multiprocessors empty."""
    counters = gpu.open_counters()
    gpu.close()
    if not counters:
        pytest.skip("no GPM counters")

    def tiny(seconds: float) -> None:
        one, end = torch.ones(1, device="cuda"), time.monotonic() + seconds
        while time.monotonic() < end:
            torch.cuda._sleep(20_000_000)  # one thread block, spinning
            one.add_(1)
            torch.cuda.synchronize()

    found = watch(gpu, tiny, 5.0)
    print(dict(found.means))
    assert found.means["nvml_busy_pct"] > 80 and found.means["sm_active_pct"] < 10


def test_copies_over_the_bus_are_seen_in_their_direction(gpu: Gpu) -> None:
    counters = gpu.open_counters()
    gpu.close()
    if not counters:
        pytest.skip("no GPM counters")
    there, here = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), torch.empty(256 << 20, dtype=torch.uint8)
    here, moved = here.pin_memory(), []

    def copies(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            there.copy_(here, non_blocking=True)
            torch.cuda.synchronize()
            moved.append(here.numel())

    found = watch(gpu, copies, 5.0)
    rate = sum(moved) / found.seconds / 1e9
    print(dict(found.means), rate)
    assert found.means["pcie_rx_gb_per_s"] == pytest.approx(rate, rel=0.25)
    assert found.means["pcie_tx_gb_per_s"] < found.means["pcie_rx_gb_per_s"] / 4


def test_watching_takes_no_device_memory_and_no_context(gpu: Gpu) -> None:
    gpu.close()
    torch.ones(1 << 20, device="cuda").sum().item()
    torch.cuda.reset_peak_memory_stats()
    before = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    found = watch(gpu, time.sleep, 3.0)
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == before
    assert len(found.timeline) >= 2


def test_this_process_is_not_its_own_neighbor(gpu: Gpu) -> None:
    gpu.close()
    torch.zeros(1, device="cuda")
    with closing(Gpu.open(find_uuid(torch.device("cuda", 0)))) as again:
        found = again.find_neighbors()
    print(found)
    assert found.processes in (0, None), "run this on a GPU of your own"
    free, total = torch.cuda.mem_get_info()
    assert found.memory_free_bytes == pytest.approx(free, rel=0.05)
    assert found.memory_total_bytes == pytest.approx(total, rel=0.05)


def test_counters_are_opened_and_closed_many_times(gpu: Gpu) -> None:
    if not gpu.open_counters():
        gpu.close()
        pytest.skip("no GPM counters")
    for _ in range(200):
        opened = Gpm.open(gpu._nvml, gpu._handle)
        assert opened is not None
        opened.close()
    gpu.close()


def test_rates_are_near_the_datasheet_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", 0)
    torch.mm(*(torch.ones(64, 64, device=device, dtype=torch.bfloat16) for _ in range(2)))
    random = torch.cuda.get_rng_state(device)
    torch.cuda.reset_peak_memory_stats()
    found = measure(device)
    print(found, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    assert torch.cuda.max_memory_allocated() < 1.5 * 2**30
    assert torch.equal(torch.cuda.get_rng_state(device), random), "the device's random stream moved"
    name = torch.cuda.get_device_name(device)
    assert read_cached(find_uuid(device), name) == found
    again = measure(device)
    assert again.copy_tb_per_s == pytest.approx(found.copy_tb_per_s, rel=0.1)
    chip = find_peak(name)
    if chip is not None and chip.bf16 is not None:
        assert found.gemm_tflop_per_s is not None and found.copy_tb_per_s is not None
        assert 0.4 < found.gemm_tflop_per_s / chip.bf16 <= 1.05
        assert 0.5 < found.copy_tb_per_s / chip.dram_tb_per_s <= 1.02
