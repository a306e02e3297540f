"""Changes whose worth is known beforehand, judged by the program as people run it.

The scripts know nothing of who runs them and print what their own stopwatch says. Where that is right it is what the
judge is held to, and where a full queue fools it, it shows what the judge must not fall for. All times are sleeps, so
a busy machine changes little.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from tests.commands.command_line import Said, run

HERE = Path(__file__).parent
SCRIPTS = HERE / "trainings" / "planted_scripts"
BASE_WORKERS = ("rungs.workers.enabled=true", "rungs.workers.count=2")
BATCH = 4
"""Samples of a batch, in all of them."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]


def fastloop(place: Path, *arguments: str | Path, executed: bool = False) -> Said:
    """The limit is far beyond what a quiet machine needs, and beyond any budget given here."""
    return run(
        *arguments,
        "--out",
        "x",
        "--json",
        "-",
        cwd=place,
        limit_s=400,
        env={"XDG_CACHE_HOME": str(place / "cache")},
        executed=executed,
    )


def folders(place: Path, arm: str) -> list[Path]:
    """Of the runs of an arm, by number."""
    return sorted((place / "x").glob(f"{arm}*/run-*"))


def stopwatch_ms(place: Path, arm: str) -> list[float]:
    """A step, as each run of the script has timed it itself: all steps after the same number of them."""
    return [float((folder / "stdout.txt").read_text().split()[0]) for folder in folders(place, arm)]


def uncorrected(place: Path, arm: str) -> list[float]:
    """Samples per second of each run, were all that was used in its window made in it."""
    seen = [json.loads((folder / "measurement.json").read_text()) for folder in folders(place, arm)]
    return [1e3 * BATCH * each["steps"] / each["wall_ms"] for each in seen]


def test_a_ten_percent_slowdown_in_an_unmodified_script_is_found(tmp_path: Path) -> None:
    """The parent process spends a tenth of a step more on each batch that comes from a worker.

    One in twenty 95 % intervals is wrong, and a stall of the machine is longer than the plant: it has three tries.
    """
    for _ in range(3):
        said = fastloop(
            tmp_path,
            "ab",
            "--script",
            SCRIPTS / "sleepy.py",
            "rungs.workers.count=1",
            "--vs",
            "workers",
            "--runs",
            "3",
            "--steps",
            "60",
            "--force",
        )
        found, one = said.json, said.json["comparisons"][0]
        base, arm = (statistics.geometric_mean(stopwatch_ms(tmp_path, each)) for each in ("base", "1-"))
        if one["verdict"] == "slower" and 0.82 < base / arm < 0.93:
            break
    assert (said.code, one["verdict"], one["parity"]["passed"]) == (0, "slower", True), said.err
    assert [(each["name"], each["active_rungs"]) for each in found["arms"]] == [("base", []), ("workers", ["workers"])]
    assert 0.82 < base / arm < 0.93, "the plant is there: 40 ms against 44, and the hand-over itself"
    low, high = one["ci95"]
    assert low - 0.01 < base / arm < high + 0.01 and 0.7 < low < high < 1, "one in twenty such intervals just misses"
    assert one["ratio"] == pytest.approx(base / arm, abs=0.02)
    assert not found["partial"] and not found["failures"] and "SLOWER" in said.err


def test_a_deeper_queue_that_is_only_emptied_is_not_faster(tmp_path: Path) -> None:
    """While the first step takes its time, workers fill their queue; then the loader is the limit, in both arms."""
    said = fastloop(
        tmp_path,
        "ab",
        "--script",
        SCRIPTS / "stalls.py",
        *BASE_WORKERS,
        "--vs",
        "rungs.workers.prefetch_factor=16",
        "--runs",
        "3",
        "--steps",
        "110",
    )
    found, one = said.json, said.json["comparisons"][0]
    assert one["verdict"] in ("no_difference", "inconclusive") and said.code in (0, 4), said.err
    assert one["parity"]["passed"] is True and one["parity"]["class"] == "exact"
    assert [arm["active_rungs"] for arm in found["arms"]] == [["workers"], ["workers"]]
    queues = [
        json.loads((folders(tmp_path, arm)[0] / "measurement.json").read_text())["evidence"]["loader"]["queued_batches"]
        for arm in ("base", "1-")
    ]
    assert queues == [4, 32] and any("too short for the loader's queues" in flag for flag in found["flags"])

    # What would fool a judge does so here; medians, since three runs beside other work differ by some percent.
    by_stopwatch = {folder: statistics.median(stopwatch_ms(tmp_path, folder)) for folder in ("base", "1-")}
    assert by_stopwatch["base"] / by_stopwatch["1-"] > 1.05, "a stopwatch after as many steps is fooled"
    plain = {folder: statistics.median(uncorrected(tmp_path, folder)) for folder in ("base", "1-")}
    fooled = plain["1-"] / plain["base"]
    assert fooled > 1.05, "so is the judge's own window without the queue's share"
    assert abs(math.log(one["ratio"])) < 0.6 * math.log(fooled), (one["ratio"], fooled)


def test_an_arm_whose_loss_becomes_infinite_is_trained_no_further(tmp_path: Path) -> None:
    """Nothing is made up here: bfloat16 rounds a probability to 1, and the script takes the logarithm of the rest."""
    said = fastloop(tmp_path, "ab", "--script", SCRIPTS / "saturates.py", "--vs", "amp", "--runs", "3", "--steps", "60")
    one = said.json["comparisons"][0]
    assert said.code == 3 and "PARITY FAILED" in said.err, said.err
    assert (one["verdict"], one["ratio"], one["parity"]["passed"]) == ("inconclusive", None, False)
    gates = {gate["name"]: gate for gate in one["parity"]["gates"]}
    assert gates["loss"]["detail"] == {"step": 41} and "not finite from optimizer step 41" in one["why"]
    assert gates["ledger"]["passed"] is True, "the base saw the very same samples and was finite on them"
    assert len(folders(tmp_path, "1-")) == 1 and len(folders(tmp_path, "base")) >= 1
