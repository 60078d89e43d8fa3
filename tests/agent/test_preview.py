"""The preview of the dashboards: what it asks, what it draws, and that it says so where it cannot."""

import math
import socket
from itertools import pairwise

import httpx
import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from agent.html import Page
from tiertune_agent.preview import plot
from tiertune_agent.preview.commands import pattern
from tiertune_agent.preview.documents import ORDER, Board, Mark, Panel, Target, boards, filled, named
from tiertune_agent.preview.drawn import Legend, Selection, page, variables
from tiertune_agent.preview.page import application, rendered
from tiertune_agent.preview.plot import Frame
from tiertune_agent.preview.prometheus import Prometheus, PrometheusError, Series
from tiertune_agent.preview.units import figure, moments, ticks
from tiertune_agent.web.charts import draw

NOW = 1_700_000_000.0
HERE = "http://127.0.0.1:7430"
CHOICE = Selection(NOW, 600.0)
FRAME = Frame(0.0, 100.0, 10.0, 500.0, 200.0)
HOSTILE = "</title><script>alert(1)</script>\"'{{ 7*7 }}"


class FakePrometheus:
    """Answers every query with the same rows; keeps what it was asked."""

    def __init__(self, rows=(), *, refuses=""):
        self.rows, self.refuses, self.asked = rows, refuses, []

    def __call__(self, request):
        path, asked = request.url.path.removeprefix("/api/v1/"), dict(request.url.params)
        if path == "targets":
            return httpx.Response(200, json=_good({"activeTargets": [{"scrapeInterval": "15s"}]}))
        self.asked.append(asked)
        if self.refuses and self.refuses in asked["query"]:
            return httpx.Response(400, json={"status": "error", "error": "parse error: it is refused"})
        result = [self._row(labels, values, path) for labels, values in self.rows]
        return httpx.Response(200, json=_good({"result": result}))

    @staticmethod
    def _row(labels, values, path):
        points = [[NOW - 600 + 60 * place, str(value)] for place, value in enumerate(values)]
        return {"metric": labels, "value": points[-1]} if path == "query" else {"metric": labels, "values": points}

    def source(self):
        return Prometheus("http://prometheus", httpx.MockTransport(self))


def _good(data):
    return {"status": "success", "data": data}


def shown(panel, rows):
    board = Board("b", "TierTune: b", "", (panel,), ())
    fake = FakePrometheus(rows)
    return page(board, fake.source(), CHOICE, 15.0).panels[0], fake


def panel(kind="timeseries", expr="up", *, instant=False, **more):
    return Panel(1, kind, "A panel", 0, 0, 12, 8, targets=(Target(expr, "{{tier}}", instant),), **more)


# -- documents


def test_the_committed_dashboards_are_read_in_the_order_of_reading():
    """The overview comes first; every panel has a query and a kind that can be drawn."""
    found = boards()
    assert [board.name for board in found] == list(ORDER)
    drawn = [panel for board in found for panel in board.panels if panel.kind != "row"]
    assert {panel.kind for panel in drawn} == {"timeseries", "stat", "state-timeline", "bargauge", "trend"}
    assert all(panel.targets and panel.description for panel in drawn)


def test_a_folder_without_dashboards_is_an_error(tmp_path):
    """It is named."""
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        boards(tmp_path)


def test_variables_are_put_in_whichever_way_they_are_written():
    """Plain, in braces, with a format; one that nobody knows is an error, not an empty word."""
    values = {"store": "a|b", "__rate_interval": "60000ms"}
    assert filled('x{s=~"$store|fleet"}[$__rate_interval]', values) == 'x{s=~"a|b|fleet"}[60000ms]'
    assert filled("${store:regex} ${store}", values) == "a|b a|b"
    with pytest.raises(KeyError):
        filled("$other", values)


def test_a_legend_has_its_labels_put_in():
    """One that a series lacks leaves nothing behind."""
    assert named("{{store}} {{ tier }}: x", {"store": "a", "tier": "dram"}) == "a dram: x"
    assert named("{{store}} {{tier}}", {"tier": "dram"}) == "dram"


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
    ],
)
def test_figures_have_few_digits_and_their_unit(value, unit, text):
    """As Grafana would write them, or nearly so."""
    assert figure(value, unit) == text


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.sampled_from(["bytes", "s", "percentunit", "none"]))
def test_ticks_hold_all_values_and_are_few(low, span, unit):
    """Ascending, from below the lowest to above the highest value, evenly, and never a crowd."""
    high = low + span
    if high - low < abs(low) * 1e-9:
        return  # closer than floating point numbers tell apart
    marks = ticks(low, high, unit)
    assert marks[0] <= low + span * 1e-6
    assert marks[-1] >= high - span * 1e-6
    assert 2 <= len(marks) <= 8
    assert all(a < b for a, b in pairwise(marks))


