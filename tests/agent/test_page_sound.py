"""The page is sound: nothing on it can run or call away, and it is strict HTML."""

import re
from collections import Counter
from itertools import pairwise

import pytest

from agent.html import Page
from tiertune_agent.web.page import HERE


class TestSafety:
    def test_hostile_names_stay_text(self, shown):
        """Names, reasons and figures that are markup are shown as they are written, and make no element."""
        page = Page(shown["hostile"][0])
        assert page.text.count("<script>alert('x')</script>") > 10
        assert "{{ 7*7 }}" in page.text
        assert not [name for _, attrs, _ in page.elements for name in attrs if name.startswith("on")]
        assert {attrs["src"].partition("?")[0] for attrs in page.all("img")} == {"/static/icon.svg"}

    @pytest.mark.parametrize("path", ["/", "/live"])
    def test_browsers_are_told_to_run_nothing_else(self, http, path):
        """The content policy allows this origin's files alone, no inline script or style, no frame."""
        headers = http.get(path).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"

    def test_nothing_comes_from_elsewhere(self, shown):
        """Every address on the page and in its files is a path of this agent."""
        page = Page(shown["busy"][0])
        addresses = [
            attrs[name] for _, attrs, _ in page.elements for name in ("src", "href", "action") if name in attrs
        ]
        assert addresses
        assert all(re.match(r"[/#](?!/)", address) for address in addresses)
        for path in (HERE / "static").iterdir():
            source = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|@import|url\(|//\w+\.\w", source), path.name

    def test_every_address_answers(self, look, http):
        """No link or file of the page leads to nothing; browsers also ask for /favicon.ico."""
        page = look()
        local = {attrs[name] for _, attrs, _ in page.elements for name in ("src", "href") if name in attrs}
        for address in [*local, "/favicon.ico"]:
            if not address.startswith("#"):
                assert http.get(address).status_code == 200, address

    def test_files_have_their_types(self, http):
        """Style, script and icon are served as what they are."""
        types = {
            name: http.get(f"/static/{name}").headers["content-type"] for name in ("page.css", "page.js", "icon.svg")
        }
        assert [kind.partition(";")[0] for kind in types.values()] == ["text/css", "text/javascript", "image/svg+xml"]

    @pytest.mark.parametrize("name", ["page.html", "..%2fpage.py", "%2e%2e/page.py", ".hidden"])
    def test_only_the_pages_files_are_served(self, http, name):
        """Neither templates nor anything outside the folder can be fetched."""
        assert http.get(f"/static/{name}").status_code == 404


class TestStructure:
    @pytest.fixture(params=["empty", "busy", "hostile"])
    def texts(self, request, shown):
        return shown[request.param]

    @pytest.fixture
    def page(self, texts):
        return Page(texts[0])

    def test_head(self, page):
        """A language, a title, a width for phones, both colour schemes, and a reload without scripts."""
        assert page.all("html")[0]["lang"] == "en"
        names = {attrs.get("name"): attrs["content"] for attrs in page.all("meta") if "content" in attrs}
        assert names["viewport"] == "width=device-width, initial-scale=1"
        assert names["color-scheme"] == "light dark"
        refresh = [within for tag, attrs, within in page.elements if attrs.get("http-equiv") == "refresh"]
        assert refresh == [("html", "head", "noscript")]

    def test_ids_are_unique_and_found(self, page):
        """No id stands twice, and every reference to one has its element."""
        ids = Counter(attrs["id"] for _, attrs, _ in page.elements if "id" in attrs)
        assert set(ids.values()) == {1}
        assert {attrs["aria-labelledby"] for attrs in page.all("section") if "aria-labelledby" in attrs} <= set(ids)
        assert {attrs["href"][1:] for attrs in page.all("a") if attrs["href"].startswith("#")} <= set(ids)

    def test_headings_descend_step_by_step(self, page):
        """One h1, and no level is skipped on the way down."""
        levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch(r"h\d", tag)]
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))

    def test_drawings_have_words(self, shown):
        """Every chart and bar says what it shows to those who cannot see it."""
        page = Page(shown["busy"][0])
        charts, bars = page.all("svg"), page.all("meter")
        assert charts
        assert bars
        assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)
        assert all(attrs["aria-label"] for attrs in bars)

    def test_drawings_have_no_style_and_no_script_of_their_own(self, page):
        """The content policy would forbid them: they are styled by class."""
        assert page.all("style") == []
        assert [attrs for _, attrs, _ in page.elements if "style" in attrs] == []
        assert {attrs.get("src", "").partition("?")[0] for attrs in page.all("script")} == {
            "/static/page.js",
            "/static/commands.js",
        }

    def test_the_live_part_is_the_mains_content(self, texts):
        """What the script swaps in is what a reload would show."""
        whole, live = texts
        assert re.search(r"<main[^>]*>\n(.*)</main>", whole, re.DOTALL)[1].strip() == live.strip()

    def test_rows_have_as_many_cells_as_heads(self, texts):
        """Every table of the page is rectangular."""
        tables = re.findall(r"<table.*?</table>", texts[0], re.DOTALL)
        assert tables
        for table in tables:
            widths = {len(re.findall(r"<t[hd]\b", row)) for row in re.findall(r"<tr\b.*?</tr>", table, re.DOTALL)}
            assert len(widths) == 1
