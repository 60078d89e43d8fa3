"""Durations and sizes, read and told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tiertune_connector.units import Duration, format_count, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("250ms", 0.25), ("10m", 600), ("6h", 21600), ("2d", 172800), ("1.5 h", 5400), (90, 90), (0.5, 0.5)],
)
def test_durations(text, seconds):
    """As operators write them; a number is seconds."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("7", 7),
        (1024, 1024),
    ],
)
def test_sizes(text, nbytes):
    """As operators write them; a number is bytes."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("parse", [parse_duration, parse_size])
@pytest.mark.parametrize(
    "value",
    ["", "s", "-1s", "1 parsec", "1,5GiB", "1GB", "10 m 5 s", "1e3", True, None, [1],
     float("nan"), float("inf"), 10**400, "9" * 400],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_an_example(parse, value):
    """A ValueError that shows how it is written, never another exception."""
    with pytest.raises(ValueError, match=r"such as|write it as|finite"):
        parse(value)


@pytest.mark.parametrize("value", ["367d", 1e12, "-1s"])
def test_a_setting_is_at_most_a_year(value):
    """Dates are reckoned with it, and those end."""
    setting = TypeAdapter(Duration)
    assert setting.validate_python("366d") == 366 * 86400
    with pytest.raises(ValidationError):
        setting.validate_python(value)


@given(st.integers(0, 2**50))
def test_a_size_is_told_with_at_most_a_percent_of_error(nbytes):
    """Rounded to one decimal, with the unit that fits."""
    number, unit = format_size(nbytes).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(number) * factor == pytest.approx(nbytes, rel=0.06, abs=0.5)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0.4 s"), (42, "42 s"), (125, "2m 05s"), (11400, "3h 10m")])
def test_durations_are_told_in_two_units(seconds, text):
    """Short enough for a table."""
    assert format_duration(seconds) == text


def test_one_is_told_as_one():
    """All other numbers are several."""
    assert [format_count(number, "window") for number in (0, 0.9, 2)] == ["0 windows", "1 window", "2 windows"]
