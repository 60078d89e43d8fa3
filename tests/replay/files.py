"""Traces for tests: written here, shipped, or the larger ones that may lie beside the repository."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.simulate import RUNS, replay_document

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "policies" / "scenarios"
SCENARIO = SCENARIOS / "slice-8b-two-hosts.yaml"
CHAINS = [[0, 1, 2], [0, 1, 3], [4]]


def columns(chains=CHAINS):
    """A good trace of blocks of 16 tokens."""
    count = len(chains)
    return {
        "t": pa.array([float(row) for row in range(count)]),
        "input_len": pa.array([16 * len(chain) + 1 for chain in chains], pa.int32()),
        "session": pa.array(range(count), pa.int32()),
        "type": pa.array(["chat"] * count).dictionary_encode(),
        "hash_ids": pa.array(chains, pa.list_(pa.int32())),
    }


def write_trace(path, table, block_size=b"16"):
    metadata = {b"block_size": block_size} if block_size else {}
    pq.write_table(pa.table(table).replace_schema_metadata(metadata), path)
    return path


def scenario(gbps=25, *, moving=False, **fields):
    """Four engines, each on a node of its own."""
    document = {
        "name": "test", "engines": 4, "nodes": 4, "model": "llama-3-8b", "gpu": "h100", "seed": 5,
        "tiers": {"dram": {"share": 0.02}, "remote": {"share": 0.30}},
        "link": {"gbps": gbps} | ({"fluctuation": {"kind": "ar1", "sigma": 0.9, "phi": 0.9}} if moving else {}),
    }  # fmt: skip
    return Scenario.model_validate(document | fields)


def run(trace, name, **fields):
    return runs(trace, name, **fields)[name]


def runs(trace, *names, **fields):
    """Those that are named, or all."""
    return replay_document(trace, scenario(**fields), names or RUNS, lambda: 0.0)["runs"]


def first(trace, count):
    """Its first requests: enough where any trace would do."""
    parts = {name: getattr(trace, name)[:count] for name in ("t", "input_len", "session", "type")}
    return replace(trace, **parts, offsets=trace.offsets[: count + 1], ids=trace.ids[: trace.offsets[count]])


def external(name):
    """One of the traces that do not ship; skips where it is not there."""
    folder = Path(os.environ.get("TIERTUNE_TRACES") or ROOT.parent / "shared" / "traces")
    path = folder / f"{name}.parquet"
    if not path.is_file():
        pytest.skip(f"{name}.parquet is not there (set TIERTUNE_TRACES to its folder)")
    return path
