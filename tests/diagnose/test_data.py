"""Waiting for data and copies: the share, the reason, the patch, and what a trial has to say."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.diagnose.attribution import WORTH_NAMING_PCT
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Verdict
from tests.diagnose.scenes import findings, on_cpu, resnet50_naive, scene

MAP = {"kind": "DataLoader", "num_workers": 0, "map_style": True, "usable_cpus": 8}
WORKERS = {"rungs": {"workers": {"enabled": True}}}
ALONE = "batches are loaded in the training process (0 workers)"
CHEAPER = "make samples cheaper; if loading waits for a disk or network, more workers can still help"


def only(
    loader: dict[str, Any] | None = None,
    *,
    step: float | None = 100.0,
    wait: float | None = 60.0,
    enabled: tuple[str, ...] = (),
    crowded: bool = False,
    **seen: Any,
) -> Finding:
    measurement = Measurement(
        step_ms={"mean": step},
        parts_ms={"data_wait": wait},
        evidence={**({} if loader is None else {"loader": loader}), **({"cpu": {"crowded": True}} if crowded else {})},
        **seen,
    )
    idle = loader is not None and loader["num_workers"] == 0
    why = Verdict(rung="workers", took=not idle, why="epochs of 4 batches are too short")
    (finding,) = findings(measurement, enabled, (why,))
    return finding


@pytest.mark.parametrize(
    ("loader", "enabled", "patch", "advice"),
    [
        (MAP, (), WORKERS, f"{ALONE}, although 8 CPUs are usable"),
        (MAP, ("amp",), WORKERS, f"{ALONE}, although 8 CPUs are usable"),
        ({**MAP, "usable_cpus": 1}, (), WORKERS, ALONE),
        ({**MAP, "usable_cpus": None}, (), WORKERS, ALONE),
        (
            MAP,
            ("workers",),
            None,
            "no rung helps with this: workers is enabled but inactive (epochs of 4 batches are too short); make"
            " samples and batches cheaper",
        ),
        (
            {**MAP, "map_style": False},
            (),
            None,
            "no rung helps with this: an iterable dataset must be sharded in your code before it can have workers",
        ),
        (
            {**MAP, "map_style": False, "without_workers": {"'map' (Rows)": None}},
            (),
            None,
            "no rung helps with this: your loader 'map' (Rows) has no workers: set its num_workers",
        ),
        (
            {**MAP, "map_style": False, "without_workers": {"'a' (Rows)": None, "'b' (Stream)": "it is a stream"}},
            (),
            None,
            "no rung helps with this: your loader 'a' (Rows) has no workers: set its num_workers; your loader 'b'"
            " (Stream) has no workers: it is a stream",
        ),
        (
            {**MAP, "map_style": False, "without_workers": {"'a' (Rows)": None, "'b' (Stream)": "it is a stream"}},
            ("workers",),
            None,
            "no rung helps with this: workers is enabled but inactive (epochs of 4 batches are too short); your loader"
            " 'b' (Stream) has no workers: it is a stream; make samples and batches cheaper",
        ),
        (
            {**MAP, "without_workers": {"'a' (Rows)": None, "'b' (Rows)": None}},
            ("workers",),
            None,
            "no rung helps with this: workers is enabled but inactive (epochs of 4 batches are too short); make"
            " samples and batches cheaper",
        ),
        (
            {**MAP, "map_style": False, "without_workers": {"'b' (Stream)": "it is a stream"}},
            (),
            None,
            "no rung helps with this: your loader 'b' (Stream) has no workers: it is a stream; make samples and batches"
            " cheaper",
        ),
        (
            {**MAP, "num_workers": None},
            (),
            None,
            "no rung helps with this: this loader is not a DataLoader; prepare its batches ahead of time",
        ),
        (
            {**MAP, "num_workers": 6},
            (),
            None,
            f"no rung helps with this: 6 workers are too slow and only 1 CPU is left for more; {CHEAPER}",
        ),
        (
            {**MAP, "num_workers": 6},
            ("workers",),
            None,
            f"no further rung helps with this: 6 workers are too slow and only 1 CPU is left for more; {CHEAPER}",
        ),
        (
            {**MAP, "num_workers": 2},
            (),
            None,
            "no rung helps with this: num_workers=2, with 8 usable CPUs: set num_workers=7 in your loader",
        ),
        (
            {**MAP, "num_workers": 2},
            ("workers",),
            None,
            "no further rung helps with this: num_workers=2, with 8 usable CPUs: write rungs.workers.count: 7",
        ),
        (
            {**MAP, "num_workers": 6, "worker_threads": 8},
            (),
            None,
            "no rung helps with this: each of 6 workers computes on 8 threads, 48 on 8 CPUs: limit them in"
            " worker_init_fn, with threadpoolctl.threadpool_limits(1) for NumPy, cv2.setNumThreads(0) for OpenCV",
        ),
        (
            {**MAP, "num_workers": 6, "worker_threads": 3},  # two send batches and hand over their tensors
            (),
            None,
            f"no rung helps with this: 6 workers are too slow and only 1 CPU is left for more; {CHEAPER}",
        ),
        (
            {**MAP, "num_workers": 8, "usable_cpus": None},
            (),
            None,
            f"no rung helps with this: 8 workers are too slow; {CHEAPER}",
        ),
        (
            {**MAP, "num_workers": 1, "usable_cpus": 2},
            (),
            None,
            f"no rung helps with this: 1 worker is too slow and no CPU is left for another (2 are usable); {CHEAPER}",
        ),
        (
            {**MAP, "num_workers": 1, "usable_cpus": 1},
            (),
            None,
            f"no rung helps with this: 1 worker is too slow and no CPU is left for another (1 is usable); {CHEAPER}",
        ),
        (
            {"num_workers": None, "has_engine": True},
            ("nodes",),
            None,
            "no rung helps with this: the rung that loads these batches does not keep up; give it more threads, or make"
            " samples cheaper",
        ),
        (
            {**MAP, "map_style": False, "has_engine": True, "without_workers": {"'b' (Stream)": "it is a stream"}},
            ("cache",),
            None,
            "no further rung helps with this: your loader 'b' (Stream) has no workers: it is a stream; make samples and"
            " batches cheaper",
        ),
        (None, (), None, "no rung helps with this: this loader is not a DataLoader; prepare its batches ahead of time"),
    ],
)
def test_data_wait_and_what_to_do(loader: Any, enabled: tuple[str, ...], patch: Any, advice: str) -> None:
    finding = only(loader, enabled=enabled)
    assert finding.bottleneck == "data_wait" and finding.share_pct == pytest.approx(60)
    assert finding.patch == patch
    idle = "the device was idle for 60.0 of 100.0 ms a step: the next batch was not ready"
    assert finding.why == f"{idle}; {advice}"
    assert finding.ceiling_is_estimate


def test_cpus_are_shared_by_the_ranks_of_a_host() -> None:
    four = {**MAP, "num_workers": 2}
    assert "num_workers=7" in only(four).why
    assert "no CPU is left for another (8 are usable)" in only(four, world_size=4).why, (
        "8 CPUs for 4 ranks leave each one worker"
    )
    alone = tuple({"rank": rank, "host": f"node-{rank}", "parts_ms": {}} for rank in range(4))
    assert "num_workers=7" in only(four, world_size=4, ranks=alone).why, "each rank has a host of its own"


@pytest.mark.parametrize(
    ("loader", "wait", "count"),
    [
        ({"num_workers": 2}, 60.0, 5),  # each batch takes 2 x 100 ms, and a step 40 without the wait
        ({"num_workers": 2}, 99.0, 7),  # as many as there are CPUs, but one
        ({"num_workers": 6}, 60.0, None),
        ({"num_workers": 2, "can_have_more": False}, 60.0, None),
        ({"num_workers": 0, "map_style": False}, 60.0, None),
    ],
)
def test_more_workers_than_the_scripts_own(loader: dict[str, Any], wait: float, count: int | None) -> None:
    found = only({**MAP, "can_have_more": True, **loader}, wait=wait)
    assert found.patch == (count and {"rungs": {"workers": {"enabled": True, "count": count}}})
    assert count is None or found.why.endswith(f"; {count} workers instead of 2: 8 CPUs are usable")
    assert only({**MAP, "can_have_more": True, **loader}, wait=wait, enabled=("workers",)).patch is None


def test_a_gpu_is_called_one() -> None:
    assert only(MAP, device="cuda").why.startswith("the GPU was idle for 60.0 of 100.0 ms")


@pytest.mark.parametrize("wait", [0.0, 1.0, 4.99])
def test_below_the_threshold_nothing_is_named(wait: float) -> None:
    finding = only(MAP, wait=wait)
    assert finding.bottleneck == "none" and finding.share_pct is None and finding.patch is None
    assert f"the largest avoidable cost, waiting for data, is only {wait:.1f} % of the step" in finding.why
    assert only(MAP, wait=WORTH_NAMING_PCT).bottleneck == "data_wait"


@pytest.mark.parametrize(("wait", "name"), [(0.24, "none"), (0.26, "data_wait")])
def test_the_price_of_any_fetch_is_not_named(wait: float, name: str) -> None:
    assert only(MAP, step=2.0, wait=wait).bottleneck == name


@pytest.mark.parametrize(
    ("seen", "advised"),
    [
        ({"step": 1.5, "wait": 0.3}, False),
        ({"step": 1.5, "wait": 0.49}, False),
        ({"step": 1.5, "wait": 0.6}, True),
        ({"step": 4.0, "wait": 0.6}, False),
        ({"step": 4.0, "wait": 1.6, "global_batch": 16, "micro_batch": 4}, False),
        ({"step": 4.0, "wait": 1.6, "global_batch": 16, "micro_batch": 8}, True),
        ({"step": 1.5, "wait": 0.3, "device": "cuda", "host_ms": {"data_wait": 1.2}}, True),
        ({"step": 1.5, "wait": 0.3, "device": "cuda", "host_ms": {"data_wait": 0.3}}, False),
        ({"step": 1.5, "wait": 0.3, "device": "cuda"}, True),
        ({"step": 6.0, "wait": 0.9, "crowded": True}, False),
        ({"step": 6.0, "wait": 3.6, "crowded": True}, True),
    ],
    ids=[
        *(
            "fast",
            "just",
            "slow",
            "of_a_long_step",
            "four_fast",
            "two_slow",
            "hidden_on_a_gpu",
            "fast_on_a_gpu",
            "unknown_on_a_gpu",
        ),
        *("busy_cpus", "slow_on_busy_cpus"),
    ],
)
def test_a_batch_made_faster_than_it_is_handed_over_needs_no_workers(seen: dict[str, Any], advised: bool) -> None:
    finding = only(MAP, **seen)
    assert finding.bottleneck == "data_wait" and finding.share_pct is not None, "it is named all the same"
    assert (finding.patch is not None) is advised
    assert (
        "no rung helps with this: workers would save too little: a batch takes 0." in finding.why
        and "taking it from a worker" in finding.why
    ) is not advised
    assert "6 workers are too slow" in only({**MAP, "num_workers": 6}, **seen).why, "nothing is said of those there"


DECODES = {**MAP, "decode_ms": 4.1}
INSTEAD = "decoding takes 4.1 ms an image on one core"


@pytest.mark.parametrize(
    ("loader", "step", "refused", "patch", "says"),
    [
        (DECODES, 100.0, {}, "workers", f"({INSTEAD});"),  # 60 ms of making by 7 workers, 40 of work
        (DECODES, 66.0, {}, "dali", f"({INSTEAD}, which dali or cache would shorten);"),
        (DECODES, 66.0, {"dali": "no"}, "cache", f"({INSTEAD}, which cache would shorten);"),
        (DECODES, 66.0, {"dali": "no", "cache": "no"}, "workers", f"({INSTEAD});"),
        (DECODES, 66.0, {"dali": "no", "cache": "no", "workers": "no"}, None, f"({INSTEAD});"),
        ({**DECODES, "usable_cpus": 1}, 100.0, {}, "dali", f"({INSTEAD}, which dali or cache would shorten);"),
        ({**DECODES, "num_workers": 7}, 100.0, {}, "dali", f"({INSTEAD}, which dali or cache would shorten);"),
        ({**DECODES, "num_workers": 7}, 100.0, {"dali": "no"}, "cache", f"({INSTEAD}, which cache would shorten);"),
        (MAP, 66.0, {}, "workers", f"the next batch was not ready; {ALONE}"),
    ],
)
def test_image_files_name_the_feed_that_helps(
    loader: dict[str, Any], step: float, refused: dict[str, str], patch: str | None, says: str
) -> None:
    """Workers where they would keep up; else what decodes less, as far as the run's own loader can have it."""
    seen = Measurement(
        step_ms={"mean": step}, parts_ms={"data_wait": 60.0}, evidence={"loader": loader, "refused": refused}
    )
    (finding,) = findings(seen)
    assert says in finding.why
    assert finding.patch == (patch and {"rungs": {patch: {"enabled": True}}})


