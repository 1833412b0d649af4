"""Charts in the units of an SVG."""

from __future__ import annotations

from typing import Any

from trl_replay.report.charts import FRAME, Line, histogram, line_chart, ticks


def test_ticks_are_round_and_cover_the_values() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 7) == [0, 2, 4, 6, 8]
    assert ticks(3, 3)[0] <= 3 < ticks(3, 3)[-1]
    for low, high in ((0, 1e-6), (-5, 12345.6), (0.97, 1.02)):
        found = ticks(low, high)
        assert found[0] <= low
        assert found[-1] >= high
        assert 3 <= len(found) <= 9


def test_many_points_are_drawn_faint_under_means_of_neighbors() -> None:
    points = [(float(step), float(step % 2)) for step in range(3000)]
    chart = line_chart([Line("one", "red", points)], "step", "share", percent=True)
    assert chart["note"] == "thin: each logged step; thick: means of 100 of them"
    raw, means = (drawn.split() for _, _, drawn in chart["lines"])
    assert (len(raw), len(means)) == (600, 30)
    middle = (FRAME["base"] + FRAME["top"]) / 2
    assert {place.split(",")[1] for place in means} == {str(middle)}
    few = line_chart([Line("one", "red", points[:50])], "step", "share")
    assert (few["note"], [kind for kind, _, _ in few["lines"]]) == ("", ["mean"])


def test_a_few_values_get_a_bar_each() -> None:
    assert labels(histogram([0.25, 0.5, 0.5, 0.5], "score", "red")) == ["0.25: 1", "0.5: 3"]


def test_charts_cope_with_little() -> None:
    assert line_chart([Line("none", "red", [])], "step", "share")["lines"] == []
    one = line_chart([Line("one", "red", [(3, 0.5)])], "step", "share")
    ((_, _, dot),) = one["lines"]
    assert len(set(dot.split())) == 1, "a line of one place, whose round ends make a dot"
    assert histogram([], "age", "red")["bars"] == []
    assert labels(histogram([2, 2, 2], "age", "red", whole=True)) == ["2: 3"]
    assert labels(histogram([0.5], "score", "red")) == ["0.5: 1"]
    wide = labels(histogram(list(range(100)), "age", "red", whole=True))
    assert len(wide) <= 16
    assert wide[0] == "0–6: 7"
    fine = labels(histogram([number / 100 for number in range(100)], "score", "red"))
    heights = [int(label.split()[1]) for label in fine]
    assert (sum(heights), len(heights), {*heights} <= {6, 7}) == (100, 16, True)


def labels(chart: dict[str, Any]) -> list[str]:
    """Of the bars, each with its height."""
    return [bar[4] for bar in chart["bars"]]
