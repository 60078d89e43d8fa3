"""Deployments for the doctor: what makes one broken, and the same when it is healthy, of every check."""

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.doctor.checks.of_engines import WANTED
from tiertune_agent.doctor.facts import (
    AgentFacts,
    AllFacts,
    Clock,
    EngineFacts,
    ServerFacts,
    StorageFacts,
    StoreFacts,
    counted_in,
)
from tiertune_agent.records import Histogram

VERSION = "0.1.0"
ONE, OTHER = "aa" * 16, "bb" * 16
PARTS = {"model": "llama", "weights": "w", "hash_seed": "s", "chunk_tokens": "256"}
RIGHT = Clock()
"""As this host's."""


def store(name="host-a", *counters, called="", clock=RIGHT, tuning=None, **status):
    """A store that is well but for what is said; ``counters``: ``(name, {label: value}, count)`` each."""
    told = {"store": name, "boot_id": name, "version": VERSION, "uptime_s": 3600.0}
    told |= {"clients": [client("e0")], "namespaces": {ONE: PARTS}, "tiers": tiers()}
    counted = counted_in({(name, tuple(labels.items())): value for name, labels, value in counters})
    return StoreFacts(
        f"http://{name}:7410", called, status=told | status, tuning=tuning or {}, counted=counted, clock=clock
    )


def client(engine, namespace=ONE):
    return {"client": engine, "engine": engine, "stage": "all", "namespace": namespace, "pid": 1}


def tiers(**states):
    well = {"dram": {"health": "ok", "reason": ""}, "disk": {"health": "absent", "reason": "not configured"}}
    return well | {"remote": {"health": "ok", "reason": ""}} | states


def agent(*incidents, stores=(), policies=None, clock=RIGHT, **fleet):
    told = {"leader": True, "window_s": 15.0, "frozen": None, "stores": list(stores)}
    return AgentFacts(
        "http://agent:7420", fleet=told | fleet, incidents=incidents, policies=policies or {}, clock=clock
    )


def heard(name="host-a", age_s=5.0, **more):
    """A store as the agent tells it."""
    return {"name": name, "url": f"http://{name}:7410", "age_s": age_s, "bypass": False} | more


def engine(text="", url="http://engine:8000"):
    told = '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{engine="0",enable_prefix_caching="True"} 1\n'
    return EngineFacts(url, told=Exposition(told + text, WANTED))


def facts(**parts):
    return AllFacts(VERSION, **parts)


def with_store(*counters, **more):
    return facts(stores=[store("host-a", *counters, **more)])


def with_agent(*incidents, **more):
    return facts(agent=agent(*incidents, **more))


def with_engine(text):
    return facts(engines=[engine(text)])


def with_server(**told):
    well = {"maxmemory": 1 << 30, "policy": "allkeys-lru"}
    return facts(servers=[ServerFacts("redis://r:6379/0", **well | told)])


def with_storage(**told):
    return facts(storage=StorageFacts("file:///x", **told))


def with_capacity(effective):
    """Of DRAM, of which 4 GiB were set."""
    dram = {"applied": {"capacity_bytes": 4 << 30}, "effective": {"capacity_bytes": effective}}
    return with_store(pools={ONE: {"dram": dram}})


def predicted(**tiers):
    """Of so many requests it was foretold what fetching takes, and what recomputing."""
    return [
        ("gate_predicted_seconds", {"tier": tier, "kind": kind}, Histogram(requests, 1.0, {}))
        for tier, requests in tiers.items()
        for kind in ("fetch", "recompute")
    ]


def slow_remote(rate, requests=100, fetch="on", **more):
    """Requests found 8,000 tokens each, of 128 KiB a token, in a remote of so many bytes per second; 145 ms of work."""
    counters = [
        ("gate_candidate_requests_total", {"tier": "remote"}, float(requests)),
        ("gate_candidate_tokens_total", {"tier": "remote"}, 8000.0 * requests),
        (
            "gate_candidate_seconds_total",
            {"tier": "remote", "kind": "fetch"},
            requests * (0.001 + 8000 * 131072 / rate),
        ),
        ("gate_candidate_seconds_total", {"tier": "remote", "kind": "recompute"}, requests * 0.145),
        *predicted(remote=requests),
    ]
    return with_store(*counters, tuning={"tiers": {"remote": {"fetch": fetch}}}, **more)


