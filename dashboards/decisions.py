"""The dashboard "Decisions": what the agent set and when, what it decided, what verdicts were, and whether it runs."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.board import Rows, board
from dashboards.fleet import incidents, last_success
from dashboards.panels import AnyPanel, Colours, lines, number, states, steps
from dashboards.queries import AGENT_STORE, Query, counted, of_agent, quantile_of, rated, ratio, select
from tiertune_connector.catalogue import PREFIX

NAME = "decisions"
DECIDED = "agent_decisions_total"
JUDGED = 'state=~"kept|rolled_back|inconclusive"'
WAITING = 'state=~"proposed|approved|rejected|expired"'
SETTING = "store, tier, setting"
WORST: Colours = ((None, "green"), (1, "orange"))


def dashboard() -> Dashboard:
    rows: Rows = [
        ("Timeline", _timeline()),
        ("Verdicts", _verdicts()),
        ("The agent", _agent()),
    ]
    return board(NAME, "decisions", "What the agent changed, whether it was right, and whether it is well.", rows)


def in_force() -> str:
    """1 for the value that the agent last gave to each setting, 2 if that was by a rollback."""
    made = f"{PREFIX}agent_change_timestamp_seconds{{{AGENT_STORE}}}"
    last = f"max by ({SETTING}) ({made})"

    def newest(state: str) -> str:
        moments = f'max by ({SETTING}, change) ({made[:-1]}, state="{state}"}})'
        return f"({moments} == on ({SETTING}) group_left {last})"

    return f"{newest('applied')} * 0 + 1 or {newest('rolled_back')} * 0 + 2"


def _timeline() -> list[AnyPanel]:
    return [
        states(
            "Settings as the agent left them",
            "Each value that the agent gave to a setting, while it was the last one. Figures only tell up or down. "
            "What people set by hand is not here: the tuning version shows that too.",
            {"applied": "blue", "rolled back": "red"},
            Query(in_force(), "{{store}} {{tier}}: {{setting}} {{change}}"),
            span=24,
        ),
        steps(
            "Decisions",
            "none",
            "Count since the agent started, by tuner and state. A rate would miss the first of each kind.",
            Query(f"sum by (tuner, state) ({of_agent(DECIDED)})", "{{tuner}}: {{state}}"),
        ),
        steps(
            "Tuning version",
            "none",
            "Version of the tuning that each store has in force; every step is a change, whoever made it.",
            Query(f"max by (store, state) ({select('tuning_version')})", "{{store}}: {{state}}"),
        ),
    ]


def _verdicts() -> list[AnyPanel]:
    every = f"sum({of_agent(DECIDED)})"

    def entered(state: str) -> str:
        return f"sum({of_agent(DECIDED, state)})"

    def told(title: str, state: str, description: str, colours: Colours) -> AnyPanel:
        return number(title, "none", description, Query(counted(entered(f'state="{state}"'), every)), colours=colours)

    return [
        told("Applied", "applied", "Changes made, since the agent started.", ((None, "blue"),)),
        told("Kept", "kept", "Changes that were judged right after their soak.", ((None, "green"),)),
        told("Rolled back", "rolled_back", "Changes undone, by verdict or by command.", WORST),
        told("Inconclusive", "inconclusive", "Changes of which nothing is clear: they stay.", ((None, "text"),)),
        told("Failed", "failed", "Changes that a store refused or never got.", WORST),
        number(
            "Share kept",
            "percentunit",
            "Of the changes that were judged.",
            Query(ratio(entered('state="kept"'), entered(JUDGED))),
        ),
        steps(
            "Verdicts by tuner",
            "none",
            "Count since the agent started.",
            Query(f"sum by (tuner, state) ({of_agent(DECIDED, JUDGED)})", "{{tuner}}: {{state}}"),
        ),
        steps(
            "Proposals",
            "none",
            "How many there were since the agent started, and what became of them. What is left waits for someone.",
            Query(f"sum by (state) ({of_agent(DECIDED, WAITING)})", "{{state}}"),
        ),
    ]


def _agent() -> list[AnyPanel]:
    rounds = of_agent("agent_loop_seconds_count")
    return [
        lines(
            "Seconds of a round",
            "s",
            "Of reading all stores, deciding and acting. It should stay well below the window.",
            Query(
                f"{rated(of_agent('agent_loop_seconds_sum'))} / ({rated(rounds)} > 0)",
                "mean",
            ),
            Query(quantile_of(0.99, of_agent("agent_loop_seconds_bucket"), rounds), "99th percentile"),
            span=8,
        ),
        last_success(8),
        lines(
            "Rounds that failed",
            "short",
            "Per second, by job; the agent goes on.",
            Query(
                f"sum by (exported_job) (rate({of_agent('agent_job_errors_total')}[$__rate_interval]))",
                "{{exported_job}}",
            ),
            Query(counted(rated(of_agent("agent_job_errors_total")), rated(rounds)), "all"),
            span=8,
        ),
        incidents(12),
        steps(
            "Who leads",
            "none",
            "1 for the agent that leads, 0 for one that stands by.",
            Query(f"max by (instance) ({of_agent('agent_leader')})", "{{instance}}"),
        ),
    ]
