"""Charts as SVG."""

from __future__ import annotations

import re

from trl_replay.report.charts import Line, histogram, line_chart, smoothed, thinned, ticks


def test_ticks_are_round_and_cover_the_values() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 7) == [0, 2, 4, 6, 8]
    assert ticks(3, 3)[0] <= 3 < ticks(3, 3)[-1]
    for low, high in ((0, 1e-6), (-5, 12345.6), (0.97, 1.02)):
        found = ticks(low, high)
        assert found[0] <= low
        assert found[-1] >= high
        assert 3 <= len(found) <= 9


def test_many_points_are_drawn_faint_under_their_running_mean() -> None:
    points = [(float(step), float(step % 2)) for step in range(3000)]
    assert all(abs(y - 0.5) < 0.01 for _, y in smoothed(points, 100)[50:-50])
    assert [x for x, _ in smoothed(points, 100)] == [x for x, _ in points]
    assert thinned(points, 600)[0] == (2.0, 0.4)
    assert len(thinned(points, 600)) == 600
    chart = line_chart([Line("one", "red", points)], "step", "share", percent=True)
    assert "thin: each logged step; thick: means of 100 of them" in chart
    assert (chart.count('class="raw"'), chart.count('class="mean"')) == (1, 1)
    assert len(chart) < 30_000
    assert "thick" not in line_chart([Line("one", "red", points[:50])], "step", "share")


def test_a_few_values_get_a_bar_each() -> None:
    chart = histogram([0.25, 0.5, 0.5, 0.5], "score", "red")
    assert chart.count("<rect") == 2
    assert "<title>0.5: 3</title>" in chart


def test_charts_cope_with_little() -> None:
    assert "nothing was logged" in line_chart([Line("none", "red", [])], "step", "share")
    assert "<circle" in line_chart([Line("one", "red", [(3, 0.5)])], "step", "share")
    assert "the buffer is empty" in histogram([], "age", "red")
    assert histogram([2, 2, 2], "age", "red", whole=True).count("<rect") == 1
    assert histogram([0.5], "score", "red").count("<rect") == 1
    wide = histogram(list(range(100)), "age", "red", whole=True)
    assert wide.count("<rect") <= 16
    assert "0–6: 7" in wide


def test_both_axes_have_their_names() -> None:
    lines = line_chart([Line("one", "red", [(0, 1.0), (9, 2.0)])], "step", "reward")
    bars = histogram([1, 2], "age", "red")
    names = [re.findall(r'class="axis">([^<]*)<', chart) for chart in (lines, bars)]
    assert names == [["reward", "step"], ["groups", "age"]]


def test_no_number_stands_beside_one_of_the_other_axis() -> None:
    """The zeros of both axes meet in a corner; letters are about 7 by 12."""
    charts = [
        line_chart([Line("one", "red", [(float(step), step / 9) for step in range(10)])], "step", "reward", low=0.0),
        line_chart([Line("one", "red", [(1.0, 0.0), (2000.0, 1.0)])], "step", "share", percent=True),
        histogram([0, 1, 2], "uses", "red", whole=True),
    ]
    for chart in charts:
        numbers = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)<', chart)
        of_y = [box(*number) for number in numbers if number[2] == "end"]
        of_x = [box(*number) for number in numbers if number[2] == "middle"]
        assert of_y
        assert of_x
        for left, right, bottom in of_y:
            for start, end, base in of_x:
                assert end < left - 4 or start > right + 4 or base - 12 > bottom + 4, (numbers, left, start)


def box(x: str, y: str, anchor: str, text: str) -> tuple[float, float, float]:
    """Left and right edge of a text, and its baseline."""
    width = 7 * len(text)
    left = float(x) - (width if anchor == "end" else width / 2)
    return left, left + width, float(y)