@pytest.mark.parametrize(
    ("micro_batch", "workers", "first"), [(9, 0, "dali"), (10, 0, "cache"), (10, 7, "dali"), (None, 0, "dali")]
)
def test_the_cache_comes_first_where_little_but_decoding_is_to_be_done(
    micro_batch: int | None, workers: int, first: str
) -> None:
    """Of 60 ms for a batch, 41 or 37 go into decoding; how long a worker takes for one is not seen."""
    loader = {**DECODES, "num_workers": workers}
    seen = Measurement(
        step_ms={"mean": 66.0}, parts_ms={"data_wait": 60.0}, evidence={"loader": loader}, micro_batch=micro_batch
    )
    (finding,) = findings(seen)
    other = "cache" if first == "dali" else "dali"
    assert finding.patch == {"rungs": {first: {"enabled": True}}} and f"{first} or {other}" in finding.why


@pytest.mark.parametrize("wait", [5.0, 20.0, 50.0, 90.0, 99.0])
def test_the_estimate_is_the_step_without_the_wait(wait: float) -> None:
    finding = only(MAP, wait=wait)
    assert finding.ceiling_gain_pct is not None
    assert 100 / (1 + finding.ceiling_gain_pct / 100) == pytest.approx(100 - wait)


@pytest.mark.parametrize("wait", [100.0, 100.001, 250.0])
def test_a_step_that_is_all_wait_has_no_ceiling(wait: float) -> None:
    finding = only(MAP, wait=wait)
    assert finding.share_pct == 100 and finding.ceiling_gain_pct is None


