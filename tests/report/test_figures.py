"""The pictures: what is drawn, where, and that none of them can break a report."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from fastloop.measurement import PARTS, Measurement
from fastloop.report import figures
from tests.report import samples

nan = math.nan


def shown(seen: Measurement) -> dict[str, str]:
    """Markup by name; fails where a picture could not be drawn."""
    made = figures.draw(seen)
    assert [picture.why_not for picture in made.values() if picture.why_not] == []
    return {name: picture.markup for name, picture in made.items()}


def texts(markup: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", markup)


def bars(markup: str, colour: str) -> list[float]:
    """Widths of the rectangles of one colour."""
    found = re.findall(rf'<path d="M ([\d.]+) [\d.]+ L ([\d.]+) [^"]*"[^>]*style="fill: {colour}"', markup)
    return [round(float(right) - float(left), 1) for left, right in found]


@pytest.mark.parametrize(
    ("run", "names"),
    [("resnet50", {"step-wide", "step-narrow", "gpu", "loss"}), ("cpu", {"step-wide", "step-narrow", "loss"}),
     ("gpt2", {"step-wide", "step-narrow", "gpu", "loss", "kernels"}), ("empty", set()),
     ("straggler", {"step-wide", "step-narrow", "gpu", "loss", "ranks"})],
)  # fmt: skip
def test_there_is_a_picture_of_what_was_measured(run: str, names: set[str]) -> None:
    assert set(shown(samples.RUNS[run]().seen)) == names


def test_every_part_has_a_colour_of_its_own() -> None:
    assert set(figures.COLOURS) == set(PARTS) and len(set(figures.COLOURS.values())) == len(PARTS)


def test_the_step_is_drawn_to_scale_with_the_host_beside_it() -> None:
    markup = shown(samples.resnet50().seen)["step-wide"]
    device, host, swatch = bars(markup, figures.COLOURS["data_wait"])
    scale = (900 - 60) / 197.5
    assert device == pytest.approx(169.6 * scale - 1, abs=0.2) and host == pytest.approx(169.8 * scale - 1, abs=0.2)
    assert swatch == 12
    said = texts(markup)
    assert "waiting for data 86 %" in [" ".join(text.split()) for text in said]
    assert {"170 ms", "85.9 %", "3.9 ms", "GPU", "host", "0 ms", "150"} <= set(said)
    assert "validation" not in said, "what took no time needs no place in the picture"


def test_on_the_cpu_there_is_one_clock_and_what_is_not_split_is_hatched() -> None:
    markup = shown(samples.cpu().seen)["step-narrow"]
    assert "host" not in texts(markup) and "CPU" in texts(markup) and "not split further" in texts(markup)
    assert markup.count("url(#step-narrow-h") == 2
    assert "url(#step-narrow-h" not in shown(samples.resnet50().seen)["step-narrow"]


@pytest.mark.parametrize("parts", [{"forward": -1.0, "backward": 2.0}, {"forward": nan, "backward": 3.0},
                                   {"backward": 0.001}, {"backward": 1e9}, dict.fromkeys(PARTS, 1.0)],
                         ids=["negative", "nan", "tiny", "huge", "all"])  # fmt: skip
def test_odd_parts_are_drawn(parts: dict[str, Any]) -> None:
    seen = dataclasses.replace(samples.resnet50().seen, parts_ms=parts, step_ms={"mean": 2.0})
    assert "backward" in texts(shown(seen)["step-wide"])


def test_what_adding_up_leaves_over_is_no_part_of_the_picture() -> None:
    seen = dataclasses.replace(samples.cpu().seen, parts_ms={"forward": 223.0, "unexplained": -2.8e-14})
    assert "unexplained" not in texts(shown(seen)["step-wide"]) and "forward" in texts(shown(seen)["step-wide"])
    assert figures.step_words(seen) == "A step of 223.0 ms: forward 223 ms."
    real = dataclasses.replace(seen, parts_ms={"forward": 220.0, "unexplained": 3.0})
    assert {"unexplained", "3 ms", "1.3 %"} <= set(texts(shown(real)["step-wide"]))


@pytest.mark.parametrize("step", [{}, {"mean": 0.0}, {"mean": nan}, {"mean": math.inf}])
def test_without_a_step_there_is_no_bar(step: dict[str, Any]) -> None:
    assert "step-wide" not in shown(dataclasses.replace(samples.resnet50().seen, step_ms=step))


def test_unreadable_seconds_are_gaps() -> None:
    whole = tuple({"t_s": float(second), "sm_active_pct": 50.0 + second} for second in range(9))
    holed = (*whole[:4], {"t_s": 4.0, "sm_active_pct": None}, *whole[5:])
    lines = [re.search(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: #2f6fb5', shown(Measurement(timeline=rows))[
        "gpu"]) for rows in (whole, holed)]  # fmt: skip
    assert [line[1].count("M") for line in lines if line] == [1, 2]


def test_watts_alone_and_one_second_alone_are_drawn() -> None:
    alone = shown(Measurement(timeline=({"t_s": 0.0, "watts": 90.0},)))["gpu"]
    assert "watts" in texts(alone) and "% of the time" not in texts(alone) and "<use" in alone
    assert "gpu" not in shown(Measurement(timeline=({"t_s": 0.0, "watts": None, "sm_active_pct": nan},)))


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 10_000])
def test_losses_are_thinned_to_a_thousand(count: int) -> None:
    points = figures.thinned([float(step) for step in range(count)])
    assert len(points) <= 1000 and points[0] == (0, 0.0) and points[-1][0] >= count * 0.99 - 1
    assert [at for at, value in points if at != value] == []


def test_a_point_that_stands_for_a_lost_one_is_a_gap() -> None:
    losses = [1.0] * 10_000
    losses[5003] = math.inf
    assert [at for at, value in figures.thinned(losses) if math.isnan(value)] == [5000]
    assert figures.thinned([1.0, nan, 2.0])[::2] == [(0, 1.0), (2, 2.0)]


def test_lost_losses_are_marked() -> None:
    marked = shown(Measurement(loss=(1.0, nan, 2.0, 3.0, math.inf)))["loss"]
    assert "| not finite (2 of 5 points)" in texts(marked)
    assert "not finite" not in shown(Measurement(loss=(1.0, 2.0)))["loss"]
    assert "not finite" in shown(Measurement(loss=(nan, nan)))["loss"]


@pytest.mark.parametrize("losses", [(1e308, -1e308), (1e-320, 2e-320), (2.0, 2.0)])
def test_losses_of_any_size_cannot_break_the_report(losses: tuple[float, ...]) -> None:
    made = figures.draw(Measurement(loss=losses))["loss"]
    assert made.markup or made.why_not


def test_one_loss_is_no_curve() -> None:
    assert "loss" not in shown(Measurement(loss=(5.0,))) and "loss" in shown(Measurement(loss=(5.0, 4.0)))


def test_the_curve_begins_at_the_top_unless_something_stands_above_it() -> None:
    tops = []
    for losses in ((1.0, 2.0), (1.0, nan)):
        figure = figures.loss(Measurement(loss=losses))
        (axes,) = figure.axes
        tops.append((axes.get_position().y1, bool(axes.get_title(loc="left"))))
    assert [titled for _, titled in tops] == [False, True]
    assert 0.97 < tops[0][0] < 1 and tops[1][0] < 0.93


def test_kernels_and_idle_time_share_a_scale() -> None:
    markup = shown(samples.gpt2().seen)["kernels"]
    work, idle = bars(markup, "#2f6fb5"), bars(markup, "#d9480f")
    assert work[0] == 150.0 and work[1] == pytest.approx(150 * 211 / 1102, abs=0.1) and len(idle) == 3, "0 ms is no row"
    assert {"the device works on", "the device is idle for", "gemm", "69.7 %", "1,102 ms"} <= set(texts(markup))


def test_a_rank_is_a_bar() -> None:
    markup = shown(samples.straggler().seen)["ranks"]
    assert {"0 node-a", "1 node-b", "115.1 ms"} <= set(texts(markup))
    assert [width for width in bars(markup, figures.COLOURS["comm_exposed"]) if width > 50] == [
        pytest.approx(210 * 52 / 115 - 1, abs=0.2)]  # fmt: skip


def test_ranks_of_older_files_have_one_number_for_their_step() -> None:
    ranks = tuple({"rank": rank, "step_ms": 100.0 + rank, "parts_ms": {"forward": 50.0}} for rank in (0, 1))
    assert {"100.0 ms", "101.0 ms"} <= set(texts(shown(Measurement(ranks=ranks))["ranks"]))


def test_of_many_ranks_the_slowest_and_the_quickest_are_drawn() -> None:
    ranks = tuple({"rank": rank, "host": "n", "step_ms": 100.0 + rank, "parts_ms": {"forward": 50.0 + rank}}
                  for rank in range(64))  # fmt: skip
    said = texts(shown(Measurement(ranks=ranks))["ranks"])
    names = [text for text in said if text.endswith(" n")]
    assert names == [f"{rank} n" for rank in (*range(63, 55, -1), *range(7, -1, -1))]
    assert "16 of 64 ranks: the slowest and the quickest" in said


def test_a_picture_that_fails_says_why_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seen: Measurement) -> None:
        raise ValueError("too steep")

    monkeypatch.setattr(figures, "loss", fails)
    made = figures.draw(samples.resnet50().seen)
    assert made["loss"].why_not == "ValueError: too steep" and not made["loss"].markup and made["gpu"].markup


def test_the_step_in_words() -> None:
    assert figures.step_words(samples.cpu().seen) == "A step of 223.0 ms: waiting for data 52.8 ms."
    assert figures.step_words(Measurement()) == "A step of n/a: not split."
