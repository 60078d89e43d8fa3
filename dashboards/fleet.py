"""The dashboard "Fleet overview": is the cache paying, where are tokens found, how soon is the first, is all well."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.board import Rows, board
from dashboards.panels import GAIN, AnyPanel, lines, number, stacked, states, steps
from dashboards.queries import (
    AGENT_STORE,
    HOUR_S,
    POOL,
    Query,
    counted,
    difference,
    numbered,
    of_agent,
    portion,
    quantile_of,
    rate,
    rated,
    ratio,
    select,
    total,
)
from dashboards.recording import CROSS_RATIO, FIRST, FLEET_RATIO
from dashboards.stages import per_request

NAME = "fleet"
HIT, WON, JUDGED = 'result="hit"', 'outcome="won"', 'outcome=~"won|lost|late|failed"'
WORTH, COST = 'kind="saved"', 'kind!="saved"'
HEALTH = {"ok": "green", "slow": "yellow", "bypassed": "blue", "recovering": "orange", "dead": "red"}
"""States of a tier, and their colours."""


def dashboard() -> Dashboard:
    rows: Rows = [
        ("Is the cache paying?", _paying()),
        ("Where tokens are found", _tokens()),
        ("The first token", _first_token()),
        ("Health", _health()),
    ]
    return board(NAME, "fleet overview", "Is the cache paying, and is all well? The other dashboards say why.", rows)


def net_seconds(by: str = "") -> str:
    return difference(rate("saved_seconds_total", by=by), rate("lost_seconds_total", by=by))


def net_money(by: str = "") -> str:
    """Per hour."""
    worth, cost = (rated(of_agent("agent_money_total", AGENT_STORE, kind), by=by) for kind in (WORTH, COST))
    return f"({difference(worth, cost)}) * {HOUR_S}"


def first_token(share: float) -> str:
    """Of all engines: vLLM's own metrics have no store."""
    name = "vllm:time_to_first_token_seconds"
    return quantile_of(share, f"{name}_bucket", f"{name}_count", by="model_name")


def health(title: str, span: int) -> AnyPanel:
    return states(
        title,
        "The state that each tier is in. A store asks no tier that is dead or bypassed: what it holds is recomputed.",
        HEALTH,
        Query(numbered("tier_health", "state", tuple(HEALTH), by="store, tier"), "{{store}} {{tier}}"),
        span=span,
    )


def last_success(span: int) -> AnyPanel:
    return lines(
        "Since the agent's last success",
        "s",
        "Age of the newest good run of each job. Prometheus renames the agent's label job to exported_job.",
        Query(
            f"time() - max by (exported_job) ({of_agent('agent_last_success_timestamp_seconds')})", "{{exported_job}}"
        ),
        span=span,
    )


def incidents(span: int) -> AnyPanel:
    # A kind is exported only from its first incident on: before that, count zero if an agent runs.
    beside = f"sum({of_agent('agent_leader')})"
    return steps(
        "Open incidents",
        "none",
        "What the agent holds for wrong, by kind; the agent's page and its API tell each in words.",
        Query(f"sum by (kind) ({of_agent('agent_incidents')})", "{{kind}}"),
        Query(counted(f"sum({of_agent('agent_incidents')})", beside), "all"),
        span=span,
    )


