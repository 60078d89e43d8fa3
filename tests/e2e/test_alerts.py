"""Alert and recording rules: valid, tested by promtool, and each alert with a runbook that is there."""

import re
import subprocess

import pytest
import yaml

from e2e.promql import ROOT, RULES, rules
from e2e.servers import program
from tiertune_connector.tiers.breaker import STATES

ALERTS = [rule for path in RULES for rule in rules(path) if "alert" in rule]
TESTS = sorted((ROOT / "dashboards" / "alerts").glob("*.test.yaml"))


def promtool(*arguments: object) -> None:
    result = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


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


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_every_rule_is_tested_firing_and_quiet(path):
    """The test file has for each alert a moment when it fires and one when it does not, and a value for each ratio."""
    cases = yaml.safe_load(path.with_name(path.name.replace(".rules.", ".test.")).read_text())["tests"]
    alerts = [case for test in cases for case in test.get("alert_rule_test", [])]
    values = {case["expr"] for test in cases for case in test.get("promql_expr_test", []) if case["exp_samples"]}
    for rule in rules(path):
        if "record" in rule:
            assert rule["record"] in values
        else:
            fired = {bool(case["exp_alerts"]) for case in alerts if case["alertname"] == rule["alert"]}
            assert fired == {True, False}, rule["alert"]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
class TestAlert:
    def test_says_what_how_bad_and_where_to_read_on(self, rule):
        """CamelCase name, a severity, a summary of one line, a description, and a time to settle."""
        assert re.fullmatch(r"TierTune([A-Z][a-z]+)+", rule["alert"])
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert "\n" not in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["for"]

    def test_has_a_runbook_of_three_parts(self, rule):
        """runbook_url is a page in the repository: what it means, how to see it, what to do."""
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.stem == rule["alert"]
        text = page.read_text()
        assert text.startswith(f"# {rule['alert']}\n")
        headings = [line for line in text.splitlines() if line.startswith("## ")]
        assert headings == ["## What it means", "## How to see it", "## What to do"]
        assert f"Severity: {rule['labels']['severity']}." in text


def test_states_that_rules_look_for_are_states_of_a_tier():
    """A rule on a state that no tier can have would never fire."""
    asked = {state for rule in ALERTS for state in re.findall(r'tier_health\{state="(\w+)"', rule["expr"])}
    assert asked
    assert asked <= set(STATES)
