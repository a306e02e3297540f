"""GPM counters: units, refusals and glitches."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastloop.evidence.gpu.gpm import METRICS, Gpm
from fastloop.records.measurement import GPU_READINGS
from tests.evidence.gpu.fake_nvml import FakeNvml

KEYS = {key for key, _, _ in METRICS.values()}


def opened(nvml: FakeNvml) -> Gpm:
    gpm = Gpm.open(nvml, "handle")
    assert gpm is not None
    return gpm


def test_readings_have_our_names_and_units() -> None:
    nvml = FakeNvml()
    gpm = opened(nvml)
    assert gpm.read() == pytest.approx(
        {
            "gr_active_pct": 95.0,
            "sm_active_pct": 88.0,
            "tensor_active_pct": 61.0,
            "dram_active_pct": 40.0,
            "pcie_tx_gb_per_s": 1.048576,
            "pcie_rx_gb_per_s": 2.097152,
        }
    )
    assert set(GPU_READINGS) >= KEYS
    gpm.close()
    assert nvml.samples == 0, "a buffer was not freed"


@pytest.mark.parametrize(
    "name", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet"], ids=lambda name: name[7:]
)
def test_closed_where_gpu_driver_or_package_cannot(name: str) -> None:
    refusing, lacking, old = FakeNvml(), FakeNvml(), FakeNvml()
    refusing.refuse(name)
    lacking.lack(name)
    old.gpm_support = 0
    for nvml in (refusing, lacking, old):
        assert Gpm.open(nvml, "handle") is None and nvml.samples == 0
    assert Gpm.open(FakeNvml(), "handle") is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 4e9, 101.5])
def test_a_glitch_of_one_metric_is_none_and_the_rest_stays(value: float) -> None:
    nvml = FakeNvml()
    nvml.gpm[5] = value
    found = opened(nvml).read()
    assert found["tensor_active_pct"] is None and found["sm_active_pct"] == 88.0
    nvml.gpm[5], nvml.gpm_return[2] = 100.2, 3
    found = opened(nvml).read()
    assert found["tensor_active_pct"] == 100.2 and found["sm_active_pct"] is None


def test_a_missed_sample_is_not_counted_for_the_time_after_it() -> None:
    nvml = FakeNvml()
    gpm = opened(nvml)
    working = nvml.nvmlGpmSampleGet
    nvml.refuse("nvmlGpmSampleGet")
    assert gpm.read() == dict.fromkeys(KEYS)
    nvml.nvmlGpmSampleGet = working
    assert gpm.read() == dict.fromkeys(KEYS), "it would reach back over the missed one"
    assert gpm.read()["sm_active_pct"] == 88.0


def test_refused_metrics_are_none_each_time() -> None:
    nvml = FakeNvml()
    gpm = opened(nvml)
    nvml.refuse("nvmlGpmMetricsGet")
    assert gpm.read() == gpm.read() == dict.fromkeys(KEYS)


def test_the_real_package_has_the_fields_that_are_filled() -> None:
    real = pytest.importorskip("pynvml")
    nvml = FakeNvml()

    def answer(asked: Any) -> None:
        assert (asked.version, asked.numMetrics) == (real.NVML_GPM_METRICS_GET_VERSION, len(METRICS))
        for slot in asked.metrics[: asked.numMetrics]:
            slot.nvmlReturn, slot.value = 0, nvml.gpm[slot.metricId]

    nvml.c_nvmlGpmMetricsGet_t = real.c_nvmlGpmMetricsGet_t
    nvml.nvmlGpmSampleAlloc = real.c_nvmlGpmSample_t
    nvml.nvmlGpmSampleGet = lambda handle, sample: sample
    nvml.nvmlGpmMetricsGet = answer
    assert opened(nvml).read()["tensor_active_pct"] == 61.0
