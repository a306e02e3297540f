"""The record of one run: honest about what was not measured, free of torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fastloop.records.measurement import GPU_READINGS, MFU_PEAKS, PARTS, STEP_TIMES, Measurement, measure_unevenness


def test_frozen_and_keyword_only() -> None:
    assert Measurement.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(Measurement))


def test_no_torch() -> None:
    code = "import sys, fastloop.records.measurement; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "False"


def test_what_was_not_measured_is_none() -> None:
    empty = Measurement()
    for name in ("samples_per_s", "wall_ms", "lead_ms", "trail_ms", "peak_gib", "tflop_per_s", "joule_per_sample"):
        assert getattr(empty, name) is None
    for keys, shown in (
        (PARTS, empty.parts_ms),
        (GPU_READINGS, empty.gpu),
        (MFU_PEAKS, empty.mfu),
        (STEP_TIMES, empty.step_ms),
    ):
        assert set(shown) == set(keys) and set(shown.values()) == {None}
    assert empty.loss == () and empty.window_too_short and empty.kernels is None
    assert empty.parts_ms is not Measurement().parts_ms


@pytest.mark.parametrize(
    ("mean", "median", "parts", "known", "times"),
    [
        (8.0, 2.0, {}, 0.0, 4.0),
        (3.9, 2.0, {}, 0.0, None),
        (8.0, 2.0, {"validation": 3.0, "epoch_gap": 2.0}, 0.0, None),
        (8.0, 2.0, {"data_wait": 5.0}, 0.0, 4.0),
        (8.0, 2.0, {}, 5.0, None),
        (None, 2.0, {}, 0.0, None),
        (8.0, None, {}, 0.0, None),
        (float("nan"), 2.0, {}, 0.0, None),
    ],
)
def test_a_mean_that_is_of_a_few_long_steps(
    mean: float | None, median: float | None, parts: dict[str, float], known: float, times: float | None
) -> None:
    seen = Measurement(step_ms={"mean": mean, "median": median}, parts_ms=parts)
    assert measure_unevenness(seen, known) == times
