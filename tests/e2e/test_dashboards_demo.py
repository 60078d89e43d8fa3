"""A demo that runs to its end: what it decides, every query of every dashboard on a real Prometheus, and the pages."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from connector.stores import at_best
from e2e.promql import (
    DASHBOARDS,
    MAYBE_UNFED,
    NO_ROLL_BACK,
    UNFED,
    PanelQuery,
    annotation_queries,
    choices,
    concrete,
    panel_queries,
    scrape_config,
)
from e2e.servers import HTTP, Prometheus, program, prometheus, wait_until
from e2e.test_demo import Demo, ended, start  # noqa: F401

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = 66
STEP_S = 2
PANELS = [query for path in DASHBOARDS for query in panel_queries(path)]
SHARES = [query for query in PANELS if query.unit == "percentunit" and query.panel != "KV wait against work"]
MARKS = [query for path in DASHBOARDS for query in annotation_queries(path)]
CHOICES = [(path.stem, *choice) for path in DASHBOARDS for choice in choices(path)]


@dataclass
class Scraped:
    """What Prometheus remembers of a demo that has ended; times in Unix seconds."""

    prometheus: Prometheus
    began: float
    ended: float
    decided: list[dict]
    """The agent's decisions."""

    def rows(self, query: PanelQuery) -> list[list[tuple[float, float]]]:
        """Times and values of each series that has any, with NaN and infinities: those would be drawn wrong."""
        expression = concrete(query.expr, "8s").replace("[1h]", f"[{SECONDS}s]")
        if query.instant:
            found = [[row["value"]] for row in self.prometheus.query(expression, time=self.ended)]
        else:
            answer = self.prometheus.query_range(expression, start=self.began, end=self.ended, step_s=STEP_S)
            found = [row["values"] for row in answer]
        return [[(float(at), float(value)) for at, value in values] for values in found if values]


@dataclass
class Ran:
    """A demo that has ended by itself, and what was seen of it at work."""

    demo: Demo
    out: Path
    began_s: float
    children: int
    shared_memory: list[str]
    scraped: Scraped | None
    """None where there is no Prometheus."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One for all of this file: it takes more than a minute."""
    folder = tmp_path_factory.mktemp("demo")
    demo = Demo(folder, "--seconds", str(SECONDS), "--json", str(folder / "out.json"))
    with contextlib.ExitStack() as stack:
        stack.callback(demo.end)
        run = Ran(demo, folder / "out.json", demo.await_work(), len(demo.children()), demo.shared_memory(), None)
        if shutil.which("prometheus"):
            run.scraped = _scraped(demo, stack)
        demo.process.wait(180)
        yield run


def _scraped(demo: Demo, stack: contextlib.ExitStack) -> Scraped:
    """By a Prometheus that watches the demo until it ends."""
    agent = f"http://127.0.0.1:{demo.port}"
    wait_until(lambda: len(_ask(agent, "fleet")["stores"]) == 2, "the agent knows both stores")
    stores = [store["url"] for store in _ask(agent, "fleet")["stores"]]
    server = stack.enter_context(prometheus(scrape_config(agent, stores)))
    server.wait_targets_up()
    began = ended = time.time()
    decided: list[dict] = []
    while demo.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            decided, ended = _ask(agent, "decisions")["decisions"], time.time()
        with contextlib.suppress(subprocess.TimeoutExpired):
            demo.process.wait(1)
    return Scraped(server, began, ended, decided)


@pytest.fixture(scope="module")
def scraped(ran):
    program("prometheus")
    assert ran.demo.process.returncode == 0, ran.demo.text
    return ran.scraped


def _ask(agent: str, what: str) -> dict:
    return HTTP.get(f"{agent}/api/v1/{what}", timeout=5).json()


def test_the_demo_turns_fetching_off_while_the_remote_is_slow_and_on_again(ran, start):  # noqa: F811
    """The whole loop on real processes: hits in both tiers, right bytes, decisions off then on, and nothing left."""
    assert ran.children >= 7  # two hosts, four players, the agent, and Redis where it is installed
    assert ran.shared_memory == []
    assert ran.demo.process.returncode == 0, ran.demo.text
    ran.demo.assert_nothing_left()
    assert ran.began_s < 20 or at_best(lambda: ended(start("--seconds", "600")), 20, attempts=2)

    document = json.loads(ran.out.read_text())
    assert set(document) >= {"seconds", "requests", "windows", "decisions", "tiers", "gate", "saved_seconds"}
    made = [d for d in document["decisions"] if d["tuner"] == "remote_fetch"]
    assert all(set(d) == {"id", "tuner", "store", "pool", "from", "to", "state", "reason", "at_s"} for d in made)
    off = [d["at_s"] for d in made if (d["from"], d["to"]) == ("on", "off")]
    on = [d["at_s"] for d in made if (d["from"], d["to"]) == ("off", "on")]
    assert any(22 <= at <= 44 for at in off)
    assert any(at > min(at for at in off if at >= 22) for at in on)
    for tier in ("dram", "remote"):
        assert set(document["tiers"][tier]) == {"hit_tokens", "evictions", "resident_bytes", "capacity_bytes"}
        assert document["tiers"][tier]["hit_tokens"] > 0
    assert document["chunks"]["verified"] > 0
    assert document["chunks"]["wrong"] == 0
    assert document["gate"]["won"] > document["gate"]["lost"]
    assert document["saved_seconds"] > 0
    assert document["seconds"] == pytest.approx(SECONDS, abs=10)
    assert document["windows"] > 20
    assert document["requests"] > 100


