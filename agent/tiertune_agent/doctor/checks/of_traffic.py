"""Checks of the traffic by the stores' counters: who shares with whom, what fetches cost, what is dropped. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from tiertune_agent.doctor.checks.of_agent import ALSO_LOOKED_FOR
from tiertune_agent.doctor.facts import AllFacts, StoreFacts
from tiertune_agent.doctor.finding import Found, Told, check, of_store, often
from tiertune_agent.fields import read
from tiertune_agent.incidents.detectors import FEW, among_tenants
from tiertune_connector.tuning import SLOWER, TIERS
from tiertune_connector.units import format_count

MENDS = {
    "weights": "serve the same revision of the model on all of them",
    "dtype": "set the same --dtype, --quantization and --kv-cache-dtype on all of them",
    "kv_layout": "run the same vLLM, attention backend, --block-size and kind of GPU on all of them",
    "parallel": "set the same tensor, pipeline and context parallel sizes on all of them",
    "chunk_tokens": "set the same chunk_tokens on all of them",
    "hash_algorithm": "set the same --prefix-caching-hash-algo on all of them",
    "hash_seed": "set the same PYTHONHASHSEED in the environment of all of them: unset, xxhash draws one at random",
    "epoch": "set the same epoch in kv_connector_extra_config of all of them",
}
"""By the part of a namespace that differs."""
MEANT = ("dead", "flushed", "closing")
"""Why chunks are not written behind though nothing is too slow: the tier was dead, a flush, the end of a store."""
KINDS = ("fetch", "recompute")
"""Of predicted seconds."""
FAILED = ("error", "full", "timeout")
"""The same if the tier was asked, and did not take them."""
MEND_OFF = "fetching is off already, rightly: a faster link would bring it back, else take the tier away"
MEND_ON = (
    "let remote_fetch run in mode auto, or get a faster link (plan: what it takes; doctor --storage: what it gives); "
    "the gate meanwhile recomputes"
)
MEND_WRITES = "look at its room, its permissions and its time-outs (df -h; Redis: maxmemory-policy allkeys-lru)"


@check("error")
def namespaces_differ(facts: AllFacts) -> Found:
    """Engines of one model that cannot read each other's chunks."""
    engines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    parts: dict[str, Mapping[str, str]] = {}
    for store in facts.answering:
        namespaces = store.status.get("namespaces") or {}
        parts |= namespaces
        for client in store.clients:
            digest = str(client.get("namespace") or "")
            own = namespaces.get(digest) or store.pools.get(digest) or {}
            if model := str(own.get("model") or ""):
                engines[model][digest].add(f"{client.get('engine')} at {store.name}")
    for model, by_namespace in sorted(engines.items()):
        if len(by_namespace) > 1:
            groups = sorted(", ".join(sorted(names)) for names in by_namespace.values())
            differing = _differing([parts.get(digest, {}) for digest in by_namespace])
            told = f"they differ in {', '.join(differing)}" if differing else "in what, their stores do not tell"
            wrong = f"engines of {model} share nothing between {len(groups)} groups ({' | '.join(groups)}): {told}"
            mends = [MENDS[name] for name in differing if name in MENDS]
            yield model, wrong, "; ".join(mends) or "compare their vLLM options; then PYTHONHASHSEED"


def _differing(parts: list[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for own in parts for name in own) if all(parts) else {}
    return [name for name in names if len({own.get(name) for own in parts}) > 1]


@of_store("warning")
def unsalted_traffic(store: StoreFacts) -> Told:
    """As the agent's incident of this name, but since the store's start instead of in the last hour."""
    counts = store.counted.split("requests_total", "salted")
    quotas = len(store.tuning.get("tenants") or {})
    for wrong in among_tenants(counts.get("no", 0.0), counts.get("yes", 0.0), quotas):
        yield wrong, ALSO_LOOKED_FOR["unsalted_traffic"]


@of_store("warning")
def remote_slow(store: StoreFacts) -> Told:
    """A remote whose chunks would be recomputed faster than fetched, by the gate's own predictions."""
    found = store.counted.total("gate_candidate_requests_total", tier="remote")
    known = min(store.counted.count("gate_predicted_seconds", tier="remote", kind=kind) for kind in KINDS)
    seconds = store.counted.split("gate_candidate_seconds_total", "kind", tier="remote")
    fetch_s, recompute_s = (seconds.get(kind, 0.0) for kind in KINDS)
    if known >= FEW and fetch_s > recompute_s:
        tokens = store.counted.total("gate_candidate_tokens_total", tier="remote")
        times = f"{1e3 * fetch_s / known:.0f} ms to fetch, {1e3 * recompute_s / known:.0f} ms to recompute"
        wrong = f"the {tokens / found:,.0f} tokens that a request finds in remote on average take {times}"
        off = read(store.tuning, "tiers.remote.fetch") == "off"
        yield wrong, MEND_OFF if off else MEND_ON


@of_store("warning")
def write_behind_drops(store: StoreFacts) -> Told:
    for tier in SLOWER:
        told = store.counted.split("write_behind_dropped_total", "reason", tier=tier)
        lost = {reason: count for reason, count in told.items() if reason not in MEANT}
        writes = partial(store.counted.count, "tier_operation_seconds", tier=tier, operation="write")
        written = writes(outcome="ok") + writes(outcome="there")
        dropped = sum(lost.values())
        if often(dropped, dropped + written):
            wrong = f"{dropped:.0f} of {dropped + written:.0f} chunks never reached {tier} ({', '.join(sorted(lost))})"
            slow = 2 * sum(lost.get(reason, 0.0) for reason in FAILED) <= dropped
            mend = f"{tier} takes less than engines make: admit fewer (second_access), or a faster one"
            yield wrong, mend if slow else f"writes to {tier} fail: {MEND_WRITES}"


@of_store("warning")
def corrupt_chunks(store: StoreFacts) -> Told:
    for tier in TIERS:
        if found := store.counted.total("tier_errors_total", tier=tier, reason="corrupt"):
            wrong = f"{format_count(found, 'chunk')} in {tier} differed from what was written, and had to be recomputed"
            yield wrong, "look at who else writes there, at the disk, and at the host's memory"
