"""Completions to stock's final value, by hand."""

import math

import pytest

from trl_replay.extras.report.crossing import Curve, median_and_range, saved, saved_table


@pytest.mark.parametrize(
    ("values", "level", "there"),
    [
        ((0.0, 0.2, 0.4, 0.3), 0.3, 150.0),  # half of the way from 0.2 to 0.4, not its later fall to 0.3
        ((0.0, 0.2, 0.4, 0.3), 0.5, math.inf),
        ((0.5, 0.2, 0.4, 0.6), 0.5, 0.0),  # there from the beginning
        ((0.0, 0.3, 0.3, 0.3), 0.3, 100.0),  # a plateau counts from its beginning
    ],
)
def test_a_level_is_reached_at_its_first_crossing_between_measurements(values, level, there):
    assert Curve((0, 100, 200, 300), values).first(level) == pytest.approx(there)


def test_a_run_is_compared_with_stocks_own_first_crossing_and_not_with_the_end_of_its_plateau():
    stock = Curve((0, 100, 200, 300), (0.0, 0.4, 0.4, 0.4))
    found = saved(Curve((0, 100, 200, 300), (0.0, 0.8, 0.8, 0.9)), stock)
    assert found == (50.0, 100.0, 300, (0.9, 0.4))


def test_the_table_pairs_seeds_and_says_never_where_an_arm_does_not_get_there():
    x = (0, 1000, 2000)
    curves = {
        ("stock", 0): Curve(x, (0.0, 0.1, 0.2)),
        ("stock", 1): Curve(x, (0.0, 0.2, 0.4)),
        ("preset", 0): Curve(x, (0.0, 0.2, 0.5)),
        ("preset", 1): Curve(x, (0.0, 0.4, 0.7)),
        ("other", 1): Curve(x, (0.0, 0.1, 0.1)),
        ("alone", 2): Curve(x, (0.0, 0.1, 0.1)),
    }
    assert saved_table(curves)[2:] == [
        "| preset: 1,000 | 2 | 2,000 | 2.0 (2.0 to 2.0) | 0.60 | 0.30 |",
        "| other: never | 1 | 2,000 | 0.0 (0.0 to 0.0) | 0.10 | 0.40 |",
    ]


def test_a_median_between_a_number_and_never_is_never():
    assert median_and_range([100.0, math.inf]) == "never (100 to never)"
    assert median_and_range([100.0, math.inf, 300.0]) == "300 (100 to never)"