@pytest.mark.parametrize(
    ("ceilings", "gain"),
    [
        ({"replayed": 2592.0, "resident": 2697.0}, 700.0),
        ({"replayed": 2592.0}, 700.0),
        ({"resident": 2697.0}, 732.4),
    ],
)
def test_a_trial_beats_the_estimate(ceilings: dict[str, float], gain: float) -> None:
    first, *rest = findings(resnet50_naive(ceilings=ceilings))
    assert first.bottleneck == "data_wait" and rest == []
    assert first.ceiling_gain_pct == pytest.approx(gain, abs=0.1) and not first.ceiling_is_estimate
    (estimated,) = findings(resnet50_naive())
    assert estimated.ceiling_is_estimate


@pytest.mark.parametrize(("rate", "named"), [(102.9, False), (103.1, True), (90.0, False)])
def test_a_trial_that_gains_nothing_acquits_the_loader(rate: float, named: bool) -> None:
    seen = scene(
        100.0, data_wait=30.0, trail=0.0, gpu={"gr_active_pct": 70.0}, samples_per_s=100.0, ceilings={"replayed": rate}
    )
    found = findings(seen)
    assert ("data_wait" in [finding.bottleneck for finding in found]) is named
    if not named:
        assert "30.0 % of the step, but with free data" in found[0].why and "(measured)" in found[0].why


