"""The preview of the dashboards: what it asks, what it draws, and that it says so where it cannot."""

from pathlib import Path

import httpx
import pytest

from tiertune_agent.network import CallError
from tiertune_agent.preview import prometheus
from tiertune_agent.preview.drawn import ORDER, Selection, boards, drawn, filled, named, rendered, variables, write
from tiertune_agent.preview.prometheus import Prometheus

JSON = Path(__file__).parents[2] / "dashboards" / "json"

NOW = 1_700_000_000.0

CHOICE = Selection(NOW, 600.0)

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


def board(*panels, name="b"):
    return {"title": name, "description": name, "panels": panels}


def paged(*panels, rows=(), refuses=""):
    """What is drawn of these panels, and who was asked."""
    fake = FakePrometheus(rows, refuses=refuses)
    return drawn(board(*panels), fake.source(), CHOICE, 15.0), fake


def shown(panel, rows):
    (made,), fake = paged(panel, rows=rows)
    return made, fake


def panel(kind="timeseries", expr="up", *, instant=False, words=(), colours=((None, "text"),)):
    """As Grafana has it; ``words`` and their colours are of the values 1, 2, ..."""
    told = {str(value): {"text": word, "color": colour} for value, (word, colour) in enumerate(words, 1)}
    thresholds = {"steps": [{"value": value, "color": colour} for value, colour in colours]}
    looks = {"unit": "none", "custom": {}, "mappings": [{"options": told}], "thresholds": thresholds}
    return {
        "type": kind,
        "title": "A panel",
        "description": "",
        "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
        "fieldConfig": {"defaults": looks},
        "targets": [{"expr": expr, "legendFormat": "{{tier}}", "instant": instant}],
    }


# -- documents


def test_the_committed_dashboards_are_read_in_the_order_of_reading():
    """The overview comes first; every panel has a query and a kind that can be drawn."""
    found = boards()
    assert list(found) == list(ORDER)
    assert {path.stem for path in JSON.glob("*.json")} == set(ORDER)
    panels = [panel for board in found.values() for panel in board["panels"] if panel["type"] != "row"]
    assert {panel["type"] for panel in panels} == {"timeseries", "stat", "state-timeline", "bargauge", "trend"}
    assert all(panel["targets"] and panel["description"] for panel in panels)


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
    told = ((None, "red"), (0.0, "green"))
    made, _ = shown(panel("stat", colours=told), [({}, [1, -2, "NaN"])])
    assert (made.figure, made.colour) == ("-2", "red")
    made, _ = shown(panel("stat", colours=told), [({}, [1, 0])])
    assert made.colour == "green"
    assert made.chart.kind == "spark"


def test_states_are_called_by_their_words():
    """The legend names all of them, also those that did not occur."""
    words = (("ok", "green"), ("dead", "red"), ("slow", "yellow"))
    made, _ = shown(panel("state-timeline", words=words), [({"tier": "dram"}, [1, 1, 2])])
    assert made.legends == [("ok", "n-green"), ("dead", "n-red"), ("slow", "n-yellow")]
    ((name, stretches),) = made.rows
    assert name == "dram"
    assert {(one.word, one.colour) for one in stretches} == {("ok", "green"), ("dead", "red")}


def test_every_line_is_named():
    """However many there are: their names are looked at one after the other."""
    made, _ = shown(panel(), [({"tier": f"a-tier-of-some-host-{place}"}, [1, 2]) for place in range(40)])
    assert {series.name for series in made.chart.series} == {name for name, _ in made.legends}
    assert len(made.legends) == 40


def test_a_panel_without_data_says_so_and_one_that_is_refused_says_why(tmp_path):
    """The others are drawn all the same, and counted; a heading is no panel."""
    panels, rows = (panel("row"), panel(expr="bad("), panel()), [({"tier": "dram"}, [1, 2])]
    (_, bad, good), fake = paged(*panels, rows=rows, refuses="bad(")
    assert "parse error" in bad.said
    assert good.chart
    (told,) = write({"b": board(*panels)}, fake.source(), CHOICE, tmp_path)
    assert (told["panels"], told["with_data"]) == (2, 1)
    empty, _ = shown(panel(), [({"tier": "dram"}, ["NaN"])])
    assert empty.said == "no data"


@pytest.mark.parametrize("kind", ["timeseries", "stat", "state-timeline", "bargauge"])
def test_labels_cannot_write_into_the_page(kind):
    """A store's or tenant's name is text, whatever is in it."""
    made, _ = paged(panel(kind, words=((HOSTILE, "green"),)), rows=[({"tier": HOSTILE}, [1, 1, 2])])
    html = rendered({"b": board(name=HOSTILE)}, "b", made, CHOICE)
    assert "<script" not in html
    assert "49" not in html.split("<main>")[0].split("</style>")[1]


# -- the command


@pytest.mark.parametrize(
    ("code", "body", "why"),
    [
        (200, "<html>", "what answers at http://other is no Prometheus"),
        (200, "[]", "what answers at http://other is no Prometheus"),
        (200, '{"status": "success"}', "what answers at http://other is no Prometheus"),
        (404, '{"detail": "Not Found"}', "no Prometheus answers at http://other: it answers 404 Not Found"),
        (200, '{"status": "error", "error": "why"}', "why"),
        (400, '{"status": "error", "error": "why"}', "why"),
    ],
)
def test_what_is_no_prometheus_is_told(code, body, why):
    """Another server on that port, as an agent, is an error with its address; a Prometheus's own has its reason."""
    source = Prometheus("http://other", httpx.MockTransport(lambda _: httpx.Response(code, text=body)))
    with pytest.raises(CallError) as failed:
        source.scrape_s()
    assert str(failed.value) == why


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--prometheus", "localhost:9090"), "write Prometheus's address as http://host:port"),
        (("--last", "soon"), "--last"),
        (("--last", "0s"), "--last"),
        (("--until", "tomorrow"), "--until"),
    ],
)
def test_wrong_words_are_told(tiertune, tmp_path, wrong, words):
    """Exit 2, with what to mend."""
    code, _, err = tiertune("dashboards", "preview", "--out", tmp_path, *wrong)
    assert (code, words in err) == (2, True)


@pytest.mark.parametrize(
    ("below", "why"), [("file", "is there, and is no directory"), ("file/pages", "Not a directory")]
)
def test_where_nothing_can_be_written_is_told(tiertune, tmp_path, monkeypatch, below, why):
    """A file in place of the folder: its path, and no traceback, before anything is drawn."""
    monkeypatch.setattr(prometheus, "Prometheus", lambda _: FakePrometheus().source())
    monkeypatch.setattr("tiertune_agent.preview.drawn.drawn", lambda *_: pytest.fail("drawn"))
    (tmp_path / "file").touch()
    code, _, err = tiertune("dashboards", "preview", "--out", tmp_path / below)
    assert (code, err) == (2, f"--out: {tmp_path / below}: {why}\n")


def test_a_prometheus_that_does_not_answer_is_told(tiertune, tmp_path):
    """Exit 1, with its address, but for the password in it; no folder is left behind."""
    out = tmp_path / "pages" / "today"
    code, _, err = tiertune("dashboards", "preview", "--prometheus", "http://ops:s3cret@127.0.0.1:9", "--out", out)
    assert (code, "http://127.0.0.1:9" in err, "s3cret" in err) == (1, True, False)
    assert list(tmp_path.iterdir()) == []
