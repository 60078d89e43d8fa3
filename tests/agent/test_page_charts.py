"""Drawings: all that a chart tells is in its SVG, as text where it is a name, and nothing else is."""

import re
import subprocess
import sys

from agent.hostile import HOSTILE
from agent.html import Page
from tiertune_agent.web import charts
from tiertune_agent.web.charts import Bars, Chart, Piece, Series

LINE = Series("fetch", ((0.0, 1.0), (1.0, 2.0), None, (2.0, 3.0), (3.0, 1.0)), HOSTILE)
DOTS = Series("mark", ((1.0, 1.0), (2.0, 2.0)), line=False, dots=3.0, tips=(HOSTILE, "why"))
CHART = Chart(
    HOSTILE,
    (Series("off", ((0.0, 0.0), (0.0, 3.0), (1.0, 3.0))), LINE, DOTS),
    (0.0, 3.0),
    (0.0, 3.0),
    xs=((0.0, HOSTILE), (2.0, "now 1 GiB")),
    ys=((0.0, "0"), (3.0, HOSTILE)),
    marked="now 1 GiB",
)
BARS = Bars(HOSTILE, (HOSTILE, "B"), (Piece("after", (1.0, None), (0.5, None), (HOSTILE, "")),), 2.0, 1.0)


def words(page):
    return [text.strip() for text in page.texts if text.strip()]


def test_names_stay_text():
    """A model, a store or a reason that is markup is written as it is, in labels, names and tips alike."""
    for drawn, times in ((charts.draw(CHART), 4), (charts.draw_bars(BARS), 2)):
        page = Page(drawn)
        assert words(page).count(HOSTILE) == times
        assert page.all("svg")[0]["aria-label"] == HOSTILE
        assert page.all("script", "img", "style") == []


def test_a_drawing_brings_nothing_but_its_marks():
    """No style, script, id, comment or address: the page's policy forbids the first two, ids would stand twice."""
    for drawn in (charts.draw(CHART), charts.draw_bars(BARS)):
        page = Page(drawn)
        assert {tag for tag, _, _ in page.elements} <= {"svg", "g", "path", "text", "title", "circle", "rect"}
        assert [attrs for _, attrs, _ in page.elements if {"style", "id", "href", "onclick"} & set(attrs)] == []
        assert re.findall("<!|https?:", drawn) == []


def test_series_labels_and_tips_are_drawn():
    """A line breaks at what is missing, a single mark is a dot, and the marked label has its line."""
    page = Page(charts.draw(CHART))
    groups = [attrs.get("class") for attrs in page.all("g")]
    assert {"off", "fetch", "mark"} <= set(groups)
    lines = [attrs for tag, attrs, within in page.elements if tag == "path" and "line reactive" in attrs["class"]]
    assert len(lines) == 3
    assert [attrs["r"] for attrs in page.all("circle")] == ["3.0", "3.0"]
    assert {"why", "now 1 GiB", "0"} <= set(words(page))
    assert sum("major" in attrs["class"] for attrs in page.all("path")) == 1


def test_what_a_value_may_be_off_by_is_a_bracket():
    """Only where it is known."""
    page = Page(charts.draw_bars(BARS))
    assert sum(attrs.get("class") == "ci" for attrs in page.all("g")) == 1
    assert "against" in page.all("svg")[0]["class"]


def test_the_same_is_drawn_once(monkeypatch):
    """Equal charts share a drawing; another one is drawn."""
    drawn, real = [], charts.pygal.XY
    monkeypatch.setattr(charts.pygal, "XY", lambda **options: drawn.append(options) or real(**options))
    one, same, other = (Chart(label, (LINE,), (0.0, 3.0), (0.0, 3.0)) for label in ("once", "once", "another"))
    assert charts.draw(one) is charts.draw(same)
    assert charts.draw(other) != charts.draw(one)
    assert len(drawn) == 2


WITH_LXML = """
import sys, types
from xml.etree import ElementTree
lxml = sys.modules["lxml"] = types.ModuleType("lxml")
lxml.etree = sys.modules["lxml.etree"] = types.ModuleType("lxml.etree")
from tiertune_agent.web import charts
from pygal.etree import etree
assert etree._lxml_etree is lxml.etree
assert etree._etree is ElementTree
"""


def test_trees_are_the_standard_librarys():
    """pygal takes lxml's where somebody else has it installed: what changes them afterwards could not change those."""
    subprocess.run([sys.executable, "-c", WITH_LXML], check=True, timeout=60)