@pytest.mark.parametrize(
    ("enabled", "loader", "rungs"),
    [
        ((), {}, ["pin", "prefetch"]),
        (("pin",), {}, ["prefetch"]),
        (("prefetch",), {}, ["pin"]),
        ((), {"pin_memory": True}, ["prefetch"]),
        ((), {"num_workers": None}, ["prefetch"]),
        (("pin", "prefetch"), {}, None),
    ],
)
def test_copies(enabled: tuple[str, ...], loader: dict[str, Any], rungs: list[str] | None) -> None:
    seen = scene(100.0, h2d=40.0, trail=30.0, loader={**MAP, **loader})
    (finding,) = findings(seen, enabled)
    assert finding.bottleneck == "h2d" and finding.share_pct == pytest.approx(40)
    assert finding.why.startswith("moving batches to the GPU took 40.0 of 100.0 ms a step")
    assert (None if finding.patch is None else list(finding.patch["rungs"])) == rungs
    assert ("no further rung helps" in finding.why) is (rungs is None)


def test_copies_are_the_gap_between_replayed_and_resident() -> None:
    ceilings = {"replayed": 100.0, "resident": 160.0}
    (finding,) = findings(scene(100.0, h2d=40.0, trail=30.0, samples_per_s=100.0, ceilings=ceilings))
    assert finding.ceiling_gain_pct == pytest.approx(60) and not finding.ceiling_is_estimate
    (finding,) = findings(scene(100.0, h2d=40.0, trail=30.0, samples_per_s=100.0, ceilings={"resident": 120.0}))
    assert finding.ceiling_gain_pct == pytest.approx(20), "the estimate of 67 % is more than a resident batch gained"
    same = {"replayed": 100.0, "resident": 101.0}
    (finding,) = findings(scene(100.0, h2d=40.0, trail=30.0, samples_per_s=100.0, ceilings=same))
    assert finding.bottleneck == "none"


