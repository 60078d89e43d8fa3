"""Dashboards are generated, whole, and ask only for metrics and labels that exist."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from e2e.promql import (
    DASHBOARDS,
    MAYBE_UNFED,
    ROOT,
    RULES,
    UNFED,
    PanelQuery,
    annotation_queries,
    choices,
    concrete,
    groupings,
    panel_queries,
    rules,
    selectors,
)
from tiertune_agent.catalogue import METRICS as AGENT_METRICS
from tiertune_connector.catalogue import METRICS, PREFIX, Metric

CATALOGUE = {metric.name: metric for metric in (*AGENT_METRICS, *METRICS)}
SCRAPE_LABELS = {"job", "instance", "exported_job"}
NAMES = {"fleet", "tiers", "gate", "whatif", "stages", "decisions"}
PANELS = [query for path in DASHBOARDS for query in panel_queries(path)]
QUERIES = PANELS + [query for path in DASHBOARDS for query in annotation_queries(path)]
EXPRESSIONS = sorted(
    {concrete(query.expr) for query in QUERIES}
    | {concrete(selector) for path in DASHBOARDS for _, selector, _ in choices(path)}
    | {rule["expr"] for path in RULES for rule in rules(path)}
)
RECORDED = {rule["record"] for path in RULES for rule in rules(path) if "record" in rule}
VLLM = {
    "vllm:time_to_first_token_seconds": Metric(
        "vllm:time_to_first_token_seconds", "histogram", "", ("model_name", "engine"), (1.0,)
    )
}
"""What dashboards take from vLLM itself."""


def family_of(name: str) -> Metric:
    """The declared family of a series; KeyError for one that nothing exports."""
    if name.startswith("vllm:"):
        return VLLM[re.sub(r"_(bucket|count|sum)$", "", name)]
    family = name.removeprefix(PREFIX)
    assert family != name, f"{name} lacks the prefix"
    for suffix in ("_bucket", "_sum", "_count"):
        histogram = CATALOGUE.get(family.removesuffix(suffix))
        if family.endswith(suffix) and histogram is not None and histogram.kind == "histogram":
            return histogram
    assert CATALOGUE[family].kind != "histogram", f"{name} is a histogram: ask for its _sum, _count or _bucket"
    return CATALOGUE[family]


def labels_of(name: str) -> set[str]:
    """Labels that a series may carry."""
    if name == "up":
        return SCRAPE_LABELS
    if name in RECORDED:
        return set()
    metric = family_of(name)
    return {*metric.labels, *SCRAPE_LABELS, *(["le"] if metric.buckets else [])} | (
        {"store"} if metric in METRICS else set()
    )


def build(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dashboards.build", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_committed_dashboards_are_what_the_builders_make():
    """Regenerating changes no byte of what is generated, and nothing else lies there."""
    result = build("--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.stem for path in DASHBOARDS} == NAMES


def test_check_names_what_is_not_up_to_date_and_what_nobody_makes(tmp_path):
    """A file that differs by one byte is named, exits 1, and is mended without --check; a stray file is named too."""
    copy = tmp_path / "dashboards"
    shutil.copytree(ROOT / "dashboards", copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "json" / "gate.json"
    changed.write_text(changed.read_text() + " ")
    stale = build("--check", cwd=tmp_path)
    assert (stale.returncode, stale.stdout.split(":")[0]) == (1, "dashboards/json/gate.json")
    assert build(cwd=tmp_path).returncode == 0
    assert build("--check", cwd=tmp_path).returncode == 0
    (copy / "json" / "old.json").write_text("{}")
    left = build("--check", cwd=tmp_path)
    assert (left.returncode, "dashboards/json/old.json: no builder" in left.stdout) == (1, True)


def test_no_two_dashboards_share_a_uid_or_a_title():
    """One would replace the other where they are provisioned."""
    documents = [json.loads(path.read_text()) for path in DASHBOARDS]
    for key in ("uid", "title"):
        assert len({document[key] for document in documents}) == len(documents)


@pytest.mark.parametrize("listed", [*UNFED, *MAYBE_UNFED])
def test_queries_known_to_have_no_data_exist(listed):
    """A list of exceptions names nothing that is no more."""
    assert listed in set(map(str, QUERIES))


@pytest.mark.vllm
@pytest.mark.parametrize("name", VLLM)
def test_metrics_taken_from_vllm_are_vllms(name):
    """The installed vLLM declares them under these names."""
    found = list((ROOT / ".venv-engine").glob("lib/python*/site-packages/vllm/v1/metrics/loggers.py"))
    if not found:
        pytest.skip("there is no .venv-engine with vLLM (make setup-engine)")
    assert f'"{name}"' in found[0].read_text()


@pytest.fixture
def document(path):
    """What the file holds."""
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
class TestDashboard:
    def test_survives_the_sdk_s_round_trip(self, document):
        """No key is unknown to the SDK: reading and writing again gives the same document."""
        assert json.loads(JSONEncoder().encode(Dashboard.from_json(document))) == document

    def test_has_unique_ids_titles_and_refs_and_a_stable_uid(self, path, document):
        """Links to panels keep working, a panel is found by its name, and one dashboard replaces its older self."""
        for key in ("id", "title"):
            assert len({panel[key] for panel in document["panels"]}) == len(document["panels"])
        assert document["uid"] == f"tiertune-{path.stem}"
        for panel in document["panels"]:
            refs = [target["refId"] for target in panel.get("targets", [])]
            assert len(set(refs)) == len(refs)
            assert refs or panel["type"] == "row"

    def test_every_panel_follows_the_chosen_data_source_and_explains_itself(self, document):
        """Panels, targets, variables and annotations use ${datasource}; each panel has a description and a unit."""
        queried = [one for one in document["templating"]["list"] if one["type"] == "query"]
        asking = [*queried, *document["annotations"]["list"]]
        for panel in document["panels"]:
            if panel["type"] != "row":
                asking += [panel, *panel["targets"]]
                assert panel["description"].endswith(".")
                assert panel["fieldConfig"]["defaults"]["unit"]
        assert {one["datasource"]["uid"] for one in asking} == {"${datasource}"}

    def test_a_panel_that_is_of_all_stores_says_so_unless_it_is_of_the_agent_s_work(self, document):
        """Whoever chose a store takes what a panel shows for that store's."""
        for panel in document["panels"]:
            asked = [target["expr"] for target in panel.get("targets", []) if "$store" not in target["expr"]]
            names = {name for expression in asked for name, _ in selectors(concrete(expression))}
            if any(not name.startswith(f"{PREFIX}agent_") for name in names):
                assert re.search(r"\b[Oo]f all (stores|engines)", panel["description"]), panel["title"]

    def test_every_line_has_a_legend_of_labels_that_its_query_keeps(self, path, document):
        """No legend shows a raw label set or an empty {{label}}; two lines of one panel are not called the same."""
        for query in (query for query in PANELS if query.dashboard == path.stem):
            assert query.legend, query
            named = set(re.findall(r"{{(\w+)}}", query.legend))
            assert named <= groupings(concrete(query.expr)), query
        for panel in document["panels"]:
            legends = [target["legendFormat"] for target in panel.get("targets", [])]
            assert len(set(legends)) == len(legends), panel["title"]

    def test_offers_data_source_store_and_namespace(self, path, document):
        """The three variables stand in this order: each narrows the ones after it."""
        names = [variable["name"] for variable in document["templating"]["list"]]
        assert names == ["datasource", "store", "namespace"]
        assert [(name, label) for name, _, label in choices(path)] == [("store", "store"), ("namespace", "namespace")]

    def test_shows_every_change_of_the_agent(self, document):
        """Changes and roll backs are annotations at the time of the change, with what was changed as their text."""
        marks = document["annotations"]["list"]
        assert [re.search(r'state="(\w+)"', mark["expr"])[1] for mark in marks] == ["applied", "rolled_back"]
        for mark in marks:
            assert mark["useValueForTime"]
            assert mark["expr"] == mark["target"]["expr"]
            assert mark["expr"].endswith(" * 1000")
            assert set(re.findall(r"{{(\w+)}}", mark["titleFormat"])) <= groupings(concrete(mark["expr"]))

    def test_links_to_the_others_with_time_and_choices(self, document):
        """A dashboard finds the others by the tag that all have."""
        (link,) = document["links"]
        assert (link["type"], link["tags"], document["tags"]) == ("dashboards", ["tiertune"], ["tiertune"])
        assert (link["includeVars"], link["keepTime"]) == (True, True)

    def test_panels_do_not_overlap(self, document):
        """Each cell of the 24 columns belongs to at most one panel."""
        cells = set()
        for panel in document["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not own & cells
            cells |= own


@pytest.mark.parametrize("query", PANELS, ids=str)
def test_rates_follow_the_panel_s_resolution(query: PanelQuery):
    """Every range in a panel is $__rate_interval, or all the time shown where only one value is; never a fixed one."""
    assert set(re.findall(r"\[(.*?)\]", query.expr)) <= {"$__range" if query.instant else "$__rate_interval"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_queries_ask_only_for_metrics_and_labels_that_are_exported(expression: str):
    """Each query parses; each metric is in a catalogue; each label matched or kept is one that its metrics carry."""
    known: set[str] = set()
    for name, labels in selectors(expression):
        known |= labels_of(name)
        assert labels <= labels_of(name), f"{name}: {labels - labels_of(name)}"
    assert groupings(expression) <= known


@pytest.mark.parametrize("expression", sorted({concrete(query.expr) for query in PANELS}))
def test_no_panel_rates_a_gauge_or_reads_a_counter_bare(expression: str):
    """rate() is applied to counters and histograms, and to all of them."""
    for name, _ in selectors(expression):
        gauge = name in RECORDED or family_of(name).kind == "gauge"
        # The agent's decisions are few: a rate would miss the first of each kind.
        shown_as_count = name == f"{PREFIX}agent_decisions_total"
        own = (
            name == f"{PREFIX}whatif_tokens_total" and f"and on (store, namespace, capacity_bytes) {name}" in expression
        )
        assert (f"rate({name}" in expression) is not (gauge or shown_as_count) or own, name


@pytest.mark.parametrize("query", [query for query in PANELS if "histogram_quantile" in query.expr], ids=str)
def test_no_quantile_is_asked_of_nothing(query: PanelQuery):
    """Where nothing was observed there is no value, instead of NaN."""
    assert re.search(r"\) and \(sum\S* .*_count.*> 0\)$|\) and \(sum\(.*_count.*> 0\)$", query.expr)


@pytest.mark.parametrize("query", [query for query in PANELS if " / " in query.expr], ids=str)
def test_no_ratio_divides_by_zero(query: PanelQuery):
    """What is divided by is more than 0 or absent, never 0; bandwidths are never 0."""
    for place in re.finditer(r" / ", query.expr):
        divisor = query.expr[place.end() :]
        assert re.match(r"(on \(\w*\) group_left \(\) )?\(", divisor) or "fetch_estimate_bytes_per_second" in divisor, (
            query
        )
    assert "> 0)" in query.expr


def test_every_counter_is_called_total_and_no_gauge_is():
    """The catalogue keeps to what Prometheus does to names: it appends _total to counters."""
    for metric in CATALOGUE.values():
        assert metric.name.endswith("_total") is (metric.kind == "counter"), metric.name