@given(st.floats(0, 2e9), st.floats(1, 1e7), st.integers(2, 12))
def test_moments_are_round_and_within(start, length, count):
    """No tick lies outside of what is drawn, nor are there more than find room."""
    found = moments(start, start + length, count)
    assert all(start < at <= start + length for at, _ in found)
    assert len(found) <= count + 1


# -- plot


def drawn(series, *, stacked=False, steps=False, marks=()):
    named = [(name, Series({}, points)) for name, points in series.items()]
    return plot.lines(named, FRAME, "none", marks, stacked=stacked, steps=steps)


def test_stacked_lines_stand_on_each_other():
    """The top of the last is the sum; where one has no value, the next stands on what is below."""
    low, high = ((0.0, 1.0), (10.0, 1.0)), ((0.0, 2.0), (10.0, 3.0), (20.0, 4.0))
    made = drawn({"a": low, "b": high}, stacked=True)
    assert [tick.label for tick in made.ys] == ["0", "1", "2", "3", "4"]
    area, line = (series for series in made.series if series.name == "b")
    assert line.points == ((0.0, 3.0), (10.0, 4.0), (20.0, 4.0))
    assert area.filled
    assert area.points == (*line.points, (20.0, 0.0), (10.0, 1.0), (0.0, 1.0))


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
    assert above.ys[0].label == "0"


def test_a_change_is_a_line_across_with_its_words():
    """Those of one colour are one series."""
    made = drawn(
        {"a": ((0.0, 0.0), (100.0, 4.0))}, marks=[(20.0, "blue", "off"), (30.0, "red", "on"), (40.0, "blue", "x")]
    )
    blue, red = made.series[1:]
    assert blue.points == ((20.0, 0.0), (20.0, 4.0), None, (40.0, 0.0), (40.0, 4.0))
    assert (blue.kind, red.kind, red.points) == ("moment n-blue", "moment n-red", ((30.0, 0.0), (30.0, 4.0)))
    tips = [text for text in Page(draw(made)).texts if text in {"off", "on", "x"}]
    assert tips == ["off", "off", "x", "x", "on", "on"]


def test_a_state_lasts_until_the_next_one_and_ends_where_values_end():
    """Equal values are one cell; a gap is empty."""
    series = Series({}, ((0.0, 1.0), (10.0, 1.0), (20.0, 2.0), (60.0, 1.0)))
    cells = plot.cells(series, FRAME.step_s)
    assert [(cell.value, cell.begin, cell.until) for cell in cells] == [
        (1.0, 0.0, 20.0), (2.0, 20.0, 30.0), (1.0, 60.0, 70.0),
    ]  # fmt: skip


def test_states_are_rows_of_areas_with_their_words():
    """One series per word, in its colour; the first row at the top; the word only where it fits."""
    rows = [
        ("a", Series({}, ((0.0, 1.0), (40.0, 2.0)))),
        ("b" * 40, Series({}, ((0.0, 2.0), (10.0, 2.0), (20.0, 2.0)))),
    ]
    made = plot.states(rows, FRAME, {1.0: ("ok", "green"), 2.0: ("slow", "yellow")})
    ok, slow, words = made.series
    assert (ok.kind, ok.name, slow.kind, slow.name) == ("state n-green", "ok", "state n-yellow", "slow")
    assert {y > 0.5 for _, y in ok.points} == {True}
    assert slow.points.count(None) == 1
    assert words.words == ("ok", "slow", "slow")
    assert [(tick.label[:2], tick.whole) for tick in made.ys] == [("a", "a"), ("bb", "b" * 40)]
    assert len(made.ys[1].label) < 40


def test_bars_are_long_as_their_values_and_never_negative():
    """The longest is full, unless a full bar is said to be more."""
    made = plot.bars([("a", 2.0), ("b", 1.0), ("c", -1.0)], "none")
    assert [bar.share for bar in made] == [1.0, 0.5, 0.0]
    (half,) = plot.bars([("a", 0.5)], "percentunit", 1.0)
    assert (half.share, half.label) == (0.5, "50 %")


def test_a_curve_goes_from_its_smallest_to_its_largest_size():
    """Labels come in the order of letters: 128 before 16."""
    made = plot.curve([(128.0, 0.9), (16.0, 0.5)], FRAME, "percentunit", "bytes")
    assert made.series[0].points == ((16.0, 0.5), (128.0, 0.9))
    assert made.x[0] == 0.0