@pytest.mark.parametrize("query", PANELS, ids=str)
def test_every_query_of_every_panel_returns_data(scraped, query):
    """Of a demo each is answered with series; those that it cannot feed are known, and are answered too."""
    rows = scraped.rows(query)
    if str(query) in UNFED:
        assert rows == [], f"it is fed, though {UNFED[str(query)]}"
    elif str(query) not in MAYBE_UNFED:
        assert rows
    assert all(math.isfinite(value) for points in rows for _, value in points)


@pytest.mark.parametrize("query", SHARES, ids=str)
def test_shares_lie_between_zero_and_one(scraped, query):
    """A part is never more than the whole, whatever moment one looks at."""
    values = [value for points in scraped.rows(query) for _, value in points]
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in values), (min(values), max(values))


@pytest.mark.parametrize("mark", MARKS, ids=str)
def test_every_change_is_an_annotation_at_its_time(scraped, mark):
    """The moments that the query gives are those at which the agent's decisions were applied, or rolled back."""
    moments = {value / 1000 for points in scraped.rows(mark) for _, value in points}
    rolled_back = "rolled_back" in mark.expr
    field = "updated_at" if rolled_back else "applied_at"
    made = [one for one in scraped.decided if one["applied_at"] and (not rolled_back or one["state"] == "rolled_back")]
    if rolled_back and not made:
        assert moments == set(), NO_ROLL_BACK
        return
    seen = [one for one in made if scraped.began < _unix(one[field]) < scraped.ended - 5]
    assert seen
    assert {round(_unix(one[field]), 2) for one in seen} <= {round(moment, 2) for moment in moments}


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(("dashboard", "name", "selector", "label"), CHOICES, ids=lambda one: str(one)[:30])
def test_every_variable_has_values_to_choose_from(scraped, dashboard, name, selector, label):
    """The choices name what is there."""
    matched = {"match[]": concrete(selector), "start": scraped.began, "end": scraped.ended}
    found = scraped.prometheus.get(f"label/{label}/values", **matched)
    assert found == ["host-a", "host-b"] if name == "store" else len(found) == 1


class Page(HTMLParser):
    """What a page draws, by panel; whether it calls anywhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.drawn: dict[str, int] = {}
        self.said: dict[str, str] = {}
        self.elements: list[tuple[str, dict]] = []
        self._title = self._in = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in = dict(attrs).get("class", "") or tag if tag in ("h3", "p") else self._in
        line = tag == "path" and "reactive" in dict(attrs)["class"]  # guides are not
        if tag in ("meter", "circle") or line or (tag == "span" and "style" in dict(attrs)):
            self.drawn[self._title] = self.drawn.get(self._title, 0) + 1

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        self._in = "" if tag in ("h3", "p") else self._in

    def handle_data(self, data):
        if self._in == "h3":
            self._title = data.strip()
        elif self._in == "said":
            self.said[self._title] = data.strip()


def test_the_preview_draws_every_panel_with_data(scraped, tiertune, tmp_path):
    """A page per dashboard, each panel with a drawing of its real result or "no data"; nothing calls out."""
    until = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(scraped.ended))
    command = ("dashboards", "preview", "--prometheus", scraped.prometheus.url, "--out", tmp_path, "--last", "1m")
    code, out, err = tiertune(*command, "--until", until)
    assert code == 0, err
    for path in DASHBOARDS:
        page = Page((tmp_path / f"{path.stem}.html").read_text())
        panels = [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]
        for panel in panels:
            names = {f"{path.stem}: {panel['title']}: {target['refId']}" for target in panel["targets"]}
            if names <= set(UNFED):
                assert page.said[panel["title"]] == "no data"
            elif not names & set(MAYBE_UNFED):
                assert panel["title"] not in page.said, (panel["title"], page.said[panel["title"]])
                assert page.drawn[panel["title"]] > 0
        assert re.search(rf"{path.stem}\.html: \d+ of {len(panels)} panels have data", out)
        assert not {"script", "iframe", "img"} & {tag for tag, _ in page.elements}
        links = [attrs["href"] for tag, attrs in page.elements if "href" in attrs]
        assert {link for link in links if not link.startswith("data:")} == {f"{one.stem}.html" for one in DASHBOARDS}
