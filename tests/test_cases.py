"""The loop that all benchmarks share, and that the configurations they train can be read."""

from __future__ import annotations

import argparse
import json
import math
import re
import time

import pytest

from benchmarks import compute
from benchmarks.cases import Case, run_cases
from fastloop.config.loading import load


def test_each_case_has_its_line_and_none_ends_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    rates = iter([2.0, 8.0, 4.0])

    def fail(_left_s: float) -> dict[str, float]:
        raise ValueError("planted")

    cases = [
        Case("fails", fail),
        Case("too long", lambda _: {"rate": 1.0}, 1000),
        Case("runs", lambda left_s: {"rate": next(rates), "left_s": left_s, "setup_s": 1e9}, 90),
    ]
    options = argparse.Namespace(rounds=3, size="tiny", until=time.monotonic() + 100)
    with pytest.raises(SystemExit) as ended:
        run_cases("test", cases, options, rate="rate", batch=8)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 1 and [line["case"] for line in lines] == ["fails", "too long", "runs", "runs", "runs"]
    assert lines[0]["error"] == "ValueError: planted" and lines[0]["n"] == 0
    assert re.match(r"takes about 1000 s, (100|9\d) s", lines[1]["left_out"]) and "error" not in lines[1]
    assert [line["n"] for line in lines[2:]] == [1, 2, 3] and lines[2]["ci95"] is None
    last, half = lines[-1], 4.3027 * math.log(2) / math.sqrt(3)
    assert last["median_rate"] == 4 and last["ci95"] == pytest.approx(
        [4 * math.exp(-half), 4 * math.exp(half)], rel=1e-3
    )
    assert 0 < last["left_s"] <= 100 and last["batch"] == 8 and {"gpu", "versions", "cpus"} < last.keys()


def test_every_stack_of_tricks_is_a_configuration() -> None:
    for recipe in compute.DATA:
        stacks = compute.list_stacks(recipe)
        assert stacks[-1] == ("naive", "naive") and len(stacks) == len(compute.TRICKS[recipe]) + 1
        ladder = load(recipe, overrides=stacks[0][1].split("+")[1:]).ladder
        wanted = {trick.split(".")[1] for tricks in compute.TRICKS[recipe] for trick in tricks}
        assert {name for name, rung in ladder.rungs() if rung.enabled} == wanted
        assert load(recipe, more=("full",), overrides=compute.FULL[recipe]).ladder.compile.enabled
