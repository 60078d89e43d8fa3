"""Every metric of the store in one place: name, kind, help, labels, buckets. Declaring one registers it."""

from dataclasses import dataclass
from typing import Literal

from tiertune_connector.eviction import ALGORITHMS

PREFIX = "tiertune_"
SECONDS_BUCKETS = tuple(round(1e-4 * 1.7**i, 7) for i in range(26))
"""100 µs to about 58 s, geometric."""
IDLE_BUCKETS = (*SECONDS_BUCKETS, *(60.0 * 2**i for i in range(1, 14)))
"""SECONDS_BUCKETS, continued to 5.7 days: a median beyond the last bound is given as that bound."""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One family. ``name`` is without prefix; every family also carries the label ``store``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LABELS = {
    "store": "The store's configured name, else an id kept in its state directory; `fleet` is the remote of all.",
    "namespace": "Digest of all that makes chunks exchangeable.",
    "model": "Served name of the model that the namespace belongs to.",
    "stage": "As an engine's `stage` says: `all`, prefill, decode, thinker, ...; `other` for one too many.",
    "tier": "`gpu` and `staging` (an engine's own), `dram`, `disk`, `remote`; `unknown` where an observed source tells "
    "its hits as a whole.",
    "server": "Address of one server of a remote tier that has several.",
    "result": "`hit` or `miss`; of seconds by length `saved` or `lost`.",
    "origin": "Who computed what was found: `self`, `same_host` or `other_host`; empty for a miss. What the store does "
    "not remember (stored before its start, or about a million chunks ago) counts as `same_host` on disk and as "
    "`other_host` in the remote. Of an observed source `unknown`, but on its GPUs.",
    "salted": "`yes` or `no`; of an observed source that does not tell `unknown`.",
    "state": "Of a capacity `desired` or `effective`, of a tier `ok`, `slow`, `bypassed`, `recovering` or `dead`, "
    "of a tuning `applied`, of memory `used` or `free`, of a decision as in the history.",
    "algorithm": f"Of eviction: `{'`, `'.join(ALGORITHMS)}`; of the remote its `maxmemory-policy`.",
    "reason": "Why, in one word: of the gate, of an eviction, of an error (`corrupt`, `timeout`, `late`, `error`), of "
    "a refusal; `other` for one that is no word of ours, `unknown` where an observed source does not tell.",
    "operation": "`present`, `read`, `write`, `flush`; of disk `attach` and `scrub`, of remote `encode` and `decode`; "
    "of errors also `probe`, a read that only measures.",
    "form": "`payload` as engines have it, `stored` as it was coded.",
    "outcome": "Of an operation `ok`, `there` (of a write), `miss`, `corrupt`, `full`, `timeout` or `error`; "
    "of the gate's choice `won`, `lost`, `late`, `failed`, `skipped` or `unknown`.",
    "decision": "`fetch` or `recompute`.",
    "kind": "Of seconds `fetch` or `recompute`, of money `saved`, `lost`, `rent` or `network`; of an incident its own.",
    "tokens": "Least tokens of a class of lengths.",
    "group": "`held` or `fetched`.",
    "sum": "What is summed up: requests, seconds, tokens, their squares and product.",
    "capacity_bytes": "Size of the simulated pool.",
    "phase": "`prefill`, `decode`, `mixed` or `kv_wait`.",
    "gpu": "UUID of the device.",
    "place": "Where in the store.",
    "tuner": "Name of the tuner.",
    "setting": "Last part of the field that was changed.",
    "change": "What it became: its value, or `up`, `down` or `same` for figures; `default` where it was given up.",
    "job": "`loop` (a round of the agent), `sum_up` or `prune` (of the history); of errors also `lead` (who leads is "
    "unknown).",
}
"""Meaning of every label, and its values where they are few."""
OTHER = "other"
"""Stands for a label's value that comes from elsewhere and is unknown, or one too many."""
POOL = ("namespace", "model")
"""Labels of metrics about one pool."""


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _seconds(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels, SECONDS_BUCKETS)