def two_engines(second, parts):
    """Of one model, at two stores."""
    there = store("host-b", clients=[client("e1", second)], namespaces={second: PARTS | parts})
    return facts(stores=[store(), there])


def metrics(name, kind="counter", **samples):
    """Of an engine, after 100 requests: the values of ``name`` by the value of a label ``label=value``."""
    lines = ["# TYPE vllm:time_to_first_token_seconds histogram", "vllm:time_to_first_token_seconds_count 100"]
    lines += [f"# TYPE {name} {kind}"]
    lines += [f"{name}{{{label}}} {value}" for label, value in samples.items()]
    return "\n".join(lines) + "\n"


def labelled(name, label, kind="counter", **samples):
    return metrics(name, kind, **{f'{label}="{text}"': value for text, value in samples.items()})


def dropped(reason, count, tier="remote"):
    return ("write_behind_dropped_total", {"tier": tier, "reason": reason}, count)


def written(count, outcome="ok"):
    """Chunks that reached the remote, or were there."""
    labels = {"tier": "remote", "operation": "write", "outcome": outcome}
    return ("tier_operation_seconds", labels, Histogram(count, 1.0, {}))


CASES = {
    "agent_unreachable": (
        facts(agent=AgentFacts("http://agent:7420", problem="connection refused")),
        with_agent(),
        ("connection refused", "start it", "its authority in TIERTUNE_CA_FILE"),
    ),
    "agent_stuck": (
        facts(agent=agent(stores=[heard(age_s=600.0)]), stores=[store()]),
        facts(agent=agent(stores=[heard(age_s=20.0)]), stores=[store()]),
        ("10m 00s", "its log"),
    ),
    "policy_invalid": (
        with_agent(policies={"source": "/p.yaml", "problem": "/p.yaml:2:7: mode: aotu"}),
        with_agent(policies={"source": "/p.yaml", "problem": None}),
        ("/p.yaml:2:7", "tiertune policy check"),
    ),
    "policy_without_effect": (
        with_agent(policies={"source": "/p.yaml", "notes": ["objectives: no tuner aims at one"]}),
        with_agent(policies={"source": "/p.yaml", "notes": []}),
        ("objectives", "take the key out"),
    ),
    "frozen": (
        with_agent(frozen={"who": "anna", "since": "2025-03-05T12:00:00", "until": None, "reason": "release"}),
        with_agent(frozen={"who": "anna", "since": "2025-03-05T12:00:00", "until": "2025-03-05T14:00:00"}),
        ("anna", "release", "tiertune unfreeze"),
    ),
    "bypassed": (with_store(tuning={"bypass": True}), with_store(tuning={"bypass": False}), ("bypass off",)),
    "store_unreachable": (
        facts(stores=[StoreFacts("http://host-a:7410", "host-a", problem="timed out")]),
        with_store(),
        ("http://host-a:7410", "timed out", "start the store", "stores_ca_file"),
    ),
    "clock_skew": (
        facts(agent=agent(clock=Clock(60.0, 0.1)), stores=[store(clock=Clock(0.0, 0.1))]),
        facts(agent=agent(clock=Clock(60.0, 0.1)), stores=[store(clock=Clock(60.5, 0.1))]),
        ("1m 00s behind the agent's", "time service"),
    ),
    "version_mismatch": (with_store(version="0.0.9"), with_store(), ("version 0.0.9", "version 0.1.0", "agents first")),
    "engines_refused": (
        with_store(("rejected_hellos_total", {"reason": "protocol"}, 3.0)),
        with_store(("rejected_hellos_total", {"reason": "protocol"}, 0.0)),
        ("3 times", "one version"),
    ),
    "tier_dead": (
        with_store(tiers=tiers(remote={"health": "dead", "reason": "timeout"})),
        with_store(),
        ("remote is dead: timeout", "start the remote, or mend its address"),
    ),
    "tier_slow": (
        with_store(tiers=tiers(disk={"health": "slow", "reason": "3 of 10 late"})),
        with_store(tiers=tiers(disk={"health": "ok", "reason": ""})),
        ("disk is slow: 3 of 10 late", "doctor --storage"),
    ),
    "capacity_not_effective": (
        with_capacity(1 << 30),
        with_capacity(4 << 30),
        ("1.0 GiB of 4.0 GiB", "no more memory"),
    ),
    "no_engine": (with_store(clients=[]), with_store(clients=[], uptime_s=5.0), ("no engine", "1h 00m", "socket")),
    "remote_unreachable": (
        with_server(problem="timed out"),
        with_server(),
        ("timed out", "start it"),
    ),
    "remote_unbounded": (
        with_server(maxmemory=0, used_bytes=1 << 30),
        with_server(),
        ("maxmemory is 0", "1.0 GiB", "set maxmemory"),
    ),
    "remote_keeps_all": (
        with_server(policy="noeviction"),
        with_server(policy="allkeys-lfu"),
        ("noeviction", "allkeys-lru"),
    ),
    "storage_failed": (
        with_storage(problem="write: error"),
        with_storage(fetch_s=0.1, recompute_s=0.3),
        ("write: error",),
    ),
    "storage_slow": (
        with_storage(prompt_tokens=8000, fetch_s=10.0, recompute_s=0.3, break_even_tokens=900_000.0),
        with_storage(prompt_tokens=8000, fetch_s=0.1, recompute_s=0.3),
        ("10000 ms", "300 ms", "900,000 tokens"),
    ),
    "namespaces_differ": (
        two_engines(OTHER, {"hash_seed": "another"}),
        two_engines(ONE, {}),
        ("e0 at host-a | e1 at host-b", "differ in hash_seed", "PYTHONHASHSEED"),
    ),
    "unsalted_traffic": (
        with_store(("requests_total", {"salted": "yes"}, 900.0), ("requests_total", {"salted": "no"}, 100.0)),
        with_store(("requests_total", {"salted": "no"}, 1000.0)),
        ("100 of 1000 requests", "cache_salt"),
    ),
    "remote_slow": (
        slow_remote(1e9),
        slow_remote(100e9),
        ("8,000 tokens", "1050 ms to fetch", "145 ms"),
    ),
    "write_behind_drops": (
        with_store(dropped("queue", 100.0), written(900.0)),
        with_store(dropped("queue", 10.0), written(9.0), written(891.0, "there")),
        ("100 of 1000 chunks never reached remote", "queue", "second_access"),
    ),
    "corrupt_chunks": (
        with_store(("tier_errors_total", {"tier": "disk", "operation": "scrub", "reason": "corrupt"}, 2.0)),
        with_store(("tier_errors_total", {"tier": "disk", "operation": "read", "reason": "timeout"}, 2.0)),
        ("2 chunks in disk",),
    ),
    "engine_unreachable": (
        facts(engines=[EngineFacts("http://engine:8000", problem="connection refused")]),
        with_engine(""),
        ("connection refused", "stores_ca_file of --config, else TIERTUNE_CA_FILE"),
    ),
    "engine_without_store": (
        with_engine(labelled("tiertune_engine_store_connected", "engine", "gauge", **{"0": 1, "1": 0})),
        with_engine(labelled("tiertune_engine_store_connected", "engine", "gauge", **{"0": 1, "1": 1})),
        ("1 of 2 ranks", "(1)", "start the store"),
    ),
    "staging_small": (
        with_engine(labelled("vllm:kv_offload_tiering_promotion_allocation_failures_total", "engine", **{"0": 40})),
        with_engine(labelled("vllm:kv_offload_tiering_promotion_allocation_failures_total", "engine", **{"0": 4})),
        ("40 times in 100 requests", "raise staging"),
    ),
    "no_prefix_cache": (
        with_engine('vllm:cache_config_info{engine="1",enable_prefix_caching="False"} 1\n'),
        with_engine(""),
        ("--no-enable-prefix-caching",),
    ),
    "random_hash_seed": (
        with_engine('vllm:cache_config_info{engine="0",prefix_caching_hash_algo="xxhash"} 1\n'),
        with_engine('vllm:cache_config_info{engine="0",prefix_caching_hash_algo="sha256_cbor"} 1\n'),
        ("xxhash", "PYTHONHASHSEED", "sha256_cbor"),
    ),
    "lookups_late": (
        with_engine(labelled("tiertune_engine_late_lookups_total", "engine", **{"0": 50})),
        with_engine(labelled("tiertune_engine_late_lookups_total", "engine", **{"0": 2})),
        ("50 of 100 requests", "lookup_deadline"),
    ),
    "chunks_lost": (
        with_engine(labelled("tiertune_engine_stored_chunks_total", "result", stored=60, full=40)),
        with_engine(labelled("tiertune_engine_stored_chunks_total", "result", stored=60, present=40)),
        ("40 of 100 chunks", "40 full"),
    ),
}
"""By check: broken, healthy, and words of the finding."""
