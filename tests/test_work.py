"""Work, energy and money per sample, held against numbers worked out by hand."""

from __future__ import annotations

import pytest

from fastloop.measurement import MFU_PEAKS
from fastloop.work import (
    dram_share_of_copy,
    joule_per_sample,
    mfu,
    mfu_notes,
    tflop_per_s,
    usd_per_million_samples,
)


def test_rate_and_shares() -> None:
    # 0.5 TFLOP a sample at 100 samples/s.
    done = tflop_per_s(5e11, 100.0)
    assert done == pytest.approx(50)
    shares = mfu(done, datasheet=1000.0, measured_peak=800.0, dtype_in_use=100.0)
    assert shares == pytest.approx({"datasheet": 0.05, "measured_peak": 0.0625, "dtype_in_use": 0.5})
    assert tuple(shares) == MFU_PEAKS and mfu_notes(shares) == ()


def test_unknown_stays_unknown_and_is_not_zero() -> None:
    assert tflop_per_s(None, 100.0) is None and tflop_per_s(5e11, None) is None
    assert mfu(None, datasheet=1000.0, measured_peak=1.0, dtype_in_use=1.0) == dict.fromkeys(MFU_PEAKS)
    some = mfu(50.0, datasheet=None, measured_peak=800.0, dtype_in_use=None)
    assert some["datasheet"] is None and some["dtype_in_use"] is None and some["measured_peak"] == 0.0625
    assert tflop_per_s(5e11, 0.0) == 0.0, "a measured standstill is a number"


def test_above_one_is_shown_and_doubted() -> None:
    shares = mfu(120.0, datasheet=1000.0, measured_peak=None, dtype_in_use=100.0)
    assert shares["dtype_in_use"] == pytest.approx(1.2)
    (note,) = mfu_notes(shares)
    assert "mfu.dtype_in_use is 1.20" in note and "dtype" in note
    assert len(mfu_notes(dict.fromkeys(MFU_PEAKS, 1.01))) == 3
    assert mfu_notes(dict.fromkeys(MFU_PEAKS, 1.0)) == ()


def test_energy() -> None:
    # 7 kJ in 10 s is 700 W; at 7000 samples/s each costs 0.1 J.
    assert joule_per_sample(7000.0, 10.0, 7000.0) == pytest.approx(0.1)
    assert joule_per_sample(None, 10.0, 7000.0) is None
    assert joule_per_sample(7000.0, 0.0, 7000.0) is None and joule_per_sample(7000.0, 10.0, 0.0) is None


def test_money() -> None:
    # Two GPUs at 3.60 an hour are 0.2 cents a second; a million samples at 1000/s take 1000 s.
    assert usd_per_million_samples(2, 3.6, 1000.0) == pytest.approx(2.0)
    assert usd_per_million_samples(2, None, 1000.0) is None and usd_per_million_samples(None, 3.6, 1000.0) is None
    assert usd_per_million_samples(2, 3.6, None) is None and usd_per_million_samples(2, 3.6, 0.0) is None
    assert usd_per_million_samples(2, 0.0, 1000.0) == 0.0


def test_memory_traffic_against_a_copy() -> None:
    # 55 % of 4.8 TB/s is 2.64; a copy moves 4.4.
    assert dram_share_of_copy(55.0, 4.8, 4.4) == pytest.approx(0.6)
    assert dram_share_of_copy(None, 4.8, 4.4) is None and dram_share_of_copy(55.0, None, 4.4) is None
    assert dram_share_of_copy(55.0, 4.8, None) is None
