"""What readers of the page share: one render of each look, and what is read out of a window once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.agents import client_of, looks_of, pass_windows
from agent.fakes import START, FakeStore, after, propose, remote_window, window
from tiertune_agent.records import Target
from tiertune_agent.tuners.base import Proposal, TypicalCandidate
from tiertune_agent.web import charts, figures, look, overview, page
from tiertune_agent.web.look import POINTS
from tiertune_agent.web.signing import COOKIE

pytestmark = pytest.mark.slow


@pytest.fixture
def rendered(monkeypatch):
    """Grows by one with every render."""
    looks, real = [], page.overview
    monkeypatch.setattr(page, "overview", lambda seen: looks.append(seen) or real(seen))
    return looks


@pytest.fixture
def looks(agent, clock):
    return looks_of(agent, clock)


class TestRenders:
    def test_a_second_tab_renders_nothing_anew(self, http, rounds, rendered):
        """Whole pages and their live parts, signed in or not, are made of the one render of a look."""
        rounds(1)
        texts = [http.get(path).text for path in ("/", "/live", "/live", "/")]
        assert len(rendered) == 1
        assert texts[0] == texts[3]
        assert texts[1].strip() in texts[0]

    def test_who_reads_shows_at_once(self, http, rounds, rendered):
        """Only who has signed in may sign out, though both see the same figures."""
        rounds(1)
        stranger = http.get("/").text
        http.cookies.set(COOKIE, "anything")
        known = http.get("/").text
        assert "Sign out" not in stranger
        assert "Sign out" in known
        assert len(rendered) == 1

    def test_readers_at_the_same_time_wait_for_one_render(self):
        """Who comes while a look is rendered gets what comes of it."""
        made, second_in = [], Event()

        def make(seen):
            made.append(seen)
            if len(made) > 1:
                second_in.set()
            second_in.wait(0.2)  # as long as nobody else comes in
            return f"text {len(made)}"

        shared = page.once(make)
        with ThreadPoolExecutor(4) as readers:
            assert set(readers.map(shared, ["look"] * 4)) == {"text 1"}
        assert shared("next look") == "text 2"

    def test_what_has_happened_is_rendered(self, http, agent, rounds, clock, rendered):
        """A window, a decision, an incident, and what an operator commands each show in the next look."""
        rounds(1)
        shown = [http.get("/live").text]

        def happened(words):
            clock.advance(1)
            shown.append(http.get("/live").text)
            assert words in shown[-1]
            assert words not in shown[-2]
            assert len(rendered) == len(shown)

        rounds(1)
        happened("20.0 k in the last")
        wish = Proposal("tiers.dram.capacity_bytes", 8 << 30, 6 << 30, "it held at most 4.8 GiB")
        propose(agent.history, "tier_size", Target("host-a", "dram"), wish)
        happened("it held at most 4.8 GiB")
        agent.history.journal.tell_incidents({("store_unreachable", "host-a"): "connection refused"}, START)
        happened("connection refused")
        for path, body, words in (
            ("freeze", {"reason": "launch day"}, "launch day"),
            ("decisions/1/reject", {}, '<li class="rejected">'),
            ("unfreeze", {}, "Changes</span> allowed"),
        ):
            assert http.post(f"/api/v1/{path}", json=body).status_code == 200
            happened(words)


class TestDrawings:
    def test_a_look_with_nothing_new_draws_nothing(self, http, rounds, clock, store):
        """Charts are drawn when a window tells something, and not again until the next one does."""
        store.larger_pays()
        rounds(3)
        first = http.get("/live").text
        drawn = charts.draw.cache_info().misses
        clock.advance(2)
        assert http.get("/live").text.count('<svg class="chart') == first.count('<svg class="chart') == 2
        assert charts.draw.cache_info().misses == drawn
        rounds(1)
        clock.advance(1)
        http.get("/live")
        assert charts.draw.cache_info().misses > drawn

    def test_of_many_stores_those_with_most_to_tell_are_drawn(self, agents, agent, clock, monkeypatch):
        """Where fetching costs most; the others' newest figures are in words."""
        monkeypatch.setattr(overview, "DRAWN", 2)
        agents.end()
        speeds = (4e9, 5e7, 1e9, 8e9)  # a fetch takes 25 ms, 2 s, 100 ms, 13 ms; recomputing 0.5 s
        stores = [FakeStore(clock, f"host-{place}", speed) for place, speed in enumerate(speeds)]
        agent = agents(*stores)
        agent.loop.run_once()
        pass_windows(agent, stores, clock, 4)
        shown = overview.overview(looks_of(agent, clock).seen())
        assert [card.told["name"] for card in shown.stores if card.chart] == ["host-1", "host-2"]
        assert [(card.told["name"], card.cost.fetch_s) for card in shown.stores if card.cost] == [
            ("host-0", pytest.approx(0.025)),
            ("host-3", pytest.approx(0.0125)),
        ]
        with client_of(agent) as http:
            told = http.get("/live").text
        assert "losing; 2 in words" in told
        assert told.count("A typical request:") == 2


