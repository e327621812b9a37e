"""What the benchmarks print: a figure that misses its goal must say so."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from bench import curve, store


@pytest.mark.parametrize(
    ("is_most", "reached", "met"),
    [
        (False, 99.0, False),
        (False, 100.0, True),
        (False, 101.0, True),
        (True, 99.0, True),
        (True, 100.0, True),
        (True, 101.0, False),
    ],
)
def test_a_goal_is_met_on_its_own_side_only(is_most: bool, reached: float, met: bool) -> None:
    assert store.Goal("x", "x", "s", 100, is_most).is_met(reached) is met


def test_each_figure_of_the_table_has_one_line() -> None:
    figures = [goal.figure for row in store.ROWS.values() for goal in row.goals]
    assert len(figures) == len(set(figures))
    assert store.table_of({figure: [1.0, 3.0, 2.0] for figure in figures}, list(store.ROWS)).row_count == len(figures)


def test_growth_compares_the_ends_of_the_curve_behind_its_beginning() -> None:
    points = [curve.Point(gib / 2, 100.0 if gib <= 2 else float(gib), 2.0) for gib in range(1, 43)]
    by_clock, by_processor = curve.growth(points)
    assert by_clock == pytest.approx(37.5 / 7.5, rel=0.01)
    assert by_processor == 1


def test_the_plot_is_svg_with_a_line_for_each_figure() -> None:
    plot = ElementTree.fromstring(curve.svg_of([curve.Point(1, 5.0, 2.0), curve.Point(2, 6.0, 3.0)]))
    lines = [each.attrib["points"].split() for each in plot.iter() if each.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [2, 2]
    assert float(lines[0][0].split(",")[1]) < float(lines[1][0].split(",")[1]), "what costs more stands higher"
