"""What panels show of series made for it: promtool evaluates the dashboards' own queries."""

import subprocess

import pytest
import yaml

from e2e.promql import DASHBOARDS, concrete, panel_queries
from e2e.servers import program
from tiertune_connector.catalogue import PREFIX

pytestmark = pytest.mark.real
QUERIES = {str(query): query for path in DASHBOARDS for query in panel_queries(path)}
POOL = 'store="host-a", namespace="n", model="m"'
MINUTES = 20


def counter(name, labels, per_minute):
    """One that grows evenly; one that stands still was counted before."""
    return {"series": f"{PREFIX}{name}{{{labels}, {POOL}}}", "values": f"600+{per_minute}x{MINUTES}"}


def shows(tmp_path, query, series, *expected):
    """AssertionError unless the panel shows exactly these: labels and value."""
    samples = [{"labels": labels, "value": value} for labels, value in expected]
    asked = {"expr": concrete(QUERIES[query].expr), "eval_time": f"{MINUTES}m", "exp_samples": samples}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"tests": [test]}))
    told = subprocess.run([program("promtool"), "test", "rules", path], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("panel", ["Algorithms at the size in force", "Algorithms at the size in force, in all"])
def test_algorithms_are_compared_at_the_size_that_a_pool_has(tmp_path, panel):
    """A pool of 200 bytes had 100 before: LRU is simulated there too, and is no part of what it hits now."""
    ghosts = [("lru", 100, 0, 240), ("lru", 200, 180, 60), ("lru", 400, 240, 0)]
    ghosts += [("arc", 100, 0, 0), ("arc", 200, 120, 120)]
    series = [
        counter("whatif_tokens_total", f'algorithm="{name}", capacity_bytes="{size}", result="{result}"', each)
        for name, size, *counts in ghosts
        for result, each in zip(("hit", "miss"), counts, strict=True)
    ]
    for tier, size in (("dram", 200), ("disk", 400)):
        for state in ("desired", "effective"):
            name = f'{PREFIX}tier_capacity_bytes{{tier="{tier}", state="{state}", {POOL}}}'
            series.append({"series": name, "values": f"100x9 {size}x{MINUTES}"})
    shows(tmp_path, f"whatif: {panel}: A", series, ('{algorithm="lru"}', 0.75), ('{algorithm="arc"}', 0.5))


def test_what_dram_hits_is_set_against_what_simulated_pools_are_asked(tmp_path):
    """These are asked for whole prompts, also for what an engine found in its own memory."""
    found = [("gpu", "hit", 60), ("gpu", "miss", 180), ("staging", "hit", 30), ("staging", "miss", 150)]
    found += [("dram", "hit", 30), ("dram", "miss", 120), ("remote", "hit", 60)]
    series = [
        counter("tier_lookup_tokens_total", f'tier="{tier}", result="{result}", stage="all"', each)
        for tier, result, each in found
    ]
    observed = f'{PREFIX}tier_lookup_tokens_total{{store="engine-b", tier="gpu", result="hit", stage="all"}}'
    series.append({"series": observed, "values": f"600+600x{MINUTES}"})  # nothing is simulated of what it is asked
    shows(tmp_path, "whatif: Too large, too small?: A", series, ("{}", 0.5))


def test_engines_that_tell_nothing_of_their_own_memory_leave_dram_s_hits(tmp_path):
    """Or nothing but misses: then none was hit."""
    labels = 'tier="dram", result="{}", stage="all"'
    missed = counter("tier_lookup_tokens_total", labels.format("miss"), 180)
    shows(tmp_path, "whatif: Too large, too small?: A", [missed], ("{}", 0.0))
    hit = counter("tier_lookup_tokens_total", labels.format("hit"), 60)
    shows(tmp_path, "whatif: Too large, too small?: A", [hit, missed], ("{}", 0.25))


def test_what_left_unused_is_a_share_where_that_is_told(tmp_path):
    """Nobody knows it of a Redis, nor of what is only observed, whose evictions have no algorithm: that is not none."""
    left = [("evictions", "dram", 120), ("evicted_unused", "dram", 30), ("evictions", "disk", 60)]
    algorithm = {"evictions": ', algorithm="lru"', "evicted_unused": ""}
    series = [counter(f"tier_{what}_total", f'tier="{tier}"{algorithm[what]}', each) for what, tier, each in left]
    series.append(counter("tier_evictions_total", 'tier="remote", algorithm="allkeys-lru"', 60))
    series.append({"series": f'{PREFIX}tier_evictions_total{{store="cache-a", tier="dram"}}', "values": "0+90x20"})
    shows(tmp_path, "tiers: Evicted without any use: A", series, ('{tier="dram"}', 0.25), ('{tier="disk"}', 0.0))


def test_a_store_that_has_ended_counts_as_long_as_what_it_told_is_rated(tmp_path):
    """Its prompts, as well as what was computed again: a half, there as here. An observed source never."""
    told = {"prompt_tokens_total": "600+60", "duplicate_prefill_tokens_total": "600+30", "tuning_version": "7+0"}
    series = [
        {"series": f'{PREFIX}{name}{{store="{store}", namespace="n"}}', "values": f"{values}x{until}"}
        for name, values in told.items()
        for store, until in (("left", f"{MINUTES - 2} stale"), ("here", MINUTES))
    ]
    observed = f'{PREFIX}prompt_tokens_total{{store="observed", namespace="n"}}'
    series.append({"series": observed, "values": f"600+60x{MINUTES}"})
    shows(tmp_path, "fleet: Computed again: A", series, ("{}", 0.5))


def test_no_prompt_is_found_more_than_whole(tmp_path):
    """What is found is counted after its prompt: for moments it is more, and then nothing was found nowhere."""
    series = [
        counter("prompt_tokens_total", 'stage="all"', 600),
        counter("tier_lookup_tokens_total", 'tier="dram", result="hit", origin="self", stage="all"', 660),
    ]
    shows(tmp_path, "fleet: Prompt tokens by tier: B", series, ("{}", 0.0))


def test_the_break_even_is_of_those_that_know_what_recomputing_takes(tmp_path):
    """Of 60 requests a minute, 1024 tokens of 128 KiB each, half know that they take 0.5 s; 1 GiB a second."""
    place = 'tier="remote"'
    series = [
        counter("gate_candidate_requests_total", place, 60),
        counter("gate_candidate_tokens_total", place, 60 << 10),
        counter("gate_candidate_bytes_total", place, 60 << 27),
        counter("gate_predicted_seconds_sum", f'{place}, kind="recompute"', 15),
        counter("gate_predicted_seconds_count", f'{place}, kind="recompute"', 30),
        counter("gate_candidate_seconds_total", f'{place}, kind="recompute"', 15),
    ]
    for name, value in (("bytes_per_second", 1 << 30), ("t0_seconds", 3 / 16)):
        gauge = f'{PREFIX}fetch_estimate_{name}{{store="host-a", {place}}}'
        series.append({"series": gauge, "values": f"{value}x{MINUTES}"})
    shows(tmp_path, "gate: Break-even length: A", series, ('{store="host-a", tier="remote"}', 512.0))


def test_a_request_is_shared_out_among_all_that_worked_in_the_time_shown(tmp_path):
    """Also if it has left since; not with an engine that is observed, which reports its waiting alone."""
    told = [("left", "prefill", "600+3x10"), ("left", "kv_wait", "600+1x10"), ("observed", "kv_wait", "600+9x20")]
    name = f"{PREFIX}stage_gpu_seconds_total"
    series = [
        {"series": f'{name}{{store="{store}", stage="all", phase="{phase}"}}', "values": f"{values} _x{MINUTES}"}
        for store, phase, values in told
    ]
    shares = [('{stage="all", phase="prefill"}', 0.75), ('{stage="all", phase="kv_wait"}', 0.25)]
    shows(tmp_path, "stages: Share of a request: A", series, *shares)


def test_a_request_costs_what_those_that_tell_it_spend(tmp_path):
    """Of three sources with as many requests one tells its work, one its waiting alone, and one nothing."""
    told = [("host-a", "prefill", 90), ("host-a", "kv_wait", 6), ("observed", "kv_wait", 18)]
    series = [
        {
            "series": f'{PREFIX}stage_gpu_seconds_total{{store="{store}", stage="all", phase="{phase}"}}',
            "values": f"600+{each}x{MINUTES}",
        }
        for store, phase, each in told
    ]
    for store in ("host-a", "observed", "silent"):
        for counted, labels in (("requests", 'salted="no"'), ("prompt_tokens", 'stage="all"')):
            name = f'{PREFIX}{counted}_total{{store="{store}", {labels}}}'
            series.append({"series": name, "values": f"600+60x{MINUTES}"})
    shows(tmp_path, "stages: Seconds of work per request: A", series, ("{}", 1.5))
    shows(tmp_path, "stages: KV wait per request: A", series, ("{}", 0.2))
    each = [('phase="prefill"', 1.5), ('phase="kv_wait"', 0.2)]
    by_stage, by_phase = ([(f"{{{stage}{one}}}", value) for one, value in each] for stage in ('stage="all", ', ""))
    shows(tmp_path, "stages: Seconds per request: A", series, *by_stage)
    shows(tmp_path, "fleet: Seconds per request, by phase: A", series, *by_phase)


@pytest.mark.parametrize(
    ("per_minute", "work_s"),
    [({"prefill": 60, "decode": 60}, 4.5), ({"decode": 60}, 3.0), ({"prefill": 0, "decode": 60}, 3.0)],
)
def test_a_request_counts_once_though_decode_looks_it_up_too(tmp_path, per_minute, work_s):
    """Prefill works 1.5 s on each, decode 3 s; where no prefill is seen, or none is at work, it is decode's part."""
    series = []
    for stage, requests in per_minute.items():
        for name, labels, each in (
            ("stage_gpu_seconds_total", f'stage="{stage}", phase="{stage}"', {"prefill": 1.5, "decode": 3}[stage]),
            ("requests_total", 'salted="no"', 1),
            ("prompt_tokens_total", f'stage="{stage}"', 1000),
        ):
            counted = f'{PREFIX}{name}{{store="{stage}", {labels}}}'
            series.append({"series": counted, "values": f"600+{each * requests:g}x{MINUTES}"})
    shows(tmp_path, "stages: Seconds of work per request: A", series, ("{}", work_s))


def test_requests_count_once_whatever_the_length_of_others_prompts(tmp_path):
    """Both stages of one pool, 3 s a request; another pool of the same store with a hundred times the tokens, 1 s."""
    series = [
        {
            "series": f'{PREFIX}{name}_total{{store="host-a", {labels}}}',
            "values": f"600+{each}x{MINUTES}",
        }
        for name, labels, each in (
            ("stage_gpu_seconds", 'stage="prefill", phase="prefill"', 60),
            ("stage_gpu_seconds", 'stage="decode", phase="decode"', 120),
            ("stage_gpu_seconds", 'stage="all", phase="prefill"', 60),
            ("requests", 'namespace="apart", salted="no"', 120),
            ("prompt_tokens", 'namespace="apart", stage="prefill"', 6000),
            ("prompt_tokens", 'namespace="apart", stage="decode"', 6000),
            ("requests", 'namespace="whole", salted="no"', 60),
            ("prompt_tokens", 'namespace="whole", stage="all"', 600_000),
        )
    ]
    shows(tmp_path, "stages: Seconds of work per request: A", series, ("{}", 2.0))
