"""The preview draws: figures with their units, ticks, lines, states, bars and curves."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.html import Page
from tiertune_agent.preview import plot
from tiertune_agent.preview.plot import Frame, figure, ticks
from tiertune_agent.preview.prometheus import Series
from tiertune_agent.web.charts import draw

FRAME = Frame(0.0, 100.0, 10.0, 500, 200)


# -- units


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.8136, "percentunit", "81.4 %"),
        (0.0, "percentunit", "0 %"),
        (0.0032, "s", "3.2 ms"),
        (0.0, "s", "0 s"),
        (-90.0, "s", "-1.5 min"),
        (10 * 2**20, "bytes", "10 MiB"),
        (1.5 * 2**30, "Bps", "1.5 GiB/s"),
        (12345.0, "short", "12.3 k"),
        (12.0, "reqps", "12 req/s"),
        (350.0, "watt", "350 W"),
        (2500.0, "joule", "2.5 kJ"),
        (3.0, "none", "3"),
        (1000.0, "none", "1 k"),
        (999_999.0, "none", "1 M"),
        (999.6, "reqps", "1 kreq/s"),
        (1e-5, "none", "0.00001"),
        (-0.0, "none", "0"),
        (1e20, "none", "100,000 P"),
        (1020 * 1024.0, "bytes", "1,020 KiB"),
    ],
)
def test_figures_have_few_digits_and_their_unit(value, unit, text):
    """As Grafana would write them, or nearly so."""
    assert figure(value, unit) == text


@given(st.floats(-1e12, 0), st.floats(0, 1e12), st.sampled_from(["bytes", "s", "percentunit", "none"]))
def test_ticks_are_among_the_values_and_few(low, high, unit):
    """Ascending, evenly, zero among them, and never a crowd."""
    assume(high - low > plot.FLAT)
    marks = ticks(low, high, unit)
    slack = (high - low) * 1e-9
    assert 0.0 in marks
    assert low - slack <= marks[0] <= marks[-1] <= high + slack
    assert 2 <= len(marks) <= 7
    assert all(a < b for a, b in pairwise(marks))


@pytest.mark.parametrize(
    ("high", "unit", "labels"),
    [
        (360 * 2**20, "bytes", ["0 B", "100 MiB", "200 MiB", "300 MiB"]),
        (5000.0, "s", ["0 s", "30 min", "1 h"]),
        (0.83, "percentunit", ["0 %", "20 %", "40 %", "60 %", "80 %"]),
    ],
)
def test_ticks_are_round_in_their_unit(high, unit, labels):
    """Not in bytes or seconds."""
    assert [figure(mark, unit) for mark in ticks(0.0, high, unit)] == labels


@given(st.floats(0, 2e9), st.floats(1, 1e7))
def test_the_clock_is_told_within_the_time_shown(start, length):
    """Ascending, and no more often than finds room."""
    frame = Frame(start, start + length, 1.0, 500, 200)
    times = [start, *(at for at, _ in frame.clock()), frame.end]
    assert all(a < b for a, b in pairwise(times))
    assert len(times) == 7


# -- plot


def drawn(series, *, steps=False):
    named = [(name, Series({}, points)) for name, points in series.items()]
    return plot.lines(named, FRAME, "none", steps=steps)


def test_a_line_breaks_where_a_value_is_missing():
    """Prometheus leaves out what was not scraped: nothing is drawn there, and a single value is a dot."""
    points = ((0.0, 1.0), (10.0, 1.0), (40.0, 2.0), (90.0, 1.0), (100.0, 1.0))
    line, alone = drawn({"a": points}).series
    assert line.points == (*points[:2], None, *points[3:])
    assert (alone.points, alone.line, alone.dots > 0) == ((points[2],), False, True)


def test_steps_go_first_along_and_then_up():
    """What changes at once is drawn so."""
    (line,) = drawn({"a": ((0.0, 0.0), (10.0, 1.0))}, steps=True).series
    assert line.points == ((0.0, 0.0), (10.0, 0.0), (10.0, 1.0))


def test_zero_is_drawn_where_values_lie_on_both_sides():
    """Lost seconds are below it."""
    both, above = drawn({"a": ((0.0, -1.0), (10.0, 1.0))}), drawn({"a": ((0.0, 5.0), (10.0, 6.0))})
    lines = [[attrs["class"] for attrs in Page(draw(chart)).all("path")] for chart in (both, above)]
    assert [any("major" in each for each in kinds) for kinds in lines] == [True, False]
    assert above.ys[0][1] == "0"


def test_a_state_lasts_until_the_next_one_and_ends_where_values_end():
    """Equal values are one cell; a gap is empty."""
    series = Series({}, ((0.0, 1.0), (10.0, 1.0), (20.0, 2.0), (60.0, 1.0)))
    told = plot.stretches(series, FRAME, {})
    assert [(one.word, one.begin, one.length) for one in told] == [
        ("1.0", 0.0, 20.0), ("2.0", 20.0, 10.0), ("1.0", 60.0, 10.0),
    ]  # fmt: skip


def test_a_state_is_a_stretch_of_its_row():
    """Begin and length in per cent of the time shown, in which all of it lies; a value without a word is a figure."""
    series = Series({}, ((-5.0, 1.0), (40.0, 1.0), (50.0, 3.0), (95.0, 1.0)))
    told = plot.stretches(series, FRAME, {1.0: ("ok", "green")})
    stretches = [(one.word, one.colour, one.begin, one.length) for one in told]
    assert stretches == [
        ("ok", "green", 0.0, 5.0), ("ok", "green", 40.0, 10.0), ("3.0", "text", 50.0, 10.0), ("ok", "green", 95.0, 5.0),
    ]  # fmt: skip


def test_bars_are_long_as_their_values_and_never_negative():
    """The longest is full, unless a full bar is said to be more."""
    made = plot.bars([("a", 2.0), ("b", 1.0), ("c", -1.0)], "none", None)
    assert [bar.share for bar in made] == [1.0, 0.5, 0.0]
    (half,) = plot.bars([("a", 0.5)], "percentunit", 1.0)
    assert (half.share, half.label) == (0.5, "50 %")


def test_a_curve_goes_from_its_smallest_to_its_largest_size():
    """Labels come in the order of letters: 128 before 16."""
    made = plot.curve([(128.0, 0.9), (16.0, 0.5)], FRAME, "percentunit")
    assert made.series[0].points == ((16.0, 0.5), (128.0, 0.9))
    assert made.x[0] == 0.0