@pytest.mark.parametrize(
    ("ceilings", "gain", "estimate"),
    [
        ({"replayed": 100.0, "resident": 130.0}, 30.0, False),
        ({"replayed": 95.0, "resident": 88.0}, None, True),
        ({"replayed": 105.0, "resident": 93.0}, None, True),
        ({"replayed": 50.0, "resident": 110.0}, 10.0, True),
        ({"replayed": 92.0, "resident": 91.0}, None, False),
    ],
    ids=["sound", "resident_slower_than_the_run", "resident_slower_than_replayed", "replayed_disturbed", "acquitted"],
)
def test_trials_that_were_disturbed_say_nothing_of_copies(
    ceilings: dict[str, float], gain: float | None, estimate: bool
) -> None:
    seen = scene(100.0, h2d=40.0, trail=30.0, samples_per_s=100.0, ceilings=ceilings)
    found = [finding for finding in findings(seen) if finding.bottleneck == "h2d"]
    assert bool(found) is (gain is not None or estimate)
    if found and gain is not None:
        assert found[0].ceiling_gain_pct == pytest.approx(gain)
    assert all(finding.ceiling_is_estimate is estimate for finding in found)


MOVES = {"model": {"transfer_hooks": ["transfer_batch_to_device"]}}


@pytest.mark.parametrize(
    ("ms", "evidence", "named"),
    [
        (40.0, MOVES, True),
        (10.1, MOVES, True),
        (9.9, MOVES, False),
        (40.0, {}, False),
        (40.0, {"model": {"transfer_hooks": ["on_after_batch_transfer"]}}, False),
    ],
)
def test_on_the_cpu_only_a_hook_of_the_users_moves_anything(ms: float, evidence: Any, named: bool) -> None:
    """Seen: 7 of 30 short fits waited for copies that there were none of."""
    (finding,) = findings(scene(100.0, h2d=ms, device="cpu", evidence=evidence))
    assert (finding.bottleneck == "h2d") is named and finding.patch is None
    assert ("your transfer_batch_to_device" in finding.why) is named
    assert named or "copying to the device" in finding.why, "it is told all the same"
    assert findings(scene(100.0, h2d=5.1, trail=30.0))[0].bottleneck == "h2d", "a GPU has copies"