def _paying() -> list[AnyPanel]:
    won, judged = rate("gate_outcomes_total", WON), rate("gate_outcomes_total", JUDGED)
    modelled = "Modelled: predicted recompute against measured fetch."
    return [
        number(
            "Net seconds saved",
            "short",
            f"Seconds of recomputing that fetches saved, less those they lost, per second of time. {modelled} Below 0 "
            "the tiers cost more than they bring.",
            Query(net_seconds()),
            colours=GAIN,
        ),
        number(
            "Net money per hour",
            "short",
            "In the currency of the policy's prices: what the net seconds are worth, less rent of the bytes held and "
            "network. As the agent's ledger books it: a remote of which nobody tells what it holds is not in it.",
            Query(net_money()),
            colours=GAIN,
        ),
        number(
            "Fleet hit ratio",
            "percentunit",
            "Of the tokens of all prompts, how many some tier held, whatever the gate then decided. Of all stores.",
            Query(FLEET_RATIO),
        ),
        number(
            "Cross-replica hit ratio",
            "percentunit",
            "The same of tokens that another engine had computed: what sharing brings. Of all stores.",
            Query(CROSS_RATIO),
        ),
        number(
            "Fetches that won",
            "percentunit",
            "Of the fetches, how many took less time than recomputing was predicted to take.",
            Query(ratio(won, judged)),
        ),
        number(
            "Stores reporting",
            "none",
            "Stores whose metrics Prometheus has now.",
            Query(f"count(count by (store) ({select('tuning_version')}))"),
        ),
        lines(
            "Net seconds saved, by tier",
            "short",
            f"Saved less lost, per second of time. {modelled}",
            Query(net_seconds("tier"), "{{tier}}"),
        ),
        lines(
            "Net money per hour, by tier",
            "short",
            "Below 0 a tier's rent and network cost more than the seconds that it saves are worth.",
            Query(net_money("tier"), "{{tier}}"),
        ),
    ]


def _tokens() -> list[AnyPanel]:
    hits, prompts = rate("tier_lookup_tokens_total", HIT, POOL, FIRST), rate("prompt_tokens_total", POOL, FIRST)
    each = f"rate({select('prompt_tokens_total', POOL, FIRST)}[$__rate_interval])"
    tuned = f"last_over_time({select('tuning_version')}[$__rate_interval])"  # observed sources are not
    of_stores = total(f"{each} and on (store) {tuned}")
    return [
        stacked(
            "Prompt tokens by tier",
            "short",
            "Tokens per second that each tier held for arriving prompts, and those that none held. Prompts count once, "
            "not again where decode looks them up.",
            Query(rate("tier_lookup_tokens_total", HIT, POOL, FIRST, by="tier"), "{{tier}}"),
            Query(f"clamp_min({difference(prompts, hits)}, 0)", "nowhere"),
            span=8,
        ),
        lines(
            "Hit ratios",
            "percentunit",
            "Shares of the tokens of all prompts: found in any tier, and found though another engine computed them. Of "
            "all stores.",
            Query(FLEET_RATIO, "any tier"),
            Query(CROSS_RATIO, "computed by another engine"),
            span=8,
        ),
        lines(
            "Computed again",
            "percentunit",
            "Of the tokens of all prompts, how many were computed although a tier had them (the gate chose so, or the "
            "fetch failed), or while another engine computed them too: what sharing did not save.",
            Query(portion(rate("duplicate_prefill_tokens_total", POOL), of_stores), "computed again"),
            span=8,
        ),
    ]


def _first_token() -> list[AnyPanel]:
    of_engines = "Of all engines that Prometheus scrapes, whatever store is chosen."
    return [
        lines(
            "Time to first token",
            "s",
            f"As vLLM measures it. {of_engines}",
            Query(first_token(0.5), "median, {{model_name}}"),
            Query(first_token(0.99), "99th percentile, {{model_name}}"),
        ),
        lines(
            "Seconds per request, by phase",
            "s",
            "What the mean request costs of each phase, where engines tell it. kv_wait: how long it waited for its "
            "chunks.",
            Query(per_request("phase"), "{{phase}}"),
        ),
    ]


def _health() -> list[AnyPanel]:
    asked, behind = rate("tier_lookup_tokens_total", by="tier"), total(select("write_behind_queued"), "tier")
    return [
        health("Health of tiers", 12),
        lines(
            "Failures and drops",
            "short",
            "Per second: operations that failed, and chunks not written behind.",
            Query(counted(rate("tier_errors_total", by="tier"), asked), "{{tier}}: failed"),
            Query(counted(rate("write_behind_dropped_total", by="tier"), behind), "{{tier}}: not written"),
        ),
        incidents(12),
        last_success(12),
    ]
