"""The page in Chromium: what an operator clicks happens at the stores, and nothing else does."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.responses import Response

from agent.agents import POLICY, pass_windows
from agent.fakes import SLOW, Clock, FakeStore, fetch, propose
from agent.test_signing import APPROVE, READ, asking, tokens  # noqa: F401 (fixtures)
from e2e.servers import app_served, program
from tiertune_agent.records import Target
from tiertune_agent.run import LOOK_S, Agent
from tiertune_agent.tuners.base import Proposal

pytestmark = [pytest.mark.real, pytest.mark.slow]


TOO_WIDE = """[...document.querySelectorAll("main *, header *, footer *")]
    .filter((one) => !one.closest(".scroll, .unseen") && one.getBoundingClientRect().right > innerWidth)
    .map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`)"""


class Running(Clock):
    """It also goes by itself: the page shares a look by its time."""

    def __init__(self):
        super().__init__()
        self._began = time.monotonic()

    def now(self):
        return super().now() + timedelta(seconds=time.monotonic() - self._began)


@pytest.fixture
def clock():
    return Running()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def serving(agent: Agent, below: str = "") -> Iterator[str]:
    """Its address while it is served, and leads; ``below`` a path of a host, as by a proxy, that has nothing else."""
    ended = threading.Event()

    async def proxied(scope, receive, send):
        ours = scope["path"].startswith(f"{below}/")
        served = agent.served if ours else Response(status_code=404)
        await served({**scope, "path": scope["path"].removeprefix(below)}, receive, send)

    def lead() -> None:
        while not ended.wait(LOOK_S):
            agent.stand()

    leading = threading.Thread(target=lead)
    leading.start()
    try:
        with app_served(proxied) as url:
            yield f"{url}{below}/"
    finally:
        ended.set()
        leading.join()


@contextmanager
def opened(browser: Browser, url: str, **options) -> Iterator[Page]:
    """The page; an error of its scripts fails the test, and whatever its content policy forbids."""
    errors = []
    context = browser.new_context(base_url=url, **options)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto("./")
    yield page
    context.close()
    assert not errors


@pytest.fixture
def page(browser, agent):
    with serving(agent) as url, opened(browser, url) as page:
        yield page


@pytest.fixture
def proposed(agent, store, rounds, policy_file, page):
    """Decision 1 waits for approval: to switch remote fetch off."""
    policy_file.write_text(POLICY.replace("mode: auto", "mode: recommend"))
    store.bandwidth = SLOW
    rounds(2)
    store.clock.advance(1)  # readers share a look for a second: one from before that is over
    expect(page.get_by_role("button", name="Approve …")).to_be_visible()
    return page


def confirm(page: Page, button: str, **fields: str) -> None:
    """Click a command, fill in what it asks for, and confirm it."""
    page.get_by_role("button", name=button).first.click()
    dialog = page.get_by_role("dialog")
    for label, text in fields.items():
        dialog.get_by_label(label).fill(text)
    dialog.get_by_role("button", name=button.removesuffix(" …")).click()
    expect(dialog).to_be_hidden()


def test_an_approval_changes_the_store_and_a_roll_back_sets_it_back(proposed, agent, store):
    """Approve, and remote fetch is off; roll back, and it is on again; both are in the audit with where from."""
    confirm(proposed, "Approve …")
    assert fetch(store) == "off"
    confirm(proposed, "Roll back …")
    assert fetch(store) == "on"
    assert agent.history.decisions.get(1).state == "rolled_back"
    assert [row["what"] for row in agent.history.journal.audited()] == ["rollback", "approve"]
    expect(proposed.get_by_text("rolled back", exact=True).first).to_be_visible()


def test_a_rejection_changes_nothing(proposed, agent, store):
    """The decision ends, and the store stays as it was."""
    confirm(proposed, "Reject …")
    assert agent.history.decisions.get(1).state == "rejected"
    assert (fetch(store), store.tuning["version"]) == ("on", 1)


def test_a_freeze_stops_an_approval_and_says_why(proposed, store):
    """Frozen with a reason, an approval is refused in place; lifted, it is made."""
    confirm(proposed, "Freeze …", Reason="release of Friday")
    expect(proposed.get_by_text("release of Friday").first).to_be_visible()
    proposed.get_by_role("button", name="Approve …").click()
    dialog = proposed.get_by_role("dialog")
    dialog.get_by_role("button", name="Approve").click()
    expect(dialog.get_by_role("alert")).to_contain_text("frozen")
    assert fetch(store) == "on"
    dialog.get_by_role("button", name="Cancel").click()
    expect(proposed.get_by_role("button", name="Unfreeze")).to_be_visible()
    confirm(proposed, "Unfreeze")
    confirm(proposed, "Approve …")
    assert fetch(store) == "off"


def test_a_bypass_reaches_the_store_and_ends(page, rounds, store):
    """Every store answers miss, and then holds again what it held."""
    rounds(1)
    expect(page.get_by_role("button", name="Bypass all stores …")).to_be_visible()
    confirm(page, "Bypass all stores …")
    assert store.tuning["bypass"] is True
    expect(page.get_by_role("button", name="End bypass …")).to_be_visible()
    confirm(page, "End bypass …")
    assert store.tuning["bypass"] is False


class TestByKeyboard:
    @pytest.fixture
    def clock(self):
        """Stands still: a part of the page that grows older is exchanged, and what the focus goes back to is gone."""
        return Clock()

    def test_it_is_enough_and_escape_does_nothing(self, proposed, store):
        """Enter opens the question, Escape leaves it without effect and the focus where it was; Tab, Enter confirm."""
        button = proposed.get_by_role("button", name="Approve …")
        button.focus()
        proposed.keyboard.press("Enter")
        expect(proposed.get_by_role("dialog")).to_be_visible()
        proposed.keyboard.press("Escape")
        expect(proposed.get_by_role("dialog")).to_be_hidden()
        expect(button).to_be_focused()
        assert fetch(store) == "on"
        proposed.keyboard.press("Enter")
        proposed.keyboard.press("Tab")
        expect(proposed.get_by_role("dialog").get_by_role("button", name="Approve")).to_be_focused()
        proposed.keyboard.press("Enter")
        expect(proposed.get_by_role("dialog")).to_be_hidden()
        assert fetch(store) == "off"

    def test_the_focus_outlives_what_it_was_on(self, proposed, clock):
        """A part of the page that is renewed while the question is open has new buttons."""
        button = proposed.get_by_role("button", name="Approve …")
        button.evaluate("(one) => (one.dataset.before = 1)")
        button.focus()
        proposed.keyboard.press("Enter")
        expect(proposed.get_by_role("dialog")).to_be_visible()
        clock.advance(11)  # the decision is older now, and says so
        shown = proposed.locator("#live button", has_text="Approve …")
        expect(shown).not_to_have_attribute("data-before", "1")
        proposed.keyboard.press("Escape")
        expect(proposed.get_by_role("dialog")).to_be_hidden()
        expect(button).to_be_focused()


def test_news_move_neither_the_focus_nor_what_was_scrolled(proposed, agent, clock):
    """A newer decision stands above: the focus stays on its own one's button, a table where it was scrolled to."""

    def wish(tier: str) -> None:
        change = Proposal(f"tiers.{tier}.capacity_bytes", 0, 2, f"of {tier}", {"rows": [{"w" * 60: 1, "v" * 60: 2}]})
        propose(agent.history, "tier_size", Target("host-a", tier), change)

    wish("dram")
    proposed.set_viewport_size({"width": 500, "height": 800})
    proposed.locator("#evidence-2 > summary").click()
    table = proposed.locator("#evidence-2 .scroll")
    table.evaluate("(one) => (one.scrollLeft = 70)")
    proposed.locator("[data-post='api/v1/decisions/2/approve']").focus()
    wish("disk")
    expect(proposed.get_by_text("of disk", exact=True)).to_be_visible()
    expect(proposed.locator("[data-post='api/v1/decisions/2/approve']")).to_be_focused()
    assert table.evaluate("(one) => one.scrollLeft") == 70


@pytest.mark.parametrize(("status", "told"), [(0, "does not answer"), (503, "answers 503: see its log")])
def test_figures_that_are_old_are_told_as_of_when(page, rounds, status, told):
    """The agent is gone, or its database is: by its own clock, not the browser's, until there is another answer."""
    rounds(1)
    measured = page.locator("#now time").text_content()
    page.route("**/live", lambda route: route.fulfill(status=status) if status else route.abort())
    stale = page.locator("#stale")
    expect(stale).to_have_text(f"The agent {told}; trying again. These figures are of {measured} UTC.")
    page.unroute("**/live")
    expect(stale).to_be_hidden()


def test_paper_is_light(browser, agent):
    """Whatever the screen is: browsers print no ground."""
    with serving(agent) as url, opened(browser, url, color_scheme="dark") as page:
        colours = []
        for media in ("screen", "print"):
            page.emulate_media(media=media)
            colours.append(page.evaluate("getComputedStyle(document.body).color"))
        assert colours == ["rgb(230, 236, 238)", "rgb(27, 34, 36)"]


def test_without_scripts_there_are_no_buttons(browser, agent):
    """They would do nothing; the figures are shown."""
    agent.loop.run_once()
    with serving(agent) as url, opened(browser, url, java_script_enabled=False) as page:
        expect(page.locator("#now time")).to_be_visible()
        expect(page.locator("button.command").first).to_be_hidden()


def simulate(store, rounds):
    """Three windows in which a pool of four times the size would have hit more."""
    for _ in range(3):
        store.larger_pays()
        rounds(1)


def test_the_keyboard_opens_what_a_decision_did(page, store, rounds):
    """Enter on the evidence shows the bars with their figures, and they stay open when the page renews itself."""
    store.bandwidth = SLOW
    rounds(10)
    summary = page.locator("#evidence-1 > summary")
    expect(summary).to_contain_text("without it")
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#evidence-1 .compared .axis.y text")).to_have_count(4)
    bars = page.locator("#evidence-1 .compared .column rect[width]")  # all at once: they may be exchanged meanwhile
    widths = bars.evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    promised, before = sorted(width for width in widths if width > 0)
    assert before == pytest.approx(2 * promised, rel=0.02)
    measured = page.locator("#now time").get_attribute("datetime")
    rounds(1)
    expect(page.locator("#now time")).not_to_have_attribute("datetime", measured)
    expect(page.get_by_text("50.0% less (±")).to_be_visible()


def test_a_curve_is_drawn_with_its_sentence(page, store, rounds):
    """The line rises towards the larger size, and the sentence beside it says by how much."""
    simulate(store, rounds)
    card = page.get_by_role("article", name="Curve of host-a dram llama")
    expect(card).to_contain_text("lru hits 30% at 1 GiB; the best simulated, lru at 4 GiB, 40%.")
    dots = [dot.bounding_box() for dot in card.locator(".dot").all()]
    assert dots[0]["x"] < dots[1]["x"]
    assert dots[0]["y"] > dots[1]["y"]


def test_a_chart_of_the_only_store_is_not_blown_up(page, store, rounds):
    """Its letters are as high as those around it: a card alone is as wide as one of two."""
    simulate(store, rounds)
    card = page.get_by_role("article", name="Curve of host-a dram llama")
    expect(card.locator("svg text").first).to_be_visible()
    highest = max(text.bounding_box()["height"] for text in card.locator("svg text").all())
    assert highest <= 1.5 * card.get_by_role("heading").bounding_box()["height"]
    assert card.bounding_box()["width"] < 0.6 * page.locator("main").bounding_box()["width"]


def test_a_bad_edit_of_the_policy_shows_where(page, rounds, policy_file):
    """The place and what to mend stand beside the policy, and the file in force opens by its key."""
    policy_file.write_text("version: 1\nmode: sometimes\n")
    rounds(1)
    section = page.get_by_role("region", name="Policy", exact=True)
    expect(section).to_contain_text("policy.yaml:2:7")
    section.locator("#policy-text > summary").press("Enter")
    expect(section.get_by_text("changes_per_hour: 100")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(browser, agent, store, rounds, scheme):
    """At 390 pixels nothing is cut off at the side, in both colour schemes."""
    simulate(store, rounds)
    store.bandwidth = SLOW
    rounds(10)
    viewport = {"width": 390, "height": 844}
    with serving(agent) as url, opened(browser, url, viewport=viewport, color_scheme=scheme) as page:
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        expect(page.locator("#curves figure, .compared").first).to_be_visible()
        assert page.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize("width", [750, 1000])
def test_a_long_name_is_cut_off_nowhere(browser, agents, clock, width):
    """As long as a store's may be, without a place to break it."""
    store = FakeStore(clock, "n" * 64)
    agent = agents(store)
    store.bandwidth = SLOW
    pass_windows(agent, store, clock, 10)
    with serving(agent) as url, opened(browser, url, viewport={"width": width, "height": 800}) as page:
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        expect(page.locator(".answers th", has_text=store.name).first).to_be_visible()
        assert page.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize("below", ["", "/tiertune"])
def test_a_browser_signs_in_and_commands_as_its_token_may(browser, asking, below):  # noqa: F811
    """Without a token there is a form; one that reads is told what it may not; one that approves may."""
    with serving(asking, below) as url, opened(browser, url) as page:
        for token, allowed in ((READ, False), (APPROVE, True)):
            page.get_by_label("Token").fill(token)
            with page.expect_navigation():  # to its load: before, the page's script does not hear a click
                page.get_by_role("button", name="Sign in").click()
            page.get_by_role("button", name="Freeze …").click()
            dialog = page.get_by_role("dialog")
            dialog.get_by_label("Reason").fill("release")
            dialog.get_by_role("button", name="Freeze").click()
            if allowed:
                expect(dialog).to_be_hidden()
            else:
                expect(dialog.get_by_role("alert")).to_contain_text("eve has the role read; this asks for approve")
                dialog.get_by_role("button", name="Cancel").click()
                page.get_by_role("button", name="Sign out").click()
        for link in page.locator("footer a").all():
            assert page.request.get(urljoin(page.url, link.get_attribute("href"))).ok
        assert {cookie["path"] for cookie in page.context.cookies()} == {below or "/"}
    (row,) = asking.history.journal.audited()
    assert (row["who"], row["what"]) == ("anna", "freeze")
