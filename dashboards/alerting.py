"""The alerts: of processes, of tiers, of what the tiers earn, of what the agent changed.

Every name here has a page in ``docs/runbooks``. A state that comes and goes would begin its ``for`` anew each time, so
alerts on such states use averages and rates.
"""

from dashboards.recording import FIRST, STORE_INFO
from dashboards.rules import Alert, Group, grown
from tiertune_connector.catalogue import PREFIX

TIER = "store, tier"
_BLIND = "stale_counters|store_nonsense|store_misnamed|duplicate_store|store_unreachable|stores_unresolved"
"""Incidents that say: the agent has no counters of a store, or does not know where it is."""
_MUCH = 64 << 20
"""Bytes written: more than what probes write of their own."""
_YOUNG_S = 30
"""A chat's next turn takes about a minute: chunks that leave so soon after their last use were in use."""


def _there(counter: str) -> str:
    """Of stores that are there, be it that they missed some scrapes: a rate goes on for long after its store has gone.

    It would be told all that time, under a name that another store on the host no longer has.
    """
    return f"and on (store, tier) last_over_time({PREFIX}{counter}[5m])"


def _rate(counter: str, window: str, by: str = TIER) -> str:
    return f"sum by ({by}) (rate({PREFIX}{counter}[{window}]))"


def _capacity(state: str, at: str = "") -> str:
    """Of a tier's pools together; ``at`` may be an offset."""
    return f'sum by ({TIER}) ({PREFIX}tier_capacity_bytes{{state="{state}"}}{at})'


_DROPPED = _rate('write_behind_dropped_total{reason!~"dead|flushed|closing|backpressure"}', "10m")
"""Without sources that are only observed (``backpressure``): nobody reports how many chunks they write."""
_WRITTEN = _rate('tier_operation_seconds_count{operation="write", outcome=~"ok|there"}', "10m")
_FOUND = grown(f'{PREFIX}tier_lookup_tokens_total{{result="hit"}}', "1h", TIER).replace("\n", "\n  ")
_REMOTE = f'{PREFIX}tier_lookup_tokens_total{{tier="remote", namespace!=""'
_FOUND_ANYWHERE = grown(f'{_REMOTE}, result="hit"}}', "1h", "tier, namespace").replace("\n", "\n    ")
"""In the remote, by any store: what one only writes there, as prefill's do, others may read.

Sources that are only observed are left out: they report no namespace, so nobody knows what they share.
"""
_SILENT = f"""\
sum by (store, tier) (increase({PREFIX}tier_transfer_bytes_total{{operation="write"}}[1h])) > {_MUCH}
  {_there("tier_transfer_bytes_total")}
  and sum by (store, tier) (increase({PREFIX}tier_lookup_tokens_total[1h])) > 0
  unless {_FOUND}
  unless sum by (store, tier) (
    sum by (store, tier, namespace) (increase({_REMOTE}}}[1h])) > 0
    and on (tier, namespace) {_FOUND_ANYWHERE}
  )"""
_BELOW = {"dram": "disk|remote", "disk": "remote"}
"""Tiers in which chunks that left a tier are found again."""


def _young(by: str) -> str:
    idle = f"{PREFIX}tier_evicted_idle_seconds"
    return f"""\
histogram_quantile(0.5, sum by ({by}, le) (rate({idle}_bucket[30m]))) < {_YOUNG_S}
  and sum by ({by}) (increase({idle}_count[30m])) >= 20
  {_there("tier_evicted_idle_seconds_count")}"""


def _found_below(tier: str) -> str:
    """Not by decode's engines, which find what prefill's hand over to them."""
    by, below = "store, namespace", f'tier=~"{_BELOW[tier]}", result="hit"'
    found = _rate(f"tier_lookup_tokens_total{{{below}, {FIRST}}}", "30m", by)
    prompts = _rate(f"prompt_tokens_total{{{FIRST}}}", "30m", by)
    return f'label_replace(\n      {found}\n        / {prompts},\n      "tier", "{tier}", "", ""\n    )'


_FOUND_BELOW = "(\n    {}\n    or {}\n  )".format(*map(_found_below, _BELOW))
_OF_POOL = _young(f"{TIER}, namespace, model") + f"\n  and on (store, tier, namespace) {_FOUND_BELOW} >= 0.1"
_THRASH = "max by (store, tier, model) (\n  {}\n)".format(_OF_POOL.replace("\n", "\n  "))
"""Pool by pool: what one model finds in slower tiers says nothing of what left another's pool."""

