"""Checks of what the agent reports: its rounds, freezes, bypasses, its policy, its incidents. Pure."""

from collections.abc import Iterator

from tiertune_agent.doctor.facts import AgentFacts, AllFacts
from tiertune_agent.doctor.finding import Finding, Found, Told, check, of_agent, of_policy
from tiertune_connector.units import format_duration

MEND_POLICY = "mend the file: tiertune policy check names line and column"
SILENT_WINDOWS = 3
"""A round that is late by more windows than this is missing."""
INCIDENTS = {
    "stale_counters": "look at the host's clock and at the store's log: its counters stand still, so nothing is tuned",
    "store_nonsense": "write the store's own address into the agent's stores: another program answers there",
    "store_misnamed": "write the store's own name, or none, into the agent's stores",
    "duplicate_store": "give each store a name of its own, or take out the address that its store has left",
    "tier_unused": "take the tier away, or give it what it lacks: capacity, fetch on, a lower min_fetch_tokens",
    "knob_without_effect": "look at the store's log for why it does not follow, and roll the decision back",
    "tuning_drift": "leave the tuning to the agent, or override it in the policy: it was changed by hand",
    "thrash": "give the tier more room, or raise hold_off and min_gain of the tuner that goes back and forth",
    "stores_file_invalid": "mend the file as the message says: the stores that it listed before go on being tuned",
    "stores_unresolved": "mend the name in stores_dns, or the resolver of the agent's host",
    "remote_unmanaged": "name the remote in the agent's settings and let its user run CONFIG, or set manage: false",
}
"""Kinds of open incidents that no other check looks for, each with its mend."""
ALSO_LOOKED_FOR = {
    "store_unreachable": "start the store, or mend the agent's settings: its address, the token, stores_ca_file",
    "tier_dead": "look at what the tier stands on: its reason says what failed",
    "unsalted_traffic": "have the front set cache_salt on every request, or set isolation: require_salt at the engines",
}
"""Incidents that a check of the same name also finds, if it can ask the store."""
MENDS = INCIDENTS | ALSO_LOOKED_FOR
OF_SOURCES = {
    "store_unreachable": "start it, or mend its address under observe; for https:// also stores_ca_file",
    "store_nonsense": "mend its address and kind under observe; vLLM tells nothing with --disable-log-stats",
    "stale_counters": "look at the clock of the agent's host",
    "tier_unused": "take the tier out of its own settings, or give it room: TierTune changes nothing there",
}
"""What mends an incident of an observed source, where that differs."""


@of_agent("error")
def agent_unreachable(agent: AgentFacts) -> Told:
    if agent.away:
        mend = "see to its database: the agent goes on by itself when that is back"
        yield f"the agent cannot tell anything: {agent.problem}", mend
    elif not agent.answers:
        shown = "a token in TIERTUNE_TOKEN_FILE and, for https://, its authority in TIERTUNE_CA_FILE"
        mend = f"start it (tiertune agent run), or name where it serves by --agent, {shown}"
        yield f"no agent answers: {agent.problem}", mend


@check("error")
def agent_stuck(facts: AllFacts) -> Found:
    fleet = facts.agent.fleet
    late_s = min((float(store.get("age_s") or 0.0) for store in facts.agent.stores), default=0.0)
    if fleet.get("leader") and facts.answering and late_s > SILENT_WINDOWS * float(fleet.get("window_s") or 0.0):
        wrong = f"it leads, but has heard no store for {format_duration(late_s)}, though one answers here"
        yield facts.agent.url, wrong, "look at its log: the database may be away, or a round fails"


@of_policy("error")
def policy_invalid(agent: AgentFacts) -> Told:
    if problem := agent.policies.get("problem"):
        yield f"the policy file is not in force, an older one is: {problem}", MEND_POLICY


@of_policy("warning")
def policy_without_effect(agent: AgentFacts) -> Told:
    for note in agent.policies.get("notes") or ():
        yield f"the policy does less than it says: {note}", "take the key out, or set what it lacks"


@of_agent("warning")
def frozen(agent: AgentFacts) -> Told:
    """A freeze that ends by itself is intended: no finding."""
    told = agent.fleet.get("frozen") or {}
    if told.get("who") not in (None, "policy") and not told.get("until"):
        since = str(told.get("since"))[:16].replace("T", " ")
        wrong = f"nothing changes since {since} UTC: {told['who']} froze it without an end ({told.get('reason')})"
        yield wrong, "tiertune unfreeze, or freeze --for a time"


@check("warning")
def bypassed(facts: AllFacts) -> Found:
    """A store that no agent lists is called straight: there is no agent who could pass the command on."""
    told = {str(one["name"]): one.get("bypass") for one in facts.agent.stores}
    straight = {store.name: store.url for store in facts.answering if store.name not in told}
    told |= {store.name: store.tuning.get("bypass") for store in facts.answering}  # what it says itself counts
    for name in sorted(name for name, off in told.items() if off):
        wrong = "it is bypassed: it answers miss to everything, and engines recompute"
        yield name, wrong, f"tiertune bypass off --store {straight.get(name, name)}"


def incidents(agent: AgentFacts) -> Iterator[Finding]:
    """The agent's open ones, by kind."""
    for kind, mend in MENDS.items():
        for one in agent.incidents:
            if one.get("kind") == kind:
                where = str(one.get("store") or agent.url)
                told = OF_SOURCES.get(kind, mend) if where in agent.sources else mend
                yield Finding(kind, "warning", where, str(one.get("message")), told)
