"""Scenarios are strict, and what this version does not simulate is refused at its place."""

import pytest

from replay.files import SCENARIOS
from tiertune_agent.replay.scenario import MODELS, Scenario
from tiertune_connector.documents import DocumentError, load_yaml, parse_yaml

GOOD = """\
name: small
engines: 4
nodes: 4
model: llama-3-8b
gpu: h100
tiers:
  dram: {share: 0.02}
  remote: {share: 0.3}
link: {gbps: 25}
"""


def parse(text):
    return parse_yaml(text, Scenario, name="s.yaml")


def refused(text):
    with pytest.raises(DocumentError) as error:
        parse(text)
    return error.value.problems


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load(path):
    """Every example is valid and named as its file."""
    assert load_yaml(path, Scenario).name == path.stem


def test_defaults_are_the_contracts():
    """What may be left out has the values of the contract."""
    scenario = parse(GOOD)
    assert (scenario.routing, scenario.gpu_cache_tokens, scenario.period_s, scenario.seed) == ("random", 0, 300.0, 1)
    assert (scenario.tiers.dram.eviction, scenario.tiers.remote.touch, scenario.tiers.disk.share) == ("lru", "all", 0.0)
    link = scenario.link
    assert (link.efficiency, link.latency_s, link.per_chunk_s, link.probe_s) == (0.9, 0.001, 0.0002, 30.0)
    assert link.bytes_per_s == 2.8125e9


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [("llama-3-70b", 327_680), ("llama-3-8b", 131_072), ("qwen-32b", 262_144), ("deepseek-v3", 70_272)],
)
def test_named_models_have_the_references_kv(name, kv_bytes):
    """KV bytes per token, bf16."""
    assert MODELS[name].kv_token_bytes == kv_bytes


def test_a_model_and_gpus_can_be_spelled_out():
    """A mapping stands where a name can."""
    scenario = parse(
        GOOD.replace("llama-3-8b", "{params: 1.0e+9, layers: 10, width: 1024, kv_heads: 2, head_dim: 64}").replace(
            "gpu: h100", "gpu: {flops: 100e12, utilisation: 0.4}"
        )
    )
    assert scenario.model.kv_token_bytes == 2 * 10 * 2 * 64 * 2
    assert scenario.gpu.utilisation == 0.4


@pytest.mark.parametrize(("kv_bytes", "token"), [(1, 65_536), (2, 131_072), (131_072, 131_072), (65_536, 65_536)])
def test_kv_bytes_beside_the_heads_are_of_a_value_or_of_a_token(kv_bytes, token):
    """2 (bf16) and 1 (fp8) can only be a value's: were they a token's, fetches would be all but free."""
    heads = f"layers: 32, width: 4096, kv_heads: 8, head_dim: 128, kv_bytes: {kv_bytes}"
    model = parse(GOOD.replace("llama-3-8b", f"{{params: 8.03e+9, {heads}}}")).model
    assert model.kv_token_bytes == token


def test_a_size_in_gib_counts_in_chunks():
    """1 GiB of 8 MiB chunks is 128 of them, whatever the trace."""
    scenario = parse(GOOD.replace("remote: {share: 0.3}", "remote: {gib: 1}"))
    assert scenario.tiers.remote.chunks(unique=10, chunk_bytes=8 * 2**20) == 128


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("nodes: 4", "nodes: 3", "s.yaml:1:1: 4 engines cannot be spread evenly over 3 nodes"),
        ("nodes: 4", "nods: 4", "s.yaml:3:1: nods: unknown key"),
        ("gpu: h100", "gpu: h900", "s.yaml:5:6: gpu: unknown name 'h900': use one of h100, "),
        ("model: llama-3-8b", "model: {params: 1, layers: 1, width: 1}", "s.yaml:4:8: model: give kv_bytes, or both"),
        ("llama-3-8b", "{params: 1, layers: 1, width: 1, kv_bytes: 2}", "s.yaml:4:8: model: kv_bytes 2 is a value's: "),
        ("{share: 0.02}", "{share: 0.02, gib: 3}", "s.yaml:7:9: tiers.dram: give either share or gib"),
        ("{share: 0.02}", "{}", "s.yaml:7:9: tiers.dram: give either share or gib"),
        ("{share: 0.02}", "{share: -1}", "s.yaml:7:17: tiers.dram.share: Input should be greater than or equal to 0"),
        ("{share: 0.02}", "{share: 0.02, eviction: lifo}", "s.yaml:7:33: tiers.dram.eviction: Input should be 'lru'"),
        ("gbps: 25", "gbps: .inf", "s.yaml:9:14: link.gbps: Input should be a finite number"),
        ("gbps: 25", "efficiency: 1", "s.yaml:9:7: link.gbps: Field required"),
        (
            "link:",
            "time_factor: 0\nlink:",
            "s.yaml:9:14: time_factor: Input should be greater than or equal to 0.0",
        ),
        ("link:", "period_s: 0.01\nlink:", "s.yaml:9:11: period_s: Input should be greater than or equal to 0.1"),
        ("link:", "routing: busiest\nlink:", "s.yaml:9:10: routing: Input should be 'random', 'round_robin', 'sticky'"),
        (
            "link:",
            "events: [{at_s: 1, for_s: 2, link: up}]\nlink:",
            "s.yaml:9:36: events.0.link: Input should be 'down'",
        ),
        ("link:", "events: [{at_s: 1, for_s: 2}]\nlink:", "s.yaml:9:10: events.0: nothing happens: give link_factor"),
        (
            "link:",
            "events: [{at_s: 1, for_s: 2, link: down, link_factor: 0.5}]\nlink:",
            "s.yaml:9:10: events.0: a link that is down has no link_factor",
        ),
        ("link: {gbps: 25}", "link: [", "s.yaml:10:1: not YAML"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(old, new, problem):
    """File, line, column, field, and what to mend."""
    assert old in GOOD
    assert any(told.startswith(problem) for told in refused(GOOD.replace(old, new))), refused(GOOD.replace(old, new))