@pytest.mark.parametrize(("rate", "estimate"), [(190.0, True), (140.0, False)])
def test_a_trial_that_gained_more_than_the_wait_is_no_measure_of_it(rate: float, estimate: bool) -> None:
    (finding,) = findings(scene(100.0, data_wait=30.0, trail=50.0, samples_per_s=100.0, ceilings={"replayed": rate}))
    assert finding.bottleneck == "data_wait" and finding.ceiling_is_estimate is estimate
    assert finding.ceiling_gain_pct == pytest.approx(100 * 30 / 70 if estimate else rate - 100)
    assert (
        any("190 replayed: no part of the step explains the difference" in line for line in finding.detail) is estimate
    )


@pytest.mark.parametrize(("rate", "named"), [(67.0, True), (99.0, False), (101.0, False), (None, True)])
def test_a_trial_that_was_disturbed_does_not_clear_the_loader(rate: float | None, named: bool) -> None:
    """Seen: 67 samples/s without a loader on a busy machine, 510 with it, and a wait of 20 % called free."""
    seen = scene(100.0, data_wait=30.0, trail=0.0, samples_per_s=100.0, ceilings={"replayed": rate})
    found = [finding for finding in findings(seen) if finding.bottleneck == "data_wait"]
    assert bool(found) == named and all(finding.ceiling_is_estimate for finding in found)


@pytest.mark.parametrize(("enabled", "patched"), [((), "cache"), (("cache",), "workers")])
def test_rows_in_memory(enabled: tuple[str, ...], patched: str) -> None:
    """Picking them at once comes before workers, which would pick them one by one elsewhere."""
    finding = only({**MAP, "rows": "TensorDataset"}, enabled=enabled)
    assert finding.patch == {"rungs": {patched: {"enabled": True}}}
    assert "TensorDataset holds all rows in memory, but they are picked one at a time" in finding.why
    assert ("with the cache rung, all rows of a batch are picked at once" in finding.why) is (patched == "cache")


@pytest.mark.parametrize(
    ("threads", "said"),
    [
        (15, "give it more threads, or make samples cheaper"),
        (16, "does not keep up; make samples cheaper: all CPUs work on it"),
    ],
)
def test_an_engine_gets_more_threads_while_there_are_cpus(threads: int, said: str) -> None:
    loader = {**MAP, "num_workers": None, "has_engine": True, "usable_cpus": 16}
    step, parts = {"mean": 100.0}, {"data_wait": 60.0}
    seen = Measurement(step_ms=step, parts_ms=parts, evidence={"loader": loader, "engine": {"threads": threads}})
    assert said in findings(seen, (), ())[0].why


def test_an_engine_that_does_not_keep_up() -> None:
    assert "give it more threads" in only({**MAP, "num_workers": None, "has_engine": True}).why
    assert (
        "already picked at once"
        in only(
            {
                **MAP,
                "num_workers": None,
                "has_engine": True,
                "engine_advice": "all rows of a batch are already picked at once",
            }
        ).why
    )


@pytest.mark.parametrize(("of", "is_named"), [("loading", True), ("training_step", False)])
def test_the_line_that_makes_batches_slow_is_named(of: str, is_named: bool) -> None:
    line = {"of": of, "where": "data.py:12", "function": "augment", "share_pct": 45.0}
    seen = on_cpu(data_wait=20.0, evidence={"loader": {"num_workers": 0}, "lines": {"looks": 90, "lines": [line]}})
    finding = findings(seen)[0]
    assert finding.bottleneck == "data_wait" and ("(most of it at data.py:12 in augment)" in finding.why) is is_named
