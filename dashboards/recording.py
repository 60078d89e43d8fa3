"""Recording rules: ratios of the fleet as the contracts name them, and which store an address is."""

from dashboards.rules import Group, Record
from tiertune_connector.catalogue import PREFIX

FIRST = 'stage!="decode"'
"""If prefill and decode are separate, engines of both stages look up the same prompt: it counts at the first."""
STORE_INFO = "tiertune:store_info"
FLEET_RATIO, CROSS_RATIO = "tiertune:fleet_hit_ratio", "tiertune:cross_replica_hit_ratio"
_PROMPTED = f"rate({PREFIX}prompt_tokens_total{{{FIRST}}}[5m])"
_TOLD = f'{_PROMPTED} unless on (store) last_over_time({PREFIX}tier_lookup_tokens_total{{origin="unknown"}}[5m])'
"""Without sources that do not report who computed what they find."""


def _share(prompted: str, *matchers: str) -> str:
    """Share of the prompt tokens that were found so: 0 if none was, empty (not NaN) without prompts.

    Hits are counted after their prompt, perhaps in a later scrape: without the bound they would briefly be over 1.
    """
    found = ", ".join(('result="hit"', *matchers, FIRST))
    prompts = f"sum({prompted})"
    hits = f"sum(rate({PREFIX}tier_lookup_tokens_total{{{found}}}[5m]))"
    return f"clamp_max(({hits} or {prompts} * 0)\n  / ({prompts} > 0), 1)"


_VERSION = f"{PREFIX}tuning_version"
_STORE_OF_INSTANCE = f'max by (instance, store) ({_VERSION}{{state="applied"}}) ^ 0'
GROUPS = (
    Group(
        "tiertune-ratios",
        (
            Record(FLEET_RATIO, _share(_PROMPTED)),
            Record(CROSS_RATIO, _share(_TOLD, 'origin=~"same_host|other_host"')),
        ),
    ),
    Group(
        "tiertune-stores",
        (
            # Always 1. Remembers the name of a store that is down for as long as Prometheus is told to scrape it, and
            # nobody has that name at another address.
            Record(
                STORE_INFO,
                f"({_STORE_OF_INSTANCE})\n"
                f"  or ({STORE_INFO} unless on (instance) {_VERSION} unless on (store) {_VERSION})\n"
                f'    and on (instance) up{{job="tiertune-store"}}',
            ),
        ),
    ),
)
