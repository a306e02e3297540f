"""The pictures: what is drawn, where, and that none of them can break a report."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest

from fastloop.records.measurement import PARTS, Measurement
from fastloop.report.drawing.bars import Chart
from fastloop.report.drawing.curves import Curve
from fastloop.report.drawing.document import Document
from fastloop.report.drawing.html import to_html
from fastloop.report.run import figures
from fastloop.report.run.summary import STYLES
from tests.report import samples
from tests.report.run.test_html import Page

nan = math.nan


def curve(seen: Measurement, name: str) -> Curve:
    made = figures.draw(seen)[name]
    assert isinstance(made, Curve)
    return made


def bars(seen: Measurement, name: str) -> Chart:
    chart = figures.draw(seen)[name]
    assert isinstance(chart, Chart)
    return chart


def draw_alone(chart: Chart | Curve) -> str:
    """The page of nothing but this chart."""
    return to_html(Document(kind="x", verdict="x", tone="good", lede="x", lines=(), pictures=(chart,)))


@pytest.mark.parametrize(
    ("run", "names"),
    [
        ("resnet50", {"step", "gpu", "watts", "loss"}),
        ("cpu", {"step", "loss"}),
        ("gpt2", {"step", "gpu", "watts", "loss", "kernels"}),
        ("empty", set()),
        ("straggler", {"step", "gpu", "watts", "loss", "ranks"}),
    ],
)
def test_there_is_a_picture_of_what_was_measured(run: str, names: set[str]) -> None:
    assert set(figures.draw(samples.RUNS[run]().seen)) == names


def test_every_part_has_a_color_of_its_own() -> None:
    assert set(STYLES) == set(PARTS) and len({style.color for style in STYLES.values()}) == len(PARTS)


def test_the_step_is_drawn_to_scale_with_the_host_beside_it() -> None:
    chart = bars(samples.resnet50().seen, "step")
    device, host = chart.rows
    assert (device.name, host.name, chart.high) == ("GPU", "host", 197.5)
    assert device.bars[0][:3] == (0, 169.6, STYLES["data_wait"].color) and host.bars[0].end == 169.8
    assert (device.bars[0].label, device.bars[0].share, host.bars[0].label) == ("waiting for data", "86 %", "")
    assert chart.size(device.bars[0]) == pytest.approx(100 * 169.6 / 197.5, abs=0.01)
    assert all(one.end == other.start for one, other in pairwise(device.bars))
    legend = {entry.label: (entry.value, entry.share) for entry in chart.legend}
    assert legend["waiting for data"] == ("170 ms", "85.9 %") and legend["copy to the device"][0] == "3.9 ms"
    assert "validation" not in legend, "what took no time needs no place in the picture"
    assert chart.ticks == (0, 50, 100, 150) and chart.unit == " ms"


def test_on_the_cpu_there_is_one_clock_and_what_is_not_split_is_hatched() -> None:
    chart = bars(samples.cpu().seen, "step")
    assert [row.name for row in chart.rows] == ["CPU"]
    assert [bar.style for bar in chart.rows[0].bars].count("hatched") == 1 and chart.rows[0].bars[-1].end == chart.high
    assert chart.legend[-1].label == "not split further" and chart.legend[-1].kind == "hatched"
    known = bars(samples.resnet50().seen, "step")
    assert "hatched" not in [bar.style for row in known.rows for bar in row.bars]


@pytest.mark.parametrize(
    "parts",
    [
        {"forward": -1.0, "backward": 2.0},
        {"forward": nan, "backward": 3.0},
        {"backward": 0.001},
        {"backward": 1e9},
        dict.fromkeys(PARTS, 1.0),
    ],
    ids=["negative", "nan", "tiny", "huge", "all"],
)
def test_odd_parts_are_drawn(parts: dict[str, Any]) -> None:
    seen = dataclasses.replace(samples.resnet50().seen, parts_ms=parts, step_ms={"mean": 2.0})
    chart = bars(seen, "step")
    assert "backward" in [bar.label for bar in chart.rows[0].bars] and len(chart.ticks) < 8
    places = [place for row in chart.rows for bar in row.bars for place in (chart.place(bar.start), chart.size(bar))]
    assert all(0 <= place <= 100 for place in places) and "backward" in Page(draw_alone(chart)).said


def test_what_adding_up_leaves_over_is_no_part_of_the_picture() -> None:
    seen = dataclasses.replace(samples.cpu().seen, parts_ms={"forward": 223.0, "unexplained": -2.8e-14})
    chart = bars(seen, "step")
    assert [entry.label for entry in chart.legend] == ["forward"]
    assert chart.alt_text == "A step of 223.0 ms: forward 223 ms."
    chart = bars(dataclasses.replace(seen, parts_ms={"forward": 220.0, "unexplained": 3.0}), "step")
    assert chart.legend[1][2:] == ("unexplained", "3 ms", "1.3 %")


@pytest.mark.parametrize("step", [{}, {"mean": 0.0}, {"mean": nan}, {"mean": math.inf}])
def test_without_a_step_there_is_no_bar(step: dict[str, Any]) -> None:
    assert "step" not in figures.draw(dataclasses.replace(samples.resnet50().seen, step_ms=step))


def test_unreadable_seconds_are_gaps() -> None:
    whole = tuple({"t_s": float(second), "sm_active_pct": 50.0 + second} for second in range(9))
    holed = (*whole[:4], {"t_s": 4.0, "sm_active_pct": None}, *whole[5:])
    drawn = [curve(Measurement(timeline=rows), "gpu") for rows in (whole, holed)]
    assert [each.path(each.lines[0]).count("M") for each in drawn] == [1, 2]


def test_watts_alone_and_one_second_alone_are_drawn() -> None:
    made = figures.draw(Measurement(timeline=({"t_s": 0.0, "watts": 90.0},)))
    assert set(made) == {"watts"} and isinstance(watts := made["watts"], Curve)
    assert watts.path(watts.lines[0]).startswith(f"M{watts.x(0.0):g} ") and "h0" in watts.path(watts.lines[0])
    assert figures.draw(Measurement(timeline=({"t_s": 0.0, "watts": None, "sm_active_pct": nan},))) == {}


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 10_000])
def test_losses_are_thinned_to_a_thousand(count: int) -> None:
    points = figures.thin_out([float(step) for step in range(count)])
    assert len(points) <= 1000 and points[0] == (0, 0.0) and points[-1][0] >= count * 0.99 - 1
    assert [at for at, value in points if at != value] == []


def test_a_point_that_stands_for_a_lost_one_is_a_gap() -> None:
    losses = [1.0] * 10_000
    losses[5003] = math.inf
    assert [at for at, value in figures.thin_out(losses) if math.isnan(value)] == [5000]
    assert figures.thin_out([1.0, nan, 2.0])[::2] == [(0, 1.0), (2, 2.0)]


def test_lost_losses_are_marked() -> None:
    marked = curve(Measurement(loss=(1.0, nan, 2.0, 3.0, math.inf)), "loss")
    assert [x for x, _ in marked.lost] == [1, 4] and "not finite (2 of 5 points)" in marked.title
    assert "not finite" not in curve(Measurement(loss=(1.0, 2.0)), "loss").title
    assert "not finite" in curve(Measurement(loss=(nan, nan)), "loss").title


@pytest.mark.parametrize("losses", [(3e38, -3e38), (1e-38, 2e-38), (2.0, 2.0), (0.0, 0.0), (-1.0, -1.0)])
def test_losses_of_any_size_are_drawn(losses: tuple[float, ...]) -> None:
    made = curve(Measurement(loss=losses), "loss")
    assert all(made.bottom > made.y(loss) > made.top for loss in losses) and 1 < len(made.y_ticks()) < 8
    assert draw_alone(made).count("<svg") == 1


def test_one_loss_is_no_curve() -> None:
    assert figures.draw(Measurement(loss=(5.0,))) == {} and set(figures.draw(Measurement(loss=(5.0, 4.0)))) == {"loss"}


def test_kernels_and_idle_time_share_a_scale() -> None:
    chart = bars(samples.gpt2().seen, "kernels")
    names = [row.name for row in chart.rows]
    idle = names.index("the device is idle for")
    assert names[:2] == ["the device works on", "gemm"] and len(chart.rows) - idle - 1 == 3, "0 ms is no row"
    gemm, attention = chart.rows[1:3]
    assert (gemm.value, gemm.detail) == ("1,102 ms", "69.7 %") and chart.size(gemm.bars[0]) == 100
    assert chart.size(attention.bars[0]) == pytest.approx(100 * 211 / 1102, abs=0.01)
    assert len({row.bars[0].color for row in chart.rows[1:idle]} | {chart.rows[-1].bars[0].color}) == 2


def test_a_rank_is_a_bar() -> None:
    chart = bars(samples.straggler().seen, "ranks")
    assert [row.name for row in chart.rows] == ["0 node-a", "1 node-b"] and chart.rows[1].value == "115.1 ms"
    (waited,) = [bar for bar in chart.rows[0].bars if bar.color == STYLES["comm_exposed"].color]
    assert chart.size(waited) == pytest.approx(100 * 52 / 115, abs=0.1)
    assert "exchange, exposed" in [entry.label for entry in chart.legend]


def test_of_many_ranks_the_slowest_and_the_quickest_are_drawn() -> None:
    ranks = tuple(
        {"rank": rank, "host": "n", "step_ms": {"mean": 100.0 + rank}, "parts_ms": {"forward": 50.0 + rank}}
        for rank in range(64)
    )
    chart = bars(Measurement(ranks=ranks), "ranks")
    assert [row.name for row in chart.rows] == [f"{rank} n" for rank in (*range(63, 55, -1), *range(7, -1, -1))]
    assert chart.note == "16 of 64 ranks: the slowest and the fastest"


def test_the_step_in_words() -> None:
    assert bars(samples.cpu().seen, "step").alt_text == "A step of 223.0 ms: waiting for data 52.8 ms."
