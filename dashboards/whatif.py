"""The dashboard "What-if": what DRAM of other sizes and other eviction algorithms would have found."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.board import Rows, board
from dashboards.fleet import HIT
from dashboards.panels import AnyPanel, bars, curve, lines, steps
from dashboards.queries import POOL, Query, counted, of_agent, rate, ratio, select, total

NAME = "whatif"
LRU, SIZES = 'algorithm="lru"', "whatif_tokens_total"
SIZE = "capacity_bytes"
NO_SLOWER, DRAM = 'tier=~"gpu|staging|dram"', 'tier="dram"'
"""Tiers as quick as DRAM or quicker."""
SIMULATED = 'namespace!=""'
"""Observed sources report no namespace, and nothing is simulated of them."""
TUNERS = 'tuner=~"tier_size|eviction|admission"'
ESTIMATE = "An estimate from sampled lookups."


def dashboard() -> Dashboard:
    rows: Rows = [("Size", _sizes()), ("Eviction", _algorithms()), ("What came of it", _answers())]
    return board(NAME, "what-if", "What DRAM of other sizes and other algorithms would have found.", rows)


def hit_ratio(by: str, *matchers: str) -> str:
    """Share of the tokens asked of simulated pools."""
    return ratio(rate(SIZES, HIT, POOL, *matchers, by=by), rate(SIZES, POOL, *matchers, by=by))


def at_own_size(by: str, *matchers: str) -> str:
    """As ``hit_ratio``, at the sizes that pools have: only there are algorithms other than LRU simulated.

    Other sizes are filtered out: a pool's former ones are still exported, and LRU is simulated at any.
    """
    desired = select("tier_capacity_bytes", POOL, DRAM, 'state="desired"')
    own = f'count_values by (store, namespace) ("{SIZE}", {desired})'

    def tokens(*narrowed: str) -> str:
        vector = f"rate({select(SIZES, POOL, *matchers, *narrowed)}[$__rate_interval])"
        return f"sum by ({by}) ({vector} and on (store, namespace, {SIZE}) {own})"

    return ratio(tokens(HIT), tokens())


def as_it_is() -> str:
    """Share that DRAM had of the tokens asked of simulated pools; finds in engines' own memory count, too.

    DRAM is not asked for these, but has most of them, as engines store all that they compute.
    """
    lookups = "tier_lookup_tokens_total"
    found, missed = (
        f"rate({select(lookups, POOL, SIMULATED, *which)}[$__rate_interval])"
        for which in ((HIT, NO_SLOWER), ('result="miss"', DRAM))
    )
    return ratio(total(found), total(f"{found} or {missed}"))


def _sizes() -> list[AnyPanel]:
    each = hit_ratio("capacity_bytes", LRU)
    return [
        curve(
            "Hit ratio by size",
            "percentunit",
            f"What LRU would have hit with DRAM of each size, over all the time shown. {ESTIMATE} Choose one store and "
            "namespace: pools of different sizes share only some points.",
            Query(each, "hit ratio"),
            x_label="capacity_bytes",
        ),
        lines(
            "Too large, too small?",
            "percentunit",
            "Tokens that engines found in their own memory or DRAM, of all that they asked for, and what the smallest "
            f"and the largest simulated size of DRAM would have hit of the same. {ESTIMATE} Where the largest is no "
            "higher, more DRAM brings nothing; where the smallest is no lower, less would do.",
            Query(as_it_is(), "as it is"),
            Query(f"min({each})", "smallest size"),
            Query(f"max({each})", "largest size"),
        ),
    ]


def _algorithms() -> list[AnyPanel]:
    now = at_own_size("algorithm")
    return [
        bars(
            "Algorithms at the size in force, in all",
            "percentunit",
            f"What each would have hit in pools of their present size, over all the time shown. {ESTIMATE}",
            Query(now, "{{algorithm}}"),
        ),
        lines(
            "Algorithms at the size in force",
            "percentunit",
            f"The same over time. {ESTIMATE}",
            Query(now, "{{algorithm}}"),
        ),
    ]


def _answers() -> list[AnyPanel]:
    decided = of_agent("agent_decisions_total", TUNERS)
    missed = f"sum({of_agent('agent_samples_missed')})"
    return [
        steps(
            "Decisions on sizes, eviction and admission",
            "none",
            "Count since the agent started. Proposed: it waits for someone to approve it.",
            Query(f"sum by (tuner, state) ({decided})", "{{tuner}}: {{state}}"),
        ),
        lines(
            "Simulated tokens",
            "short",
            "Tokens per second that the simulations judge by, of one size and algorithm: few of them make estimates "
            "rough.",
            Query(f"max(sum by (algorithm, capacity_bytes) (rate({select(SIZES, POOL)}[$__rate_interval])))", "tokens"),
            span=6,
        ),
        steps(
            "Samples missed",
            "none",
            "Sampled lookups that stores dropped before the agent read them, since it started.",
            Query(counted(missed, missed), "samples"),
            span=6,
        ),
    ]
