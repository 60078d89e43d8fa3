"""Alert and recording rules: valid, tested by promtool, in both forms, and each alert with a runbook that is there."""

import json
import re
import subprocess

import pytest
import yaml

from dashboards.alerting import GROUPS
from dashboards.prometheus import prometheus_rule
from dashboards.rules import LOOK_BACK, Alert, Group, grown
from e2e.promql import DASHBOARDS, ROOT, RULES, rules, selectors
from e2e.servers import program
from tiertune_agent.catalogue import METRICS as AGENT_METRICS
from tiertune_agent.collector.roster import NAME_PROBLEM
from tiertune_agent.incidents.watch import TROUBLES
from tiertune_agent.records import State
from tiertune_connector.catalogue import METRICS, PREFIX
from tiertune_connector.tiers.breaker import STATES

ALERTS = [rule for path in RULES for rule in rules(path) if "alert" in rule]
RECORDS = [rule["record"] for path in RULES for rule in rules(path) if "record" in rule]
TESTS = sorted((ROOT / "dashboards" / "alerts").glob("*.test.yaml"))
CASES = [case for path in TESTS for case in yaml.safe_load(path.read_text())["tests"]]
RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(RUNBOOKS.glob("TierTune*.md"))
KNOWN = {PREFIX + metric.name for metric in (*METRICS, *AGENT_METRICS)} | set(RECORDS) | {"up"}
QUERY = re.compile(r"\btiertune[_:]\w+|^up\b")
BOARDS = [json.loads(path.read_text()) for path in DASHBOARDS]
PANELS = {board["title"]: {panel["title"] for panel in board["panels"]} for board in BOARDS}
DASHBOARD = re.compile(r"\*(TierTune: [^*]+)\*((?:(?!\*TierTune:|\n\n|\n- |\n\d\. ).)*)", re.DOTALL)
"""The name of a dashboard, and what follows it up to the next, or to the end of its item."""
WANTED = {
    "AgentStuck",
    "CapacityNotEffective",
    "CorruptChunks",
    "CountersStale",
    "NetworkSaturated",
    "RemoteSlowerThanRecompute",
    "RollbackHappened",
    "StoreDown",
    "TenantOverQuota",
    "Thrash",
    "TierDead",
    "TierServerDead",
    "TierSilent",
    "WriteBehindDropping",
    "YoungChunksEvicted",
}


def promtool(*arguments: object) -> None:
    result = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def asked(label: str, metric: str) -> set[str]:
    """The values of a label that alerts look for in a metric."""
    found = re.findall(rf'{metric}\{{[^}}]*?\b{label}(?:=|=~|!~)"([\w|]+)"', "\n".join(rule["expr"] for rule in ALERTS))
    return {value for values in found for value in values.split("|")}


@pytest.mark.real
@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_prometheus_accepts_the_rules(path):
    """Every rule file passes promtool, its warnings included."""
    promtool("check", "rules", "--lint-fatal", path)


@pytest.mark.real
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_rules_do_what_their_tests_say(path):
    """promtool evaluates every rule on series made for it, firing and not firing."""
    promtool("test", "rules", path)


def test_every_fault_that_operators_are_to_hear_of_has_an_alert():
    """None is missing, and none was added without a page and tests in mind."""
    assert {rule["alert"].removeprefix("TierTune") for rule in ALERTS} == WANTED


@pytest.mark.parametrize("name", RECORDS)
def test_every_recording_rule_is_tested_on_a_value(name):
    """The test files have a moment when it has one."""
    tested = {case["expr"] for test in CASES for case in test.get("promql_expr_test", []) if case["exp_samples"]}
    assert name in tested


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
class TestAlert:
    def test_is_tested_firing_and_quiet(self, rule):
        """The test files have a moment when it fires and one when it does not."""
        cases = [case for test in CASES for case in test.get("alert_rule_test", [])]
        fired = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]}
        assert fired == {True, False}

    def test_says_what_how_bad_and_where_to_read_on(self, rule):
        """CamelCase name, a severity, a summary of one line, a description, and a time to settle."""
        assert re.fullmatch(r"TierTune([A-Z][a-z]+)+", rule["alert"])
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert "\n" not in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["for"]

    def test_has_a_runbook_of_three_parts(self, rule):
        """runbook_url is a page in the repository: what it means, how to see it (with a query), what to do."""
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.stem == rule["alert"]
        text = page.read_text()
        assert text.startswith(f"# {rule['alert']}\n")
        means, sees, does = re.split(r"\n## .*\n", text)[1:]
        headings = [line for line in text.splitlines() if line.startswith("## ")]
        assert headings == ["## What it means", "## How to see it", "## What to do"]
        assert f"Severity: {rule['labels']['severity']}." in text
        assert "tiertune" in sees
        assert "`" in sees
        assert means.strip()
        assert re.search(r"^1\. ", does, flags=re.MULTILINE)

    def test_is_in_the_table_of_alerts(self, rule):
        """docs/alerts.md tells its name, severity, time and summary, as they are."""
        summary = rule["annotations"]["summary"]
        for label in ("store", "tier", "server", "instance", "kind", "tuner"):
            text = "ADDRESS" if label == "instance" else label.upper()
            summary = summary.replace(f"{{{{ $labels.{label} }}}}", text)
        name, severity = rule["alert"], rule["labels"]["severity"]
        row = f"| [{name}](runbooks/{name}.md) | {severity} | {rule['for']} | {summary} |"
        assert row in (ROOT / "docs/alerts.md").read_text().splitlines(), row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