class TestSumsOfStores:
    def test_a_window_is_added_up_once(self, looks, rounds, clock, monkeypatch):
        """Looks with nothing new read no window, and the next answer's alone are read."""
        read, real = [], look.sums
        monkeypatch.setattr(look, "sums", lambda window: read.append(window.start) or real(window))
        rounds(3)
        looks.seen()
        first = len(read)
        clock.advance(1)
        looks.seen()
        assert len(read) == first
        rounds(1)
        seen = looks.seen()
        assert set(read[first:]) == {after(seconds=45)}
        assert figures.added(one.sums for one in seen.stores.values()).prompt_tokens == 40_000

    def test_a_slow_answer_hides_no_later_window(self, looks, agent, store, clock, rounds):
        """Its window begins as late as it came, after the start of the next one."""
        rounds(1)
        store.get_tuning = lambda request: clock.advance(18) or FakeStore.get_tuning(store, request)
        rounds(1)
        del store.get_tuning
        looks.seen()
        clock.advance(1)
        store.traffic(10)
        agent.loop.run_once()
        assert figures.added(one.sums for one in looks.seen().stores.values()).prompt_tokens == 30_000

    def test_a_store_that_tells_nothing_new_is_left_alone(self, agents, store, other, clock):
        """Of two stores one goes silent: its sums are the same object, until its windows are too old."""
        agents.end()
        agent = agents(store, other)
        looks, seen = looks_of(agent, clock), []
        for other.up in (True, True, True, False):
            pass_windows(agent, (store, other), clock)
            seen.append(looks.seen())
        assert seen[3].stores["host-b"].sums is seen[2].stores["host-b"].sums
        assert seen[3].stores["host-a"].sums is not seen[2].stores["host-a"].sums
        clock.advance(POINTS * 15)
        assert looks.seen().stores["host-b"].sums.hits == {}

    def test_a_store_that_left_and_is_back_shows_what_it_told_before(self, agents, store, other, clock):
        """Its address was not listed for a while, as when a file is edited twice: its windows are those of before."""
        agents.end()
        agent = agents(store, other)
        looks, everyone = looks_of(agent, clock), agent.history.named
        agent.loop.run_once()
        pass_windows(agent, (store, other), clock, 3)
        before = looks.seen().stores["host-b"].sums
        agent.history.named = lambda: {url for url in everyone() if store.name in url}
        clock.advance(1)
        assert set(looks.seen().stores) == {"host-a"}
        agent.history.named = everyone
        clock.advance(1)
        assert looks.seen().stores["host-b"].sums == before
        assert before.prompt_tokens == 30_000

    def test_a_clock_that_was_ahead_for_an_hour_hides_nothing(self, looks, agent, clock, rounds):
        """What it dated into the future is no part of what was lately, and what is lately is all there."""
        rounds(3)
        clock.advance(3600)
        rounds(2)
        assert looks.seen().stores["host-a"].steps[-1].start > after(hours=1)
        clock.advance(-3600)
        for _ in range(2):  # the first look finds nothing later than what it knows, and forgets that
            rounds(1)
            seen = looks.seen()
        told = agent.history.measured.fleet_windows(["host-a"], seen.since, seen.now)
        steps = seen.stores["host-a"].steps
        assert [step.start for step in steps] == sorted({window.start for window in told})
        assert len(steps) > 3

    def test_costs_of_a_silent_store_stand_as_a_window_grows_too_old(self, looks, rounds, store, clock):
        """Fetching is off: what requests found before it was is known between its answers too."""
        rounds(1)
        store.by_hand("tiers.remote.fetch", "off")
        rounds(3)
        before = looks.seen().stores["host-a"].costs
        clock.advance((POINTS - 4) * 15)
        assert looks.seen().stores["host-a"].costs == before
        clock.advance(1)
        assert looks.seen().stores["host-a"].costs == before[1:]
        assert len(before) == 4

    def test_a_window_without_requests_costs_what_a_typical_one_does(self):
        """At the window's own estimate; where none is known, it is left out of the line."""
        idle = remote_window(0, bandwidth=1e9, age=1.0, t0=0.5)
        assert figures.cost(idle) is None
        cost = figures.cost(idle, TypicalCandidate(10, 2e9, 4.0))
        assert cost == figures.Cost(after(seconds=15), fetch_s=2.5, recompute_s=4.0)

    def test_a_prompt_counts_when_it_is_looked_up_first(self):
        """Where prefill and decode are apart, decode finds what prefill has just stored: no hit, as on dashboards."""
        prompts = {f"prompt_tokens_total{{stage={stage}}}": 900.0 for stage in ("prefill", "decode")}
        hits = {
            f"tier_lookup_tokens_total{{result=hit,stage={s}}}": n for s, n in (("prefill", 300.0), ("decode", 900.0))
        }
        asked, found = (window(tier, told, namespace="n") for tier, told in (("", prompts), ("dram", hits)))
        whole = figures.added(map(figures.sums, (asked, found)))
        assert (whole.found_tokens, whole.prompt_tokens) == (300.0, 900.0)
        assert whole.hits["dram"] == 1200.0, "of what the tier was asked"
        assert whole.busy
        assert not figures.added(()).busy


def a_window(number, tier, tokens, kind):
    values = {"prompt_tokens_total": 7.0 * tokens, f"tier_lookup_tokens_total{{result={kind}}}": float(tokens)}
    return window(tier, values, number, store=f"host-{number % 3}")


WINDOWS = st.lists(
    st.builds(
        a_window,
        st.integers(0, 40),
        st.sampled_from(["", "dram", "remote"]),
        st.integers(0, 10**6),
        st.sampled_from(["hit", "miss"]),
    ),
    max_size=20,
)


@given(WINDOWS, WINDOWS)
def test_sums_of_sums_are_those_of_all(some, others):
    """However windows are put together before, all of them add up to the same."""
    parts = [figures.added(map(figures.sums, each)) for each in (some, others)]
    whole, at_once = figures.added(parts), figures.added(map(figures.sums, [*some, *others]))
    assert whole == at_once
    assert whole.prompt_tokens == sum(one.total("prompt_tokens_total") for one in [*some, *others] if not one.tier)
    for tier in ("dram", "remote"):
        here = [one for one in [*some, *others] if one.tier == tier]
        for told, result in ((whole.hits, "hit"), (whole.misses, "miss")):
            assert told.get(tier, 0.0) == sum(one.total("tier_lookup_tokens_total", result=result) for one in here)