PROCESSES = Group(
    "tiertune-processes",
    (
        Alert(
            "TierTuneStoreDown",
            "critical",
            "2m",
            f"""\
            ({STORE_INFO} and on (instance) up{{job="tiertune-store"}} == 0)
              or on (instance) up{{job="tiertune-store"}} == 0""",
            "The store at {{ $labels.instance }} does not answer",
            """Prometheus has had no metrics from the store {{ $labels.store }} at {{ $labels.instance }} for 2 minutes.
            Engines of that host recompute all that their own cache does not hold.""",
        ),
        Alert(
            "TierTuneAgentStuck",
            "warning",
            "2m",
            f"""\
            count(up{{job="tiertune-agent"}})
              unless time() - max({PREFIX}agent_last_success_timestamp_seconds{{exported_job="loop"}}) < 300""",
            "No agent that answers has finished a round for 5 minutes",
            """None of the {{ $value }} agents that Prometheus scrapes answers and has finished a round in the last
            5 minutes. Stores go on with the tuning that they have and the gate goes on protecting requests, but nothing
            is tuned, judged or rolled back.""",
        ),
        Alert(
            "TierTuneCountersStale",
            "warning",
            "5m",
            f"""\
            sum by (kind) (
              {PREFIX}agent_incidents{{kind=~"{_BLIND}"}}
                and on (instance) {PREFIX}agent_leader == 1
            ) > 0""",
            "The agent has no fresh counters of some stores: {{ $labels.kind }}",
            """The agent cannot use what stores tell it ({{ $labels.kind }}, {{ $value }} of them), so it does not tune
            them and its ledger has a gap. The stores themselves may be well.""",
        ),
    ),
)
TIERS = Group(
    "tiertune-tiers",
    (
        Alert(
            "TierTuneTierDead",
            "warning",
            "2m",
            f'max by (store, tier) (avg_over_time({PREFIX}tier_health{{state="dead"}}[5m])) > 0.5',
            "{{ $labels.store }}: the tier {{ $labels.tier }} is dead",
            """The tier {{ $labels.tier }} of store {{ $labels.store }} was dead for most of the last 5 minutes. The
            store asks it no more, so what it holds is recomputed.""",
        ),
        Alert(
            "TierTuneTierServerDead",
            "warning",
            "2m",
            f'max by (store, tier, server) (avg_over_time({PREFIX}tier_server_health{{state="dead"}}[5m])) > 0.5',
            "{{ $labels.store }}: the server {{ $labels.server }} of the tier {{ $labels.tier }} is dead",
            """{{ $labels.server }}, one of the servers of the tier {{ $labels.tier }}, was dead for store
            {{ $labels.store }} for most of the last 5 minutes. Its share of the chunks is missing, and a prompt is
            fetched only up to its first missing chunk.""",
        ),
        Alert(
            "TierTuneWriteBehindDropping",
            "warning",
            "10m",
            f"""\
            {_DROPPED}
              / (
                {_DROPPED}
                  + ({_WRITTEN}
                    or {_DROPPED} * 0)
              )
              > 0.05""",
            "{{ $labels.store }}: chunks are not written to {{ $labels.tier }}",
            """{{ $value | humanizePercentage }} of the chunks that store {{ $labels.store }} was to write behind to
            {{ $labels.tier }} were dropped in the last 10 minutes: the queue was full, the writes failed, or they left
            DRAM before their turn. Requests do not wait for it; what was dropped will be missing there.""",
        ),
        # What still grows is not short of memory: to provision a terabyte takes longer than this alert waits.
        Alert(
            "TierTuneCapacityNotEffective",
            "warning",
            "15m",
            f"""\
            label_replace(
              {_capacity("effective")} / ({_capacity("desired")} > 0) < 0.9
                unless {_capacity("effective")}
                  > {_capacity("effective", " offset 5m")},
              "store", "fleet", "store", ""
            )""",
            "{{ $labels.store }}: {{ $labels.tier }} has less room than it was given",
            """Of the capacity that the tuning gives to the tier {{ $labels.tier }} of store {{ $labels.store }}, only
            {{ $value | humanizePercentage }} took effect within 15 minutes.""",
        ),
        Alert(
            "TierTuneCorruptChunks",
            "warning",
            "1m",
            grown(f'{PREFIX}tier_errors_total{{reason="corrupt"}}', "15m", TIER, job="tiertune-store"),
            "{{ $labels.store }}: corrupt chunks in the tier {{ $labels.tier }}",
            """Store {{ $labels.store }} read {{ printf "%.0f" $value }} chunks from the tier {{ $labels.tier }} in the
            last 15 minutes whose bytes are not those that were written. They were not used: each counts as a miss.""",
        ),
    ),
)
# What hours say need not be asked at each evaluation, nor hold up the others: of 500 stores it takes seconds.
SILENCE = Group(
    "tiertune-silence",
    (
        Alert(
            "TierTuneTierSilent",
            "warning",
            "10m",
            _SILENT,
            "{{ $labels.store }}: the tier {{ $labels.tier }} is written and never read",
            """In the last hour {{ $value | humanize1024 }}B were written to the tier {{ $labels.tier }} of store
            {{ $labels.store }}, requests asked it, and nothing was ever found there. It costs, and gives nothing.""",
        ),
    ),
    "5m",
)
EARNINGS = Group(
    "tiertune-earnings",
    (
        Alert(
            "TierTuneRemoteSlowerThanRecompute",
            "warning",
            "10m",
            f"""\
            {_rate('gate_candidate_seconds_total{tier="remote", kind="fetch"}', "10m")}
              / ({_rate('gate_candidate_seconds_total{tier="remote", kind="recompute"}', "10m")} > 0)
              > 1""",
            "{{ $labels.store }}: the remote tier is slower than recomputing",
            """For what requests at store {{ $labels.store }} found in the remote tier, fetching is predicted to take
            {{ $value | humanize }} times as long as recomputing. Requests are protected by the gate; the remote earns
            little here.""",
        ),
        Alert(
            "TierTuneNetworkSaturated",
            "warning",
            "10m",
            f"""\
            {_rate('tier_transfer_bytes_total{tier="remote", operation="read"}', "10m")}
              / max by (store, tier) (avg_over_time({PREFIX}fetch_estimate_bytes_per_second{{tier="remote"}}[10m]))
              > 0.8""",
            "{{ $labels.store }}: the way to the remote tier is full",
            """Store {{ $labels.store }} fetches {{ $value | humanizePercentage }} of what its way to the remote tier
            can carry as measured now: fetches wait for each other, and the gate recomputes more and more.""",
        ),
        Alert(
            "TierTuneThrash",
            "warning",
            "15m",
            _THRASH,
            "{{ $labels.store }}: chunks leave {{ $labels.tier }} and are wanted back at once",
            """Half of the chunks of {{ $labels.model }} that store {{ $labels.store }} evicts from {{ $labels.tier }}
            were in use {{ $value | humanizeDuration }} before, and a tenth or more of its prompt tokens is found again
            in slower tiers: memory is too small for the working set, or its eviction is wrong for this traffic.""",
        ),
        Alert(
            "TierTuneYoungChunksEvicted",
            "info",
            "15m",
            _young(TIER),
            "{{ $labels.store }}: chunks leave {{ $labels.tier }} while they are in use",
            """Half of the chunks that store {{ $labels.store }} evicts from {{ $labels.tier }} were in use
            {{ $value | humanizeDuration }} before: a conversation's next turn comes later than that.""",
        ),
        Alert(
            "TierTuneTenantOverQuota",
            "info",
            "15m",
            f"sum by (store) (rate({PREFIX}quota_refused_chunks_total[15m])) * 60 > 0",
            "{{ $labels.store }}: a tenant's quota is full",
            """Store {{ $labels.store }} refuses {{ printf "%.1f" $value }} chunks a minute because the quota of their
            tenant is full. That tenant's prompts are recomputed; nobody else is affected.""",
        ),
    ),
)
CHANGES = Group(
    "tiertune-changes",
    (
        Alert(
            "TierTuneRollbackHappened",
            "info",
            "1m",
            grown(f'{PREFIX}agent_decisions_total{{state="rolled_back"}}', "1h", "tuner", job="tiertune-agent"),
            "A change by the tuner {{ $labels.tuner }} was rolled back",
            """{{ printf "%.0f" $value }} changes that the tuner {{ $labels.tuner }} had made were undone in the last
            hour, by their verdict or by an operator. The fleet is as it was before them.""",
        ),
    ),
)
GROUPS = (PROCESSES, TIERS, SILENCE, EARNINGS, CHANGES)