class TestRunbook:
    def test_asks_for_metrics_that_are_exported(self, page):
        """Every query on the page is PromQL, and each metric in it is declared or recorded."""
        queries = [code for code in re.findall(r"`([^`]+)`", page.read_text()) if QUERY.search(code)]
        assert queries
        for query in queries:
            for name, _ in selectors(query):
                assert re.sub(r"_(bucket|sum|count)$", "", name) in KNOWN, query

    def test_shows_a_single_event_that_its_alert_tells(self, page):
        """An alert of a counter's first event is not looked into with increase, which knows none of it."""
        (rule,) = (rule for rule in ALERTS if rule["alert"] == page.stem)
        first = re.match(r"sum by \([^)]*\) \(\n  \((\w+)[^\n]* unless last_over_time", rule["expr"])
        assert first is None or f"increase({first[1]}" not in page.read_text()

    def test_names_panels_that_are_there(self, page):
        """A panel in bold after a dashboard's name is one of that dashboard."""
        for dashboard, text in DASHBOARD.findall(page.read_text()):
            for panel in re.findall(r"\*\*([^*]+)\*\*", text):
                assert " ".join(panel.split()) in PANELS[dashboard], dashboard


def test_no_runbook_is_left_of_an_alert_that_is_gone():
    """Every page belongs to an alert."""
    assert {page.stem for page in PAGES} == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_kubernetes_gets_the_same_rules(path):
    """Each rule file has a PrometheusRule whose groups are equal to its own."""
    document = yaml.safe_load((ROOT / "dashboards/kubernetes" / path.name.replace(".rules.", ".")).read_text())
    assert (document["apiVersion"], document["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert re.fullmatch(r"[a-z][a-z0-9-]*", document["metadata"]["name"])
    assert document["spec"] == yaml.safe_load(path.read_text())


def test_no_file_is_left_that_nothing_builds():
    """The folder for Kubernetes has one object for each rule file."""
    assert len(list((ROOT / "dashboards/kubernetes").iterdir())) == len(RULES)


def test_texts_survive_yaml():
    """Quotes, colons, several lines and long lines come back as they were."""
    nasty = Alert("A", "info", "1m", "up\n  == 0", 'it\'s: "so"', "long and: 'quoted' " * 20)
    text = prometheus_rule("x", "alerting", [Group("g", (nasty,))])
    (group,) = yaml.safe_load(text)["spec"]["groups"]
    assert group["rules"] == [nasty.document()]
    assert max(map(len, text.splitlines())) <= 132


def test_a_first_event_counts_as_growth():
    """A counter that appears with its first event is in the answer: increase alone would miss it."""
    assert "(x unless last_over_time(x[6h:5m] offset 5m))" in grown("x", "5m", "store")


def test_what_hours_say_of_all_stores_is_not_asked_all_the_time():
    """Every store has lookups: what each found in hours takes seconds to look through, which others would wait for."""
    hourly = {
        (group.name, group.interval)
        for group in GROUPS
        for rule in group.rules
        if f"[{LOOK_BACK}:" in rule.expr and "tier_lookup_tokens_total" in rule.expr
    }
    assert hourly == {("tiertune-silence", "5m")}


def test_values_that_rules_look_for_exist():
    """A rule on a state or kind that nothing has would never fire."""
    assert asked("state", "tier_health") == {"dead"} <= set(STATES)
    assert asked("kind", "agent_incidents") <= {*TROUBLES, NAME_PROBLEM}
    assert asked("state", "agent_decisions_total") <= {str(state) for state in State}
    assert sum(len(group.rules) for group in GROUPS) == len(ALERTS)
