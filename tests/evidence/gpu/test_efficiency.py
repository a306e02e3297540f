"""Work, energy and money per sample, held against numbers worked out by hand."""

from __future__ import annotations

import pytest

from fastloop.evidence.gpu.efficiency import (
    compute_joule_per_sample,
    compute_mfu,
    compute_tflop_per_s,
    compute_usd_per_million_samples,
    write_mfu_notes,
)
from fastloop.records.measurement import MFU_PEAKS


def test_rate_and_shares() -> None:
    # 0.5 TFLOP a sample at 100 samples/s.
    done = compute_tflop_per_s(5e11, 100.0)
    assert done == pytest.approx(50)
    shares = compute_mfu(done, datasheet=1000.0, measured_peak=800.0, dtype_in_use=100.0)
    assert shares == pytest.approx({"datasheet": 0.05, "measured_peak": 0.0625, "dtype_in_use": 0.5})
    assert tuple(shares) == MFU_PEAKS and write_mfu_notes(shares) == ()


def test_unknown_stays_unknown_and_is_not_zero() -> None:
    assert compute_tflop_per_s(None, 100.0) is None and compute_tflop_per_s(5e11, None) is None
    assert compute_mfu(None, datasheet=1000.0, measured_peak=1.0, dtype_in_use=1.0) == dict.fromkeys(MFU_PEAKS)
    some = compute_mfu(50.0, datasheet=None, measured_peak=800.0, dtype_in_use=None)
    assert some["datasheet"] is None and some["dtype_in_use"] is None and some["measured_peak"] == 0.0625
    assert compute_tflop_per_s(5e11, 0.0) == 0.0, "a measured standstill is a number"


def test_above_one_is_shown_and_doubted() -> None:
    shares = compute_mfu(120.0, datasheet=1000.0, measured_peak=None, dtype_in_use=100.0)
    assert shares["dtype_in_use"] == pytest.approx(1.2)
    (note,) = write_mfu_notes(shares)
    assert "mfu.dtype_in_use is 1.20" in note and "dtype" in note
    assert len(write_mfu_notes(dict.fromkeys(MFU_PEAKS, 1.01))) == 3
    assert write_mfu_notes(dict.fromkeys(MFU_PEAKS, 1.0)) == ()


def test_energy() -> None:
    # 7 kJ in 10 s is 700 W; at 7000 samples/s each costs 0.1 J.
    assert compute_joule_per_sample(7000.0, 10.0, 7000.0) == pytest.approx(0.1)
    assert compute_joule_per_sample(None, 10.0, 7000.0) is None
    assert compute_joule_per_sample(7000.0, 0.0, 7000.0) is None and compute_joule_per_sample(7000.0, 10.0, 0.0) is None


def test_money() -> None:
    # Two GPUs at 3.60 an hour are 0.2 cents a second; a million samples at 1000/s take 1000 s.
    assert compute_usd_per_million_samples(2, 3.6, 1000.0) == pytest.approx(2.0)
    assert (
        compute_usd_per_million_samples(2, None, 1000.0) is None
        and compute_usd_per_million_samples(None, 3.6, 1000.0) is None
    )
    assert (
        compute_usd_per_million_samples(2, 3.6, None) is None and compute_usd_per_million_samples(2, 3.6, 0.0) is None
    )
    assert compute_usd_per_million_samples(2, 0.0, 1000.0) == 0.0
