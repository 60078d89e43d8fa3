"""Checks of the traffic by the stores' counters: who shares with whom, what fetches cost, what is dropped. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

from tiertune_agent.doctor.checks.of_agent import ALSO_LOOKED_FOR
from tiertune_agent.doctor.facts import AllFacts, StoreFacts
from tiertune_agent.doctor.finding import OFTEN, Found, Told, check, of_store, often
from tiertune_agent.fields import read
from tiertune_agent.incidents.detectors import FEW, among_tenants
from tiertune_agent.replay.engine import break_even_tokens
from tiertune_agent.replay.scenario import GpuSpec, ModelSpec
from tiertune_connector.tuning import SLOWER, TIERS
from tiertune_connector.units import format_count, format_size

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
MEND_ON = "let remote_fetch run in mode auto, or get a faster link (plan: what it takes); the gate meanwhile recomputes"
MEND_WRITES = "look at its room, its permissions and its time-outs (df -h; Redis: maxmemory-policy allkeys-lru)"


@check("error")
def namespaces_differ(facts: AllFacts) -> Found:
    """Engines of one model that cannot read each other's chunks."""
    engines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    parts: dict[str, Mapping[str, str]] = {}
    for store in facts.answering:
        parts |= store.status.get("namespaces") or {}
        for client in store.clients:
            digest = str(client.get("namespace") or "")
            model = _model(store, digest)
            if digest and model:
                engines[model][digest].append(f"{client.get('engine')} at {store.name}")
    for model, by_namespace in sorted(engines.items()):
        if len(by_namespace) > 1:
            groups = sorted(", ".join(sorted(names)) for names in by_namespace.values())
            differing = _differing([parts.get(digest, {}) for digest in by_namespace])
            told = f"they differ in {', '.join(differing)}" if differing else "in what, their stores do not tell"
            wrong = f"engines of {model} share nothing between {len(groups)} groups ({' | '.join(groups)}): {told}"
            mends = [MENDS[name] for name in differing if name in MENDS]
            yield model, wrong, "; ".join(mends) or "compare their vLLM options; then PYTHONHASHSEED"


def _model(store: StoreFacts, digest: str) -> str:
    own = (store.status.get("namespaces") or {}).get(digest) or store.pools.get(digest) or {}
    return str(own.get("model") or "")


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
        yield "; ".join((wrong, *_break_even(store))), MEND_OFF if off else MEND_ON


def _break_even(store: StoreFacts) -> Iterator[str]:
    """For each model whose engines reported their prefill cost, at the remote's present speed."""
    first_s = store.counted.gauge("fetch_estimate_t0_seconds", tier="remote")
    rate = store.counted.gauge("fetch_estimate_bytes_per_second", tier="remote")
    if first_s is None or not rate:
        return
    for digest, pool in store.pools.items():
        line, size = store.prefill(digest), int(pool.get("chunk_tokens") or 0)
        if size and line and line.params and line.layers and line.width and line.seconds_per_flop:
            shape = ModelSpec(params=line.params, layers=line.layers, width=line.width, kv_bytes=1)
            gpu = GpuSpec(flops=1 / line.seconds_per_flop, utilisation=1)
            token_s = float(pool.get("chunk_bytes") or 0) / size / rate
            even = break_even_tokens(shape, gpu, token_s, first_s)
            yield f"at {rate / 1e6:.0f} MB/s {pool.get('model') or digest} breaks even at {even:,.0f} tokens"


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
def loads_late(store: StoreFacts) -> Told:
    for tier in TIERS:
        outcomes = store.counted.split("gate_outcomes_total", "outcome", tier=tier)
        all_ = sum(outcomes.get(one, 0.0) for one in ("won", "lost", "late", "failed"))
        bad = sum(outcomes.get(one, 0.0) for one in ("late", "failed"))
        if often(bad, all_):
            wrong = f"{bad:.0f} of {all_:.0f} fetches from {tier} came too late or failed"
            yield wrong, "look at the tier's load and link; a higher margin fetches less, surer"


@of_store("warning")
def no_room(store: StoreFacts) -> Told:
    """What a load brings comes into DRAM: no more of a prompt than its pool there takes at once."""
    for tier in SLOWER:
        all_ = store.counted.total("gate_requests_total", tier=tier)
        refused = store.counted.total("gate_requests_total", tier=tier, reason="no_room")
        if often(refused, all_):
            size = format_size(store.counted.gauge("tier_capacity_bytes", tier="dram", state="effective") or 0)
            wrong = f"{refused:.0f} of {all_:.0f} requests had no room in DRAM ({size}) for their chunks in {tier}"
            yield wrong, "raise the capacity of DRAM, or the pool's own there, until the longest shared prompt fits"


@of_store("warning")
def corrupt_chunks(store: StoreFacts) -> Told:
    for tier in TIERS:
        if found := store.counted.total("tier_errors_total", tier=tier, reason="corrupt"):
            wrong = f"{format_count(found, 'chunk')} in {tier} differed from what was written, and had to be recomputed"
            yield wrong, "look at who else writes there, at the disk, and at the host's memory"


@of_store("note")
def quotas_full(store: StoreFacts) -> Told:
    refused = store.counted.total("quota_refused_chunks_total")
    if refused >= FEW:
        full = [who for who, told in (store.status.get("tenants") or {}).items() if _full(told)]
        wrong = f"{refused:.0f} chunks were refused: {', '.join(full) or 'a tenant'} has used its quota up"
        yield wrong, "raise the tenant's quota_bytes in the tuning, or leave it so"


def _full(told: Mapping[str, int]) -> bool:
    return told.get("resident_bytes", 0) >= (1 - OFTEN) * told.get("quota_bytes", 0)
