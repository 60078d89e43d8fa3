"""Checks of what engines export on vLLM's own ``/metrics``. Pure."""

from tiertune_agent.doctor.facts import EngineFacts
from tiertune_agent.doctor.finding import Told, of_engine, often
from tiertune_connector.units import format_count

INFO = "vllm:cache_config_info"
REQUESTS = "vllm:time_to_first_token_seconds_count"
CONNECTED, LATE, STORED = (
    "tiertune_engine_store_connected", "tiertune_engine_late_lookups_total", "tiertune_engine_stored_chunks_total",
)  # fmt: skip
NO_ROOM = (
    "vllm:kv_offload_allocation_failure_total",
    "vllm:kv_offload_tiering_promotion_allocation_failures_total",
)
WANTED = (INFO, REQUESTS, CONNECTED, LATE, STORED, *NO_ROOM)
"""The metrics that are read of an engine."""
LOST = ("unreachable", "late", "failed", "full")
"""Results of chunks that their store never got; a ``busy`` chunk is not lost, another engine stores it."""


@of_engine("error")
def engine_unreachable(engine: EngineFacts) -> Told:
    if engine.problem:
        authority = "stores_ca_file of --config, else TIERTUNE_CA_FILE"
        mend = f"start it, or mend its address, its key or, for https://, {authority}"
        yield f"no engine answers: {engine.problem}", mend
    elif not engine.told.declares(INFO):
        yield "it tells no metrics of vLLM", "start it without --disable-log-stats"


@of_engine("error")
def engine_without_store(engine: EngineFacts) -> Told:
    ranks = engine.told.split(CONNECTED, "engine")
    away = [rank for rank, on in ranks.items() if not on]
    if away:
        which = f"{len(away)} of {format_count(len(ranks), 'rank')} ({', '.join(away)})"
        wrong = f"no store at {which}: prompts are recomputed there"
        yield wrong, "start the store of that host at the socket that the engine names; same user"


@of_engine("warning")
def staging_small(engine: EngineFacts) -> Told:
    failures = sum(engine.total(name) for name in NO_ROOM)
    if often(failures, engine.total(REQUESTS)):
        wrong = f"staging had no room {failures:.0f} times in {engine.total(REQUESTS):.0f} requests: chunks were missed"
        mend = "raise staging, or leave it out (then it fits two steps and two longest prompts); and shm_size with it"
        yield wrong, mend


@of_engine("error")
def no_prefix_cache(engine: EngineFacts) -> Told:
    if engine.told.total(INFO, enable_prefix_caching="False"):
        wrong = "prefix caching is off: chunks have no keys, and nothing is shared"
        yield wrong, "start it without --no-enable-prefix-caching"


@of_engine("warning")
def random_hash_seed(engine: EngineFacts) -> Told:
    for name in engine.told.split(INFO, "prefix_caching_hash_algo"):
        if name.startswith("xxhash"):
            wrong = f"it hashes by {name}: without PYTHONHASHSEED its keys are its own, and change when it restarts"
            yield wrong, "set --prefix-caching-hash-algo sha256_cbor, or one PYTHONHASHSEED everywhere"


@of_engine("warning")
def lookups_late(engine: EngineFacts) -> Told:
    late, requests = engine.total(LATE), engine.total(REQUESTS)
    if often(late, requests):
        wrong = f"the store did not answer {late:.0f} of {requests:.0f} requests within lookup_deadline"
        yield wrong, "give the store its own cores, or raise lookup_deadline"


@of_engine("warning")
def chunks_lost(engine: EngineFacts) -> Told:
    results = engine.told.split(STORED, "result")
    lost, every = sum(results.get(one, 0.0) for one in LOST), sum(results.values())
    if often(lost, every):
        why = ", ".join(f"{results[one]:.0f} {one}" for one in LOST if results.get(one))
        wrong = f"{lost:.0f} of {every:.0f} chunks that it finished reached no store ({why})"
        yield wrong, "look at the store: is it there, has its DRAM room, are its cores free"