# -- panels


def test_a_rate_reaches_over_four_scrapes_or_a_step():
    """As $__rate_interval does in Grafana: shorter ranges would have holes."""
    assert variables(CHOICE, 5.0, 15.0)["__rate_interval"] == "60000ms"
    assert variables(CHOICE, 120.0, 15.0)["__rate_interval"] == "135000ms"
    assert variables(CHOICE, 120.0, 15.0)["__range"] == "600s"


@pytest.mark.parametrize(
    ("targets", "seconds"),
    [
        ({"tiertune-store": "15s", "tiertune-agent": "30s", "others": "1m30s"}, 30.0),
        ({"others": "1m30s"}, 90.0),
        ({}, 15.0),
    ],
)
def test_the_interval_of_scrapes_is_that_of_stores_and_agents(targets, seconds):
    """Somebody else's slow job does not make rates coarse."""
    active = [{"labels": {"job": job}, "scrapeInterval": each} for job, each in targets.items()]
    answer = httpx.Response(200, json=_good({"activeTargets": active}))
    assert Prometheus("http://prometheus", httpx.MockTransport(lambda _: answer)).scrape_s() == seconds


def test_every_query_asks_for_the_time_that_is_shown():
    """Range queries end now and begin at a whole step; instant ones ask for now."""
    _, fake = shown(panel(), [({"tier": "dram"}, [1, 2])])
    (asked,) = fake.asked
    assert float(asked["end"]) == NOW
    assert float(asked["start"]) % float(asked["step"]) == pytest.approx(0, abs=1e-6)
    _, fake = shown(panel("bargauge", instant=True), [({"tier": "dram"}, [1])])
    assert float(fake.asked[0]["time"]) == NOW


def test_a_number_is_the_last_value_in_its_colour():
    """NaN is no value; below a threshold the colour is that of the step below."""
    told = ((-math.inf, "red"), (0.0, "green"))
    drawn, _ = shown(panel("stat", thresholds=told), [({}, [1, -2, "NaN"])])
    assert (drawn.figure, drawn.colour) == ("-2", "red")
    drawn, _ = shown(panel("stat", thresholds=told), [({}, [1, 0])])
    assert drawn.colour == "green"
    assert drawn.chart.kind == "spark"


def test_states_are_called_by_their_words():
    """The legend names all of them, also those that did not occur."""
    words = {1.0: ("ok", "green"), 2.0: ("dead", "red")}
    drawn, _ = shown(panel("state-timeline", words=words), [({"tier": "dram"}, [1, 1, 2])])
    assert drawn.legends == (Legend("ok", "green"), Legend("dead", "red"))
    assert {series.name for series in drawn.chart.series if series.filled} == {"ok", "dead"}


def test_more_lines_than_find_room_are_counted():
    """Forty names would cover the drawing."""
    drawn, _ = shown(panel(), [({"tier": f"a-tier-of-some-host-{place}"}, [1, 2]) for place in range(40)])
    assert len(drawn.chart.series) == 40
    assert 0 < len(drawn.legends) < 40
    assert drawn.more == 40 - len(drawn.legends)


def test_a_change_is_marked_at_the_time_that_its_value_says():
    """However often it was scraped it is one mark; what happened before is not shown."""
    mark = Mark("Changes", "blue", "changes", "{{store}}: {{change}}", "{{tuner}}")
    board = Board("b", "b", "", (panel(),), (mark,))
    when = (NOW - 60) * 1000
    rows = [({"store": "host-a", "change": "off", "tuner": "t"}, [1000, when, when])]
    made = page(board, FakePrometheus(rows).source(), CHOICE, 15.0)
    assert [(one.at, one.title, one.text) for one in made.moments] == [(NOW - 60, "host-a: off", "t")]
    assert made.panels[0].chart.series[-1].tips[0].endswith(" host-a: off (t)")


def test_a_panel_without_data_says_so_and_one_that_is_refused_says_why():
    """The others are drawn all the same."""
    board = Board("b", "b", "", (panel(expr="bad("), panel()), ())
    fake = FakePrometheus([({"tier": "dram"}, [1, 2])], refuses="bad(")
    made = page(board, fake.source(), CHOICE, 15.0)
    assert "parse error" in made.panels[0].said
    assert made.panels[1].chart
    assert made.with_data == 1
    empty, _ = shown(panel(), [({"tier": "dram"}, ["NaN"])])
    assert empty.said == "no data"


