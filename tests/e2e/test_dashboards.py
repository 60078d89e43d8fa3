"""Dashboards are generated, whole, and ask only for metrics and labels that exist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from e2e.promql import DASHBOARDS, ROOT, RULES, PanelQuery, concrete, groupings, panel_queries, rules, selectors
from tiertune_agent.catalogue import METRICS as AGENT_METRICS
from tiertune_connector.catalogue import METRICS, PREFIX, Metric

CATALOGUE = {metric.name: metric for metric in (*METRICS, *AGENT_METRICS)}
SCRAPE_LABELS = {"job", "instance", "exported_job"}
QUERIES = [query for path in DASHBOARDS for query in panel_queries(path)]
EXPRESSIONS = [concrete(query.expr) for query in QUERIES] + [rule["expr"] for path in RULES for rule in rules(path)]


def family_of(name: str) -> Metric:
    """The declared family of a series; KeyError for one that nothing exports."""
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
    metric = family_of(name)
    return {*metric.labels, *SCRAPE_LABELS, *(["le"] if metric.buckets else [])} | (
        {"store"} if metric in METRICS else set()
    )


def build(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dashboards.build", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_committed_dashboards_are_what_the_builders_make():
    """Regenerating changes no byte of dashboards/json."""
    result = build("--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert DASHBOARDS


def test_check_names_a_dashboard_that_is_not_up_to_date(tmp_path):
    """A file that differs by one byte is named, exits 1, and is mended without --check."""
    copy = tmp_path / "dashboards"
    (copy / "json").mkdir(parents=True)
    for source in (ROOT / "dashboards").glob("*.py"):
        (copy / source.name).write_text(source.read_text())
    (copy / "json" / "fleet.json").write_text((ROOT / "dashboards/json/fleet.json").read_text() + " ")
    stale = build("--check", cwd=tmp_path)
    assert (stale.returncode, "dashboards/json/fleet.json" in stale.stdout) == (1, True)
    assert build(cwd=tmp_path).returncode == 0
    assert build("--check", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
class TestDashboard:
    def test_survives_the_sdk_s_round_trip(self, path):
        """No key is unknown to the SDK: reading and writing again gives the same document."""
        document = json.loads(path.read_text())
        assert json.loads(JSONEncoder().encode(Dashboard.from_json(document))) == document

    def test_has_unique_ids_and_refs_and_a_stable_uid(self, path):
        """Links to panels keep working, and one dashboard replaces its older self."""
        document = json.loads(path.read_text())
        ids = [panel["id"] for panel in document["panels"]]
        assert len(set(ids)) == len(ids)
        assert document["uid"] == f"tiertune-{path.stem}"
        for panel in document["panels"]:
            refs = [target["refId"] for target in panel.get("targets", [])]
            assert len(set(refs)) == len(refs)
            assert refs or panel["type"] == "row"

    def test_every_panel_follows_the_chosen_data_source_and_explains_itself(self, path):
        """Panels and targets use ${datasource}; each panel has a description."""
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
                assert {source["uid"] for source in sources} == {"${datasource}"}
                assert panel["description"]

    def test_offers_data_source_store_and_namespace(self, path):
        """The three variables stand in this order: each narrows the ones after it."""
        names = [variable["name"] for variable in json.loads(path.read_text())["templating"]["list"]]
        assert names[:3] == ["datasource", "store", "namespace"]

    def test_panels_do_not_overlap(self, path):
        """Each cell of the 24 columns belongs to at most one panel."""
        cells = set()
        for panel in json.loads(path.read_text())["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not own & cells
            cells |= own


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_rates_follow_the_panel_s_resolution(query: PanelQuery):
    """Every range in a panel is $__rate_interval, never a fixed one."""
    assert query.expr.count("[") == query.expr.count("[$__rate_interval]")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_queries_ask_only_for_metrics_and_labels_that_are_exported(expression: str):
    """Each query parses; each metric is in a catalogue; each label matched or kept is one that its metrics carry."""
    known: set[str] = set()
    for name, labels in selectors(expression):
        known |= labels_of(name)
        assert labels <= labels_of(name), f"{name}: {labels - labels_of(name)}"
    assert groupings(expression) <= known


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_no_query_rates_a_gauge_or_reads_a_counter_bare(expression: str):
    """rate() is applied to counters and histograms, and to all of them."""
    for name, _ in selectors(expression):
        gauge = name == "up" or family_of(name).kind == "gauge"
        # The agent's decisions are few: a rate would miss the first of each kind.
        shown_as_count = name == f"{PREFIX}agent_decisions_total"
        assert (f"rate({name}" in expression) is not (gauge or shown_as_count), name


def test_every_counter_is_called_total_and_no_gauge_is():
    """The catalogue keeps to what Prometheus does to names: it appends _total to counters."""
    for metric in CATALOGUE.values():
        assert metric.name.endswith("_total") is (metric.kind == "counter"), metric.name
