"""Work, energy and money per sample, held against numbers worked out by hand."""

from __future__ import annotations

import pytest

from fastloop.evidence.gpu.efficiency import (
    add_work,
    compute_joule_per_sample,
    compute_usd_per_million_samples,
    write_mfu_notes,
)
from fastloop.records.measurement import MFU_PEAKS, Measurement
from fastloop.records.trial import DeviceRates


def test_above_one_is_shown_and_doubted() -> None:
    seen = Measurement(device="cuda", device_name="NVIDIA H100 80GB HBM3", precision="bf16-mixed", samples_per_s=1800.0)
    seen = add_work(seen, flops={"per_sample": 5e11}, rates=DeviceRates(gemm_tflop_per_s=800.0))
    (note,) = seen.state
    assert seen.mfu["measured_peak"] == pytest.approx(1.125) and "mfu.measured_peak is 1.12" in note
    assert len(write_mfu_notes(dict.fromkeys(MFU_PEAKS, 1.01))) == 3
    assert write_mfu_notes(dict.fromkeys(MFU_PEAKS, 1.0)) == ()


def test_energy() -> None:
    # 7 kJ in 10 s is 700 W; at 7000 samples/s each costs 0.1 J.
    assert compute_joule_per_sample(7000.0, 10.0, 7000.0) == pytest.approx(0.1)
    assert compute_joule_per_sample(None, 10.0, 7000.0) is None
    assert compute_joule_per_sample(7000.0, 0.0, 7000.0) is None and compute_joule_per_sample(7000.0, 10.0, 0.0) is None


def test_money() -> None:
    # 3.60 an hour is 0.1 cents a second; a million samples at 1000/s take 1000 s.
    assert compute_usd_per_million_samples(3.6, 1000.0) == pytest.approx(1.0)
    assert compute_usd_per_million_samples(0.0, 1000.0) == 0.0
    for unknown in ((None, 1000.0), (3.6, None), (3.6, 0.0)):
        assert compute_usd_per_million_samples(*unknown) is None
