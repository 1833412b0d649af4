"""Charts of the report page."""

import re
import sys

import pytest

from trl_replay import ReplayError
from trl_replay.extras.report.charts import MANY, MEANS, Line, line_chart


def test_a_chart_names_its_lines_and_axes_and_brings_nothing_from_elsewhere():
    chart = line_chart([Line("one", "red", [(1, 0.0), (2, 1.0)]), Line("two", "blue", [(1, 0.5)])], "share", True)
    assert {"one", "two", "share", "step", "0%", "100%"} <= set(re.findall("<text[^>]*>([^<]*)</text>", chart))
    assert chart.startswith("<svg")
    assert "<script" not in chart
    assert re.findall('href="([^#][^"]*)"', chart) == []


def test_many_points_are_drawn_faint_under_means_of_neighbors():
    points = [(float(step), float(step % 2)) for step in range(MANY)]
    assert "opacity" not in line_chart([Line("one", "red", points[1:])], "share")
    chart = line_chart([Line("one", "red", points)], "share")
    assert "opacity: 0.3" in chart
    assert chart.count("<use") >= MEANS


def test_charts_cope_with_little():
    assert line_chart([Line("none", "red", [])], "share") == ""
    assert line_chart([Line("one", "red", [(3, 0.5)])], "share").startswith("<svg")


def test_without_matplotlib_the_report_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReplayError, match="pip install matplotlib"):
        line_chart([Line("one", "red", [(3, 0.5)])], "share")
