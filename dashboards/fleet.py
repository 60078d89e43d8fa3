"""The dashboard "TierTune: fleet": is the cache paying, is the gate right, are tiers well, what did the agent do."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

from dashboards import panels
from dashboards.queries import POOL, PREFIX, STORE, Query, difference, mean, quantile, rate, ratio, select, total

UID = "tiertune-fleet"
HIT = 'result="hit"'
JUDGED = 'outcome=~"won|lost|late|failed"'


def dashboard() -> Dashboard:
    """The whole dashboard; ``dashboards.build`` writes it to ``json/fleet.json``."""
    fleet = Dashboard("TierTune: fleet").uid(UID).tags(["tiertune"]).timezone("browser")
    fleet.description("Shared KV cache tiers: what they earn, and what the agent made of them.")
    fleet.time("now-1h", "now").refresh("30s").tooltip(DashboardCursorSync.CROSSHAIR).readonly()
    fleet.with_variable(panels.datasource_variable())
    fleet.with_variable(panels.label_variable("store", "Store", "tuning_version"))
    fleet.with_variable(panels.label_variable("namespace", "Namespace", "prompt_tokens_total", STORE))
    for number, add in enumerate((_paying, _tokens, _gate, _tiers, _health, _agent), start=1):
        add(fleet, number)
    return fleet


def _paying(fleet: Dashboard, row: int) -> None:
    saved, lost = rate("saved_seconds_total"), rate("lost_seconds_total")
    hits, prompts = rate("tier_lookup_tokens_total", HIT, POOL), rate("prompt_tokens_total", POOL)
    won, judged = rate("gate_outcomes_total", 'outcome="won"'), rate("gate_outcomes_total", JUDGED)
    panels.add_row(
        fleet,
        row,
        "Is the cache paying?",
        panels.number(
            "Net seconds saved per second",
            "short",
            "Seconds of recomputing that fetches saved, less those they lost. Modelled: predicted recompute against "
            "measured fetch. Below 0 the tiers cost more than they bring.",
            Query(difference(saved, lost)),
        ),
        panels.number(
            "Prompt tokens found in a tier",
            "percentunit",
            "Of the tokens of all prompts, how many some tier held, whatever the gate then decided.",
            Query(ratio(hits, prompts)),
        ),
        panels.number(
            "Fetches that won",
            "percentunit",
            "Of the fetches, how many took less time than recomputing was predicted to take.",
            Query(ratio(won, judged)),
        ),
        panels.number(
            "Stores reporting",
            "none",
            "Stores whose metrics Prometheus has now.",
            Query(f"count(count by (store) ({select('tuning_version')}))"),
        ),
        panels.lines(
            "Seconds saved and lost, by tier",
            "short",
            "Per second of time. Lost is drawn below zero.",
            Query(rate("saved_seconds_total", by="tier"), "saved, {{tier}}"),
            Query("-" + rate("lost_seconds_total", by="tier"), "lost, {{tier}}"),
            span=24,
        ),
    )


def _tokens(fleet: Dashboard, row: int) -> None:
    hits, prompts = rate("tier_lookup_tokens_total", HIT, POOL), rate("prompt_tokens_total", POOL)
    asked = rate("tier_lookup_tokens_total", POOL, by="tier")
    panels.add_row(
        fleet,
        row,
        "Where tokens are found",
        panels.stacked(
            "Prompt tokens by tier",
            "short",
            "Tokens per second that each tier held for arriving prompts, and those that none held.",
            Query(rate("tier_lookup_tokens_total", HIT, POOL, by="tier"), "{{tier}}"),
            Query(difference(prompts, hits), "nowhere"),
        ),
        panels.lines(
            "Hit ratio of each tier",
            "percentunit",
            "Of the tokens that a tier was asked for. A tier below one that hit is not asked.",
            Query(ratio(rate("tier_lookup_tokens_total", HIT, POOL, by="tier"), asked), "{{tier}}"),
        ),
    )


def _gate(fleet: Dashboard, row: int) -> None:
    fetch, recompute = 'kind="fetch"', 'kind="recompute"'
    panels.add_row(
        fleet,
        row,
        "Gate",
        panels.lines(
            "Decisions",
            "reqps",
            "Requests that found chunks in the tier, by what the gate decided and why.",
            Query(rate("gate_requests_total", by="tier, decision, reason"), "{{tier}}: {{decision}} ({{reason}})"),
            span=8,
        ),
        panels.lines(
            "Predicted against actual",
            "s",
            "Means per request. Predictions are of all decisions, actual seconds of those fetched: with the gate at "
            "work the two need not meet, but a fetch that actually takes longer than recomputing is a wrong decision.",
            Query(mean("gate_predicted_seconds", fetch, by="tier"), "{{tier}}: fetch, predicted"),
            Query(mean("gate_actual_seconds", fetch, by="tier"), "{{tier}}: fetch, actual"),
            Query(mean("gate_predicted_seconds", recompute, by="tier"), "{{tier}}: recompute, predicted"),
            span=8,
        ),
        panels.lines(
            "Outcomes",
            "reqps",
            "Won and lost are fetches that took less or more time than recomputing was predicted to take.",
            Query(rate("gate_outcomes_total", by="tier, outcome"), "{{tier}}: {{outcome}}"),
            span=8,
        ),
    )


def _tiers(fleet: Dashboard, row: int) -> None:
    by, effective = "store, tier", 'state="effective"'
    panels.add_row(
        fleet,
        row,
        "Tiers",
        panels.lines(
            "Resident against capacity",
            "bytes",
            "Bytes held of the chosen namespaces, and bytes allowed.",
            Query(total(select("tier_resident_bytes", POOL), by), "{{store}} {{tier}}: resident"),
            Query(total(select("tier_capacity_bytes", POOL, effective), by), "{{store}} {{tier}}: capacity"),
            span=8,
        ),
        panels.lines(
            "Evictions",
            "short",
            "Chunks per second that left to make room, or because a tier was made smaller.",
            Query(rate("tier_evictions_total", POOL, by="tier, reason"), "{{tier}}: {{reason}}"),
            span=8,
        ),
        panels.lines(
            "Slowest operations",
            "s",
            "99th percentile of a tier's operations.",
            Query(quantile(0.99, "tier_operation_seconds", by="tier, operation"), "{{tier}}: {{operation}}"),
            span=8,
        ),
    )


def _health(fleet: Dashboard, row: int) -> None:
    remote = 'tier="remote"'
    panels.add_row(
        fleet,
        row,
        "Health",
        panels.states(
            "Health of tiers",
            "The state that each tier is in; ok, slow, bypassed, recovering, dead.",
            Query(f"{select('tier_health')} == 1", "{{store}} {{tier}}: {{state}}"),
            span=8,
        ),
        panels.lines(
            "Estimated bandwidth",
            "Bps",
            "What a fetch from the remote gets, as learned from fetches and probes.",
            Query(select("fetch_estimate_bytes_per_second", remote), "{{store}}"),
            span=8,
        ),
        panels.lines(
            "Failures and drops",
            "short",
            "Per second: operations that failed, and chunks not written behind.",
            Query(rate("tier_errors_total", by="tier, operation, reason"), "{{tier}}: {{operation}} ({{reason}})"),
            Query(rate("write_behind_dropped_total", by="tier, reason"), "{{tier}}: not written ({{reason}})"),
            span=8,
        ),
    )


def _agent(fleet: Dashboard, row: int) -> None:
    panels.add_row(
        fleet,
        row,
        "Agent",
        panels.steps(
            "Decisions of the agent",
            "none",
            "Count since the agent started, by tuner and state. A rate would miss the first of each kind.",
            Query(f"sum by (tuner, state) ({PREFIX}agent_decisions_total)", "{{tuner}}: {{state}}"),
            span=8,
        ),
        panels.steps(
            "Tuning version",
            "none",
            "Version of the tuning that each store has in force; every step is a change.",
            Query(select("tuning_version"), "{{store}}: {{state}}"),
            span=8,
        ),
        panels.lines(
            "Since the agent's last success",
            "s",
            "Age of the newest good run of each job. Prometheus renames the agent's label job to exported_job.",
            Query(f"time() - max by (exported_job) ({PREFIX}agent_last_success_timestamp_seconds)", "{{exported_job}}"),
            span=8,
        ),
    )