METRICS: tuple[Metric, ...] = (
    _counter("requests_total", "Requests that looked up, by whether they carried a salt.", "salted", *POOL),
    _counter("prompt_tokens_total", "Prompt tokens of requests that looked up.", "stage", *POOL),
    _counter(
        "tier_lookup_tokens_total",
        "Tokens asked of a tier, by result; a tier below a hit is not asked. "
        "Origin of a hit: self, same_host or other_host.",
        "tier",
        "result",
        "origin",
        "stage",
        *POOL,
    ),
    _counter(
        "duplicate_prefill_tokens_total",
        "Prompt tokens that an engine computed although a tier had them when the request was looked up, or while "
        "another engine computed them too.",
        *POOL,
    ),
    _gauge("tier_resident_bytes", "Bytes held.", "tier", *POOL),
    _gauge("tier_pinned_bytes", "Bytes held and in use by a transfer.", "tier", *POOL),
    _gauge("tier_capacity_bytes", "Bytes allowed: desired or effective.", "tier", "state", *POOL),
    _counter(
        "tier_evictions_total",
        "Chunks that left to make room, or because of a smaller capacity.",
        "tier",
        "algorithm",
        "reason",
        *POOL,
    ),
    _counter(
        "tier_evicted_unused_total",
        "Evicted chunks that nothing had used since they came, in DRAM and on disk.",
        "tier",
        *POOL,
    ),
    Metric(
        "tier_evicted_idle_seconds",
        "histogram",
        "Seconds from a chunk's last touch to its eviction.",
        ("tier", *POOL),
        IDLE_BUCKETS,
    ),
    _seconds(
        "tier_operation_seconds",
        "Seconds of one operation on a tier. A write has the outcome there if the tier had the chunk: nothing moved.",
        "tier",
        "operation",
        "outcome",
    ),
    _counter("tier_transfer_bytes_total", "Payload bytes moved.", "tier", "operation"),
    _counter("tier_errors_total", "Operations that failed.", "tier", "operation", "reason"),
    _counter(
        "codec_bytes_total", "Bytes that codecs took in and gave out, for chunks in the remote.", "operation", "form"
    ),
    _counter(
        "tier_spared_bytes_total", "Payload bytes moved that the codec kept off the network.", "tier", "operation"
    ),
    _gauge("tier_health", "1 for the state that a tier is in.", "tier", "state"),
    _gauge("tier_server_health", "The same for one server of a tier that has several.", "tier", "server", "state"),
    _counter("write_behind_dropped_total", "Chunks to be written behind that were not.", "tier", "reason"),
    _gauge("write_behind_queued", "Chunks waiting to be written behind.", "tier"),
    _counter("quota_refused_chunks_total", "Chunks that DRAM did not take: their tenant's quota was full.", *POOL),
    _counter(
        "gate_requests_total",
        "Requests whose lookup found chunks in the tier, by decision.",
        "tier",
        "decision",
        "reason",
    ),
    _counter(
        "gate_outcomes_total", "What became of decisions: won, lost, late, failed, skipped, unknown.", "tier", "outcome"
    ),
    _seconds("gate_predicted_seconds", "Predicted seconds of the fetch, and of recomputing instead.", "tier", "kind"),
    _seconds("gate_actual_seconds", "Seconds that the chosen way took.", "tier", "kind"),
    _counter("gate_candidate_requests_total", "Requests that found chunks in the tier, whatever was decided.", "tier"),
    _counter("gate_candidate_tokens_total", "Tokens of those chunks.", "tier"),
    _counter("gate_candidate_bytes_total", "Bytes of those chunks, with those of other groups of layers.", "tier"),
    _counter(
        "gate_fetched_tokens_total",
        "Tokens of chunks that loads from the tier began to fetch, failed ones too.",
        "tier",
    ),
    _counter(
        "gate_candidate_seconds_total",
        "Sum of the predictions for those chunks, over requests for which both kinds are known.",
        "tier",
        "kind",
    ),
    _counter("saved_seconds_total", "Predicted recompute seconds less the fetch's, where positive.", "tier"),
    _counter("lost_seconds_total", "Fetch seconds less predicted recompute seconds, where positive.", "tier"),
    _counter(
        "gate_length_requests_total",
        "Fetches counted as saved or lost, by their class's least tokens.",
        "tier",
        "tokens",
    ),
    _counter(
        "gate_length_seconds_total",
        "Seconds saved or lost, as above, by the least tokens of the fetch's length class.",
        "tier",
        "tokens",
        "result",
    ),
    _gauge("fetch_estimate_t0_seconds", "Estimated seconds before the first byte.", "tier"),
    _gauge("fetch_estimate_bytes_per_second", "Estimated bandwidth for chunks of the recent mean size.", "tier"),
    _gauge("fetch_estimate_age_seconds", "Age of the newest observation of the estimate.", "tier"),
    _gauge("fetch_estimate_queue_seconds", "Estimated seconds of the transfers under way.", "tier"),
    _gauge("fetch_estimate_doubt", "Standard error of the logarithm of predicted fetch seconds.", "tier"),
    _counter(
        "holdout_sums_total",
        "Of requests that found chunks in the tier while a share is held out (group held) and the rest may fetch "
        "(fetched): how many, their seconds to the first token, the tokens found, and sums of squares and products.",
        "tier",
        "group",
        "sum",
    ),
    _counter("probes_total", "Small background fetches that keep the estimate fresh.", "tier", "outcome"),
    _counter(
        "whatif_tokens_total",
        "Tokens that a DRAM pool of this capacity and algorithm would have had, or missed: an estimate.",
        "algorithm",
        "capacity_bytes",
        "result",
        *POOL,
    ),
    _counter(
        "stage_gpu_seconds_total",
        "GPU seconds (on CPU: wall seconds) by stage and phase; kv_wait: seconds that requests waited for chunks.",
        "stage",
        "phase",
    ),
    _counter("stage_tokens_total", "Tokens by stage and phase.", "stage", "phase"),
    _gauge("gpu_utilization_ratio", "Share of recent time in which a kernel ran.", "gpu", "stage"),
    _gauge("gpu_memory_bytes", "Memory of the GPU: used or free.", "gpu", "stage", "state"),
    _gauge("gpu_power_watts", "Power drawn now.", "gpu", "stage"),
    _counter("gpu_energy_joules_total", "Energy used.", "gpu", "stage"),
    _gauge("tuning_version", "Version of the tuning document.", "state"),
    _gauge("clients", "Connected clients."),
    _gauge("quarantined_slots", "Slots that a lost client, or a tier that hangs, may still be writing."),
    _counter("rejected_hellos_total", "Clients turned away, by reason.", "reason"),
    _counter("internal_errors_total", "Unexpected failures caught at an edge.", "place"),
)

BY_NAME = {metric.name: metric for metric in METRICS}