@pytest.mark.parametrize("kind", ["timeseries", "stat", "state-timeline", "bargauge"])
def test_labels_cannot_write_into_the_page(kind):
    """A store's or tenant's name is text, whatever is in it."""
    board = Board("b", HOSTILE, HOSTILE, (panel(kind, words={1.0: (HOSTILE, "green")}),), ())
    made = page(board, FakePrometheus([({"tier": HOSTILE}, [1, 1, 2])]).source(), CHOICE, 15.0)
    html = rendered(made, [board])
    assert "<script" not in html
    assert "49" not in html.split("<main>")[0].split("</style>")[1]


# -- serving and the command


def test_every_dashboard_is_served_and_asked_for_anew():
    """The overview also at /; a page that there is not is 404; nothing may load, run, or call it by another name."""
    fake = FakePrometheus([({"tier": "dram", "capacity_bytes": "1"}, [1, 2])])
    moments = iter([NOW, NOW + 60, *[NOW] * 20])
    with TestClient(application(boards(), fake.source(), CHOICE, lambda: next(moments)), HERE) as http:
        first = http.get("/")
        assert first.status_code == 200
        assert "default-src 'none'" in first.headers["Content-Security-Policy"]
        assert http.get("/fleet").status_code == 200
        assert {NOW, NOW + 60} == {float(asked["end"]) for asked in fake.asked if "end" in asked}
        for name in ORDER:
            assert f'href="{name}"' in http.get(f"/{name}").text
        assert http.get("/nothing").status_code == 404
        assert http.get("/fleet", headers={"Host": "evil.example"}).status_code == 400


def test_while_prometheus_is_away_the_page_says_so():
    """502 with the reason, and the process lives on."""

    def away(request):
        raise httpx.ConnectError("refused", request=request)

    source = Prometheus("http://prometheus", httpx.MockTransport(away))
    with TestClient(application(boards(), source, CHOICE, lambda: NOW), HERE) as http:
        answer = http.get("/")
    assert (answer.status_code, "no Prometheus answers" in answer.text) == (502, True)


@pytest.mark.parametrize("body", ["<html>", "[]", '{"status": "error", "error": "why"}'])
def test_what_is_no_prometheus_is_told(body):
    """Another server on that port is an error with its address or its reason."""
    source = Prometheus("http://other", httpx.MockTransport(lambda _: httpx.Response(200, text=body)))
    with pytest.raises(PrometheusError):
        source.scrape_s()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--prometheus", "localhost:9090"), "no address such as"),
        (("--last", "soon"), "--last"),
        (("--last", "0s"), "--last"),
        (("--until", "tomorrow"), "--until"),
        (("--store", "host-a|("), "--store: 'host-a|(' is no pattern such as host-a|host-b"),
        (("--namespace", "["), "--namespace"),
    ],
)
def test_wrong_words_are_told(tiertune, tmp_path, wrong, words):
    """Exit 2, with what to mend."""
    code, _, err = tiertune("dashboards", "preview", "--out", tmp_path, *wrong)
    assert (code, words in err) == (2, True)


@pytest.mark.parametrize("chosen", ["", "host-a|host-b", r"gpu\.a", 'a"b'])
def test_a_choice_stands_in_a_query_as_it_is_written(chosen):
    """Within its quotes, where a backslash is one of PromQL's own."""
    (matcher,) = promql_parser.parse(f'up{{store=~"{pattern("--store", chosen)}"}}').matchers.matchers
    assert matcher.value == (chosen or ".*")


def test_where_nothing_can_be_written_or_served_is_told(tiertune, tmp_path):
    """Exit 2, before a Prometheus is asked: a file in place of the folder, somebody else's port."""
    (tmp_path / "file").touch()
    code, _, err = tiertune("dashboards", "preview", "--out", tmp_path / "file")
    assert (code, err) == (2, f"--out: {tmp_path}/file: is there, and is no directory\n")
    code, _, err = tiertune("dashboards", "preview", "--out", tmp_path / "file" / "pages")
    assert (code, err) == (2, f"--out: {tmp_path}/file: is there, and is no directory\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = tiertune("dashboards", "preview", "--port", port)
    assert (code, out, err) == (2, "", f"--port {port}: Address already in use: give another one\n")


def test_a_prometheus_that_does_not_answer_is_told(tiertune, tmp_path):
    """Exit 1, with its address; no folder is left behind."""
    out = tmp_path / "pages" / "today"
    code, _, err = tiertune("dashboards", "preview", "--prometheus", "http://127.0.0.1:9", "--out", out)
    assert (code, "http://127.0.0.1:9" in err) == (1, True)
    assert list(tmp_path.iterdir()) == []
